//! Every mistake that rotations and merges find, as `refusals.rs` has those of the other operators.

#![allow(clippy::unwrap_used, reason = "a failed step is a failed test")]

mod support;

use support::array::{Array, BF16, Dtype, F8E4M3FN, F16, F32, F64, I32, I64};
use support::frame::{INVALID_ARGUMENT, Refusal, UNIMPLEMENTED};
use support::invocation::{Attr, Invocation};
use support::right_calls::{merge_attention_states as merge, rope_kv_cache_update as rope, zeros};

fn refused(call: &Invocation, code: i32, text: &str) {
    assert_eq!(call.refusal(), Refusal { code, text: format!("{}: {text}", call.target) });
}

#[test]
fn merge_attention_states_says_what_is_wrong() {
    let rows: &[(&'static str, Array, &str)] = &[
        ("out_a", zeros(F8E4M3FN, &[6, 4, 20]), "out_a has dtype f8e4m3fn, expected f16 or bf16 or f32"),
        ("out_a", zeros(F16, &[6, 4, 20]), "out_b has dtype bf16, expected f16"),
        ("out_a", zeros(BF16, &[6, 80]), "out_a has shape [6, 80], expected [n, h, d]"),
        ("out_a", zeros(BF16, &[6, 4, 0]), "out_a has shape [6, 4, 0], expected d of at least 1"),
        ("out_a", zeros(BF16, &[7, 4, 20]), "lse_a has shape [4, 6], expected [h=4, n=7]"),
        ("lse_a", zeros(BF16, &[4, 6]), "lse_a has dtype bf16, expected f32"),
        ("lse_a", zeros(F32, &[6, 4]), "lse_a has shape [6, 4], expected [h=4, n=6]"),
        ("lse_a", zeros(F32, &[4, 6, 1]), "lse_a has shape [4, 6, 1], expected [h=4, n=6]"),
        ("out_b", zeros(F32, &[6, 4, 20]), "out_b has dtype f32, expected bf16"),
        ("out_b", zeros(BF16, &[6, 4, 16]), "out_b has shape [6, 4, 16], expected [n=6, h=4, d=20]"),
        ("lse_b", zeros(F64, &[4, 6]), "lse_b has dtype f64, expected f32"),
        ("lse_b", zeros(F32, &[24]), "lse_b has shape [24], expected [h=4, n=6]"),
    ];
    for (name, array, text) in rows {
        refused(&merge().with_operand(name, array.clone()), INVALID_ARGUMENT, text);
    }
    let rows: &[(&'static str, Dtype, &[i64], &str)] = &[
        ("out", F32, &[6, 4, 20], "out has dtype f32, expected bf16"),
        ("out", BF16, &[4, 6, 20], "out has shape [4, 6, 20], expected [n=6, h=4, d=20]"),
        ("lse", BF16, &[4, 6], "lse has dtype bf16, expected f32"),
        ("lse", F32, &[6, 4], "lse has shape [6, 4], expected [h=4, n=6]"),
    ];
    for (name, dtype, dims, text) in rows {
        refused(&merge().with_result(name, *dtype, dims), INVALID_ARGUMENT, text);
    }
}

#[test]
fn rope_kv_cache_update_says_what_is_wrong() {
    let rot = "expected [max_pos, rot] with rot even and at most D=16";
    let rows: &[(&'static str, Array, String)] = &[
        ("key", zeros(I32, &[6, 2, 16]), "key has dtype i32, expected f16 or bf16 or f32".into()),
        ("value", zeros(F16, &[6, 3, 16]), "value has shape [6, 3, 16], expected [T=6, Hkv=2, D=16]".into()),
        ("kv_cache", zeros(BF16, &[5, 8, 4, 16]), "kv_cache has dtype bf16, expected f16 or f8e4m3fn or f8e5m2".into()),
        ("kv_cache", zeros(F8E4M3FN, &[5, 8, 4, 16]), "result kv_cache has dtype f16, expected f8e4m3fn".into()),
        ("slot_mapping", zeros(I32, &[7]), "slot_mapping has shape [7], expected [T=6]".into()),
        ("query", zeros(BF16, &[6, 4, 16]), "query has dtype bf16, expected f16".into()),
        ("query", zeros(F16, &[5, 4, 16]), "query has shape [5, 4, 16], expected [T=6, Hq, D=16]".into()),
        ("query", zeros(F16, &[6, 4, 24]), "query has shape [6, 4, 24], expected [T=6, Hq, D=16]".into()),
        ("query", zeros(F16, &[6, 64]), "query has shape [6, 64], expected [T=6, Hq, D=16]".into()),
        ("query", zeros(F16, &[6, 0, 16]), "query has shape [6, 0, 16], expected at least one head".into()),
        ("query", zeros(F16, &[6, 5, 16]), "query_out has shape [6, 4, 16], expected [T=6, Hq=5, D=16]".into()),
        ("positions", zeros(I64, &[6]), "positions has dtype i64, expected i32".into()),
        ("positions", zeros(I32, &[5]), "positions has shape [5], expected [T=6]".into()),
        ("cos_sin", zeros(F16, &[9, 12]), "cos_sin has dtype f16, expected f32".into()),
        ("cos_sin", zeros(F32, &[9, 2, 6]), "cos_sin has shape [9, 2, 6], expected [max_pos, rot]".into()),
        ("cos_sin", zeros(F32, &[9, 11]), format!("cos_sin has shape [9, 11], {rot}")),
        ("cos_sin", zeros(F32, &[9, 18]), format!("cos_sin has shape [9, 18], {rot}")),
    ];
    for (name, array, text) in rows {
        refused(&rope(1).with_operand(name, array.clone()), INVALID_ARGUMENT, text);
    }
    let call = rope(2).with_result("query_out", F32, &[6, 4, 16]);
    refused(&call, INVALID_ARGUMENT, "query_out has dtype f32, expected f16");
    let call = rope(3).with_result("kv_cache", F16, &[5, 2, 8, 2, 24]);
    let text = "result kv_cache has shape [5, 2, 8, 2, 24], expected the operand's, [5, 2, 8, 2, 16]";
    refused(&call, INVALID_ARGUMENT, text);
    let call = rope(1).attribute("kv_layout", Attr::I64(0));
    refused(&call, INVALID_ARGUMENT, "kv_layout is 0, expected 1, 2 or 3");
    let call = rope(1).operand("k_scale", zeros(F32, &[4]));
    refused(&call, INVALID_ARGUMENT, "k_scale has shape [4], expected [1] or [Hkv=2]");
    let call = rope(1).with_operand("key", zeros(F16, &[6, 2, 20])).with_operand("value", zeros(F16, &[6, 2, 20]));
    refused(&call, UNIMPLEMENTED, "key has head dimension 20; every multiple of 8 up to 256 works");
}
