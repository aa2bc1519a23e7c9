//! The mistakes that `xla_gpu_paged_attention` finds.

use crate::refused;
use crate::support::array::{Array, BF16, Dtype, F8E4M3FN, F8E5M2, F16, F32, F64, I8, I32, I64, U8, U32};
use crate::support::frame::{INVALID_ARGUMENT, UNIMPLEMENTED};
use crate::support::guard::Side;
use crate::support::invocation::Attr;
use crate::support::right_calls::{paged_attention as paged, zeros};

#[test]
fn says_what_is_wrong_with_an_operand() {
    let rows: &[(&'static str, Array, &str)] = &[
        ("query", zeros(BF16, &[6, 4]), "query has shape [6, 4], expected [T, Hq, D]"),
        ("query", zeros(BF16, &[]), "query has shape [], expected [T, Hq, D]"),
        ("query", zeros(BF16, &[1, 6, 4, 16]), "query has shape [1, 6, 4, 16], expected [T, Hq, D]"),
        ("query", zeros(BF16, &[6, 0, 16]), "query has shape [6, 0, 16], expected at least one head"),
        ("query", zeros(BF16, &[6, 4, 0]), "query has head dimension 0, expected at least 8"),
        ("query", zeros(BF16, &[7, 4, 16]), "out has shape [6, 4, 16], expected [T=7, Hq=4, D=16]"),
        (
            "query",
            zeros(BF16, &[6, 4, 32]),
            "kv_cache has shape [5, 8, 4, 16], expected [num_pages, page_size, 2*Hkv, D=32]",
        ),
        (
            "query",
            zeros(BF16, &[6, 3, 16]),
            "kv_cache has shape [5, 8, 4, 16], expected 2*Hkv heads with Hkv a divisor of Hq=3",
        ),
        (
            "kv_cache",
            zeros(BF16, &[5, 8, 2, 2, 16]),
            "kv_cache has shape [5, 8, 2, 2, 16], expected [num_pages, page_size, 2*Hkv, D=16]",
        ),
        (
            "kv_cache",
            zeros(BF16, &[5, 8, 4, 8]),
            "kv_cache has shape [5, 8, 4, 8], expected [num_pages, page_size, 2*Hkv, D=16]",
        ),
        (
            "kv_cache",
            zeros(BF16, &[5, 8, 3, 16]),
            "kv_cache has shape [5, 8, 3, 16], expected 2*Hkv heads with Hkv a divisor of Hq=4",
        ),
        (
            "kv_cache",
            zeros(BF16, &[5, 8, 6, 16]),
            "kv_cache has shape [5, 8, 6, 16], expected 2*Hkv heads with Hkv a divisor of Hq=4",
        ),
        (
            "kv_cache",
            zeros(BF16, &[5, 8, 16, 16]),
            "kv_cache has shape [5, 8, 16, 16], expected 2*Hkv heads with Hkv a divisor of Hq=4",
        ),
        (
            "kv_cache",
            zeros(BF16, &[5, 8, 0, 16]),
            "kv_cache has shape [5, 8, 0, 16], expected 2*Hkv heads with Hkv a divisor of Hq=4",
        ),
        ("kv_cache", zeros(BF16, &[5, 0, 4, 16]), "kv_cache has pages of 0 tokens, expected a page_size of at least 1"),
        ("context_lens", zeros(I64, &[3]), "context_lens has dtype i64, expected i32"),
        ("context_lens", zeros(I32, &[]), "context_lens has shape [], expected [num_seqs]"),
        ("context_lens", zeros(I32, &[3, 1]), "context_lens has shape [3, 1], expected [num_seqs]"),
        ("context_lens", zeros(I32, &[4]), "block_tables has shape [3, 2], expected [num_seqs=4, max_pages]"),
        ("block_tables", zeros(U32, &[3, 2]), "block_tables has dtype u32, expected i32"),
        ("block_tables", zeros(I32, &[6]), "block_tables has shape [6], expected [num_seqs=3, max_pages]"),
        ("block_tables", zeros(I32, &[2, 3]), "block_tables has shape [2, 3], expected [num_seqs=3, max_pages]"),
        ("query_start_loc", zeros(I64, &[4]), "query_start_loc has dtype i64, expected i32"),
        ("query_start_loc", zeros(I32, &[3]), "query_start_loc has shape [3], expected [num_seqs+1=4]"),
        ("query_start_loc", zeros(I32, &[4, 1]), "query_start_loc has shape [4, 1], expected [num_seqs+1=4]"),
        ("num_seqs", zeros(I64, &[1]), "num_seqs has dtype i64, expected i32"),
        ("num_seqs", zeros(F32, &[]), "num_seqs has dtype f32, expected i32"),
        ("num_seqs", zeros(I32, &[2]), "num_seqs has shape [2], expected [] or [1]"),
        ("num_seqs", zeros(I32, &[0]), "num_seqs has shape [0], expected [] or [1]"),
        ("num_seqs", zeros(I32, &[1, 1]), "num_seqs has shape [1, 1], expected [] or [1]"),
    ];
    for (name, array, text) in rows {
        refused(&paged().with_operand(name, array.clone()), INVALID_ARGUMENT, text);
    }
}

#[test]
fn says_what_is_wrong_with_a_result() {
    let rows: &[(&'static str, Dtype, &[i64], &str)] = &[
        ("out", BF16, &[5, 4, 16], "out has shape [5, 4, 16], expected [T=6, Hq=4, D=16]"),
        ("out", BF16, &[6, 64], "out has shape [6, 64], expected [T=6, Hq=4, D=16]"),
        ("out", BF16, &[0], "out has shape [0], expected [T=6, Hq=4, D=16]"),
        ("softmax_lse", BF16, &[4, 6], "softmax_lse has dtype bf16, expected f32"),
        ("softmax_lse", F32, &[6, 4], "softmax_lse has shape [6, 4], expected [Hq=4, T=6]"),
        ("softmax_lse", F32, &[24], "softmax_lse has shape [24], expected [Hq=4, T=6]"),
        ("softmax_lse", F32, &[0, 6], "softmax_lse has shape [0, 6], expected [Hq=4, T=6]"),
    ];
    for (name, dtype, dims, text) in rows {
        refused(&paged().with_result(name, *dtype, dims), INVALID_ARGUMENT, text);
    }
    let workspace = |dtype, dims: &[i64]| paged().with_result("workspace", dtype, dims);
    refused(&workspace(F32, &[64]), INVALID_ARGUMENT, "workspace has dtype f32, expected u8");
    refused(&workspace(U8, &[8, 8]), INVALID_ARGUMENT, "workspace has shape [8, 8], expected [N]");
}

#[test]
fn says_what_is_wrong_with_an_attribute() {
    let rows: &[(&'static str, Attr, &str)] = &[
        ("scale", Attr::F32(0.0), "scale is 0, expected finite and > 0"),
        ("scale", Attr::F32(-0.5), "scale is -0.5, expected finite and > 0"),
        ("scale", Attr::F32(f32::NAN), "scale is NaN, expected finite and > 0"),
        ("scale", Attr::F32(f32::INFINITY), "scale is inf, expected finite and > 0"),
        ("soft_cap", Attr::F32(-1.0), "soft_cap is -1, expected finite and >= 0 (0 is off)"),
        ("soft_cap", Attr::F32(f32::NAN), "soft_cap is NaN, expected finite and >= 0 (0 is off)"),
        ("soft_cap", Attr::F32(f32::INFINITY), "soft_cap is inf, expected finite and >= 0 (0 is off)"),
        ("sliding_window", Attr::I64(0), "sliding_window is 0, expected >= 1, or -1 for none"),
        ("sliding_window", Attr::I64(-2), "sliding_window is -2, expected >= 1, or -1 for none"),
        (
            "sliding_window",
            Attr::I64(i64::MIN),
            "sliding_window is -9223372036854775808, expected >= 1, or -1 for none",
        ),
    ];
    for (name, value, text) in rows {
        refused(&paged().attribute(name, value.clone()), INVALID_ARGUMENT, text);
    }
}

#[test]
fn head_dimensions_that_are_not_built_are_told_from_wrong_ones() {
    for head_dim in [4, 12, 20, 257, 264, 576] {
        let call = paged()
            .with_operand("query", zeros(BF16, &[6, 4, head_dim]))
            .with_operand("kv_cache", zeros(BF16, &[5, 8, 4, head_dim]))
            .with_result("out", BF16, &[6, 4, head_dim]);
        let text = format!("query has head dimension {head_dim}; every multiple of 8 up to 256 works");
        refused(&call, UNIMPLEMENTED, &text);
    }
}

/// What an error tells of the dtypes that there are.
pub(crate) const DTYPES: &str = "there is f32 queries over f32; f16 or bf16 queries over the same, f8e4m3fn or \
                                 f8e5m2, with an output of the query's dtype; f8e4m3fn queries over f8e4m3fn, with an \
                                 output of bf16 or f16";

#[test]
fn dtypes_outside_the_table_are_not_built_and_the_table_is_named() {
    let rows = [
        (F64, F64, F64),
        (I8, I8, I8),
        (F32, F16, F32),
        (F32, F8E4M3FN, F32),
        (F32, F32, BF16),
        (F16, BF16, F16),
        (BF16, F32, BF16),
        (BF16, BF16, F16),
        (BF16, F8E5M2, F8E5M2),
        (F16, U8, F16),
        (F8E4M3FN, BF16, BF16),
        (F8E4M3FN, F8E5M2, BF16),
        (F8E4M3FN, F8E4M3FN, F32),
        (F8E4M3FN, F8E4M3FN, F8E4M3FN),
        (F8E5M2, F8E5M2, BF16),
        (F8E5M2, F8E5M2, F8E5M2),
    ];
    for (q, kv, out) in rows {
        let call = paged()
            .with_operand("query", zeros(q, &[6, 4, 16]))
            .with_operand("kv_cache", zeros(kv, &[5, 8, 4, 16]))
            .with_result("out", out, &[6, 4, 16]);
        refused(&call, UNIMPLEMENTED, &format!("query is {q:?}, kv_cache is {kv:?} and out is {out:?}; {DTYPES}"));
    }
}

#[test]
fn says_what_is_wrong_with_an_optional_operand() {
    let slopes = "expected [Hq=4] or [num_seqs=3, Hq=4]";
    let scale = "expected [1] or [Hkv=2]";
    let rows: &[(&'static str, Array, String)] = &[
        ("alibi_slopes", zeros(F16, &[4]), "alibi_slopes has dtype f16, expected f32".into()),
        ("alibi_slopes", zeros(F32, &[]), format!("alibi_slopes has shape [], {slopes}")),
        ("alibi_slopes", zeros(F32, &[3]), format!("alibi_slopes has shape [3], {slopes}")),
        ("alibi_slopes", zeros(F32, &[4, 3]), format!("alibi_slopes has shape [4, 3], {slopes}")),
        ("alibi_slopes", zeros(F32, &[1, 4]), format!("alibi_slopes has shape [1, 4], {slopes}")),
        ("alibi_slopes", zeros(F32, &[0, 4]), format!("alibi_slopes has shape [0, 4], {slopes}")),
        ("sinks", zeros(BF16, &[4]), "sinks has dtype bf16, expected f32".into()),
        ("sinks", zeros(F32, &[2]), "sinks has shape [2], expected [Hq=4]".into()),
        ("sinks", zeros(F32, &[3, 4]), "sinks has shape [3, 4], expected [Hq=4]".into()),
        ("q_scale", zeros(F64, &[1]), "q_scale has dtype f64, expected f32".into()),
        ("q_scale", zeros(F32, &[4]), format!("q_scale has shape [4], {scale}")),
        ("q_scale", zeros(F32, &[]), format!("q_scale has shape [], {scale}")),
        ("k_scale", zeros(BF16, &[2]), "k_scale has dtype bf16, expected f32".into()),
        ("k_scale", zeros(F32, &[1, 1]), format!("k_scale has shape [1, 1], {scale}")),
        ("v_scale", zeros(I32, &[1]), "v_scale has dtype i32, expected f32".into()),
        ("v_scale", zeros(F32, &[3]), format!("v_scale has shape [3], {scale}")),
    ];
    let names = ["alibi_slopes", "sinks", "q_scale", "k_scale", "v_scale"];
    for (name, array, text) in rows {
        let before = names.iter().take_while(|n| *n != name);
        let call = before.fold(paged(), |call, name| call.operand(name, Array::left_out(F32)));
        refused(&call.operand(name, array.clone()), INVALID_ARGUMENT, text);
    }
    // All of them at once, right.
    let shapes: [&[i64]; 5] = [&[3, 4], &[4], &[1], &[2], &[2]];
    let call = names.into_iter().zip(shapes).fold(paged(), |call, (name, dims)| call.operand(name, zeros(F32, dims)));
    call.results(Side::EndsAtGuard);
}
