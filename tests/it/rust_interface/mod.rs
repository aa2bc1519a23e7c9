//! `xla_attention::call` and its C twin `xa_call`: what they take beyond XLA's dense buffers, and what they refuse.

mod attention;

use crate::support::array::{Array, BF16, F16, F32, I32};
use crate::support::frame::INVALID_ARGUMENT;
use crate::support::guard::{Guarded, Side, for_both_sides};
use crate::support::invocation::Attr;
use crate::support::spread::Spread;
use std::ffi::{CStr, c_char};
use std::ptr::{null, null_mut};
use xla_attention::ops::workspace::AttentionSizes;
use xla_attention::{
    Action, Attribute, Call, DType, Error, Op, SingleThread, Tensor, XaAttribute, XaCall, XaTensor, call, xa_call,
    xa_op,
};

/// What a tensor claims to be; without memory.
fn claim(dtype: crate::support::array::Dtype, dims: &[i64]) -> Tensor<'_> {
    Tensor::dense(DType(dtype.0), null_mut(), dims)
}

fn check(op: Op, operands: &[Tensor], results: &[Tensor], attributes: &[Attribute]) -> Result<(), Error> {
    // SAFETY: a check touches no memory.
    unsafe { call(&Call { op, action: Action::Check, operands, results, attributes }) }
}

fn refused(outcome: Result<(), Error>, text: &str) {
    let error = outcome.unwrap_err();
    assert_eq!((error.code as i32, error.message.as_str()), (INVALID_ARGUMENT, text));
}

const PAGED_ATTRIBUTES: [Attribute; 4] =
    [Attribute::Bool(false), Attribute::F32(0.5), Attribute::I64(-1), Attribute::F32(0.0)];

/// The six required operands of a right call of paged attention.
fn paged_claims() -> [Tensor<'static>; 6] {
    [
        claim(BF16, &[6, 4, 16]),
        claim(BF16, &[5, 8, 4, 16]),
        claim(I32, &[3]),
        claim(I32, &[3, 2]),
        claim(I32, &[4]),
        claim(I32, &[]),
    ]
}

#[test]
fn the_other_sizes_of_an_empty_tensor_do_not_matter() {
    const HUGE: i64 = i64::MAX / 4;
    let mut operands = paged_claims();
    operands[0] = claim(BF16, &[0, 4, 16]);
    operands[1] = claim(BF16, &[0, HUGE, 4, 16]);
    operands[3] = claim(I32, &[3, 0]);
    check(Op::PagedAttention, &operands, &[claim(BF16, &[0, 4, 16])], &PAGED_ATTRIBUTES).unwrap();
    let (cache, row) = (claim(F16, &[0, HUGE, 4, 16]), claim(F16, &[6, 2, 16]));
    let outcome = check(Op::KvCacheUpdate, &[cache, row, row, claim(I32, &[6])], &[cache], &[Attribute::I64(1)]);
    refused(outcome, &format!("xla_gpu_kv_cache_update: page_size is {HUGE}, expected below 2^31"));
}

#[test]
fn a_rotation_of_no_row_may_have_any_number_of_heads() {
    let (mut cache, mut table) = ([1.0f32; 16], [1.0f32; 8]);
    let cache = Tensor { data: cache.as_mut_ptr().cast(), ..claim(F32, &[1, 1, 2, 8]) };
    let table = Tensor { data: table.as_mut_ptr().cast(), ..claim(F32, &[1, 8]) };
    let (row, token) = (claim(F32, &[0, 1, 8]), claim(I32, &[0]));
    for heads in [1 << 28, 1 << 40, 1 << 60, 1 << 61, 1 << 62] {
        let dims = [0, heads, 8];
        let query = claim(F32, &dims);
        let (operands, results) = ([cache, query, row, row, token, token, table], [cache, query]);
        let (action, attributes) = (Action::RunOnCpu(&SingleThread), [Attribute::Bool(false), Attribute::I64(1)]);
        let op = Op::RopeKvCacheUpdate;
        let call_ = Call { op, action, operands: &operands, results: &results, attributes: &attributes };
        // SAFETY: the cache and the table are the arrays above; the others have no element.
        unsafe { call(&call_) }.unwrap();
    }
}

