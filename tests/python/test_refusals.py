"""Invalid calls of the JAX and torch functions raise errors before anything runs.

The errors of the library are in tests/conformance; this is a sample of them for each function, with those of Python.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from calls import E4M3, E5M2, every_call
from jax_adapter import arrays_of, function_of


def zeros(*shape, dtype=np.float32):
    return np.zeros(shape, dtype)


def cast(dtype, *names):
    return lambda arguments: {name: np.nan_to_num(arguments[name]).astype(dtype) for name in names}


def truncate(size, *names):
    return lambda arguments: {name: arguments[name][..., :size] for name in names}


PAGED, STEP, VARLEN = "paged_attention: plain", "paged_attention_update: plain", "flash_attn_varlen: plain"
UPDATE, ROPE = "kv_cache_update: float32 interleaved plain", "rope_kv_cache_update: float32 interleaved False"
LATENT, LATENT_STEP = "mla_paged_attention: plain", "mla_paged_attention_update: plain"
ADD, MERGE, GATHER = "simple_add: float32", "merge_attention_states: float32", "gather_kv_cache: interleaved float32"
UPDATE_SPLIT, GATHER_SPLIT = "kv_cache_update: split float32", "gather_kv_cache: split float32"
SCALED, SCALED_STEP = (
    f"{function}: scales bfloat16 int8 plain" for function in ("paged_attention", "paged_attention_update")
)
SCALED_UPDATE, SCALED_GATHER = (
    f"{function}: scales float32 int8 interleaved" for function in ("kv_cache_update", "gather_kv_cache")
)
# A call, its change, and the error.
BY_BOTH = [
    (ADD, {"b": zeros(4)}, ValueError, "b has shape [4], expected the shape of a, [3, 4]"),
    (ADD, cast(np.float16, "b"), ValueError, "b has dtype f16, expected f32"),
    (ADD, cast(bool, "a", "b"), ValueError, "a has dtype pred, expected f16 or bf16 or f32"),
    (PAGED, truncate(40, "kv_cache"), ValueError, "kv_cache has shape"),
    (PAGED, truncate(60, "query", "kv_cache"), NotImplementedError, "query has head dimension 60; every"),
    (PAGED, cast(np.float16, "kv_cache"), NotImplementedError, "there is f32 queries over f32"),
    (PAGED, cast(np.int32, "query"), NotImplementedError, "query is i32, kv_cache is f32"),
    (PAGED, cast(np.float32, "context_lens"), TypeError, "expected integers"),
    (PAGED, {"scale": float("nan")}, ValueError, "scale is NaN, expected finite and > 0"),
    (PAGED, {"sliding_window": 0}, ValueError, "sliding_window is 0, expected >= 1, or None"),
    (PAGED, {"sliding_window": -1}, ValueError, "sliding_window is -1, expected >= 1"),
    (PAGED, {"soft_cap": -2.0}, ValueError, "soft_cap is -2, expected finite and >= 0"),
    (PAGED, {"sinks": zeros(4)}, ValueError, "sinks has shape [4], expected [Hq=8]"),
    (PAGED, {"out_dtype": np.dtype(np.float16)}, NotImplementedError, "kv_cache is f32 and out is f16"),
    (SCALED, {"kv_scale_cache": None}, ValueError, "kv_cache has dtype i8, which needs its scales, kv_scale_cache"),
    (SCALED, {"kv_scale_cache": zeros(3, 4, 4)}, ValueError, "kv_scale_cache has shape [3, 4, 4], expected that of"),
    (SCALED, {"k_scale": 0.5}, ValueError, "k_scale is given, but kv_scale_cache holds the scales"),
    (SCALED, cast(np.float32, "query"), ValueError, "query with kv_scale_cache has dtype f32, expected f16 or bf16"),
    (SCALED_STEP, {"v_scale": 0.5}, ValueError, "v_scale is given, but kv_scale_cache holds the scales"),
    (SCALED_UPDATE, cast(np.float16, "kv_scale_cache"), ValueError, "kv_scale_cache has dtype f16, expected f32"),
    (SCALED_UPDATE, cast(E5M2, "kv_cache"), ValueError, "has dtype f8e5m2, expected i8 or f8e4m3fn"),
    (SCALED_UPDATE, {"k_scale": 0.5}, ValueError, "k_scale is given, but kv_scale_cache holds the scales"),
    (SCALED_GATHER, {"dtype": np.dtype(np.int8)}, ValueError, "keys with kv_scale_cache has dtype i8, expected f16"),
    (UPDATE_SPLIT, {"kv_scale_cache": zeros(8, 4, 4)}, ValueError, "kv_scale_cache is given with K and V in two"),
    (GATHER_SPLIT, {"kv_scale_cache": zeros(8, 4, 4)}, ValueError, "kv_scale_cache is given with kv_layout=0"),
    (STEP, truncate(32, "value"), ValueError, "value has shape [20, 2, 32], expected [T=20, Hkv=2"),
    (STEP, cast(np.float16, "key"), ValueError, "key has dtype f16, expected f32"),
    (STEP, cast(np.float32, "slot_mapping"), TypeError, "expected integers"),
    (STEP, {"sliding_window": 0}, ValueError, "_update: sliding_window is 0, expected >= 1"),
    (LATENT, {"head_dim_v": 56}, ValueError, "out has head dimension 56, expected at most D=48"),
    (LATENT, {"head_dim_v": 12}, NotImplementedError, "out has head dimension 12; every multiple of 8 up to 512"),
    (LATENT, truncate(40, "kv_cache"), ValueError, "kv_cache has shape"),
    (LATENT, cast(E4M3, "q", "kv_cache"), NotImplementedError, "q is f8e4m3fn, kv_cache is f8e4m3fn"),
    (LATENT, {"window": 4}, ValueError, "mla_paged_attention: window is 4, expected (left, right), two integers"),
    (LATENT, {"kv_scale": zeros(2)}, ValueError, "kv_scale has shape [2], expected [1]"),
    (LATENT, {"max_seqlen_q": -1}, ValueError, "max_seqlen_q is -1, expected >= 0"),
    (LATENT, cast(np.float32, "seqused_k"), TypeError, "expected integers"),
    (LATENT_STEP, truncate(8, "k_pe"), ValueError, "k_pe has shape [20, 8], expected [Tq=20, D-Dv=16]"),
    (LATENT_STEP, cast(np.float16, "c_kv"), ValueError, "c_kv has dtype f16, expected f32"),
    (LATENT_STEP, cast(np.float32, "slot_mapping"), TypeError, "expected integers"),
    (VARLEN, {"window": 4}, ValueError, "window is 4, expected (left, right), two integers"),
    (VARLEN, {"window": (1, 2, 3)}, ValueError, "window is (1, 2, 3), expected (left, right)"),
    (VARLEN, {"window": (-2, 0)}, ValueError, "window_left is -2, expected >= 0, or -1 for unlimited"),
    (VARLEN, {"dropout_p": 0.1}, NotImplementedError, "dropout_p is 0.1"),
    (VARLEN, {"kv_layout": "stacked"}, ValueError, ", expected None"),
    (VARLEN, {"v": None}, ValueError, "v is None, expected a"),
    (VARLEN, {"v": None, "kv_layout": "tiled"}, ValueError, "kv_layout is 'tiled', expected 'interleaved'"),
    (VARLEN, {"max_seqlen_q": -1}, ValueError, "max_seqlen_q is -1, expected >= 0"),
    (VARLEN, {"seqused_k": zeros(3, dtype=np.int32)}, ValueError, "seqused_k has shape [3]"),
    (VARLEN, cast(E4M3, "q"), NotImplementedError, "q is f8e4m3fn, k is f32"),
    (VARLEN, {"out_dtype": np.dtype(np.float16)}, NotImplementedError, "k is f32 and out is f16"),
    (UPDATE, {"value": zeros(8, 1, 16)}, ValueError, "value has shape [8, 1, 16], expected [T=8, Hkv=2, D=16]"),
    (UPDATE, cast(np.float32, "slot_mapping"), TypeError, "slot_mapping has dtype"),
    (UPDATE, {"kv_layout": "vllm"}, ValueError, "kv_layout is 'vllm', expected 'interleaved', 'stacked' or 'per_page'"),
    (UPDATE_SPLIT, {"kv_layout": "stacked"}, ValueError, "kv_layout is 'stacked', which K and V apart"),
    (ROPE, {"cos_sin": zeros(9, 7)}, ValueError, "expected [max_pos, rot] with rot even and at most D=16"),
    (ROPE, cast(np.float32, "positions"), TypeError, "positions has dtype"),
    (ROPE, {"kv_layout": "split"}, ValueError, "kv_layout is 'split', expected 'interleaved', 'stacked' or 'per_page'"),
    (MERGE, cast(np.float16, "lse_b"), ValueError, "lse_b has dtype f16, expected f32"),
    (GATHER, {"capacity": -1}, ValueError, "capacity is -1, expected >= 0"),
    (GATHER, truncate(2, "context_lens"), ValueError, "block_tables has shape [3, 3], expected"),
    (GATHER, cast(np.float32, "block_tables"), TypeError, "block_tables has dtype"),
    (GATHER, {"kv_layout": "sideways"}, ValueError, "kv_layout is 'sideways'"),
    (GATHER_SPLIT, {"kv_layout": "stacked"}, ValueError, "which K and V apart do not have"),
]
# Types that torch's schemas reject.
BY_JAX = [
    (PAGED, {"sliding_window": 1.5}, TypeError, "sliding_window is 1.5, expected an integer"),
    (PAGED, {"sliding_window": True}, TypeError, "sliding_window is True, expected an integer"),
    (PAGED, {"soft_cap": "2"}, TypeError, "soft_cap is '2', expected a number"),
    (PAGED, {"scale": jnp.ones(2)}, TypeError, "scale has shape [2], expected a number"),
    (PAGED, {"return_lse": 1}, TypeError, "return_lse is 1, expected True or False"),
    (PAGED, {"sliding_window": np.uint64(2**64 - 1)}, ValueError, "which 64 bits do not hold"),
    (VARLEN, {"max_seqlen_q": 2.5}, TypeError, "max_seqlen_q is 2.5, expected an integer"),
    (VARLEN, {"causal": 1}, TypeError, "causal is 1, expected True or False"),
    (ROPE, {"interleaved": 1}, TypeError, "interleaved is 1, expected True or False"),
    (GATHER, {"capacity": 2.0}, TypeError, "capacity is 2.0, expected an integer"),
]
BY_TORCH = [
    (VARLEN, {"window": (1.5, 2)}, ValueError, "window is (1.5, 2), expected (left, right), two int"),
    ("flash_attn_varlen: pages", {"seqused_k": None}, ValueError, "a block_table needs seqused_k"),
]


def changed(name, changes):
    call = every_call()[name]
    return call._replace(arguments={**call.arguments, **(changes(call.arguments) if callable(changes) else changes)})


def ids(value):
    return value if isinstance(value, str) else "+".join(value) if isinstance(value, dict) else ""


@pytest.mark.parametrize(("name", "changes", "error", "text"), BY_BOTH + BY_JAX, ids=ids)
def test_jax_raises_at_trace_time(name, changes, error, text):
    call = changed(name, changes)
    arrays = arrays_of(call)
    with pytest.raises(error) as caught:
        jax.eval_shape(function_of(call, *arrays), *arrays.values())
    assert text in str(caught.value)


@pytest.mark.parametrize(("name", "changes", "error", "text"), BY_BOTH + BY_TORCH, ids=ids)
def test_torch_raises_before_anything_runs(torch_device, name, changes, error, text):
    pytest.importorskip("torch")
    import torch_adapter
    import xla_attention.torch

    call = changed(name, changes)
    with pytest.raises(error) as caught:
        getattr(xla_attention.torch, call.function)(**torch_adapter.tensor_arguments(call, torch_device))
    assert text in str(caught.value)
