//! Every mistake that the operators find, with the code and the exact text under which the caller hears of it.
//!
//! One row a check of `src/ops`; what only `xla_attention::call` can be given (strides, wrong counts) is in
//! `rust_interface.rs`, and what XLA's header finds first in `ffi_boundary.rs`.

#![allow(clippy::unwrap_used, reason = "a failed step is a failed test")]

mod support;

use support::array::{Array, BF16, Dtype, F8E4M3FN, F8E5M2, F16, F32, F64, I8, I32, I64, U8, U32};
use support::frame::{CPU, Frame, INVALID_ARGUMENT, Refusal, UNIMPLEMENTED};
use support::invocation::{Attr, Invocation};
use support::right_calls::{
    kv_cache_update as update, kv_cache_update_split as split, paged_attention as paged, zeros,
};

fn refused(call: &Invocation, code: i32, text: &str) {
    assert_eq!(call.refusal(), Refusal { code, text: format!("{}: {text}", call.target) });
}

#[test]
fn paged_attention_says_what_is_wrong_with_an_operand() {
    let rows: &[(&'static str, Array, &str)] = &[
        ("query", zeros(F64, &[6, 4, 16]), "query has dtype f64, expected f16 or bf16 or f32"),
        ("query", zeros(I8, &[6, 4, 16]), "query has dtype i8, expected f16 or bf16 or f32"),
        ("query", zeros(BF16, &[6, 4]), "query has shape [6, 4], expected [T, Hq, D]"),
        ("query", zeros(BF16, &[]), "query has shape [], expected [T, Hq, D]"),
        ("query", zeros(BF16, &[1, 6, 4, 16]), "query has shape [1, 6, 4, 16], expected [T, Hq, D]"),
        ("query", zeros(BF16, &[6, 0, 16]), "query has shape [6, 0, 16], expected at least one head"),
        ("query", zeros(BF16, &[6, 4, 0]), "query has head dimension 0, expected at least 8"),
        ("query", zeros(F16, &[6, 4, 16]), "kv_cache has dtype bf16, expected f16"),
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
        ("kv_cache", zeros(F32, &[5, 8, 4, 16]), "kv_cache has dtype f32, expected bf16"),
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
        (
            "kv_cache",
            zeros(BF16, &[5, 0, 4, 16]),
            "kv_cache has shape [5, 0, 4, 16], expected a page_size of at least 1",
        ),
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
fn paged_attention_says_what_is_wrong_with_a_result() {
    let rows: &[(&'static str, Dtype, &[i64], &str)] = &[
        ("out", F32, &[6, 4, 16], "out has dtype f32, expected bf16"),
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
fn paged_attention_says_what_is_wrong_with_an_attribute() {
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
fn paged_attention_tells_what_is_not_built_from_what_is_wrong() {
    for head_dim in [4, 12, 20, 257, 264, 576] {
        let call = paged()
            .with_operand("query", zeros(BF16, &[6, 4, head_dim]))
            .with_operand("kv_cache", zeros(BF16, &[5, 8, 4, head_dim]))
            .with_result("out", BF16, &[6, 4, head_dim]);
        let text = format!("query has head dimension {head_dim}; every multiple of 8 up to 256 works");
        refused(&call, UNIMPLEMENTED, &text);
    }
    for (dtype, name) in [(F8E4M3FN, "f8e4m3fn"), (F8E5M2, "f8e5m2")] {
        let call = paged().with_operand("kv_cache", zeros(dtype, &[5, 8, 4, 16]));
        let text =
            format!("kv_cache has dtype {name}, which is not built yet; a cache of the query's dtype, bf16, works");
        refused(&call, UNIMPLEMENTED, &text);
    }
    let optional = ["alibi_slopes", "sinks", "q_scale", "k_scale", "v_scale"];
    for given in 0..optional.len() {
        let call = optional[..=given].iter().enumerate().fold(paged(), |call, (index, name)| {
            call.operand(name, if index == given { zeros(F32, &[4]) } else { Array::left_out(F32) })
        });
        let name = optional[given];
        let text =
            format!("{name} is not built yet; leave it out (a scalar scale can be folded into the attribute scale)");
        refused(&call, UNIMPLEMENTED, &text);
    }
}

#[test]
fn kv_cache_update_says_what_is_wrong_with_an_operand() {
    let interleaved = "expected [num_pages, page_size, 2*Hkv=4, D=16]";
    let stacked = "expected [K and V=2, num_pages, page_size, Hkv=2, D=16]";
    let per_page = "expected [num_pages, K and V=2, page_size, Hkv=2, D=16]";
    let rows: &[(i64, &'static str, Array, String)] = &[
        (1, "key", zeros(I32, &[6, 2, 16]), "key has dtype i32, expected f16 or bf16 or f32".into()),
        (1, "key", zeros(F16, &[6, 32]), "key has shape [6, 32], expected [T, Hkv, D]".into()),
        (1, "key", zeros(F16, &[6, 0, 16]), "key has shape [6, 0, 16], expected at least one head".into()),
        (1, "key", zeros(F16, &[6, 2, 0]), "key has head dimension 0, expected at least 8".into()),
        (1, "value", zeros(F8E5M2, &[6, 2, 16]), "value has dtype f8e5m2, expected f16 or bf16 or f32".into()),
        (1, "value", zeros(F32, &[6, 2, 16]), "value has dtype f32, expected f16".into()),
        (1, "value", zeros(F16, &[7, 2, 16]), "value has shape [7, 2, 16], expected [T=6, Hkv=2, D=16]".into()),
        (1, "value", zeros(F16, &[6, 1, 16]), "value has shape [6, 1, 16], expected [T=6, Hkv=2, D=16]".into()),
        (1, "value", zeros(F16, &[6, 2, 24]), "value has shape [6, 2, 24], expected [T=6, Hkv=2, D=16]".into()),
        (1, "kv_cache", zeros(BF16, &[5, 8, 4, 16]), "kv_cache has dtype bf16, expected f16".into()),
        (1, "kv_cache", zeros(F16, &[5, 8, 2, 16]), format!("kv_cache has shape [5, 8, 2, 16], {interleaved}")),
        (1, "kv_cache", zeros(F16, &[2, 5, 8, 2, 16]), format!("kv_cache has shape [2, 5, 8, 2, 16], {interleaved}")),
        (2, "kv_cache", zeros(F16, &[5, 8, 4, 16]), format!("kv_cache has shape [5, 8, 4, 16], {stacked}")),
        (2, "kv_cache", zeros(F16, &[5, 2, 8, 2, 16]), format!("kv_cache has shape [5, 2, 8, 2, 16], {stacked}")),
        (3, "kv_cache", zeros(F16, &[2, 5, 8, 2, 16]), format!("kv_cache has shape [2, 5, 8, 2, 16], {per_page}")),
        (3, "kv_cache", zeros(F16, &[5, 2, 8, 2, 8]), format!("kv_cache has shape [5, 2, 8, 2, 8], {per_page}")),
        (1, "slot_mapping", zeros(U32, &[6]), "slot_mapping has dtype u32, expected i32 or i64".into()),
        (1, "slot_mapping", zeros(I32, &[5]), "slot_mapping has shape [5], expected [T=6]".into()),
        (1, "slot_mapping", zeros(I32, &[6, 1]), "slot_mapping has shape [6, 1], expected [T=6]".into()),
    ];
    for (layout, name, array, text) in rows {
        refused(&update(*layout).with_operand(name, array.clone()), INVALID_ARGUMENT, text);
    }
}

#[test]
fn kv_cache_update_says_what_is_wrong_with_layout_result_and_scales() {
    for layout in [0, 4, -1, i64::MIN, i64::MAX] {
        let text = format!("kv_layout is {layout}, expected 1, 2 or 3");
        refused(&update(1).attribute("kv_layout", Attr::I64(layout)), INVALID_ARGUMENT, &text);
    }
    let call = update(1).with_result("kv_cache", F32, &[5, 8, 4, 16]);
    refused(&call, INVALID_ARGUMENT, "result kv_cache has dtype f32, expected f16");
    let call = update(1).with_result("kv_cache", F16, &[6, 8, 4, 16]);
    let text = "result kv_cache has shape [6, 8, 4, 16], expected the operand's, [5, 8, 4, 16]";
    refused(&call, INVALID_ARGUMENT, text);

    let k_scale = |array| update(1).operand("k_scale", array);
    refused(&k_scale(zeros(F16, &[1])), INVALID_ARGUMENT, "k_scale has dtype f16, expected f32");
    refused(&k_scale(zeros(F32, &[3])), INVALID_ARGUMENT, "k_scale has shape [3], expected [1] or [Hkv=2]");
    refused(&k_scale(zeros(F32, &[])), INVALID_ARGUMENT, "k_scale has shape [], expected [1] or [Hkv=2]");
    let v_scale = |array| update(1).operand("k_scale", Array::left_out(F32)).operand("v_scale", array);
    refused(&v_scale(zeros(F64, &[1])), INVALID_ARGUMENT, "v_scale has dtype f64, expected f32");
    refused(&v_scale(zeros(F32, &[2, 1])), INVALID_ARGUMENT, "v_scale has shape [2, 1], expected [1] or [Hkv=2]");
}

#[test]
fn kv_cache_update_tells_what_is_not_built_from_what_is_wrong() {
    for (dtype, name) in [(F8E4M3FN, "f8e4m3fn"), (F8E5M2, "f8e5m2")] {
        let call = update(1).with_operand("kv_cache", zeros(dtype, &[5, 8, 4, 16]));
        let works = "which is not built yet; a cache of the key's dtype, f16, works";
        refused(&call, UNIMPLEMENTED, &format!("kv_cache has dtype {name}, {works}"));
        let call = split().with_operand("v_cache", zeros(dtype, &[5, 8, 2, 24]));
        refused(&call, UNIMPLEMENTED, &format!("v_cache has dtype {name}, {works}"));
    }
    let call = update(1).with_operand("key", zeros(F16, &[6, 2, 20])).with_operand("value", zeros(F16, &[6, 2, 20]));
    refused(&call, UNIMPLEMENTED, "key has head dimension 20; every multiple of 8 up to 256 works");
    let call = split().with_operand("value", zeros(F16, &[6, 2, 264]));
    refused(&call, UNIMPLEMENTED, "value has head dimension 264; every multiple of 8 up to 256 works");
}

#[test]
fn kv_cache_update_split_says_what_is_wrong() {
    let rows: &[(&'static str, Array, &str)] = &[
        ("key", zeros(U8, &[6, 2, 16]), "key has dtype u8, expected f16 or bf16 or f32"),
        ("key", zeros(F16, &[6, 3, 16]), "value has shape [6, 2, 24], expected [T=6, Hkv=3, Dv]"),
        ("value", zeros(F32, &[6, 2, 24]), "value has dtype f32, expected f16"),
        ("value", zeros(F16, &[5, 2, 24]), "value has shape [5, 2, 24], expected [T=6, Hkv=2, Dv]"),
        (
            "value",
            zeros(F16, &[6, 2, 32]),
            "v_cache has shape [5, 8, 2, 24], expected [num_pages=5, page_size=8, Hkv=2, Dv=32]",
        ),
        ("k_cache", zeros(F32, &[5, 8, 2, 16]), "k_cache has dtype f32, expected f16"),
        (
            "k_cache",
            zeros(F16, &[5, 8, 4, 16]),
            "k_cache has shape [5, 8, 4, 16], expected [num_pages, page_size, Hkv=2, D=16]",
        ),
        ("v_cache", zeros(BF16, &[5, 8, 2, 24]), "v_cache has dtype bf16, expected f16"),
        (
            "v_cache",
            zeros(F16, &[4, 8, 2, 24]),
            "v_cache has shape [4, 8, 2, 24], expected [num_pages=5, page_size=8, Hkv=2, Dv=24]",
        ),
        (
            "v_cache",
            zeros(F16, &[5, 4, 2, 24]),
            "v_cache has shape [5, 4, 2, 24], expected [num_pages=5, page_size=8, Hkv=2, Dv=24]",
        ),
        ("slot_mapping", zeros(I64, &[]), "slot_mapping has shape [], expected [T=6]"),
    ];
    for (name, array, text) in rows {
        refused(&split().with_operand(name, array.clone()), INVALID_ARGUMENT, text);
    }
    let call = split().with_result("v_cache", F16, &[5, 8, 2, 16]);
    let text = "result v_cache has shape [5, 8, 2, 16], expected the operand's, [5, 8, 2, 24]";
    refused(&call, INVALID_ARGUMENT, text);
    let call = split().with_result("k_cache", BF16, &[5, 8, 2, 16]);
    refused(&call, INVALID_ARGUMENT, "result k_cache has dtype bf16, expected f16");
}

/// A frame of claims alone: nothing behind it may be touched.
fn claims<'a>(target: &str, operands: &[(Dtype, &[i64])], results: &[(Dtype, &[i64])], data: *mut u8) -> Frame<'a> {
    let mut frame = Frame::new(target, CPU);
    for (dtype, dims) in operands {
        // SAFETY: every call below is refused for its sizes.
        frame = unsafe { frame.claimed_operand(dtype.0, dims, data) };
    }
    for (dtype, dims) in results {
        // SAFETY: as above.
        frame = unsafe { frame.claimed_result(dtype.0, dims, data) };
    }
    frame
}

/// An address that belongs to nobody, aligned to every element.
const NOWHERE: *mut u8 = std::ptr::without_provenance_mut(64);

fn text_of(frame: &Frame) -> String {
    let refusal = frame.run().unwrap_err();
    assert_eq!(refusal.code, INVALID_ARGUMENT);
    refusal.text
}

#[test]
fn a_dtype_without_a_name_here_is_called_by_its_number() {
    // s4 and token
    for number in [21, 17] {
        let other = (Dtype(number), &[2i64][..]);
        let text = text_of(&claims("xla_gpu_simple_add", &[other, other], &[other], NOWHERE));
        let expected = "expected f16 or bf16 or f32 or f64 or i8 or u8 or i32 or i64";
        assert_eq!(text, format!("xla_gpu_simple_add: a has dtype number {number} of XLA, {expected}"));
    }
}

#[test]
fn sizes_that_cannot_be_are_refused() {
    let add =
        |dims: &[i64]| text_of(&claims("xla_gpu_simple_add", &[(F32, dims), (F32, dims)], &[(F32, dims)], NOWHERE));
    assert_eq!(add(&[-1]), "xla_gpu_simple_add: a has shape [-1]: a size is negative");
    assert_eq!(add(&[0, -3]), "xla_gpu_simple_add: a has shape [0, -3]: a size is negative");
    let huge = i64::MAX / 2;
    assert_eq!(add(&[huge, 4]), format!("xla_gpu_simple_add: a has shape [{huge}, 4]: its size overflows"));
    // Elements fit into an i64, bytes do not.
    assert_eq!(add(&[huge]), format!("xla_gpu_simple_add: a has shape [{huge}]: its size overflows"));
    assert_eq!(
        add(&[1 << 31, 1 << 31, 1 << 31]),
        "xla_gpu_simple_add: a has shape [2147483648, 2147483648, 2147483648]: its size overflows"
    );
}

#[test]
fn elements_without_memory_are_refused_and_no_elements_need_none() {
    let null = std::ptr::null_mut();
    let add = |dims: &[i64]| claims("xla_gpu_simple_add", &[(F32, dims), (F32, dims)], &[(F32, dims)], null);
    assert_eq!(text_of(&add(&[2])), "xla_gpu_simple_add: a has shape [2] and no memory");
    assert_eq!(text_of(&add(&[])), "xla_gpu_simple_add: a has shape [] and no memory");
    add(&[0]).run().unwrap();
    add(&[3, 0, 2]).run().unwrap();
}

#[test]
fn memory_that_is_not_aligned_to_the_element_is_refused() {
    let odd: *mut u8 = std::ptr::without_provenance_mut(0x1002);
    let add = |dtype| claims("xla_gpu_simple_add", &[(dtype, &[2]), (dtype, &[2])], &[(dtype, &[2])], odd);
    assert_eq!(text_of(&add(F32)), "xla_gpu_simple_add: a lies at 0x1002, expected a multiple of 4 bytes");
    assert_eq!(text_of(&add(F64)), "xla_gpu_simple_add: a lies at 0x1002, expected a multiple of 8 bytes");
}

/// The claim of a paged attention call with T rows, P pages, S slots and M table entries.
fn paged_claims<'a>(rows: i64, pages: i64, page_size: i64, seqs: i64, entries: i64) -> Frame<'a> {
    let (query, lse) = ([rows, 1, 8], [1, rows]);
    claims(
        "xla_gpu_paged_attention",
        &[
            (F16, &query),
            (F16, &[pages, page_size, 2, 8]),
            (I32, &[seqs]),
            (I32, &[seqs, entries]),
            (I32, &[seqs + 1]),
            (I32, &[1]),
        ],
        &[(F16, &query), (F32, &lse)],
        NOWHERE,
    )
    .attributes(&paged().attributes)
}

#[test]
fn sizes_that_kernels_could_not_count_are_refused() {
    const TOO_MANY: i64 = i32::MAX as i64;
    let prefix = "xla_gpu_paged_attention:";
    assert_eq!(text_of(&paged_claims(TOO_MANY, 1, 1, 1, 1)), format!("{prefix} T is 2147483647, expected below 2^31"));
    assert_eq!(
        text_of(&paged_claims(1, TOO_MANY, 1, 1, 1)),
        format!("{prefix} num_pages is 2147483647, expected below 2^31")
    );
    assert_eq!(
        text_of(&paged_claims(1, 1, 1, TOO_MANY, 1)),
        format!("{prefix} num_seqs is 2147483647, expected below 2^31")
    );
    assert_eq!(
        text_of(&paged_claims(1, 1, 1 << 16, 1, 1 << 15)),
        format!("{prefix} max_pages=32768 pages of 65536 tokens are 2^31 keys or more")
    );
    let rows: [i64; 3] = [TOO_MANY, 1, 8];
    let frame = claims(
        "xla_gpu_kv_cache_update",
        &[(F16, &[1, 1, 2, 8]), (F16, &rows), (F16, &rows), (I32, &rows[..1])],
        &[(F16, &[1, 1, 2, 8])],
        NOWHERE,
    );
    let text = text_of(&frame.attribute("kv_layout", Attr::I64(1)));
    assert_eq!(text, "xla_gpu_kv_cache_update: T is 2147483647, expected below 2^31");
}

#[test]
fn an_empty_operand_may_have_any_other_size() {
    const HUGE: i64 = i64::MAX / 4;
    let add = [0, HUGE, HUGE];
    claims("xla_gpu_simple_add", &[(F32, &add), (F32, &add)], &[(F32, &add)], std::ptr::null_mut()).run().unwrap();
    // No page of 2^61 tokens: nothing to see. One slot in a table of one entry: more keys than a kernel counts.
    let text = text_of(&paged_claims(0, 0, HUGE, 0, 1));
    assert_eq!(text, format!("xla_gpu_paged_attention: max_pages=1 pages of {HUGE} tokens are 2^31 keys or more"));
    let rows = [0, i64::MAX, 8];
    let frame = claims(
        "xla_gpu_kv_cache_update",
        &[(F16, &[1, 1, 2, 8]), (F16, &rows), (F16, &rows), (I32, &[0])],
        &[(F16, &[1, 1, 2, 8])],
        NOWHERE,
    );
    let text = text_of(&frame.attribute("kv_layout", Attr::I64(1)));
    assert!(text.starts_with("xla_gpu_kv_cache_update: kv_cache has shape [1, 1, 2, 8], expected "), "{text}");
}
