"""Small valid calls of every front-end function: one for each option, dtype and layout.

The tests in `tests/it` verify the numerics. These calls verify that a front-end passes on every argument: their results
have to be those of the same call through the C interface (`expected_results.py`). `test_jax_calls.py` and
`test_torch_calls.py` make them on every device, `tests/matrix` in every runtime.
"""

import functools
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np

from batches import batch, converted, latent, latent_step, step, varlen
from expected_results import LAYOUTS, expected_results

SEQUENCES = [(9, 9), (1, 40), (5, 30), (0, 9), (3, 0)]
SLOPES = np.linspace(0.01, 0.5, 8, dtype=np.float32)
SINKS = np.linspace(-2.0, 3.0, 8, dtype=np.float32)
PER_HEAD = np.float32([0.5, 3.0])
SLOTS = np.int32([5, 0, -1, 30, 31, 32, 100, -(2**31)])
BF16, E4M3, E5M2 = map(np.dtype, (ml_dtypes.bfloat16, ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e5m2))
# Functions with exact results. The tolerances hold for the others, on any device, against the CPU.
EXACT = ("simple_add", "kv_cache_update", "gather_kv_cache")
TOLERANCE = {"float32": 2e-5, "float16": 5e-3, "bfloat16": 4e-2, "float8_e4m3fn": 0.13, "float8_e5m2": 0.26, "int8": 0}


# Options that change no result: (call, options, attribute in the program).
ATTRIBUTE_ONLY = [
    ("paged_attention: plain", {"batch_invariant": True}, "batch_invariant = true"),
    ("flash_attn_varlen: plain", {"max_seqlen_q": 8}, "max_seqlen_q = 8 : i64"),
    ("flash_attn_varlen: plain", {"max_seqlen_k": 64}, "max_seqlen_k = 64 : i64"),
    ("flash_attn_varlen: plain", {"batch_invariant": True}, "batch_invariant = true"),
    ("paged_attention_update: plain", {"batch_invariant": True}, "batch_invariant = true"),
    ("mla_paged_attention: plain", {"batch_invariant": True}, "batch_invariant = true"),
    ("mla_paged_attention: plain", {"max_seqlen_q": 8}, "max_seqlen_q = 8 : i64"),
    ("mla_paged_attention: plain", {"max_seqlen_k": 64}, "max_seqlen_k = 64 : i64"),
]


class Call(NamedTuple):
    """One call of a front-end function."""

    function: str
    name: str
    arguments: dict[str, Any]  # by parameter name, NumPy arrays
    updates: str | None = None  # the parameter that the last results alias, the cache

    def check(self, *actual):
        """Assert that the results are those of the C interface."""
        results = expected_results(self.function, self.arguments)
        for place, (result, expected) in enumerate(zip(actual, results, strict=True)):
            assert (result.dtype, result.shape) == (expected.dtype, expected.shape)
            if self.function in EXACT:
                np.testing.assert_array_equal(bits(result), bits(expected))
                continue
            dtypes = {expected.dtype}
            if place == 0 and expected.dtype == np.float32:
                # GPU kernels round the probabilities to the query's dtype even if the attention's result is f32.
                dtypes.update(self.arguments[name].dtype for name in ("query", "q") if name in self.arguments)
            tolerance = max(TOLERANCE[dtype.name] for dtype in dtypes)
            result, expected = (x.astype(np.float64) for x in (result, expected))
            np.testing.assert_allclose(result, expected, rtol=tolerance, atol=tolerance)

    def updated(self, operands):
        """The arrays among `operands`, by parameter name, that the last results alias: a cache and its scales."""
        return flatten([operands[self.updates], operands.get("kv_scale_cache")])

    def __str__(self):
        return f"{self.function}: {self.name}"

    @property
    def has_64_bits(self):
        return any(x.dtype.itemsize == 8 for x in self.arguments.values() if isinstance(x, np.ndarray))


@functools.cache
def every_call(seed: int = 0) -> dict[str, Call]:
    """All calls by name; another seed gives other numbers in the same shapes."""
    makers = (
        _adds,
        _paged,
        _varlen,
        _updates,
        _split_updates,
        _rotations,
        _steps,
        _merges,
        _gathers,
        _latents,
        _latent_steps,
        _quantized,
    )
    calls = [call for maker in makers for call in maker(seed)]
    named = {str(call): call for call in calls}
    assert len(named) == len(calls), "two calls have one name"
    return named


