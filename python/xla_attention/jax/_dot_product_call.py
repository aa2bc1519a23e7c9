"""The two ways to compute dot_product_attention: the kernels of `flash_attn_varlen`, and JAX's own function.

`_masks` and `_segment_ids` turn masks and segment ids into what the kernels can express. A NotImplementedError of
`by_kernels` names what they cannot; its caller decides whether `by_jax` is next.
"""

import functools
import inspect
import re
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from .._options import kv_layout_number, length_hint
from ._call import Array, static_f32
from ._flash_attn_varlen import attend
from ._masks import UNLIMITED, Visible, gather_visible, promised, recognise
from ._segment_ids import is_padding_id, key_ranges_of, segment_mask, segments_of
from ._varlen_types import Operands, Options

NAME = "dot_product_attention"
# Queries per sequence up to which a mask that all queries share becomes a bias: to copy keys and values takes longer.
_MAX_BIAS_QUERIES = 64
# As it is now, so that a program may put our function in its place (docs/jax_libraries.md#keras).
_of_jax = jax.nn.dot_product_attention


class Arguments(NamedTuple):
    """The arguments of a call, with a batch dimension."""

    query: Array  # [B, T, N, H]
    key: Array  # [B, S, K, H]
    value: Array
    bias: Array | None  # [B, N, T, S], each of which may be 1
    mask: Array | np.ndarray | None  # bool, likewise
    scale: Any
    is_causal: bool
    query_seq_lengths: Array | None  # i32[B]
    key_value_seq_lengths: Array | None
    local_window_size: tuple[int, int] | None
    return_residual: bool
    segment_ids: tuple[Any, Any] | None  # [B, T] and [B, S], one object if they are the same
    padding_segment_id: int | None
    max_segments: int | None
    sinks: Array | None
    softcap: np.float32
    mask_form: str | None
    k_start: Array | None  # i32[B, T]
    k_end: Array | None

    @property
    def sizes(self) -> tuple:
        """B, N, T, S."""
        batch, rows, heads, _ = self.query.shape
        return batch, heads, rows, self.key.shape[1]

    @property
    def is_empty(self) -> bool:
        """Whether there is no query or no key, and hence no mask."""
        return any(isinstance(size, int) and size == 0 for size in self.sizes)


class TracedScaleError(TypeError):
    """A scale that is traced, which JAX's function accepts."""


def by_kernels(arguments: Arguments) -> Array | tuple[Array, Array]:
    """The results of `flash_attn_varlen`; a NotImplementedError for what it does not compute."""
    arguments, visible = _apply_mask(arguments)
    arguments, is_padding_of_ids = _masks_as_bias(arguments)
    bias = _bias_operand(arguments)
    query, key, value = arguments[:3]
    query, scale = _positive_scale(query, arguments.scale)
    local = arguments.local_window_size
    if local is not None and min(local) < 0:
        raise NotImplementedError(f"{NAME}: local_window_size is {local}, expected >= 0, or None for no window")
    windows = [visible.window, local or (UNLIMITED, UNLIMITED), (UNLIMITED, 0 if arguments.is_causal else UNLIMITED)]
    left, right = _narrowest(*windows)
    rows = _smallest(arguments.query_seq_lengths, visible.rows)
    keys = _smallest(arguments.key_value_seq_lengths, visible.keys)
    ranges = _within_ranges(visible.ranges, (arguments.k_start, arguments.k_end))
    sequences, valid, is_padding = _sequences(arguments, (left, right), rows, keys, visible.first_key, ranges)
    is_padding = is_padding_of_ids if is_padding is None else is_padding
    valid = [x for x in (visible.valid, valid) if x is not None]
    options = Options(
        batch_invariant=np.bool_(False),
        causal=np.bool_(right == 0),
        deterministic=np.bool_(False),
        kv_layout=kv_layout_number(None),
        max_seqlen_k=_length_hint(key.shape[1]),
        max_seqlen_q=_length_hint(query.shape[1]),
        softcap=arguments.softcap,
        softmax_scale=scale,
        top_left=np.bool_(True),
        window_left=np.int64(left),
        window_right=np.int64(right),
        out_dtype=query.dtype,
        dense=True,
    )
    try:
        operands = Operands(query, key, value, **sequences, sinks=arguments.sinks, bias=bias)
        out, lse = attend(options, operands, return_lse=True)
    except (ValueError, NotImplementedError) as error:
        if not str(error).startswith(_TARGET):
            raise
        raise type(error)(_translate(str(error))) from None
    if valid:
        # Not `where`: its gradient would be 0 in the rows that are not valid.
        factor = jnp.where(functools.reduce(jnp.logical_and, valid), 1, jnp.nan)
        out = out * factor.astype(out.dtype)[:, None, None, None]
        lse = lse * factor.astype(lse.dtype)[None, :, None]
    if not arguments.return_residual:
        return out
    if visible.rows is not None and arguments.sinks is not None:
        # The rows that a mask hides are no padding, and still have the sink.
        is_hidden = visible.rows[:, None] <= jnp.arange(query.shape[1])
        if arguments.query_seq_lengths is not None:
            is_hidden &= jnp.arange(query.shape[1]) < arguments.query_seq_lengths[:, None]
        lse = jnp.where(is_hidden, arguments.sinks[:, None, None], lse)
    if is_padding is not None:
        lse = jnp.where(is_padding, -jnp.inf, lse)  # also with sinks
    return out, jax.lax.stop_gradient(jnp.transpose(lse, (1, 2, 0)).astype(key.dtype))