#[test]
fn wrong_counts_and_kinds_are_refused_by_name() {
    let a = claim(F32, &[2]);
    let add = |operands: &[Tensor], results: &[Tensor]| check(Op::SimpleAdd, operands, results, &[]);
    refused(add(&[], &[a]), "xla_gpu_simple_add: a is missing");
    refused(add(&[a], &[a]), "xla_gpu_simple_add: b is missing");
    refused(add(&[a, Tensor::ABSENT], &[a]), "xla_gpu_simple_add: b is missing");
    refused(add(&[a, a, a], &[a]), "xla_gpu_simple_add: 3 operands given, at most 2 expected (a, b)");
    refused(add(&[a, a], &[]), "xla_gpu_simple_add: out is missing");
    refused(add(&[a, a], &[a, a]), "xla_gpu_simple_add: 2 results given, at most 1 expected (out)");

    let out = [claim(BF16, &[6, 4, 16])];
    let paged = |attributes: &[Attribute]| check(Op::PagedAttention, &paged_claims(), &out, attributes);
    refused(paged(&PAGED_ATTRIBUTES[..3]), "xla_gpu_paged_attention: 3 attributes given, expected 4");
    let mut attributes = PAGED_ATTRIBUTES;
    attributes[1] = Attribute::I64(1);
    refused(paged(&attributes), "xla_gpu_paged_attention: attribute scale is I64(1), expected F32");
    attributes = PAGED_ATTRIBUTES;
    attributes[0] = Attribute::I64(0);
    refused(paged(&attributes), "xla_gpu_paged_attention: attribute batch_invariant is I64(0), expected Bool");
}

#[test]
fn a_dimension_of_size_one_may_carry_any_stride() {
    for stride in [77, i64::MIN] {
        let strided = Tensor { strides: Some(&[stride, 3, 1]), ..claim(F32, &[1, 2, 3]) };
        let dense = claim(F32, &[1, 2, 3]);
        check(Op::SimpleAdd, &[strided, dense], &[dense], &[]).unwrap();
    }
}

#[test]
fn strides_past_all_addresses_are_refused() {
    let out = [claim(BF16, &[6, 4, 16])];
    let paged = |strides: &[i64]| {
        let mut operands = paged_claims();
        operands[1].strides = Some(strides);
        check(Op::PagedAttention, &operands, &out, &PAGED_ATTRIBUTES)
    };
    let dims = paged_claims()[1].dims;
    for (axis, stride) in [(0, i64::MIN), (0, i64::MAX), (0, 1 << 59), (1, i64::MIN), (2, 1 << 62), (2, i64::MIN)] {
        let mut strides = [512, 64, 16, 1];
        strides[axis] = stride;
        let text = format!("kv_cache has shape {dims:?} and strides Some({strides:?}): its size overflows");
        refused(paged(&strides), &format!("xla_gpu_paged_attention: {text}"));
    }
    paged(&[-(1 << 58), 64, 16, 1]).unwrap();
}

#[test]
fn kv_cache_update_in_place_follows_the_strides_of_rows_and_cache() {
    let rows: Vec<f64> = (0..4 * 2 * 8).map(f64::from).collect();
    let key = Array::new(F16, &[4, 2, 8], &rows);
    let value = Array::new(F16, &[4, 2, 8], &rows.iter().map(|x| -x).collect::<Vec<_>>());
    let slots = Array::i32s(&[4], &[5, 0, -1, 2]);
    for (layout, dims) in [(1, vec![3, 2, 4, 8]), (2, vec![2, 3, 2, 2, 8]), (3, vec![3, 2, 2, 2, 8])] {
        let cache = Array::filled(F16, &dims, 0);
        let expected = crate::support::invocation::Invocation::new("xla_gpu_kv_cache_update")
            .operand("kv_cache", cache.clone())
            .operand("key", key.clone())
            .operand("value", value.clone())
            .operand("slot_mapping", slots.clone())
            .result_in_place("kv_cache", 0)
            .attribute("kv_layout", Attr::I64(layout))
            .results(Side::EndsAtGuard);
        for_both_sides(|side| {
            let cache = Spread::new("kv_cache", side, &cache, 16);
            let rows = [Spread::new("key", side, &key, 8), Spread::new("value", side, &value, 48)];
            let slots = Spread::new("slot_mapping", side, &slots, 0);
            let operands = [cache.tensor(), rows[0].tensor(), rows[1].tensor(), slots.tensor()];
            let request = Call {
                op: Op::KvCacheUpdate,
                action: Action::RunOnCpu(&SingleThread),
                operands: &operands,
                results: &[cache.tensor()],
                attributes: &[Attribute::I64(layout)],
            };
            // SAFETY: the tensors describe the memory above; result and operand are one.
            unsafe { call(&request) }.unwrap();
            assert!(cache.packed() == expected[0].bytes, "layout {layout}");
        });
    }
}