@functools.cache
def plain_calls() -> dict[str, Call]:
    """The first call of each function, and those with a cache in two buffers or with pages; all are f32."""
    firsts = {}
    for name, call in every_call().items():
        firsts.setdefault(call.function, name)
    split = [name for name in every_call() if name.endswith((": split float32", ": split float32 plain"))]
    return {name: every_call()[name] for name in (*firsts.values(), *split, "flash_attn_varlen: pages interleaved")}


def bits(array):
    """The bytes of an array, to compare NaN and zeros exactly."""
    return np.ascontiguousarray(array).view(np.uint8)


def tree_map(function, value):
    """A function applied to every array in nested tuples and dictionaries."""
    if isinstance(value, tuple):
        return tuple(tree_map(function, x) for x in value)
    if isinstance(value, dict):
        return {name: tree_map(function, x) for name, x in value.items()}
    return function(value) if isinstance(value, np.ndarray | np.generic) else value


def flatten(results) -> list:
    """The arrays of nested tuples and lists, without None."""
    if not isinstance(results, tuple | list):
        return [] if results is None else [results]
    return [x for result in results for x in flatten(result)]


def _name(*parts) -> str:
    return " ".join("+".join(p) or "plain" if isinstance(p, dict) else str(p) for p in parts if p is not None)


def _shapes(options) -> list:
    return [np.shape(x) for x in options.values() if np.ndim(x) > 1]


def _seeded(options, seed):
    """The options, with f32 arrays scaled by a factor that depends on the seed."""
    factor = np.float32(1 + seed / 4)
    is_real = {name: getattr(x, "dtype", None) == np.float32 for name, x in options.items()}
    return {name: x * factor if is_real[name] else x for name, x in options.items()}


def _rows(*shape, dtype=np.float32, seed=0):
    return converted(np.random.default_rng(seed).standard_normal(shape).astype(np.float32), dtype)


def _adds(seed):
    for dtype in (np.float32, np.float16, BF16, np.int8, np.uint8, np.int32, np.float64, np.int64):
        a, b = (np.arange(factor, 13 * factor, factor).reshape(3, 4).astype(dtype) for factor in (1 + seed, 10))
        yield Call("simple_add", str(np.dtype(dtype)), {"a": a, "b": b})
    for shape in ((), (2, 0, 3)):
        yield Call("simple_add", str(shape), {"a": _rows(*shape), "b": _rows(*shape, seed=1)})


def key_ranges(queries):
    """Bounds of the keys of each query row; some are past the keys, and some hold none."""
    rows = np.arange(len(queries), dtype=np.int32)
    starts = rows * 7 % 23 - 3
    return {"k_start": starts, "k_end": starts + rows * 5 % 19 - 1}


