"""What calls come out at that the front-ends make: the same through the library's C interface, in NumPy, on the CPU.

The operators are held against their definition in `tests/it`; here is said what the functions' parameters are to them.
"""

import ml_dtypes
import numpy as np

from xla_attention import _library
from xla_attention._operators import operator

LAYOUTS = {"interleaved": 1, "stacked": 2, "per_page": 3}
F32, I32 = np.dtype(np.float32), np.dtype(np.int32)


def results_of(function, given):
    """The results of a function for its arguments by name: updated caches last."""
    name, given = _FUNCTIONS.get(function, lambda given: (function, given))(dict(given))
    given["kv_layout"] = LAYOUTS.get(given.get("kv_layout"), 0)
    declared = operator(f"xla_gpu_{name}")
    attributes = {attribute.name: given.get(attribute.name) for attribute in declared.attributes}
    operands = [_operand(given.get(operand.name)) for operand in declared.operands]
    results = [np.zeros(shape, dtype) for shape, dtype in _RESULTS[name](**given)]
    views = ([None if x is None else (x.shape, x.dtype.name) for x in side] for side in (operands, results))
    request = _library.Request(declared.target, *views, declared.typed(attributes))
    request.set_addresses(*([0 if x is None else x.ctypes.data for x in side] for side in (operands, results)))
    request.run(_library.Action.RUN_ON_CPU)
    return [x for i, x in enumerate(results) if i not in declared.aliases] + [results[i] for i in declared.aliases]


def _operand(value):
    """As an array in memory of its own; what one number is for all heads is an array of one."""
    if isinstance(value, float | int | np.generic):
        return np.array([value], I32 if isinstance(value, int) else F32)
    return None if value is None else np.array(value, order="C")


def _of_caches(given):
    cache = given["kv_cache"]
    apart = isinstance(cache, tuple)
    return apart, given | (dict(zip(("k_cache", "v_cache"), cache, strict=True)) if apart else {})


def _update(given):
    apart, given = _of_caches(given)
    return "kv_cache_update_split" if apart else "kv_cache_update", given


def _gather(given):
    apart, given = _of_caches(given)
    if not apart:
        given |= {"k_cache": given["kv_cache"], "v_cache": np.zeros(0, given["kv_cache"].dtype)}
        given.setdefault("kv_layout", "interleaved")
    return "gather_kv_cache", given


def _varlen(given):
    left, right = given.get("window", (-1, -1))
    # Not read where the lengths of pages are known.
    starts_k = np.zeros(0, I32) if "block_table" in given else given["cu_seqlens_q"]
    defaults = {"cu_seqlens_k": starts_k, "softmax_scale": given["q"].shape[-1] ** -0.5}
    given = {**defaults, **given, "window_left": left, "window_right": right}
    if given["v"] is None:
        given["v"] = np.zeros(0, given["k"].dtype)
    return given


_FUNCTIONS = {
    "kv_cache_update": _update,
    "gather_kv_cache": _gather,
    "flash_attn_varlen": lambda given: ("flash_attn_varlen", _varlen(given)),
    "flash_attn_varlen_bwd": lambda given: ("flash_attn_varlen_bwd", _varlen(given)),
}


def _attention(q, dv, out_dtype):
    dtype = np.dtype(ml_dtypes.bfloat16) if q.dtype.itemsize == 1 else q.dtype
    return ((*q.shape[:2], dv), out_dtype or dtype), (q.shape[1::-1], F32)


def _results_of_paged_attention(query, out_dtype=None, **_):
    return _attention(query, query.shape[2], out_dtype)


def _results_of_paged_attention_update(query, kv_cache, **_):
    out, lse = _attention(query, query.shape[2], None)
    return out, _like(kv_cache), lse


def _results_of_varlen(q, k, v, out_dtype=None, **_):
    return _attention(q, (v if v.size else k).shape[-1], out_dtype)


def _like(x):
    return x.shape, x.dtype


def _results_of_gather(k_cache, v_cache, block_tables, capacity, kv_layout, dtype=None, **_):
    dtype = dtype or (ml_dtypes.bfloat16 if k_cache.dtype.itemsize == 1 else k_cache.dtype)
    heads = k_cache.shape[2] // 2 if kv_layout == 1 else k_cache.shape[-2]
    dims = [x.shape[-1] for x in (k_cache, v_cache if v_cache.size else k_cache)]
    return *(((capacity, heads, d), np.dtype(dtype)) for d in dims), ((len(block_tables) + 1,), I32)


_RESULTS = {
    "simple_add": lambda a, **_: [_like(a)],
    "paged_attention": _results_of_paged_attention,
    "paged_attention_update": _results_of_paged_attention_update,
    "kv_cache_update": lambda kv_cache, **_: [_like(kv_cache)],
    "kv_cache_update_split": lambda k_cache, v_cache, **_: [_like(k_cache), _like(v_cache)],
    "rope_kv_cache_update": lambda kv_cache, query, **_: [_like(kv_cache), _like(query)],
    "gather_kv_cache": _results_of_gather,
    "flash_attn_varlen": _results_of_varlen,
    "flash_attn_varlen_bwd": lambda q, k, v, sinks=None, **_: [_like(x) for x in (q, k, v, sinks) if x is not None],
    "merge_attention_states": lambda out_a, lse_a, **_: [_like(out_a), _like(lse_a)],
}
