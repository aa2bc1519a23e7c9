"""Expected results of front-end calls: those of the same call through the C interface, on the CPU, with NumPy arrays.

The tests in `tests/it` compare the operators with their definition. This module maps the parameters of the front-end
functions to operands and attributes.
"""

import ml_dtypes
import numpy as np

from xla_attention import _library
from xla_attention._operators import operator

LAYOUTS = {"interleaved": 1, "stacked": 2, "per_page": 3}
F32, I32 = np.dtype(np.float32), np.dtype(np.int32)


def expected_results(function, arguments):
    """The results of a front-end function for its arguments by name; updated caches come last."""
    name, arguments = _FUNCTIONS.get(function, lambda arguments: (function, arguments))(dict(arguments))
    arguments["kv_layout"] = LAYOUTS.get(arguments.get("kv_layout"), 0)
    declared = operator(f"xla_gpu_{name}")
    attributes = {attribute.name: arguments.get(attribute.name) for attribute in declared.attributes}
    operands = [_operand(arguments.get(operand.name)) for operand in declared.operands]
    declared_results = _RESULTS[name](**arguments)
    results = [None if result is None else np.zeros(*result) for result in declared_results]
    views = ([None if x is None else (x.shape, x.dtype.name) for x in side] for side in (operands, results))
    request = _library.Request(declared.target, *views, declared.typed(attributes))
    request.set_addresses(*([0 if x is None else x.ctypes.data for x in side] for side in (operands, results)))
    request.run(_library.Action.RUN_ON_CPU)
    ours = [x for i, x in enumerate(results) if i not in declared.aliases and x is not None]
    return ours + [results[i] for i in declared.aliases if i < len(results)]


def _operand(value):
    """A copy as an array; a number for all heads becomes an array of one element."""
    if isinstance(value, float | int | np.generic):
        return np.array([value], I32 if isinstance(value, int) else F32)
    return None if value is None else np.array(value, order="C")


def _split_caches(arguments):
    cache = arguments["kv_cache"]
    is_split = isinstance(cache, tuple)
    return is_split, arguments | (dict(zip(("k_cache", "v_cache"), cache, strict=True)) if is_split else {})


def _update(arguments):
    is_split, arguments = _split_caches(arguments)
    return "kv_cache_update_split" if is_split else "kv_cache_update", arguments


def _gather(arguments):
    is_split, arguments = _split_caches(arguments)
    if not is_split:
        arguments |= {"k_cache": arguments["kv_cache"], "v_cache": np.zeros(0, arguments["kv_cache"].dtype)}
        arguments.setdefault("kv_layout", "interleaved")
    return "gather_kv_cache", arguments


def _varlen(arguments):
    left, right = arguments.get("window", (-1, -1))
    # The starts of keys are not read with a block_table and seqused_k.
    starts_k = np.zeros(0, I32) if "block_table" in arguments else arguments["cu_seqlens_q"]
    defaults = {"cu_seqlens_k": starts_k, "softmax_scale": arguments["q"].shape[-1] ** -0.5}
    arguments = {**defaults, **arguments, "window_left": left, "window_right": right}
    if arguments["v"] is None:
        arguments["v"] = np.zeros(0, arguments["k"].dtype)
    return arguments


def _latent(arguments):
    left, right = arguments.get("window", (-1, -1))
    return {**arguments, "window_left": left, "window_right": right}


_FUNCTIONS = {
    "kv_cache_update": _update,
    "gather_kv_cache": _gather,
    "flash_attn_varlen": lambda arguments: ("flash_attn_varlen", _varlen(arguments)),
    "flash_attn_varlen_bwd": lambda arguments: ("flash_attn_varlen_bwd", _varlen(arguments)),
    "mla_paged_attention": lambda arguments: ("mla_paged_attention", _latent(arguments)),
    "mla_paged_attention_update": lambda arguments: ("mla_paged_attention_update", _latent(arguments)),
}


def _attention(q, dv, out_dtype):
    dtype = np.dtype(ml_dtypes.bfloat16) if q.dtype.itemsize == 1 else q.dtype
    return ((*q.shape[:2], dv), out_dtype or dtype), (q.shape[1::-1], F32)


def _results_of_paged_attention(query, out_dtype=None, **_):
    return _attention(query, query.shape[2], out_dtype)


def _results_of_paged_attention_update(query, kv_cache, out_dtype=None, kv_scale_cache=None, **_):
    out, lse = _attention(query, query.shape[2], out_dtype)
    # The None is the workspace.
    return out, _like(kv_cache), lse, *([] if kv_scale_cache is None else [None, _like(kv_scale_cache)])


def _results_of_varlen(q, k, v, out_dtype=None, **_):
    return _attention(q, (v if v.size else k).shape[-1], out_dtype)


def _results_of_update(kv_cache, kv_scale_cache=None, **_):
    return [_like(x) for x in (kv_cache, kv_scale_cache) if x is not None]


def _results_of_latent(q, head_dim_v, out_dtype=None, **_):
    return _attention(q, head_dim_v, out_dtype)


def _results_of_latent_update(q, kv_cache, c_kv, **_):
    out, lse = _attention(q, c_kv.shape[1], None)
    return out, _like(kv_cache), lse


def _like(x):
    return x.shape, x.dtype


def _results_of_gather(k_cache, v_cache, block_tables, capacity, kv_layout, dtype=None, **_):
    dtype = dtype or (ml_dtypes.bfloat16 if k_cache.dtype.itemsize == 1 else k_cache.dtype)
    heads = k_cache.shape[2] // 2 if kv_layout == 1 else k_cache.shape[-2]
    dims = [x.shape[-1] for x in (k_cache, v_cache if v_cache.size else k_cache)]
    return *(((capacity, heads, d), np.dtype(dtype)) for d in dims), ((len(block_tables) + 1,), I32)


def _results_of_varlen_bwd(q, k, v, sinks=None, bias=None, **_):
    gradients = [None if x is None else _like(x) for x in (q, k, v, sinks)]
    return [*gradients, None, _like(bias)] if bias is not None else [x for x in gradients if x is not None]


_RESULTS = {
    "simple_add": lambda a, **_: [_like(a)],
    "paged_attention": _results_of_paged_attention,
    "paged_attention_update": _results_of_paged_attention_update,
    "mla_paged_attention": _results_of_latent,
    "mla_paged_attention_update": _results_of_latent_update,
    "kv_cache_update": _results_of_update,
    "kv_cache_update_split": lambda k_cache, v_cache, **_: [_like(k_cache), _like(v_cache)],
    "rope_kv_cache_update": lambda kv_cache, query, **_: [_like(kv_cache), _like(query)],
    "gather_kv_cache": _results_of_gather,
    "flash_attn_varlen": _results_of_varlen,
    "flash_attn_varlen_bwd": _results_of_varlen_bwd,
    "merge_attention_states": lambda out_a, lse_a, **_: [_like(out_a), _like(lse_a)],
}
