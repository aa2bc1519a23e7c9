//! The mistakes that `xla_gpu_flash_attn_varlen` finds.

use super::paged_attention::DTYPES;
use crate::refused;
use crate::support::array::{Array, BF16, Dtype, F8E4M3FN, F16, F32, F64, I8, I32, I64, U8, U32};
use crate::support::frame::{INVALID_ARGUMENT, UNIMPLEMENTED};
use crate::support::guard::Side;
use crate::support::invocation::{Attr, Invocation};
use crate::support::right_calls::{flash_attn_varlen as packed, flash_attn_varlen_paged as paged, zeros};
use crate::support::storage::Layout;

#[test]
fn says_what_is_wrong_with_packed_operands() {
    let k = "k has shape [10, 2, 16]";
    let rows: &[(&'static str, Array, String)] = &[
        ("q", zeros(BF16, &[6, 4]), "q has shape [6, 4], expected [Tq, Hq, D]".into()),
        ("q", zeros(BF16, &[]), "q has shape [], expected [Tq, Hq, D]".into()),
        ("q", zeros(BF16, &[1, 6, 4, 16]), "q has shape [1, 6, 4, 16], expected [Tq, Hq, D]".into()),
        ("q", zeros(BF16, &[6, 0, 16]), "q has shape [6, 0, 16], expected at least one head".into()),
        ("q", zeros(BF16, &[6, 4, 0]), "q has head dimension 0, expected at least 8".into()),
        ("q", zeros(BF16, &[7, 4, 16]), "out has shape [6, 4, 24], expected [Tq=7, Hq=4, Dv=24]".into()),
        ("q", zeros(BF16, &[6, 4, 32]), format!("{k}, expected [Tk, Hkv, D=32]")),
        ("q", zeros(BF16, &[6, 3, 16]), format!("{k}, expected Hkv heads with Hkv a divisor of Hq=3")),
        ("k", zeros(BF16, &[10, 32]), "k has shape [10, 32], expected [Tk, Hkv, D=16]".into()),
        ("k", zeros(BF16, &[10, 2, 24]), "k has shape [10, 2, 24], expected [Tk, Hkv, D=16]".into()),
        ("k", zeros(BF16, &[5, 8, 2, 16]), "k has shape [5, 8, 2, 16], expected [Tk, Hkv, D=16]".into()),
        ("k", zeros(BF16, &[9, 2, 16]), "v has shape [10, 2, 24], expected [Tk=9, Hkv=2, Dv]".into()),
        ("k", zeros(BF16, &[10, 1, 16]), "v has shape [10, 2, 24], expected [Tk=10, Hkv=1, Dv]".into()),
        ("v", zeros(BF16, &[9, 2, 24]), "v has shape [9, 2, 24], expected [Tk=10, Hkv=2, Dv]".into()),
        ("v", zeros(BF16, &[10, 4, 24]), "v has shape [10, 4, 24], expected [Tk=10, Hkv=2, Dv]".into()),
        ("v", zeros(BF16, &[10, 48]), "v has shape [10, 48], expected [Tk=10, Hkv=2, Dv]".into()),
        ("v", zeros(BF16, &[10, 2, 0]), "v has head dimension 0, expected at least 8".into()),
        ("v", zeros(BF16, &[10, 2, 16]), "out has shape [6, 4, 24], expected [Tq=6, Hq=4, Dv=16]".into()),
        ("v", zeros(BF16, &[0]), "v has no element, expected the values (kv_layout is 0)".into()),
        ("cu_seqlens_q", zeros(I64, &[4]), "cu_seqlens_q has dtype i64, expected i32".into()),
        ("cu_seqlens_q", zeros(I32, &[4, 1]), "cu_seqlens_q has shape [4, 1], expected [B+1]".into()),
        ("cu_seqlens_q", zeros(I32, &[]), "cu_seqlens_q has shape [], expected [B+1]".into()),
        ("cu_seqlens_q", zeros(I32, &[0]), "cu_seqlens_q has shape [0], expected [B+1]".into()),
        ("cu_seqlens_q", zeros(I32, &[5]), "cu_seqlens_k has shape [4], expected [B+1=5]".into()),
        ("cu_seqlens_k", zeros(U32, &[4]), "cu_seqlens_k has dtype u32, expected i32".into()),
        ("cu_seqlens_k", zeros(I32, &[3]), "cu_seqlens_k has shape [3], expected [B+1=4]".into()),
        ("cu_seqlens_k", zeros(I32, &[0]), "cu_seqlens_k has shape [0], expected [B+1=4]".into()),
    ];
    for (name, array, text) in rows {
        refused(&packed().with_operand(name, array.clone()), INVALID_ARGUMENT, text);
    }
    // Three KV heads, which do not divide four.
    let heads = packed().with_operand("k", zeros(BF16, &[10, 3, 16])).with_operand("v", zeros(BF16, &[10, 3, 24]));
    let text = "k has shape [10, 3, 16], expected Hkv heads with Hkv a divisor of Hq=4";
    refused(&heads, INVALID_ARGUMENT, text);
    let none = packed().with_operand("k", zeros(BF16, &[10, 0, 16])).with_operand("v", zeros(BF16, &[10, 0, 24]));
    let text = "k has shape [10, 0, 16], expected Hkv heads with Hkv a divisor of Hq=4";
    refused(&none, INVALID_ARGUMENT, text);
}

#[test]
fn says_what_is_wrong_with_pages() {
    let split = "expected [num_pages, page_size, Hkv, D=16]";
    let rows: &[(Layout, &'static str, Array, String)] = &[
        (Layout::Split, "k", zeros(BF16, &[10, 2, 16]), format!("k has shape [10, 2, 16], {split}")),
        (Layout::Split, "k", zeros(BF16, &[5, 8, 2, 8]), format!("k has shape [5, 8, 2, 8], {split}")),
        (
            Layout::Split,
            "v",
            zeros(BF16, &[4, 8, 2, 24]),
            "v has shape [4, 8, 2, 24], expected [num_pages=5, page_size=8, Hkv=2, Dv]".into(),
        ),
        (
            Layout::Split,
            "v",
            zeros(BF16, &[5, 4, 2, 24]),
            "v has shape [5, 4, 2, 24], expected [num_pages=5, page_size=8, Hkv=2, Dv]".into(),
        ),
        (
            Layout::Split,
            "v",
            zeros(BF16, &[10, 2, 24]),
            "v has shape [10, 2, 24], expected [num_pages=5, page_size=8, Hkv=2, Dv]".into(),
        ),
        (Layout::Split, "v", Array::left_out(BF16), "v has no element, expected the values (kv_layout is 0)".into()),
        (
            Layout::Interleaved,
            "k",
            zeros(BF16, &[2, 5, 8, 2, 16]),
            "k has shape [2, 5, 8, 2, 16], expected [num_pages, page_size, 2*Hkv, D=16]".into(),
        ),
        (
            Layout::Interleaved,
            "k",
            zeros(BF16, &[5, 8, 3, 16]),
            "k has shape [5, 8, 3, 16], expected 2*Hkv heads with Hkv a divisor of Hq=4".into(),
        ),
        (
            Layout::Stacked,
            "k",
            zeros(BF16, &[3, 5, 8, 2, 16]),
            "k has shape [3, 5, 8, 2, 16], expected [K and V=2, num_pages, page_size, Hkv, D=16]".into(),
        ),
        (
            Layout::Stacked,
            "k",
            zeros(BF16, &[2, 5, 8, 3, 16]),
            "k has shape [2, 5, 8, 3, 16], expected Hkv heads with Hkv a divisor of Hq=4".into(),
        ),
        (
            Layout::PerPage,
            "k",
            zeros(BF16, &[2, 5, 8, 2, 16]),
            "k has shape [2, 5, 8, 2, 16], expected [num_pages, K and V=2, page_size, Hkv, D=16]".into(),
        ),
        (
            Layout::PerPage,
            "k",
            zeros(BF16, &[5, 2, 0, 2, 16]),
            "k has pages of 0 tokens, expected a page_size of at least 1".into(),
        ),
        (Layout::Split, "block_table", zeros(I64, &[3, 2]), "block_table has dtype i64, expected i32".into()),
        (Layout::Split, "block_table", zeros(I32, &[6]), "block_table has shape [6], expected [B=3, max_pages]".into()),
        (
            Layout::Stacked,
            "block_table",
            zeros(I32, &[2, 3]),
            "block_table has shape [2, 3], expected [B=3, max_pages]".into(),
        ),
        (Layout::Split, "seqused_k", zeros(I32, &[4]), "seqused_k has shape [4], expected [B=3]".into()),
        (Layout::Split, "seqused_k", zeros(U8, &[3]), "seqused_k has dtype u8, expected i32".into()),
        // The lengths come from cu_seqlens_k where seqused_k is left out; it has to be right then.
        (Layout::Split, "seqused_k", Array::left_out(I32), "cu_seqlens_k has shape [0], expected [B+1=4]".into()),
    ];
    for (layout, name, array, text) in rows {
        refused(&paged(*layout).with_operand(name, array.clone()), INVALID_ARGUMENT, text);
    }
}

#[test]
fn one_buffer_needs_a_table_and_no_values() {
    for layout in [Layout::Interleaved, Layout::Stacked, Layout::PerPage] {
        let number = layout.kv_layout();
        let given = paged(layout).with_operand("v", zeros(BF16, &[5, 8, 2, 16]));
        let text = format!("v has shape [5, 8, 2, 16], expected [0]: with kv_layout={number} k holds the values too");
        refused(&given, INVALID_ARGUMENT, &text);
        let absent = paged(layout).with_operand("block_table", Array::left_out(I32));
        refused(&absent, INVALID_ARGUMENT, "block_table is missing");
        let mut fewer = paged(layout);
        fewer.operands.truncate(6);
        refused(&fewer, INVALID_ARGUMENT, "block_table is missing");
    }
    // Without a table four dimensions are no packed rows.
    let absent = paged(Layout::Split).with_operand("block_table", Array::left_out(I32));
    refused(&absent, INVALID_ARGUMENT, "k has shape [5, 8, 2, 16], expected [Tk, Hkv, D=16]");
}

#[test]
fn says_what_is_wrong_with_an_attribute() {
    let rows: &[(&'static str, Attr, &str)] = &[
        ("softmax_scale", Attr::F32(0.0), "softmax_scale is 0, expected finite and > 0"),
        ("softmax_scale", Attr::F32(-0.5), "softmax_scale is -0.5, expected finite and > 0"),
        ("softmax_scale", Attr::F32(f32::NAN), "softmax_scale is NaN, expected finite and > 0"),
        ("softmax_scale", Attr::F32(f32::INFINITY), "softmax_scale is inf, expected finite and > 0"),
        ("softcap", Attr::F32(-1.0), "softcap is -1, expected finite and >= 0 (0 is off)"),
        ("softcap", Attr::F32(f32::NAN), "softcap is NaN, expected finite and >= 0 (0 is off)"),
        ("softcap", Attr::F32(f32::INFINITY), "softcap is inf, expected finite and >= 0 (0 is off)"),
        ("window_left", Attr::I64(-2), "window_left is -2, expected >= 0, or -1 for unlimited"),
        ("window_right", Attr::I64(-7), "window_right is -7, expected >= 0, or -1 for unlimited"),
        ("window_left", Attr::I64(i64::MIN), "window_left is -9223372036854775808, expected >= 0, or -1 for unlimited"),
        ("max_seqlen_q", Attr::I64(-1), "max_seqlen_q is -1, expected >= 0 (0 is unknown)"),
        ("max_seqlen_k", Attr::I64(i64::MIN), "max_seqlen_k is -9223372036854775808, expected >= 0 (0 is unknown)"),
        ("kv_layout", Attr::I64(4), "kv_layout is 4, expected 0, 1, 2 or 3"),
        ("kv_layout", Attr::I64(-1), "kv_layout is -1, expected 0, 1, 2 or 3"),
        ("kv_layout", Attr::I64(i64::MAX), "kv_layout is 9223372036854775807, expected 0, 1, 2 or 3"),
    ];
    for (name, value, text) in rows {
        refused(&packed().attribute(name, value.clone()), INVALID_ARGUMENT, text);
    }
    // A wrong window is wrong also where causal overrules it.
    let call = packed().attribute("causal", Attr::Bool(true)).attribute("window_right", Attr::I64(-2));
    refused(&call, INVALID_ARGUMENT, "window_right is -2, expected >= 0, or -1 for unlimited");
}

#[test]
fn says_what_is_wrong_with_a_result() {
    let rows: &[(&'static str, Dtype, &[i64], &str)] = &[
        ("out", BF16, &[5, 4, 24], "out has shape [5, 4, 24], expected [Tq=6, Hq=4, Dv=24]"),
        ("out", BF16, &[6, 4, 16], "out has shape [6, 4, 16], expected [Tq=6, Hq=4, Dv=24]"),
        ("out", BF16, &[6, 96], "out has shape [6, 96], expected [Tq=6, Hq=4, Dv=24]"),
        ("softmax_lse", BF16, &[4, 6], "softmax_lse has dtype bf16, expected f32"),
        ("softmax_lse", F32, &[6, 4], "softmax_lse has shape [6, 4], expected [Hq=4, Tq=6]"),
        ("softmax_lse", F32, &[24], "softmax_lse has shape [24], expected [Hq=4, Tq=6]"),
        ("workspace", F32, &[64], "workspace has dtype f32, expected u8"),
        ("workspace", U8, &[8, 8], "workspace has shape [8, 8], expected [N]"),
    ];
    for (name, dtype, dims, text) in rows {
        refused(&packed().with_result(name, *dtype, dims), INVALID_ARGUMENT, text);
    }
}

/// Optional operands by name, in their order, and a right one of each.
const OPTIONAL: [(&str, Dtype, &[i64]); 9] = [
    ("seqused_k", I32, &[3]),
    ("block_table", I32, &[0]),
    ("seqused_q", I32, &[3]),
    ("leftpad_k", I32, &[3]),
    ("alibi_slopes", F32, &[3, 4]),
    ("sinks", F32, &[4]),
    ("q_scale", F32, &[1]),
    ("k_scale", F32, &[2]),
    ("v_scale", F32, &[2]),
];

/// The packed call with one optional operand.
fn with_optional(name: &'static str, array: Array) -> Invocation {
    let before = OPTIONAL.iter().take_while(|(n, ..)| *n != name);
    before.fold(packed(), |call, (name, dtype, _)| call.operand(name, Array::left_out(*dtype))).operand(name, array)
}

#[test]
fn says_what_is_wrong_with_an_optional_operand() {
    let slopes = "expected [Hq=4] or [B=3, Hq=4]";
    let scale = "expected [1] or [Hkv=2]";
    let rows: &[(&'static str, Array, String)] = &[
        ("seqused_k", zeros(I64, &[3]), "seqused_k has dtype i64, expected i32".into()),
        ("seqused_k", zeros(I32, &[2]), "seqused_k has shape [2], expected [B=3]".into()),
        ("seqused_q", zeros(F32, &[3]), "seqused_q has dtype f32, expected i32".into()),
        ("seqused_q", zeros(I32, &[4]), "seqused_q has shape [4], expected [B=3]".into()),
        ("seqused_q", zeros(I32, &[3, 1]), "seqused_q has shape [3, 1], expected [B=3]".into()),
        ("leftpad_k", zeros(I8, &[3]), "leftpad_k has dtype i8, expected i32".into()),
        ("leftpad_k", zeros(I32, &[]), "leftpad_k has shape [], expected [B=3]".into()),
        ("alibi_slopes", zeros(F16, &[4]), "alibi_slopes has dtype f16, expected f32".into()),
        ("alibi_slopes", zeros(F32, &[3]), format!("alibi_slopes has shape [3], {slopes}")),
        ("alibi_slopes", zeros(F32, &[4, 3]), format!("alibi_slopes has shape [4, 3], {slopes}")),
        ("sinks", zeros(F64, &[4]), "sinks has dtype f64, expected f32".into()),
        ("sinks", zeros(F32, &[3, 4]), "sinks has shape [3, 4], expected [Hq=4]".into()),
        ("q_scale", zeros(BF16, &[1]), "q_scale has dtype bf16, expected f32".into()),
        ("q_scale", zeros(F32, &[4]), format!("q_scale has shape [4], {scale}")),
        ("k_scale", zeros(F32, &[]), format!("k_scale has shape [], {scale}")),
        ("k_scale", zeros(F16, &[2]), "k_scale has dtype f16, expected f32".into()),
        ("v_scale", zeros(F32, &[3]), format!("v_scale has shape [3], {scale}")),
        ("v_scale", zeros(I32, &[1]), "v_scale has dtype i32, expected f32".into()),
    ];
    for (name, array, text) in rows {
        refused(&with_optional(name, array.clone()), INVALID_ARGUMENT, text);
    }
    // All of them at once, right.
    let all = OPTIONAL.iter().fold(packed(), |call, (name, dtype, dims)| call.operand(name, zeros(*dtype, dims)));
    all.results(Side::EndsAtGuard);
}

#[test]
fn dtypes_outside_the_table_are_not_built_and_the_table_is_named() {
    let of = |q, kv, out| {
        packed()
            .with_operand("q", zeros(q, &[6, 4, 16]))
            .with_operand("k", zeros(kv, &[10, 2, 16]))
            .with_operand("v", zeros(kv, &[10, 2, 24]))
            .with_result("out", out, &[6, 4, 24])
    };
    for (q, kv, out) in [
        (F64, F64, F64),
        (F32, F16, F32),
        (F16, F16, BF16),
        (BF16, F16, BF16),
        (BF16, U8, BF16),
        (F8E4M3FN, F16, F16),
        (F8E4M3FN, F8E4M3FN, F8E4M3FN),
    ] {
        let text = format!("q is {q:?}, k is {kv:?} and out is {out:?}; {DTYPES}");
        refused(&of(q, kv, out), UNIMPLEMENTED, &text);
    }
    let mixed = packed().with_operand("v", zeros(F8E4M3FN, &[10, 2, 24]));
    refused(&mixed, UNIMPLEMENTED, "k is bf16 and v is f8e4m3fn; they have one dtype");
}

#[test]
fn head_dimensions_that_are_not_built_are_told_from_wrong_ones() {
    for head_dim in [4, 12, 20, 257, 264, 576] {
        let call = packed().with_operand("q", zeros(BF16, &[6, 4, head_dim]));
        let text = format!("q has head dimension {head_dim}; every multiple of 8 up to 256 works");
        refused(&call, UNIMPLEMENTED, &text);
        let call = packed().with_operand("v", zeros(BF16, &[10, 2, head_dim]));
        let text = format!("v has head dimension {head_dim}; every multiple of 8 up to 256 works");
        refused(&call, UNIMPLEMENTED, &text);
    }
}
