"""Calls of every operator, for any front-end: operands, options, what the results have to be, and StableHLO text."""

import functools
from collections.abc import Callable
from typing import NamedTuple

import ml_dtypes
import numpy as np

from oracle import (
    assert_flash_attn_varlen,
    assert_paged_attention,
    kv_cache_update_reference,
    kv_cache_update_split_reference,
    merge_attention_states_reference,
    rotated,
)

BF16, FP8 = np.dtype(ml_dtypes.bfloat16), np.dtype(ml_dtypes.float8_e4m3fn)


class Call(NamedTuple):
    """One call. Operands and results are in the order of the target's signature; an operand left out is None."""

    name: str
    target: str
    operands: tuple
    results: tuple  # of (shape, dtype)
    attributes: str  # as StableHLO has them
    check: Callable  # takes the results as NumPy arrays, raises AssertionError
    function: str  # of xla_attention.jax and xla_attention.torch
    arguments: tuple  # of that function, by place ...
    options: dict  # ... and by name
    order: tuple = (0,)  # which result of the target each result of the function is
    aliases: tuple = ()  # results that may share the memory of the operand of the same number


def _normal(seed, *shape, dtype=np.float32):
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32).astype(dtype)


def _i32(*values):
    return np.array(values, np.int32)


def _equal(found, wanted):
    assert found.dtype == wanted.dtype and found.shape == wanted.shape, (found.dtype, found.shape)
    np.testing.assert_array_equal(found.astype(np.float32), wanted.astype(np.float32))


def _all_equal(wanted):
    def check(*found):
        for one, other in zip(found, wanted, strict=True):
            _equal(one, other)

    return check


def simple_add(dtype=np.float32, target="xla_gpu_simple_add"):
    a, b = (np.arange(12).reshape(3, 4) * factor for factor in (1, 10))
    a, b = a.astype(dtype), b.astype(dtype)
    results, check = ((a.shape, a.dtype),), _all_equal([(a + b).astype(dtype)])
    return Call(f"{target} {np.dtype(dtype)}", target, (a, b), results, "", check, "simple_add", (a, b), {})


def paged_attention(dtype=np.float32, kv_dtype=np.float32, *, with_sinks=False, window=None):
    """Two sequences and an empty slot; unused pages hold NaN, unused table entries nonsense."""
    query, cache = _normal(1, 6, 4, 64, dtype=dtype), _normal(2, 6, 4, 4, 64, dtype=kv_dtype)
    cache[0], cache[2] = np.nan, np.nan
    lens, tables = _i32(7, 4, 99), np.array([[3, 1, -9], [5, 2**31 - 1, 77], [0, 0, 0]], np.int32)
    starts, count = _i32(0, 3, 4, -7), _i32(2)
    given = (query, cache, lens, tables, starts, count)
    options = {"scale": 0.125}
    optional = [None] * 5  # alibi_slopes, sinks, q_scale, k_scale, v_scale
    if window is not None:
        options["sliding_window"] = window
    if with_sinks:
        options |= {"sinks": _normal(3, 4), "k_scale": np.float32([0.5, 2.0]), "v_scale": np.float32([0.25])}
        optional = [None, options["sinks"], None, options["k_scale"], options["v_scale"]]
    attributes = (
        f"batch_invariant = false, scale = 1.25e-1 : f32, sliding_window = {window or -1} : i64, soft_cap = 0.0 : f32"
    )
    return Call(
        f"paged_attention {np.dtype(dtype)} over {np.dtype(kv_dtype)}",
        "xla_gpu_paged_attention",
        (*given, *optional),
        ((query.shape, query.dtype), ((4, 6), np.dtype(np.float32))),
        attributes,
        lambda out, lse: assert_paged_attention(out, lse, *given, **options),
        "paged_attention",
        given,
        {**options, "return_lse": True},
        (0, 1),
    )


_FLASH = (
    "batch_invariant = false, causal = true, kv_layout = {} : i64, max_seqlen_k = 0 : i64, max_seqlen_q = 0 : i64, "
    "softcap = 0.0 : f32, softmax_scale = 1.25e-1 : f32, top_left = false, window_left = -1 : i64, "
    "window_right = -1 : i64"
)


