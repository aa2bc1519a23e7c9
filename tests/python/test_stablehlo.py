"""The targets from raw StableHLO text, as any PJRT program would call them: numbers.

What is refused, and everything that has no numbers, is in test_conformance.py.
"""

import ml_dtypes
import numpy as np
import pytest

import xla_attention.jax  # noqa: F401  registers the targets
from oracle import (
    kv_cache_update_reference,
    merge_attention_states_reference,
    paged_attention_reference,
    rotated,
)
from stablehlo import run_stablehlo

ADD = """
module @m {{ func.func public @main(%a: tensor<4xf32>, %b: tensor<4xf32>) -> tensor<4xf32> {{
  %0 = stablehlo.custom_call @{target}(%a, %b) {{api_version = 4 : i32}} :
    (tensor<4xf32>, tensor<4xf32>) -> tensor<4xf32>
  return %0 : tensor<4xf32> }} }}
"""
A, B = np.arange(4, dtype=np.float32), np.full(4, 10, np.float32)


@pytest.mark.parametrize("target", ["xla_gpu_simple_add", "XlaGpuSimpleAdd"])
def test_simple_add_runs_under_both_of_its_names(platform, target):
    (out,) = run_stablehlo(ADD.format(target=target), A, B, platform=platform)
    np.testing.assert_array_equal(out, A + B)


ATTENTION = """
module @m {{ func.func public @main(%q: tensor<5x4x64xf32>, %kv: tensor<6x4x4x64xf32>, %lens: tensor<3xi32>,
    %tables: tensor<3x3xi32>, %loc: tensor<4xi32>, %n: tensor<1xi32>) -> (tensor<5x4x64xf32>, tensor<4x5xf32>) {{
  %0:2 = stablehlo.custom_call @xla_gpu_paged_attention(%q, %kv, %lens, %tables, %loc, %n) {{
    api_version = 4 : i32, backend_config = {{{attributes}}} }} :
    (tensor<5x4x64xf32>, tensor<6x4x4x64xf32>, tensor<3xi32>, tensor<3x3xi32>, tensor<4xi32>, tensor<1xi32>)
    -> (tensor<5x4x64xf32>, tensor<4x5xf32>)
  return %0#0, %0#1 : tensor<5x4x64xf32>, tensor<4x5xf32> }} }}
"""
ATTRIBUTES = "batch_invariant = false, scale = 1.25e-1 : f32, sliding_window = -1 : i64, soft_cap = 0.0 : f32"


def attention_operands():
    rng = np.random.default_rng(3)
    return (
        rng.standard_normal((5, 4, 64), np.float32),
        rng.standard_normal((6, 4, 4, 64), np.float32),
        np.array([7, 4, 0], np.int32),
        np.array([[3, 1, 0], [5, 0, 0], [0, 0, 0]], np.int32),
        np.array([0, 3, 4, 4], np.int32),
        np.array([2], np.int32),
    )


def test_paged_attention_runs_from_text(platform):
    operands = attention_operands()
    out, lse = run_stablehlo(ATTENTION.format(attributes=ATTRIBUTES), *operands, platform=platform)
    wanted, wanted_lse = paged_attention_reference(*operands, scale=0.125)
    np.testing.assert_allclose(out, wanted, atol=1e-5)
    np.testing.assert_allclose(lse, wanted_lse, atol=1e-4)


ROPE = """
module @m {{ func.func public @main(%kv: tensor<3x4x2x8xf8E4M3FN>, %q: tensor<2x2x8xf32>, %k: tensor<2x1x8xf32>,
    %v: tensor<2x1x8xf32>, %slots: tensor<2xi32>, %pos: tensor<2xi32>, %table: tensor<5x4xf32>, %none: tensor<0xf32>,
    %vs: tensor<1xf32>) -> (tensor<3x4x2x8xf8E4M3FN>, tensor<2x2x8xf32>) {{
  %0:2 = stablehlo.custom_call @xla_gpu_rope_kv_cache_update(%kv, %q, %k, %v, %slots, %pos, %table, %none, %vs) {{
    api_version = 4 : i32, backend_config = {{{attributes}}} }} :
    (tensor<3x4x2x8xf8E4M3FN>, tensor<2x2x8xf32>, tensor<2x1x8xf32>, tensor<2x1x8xf32>, tensor<2xi32>, tensor<2xi32>,
     tensor<5x4xf32>, tensor<0xf32>, tensor<1xf32>) -> (tensor<3x4x2x8xf8E4M3FN>, tensor<2x2x8xf32>)
  return %0#0, %0#1 : tensor<3x4x2x8xf8E4M3FN>, tensor<2x2x8xf32> }} }}
"""


def rope_operands():
    rng = np.random.default_rng(4)
    kv_cache = rng.standard_normal((3, 4, 2, 8)).astype(ml_dtypes.float8_e4m3fn)
    query, key, value = (rng.standard_normal((2, heads, 8), np.float32) for heads in (2, 1, 1))
    angles = rng.standard_normal((5, 4), np.float32)
    slots, positions = np.array([6, -1], np.int32), np.array([4, 1], np.int32)
    return kv_cache, query, key, value, slots, positions, angles, np.zeros(0, np.float32), np.full(1, 0.25, np.float32)


def test_rope_kv_cache_update_runs_from_text(platform):
    text = ROPE.format(attributes="interleaved = true, kv_layout = 1 : i64")
    kv_cache, query, key, value, slots, positions, angles, _, v_scale = operands = rope_operands()
    cache_out, query_out = run_stablehlo(text, *operands, platform=platform)
    np.testing.assert_allclose(query_out, rotated(query, positions, angles, interleaved=True), atol=1e-6)
    key = rotated(key, positions, angles, interleaved=True).astype(np.float32)
    wanted = kv_cache_update_reference(kv_cache, key, value, slots, v_scale=v_scale)
    np.testing.assert_array_equal(cache_out.astype(np.float32), wanted.astype(np.float32))


MERGE = """
module @m { func.func public @main(%a: tensor<3x2x5xbf16>, %la: tensor<2x3xf32>, %b: tensor<3x2x5xbf16>,
    %lb: tensor<2x3xf32>) -> (tensor<3x2x5xbf16>, tensor<2x3xf32>) {
  %0:2 = stablehlo.custom_call @xla_gpu_merge_attention_states(%a, %la, %b, %lb) {api_version = 4 : i32} :
    (tensor<3x2x5xbf16>, tensor<2x3xf32>, tensor<3x2x5xbf16>, tensor<2x3xf32>)
    -> (tensor<3x2x5xbf16>, tensor<2x3xf32>)
  return %0#0, %0#1 : tensor<3x2x5xbf16>, tensor<2x3xf32> } }
"""


def test_merge_attention_states_runs_from_text(platform):
    rng = np.random.default_rng(5)
    operands = []
    for _ in range(2):
        operands.append(rng.standard_normal((3, 2, 5)).astype(ml_dtypes.bfloat16))
        operands.append(rng.standard_normal((2, 3), np.float32))
    out, lse = run_stablehlo(MERGE, *operands, platform=platform)
    wanted, wanted_lse = merge_attention_states_reference(*operands)
    np.testing.assert_allclose(out.astype(np.float32), wanted, atol=2e-2)
    np.testing.assert_allclose(lse, wanted_lse, rtol=1e-6, atol=1e-6)
