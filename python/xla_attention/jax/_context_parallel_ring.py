"""Ring attention: K and V move around the axis, one device per step, while each device attends to those that it has.

The ring is that of "Ring Attention with Blockwise Transformers for Near-Infinite Context" (Liu, Zaharia, Abbeel, 2023).
A step's transfer is issued before the attention of the step, which hides it. In the backward pass K and V move again,
and the gradients of K and V move with them in f32, one step behind, until they are back on their device.
"""

from collections.abc import Callable

import jax

from ._call import Array
from ._context_parallel_steps import (
    Config,
    Step,
    attend,
    axis_size,
    device_layout,
    make_step,
    merge,
    send,
    step_gradients,
)
from ._varlen_types import Cotangents, Gradients, Operands


def forward(config: Config, operands: Operands) -> tuple[Array, Array]:
    """The output in f32, and the log-sum-exp."""
    shift, make = _ring(config, operands)
    n, keys = axis_size(config.axis_name), (operands.k, operands.v)
    result = None
    for step in range(n):
        following = shift(keys) if step + 1 < n else None
        part = attend(make(step, keys))
        result = part if result is None else merge(result, part)
        keys = following
    return result


def backward(config: Config, operands: Operands, cotangents: Cotangents) -> Gradients:
    """The gradients in f32."""
    shift, make = _ring(config, operands)
    n, keys = axis_size(config.axis_name), (operands.k, operands.v)
    total = None
    for step in range(n):
        following = shift(keys) if step + 1 < n else None
        part = step_gradients(make(step, keys), cotangents)
        if total is None:
            total = part
        else:
            total = Gradients(total.dq + part.dq, total.dk + part.dk, total.dv + part.dv, total.dsinks)
        if n > 1:
            dk, dv = shift((total.dk, total.dv))
            total = total._replace(dk=dk, dv=dv)
        keys = following
    return total


def _ring(config: Config, operands: Operands) -> tuple[Callable, Callable[..., Step]]:
    """The transfer of two arrays to the next device, and the call of a step."""
    n, layout, causal = axis_size(config.axis_name), device_layout(config, operands), bool(config.options.causal)

    def shift(arrays: tuple[Array, Array]) -> tuple[Array, Array]:
        return send(config.axis_name, arrays, [(i, (i + 1) % n) for i in range(n)])

    def make(step: int, keys: tuple[Array, Array]) -> Step:
        if step == 0:
            return make_step(config, layout, operands, layout.own(), keys, causal=causal)
        source = jax.lax.rem(layout.stream.rank - step + n, n)
        ranges = layout.visiting(source, causal)
        # A sink counts once per row.
        return make_step(config, layout, operands, ranges, keys, causal=False, sinks=False)

    return shift, make