#[test]
fn a_strided_cache_is_updated_in_place_or_not_at_all() {
    let memory = Guarded::new("two caches", Side::EndsAtGuard, &[0; 4096]);
    let dims = [2i64, 2, 2, 8];
    let cache = Tensor { data: memory.data(), strides: Some(&[64, 16, 8, 1]), ..claim(F16, &dims) };
    let other = Tensor { data: memory.data().wrapping_add(2048), ..cache };
    let (rows, slots) = ([1i64, 1, 8], [1i64]);
    let row = Tensor { data: memory.data().wrapping_add(3000), ..claim(F16, &rows) };
    let slot = Tensor { data: memory.data().wrapping_add(3600), ..claim(I32, &slots) };
    let request = Call {
        op: Op::KvCacheUpdate,
        action: Action::RunOnCpu(&SingleThread),
        operands: &[cache, row, row, slot],
        results: &[other],
        attributes: &[Attribute::I64(1)],
    };
    // SAFETY: the tensors lie in the memory above.
    let outcome = unsafe { call(&request) };
    refused(
        outcome,
        "xla_gpu_kv_cache_update: kv_cache is strided and not updated in place; alias the result to the operand",
    );
}

#[test]
#[cfg(not(feature = "cuda"))]
fn a_build_without_cuda_says_so() {
    let a = claim(F32, &[0]);
    for action in [Action::PrepareCuda, Action::LaunchCuda(xla_attention::Stream(0))] {
        // SAFETY: nothing is computed.
        let outcome =
            unsafe { call(&Call { op: Op::SimpleAdd, action, operands: &[a; 2], results: &[a], attributes: &[] }) };
        let error = outcome.unwrap_err();
        assert_eq!(error.code as i32, crate::support::frame::UNIMPLEMENTED);
        let text = "xla_gpu_simple_add: this build has no CUDA backend; build with the feature `cuda`";
        assert_eq!(error.message, text);
    }
}

#[test]
fn sizes_that_no_call_can_have_want_no_workspace() {
    let right = AttentionSizes {
        num_q_heads: 8,
        num_kv_heads: 8,
        head_dim: 128,
        value_dim: 128,
        dtype: DType::BF16,
        batch_invariant: true,
    };
    assert!(right.workspace().fixed > 0);
    for absurd in [i64::MIN, -1, 0, 257, i64::MAX / 4, i64::MAX] {
        assert_eq!(AttentionSizes { value_dim: absurd, ..right }.workspace().fixed, 0, "Dv {absurd}");
    }
    for absurd in [i64::MIN, -1, 0, 1 << 40, i64::MAX] {
        assert_eq!(AttentionSizes { num_kv_heads: absurd, ..right }.workspace().fixed, 0, "Hkv {absurd}");
        // 128 columns of a sum in f32 and two numbers for each head, rounded up; of f32 one number.
        for (dtype, bytes) in [(DType::BF16, 521), (DType::F32, 4)] {
            let per_row = AttentionSizes { num_q_heads: absurd, dtype, ..right }.gradients_workspace().per_row;
            assert_eq!(per_row, absurd.max(0).saturating_mul(bytes), "Hq {absurd}");
        }
    }
}

// The C interface.

/// `xa_call`, with 200 bytes for the text.
fn c_call(request: *const XaCall) -> (i32, String) {
    let mut text = [0 as c_char; 200];
    // SAFETY: the requests of these tests describe memory that is there, and the text has room.
    let code = unsafe { xa_call(request, text.as_mut_ptr(), text.len()) };
    // SAFETY: terminated, or still zero.
    (code, unsafe { CStr::from_ptr(text.as_ptr()) }.to_str().unwrap().to_owned())
}