def _apply_mask(arguments: Arguments) -> tuple[Arguments, Visible]:
    """The keys that the mask shows; the keys themselves may change their order."""
    mask, sizes = arguments.mask, arguments.sizes
    if mask is None or arguments.is_empty:
        return arguments, Visible()
    has_bias = arguments.bias is not None
    if isinstance(mask, np.ndarray):
        visible = recognise(mask, sizes)
        if visible is None or (has_bias and visible.ranges != (None, None)):
            return _hidden_by_bias(arguments, mask), Visible()
        return arguments, visible
    if mask.shape[1] != 1:
        return _hidden_by_bias(arguments, mask), Visible()
    if arguments.mask_form is not None and not (has_bias and arguments.mask_form == "ranges"):
        return arguments, promised(mask, arguments.mask_form, sizes)
    has_other_masks = arguments.is_causal or arguments.local_window_size or arguments.segment_ids is not None
    has_other_masks = has_other_masks or (arguments.k_start, arguments.k_end) != (None, None)
    if mask.shape[2] == 1 and not has_other_masks and not has_bias and not _has_few_queries(arguments):
        shown = mask[:, 0, 0]
        if arguments.key_value_seq_lengths is not None:
            shown = shown & (jnp.arange(sizes[3]) < arguments.key_value_seq_lengths[:, None])
        key, value, count = gather_visible(shown, arguments.key, arguments.value)
        return arguments._replace(key=key, value=value, key_value_seq_lengths=None), Visible(keys=count)
    return _hidden_by_bias(arguments, mask), Visible()


def _has_few_queries(arguments: Arguments) -> bool:
    """Whether a bias takes less time than a copy of keys and values: for the steps of a decoder, above all."""
    rows = arguments.sizes[2]
    return isinstance(rows, int) and rows <= _MAX_BIAS_QUERIES


def _hidden_by_bias(arguments: Arguments, mask: Array | np.ndarray) -> Arguments:
    """The arguments with a bias of -inf where the mask ``[B, N, T, S]``, any of which may be 1, hides a key."""
    bias = jnp.zeros((), arguments.query.dtype) if arguments.bias is None else arguments.bias
    return arguments._replace(bias=jnp.where(mask, bias, -jnp.inf))


