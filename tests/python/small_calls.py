"""A small call for every option, type and layout of every function that the front-ends have, and what comes of it.

Numbers are proven in `tests/it`; these calls show that each argument arrives where it belongs. `test_small_calls.py`
makes them through JAX and through torch, eagerly and lazily.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np

from batches import batch, step, varlen
from oracle import (
    assert_flash_attn_varlen,
    assert_paged_attention,
    kv_cache_update_reference,
    kv_cache_update_split_reference,
    merge_attention_states_reference,
    rotated,
)

SEQUENCES = [(9, 9), (1, 40), (5, 30), (0, 9), (3, 0)]
SLOPES = np.linspace(0.01, 0.5, 8, dtype=np.float32)
SINKS = np.linspace(-2.0, 3.0, 8, dtype=np.float32)
PER_HEAD = {"k_scale": np.float32([0.5, 3.0]), "v_scale": np.float32([1.0, 0.25])}
SLOTS = np.int32([5, 0, -1, 30, 31, 32, 100, -(2**31)])
LAYOUTS = {"interleaved": 1, "stacked": 2, "per_page": 3}
# Half the distance of neighbouring numbers, relatively, times what is computed with them.
TOLERANCE = {"float16": 5e-3, "bfloat16": 4e-2, "float32": 1e-5}


class Call(NamedTuple):
    """One call of a function by its name, with arrays of NumPy."""

    function: str
    name: str
    arguments: tuple
    options: dict[str, Any]
    check: Callable[..., None]  # takes the results, raises AssertionError
    updates: tuple[int, ...] = ()  # arguments that the function with `_` behind its name changes, first results


def every_call() -> list[Call]:
    """All of them, by function."""
    return [*_paged(), *_varlen(), *_updates(), *_split_updates(), *_rotations(), *_steps(), *_merges()]


def _name(*parts) -> str:
    return " ".join("+".join(p) or "plain" if isinstance(p, dict) else str(p) for p in parts if p is not None)


def _numpy(values) -> tuple:
    return tuple(None if x is None else np.asarray(x) for x in values)


def _paged_call(operands, options, name):
    operands, options = _numpy(operands), {"scale": 0.125, **options}

    def check(out, lse):
        assert_paged_attention(out, lse, *operands, **_with_numbers(options))

    return Call("paged_attention", name, operands, {**options, "return_lse": True}, check)


def _with_numbers(options):
    """Options that change what is computed."""
    return {name: x for name, x in options.items() if name not in ("batch_invariant", "max_seqlen_q", "max_seqlen_k")}


_PAGED_OPTIONS = (
    {},
    {"sliding_window": 7},
    {"soft_cap": 3.0},
    {"alibi_slopes": SLOPES},
    {"alibi_slopes": np.linspace(0.0, 0.5, 6 * 8, dtype=np.float32).reshape(6, 8)},
    {"sinks": SINKS},
    {"q_scale": 0.5},
    {"k_scale": PER_HEAD["k_scale"]},
    {"v_scale": PER_HEAD["v_scale"]},
    {"batch_invariant": True},
)


def _paged():
    for options in _PAGED_OPTIONS:
        shapes = [np.shape(x) for x in options.values()]
        yield _paged_call(batch(SEQUENCES), options, _name(options, *shapes))
    for dtype, cache in (
        ("bfloat16", None),
        ("float16", None),
        ("bfloat16", "float8_e4m3fn"),
        ("float16", "float8_e5m2"),
    ):
        query, kv_cache, *rest = batch(SEQUENCES, heads=(9, 3), d=40, page_size=5, dtype=dtype)
        scales = {"k_scale": 0.5, "v_scale": 2.0} if cache else {}
        yield _paged_call((query, kv_cache.astype(cache or dtype), *rest), scales, _name(dtype, cache))


def _varlen_call(call, options, name):
    operands, given = call
    operands = _numpy(operands)
    given = {name: x if isinstance(x, (str, tuple)) else np.asarray(x) for name, x in given.items()} | options

    def check(out, lse):
        assert_flash_attn_varlen(out, lse, *operands, **_with_numbers(given))

    return Call("flash_attn_varlen", name, operands, {**given, "return_lse": True}, check)


_VARLEN_OPTIONS = (
    {},
    {"causal": True},
    {"causal": True, "top_left": True},
    {"window": (5, 3)},
    {"softcap": 3.0},
    {"softmax_scale": 0.3},
    {"alibi_slopes": SLOPES},
    {"alibi_slopes": np.linspace(0.0, 0.5, 5 * 8, dtype=np.float32).reshape(5, 8)},
    {"sinks": SINKS},
    {"leftpad_k": np.int32([0, 30, 2, 3, 0])},
    {"q_scale": 0.5},
    {"k_scale": PER_HEAD["k_scale"]},
    {"v_scale": PER_HEAD["v_scale"]},
    {"max_seqlen_q": 1, "max_seqlen_k": 5000},
)


def _varlen():
    for options in _VARLEN_OPTIONS:
        shapes = [np.shape(x) for x in options.values()]
        yield _varlen_call(varlen(SEQUENCES, unused=(2, 1), dv=40), options, _name(options, *shapes))
    for kv_layout in (None, *LAYOUTS):
        call = varlen(SEQUENCES, dtype="bfloat16", pages=16, kv_layout=kv_layout)
        yield _varlen_call(call, {"causal": True}, _name("pages", kv_layout))
    for dtype, kv_dtype in (
        ("bfloat16", None),
        ("float16", None),
        ("bfloat16", "float8_e4m3fn"),
        ("float16", "float8_e5m2"),
    ):
        call = varlen(SEQUENCES, heads=(9, 3), d=40, dtype=dtype, kv_dtype=kv_dtype)
        scales = {"k_scale": 0.5, "v_scale": 1.5} if kv_dtype else {}
        yield _varlen_call(call, {"causal": True, **scales}, _name(dtype, kv_dtype))


def _rows(*shape, dtype=np.float32, seed=0):
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32).astype(dtype)


def _cache(kv_layout, dtype=np.float32, *, pages=8, page_size=4, heads=2, d=16):
    shape = {
        "interleaved": (pages, page_size, 2 * heads, d),
        "stacked": (2, pages, page_size, heads, d),
        "per_page": (pages, 2, page_size, heads, d),
    }
    return _rows(*shape[kv_layout], dtype=dtype, seed=1)


def _same_bits(found, wanted):
    assert (found.dtype, found.shape) == (wanted.dtype, wanted.shape)
    np.testing.assert_array_equal(np.ascontiguousarray(found).view(np.uint8), wanted.view(np.uint8))


def _updates():
    plain, scaled = {}, {"k_scale": 0.5, "v_scale": np.float32([2.0, 0.25])}
    for kv_layout, dtype, scales in (
        *((name, np.float32, plain) for name in LAYOUTS),
        ("interleaved", np.float32, scaled),
        ("interleaved", np.float16, plain),
        ("interleaved", ml_dtypes.bfloat16, plain),
        ("stacked", ml_dtypes.float8_e4m3fn, scaled),
        ("per_page", ml_dtypes.float8_e5m2, scaled),
    ):
        rows = np.float32 if np.dtype(dtype).itemsize == 1 else dtype
        given = (_cache(kv_layout, dtype), 40 * _rows(8, 2, 16, dtype=rows), _rows(8, 2, 16, dtype=rows, seed=2), SLOTS)
        wanted = kv_cache_update_reference(*given, kv_layout=LAYOUTS[kv_layout], **scales)
        options = {"kv_layout": kv_layout, **scales}
        name = _name(np.dtype(dtype), kv_layout, scales)
        yield Call(
            "kv_cache_update", name, given, options, lambda found, wanted=wanted: _same_bits(found, wanted), (0,)
        )


def _split_updates():
    for dtype, scales in ((np.float32, {}), (ml_dtypes.float8_e5m2, {"k_scale": [0.5, 3.0], "v_scale": 2.0})):
        caches = tuple(_rows(8, 4, 2, d, dtype=dtype, seed=d) for d in (16, 24))
        rows = (_rows(8, 2, 16), _rows(8, 2, 24, seed=2), SLOTS)
        scales = {name: np.float32(scale) for name, scale in scales.items()}
        wanted = kv_cache_update_split_reference(*caches, *rows, **scales)

        def check(*found, wanted=wanted):
            for one, other in zip(found, wanted, strict=True):
                _same_bits(one, other)

        yield Call("kv_cache_update", _name("split", np.dtype(dtype)), (caches, *rows), scales, check, (0,))


def _rotations():
    positions = np.int32([0, 1, 2, 3, 9, 4, 50, -1])
    angles = np.arange(10)[:, None] * np.float32([1.0, 0.1, 0.01])
    cos_sin = np.float32(np.concatenate([np.cos(angles), np.sin(angles)], axis=1))
    for kv_layout, interleaved, dtype in (
        *((name, False, np.float32) for name in LAYOUTS),
        ("interleaved", True, np.float32),
        ("interleaved", False, ml_dtypes.bfloat16),
        ("interleaved", False, ml_dtypes.float8_e4m3fn),
    ):
        fp8 = np.dtype(dtype).itemsize == 1
        rows = np.float32 if fp8 else dtype
        scales = {"k_scale": np.float32([0.11, 3.0]), "v_scale": np.float32(0.25)} if fp8 else {}
        cache, query = _cache(kv_layout, dtype), _rows(8, 6, 16, dtype=rows)
        key, value = _rows(8, 2, 16, dtype=rows, seed=3), _rows(8, 2, 16, dtype=rows, seed=2)
        turned = [rotated(x, positions, cos_sin, interleaved) for x in (query, key)]
        near = TOLERANCE[np.dtype(rows).name]
        number = LAYOUTS[kv_layout]
        wanted = kv_cache_update_reference(cache, np.float32(turned[1]), value, SLOTS, kv_layout=number, **scales)

        def check(found_query, found, turned=turned[0], wanted=wanted, tolerance=near):
            np.testing.assert_allclose(found_query.astype(np.float64), turned, rtol=0, atol=tolerance)
            if wanted.dtype.itemsize > 1:
                np.testing.assert_allclose(found.astype(np.float64), wanted.astype(np.float64), rtol=0, atol=tolerance)
            else:  # The reference turns in float64: nearly halfway between two codes, the neighbour is right too.
                codes = [x.view(np.uint8).astype(int) for x in (np.ascontiguousarray(found), wanted)]
                assert np.abs(codes[0] - codes[1]).max() <= 1 and (codes[0] != codes[1]).mean() < 1e-3

        given = (cache, query, key, value, SLOTS, positions, cos_sin)
        options = {"kv_layout": kv_layout, "interleaved": interleaved, **scales}
        yield Call("rope_kv_cache_update", _name(np.dtype(dtype), kv_layout, interleaved), given, options, check, (0,))


def _steps():
    fp8 = {"k_scale": np.float32([0.01, 30.0]), "v_scale": 0.25}
    for options, types in (
        *(
            (options, {})
            for options in _PAGED_OPTIONS
            if options.keys() != {"k_scale"} and options.keys() != {"v_scale"}
        ),
        ({}, {"dtype": "bfloat16"}),
        ({"k_scale": 4.0, "v_scale": np.float32([0.5, 3.0])}, {"dtype": "float16"}),
        (fp8, {"dtype": "bfloat16", "cache": "float8_e4m3fn"}),
        (fp8, {"dtype": "float16", "cache": "float8_e5m2", "rows": "float32"}),
    ):
        scales = {name: scale for name, scale in options.items() if name in ("k_scale", "v_scale")}
        operands = _numpy(step(SEQUENCES, **types, **scales))
        cache = kv_cache_update_reference(operands[1], *operands[6:], **scales)
        given = {"scale": 0.125, **options}

        def check(out, lse, found, operands=operands, cache=cache, given=given):
            _same_bits(found, cache)
            assert_paged_attention(out, lse, operands[0], cache, *operands[2:6], **_with_numbers(given))

        name = _name(options, *(np.shape(x) for x in options.values()), *types.values())
        yield Call("paged_attention_update", name, operands, {**given, "return_lse": True}, check, (1,))


def _merges():
    for dtype in (np.float32, np.float16, ml_dtypes.bfloat16):
        states = [_rows(9, 4, 40, dtype=dtype), _rows(4, 9), _rows(9, 4, 40, dtype=dtype, seed=1), _rows(4, 9, seed=1)]
        states[1][0, :3], states[3][0, 2:5] = -np.inf, np.nan
        states[0][:3, 0] = np.nan
        wanted, near = merge_attention_states_reference(*states), TOLERANCE[np.dtype(dtype).name]

        def check(out, lse, wanted=wanted, tolerance=near):
            np.testing.assert_allclose(out.astype(np.float64), wanted[0], rtol=0, atol=tolerance)
            np.testing.assert_allclose(lse, wanted[1], rtol=1e-5, atol=1e-6)

        yield Call("merge_attention_states", str(np.dtype(dtype)), tuple(states), {}, check)