def flash_attn_varlen_packed():
    """Causal, packed keys, values of another head dimension, a slope for each head."""
    q, k, v = _normal(4, 8, 4, 64), _normal(5, 8, 2, 64), _normal(6, 8, 2, 32)
    starts, slopes = _i32(0, 5, 7), np.float32([0.5, 0.25, 0.125, 0.0625])
    options = {"causal": True, "alibi_slopes": slopes}
    return Call(
        "flash_attn_varlen packed float32",
        "xla_gpu_flash_attn_varlen",
        (q, k, v, starts, starts, None, None, None, None, slopes),
        (((8, 4, 32), q.dtype), ((4, 8), np.dtype(np.float32))),
        _FLASH.format(0),
        lambda out, lse: assert_flash_attn_varlen(out, lse, q, k, v, starts, **options),
        "flash_attn_varlen",
        (q, k, v, starts),
        {**options, "return_lse": True},
        (0, 1),
    )


def flash_attn_varlen_paged():
    """Causal, K and V in the pages of one buffer, lengths by seqused_k."""
    q, cache = _normal(7, 5, 4, 64, dtype=BF16), _normal(8, 4, 8, 4, 64, dtype=BF16)
    starts, used, table = _i32(0, 4, 5), _i32(9, 3), np.array([[2, 0], [3, -5]], np.int32)
    options = {"causal": True, "seqused_k": used, "block_table": table, "kv_layout": "interleaved"}
    return Call(
        "flash_attn_varlen paged bfloat16",
        "xla_gpu_flash_attn_varlen",
        (q, cache, np.zeros(0, BF16), starts, np.zeros(0, np.int32), used, table),
        ((q.shape, q.dtype), ((4, 5), np.dtype(np.float32))),
        _FLASH.format(1),
        lambda out, lse: assert_flash_attn_varlen(out, lse, q, cache, None, starts, None, **options),
        "flash_attn_varlen",
        (q, cache, None, starts),
        {**options, "return_lse": True},
        (0, 1),
    )


_SLOTS = _i32(5, -1, 11, 100, 0)


def kv_cache_update(cache_dtype=np.float32):
    """With a slot of padding and one outside; an 8-bit cache with scales."""
    cache = _normal(9, 3, 4, 4, 16, dtype=cache_dtype)
    key, value = 100 * _normal(10, 5, 2, 16), _normal(11, 5, 2, 16)
    scales = {"k_scale": np.float32([0.5, 3.0]), "v_scale": np.float32([0.25])} if cache_dtype == FP8 else {}
    wanted = kv_cache_update_reference(cache, key, value, _SLOTS, **scales)
    given = (cache, key, value, _SLOTS)
    return Call(
        f"kv_cache_update into {np.dtype(cache_dtype)}",
        "xla_gpu_kv_cache_update",
        (*given, *scales.values()),
        ((cache.shape, cache.dtype),),
        "kv_layout = 1 : i64",
        _all_equal([wanted]),
        "kv_cache_update",
        given,
        scales,
        aliases=(0,),
    )


def kv_cache_update_split():
    caches = tuple(_normal(12 + i, 3, 4, 2, d) for i, d in enumerate((16, 24)))
    rows = tuple(_normal(14 + i, 5, 2, d) for i, d in enumerate((16, 24)))
    return Call(
        "kv_cache_update_split float32",
        "xla_gpu_kv_cache_update_split",
        (*caches, *rows, _SLOTS),
        tuple((cache.shape, cache.dtype) for cache in caches),
        "",
        _all_equal(kv_cache_update_split_reference(*caches, *rows, _SLOTS)),
        "kv_cache_update",
        (caches, *rows, _SLOTS),
        {},
        (0, 1),
        aliases=(0, 1),
    )


