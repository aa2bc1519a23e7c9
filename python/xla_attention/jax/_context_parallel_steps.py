"""What the strategies of context-parallel attention have in common: one call of a step, and sums over steps."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from .._options import length_hint
from ._call import Array
from ._context_parallel_layouts import LAYOUTS, Layout, Ranges, Stream
from ._context_parallel_states import AxisName
from ._flash_attn_varlen import gradients
from ._varlen import forward
from ._varlen_types import Cotangents, Gradients, Operands, Options


class Config(NamedTuple):
    """The compile-time constants."""

    axis_name: AxisName
    num_devices: int
    strategy: str
    layout: str
    max_seqlen: int | None  # of the whole stream
    options: Options  # of a call over the whole stream


class Step(NamedTuple):
    """One call: this device's rows beside some keys."""

    options: Options
    operands: Operands


def device_layout(config: Config, operands: Operands) -> Layout:
    """The layout of the stream as this device sees it."""
    n, rows, options = config.num_devices, operands.q.shape[0], config.options
    # The operator reads starts as their running maximum, and lengths up to the next start.
    starts = jax.lax.cummax(jnp.clip(operands.cu_seqlens_q, 0, n * rows))
    seqused = None if operands.seqused_q is None else jnp.clip(operands.seqused_q, 0, jnp.diff(starts))
    has_window = max(options.window_left, options.window_right) >= 0
    is_positional = bool(has_window) or operands.alibi_slopes is not None
    rank = jax.lax.axis_index(config.axis_name)
    return LAYOUTS[config.layout](Stream(starts, seqused, n, rows, rank, bool(options.causal), is_positional))


def make_step(
    config: Config, layout: Layout, operands: Operands, ranges: Ranges, keys: Sequence[Array], *, sinks: bool = True
) -> Step:
    """The call over `ranges` of this device's rows and of `keys`, K and V."""
    options, slopes = config.options, operands.alibi_slopes
    if slopes is not None and slopes.ndim == 2:
        slopes = jnp.repeat(slopes, ranges.entries, axis=0)
    if config.max_seqlen is not None:
        longest = layout.longest(config.max_seqlen)
        is_whole = keys[0].shape[0] > operands.q.shape[0]
        options = options._replace(
            max_seqlen_q=length_hint(longest), max_seqlen_k=length_hint(config.max_seqlen if is_whole else longest)
        )
    step = Operands(
        operands.q,
        *keys,
        ranges.cu_seqlens_q,
        ranges.cu_seqlens_k,
        seqused_k=ranges.seqused_k,
        seqused_q=ranges.seqused_q,
        alibi_slopes=slopes,
        sinks=operands.sinks if sinks else None,
        q_offset=ranges.q_offset,
    )
    return Step(options._replace(causal=options.causal.dtype.type(ranges.causal)), step)


def attend(step: Step) -> tuple[Array, Array]:
    """The output and the log-sum-exp."""
    return forward(*step)


def attend_partially(step: Step) -> tuple[Array, Array]:
    """The output in f32, and the log-sum-exp, to be merged."""
    if jnp.dtype(step.options.out_dtype) == step.operands.q.dtype:
        step = step._replace(options=step.options._replace(out_dtype=jnp.dtype(jnp.float32)))
    out, lse = forward(*step)
    return out.astype(jnp.float32), lse  # queries of 8 bits have no output of f32


def step_gradients(step: Step, cotangents: Cotangents) -> Gradients:
    """The step's part of the gradients, in f32.

    With the output and the log-sum-exp of all steps, the backward target computes exactly what the keys of this step
    contribute: the weight of a key is ``exp(s - lse)`` whatever other keys there are.
    """
    return gradients(step.options._replace(f32_gradients=True), step.operands, cotangents)


def add_gradients(parts: Sequence[Gradients]) -> Gradients:
    """The sums over calls; only the first one has the gradients of the sinks, or each of other rows."""
    total = parts[0]
    for part in parts[1:]:
        dsinks = total.dsinks if part.dsinks is None else total.dsinks + part.dsinks
        total = Gradients(total.dq + part.dq, total.dk + part.dk, total.dv + part.dv, dsinks)
    return total


def pack(arrays: Sequence[Array]) -> Array:
    """Two arrays of one dtype in one buffer: XLA overlaps one collective at a time with a computation."""
    first, second = arrays
    if first.shape == second.shape:
        # XLA's kernel for jnp.stack takes twice as long.
        return jnp.concatenate([first, second]).reshape(2, *first.shape)
    return jnp.concatenate([first.reshape(-1), second.reshape(-1)])


def unpack(buffer: Array, like: Sequence[Any]) -> tuple[Array, Array]:
    """The arrays of `pack`, with the shapes of `like`."""
    first, second = like
    if first.shape == second.shape:
        return buffer[0], buffer[1]
    return buffer[: first.size].reshape(first.shape), buffer[first.size :].reshape(second.shape)


def send(axis_name: AxisName, arrays: Sequence[Array], pairs: Sequence[tuple[int, int]]) -> tuple[Array, Array]:
    """Two arrays as one buffer along ``(source, destination)`` pairs of ranks; zeros where there is no source."""
    return unpack(jax.lax.ppermute(pack(arrays), axis_name, pairs), arrays)
