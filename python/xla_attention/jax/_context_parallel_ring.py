"""Ring attention: K and V move around the axis, one device per step, while each device attends to those that it has.

The ring is that of "Ring Attention with Blockwise Transformers for Near-Infinite Context" (Liu, Zaharia, Abbeel, 2023).
A step's transfers run beside its attention. In the backward pass K and V move again, and the gradients of K and V move
with them in f32, one step behind, until they are back on their device.
"""

import functools

import jax

from ._call import Array
from ._context_parallel_layouts import Layout
from ._context_parallel_states import State, merge
from ._context_parallel_steps import (
    Config,
    Step,
    add_gradients,
    attend_partially,
    device_layout,
    make_step,
    pack,
    step_gradients,
    unpack,
)
from ._varlen_types import Cotangents, Gradients, Operands


def forward(config: Config, operands: Operands) -> State:
    """The output in f32, and the log-sum-exp."""
    layout, keys = device_layout(config, operands), (operands.k, operands.v)
    buffer, result = pack(keys), None
    for step in range(config.num_devices):
        received = _shift(config, buffer) if step + 1 < config.num_devices else None
        parts = [attend_partially(x) for x in _calls(config, layout, operands, step, keys)]
        result = functools.reduce(merge, parts if result is None else [result, *parts])
        if received is not None:
            buffer, result = _end_step((received, result))
            keys = unpack(buffer, keys)
    return result


def backward(config: Config, operands: Operands, cotangents: Cotangents) -> Gradients:
    """The gradients in f32."""
    n, layout, keys = config.num_devices, device_layout(config, operands), (operands.k, operands.v)
    buffer = pack(keys)
    dq = dkeys = dsinks = None
    for step in range(n):
        received = _shift(config, buffer) if step + 1 < n else None
        dkeys_received = None if dkeys is None else _shift(config, dkeys)
        calls = _calls(config, layout, operands, step, keys)
        part = add_gradients([step_gradients(x, cotangents) for x in calls])
        dkeys = pack((part.dk, part.dv))
        if step == 0:
            dq, dsinks = part.dq, part.dsinks
        else:
            dq, dkeys = dq + part.dq, dkeys_received + dkeys
        if received is not None:
            buffer, dq, dkeys = _end_step((received, dq, dkeys))
            keys = unpack(buffer, keys)
    dk, dv = unpack(_shift(config, dkeys) if n > 1 else dkeys, keys)
    return Gradients(dq, dk, dv, dsinks)


def _shift(config: Config, buffer: Array) -> Array:
    """The buffer of the previous device."""
    n = config.num_devices
    return jax.lax.ppermute(buffer, config.axis_name, [(i, (i + 1) % n) for i in range(n)])


def _end_step(arrays: tuple) -> tuple:
    """The arrays, none of which is used before all are there.

    XLA does not know how long a custom call takes. Without this order it issues the transfers of all steps first, and
    only the last one runs beside an attention.
    """
    return jax.lax.optimization_barrier(arrays)


def _calls(config: Config, layout: Layout, operands: Operands, step: int, keys: tuple[Array, Array]) -> list[Step]:
    if step == 0:
        ranges = layout.own()
    else:
        n = config.num_devices
        ranges = layout.visiting(jax.lax.rem(layout.stream.rank - step + n, n))
    # A sink counts once per row, and the very first call has all rows.
    return [make_step(config, layout, operands, x, keys, sinks=step == i == 0) for i, x in enumerate(ranges)]