def _masks_as_bias(arguments: Arguments) -> tuple[Arguments, Array | None]:
    """Segment ids and ranges of keys become part of the bias, where there is one. Also which queries are padding."""
    masks = [] if arguments.bias is None or arguments.is_empty else _own_masks(arguments)
    if not masks:
        return arguments, None
    arguments = _hidden_by_bias(arguments, functools.reduce(jnp.logical_and, masks))
    is_padding = None
    if arguments.segment_ids is not None and arguments.padding_segment_id is not None:
        is_padding = is_padding_id(arguments.segment_ids[0], arguments.padding_segment_id)
    return arguments._replace(segment_ids=None, k_start=None, k_end=None), is_padding


def _bias_operand(arguments: Arguments) -> Array | None:
    """The bias ``[B or 1, N or 1, T, S]``, of the query's dtype or f32."""
    bias = arguments.bias
    if bias is None:
        return None
    if bias.dtype != arguments.query.dtype:
        bias = bias.astype(jnp.float32)
    return jnp.broadcast_to(bias, (*bias.shape[:2], *arguments.sizes[2:]))


def _sequences(
    arguments: Arguments,
    window: tuple[int, int],
    rows: Array | None,
    keys: Array | None,
    first_key: Array | None,
    ranges: tuple[Array | None, Array | None],
) -> tuple[dict[str, Array | None], Array | None, Array | None]:
    """The metadata of the call's sequences, which entries of the batch are valid, and which rows are padding."""
    whole = {"seqused_q": rows, "seqused_k": keys, "leftpad_k": first_key, "k_start": ranges[0], "k_end": ranges[1]}
    if arguments.segment_ids is None or arguments.is_empty:
        return whole, None, None
    is_pair = arguments.segment_ids[0] is not arguments.segment_ids[1]
    has_ranges = ranges != (None, None)
    if (is_pair or has_ranges) and not all(isinstance(size, int) for size in arguments.sizes):
        what = "a pair of segment_ids" if is_pair else "segment_ids with ranges of keys"
        raise NotImplementedError(f"{NAME}: {what} with symbolic sizes is not supported")
    if has_ranges or (is_pair and window != (UNLIMITED, UNLIMITED)):
        # Windows and ranges count positions in the row, not in the segment, so the row stays one sequence.
        *of_ids, is_padding, valid = key_ranges_of(NAME, arguments.segment_ids, arguments.padding_segment_id)
        k_start, k_end = _within_ranges(ranges, of_ids)
        return whole | {"k_start": k_start, "k_end": k_end}, valid, is_padding
    segments = segments_of(NAME, arguments.segment_ids, arguments.padding_segment_id, arguments.max_segments)

    def within(position: Array | None, starts: Array, lengths: Array) -> Array | None:
        """A position in a row, counted from the start of each segment."""
        return None if position is None else jnp.clip(position[:, None] - starts[:, :-1], 0, lengths)

    used_q, used_k = (
        lengths if limit is None else within(limit, starts, lengths)
        for limit, starts, lengths in (
            (rows, segments.starts_q, segments.lengths_q),
            (keys, segments.starts_k, segments.lengths_k),
        )
    )
    sequences = {
        "cu_seqlens_q": segments.starts_q,
        "cu_seqlens_k": segments.starts_k,
        "seqused_q": used_q,
        "seqused_k": used_k,
        "leftpad_k": within(first_key, segments.starts_k, segments.lengths_k),
    }
    return sequences, segments.valid, None