/// A request to add `operands[0]` and `operands[1]`.
fn c_add(operands: &[XaTensor], results: &[XaTensor], action: i32) -> XaCall {
    XaCall {
        struct_size: size_of::<XaCall>(),
        // SAFETY: a terminated string.
        op: unsafe { xa_op(c"xla_gpu_simple_add".as_ptr()) },
        action,
        operands: operands.as_ptr(),
        num_operands: operands.len(),
        results: results.as_ptr(),
        num_results: results.len(),
        attributes: null(),
        num_attributes: 0,
        stream: null_mut(),
    }
}

fn c_tensor(values: &mut [f32], dims: &[i64]) -> XaTensor {
    XaTensor {
        data: values.as_mut_ptr().cast(),
        dims: dims.as_ptr(),
        strides: null(),
        rank: dims.len() as i32,
        dtype: F32.0,
    }
}

#[test]
fn the_c_interface_computes_and_checks() {
    let (mut a, mut b, mut out, dims) = ([1.0f32, 2.0], [0.5f32, 0.25], [0.0f32; 2], [2i64]);
    let operands = [c_tensor(&mut a, &dims), c_tensor(&mut b, &dims)];
    let results = [c_tensor(&mut out, &dims)];
    assert_eq!(c_call(&c_add(&operands, &results, 1)), (0, String::new()));
    assert_eq!(out.map(f32::to_bits), [1.5f32, 2.25].map(f32::to_bits));

    let other = [3i64];
    let wrong = [operands[0], XaTensor { data: null_mut(), dims: other.as_ptr(), ..operands[1] }];
    let text = "xla_gpu_simple_add: b has shape [3], expected the shape of a, [2]";
    assert_eq!(c_call(&c_add(&wrong, &results, 0)), (INVALID_ARGUMENT, text.into()));
}

#[test]
fn the_c_interface_knows_every_target_by_name() {
    for (number, op) in Op::ALL.into_iter().enumerate() {
        let name = std::ffi::CString::new(op.signature().target).unwrap();
        // SAFETY: a terminated string.
        assert_eq!(unsafe { xa_op(name.as_ptr()) }, number as i32);
    }
    // SAFETY: a terminated string.
    assert_eq!(unsafe { xa_op(c"xla_gpu_nothing".as_ptr()) }, -1);
}

#[test]
fn a_request_that_is_no_request_is_refused() {
    let text = |size: usize| {
        format!("xa_call: the request is a struct of {size} bytes, expected 72 or, of a later version, more")
    };
    assert_eq!(c_call(null()), (INVALID_ARGUMENT, text(0)));
    let good = c_add(&[], &[], 0);
    for struct_size in [0, 8, 71, 1 << 13, usize::MAX] {
        assert_eq!(c_call(&XaCall { struct_size, ..good }), (INVALID_ARGUMENT, text(struct_size)));
    }
    assert_eq!(c_call(&XaCall { op: 99, ..good }), (INVALID_ARGUMENT, "no operator 99".into()));
    assert_eq!(c_call(&XaCall { op: -1, ..good }), (INVALID_ARGUMENT, "no operator -1".into()));
    assert_eq!(c_call(&XaCall { action: 4, ..good }), (INVALID_ARGUMENT, "action is 4, expected 0 to 3".into()));
    let tensor = XaTensor { data: null_mut(), dims: null(), strides: null(), rank: -1, dtype: F32.0 };
    assert_eq!(c_call(&c_add(&[tensor], &[], 0)), (INVALID_ARGUMENT, "xla_gpu_simple_add: a has rank -1".into()));
    let there = c_tensor(&mut [], &[0]);
    let text = "xla_gpu_simple_add: out has rank -1";
    assert_eq!(c_call(&c_add(&[there, there], &[tensor], 0)), (INVALID_ARGUMENT, text.into()));
    let text = "xla_gpu_simple_add: operand 2 has rank -1";
    assert_eq!(c_call(&c_add(&[there, there, tensor], &[there], 0)), (INVALID_ARGUMENT, text.into()));
    let attribute = XaAttribute { kind: 3, real: 0.0, integer: 0 };
    let request = XaCall { attributes: &raw const attribute, num_attributes: 1, ..good };
    let text = "xla_gpu_simple_add: attribute 0 has kind 3, expected 0 to 2";
    assert_eq!(c_call(&raw const request), (INVALID_ARGUMENT, text.into()));
    // SAFETY: a terminated string.
    let op = unsafe { xa_op(c"xla_gpu_paged_attention".as_ptr()) };
    let text = "xla_gpu_paged_attention: attribute batch_invariant has kind 3, expected 0 to 2";
    assert_eq!(c_call(&XaCall { op, ..request }), (INVALID_ARGUMENT, text.into()));
}

