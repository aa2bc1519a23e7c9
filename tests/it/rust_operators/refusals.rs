//! Errors of the safe functions themselves, before the operator sees a tensor.

use xla_attention::{
    Code, DType, FlashAttnVarlenInputs, FlashAttnVarlenOptions, Kv, On, PagedAttentionInputs, PagedAttentionOptions,
    Result, RopeKvCacheUpdateInputs, RopeKvCacheUpdateOptions, RopeKvCacheUpdateResults, TensorMut, TensorRef,
    flash_attn_varlen, paged_attention, rope_kv_cache_update, simple_add,
};

fn refused(outcome: Result, code: Code, text: &str) {
    let error = outcome.unwrap_err();
    assert_eq!((error.code, error.message.as_str()), (code, text));
}

/// Adds `a` to itself, which must be refused with this text.
fn add(a: TensorRef, text: &str) {
    let outcome = simple_add(a, a, TensorMut::new(&mut [0.0f32; 6], &[2, 3]), On::cpu());
    refused(outcome, Code::InvalidArgument, &format!("xla_gpu_simple_add: {text}"));
}

#[test]
fn a_shape_that_does_not_fit_the_memory_is_refused() {
    let six = [0.0f32; 6];
    add(TensorRef::new(&six, &[7]), "a has shape [7] of f32, which is 28 bytes, in memory of 24");
    add(TensorRef::new(&six, &[2, 2]), "a has shape [2, 2] of f32, which is 16 bytes, in memory of 24");
    add(TensorRef::new(&six, &[]), "a has shape [] of f32, which is 4 bytes, in memory of 24");
    add(TensorRef::new(&six, &[0, 6]), "a has shape [0, 6] of f32, which is 0 bytes, in memory of 24");
    add(TensorRef::new(&six, &[1; 9]), "a has rank 9, expected at most 8");
    let large = i64::MAX;
    add(TensorRef::new(&six, &[usize::MAX]), &format!("a has shape [{large}]: its size overflows"));
    add(TensorRef::new(&six, &[1 << 32, 1 << 32]), "a has shape [4294967296, 4294967296]: its size overflows");
    let a = TensorRef::new(&six, &[2, 3]);
    let outcome = simple_add(a, a, TensorMut::new(&mut [0.0f32; 5], &[2, 3]), On::cpu());
    let text = "xla_gpu_simple_add: out has shape [2, 3] of f32, which is 24 bytes, in memory of 20";
    refused(outcome, Code::InvalidArgument, text);
}

#[test]
fn strides_that_leave_the_memory_are_refused() {
    let six = [0.0f32; 6];
    let two_by_three = |strides: &[usize]| TensorRef::new(&six, &[2, 3]).with_strides(strides);
    let leave = "which leave its memory of 24 bytes";
    add(two_by_three(&[4, 1]), &format!("a has shape [2, 3] and strides [4, 1], {leave}"));
    for (stride, shown) in [(1 << 62, 1 << 62), (usize::MAX, i64::MAX)] {
        let text = format!("a has shape [2, 3] and strides Some([{shown}, 1]): its size overflows");
        add(two_by_three(&[stride, 1]), &text);
    }
    add(two_by_three(&[3]), "a has 1 strides, expected 2");
    add(two_by_three(&[1; 9]), "a has rank 9, expected at most 8");
    // These strides stay within the memory, but the operator requires a dense tensor.
    add(two_by_three(&[1, 2]), "a has strides Some([1, 2]), expected a dense tensor");
}

#[test]
fn bytes_without_a_known_dtype_and_its_alignment_are_refused() {
    let memory = [0.0f32; 7];
    // SAFETY: these are the bytes of `memory`.
    let bytes = unsafe { std::slice::from_raw_parts(memory.as_ptr().cast::<u8>(), 28) };
    let of = |range: std::ops::Range<usize>, dtype| TensorRef::from_bytes(&bytes[range], dtype, &[2, 3]);
    add(of(0..24, DType::ABSENT), "a has dtype number 0 of XLA, which no operator takes");
    add(of(0..24, DType(77)), "a has dtype number 77 of XLA, which no operator takes");
    add(of(0..25, DType::F32), "a has shape [2, 3] of f32, which is 24 bytes, in memory of 25");
    add(of(0..24, DType::PRED), "a has shape [2, 3] of pred, which is 6 bytes, in memory of 24");
    let text = format!("a lies at {:p}, expected a multiple of 4 bytes", &raw const bytes[1]);
    add(of(1..25, DType::F32), &text);
}

