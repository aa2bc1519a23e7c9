"""Context-parallel attention with a sliding window: each device fetches the keys just before its own rows, its halo.

A window that is shorter than a device's rows takes one transfer from the previous device, a longer one takes one from
each device that it reaches. Then there is one call, whose last query stands at the last key. Layout "contiguous" only.
"""

import jax
import jax.numpy as jnp

from ._call import Array
from ._context_parallel_layouts import Ranges
from ._context_parallel_steps import Config, Step, attend, device_layout, make_step, send, step_gradients
from ._varlen_types import Cotangents, Gradients, Operands


def forward(config: Config, operands: Operands) -> tuple[Array, Array]:
    """The output and the log-sum-exp."""
    return attend(_step(config, operands))


def backward(config: Config, operands: Operands, cotangents: Cotangents) -> Gradients:
    """The gradients in f32."""
    grads = step_gradients(_step(config, operands), cotangents)
    n, sizes = config.num_devices, _halo_sizes(config, operands)
    halo = end = sum(sizes)
    total = [x[halo:] for x in (grads.dk, grads.dv)]
    for distance, size in enumerate(sizes, 1):
        begin = end - size
        pairs = [(i + distance, i) for i in range(n - distance)]
        received = send(config.axis_name, [x[begin:end] for x in (grads.dk, grads.dv)], pairs)
        total = [x.at[-size:].add(y) for x, y in zip(total, received, strict=True)]
        end = begin
    return grads._replace(dk=total[0], dv=total[1])


def _halo_sizes(config: Config, operands: Operands) -> list[int]:
    """The rows that the window reaches on each earlier device, nearest first."""
    rows, left = operands.q.shape[0], int(config.options.window_left)
    sizes = (min(rows, left - distance * rows) for distance in range(config.num_devices - 1))
    return [size for size in sizes if size > 0]


def _step(config: Config, operands: Operands) -> Step:
    n, rows = config.num_devices, operands.q.shape[0]
    own_keys, sizes = (operands.k, operands.v), _halo_sizes(config, operands)
    # Own rows are put in place while the halo travels. Then only the halo is copied. Without the barrier XLA makes one
    # concatenation of both, which copies all rows after the transfer.
    halo = end = sum(sizes)
    keys = jax.lax.optimization_barrier([jnp.pad(x, ((halo, 0), (0, 0), (0, 0))) for x in own_keys])
    for distance, size in enumerate(sizes, 1):
        pairs = [(i, i + distance) for i in range(n - distance)]
        received = send(config.axis_name, [x[-size:] for x in own_keys], pairs)
        end -= size
        keys = [x.at[end : end + size].set(y) for x, y in zip(keys, received, strict=True)]
    layout = device_layout(config, operands)
    (own,) = layout.own()
    stream = layout.stream
    # The rows of the stream that the keys are; those before the stream's first row came from no device.
    first = stream.rank * rows - halo

    def key_rows(stream_rows: Array) -> Array:
        return jnp.clip(stream_rows - first, jnp.maximum(-first, 0), keys[0].shape[0])

    starts = key_rows(stream.cu_seqlens)
    used = None
    if stream.seqused is not None:
        used = jnp.maximum(key_rows(stream.cu_seqlens[:-1] + stream.seqused) - starts[:-1], 0)
    ranges = Ranges(True, own.cu_seqlens_q, starts, own.seqused_q, used)
    return make_step(config, layout, operands, ranges, keys)
