//! A small right call of every target, of zeros: what tests of mistakes start from.

use super::array::{Array, BF16, Dtype, F16, F32, I32, I64, U8};
use super::invocation::{Attr, Invocation};

pub fn zeros(dtype: Dtype, dims: &[i64]) -> Array {
    Array::filled(dtype, dims, 0)
}

/// One call of each target.
pub fn all() -> Vec<Invocation> {
    let alias = Invocation { target: "XlaGpuSimpleAdd", ..simple_add() };
    vec![
        simple_add(),
        alias,
        paged_attention(),
        flash_attn_varlen(),
        kv_cache_update(1),
        kv_cache_update_split(),
        merge_attention_states(),
        rope_kv_cache_update(1),
        paged_attention_update(),
        flash_attn_varlen_bwd(),
    ]
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

/// Tq 6, Hq 4, Hkv 2, D 16, Dv 24, Tk 10, B 3, without a mask.
pub fn flash_attn_varlen() -> Invocation {
    let call = Invocation::new("xla_gpu_flash_attn_varlen")
        .operand("q", zeros(BF16, &[6, 4, 16]))
        .operand("k", zeros(BF16, &[10, 2, 16]))
        .operand("v", zeros(BF16, &[10, 2, 24]))
        .operand("cu_seqlens_q", zeros(I32, &[4]))
        .operand("cu_seqlens_k", zeros(I32, &[4]))
        .result("out", BF16, &[6, 4, 24])
        .result("softmax_lse", F32, &[4, 6])
        .result("workspace", U8, &[64])
        .attribute("batch_invariant", Attr::Bool(false))
        .attribute("causal", Attr::Bool(false))
        .attribute("softcap", Attr::F32(0.0))
        .attribute("softmax_scale", Attr::F32(0.25))
        .attribute("top_left", Attr::Bool(false));
    let numbers =
        [("kv_layout", 0), ("max_seqlen_k", 0), ("max_seqlen_q", 0), ("window_left", -1), ("window_right", -1)];
    numbers.into_iter().fold(call, |call, (name, value)| call.attribute(name, Attr::I64(value)))
}

/// As [`flash_attn_varlen`], with the gradients of both results.
pub fn flash_attn_varlen_bwd() -> Invocation {
    let [q, k, v] = [&[6, 4, 16], &[10, 2, 16], &[10, 2, 24]].map(|dims: &[i64; 3]| dims.as_slice());
    let call = Invocation::new("xla_gpu_flash_attn_varlen_bwd")
        .operand("dout", zeros(BF16, &[6, 4, 24]))
        .operand("q", zeros(BF16, q))
        .operand("k", zeros(BF16, k))
        .operand("v", zeros(BF16, v))
        .operand("out", zeros(BF16, &[6, 4, 24]))
        .operand("softmax_lse", zeros(F32, &[4, 6]))
        .operand("cu_seqlens_q", zeros(I32, &[4]))
        .operand("cu_seqlens_k", zeros(I32, &[4]))
        .result("dq", BF16, q)
        .result("dk", BF16, k)
        .result("dv", BF16, v)
        .result("dsinks", F32, &[4])
        .result("workspace", U8, &[64])
        .attribute("causal", Attr::Bool(false))
        .attribute("deterministic", Attr::Bool(false))
        .attribute("softcap", Attr::F32(0.0))
        .attribute("softmax_scale", Attr::F32(0.25))
        .attribute("top_left", Attr::Bool(false));
    let numbers = [("max_seqlen_k", 0), ("max_seqlen_q", 0), ("window_left", -1), ("window_right", -1)];
    numbers.into_iter().fold(call, |call, (name, value)| call.attribute(name, Attr::I64(value)))
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

/// T 6, Hq 4, Hkv 2, D 16, 5 pages of 8 tokens, 9 positions of which 12 elements turn.
pub fn rope_kv_cache_update(layout: i64) -> Invocation {
    let cache = kv_cache_update(layout).operands.remove(0).1;
    let dims = cache.dims.clone();
    Invocation::new("xla_gpu_rope_kv_cache_update")
        .operand("kv_cache", cache)
        .operand("query", zeros(F16, &[6, 4, 16]))
        .operand("key", zeros(F16, &[6, 2, 16]))
        .operand("value", zeros(F16, &[6, 2, 16]))
        .operand("slot_mapping", zeros(I32, &[6]))
        .operand("positions", zeros(I32, &[6]))
        .operand("cos_sin", zeros(F32, &[9, 12]))
        .result("kv_cache", F16, &dims)
        .result("query_out", F16, &[6, 4, 16])
        .attribute("interleaved", Attr::Bool(false))
        .attribute("kv_layout", Attr::I64(layout))
}

/// As [`paged_attention`], with the rows of the tokens that ask and their slots.
pub fn paged_attention_update() -> Invocation {
    let attention = paged_attention();
    let cache = attention.operands[1].1.clone();
    let rows = || zeros(BF16, &[6, 2, 16]);
    let call = attention
        .operands
        .into_iter()
        .fold(Invocation::new("xla_gpu_paged_attention_update"), |call, (name, operand)| call.operand(name, operand));
    let call = call
        .operand("key", rows())
        .operand("value", rows())
        .operand("slot_mapping", zeros(I32, &[6]))
        .result("out", BF16, &[6, 4, 16])
        .result("kv_cache", BF16, &cache.dims)
        .result("softmax_lse", F32, &[4, 6])
        .result("workspace", U8, &[64]);
    attention.attributes.into_iter().fold(call, |call, (name, value)| call.attribute(name, value))
}

/// n 6, h 4, d 20.
pub fn merge_attention_states() -> Invocation {
    Invocation::new("xla_gpu_merge_attention_states")
        .operand("out_a", zeros(BF16, &[6, 4, 20]))
        .operand("lse_a", zeros(F32, &[4, 6]))
        .operand("out_b", zeros(BF16, &[6, 4, 20]))
        .operand("lse_b", zeros(F32, &[4, 6]))
        .result("out", BF16, &[6, 4, 20])
        .result("lse", F32, &[4, 6])
}