/// A call of `flash_attn_varlen` with one sequence of one row, which must be refused.
fn flash(kv: &Kv<TensorRef>, options: &FlashAttnVarlenOptions, code: Code, text: &str) {
    let inputs = FlashAttnVarlenInputs {
        q: TensorRef::new(&[0.0f32; 8], &[1, 1, 8]),
        kv: *kv,
        cu_seqlens_q: TensorRef::new(&[0, 1], &[2]),
    };
    let outcome = flash_attn_varlen(&inputs, options, TensorMut::new(&mut [0.0f32; 8], &[1, 1, 8]), On::cpu());
    refused(outcome, code, &format!("xla_gpu_flash_attn_varlen: {text}"));
}

#[test]
fn options_that_do_not_fit_are_refused_by_name() {
    let (rows, pages) = (TensorRef::new(&[0.0f32; 8], &[1, 1, 8]), TensorRef::new(&[0.0f32; 16], &[1, 1, 2, 8]));
    let (packed, block_table) = (&Kv::Split { k: rows, v: rows }, Some(TensorRef::new(&[0], &[1, 1])));
    let none = FlashAttnVarlenOptions::default;
    let untold = FlashAttnVarlenOptions { block_table, ..none() };
    let text = "a block_table needs seqused_k or cu_seqlens_k, which tell lengths";
    flash(&Kv::Interleaved(pages), &untold, Code::InvalidArgument, text);
    flash(&Kv::Interleaved(pages), &none(), Code::InvalidArgument, "block_table is missing");
    let negative = FlashAttnVarlenOptions { softmax_scale: Some(-1.0), ..none() };
    flash(packed, &negative, Code::InvalidArgument, "softmax_scale is -1, expected finite and > 0");
    let leftpad_k = Some(TensorRef::new(&[0, 0], &[2]));
    let two = FlashAttnVarlenOptions { leftpad_k, ..none() };
    flash(packed, &two, Code::InvalidArgument, "leftpad_k has shape [2], expected [B=1]");
}

#[test]
fn a_window_without_a_key_is_refused() {
    let inputs = PagedAttentionInputs {
        query: TensorRef::new(&[0.0f32; 8], &[1, 1, 8]),
        kv_cache: TensorRef::new(&[0.0f32; 16], &[1, 1, 2, 8]),
        context_lens: TensorRef::new(&[1], &[1]),
        block_tables: TensorRef::new(&[0], &[1, 1]),
        query_start_loc: TensorRef::new(&[0, 1], &[2]),
        num_seqs: TensorRef::new(&[1], &[1]),
    };
    let options = PagedAttentionOptions { sliding_window: Some(0), ..Default::default() };
    let outcome = paged_attention(&inputs, &options, TensorMut::new(&mut [0.0f32; 8], &[1, 1, 8]), On::cpu());
    let text = "xla_gpu_paged_attention: sliding_window is 0, expected >= 1, or -1 for none";
    refused(outcome, Code::InvalidArgument, text);
}

#[test]
fn a_cache_in_two_tensors_is_not_rotated_into() {
    let row = TensorRef::new(&[0.0f32; 8], &[1, 1, 8]);
    let zero = TensorRef::new(&[0], &[1]);
    let inputs = RopeKvCacheUpdateInputs {
        query: row,
        key: row,
        value: row,
        slot_mapping: zero,
        positions: zero,
        cos_sin: TensorRef::new(&[1.0f32, 0.0], &[1, 2]),
    };
    let (mut k, mut v, mut query) = ([0.0f32; 8], [0.0f32; 8], [0.0f32; 8]);
    let results = RopeKvCacheUpdateResults {
        kv_cache: Kv::Split { k: TensorMut::new(&mut k, &[1, 1, 1, 8]), v: TensorMut::new(&mut v, &[1, 1, 1, 8]) },
        query_out: TensorMut::new(&mut query, &[1, 1, 8]),
    };
    let outcome = rope_kv_cache_update(&inputs, &RopeKvCacheUpdateOptions::default(), results, On::cpu());
    let text =
        "xla_gpu_rope_kv_cache_update: kv_cache is two tensors; one that holds keys and values, in any layout, works";
    refused(outcome, Code::Unimplemented, text);
}