/// A request of a later version, without padding.
#[repr(C)]
struct LaterCall {
    known: XaCall,
    unknown: [u32; 4],
}

#[test]
fn a_request_of_a_later_version_is_one_if_it_asks_for_nothing_new() {
    let (mut a, mut b, mut out, dims) = ([1.0f32, 2.0], [0.5f32, 0.25], [0.0f32; 2], [2i64]);
    let operands = [c_tensor(&mut a, &dims), c_tensor(&mut b, &dims)];
    let results = [c_tensor(&mut out, &dims)];
    let known = XaCall { struct_size: size_of::<LaterCall>(), ..c_add(&operands, &results, 1) };
    let ask = |unknown| {
        let request = LaterCall { known, unknown };
        c_call((&raw const request).cast())
    };
    assert_eq!(ask([0; 4]), (0, String::new()));
    assert_eq!(out.map(f32::to_bits), [1.5f32, 2.25].map(f32::to_bits));
    let text = "xa_call: the request asks for something that this version does not know, past its 72 bytes";
    for unknown in [[1, 0, 0, 0], [0, 0, 0, 1 << 31]] {
        assert_eq!(ask(unknown), (INVALID_ARGUMENT, text.into()));
    }
}

#[test]
fn strides_of_nothing_may_be_anything() {
    let (dims, strides) = ([0i64, 2, 8], [0i64; 3]);
    let q = XaTensor { strides: strides.as_ptr(), ..c_tensor(&mut [], &dims) };
    let (lse_dims, starts_dims) = ([2i64, 0], [1i64]);
    let mut start = [0.0f32];
    let starts = XaTensor { dtype: I32.0, ..c_tensor(&mut start, &starts_dims) };
    let operands = [q, q, q, starts, starts];
    let results = [q, XaTensor { strides: strides.as_ptr(), ..c_tensor(&mut [], &lse_dims) }];
    let flag = XaAttribute { kind: 0, real: 0.0, integer: 0 };
    let (number, real) = (XaAttribute { kind: 1, ..flag }, XaAttribute { kind: 2, real: 1.0, ..flag });
    let off = XaAttribute { real: 0.0, ..real };
    let minus = XaAttribute { integer: -1, ..number };
    let attributes = [flag, flag, number, number, number, off, real, flag, minus, minus];
    let request = XaCall {
        // SAFETY: a terminated string.
        op: unsafe { xa_op(c"xla_gpu_flash_attn_varlen".as_ptr()) },
        attributes: attributes.as_ptr(),
        num_attributes: attributes.len(),
        ..c_add(&operands, &results, 1)
    };
    assert_eq!(c_call(&raw const request), (0, String::new()));
    // The same through the Rust entry.
    let q = Tensor { strides: Some(&strides), ..claim(F32, &dims) };
    let starts = Tensor { data: start.as_mut_ptr().cast(), ..claim(I32, &starts_dims) };
    check(Op::FlashAttnVarlen, &[q, q, q, starts, starts], &[q, claim(F32, &lse_dims)], &attention::FLASH_ATTRIBUTES)
        .unwrap();
}

#[test]
fn a_text_is_cut_to_the_room_that_it_is_given() {
    let request = c_add(&[], &[], 0);
    let whole = "xla_gpu_simple_add: a is missing";
    for capacity in [0, 1, 5, whole.len(), whole.len() + 1, 100] {
        let memory = Guarded::new("message", Side::EndsAtGuard, &vec![0x55; capacity]);
        // SAFETY: `capacity` bytes.
        let code = unsafe { xa_call(&raw const request, memory.data().cast(), capacity) };
        assert_eq!(code, INVALID_ARGUMENT);
        if capacity > 0 {
            let text = memory.bytes();
            let end = text.iter().position(|&b| b == 0).expect("the text is terminated");
            assert_eq!(std::str::from_utf8(&text[..end]).unwrap(), &whole[..whole.len().min(capacity - 1)]);
        }
    }
}
