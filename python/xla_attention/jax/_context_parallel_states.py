"""Attention states, an output and its log-sum-exp, that the devices of a mesh axis exchange and merge."""

import functools
import operator
from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax import lax

from ._call import Array

# Outputs and log-sum-exps travel as integers of the outputs' size: XLA may convert floating-point numbers of 16 bits to
# f32 and back, which changes those halves of a log-sum-exp that are bits of a NaN.
_BITS = {2: jnp.uint16, 4: jnp.uint32}
# From 0.10 on, JAX's types can say that the result is the same on every device.
_INVARIANT = {"to": "invarying"} if jax.__version_info__ >= (0, 10) else {}

AxisName = str | tuple[str, ...]
State = tuple[Array, Array]  # [T, H, D] and f32[H, T]


def num_devices_along(function: str, axis_name: AxisName) -> int:
    """The devices of a mesh axis, or of several; where there is none, an error that names `function`."""
    names = axis_name if isinstance(axis_name, tuple) else (axis_name,)
    if not names or not all(isinstance(name, str) for name in names):
        text = "expected the name of a mesh axis, or a tuple of names"
        raise TypeError(f"{function}: axis_name is {axis_name!r}, {text}")
    try:
        return int(lax.psum(1, axis_name))
    except NameError:
        text = "expected a mesh axis of the jax.shard_map that the call is in"
        raise ValueError(f"{function}: axis_name is {axis_name!r}, {text}") from None


def all_gather(array: Array, axis_name: AxisName, *, axis: int = 0, tiled: bool = False) -> Array:
    """The devices' arrays side by side; to JAX's types the same on every device, where JAX can say so."""
    return lax.all_gather(array, axis_name, axis=axis, tiled=tiled, **_INVARIANT)


def exchange_states(state: State, axis_name: AxisName, num_devices: int, scatter: bool) -> list[State]:
    """The states of all devices, by one collective.

    Parameters
    ----------
    state
        This device's.
    axis_name, num_devices
        The mesh axis, and its size n.
    scatter
        Whether each device needs only its own H / n heads.

    Returns
    -------
    list of State
        One per device; with `scatter` of H / n heads.
    """
    out, lse = state
    rows, heads, dim = out.shape
    bits = _BITS[out.dtype.itemsize]
    tail = lax.bitcast_convert_type(lse.T, bits).reshape(rows, heads, 4 // out.dtype.itemsize)
    packed = jnp.concatenate([lax.bitcast_convert_type(out, bits), tail], axis=-1)
    if scatter:
        packed = packed.reshape(rows, num_devices, heads // num_devices, packed.shape[-1])
        packed = lax.all_to_all(packed, axis_name, 1, 0)
    else:
        packed = all_gather(packed, axis_name)
    outs = lax.bitcast_convert_type(packed[..., :dim], out.dtype)
    # By shifts, which XLA fuses with the merge: a bitcast of two numbers to one would be a kernel.
    halves = [packed[..., dim + i].astype(jnp.uint32) << 16 * i for i in range(packed.shape[-1] - dim)]
    lses = lax.bitcast_convert_type(functools.reduce(operator.or_, halves), jnp.float32)
    return [(outs[i], lses[i].T) for i in range(num_devices)]


def merge(first: State, second: State) -> State:
    """The state over two sets of keys, from the f32 outputs and the log-sum-exps of each."""
    lse = jnp.logaddexp(first[1], second[1])
    # Where neither has a key, the difference of two infinities is NaN.
    weights = [jnp.where(jnp.isneginf(part), 0.0, jnp.exp(part - lse)).T[..., None] for _, part in (first, second)]
    return first[0] * weights[0] + second[0] * weights[1], lse


def merge_states(states: Sequence[State]) -> State:
    """Merge states over disjoint sets of keys, in f32 with one rounding to the outputs' dtype."""
    out, lse = functools.reduce(merge, ((out.astype(jnp.float32), lse) for out, lse in states))
    return out.astype(states[0][0].dtype), lse
