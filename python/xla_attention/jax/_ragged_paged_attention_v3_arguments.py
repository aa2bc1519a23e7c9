"""Validation and conversion of the arguments of ragged_paged_attention_v3; errors name the argument."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ._attention import output_dtype
from ._call import Array, scale_operand, static_f32, static_i64
from ._packed_kv_cache import slots_fit

NAME = "ragged_paged_attention_v3"
# What a call may unpack of a custom_mask without a q_max: 256 MB of indices.
_MOST_MASK_ELEMENTS = 1 << 26


def score_scale(
    sm_scale: Array | float, q_scale: Array | float | None, k_scale: Array | float | None, num_kv_heads: int
) -> tuple[np.float32, Array | None]:
    """What multiplies q·k: the numbers among the arguments as one constant, and the arrays as one operand."""
    constant, operand, of_constant = 1.0, None, []
    for name, scale in (("sm_scale", sm_scale), ("q_scale", q_scale), ("k_scale", k_scale)):
        if scale is None:
            continue
        if isinstance(scale, jax.Array) or np.ndim(scale):
            factor = per_head_scale(name, scale, 1 if name == "sm_scale" else num_kv_heads)
            operand = factor if operand is None else operand * factor
        else:
            constant *= float(static_f32(name, scale))
            of_constant.append(name)
    with np.errstate(over="ignore", under="ignore"):
        constant = np.float32(constant)
    if not (np.isfinite(constant) and constant > 0):
        raise ValueError(f"{NAME}: {' * '.join(of_constant)} is {constant}, expected finite and > 0")
    return constant, operand


def per_head_scale(name: str, scale: Array | float, num_kv_heads: int) -> Array:
    scale = jnp.asarray(scale)
    if scale.size != 1 and scale.shape != (num_kv_heads,):
        expected = "one number" if name == "sm_scale" else f"one number or [Hkv={num_kv_heads}]"
        raise ValueError(f"{NAME}: {name} has shape {list(scale.shape)}, expected {expected}")
    return scale_operand(scale.reshape(-1))


def per_head_sinks(attention_sink: Array | float | None, num_heads: int) -> Array | None:
    if attention_sink is None:
        return None
    sinks = jnp.asarray(attention_sink, jnp.float32)
    if sinks.ndim == 0:
        return jnp.full((num_heads,), sinks)
    if sinks.shape != (num_heads,):
        raise ValueError(f"{NAME}: attention_sink has shape {list(sinks.shape)}, expected [Hq={num_heads}]")
    return sinks


def soft_cap_attribute(soft_cap: float | None) -> float | None:
    if soft_cap is None:
        return None
    soft_cap = float(static_f32("soft_cap", soft_cap))
    if not (np.isfinite(soft_cap) and soft_cap > 0):
        raise ValueError(f"{NAME}: soft_cap is {soft_cap}, expected finite and > 0, or None for no cap")
    return soft_cap


def max_pages_per_seq(pages_per_seq: int | None, cu_kv_lens: Array | None) -> int | None:
    if pages_per_seq is None:
        return None
    if cu_kv_lens is None:
        text = "expected None without cu_kv_lens: page_indices has as many per sequence as its length says"
        raise ValueError(f"{NAME}: pages_per_seq is {pages_per_seq}, {text}")
    pages_per_seq = int(static_i64("pages_per_seq", pages_per_seq))
    if pages_per_seq < 1:
        raise ValueError(f"{NAME}: pages_per_seq is {pages_per_seq}, expected >= 1")
    return pages_per_seq


def result_dtype(queries: np.dtype, out_dtype: Any) -> np.dtype:  # noqa: ANN401
    dtype = output_dtype(queries, out_dtype)
    own = {4: [jnp.float32, jnp.bfloat16, jnp.float16], 1: [jnp.bfloat16, jnp.float16]}
    expected = [jnp.dtype(x) for x in own.get(queries.itemsize, [queries])]
    if dtype not in expected:
        text = f"expected {' or '.join(map(str, expected))} with queries of {queries}; cast the result"
        raise NotImplementedError(f"{NAME}: out_dtype is {dtype}, {text}")
    return dtype


def validate_rows(queries: Array, keys: Array, values: Array, kv_cache: Array) -> None:
    if queries.ndim != 3:
        raise ValueError(f"{NAME}: queries has shape {list(queries.shape)}, expected [T, Hq, D]")
    rows, num_heads, head_dim = queries.shape
    if keys.ndim != 3 or keys.shape[::2] != (rows, head_dim):
        raise ValueError(f"{NAME}: keys has shape {list(keys.shape)}, expected [T={rows}, Hkv, D={head_dim}]")
    if values.shape != keys.shape:
        raise ValueError(f"{NAME}: values has shape {list(values.shape)}, expected that of keys, {list(keys.shape)}")
    if not keys.shape[1] or num_heads % keys.shape[1]:
        raise ValueError(f"{NAME}: queries has {num_heads} heads, expected a multiple of the keys' {keys.shape[1]}")
    for name, array in (("keys", keys), ("values", values)):
        if array.dtype != kv_cache.dtype:
            text = f"expected {kv_cache.dtype} as kv_cache has; paged_attention_update quantises keys and values"
            raise ValueError(f"{NAME}: {name} has dtype {array.dtype}, {text}")
    if not jnp.issubdtype(kv_cache.dtype, jnp.floating):
        text = "expected the queries' dtype, float8_e4m3fn or float8_e5m2"
        raise NotImplementedError(f"{NAME}: kv_cache has dtype {kv_cache.dtype}, {text}")
    if not slots_fit(kv_cache.shape):
        raise ValueError(f"{NAME}: kv_cache has shape {list(kv_cache.shape)}, expected at most 2^31 - 1 tokens")


def validate_metadata(
    kv_lens: Array, page_indices: Array, cu_q_lens: Array, distribution: Array, cu_kv_lens: Array | None
) -> None:
    if kv_lens.ndim != 1:
        raise ValueError(f"{NAME}: kv_lens has shape {list(kv_lens.shape)}, expected [S]")
    seqs = kv_lens.shape[0]
    for name, starts in (("cu_q_lens", cu_q_lens), ("cu_kv_lens", cu_kv_lens)):
        if starts is not None and starts.shape != (seqs + 1,):
            raise ValueError(f"{NAME}: {name} has shape {list(starts.shape)}, expected [S + 1 = {seqs + 1}]")
    if distribution.shape != (3,):
        raise ValueError(f"{NAME}: distribution has shape {list(distribution.shape)}, expected [3]")
    if page_indices.ndim != 1:
        raise ValueError(f"{NAME}: page_indices has shape {list(page_indices.shape)}, expected it to be flat")
    if cu_kv_lens is None and page_indices.shape[0] % max(seqs, 1):
        text = f"expected a multiple of S = {seqs}, or cu_kv_lens"
        raise ValueError(f"{NAME}: page_indices has shape {list(page_indices.shape)}, {text}")


def largest_tree(
    q_max: int | None,
    custom_mask: Array | None,
    causal: bool,
    sizes: tuple[int, int],
    aligned: bool,
    cu_kv_lens: Array | None,
) -> int | None:
    """The most rows of a sequence with a mask of its own, None without `custom_mask`; `sizes` are T and S."""
    if custom_mask is None:
        if q_max is not None:
            raise ValueError(f"{NAME}: q_max is {q_max}, expected None without custom_mask")
        return None
    if causal:
        raise ValueError(f"{NAME}: custom_mask is given with use_causal_mask, expected one of them")
    if aligned and cu_kv_lens is None:
        raise ValueError(f"{NAME}: mask_aligned_to_cu_kv is True, expected False without cu_kv_lens")
    rows, seqs = sizes
    if q_max is None:
        if seqs * rows * rows > _MOST_MASK_ELEMENTS:
            text = f"expected the most rows of a sequence: S * T * T is {seqs * rows * rows}"
            raise ValueError(f"{NAME}: q_max is None, {text}")
        return rows
    q_max = int(static_i64("q_max", q_max))
    if q_max < 1:
        raise ValueError(f"{NAME}: q_max is {q_max}, expected >= 1")
    return q_max


def reject_unsupported(xai_temperature_len: Any, softmax_dtype: Any) -> None:  # noqa: ANN401
    if xai_temperature_len is not None:
        text = "there is no temperature that grows with the position; multiply the queries by it"
        raise NotImplementedError(f"{NAME}: xai_temperature_len is {xai_temperature_len}, expected None: {text}")
    if softmax_dtype is not None and jnp.dtype(softmax_dtype) != jnp.float32:
        text = "expected None or float32, which the softmax is computed in"
        raise NotImplementedError(f"{NAME}: softmax_dtype is {jnp.dtype(softmax_dtype)}, {text}")