def tree_mask(q_max):
    """Random bits for the trees of six sequences; those of more rows have none."""
    bits = np.random.default_rng(q_max).integers(-(2**31), 2**31, (6, q_max, -(-q_max // 32)))
    return {"tree_mask": bits.astype(np.int32)}


def score_bias(sequences, *shape, rows=20, keys=50, dtype=np.float32):
    """A bias ``[sequences or 1, 8 or 1, rows, keys]``, -inf in some elements."""
    bias = _rows(*(shape or (sequences, 8)), rows, keys, seed=5)
    return converted(np.where(np.abs(bias) > 2.2, -np.inf, bias).astype(np.float32), dtype)


PAGED = ("query", "kv_cache", "context_lens", "block_tables", "query_start_loc", "num_seqs")
_SCORES = (
    {},
    {"sliding_window": 7},
    {"soft_cap": 3.0},
    {"alibi_slopes": SLOPES},
    {"alibi_slopes": np.linspace(0.0, 0.5, 6 * 8, dtype=np.float32).reshape(6, 8)},
    {"sinks": SINKS},
    {"q_scale": 0.5},
    {"k_scale": PER_HEAD},
    {"v_scale": PER_HEAD},
    {"batch_invariant": True},
    {"num_seqs": 5},
    key_ranges(batch(SEQUENCES)[0]),
    {"k_end": key_ranges(batch(SEQUENCES)[0])["k_end"]},
    tree_mask(9),
    {"sliding_window": 7, **tree_mask(4)},
    {**key_ranges(batch(SEQUENCES)[0]), **tree_mask(40)},
)


def _paged_call(operands, options, name, seed):
    arguments = dict(zip(PAGED, operands, strict=True))
    return Call("paged_attention", name, {**arguments, "scale": 0.125, **_seeded(options, seed), "return_lse": True})


# The dtypes of the queries, the cache and the result; None where it follows from the queries.
_DTYPES = (
    ("bfloat16", None, None),
    ("float16", None, None),
    ("bfloat16", "float8_e4m3fn", None),
    ("float16", "float8_e5m2", None),
    ("float8_e4m3fn", None, None),
    ("float8_e4m3fn", None, "float16"),
    ("bfloat16", None, "float32"),
    ("float16", "float8_e5m2", "float32"),
)


def _paged(seed):
    for options in _SCORES:
        yield _paged_call(batch(SEQUENCES, seed=seed), options, _name(options, *_shapes(options)), seed)
    yield _paged_call(batch([(0, 0)], spare_rows=0, seed=seed), {}, "no row and no key", seed)
    for dtype, cache, out_dtype in _DTYPES:
        query, kv_cache, *rest = batch(SEQUENCES, heads=(9, 3), d=40, page_size=5, dtype=dtype, seed=seed)
        options = {"k_scale": 0.5, "v_scale": 2.0} if cache else {}
        options |= {"out_dtype": np.dtype(out_dtype)} if out_dtype else {}
        operands = query, converted(kv_cache, cache or dtype), *rest
        yield _paged_call(operands, options, _name(dtype, cache, out_dtype), seed)


def _varlen_call(call, options, name, seed):
    operands, lengths = call
    arguments = dict(zip(("q", "k", "v", "cu_seqlens_q", "cu_seqlens_k"), operands, strict=True))
    arguments = {name: x for name, x in arguments.items() if x is not None or name == "v"}
    return Call("flash_attn_varlen", name, {**arguments, **lengths, **_seeded(options, seed), "return_lse": True})


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
    {"causal": True, "q_offset": np.int32([30, -2, 0, 5, 9])},
    key_ranges(varlen(SEQUENCES, unused=(2, 1))[0][0]),
    {"causal": True, "k_start": key_ranges(varlen(SEQUENCES, unused=(2, 1))[0][0])["k_start"]},
    {"bias": score_bias(5)},
    {"causal": True, "softcap": 3.0, "bias": score_bias(5, 1, 1, keys=31)},
    {"q_scale": 0.5},
    {"k_scale": PER_HEAD},
    {"v_scale": PER_HEAD},
    {"max_seqlen_q": 1, "max_seqlen_k": 5000, "dropout_p": 0.0},
)


def _varlen(seed):
    for options in _VARLEN_OPTIONS:
        call = varlen(SEQUENCES, unused=(2, 1), dv=40, seed=seed)
        yield _varlen_call(call, options, _name(options, *_shapes(options)), seed)
    for kv_layout in (None, *LAYOUTS):
        call = varlen(SEQUENCES, dtype="float32" if kv_layout else "bfloat16", pages=16, kv_layout=kv_layout, seed=seed)
        yield _varlen_call(call, {"causal": True}, _name("pages", kv_layout), seed)
    (*operands, _), _ = varlen([(n, n) for n, _ in SEQUENCES], seed=seed)
    yield _varlen_call(((*operands, None), {}), {"causal": True}, "cu_seqlens_k omitted", seed)
    (*operands, _), lengths = varlen(SEQUENCES, pages=8, seed=seed)
    ends = 100 + np.cumsum([0, *lengths.pop("seqused_k")], dtype=np.int32)
    yield _varlen_call(((*operands, ends), lengths), {"causal": True}, "pages, lengths from cu_seqlens_k", seed)
    for dtype, kv_dtype, out_dtype in _DTYPES:
        call = varlen(SEQUENCES, heads=(9, 3), d=40, dtype=dtype, kv_dtype=kv_dtype, seed=seed)
        options = {"k_scale": 0.5, "v_scale": 1.5} if kv_dtype or dtype == "float8_e4m3fn" else {}
        options |= {"out_dtype": np.dtype(out_dtype)} if out_dtype else {}
        yield _varlen_call(call, {"causal": True, **options}, _name(dtype, kv_dtype, out_dtype), seed)


def _cache(kv_layout, dtype=np.float32, *, seed, pages=8, page_size=4, heads=2, d=16):
    shape = {
        "interleaved": (pages, page_size, 2 * heads, d),
        "stacked": (2, pages, page_size, heads, d),
        "per_page": (pages, 2, page_size, heads, d),
    }
    return _rows(*shape[kv_layout], dtype=dtype, seed=1 + seed)


def _updates(seed):
    plain, scaled = {}, {"k_scale": 0.5, "v_scale": np.float32([2.0, 0.25])}
    for kv_layout, dtype, options in (
        *((name, np.float32, plain) for name in LAYOUTS),
        ("interleaved", np.float32, scaled),
        ("interleaved", np.float32, {"k_scale": PER_HEAD}),
        ("interleaved", np.float16, plain),
        ("interleaved", BF16, plain),
        ("stacked", E4M3, scaled),
        ("per_page", E5M2, scaled),
    ):
        rows, scales = np.float32 if np.dtype(dtype).itemsize == 1 else dtype, _seeded(options, seed)
        key, value = 40 * _rows(8, 2, 16, dtype=rows, seed=seed), _rows(8, 2, 16, dtype=rows, seed=2 + seed)
        operands = _cache(kv_layout, dtype, seed=seed), key, value, np.roll(SLOTS, seed)
        arguments = dict(zip(("kv_cache", "key", "value", "slot_mapping"), operands, strict=True))
        name = _name(np.dtype(dtype), kv_layout, scales)
        yield Call("kv_cache_update", name, {**arguments, "kv_layout": kv_layout, **scales}, "kv_cache")


def _split_updates(seed):
    for dtype, options in ((np.float32, {}), (E5M2, {"k_scale": PER_HEAD, "v_scale": np.float32(2.0)})):
        caches = tuple(_rows(8, 4, 2, d, dtype=dtype, seed=d + seed) for d in (16, 24))
        rows = _rows(8, 2, 16, seed=seed), _rows(8, 2, 24, seed=2 + seed), np.roll(SLOTS, seed)
        scales = _seeded(options, seed)
        arguments = dict(zip(("kv_cache", "key", "value", "slot_mapping"), (caches, *rows), strict=True))
        yield Call("kv_cache_update", _name("split", np.dtype(dtype)), arguments | scales, "kv_cache")


def _rotations(seed):
    slots, positions = np.roll(SLOTS, seed), np.roll(np.int32([0, 1, 2, 3, 9, 4, 50, -1]), -seed)
    angles = np.arange(10)[:, None] * np.float32([1.0, 0.1, 0.01]) * (1 + seed)
    cos_sin = np.float32(np.concatenate([np.cos(angles), np.sin(angles)], axis=1))
    for kv_layout, interleaved, dtype in (
        *((name, False, np.float32) for name in LAYOUTS),
        ("interleaved", True, np.float32),
        ("interleaved", False, BF16),
        ("interleaved", False, E4M3),
    ):
        fp8 = np.dtype(dtype).itemsize == 1
        rows = np.dtype(np.float32 if fp8 else dtype)
        scales = {"k_scale": np.float32([0.11, 3.0]), "v_scale": np.float32(0.25)} if fp8 else {}
        cache, query = _cache(kv_layout, dtype, seed=seed), _rows(8, 6, 16, dtype=rows, seed=seed)
        key, value = _rows(8, 2, 16, dtype=rows, seed=3 + seed), _rows(8, 2, 16, dtype=rows, seed=2 + seed)
        arguments = {"kv_cache": cache, "query": query, "key": key, "value": value, "slot_mapping": slots}
        arguments |= {"positions": positions, "cos_sin": cos_sin, "kv_layout": kv_layout, "interleaved": interleaved}
        name = _name(np.dtype(dtype), kv_layout, interleaved)
        yield Call("rope_kv_cache_update", name, arguments | scales, "kv_cache")


def _steps(seed):
    fp8 = {"k_scale": np.float32([0.01, 30.0]), "v_scale": 0.25}
    for options, types in (
        *((options, {}) for options in _SCORES if not options.keys() & {"k_scale", "v_scale"}),
        ({}, {"dtype": "bfloat16"}),
        ({"k_scale": 4.0, "v_scale": PER_HEAD}, {"dtype": "float16"}),
        (fp8, {"dtype": "bfloat16", "cache": "float8_e4m3fn"}),
        (fp8, {"dtype": "float16", "cache": "float8_e5m2", "rows": "float32"}),
    ):
        options = {"scale": 0.125, **_seeded(options, seed)}
        scales = {name: scale for name, scale in options.items() if name in ("k_scale", "v_scale")}
        operands = step(SEQUENCES, **types, **scales, seed=seed)
        arguments = dict(zip((*PAGED, "key", "value", "slot_mapping"), operands, strict=True))
        named = {name: x for name, x in options.items() if name != "scale"}
        name = _name(named, *_shapes(named), *types.values())
        yield Call("paged_attention_update", name, {**arguments, **options, "return_lse": True}, "kv_cache")


def quantized(cache, dtype, seed=0):
    """Random codes and scales of a cache of the shape of `cache`."""
    generator = np.random.default_rng(77 + seed)
    codes = generator.integers(-127, 128, cache.shape).astype(np.int8)
    scales = generator.uniform(0.2, 2.0, cache.shape[:-1]).astype(np.float32) / (127 if dtype == np.int8 else 448)
    if dtype == np.int8:
        return codes, scales
    return converted(np.float32(448) * codes / 127, dtype), scales


# The dtypes of the queries, the cache and the result, and options.
_QUANTIZED = (
    ("bfloat16", np.dtype(np.int8), None, {}),
    ("float16", E4M3, None, {"sliding_window": 7, "sinks": SINKS}),
    ("float16", np.dtype(np.int8), "float32", {"alibi_slopes": SLOPES, "soft_cap": 3.0, "q_scale": PER_HEAD}),
    ("bfloat16", E4M3, "float32", {"batch_invariant": True}),
)


def _quantized(seed):
    for dtype, cache_dtype, out_dtype, options in _QUANTIZED:
        name, options = _name("scales", dtype, cache_dtype, out_dtype, options), _seeded(options, seed)
        options |= {"out_dtype": np.dtype(out_dtype)} if out_dtype else {}
        query, kv_cache, *sequences = batch(SEQUENCES, dtype=dtype, seed=seed)
        cache, scales = quantized(kv_cache, cache_dtype, seed)
        options |= {"kv_scale_cache": scales}
        yield _paged_call((query, cache, *sequences), options, name, 0)
        query, kv_cache, *rest = step(SEQUENCES, dtype=dtype, seed=seed)
        cache, scales = quantized(kv_cache, cache_dtype, seed)
        arguments = dict(zip((*PAGED, "key", "value", "slot_mapping"), (query, cache, *rest), strict=True))
        arguments |= {"scale": 0.125, **options, "kv_scale_cache": scales, "return_lse": True}
        yield Call("paged_attention_update", name, arguments, "kv_cache")
    for kv_layout, rows, dtype in zip(LAYOUTS, (np.float32, BF16, np.float16), (np.int8, E4M3, np.int8), strict=True):
        cache, scales = quantized(_cache(kv_layout, seed=seed), np.dtype(dtype), seed)
        key, value = 40 * _rows(8, 2, 16, seed=seed), _rows(8, 2, 16, seed=2 + seed)
        operands = cache, converted(key, rows), converted(value, rows), np.roll(SLOTS, seed)
        arguments = dict(zip(("kv_cache", "key", "value", "slot_mapping"), operands, strict=True))
        arguments |= {"kv_layout": kv_layout, "kv_scale_cache": scales}
        name = _name("scales", np.dtype(rows), np.dtype(dtype), kv_layout)
        yield Call("kv_cache_update", name, arguments, "kv_cache")
        tables, lens = np.int32([[3, 1, 4], [0, 2, 2], [4, -1, 2**31 - 1]]), np.int32([9, -2, 2**31 - 1])
        arguments = {"kv_cache": cache, "block_tables": tables, "context_lens": lens, "capacity": 23}
        arguments |= {"kv_layout": kv_layout, "kv_scale_cache": scales, "dtype": np.dtype(rows)}
        yield Call("gather_kv_cache", name, arguments)


def _merges(seed):
    for dtype in (np.float32, np.float16, BF16):
        outs = [_rows(9, 4, 40, dtype=dtype, seed=i + seed) for i in range(2)]
        lses = [_rows(4, 9, seed=i + seed) for i in range(2)]
        lses[0][0, :3], lses[1][0, 2:5] = -np.inf, np.nan
        outs[0][:3, 0] = np.nan
        states = {"out_a": outs[0], "lse_a": lses[0], "out_b": outs[1], "lse_b": lses[1]}
        yield Call("merge_attention_states", str(np.dtype(dtype)), states)


def _gathers(seed):
    tables, lens = np.int32([[3, 1, 4], [0, 2, 2], [4, -1, 2**31 - 1]]), np.int32([9, -2, 2**31 - 1])
    tables, lens = np.roll(tables, seed), np.roll(lens, seed)
    scaled = {"k_scale": 0.3, "v_scale": np.float32([2.5, -0.1])}
    for kv_layout, dtype, options in (
        *((name, np.float32, {}) for name in LAYOUTS),
        (None, np.float32, {}),
        ("interleaved", BF16, {}),
        ("interleaved", np.float16, {}),
        ("stacked", E4M3, {"dtype": E4M3}),
        ("per_page", E5M2, {"dtype": E5M2}),
        ("interleaved", E4M3, {"v_scale": PER_HEAD}),
        ("interleaved", E5M2, {"dtype": np.dtype(np.float16), **scaled}),
        (None, E4M3, {"dtype": np.dtype(np.float32), **scaled}),
    ):
        options = _seeded(options, seed)
        if kv_layout is None:
            cache = tuple(_rows(8, 4, 2, d, dtype=dtype, seed=d + seed) for d in (16, 24))
        else:
            cache = _cache(kv_layout, dtype, seed=seed)
        arguments = {"kv_cache": cache, "block_tables": tables, "context_lens": lens, "capacity": 23, **options}
        arguments |= {"kv_layout": kv_layout} if kv_layout else {}
        name = _name(kv_layout or "split", np.dtype(dtype), options or None)
        yield Call("gather_kv_cache", name, arguments)


_LATENT = ("q", "kv_cache", "cu_seqlens_q", "seqused_k", "block_table")
_LATENT_SCORES = (
    {},
    {"causal": True},
    {"window": (5, 3)},
    {"softcap": 3.0},
    {"sinks": SINKS},
    {"kv_scale": 0.5},
    {"num_seqs": np.int32([4])},
    {"num_seqs": 3},
    {"batch_invariant": True, "max_seqlen_q": 1, "max_seqlen_k": 5000},
)
# The dtypes of the queries, the cache and the result.
_LATENT_DTYPES = (
    ("bfloat16", None, None),
    ("float16", None, None),
    ("bfloat16", "float8_e4m3fn", None),
    ("float16", "float8_e5m2", None),
    ("bfloat16", None, "float32"),
)


def _count_type(options):
    return "int" if isinstance(options.get("num_seqs"), int) else None


def _latents(seed):
    for options, types in (
        *((options, (None,) * 3) for options in _LATENT_SCORES),
        *(({}, types) for types in _LATENT_DTYPES),
    ):
        dtype, cache, out_dtype = types
        operands = latent(SEQUENCES, dtype=dtype or "float32", cache=cache, seed=seed)
        arguments = dict(zip(_LATENT, operands, strict=True)) | {"softmax_scale": 0.2, "head_dim_v": 32}
        arguments |= {"kv_scale": 0.25} if cache else {}
        arguments |= {"out_dtype": np.dtype(out_dtype)} if out_dtype else {}
        name = _name(options, _count_type(options), *types)
        yield Call("mla_paged_attention", name, {**arguments, **_seeded(options, seed), "return_lse": True})


def _latent_steps(seed):
    for options, types in (
        *((options, {}) for options in _LATENT_SCORES),
        ({}, {"dtype": "bfloat16"}),
        ({"kv_scale": 30.0}, {"dtype": "bfloat16", "cache": "float8_e4m3fn"}),
        ({"kv_scale": 0.01}, {"dtype": "float16", "cache": "float8_e5m2", "rows": "float32"}),
    ):
        options = _seeded(options, seed)
        operands = latent_step(SEQUENCES, scale=options.get("kv_scale", 1.0), **types, seed=seed)
        arguments = dict(zip((*_LATENT, "c_kv", "k_pe", "slot_mapping"), operands, strict=True))
        name = _name(options, _count_type(options), *types.values())
        named = {**arguments, "softmax_scale": 0.2, **options, "return_lse": True}
        yield Call("mla_paged_attention_update", name, named, "kv_cache")