def by_jax(arguments: Arguments, implementation: str) -> Array | tuple[Array, Array]:
    """The results of JAX's function, with segment ids and ranges of keys as a mask."""
    for name, given in (("sinks", arguments.sinks is not None), ("softcap", arguments.softcap != 0)):
        if given:
            raise NotImplementedError(f"{NAME}: {name} is not supported by jax.nn.dot_product_attention")
    options = {"return_residual": True} if arguments.return_residual else {}
    if options and "return_residual" not in inspect.signature(_of_jax).parameters:
        raise NotImplementedError(f"{NAME}: return_residual with jax.nn.dot_product_attention needs jax >= 0.8.1")
    own = _own_masks(arguments)
    in_segment = functools.reduce(jnp.logical_and, own) if own else None
    mask = arguments.mask
    if in_segment is not None:
        mask = in_segment if mask is None else jnp.logical_and(mask, in_segment)
    results = _of_jax(
        *arguments[:4],
        None if mask is None else jnp.asarray(mask),
        scale=arguments.scale,
        is_causal=arguments.is_causal,
        query_seq_lengths=arguments.query_seq_lengths,
        key_value_seq_lengths=arguments.key_value_seq_lengths,
        local_window_size=arguments.local_window_size,
        implementation=implementation,
        **options,
    )
    if in_segment is None:
        return results
    # JAX has neither segment ids nor ranges, hence no rule of its own for rows without a key in them: they are 0.
    has_keys = in_segment.any(-1)[:, 0, :, None]
    out, *residual = results if options else (results,)
    out = jnp.where(has_keys[..., None], out, 0)
    return (out, jnp.where(has_keys, residual[0], -jnp.inf)) if residual else out


def _own_masks(arguments: Arguments) -> list[Array]:
    """Segment ids and ranges of keys as masks ``bool[B, 1, T, S]``."""
    masks = []
    if arguments.segment_ids is not None:
        masks.append(segment_mask(arguments.segment_ids, arguments.padding_segment_id))
    key = jnp.arange(arguments.sizes[3], dtype=jnp.int32)
    if arguments.k_start is not None:
        masks.append((arguments.k_start[:, :, None] <= key)[:, None])
    if arguments.k_end is not None:
        masks.append((key < arguments.k_end[:, :, None])[:, None])
    return masks


def _within_ranges(*ranges: tuple[Array | None, Array | None]) -> tuple[Array | None, Array | None]:
    """The ranges of keys within all of these, whose sides may be None."""
    starts, ends = ([x for x in side if x is not None] for side in zip(*ranges, strict=True))
    return functools.reduce(jnp.maximum, starts) if starts else None, _smallest(*ends)


def _length_hint(length: Any) -> np.int64:  # noqa: ANN401
    """The hint for a dense dimension; a symbolic one (jax.export) is unknown."""
    return length_hint(length if isinstance(length, int) else 0)


def _positive_scale(query: Array, scale: Any) -> tuple[Array, np.float32]:  # noqa: ANN401
    """The query and the scale; the sign of a scale that is not positive goes to the query, which is exact."""
    if isinstance(scale, jax.core.Tracer):
        raise TracedScaleError(f"{NAME}: scale is traced, expected a number that is known when the program is compiled")
    scale = static_f32(f"{NAME}: scale", scale)
    if not np.isfinite(scale):
        raise NotImplementedError(f"{NAME}: scale is {scale}, expected a finite number")
    if scale > 0:
        return query, scale
    return query * np.sign(scale).astype(query.dtype), np.abs(scale) if scale else np.float32(1)


def _narrowest(*windows: tuple[int, int]) -> list[int]:
    """The window that all windows have in common."""
    sides = zip(*windows, strict=True)
    return [min((x for x in side if x != UNLIMITED), default=UNLIMITED) for side in sides]


def _smallest(*lengths: Array | None) -> Array | None:
    given = [x for x in lengths if x is not None]
    return functools.reduce(jnp.minimum, given) if given else None


# This function's arguments by the operands of flash_attn_varlen.
_TARGET = "xla_gpu_flash_attn_varlen: "
_OPERANDS = {
    "q": "query",
    "k": "key",
    "v": "value",
    "seqused_q": "query_seq_lengths",
    "seqused_k": "key_value_seq_lengths",
}


def _translate(text: str) -> str:
    """An error of flash_attn_varlen with the names of this function's arguments."""
    text = re.sub(rf"\b({'|'.join(_OPERANDS)})\b", lambda word: _OPERANDS[word[0]], text.removeprefix(_TARGET))
    return f"{NAME}: {text}"
