//! Every mistake that the operators find, with the code and the exact text under which the caller hears of it.
//!
//! One row a check of `src/ops`, those of attention in files of their own; what only `xla_attention::call` can be given
//! (strides, wrong counts) is in `rust_interface.rs` and `rows_interface.rs`, and what XLA's header finds first in
//! `ffi_boundary.rs`.

#![allow(clippy::unwrap_used, reason = "a failed step is a failed test")]

#[path = "refusals/flash_attn_varlen.rs"]
mod flash_attn_varlen;
#[path = "refusals/paged_attention.rs"]
mod paged_attention;
mod support;

use support::array::{Array, BF16, Dtype, F8E4M3FN, F8E5M2, F16, F32, F64, I32, I64, U8, U32};
use support::frame::{CPU, Frame, INVALID_ARGUMENT, Refusal, UNIMPLEMENTED};
use support::invocation::{Attr, Invocation};
use support::right_calls::{
    kv_cache_update as update, kv_cache_update_split as split, paged_attention as paged, zeros,
};

fn refused(call: &Invocation, code: i32, text: &str) {
    assert_eq!(call.refusal(), Refusal { code, text: format!("{}: {text}", call.target) });
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
        (
            1,
            "kv_cache",
            zeros(BF16, &[5, 8, 4, 16]),
            "kv_cache has dtype bf16, expected f16 or f8e4m3fn or f8e5m2".into(),
        ),
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
    let call = update(1).with_operand("kv_cache", zeros(F8E5M2, &[5, 8, 4, 16]));
    refused(&call, INVALID_ARGUMENT, "result kv_cache has dtype f16, expected f8e5m2");
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
        ("k_cache", zeros(F32, &[5, 8, 2, 16]), "k_cache has dtype f32, expected f16 or f8e4m3fn or f8e5m2"),
        ("k_cache", zeros(F8E4M3FN, &[5, 8, 2, 16]), "v_cache has dtype f16, expected f8e4m3fn"),
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