def rope_kv_cache_update(cache_dtype=np.float32, *, interleaved=False):
    """The first 8 of 16 elements of a head turn."""
    cache, query = _normal(16, 3, 4, 2, 16, dtype=cache_dtype), _normal(17, 3, 2, 16)
    key, value, angles = _normal(18, 3, 1, 16), _normal(19, 3, 1, 16), _normal(20, 5, 4)
    table = np.concatenate([np.cos(angles), np.sin(angles)], axis=1)
    slots, positions = _i32(6, -1, 9), _i32(4, 1, 0)
    scales = {"k_scale": np.float32([2.0]), "v_scale": np.float32([0.25])} if cache_dtype == FP8 else {}
    turned = rotated(key, positions, table, interleaved=interleaved).astype(np.float32)
    wanted = kv_cache_update_reference(cache, turned, value, slots, **scales)

    def check(cache_out, query_out):
        exact = rotated(query, positions, table, interleaved=interleaved)
        np.testing.assert_allclose(query_out, exact, atol=1e-6)
        if cache_dtype == FP8:
            _equal(cache_out, wanted)
        else:
            np.testing.assert_allclose(cache_out, wanted, atol=1e-6)

    given = (cache, query, key, value, slots, positions, table)
    return Call(
        f"rope_kv_cache_update into {np.dtype(cache_dtype)}",
        "xla_gpu_rope_kv_cache_update",
        (*given, *scales.values()),
        tuple((x.shape, x.dtype) for x in (cache, query)),
        f"interleaved = {str(interleaved).lower()}, kv_layout = 1 : i64",
        check,
        "rope_kv_cache_update",
        given,
        {"interleaved": interleaved, **scales},
        (1, 0),
        aliases=(0,),
    )


def paged_attention_update(dtype=np.float32, kv_dtype=np.float32):
    """The two sequences of `paged_attention`: three new tokens and one, and two rows of padding."""
    query, cache, lens, tables, starts, count = paged_attention(dtype, kv_dtype).arguments
    key, value = 10 * _normal(25, 6, 2, 64, dtype=dtype), _normal(26, 6, 2, 64, dtype=dtype)
    slots = _i32(4 * 1, 4 * 1 + 1, 4 * 1 + 2, 4 * 5 + 3, -1, 24)
    cache[1, :3], cache[5, 3] = np.nan, np.nan
    scales = {"k_scale": np.float32([10.0, 5.0]), "v_scale": np.float32([0.25])} if kv_dtype == FP8 else {}
    wanted = kv_cache_update_reference(cache, key, value, slots, **scales)
    given, options = (query, cache, lens, tables, starts, count, key, value, slots), {"scale": 0.125, **scales}

    def check(out, cache_out, lse):
        assert_paged_attention(out, lse, query, wanted, lens, tables, starts, count, **options)
        _equal(cache_out, wanted)

    return Call(
        f"paged_attention_update {np.dtype(dtype)} over {np.dtype(kv_dtype)}",
        "xla_gpu_paged_attention_update",
        (*given, *((None, None, None, *scales.values()) if scales else ())),
        ((query.shape, query.dtype), (cache.shape, cache.dtype), ((4, 6), np.dtype(np.float32))),
        "batch_invariant = false, scale = 1.25e-1 : f32, sliding_window = -1 : i64, soft_cap = 0.0 : f32",
        check,
        "paged_attention_update",
        given,
        {**options, "return_lse": True},
        (0, 2, 1),
        aliases=(1,),
    )


def merge_attention_states(dtype=np.float32):
    parts = (_normal(21, 3, 2, 8, dtype=dtype), _normal(22, 2, 3), _normal(23, 3, 2, 8, dtype=dtype), _normal(24, 2, 3))
    parts[1][0, 1] = -np.inf
    exact, exact_lse = merge_attention_states_reference(*parts)

    def check(out, lse):
        np.testing.assert_allclose(out.astype(np.float32), exact, atol=1e-6 if dtype == np.float32 else 2e-2)
        np.testing.assert_allclose(lse, exact_lse, rtol=1e-6, atol=1e-6)

    return Call(
        f"merge_attention_states {np.dtype(dtype)}",
        "xla_gpu_merge_attention_states",
        parts,
        tuple((x.shape, x.dtype) for x in parts[:2]),
        "",
        check,
        "merge_attention_states",
        parts,
        {},
        (0, 1),
    )


@functools.cache
def every_call():
    """Each operator in float32, and where it has other types, one more."""
    return (
        simple_add(),
        simple_add(np.int32),
        simple_add(BF16),
        paged_attention(),
        paged_attention(BF16, FP8, with_sinks=True, window=3),
        flash_attn_varlen_packed(),
        flash_attn_varlen_paged(),
        kv_cache_update(),
        kv_cache_update(FP8),
        kv_cache_update_split(),
        rope_kv_cache_update(),
        rope_kv_cache_update(FP8, interleaved=True),
        paged_attention_update(),
        paged_attention_update(BF16, FP8),
        merge_attention_states(),
        merge_attention_states(BF16),
    )
