//! A small right call of every target, of zeros: what tests of mistakes start from.

use super::array::{Array, BF16, Dtype, F16, F32, I32, I64, U8};
use super::invocation::{Attr, Invocation};

pub fn zeros(dtype: Dtype, dims: &[i64]) -> Array {
    Array::filled(dtype, dims, 0)
}

/// One call of each target.
pub fn all() -> Vec<Invocation> {
    let alias = Invocation { target: "XlaGpuSimpleAdd", ..simple_add() };
    vec![simple_add(), alias, paged_attention(), kv_cache_update(1), kv_cache_update_split()]
}

pub fn simple_add() -> Invocation {
    Invocation::new("xla_gpu_simple_add").operand("a", zeros(F32, &[2, 3])).operand("b", zeros(F32, &[2, 3])).result(
        "out",
        F32,
        &[2, 3],
    )
}

/// T 6, Hq 4, Hkv 2, D 16, 5 pages of 8 tokens, 3 sequence slots with 2 pages each.
pub fn paged_attention() -> Invocation {
    Invocation::new("xla_gpu_paged_attention")
        .operand("query", zeros(BF16, &[6, 4, 16]))
        .operand("kv_cache", zeros(BF16, &[5, 8, 4, 16]))
        .operand("context_lens", zeros(I32, &[3]))
        .operand("block_tables", zeros(I32, &[3, 2]))
        .operand("query_start_loc", zeros(I32, &[4]))
        .operand("num_seqs", zeros(I32, &[1]))
        .result("out", BF16, &[6, 4, 16])
        .result("softmax_lse", F32, &[4, 6])
        .result("workspace", U8, &[64])
        .attribute("batch_invariant", Attr::Bool(false))
        .attribute("scale", Attr::F32(0.25))
        .attribute("sliding_window", Attr::I64(-1))
        .attribute("soft_cap", Attr::F32(0.0))
}

/// T 6, Hkv 2, D 16, 5 pages of 8 tokens.
pub fn kv_cache_update(layout: i64) -> Invocation {
    let dims: &[i64] = match layout {
        2 => &[2, 5, 8, 2, 16],
        3 => &[5, 2, 8, 2, 16],
        _ => &[5, 8, 4, 16],
    };
    Invocation::new("xla_gpu_kv_cache_update")
        .operand("kv_cache", zeros(F16, dims))
        .operand("key", zeros(F16, &[6, 2, 16]))
        .operand("value", zeros(F16, &[6, 2, 16]))
        .operand("slot_mapping", zeros(I32, &[6]))
        .result("kv_cache", F16, dims)
        .attribute("kv_layout", Attr::I64(layout))
}

/// T 6, Hkv 2, D 16, Dv 24, 5 pages of 8 tokens.
pub fn kv_cache_update_split() -> Invocation {
    Invocation::new("xla_gpu_kv_cache_update_split")
        .operand("k_cache", zeros(F16, &[5, 8, 2, 16]))
        .operand("v_cache", zeros(F16, &[5, 8, 2, 24]))
        .operand("key", zeros(F16, &[6, 2, 16]))
        .operand("value", zeros(F16, &[6, 2, 24]))
        .operand("slot_mapping", zeros(I64, &[6]))
        .result("k_cache", F16, &[5, 8, 2, 16])
        .result("v_cache", F16, &[5, 8, 2, 24])
}
