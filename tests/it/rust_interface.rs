//! `xla_attention::call` and its C equivalent `xa_call`: strides, empty tensors, and what they refuse.

use crate::support::valid_calls;
use crate::support::{
    Array, AttentionCase, Attr, BF16, BatchSpec, BufferView, CacheUpdateCase, Dtype, F16, F32, GuardedBuffer, I32,
    INVALID_ARGUMENT, Invocation, KvLayout, MemoryLayout, RopeCase, Side, c_attribute, c_call, c_request, c_tensor,
};
use std::ffi::c_void;
use std::ptr::{null, null_mut};
use xla_attention::ops::workspace::AttentionSizes;
use xla_attention::{
    Action, DType, Error, Op, RayonPool, XaAttribute, XaCall, XaLayouts, XaTensor, XaView, xa_call, xa_layouts, xa_op,
};

/// An operand's dtype and shape without memory.
fn claim(dtype: Dtype, dims: &[i64]) -> Array {
    Array { dtype, dims: dims.to_vec(), bytes: vec![] }
}

fn refused(outcome: Result<(), Error>, text: &str) {
    let error = outcome.unwrap_err();
    assert_eq!((error.code as i32, error.message.as_str()), (INVALID_ARGUMENT, text));
}

#[test]
fn the_other_sizes_of_an_empty_tensor_do_not_matter() {
    const HUGE: i64 = i64::MAX / 4;
    let mut paged = valid_calls::of("xla_gpu_paged_attention")
        .with_operand("query", claim(BF16, &[0, 4, 16]))
        .with_operand("kv_cache", claim(BF16, &[0, HUGE, 4, 16]))
        .with_operand("block_tables", claim(I32, &[3, 0]));
    (paged.results[0].dims, paged.results[1].dims) = (vec![0, 4, 16], vec![4, 0]);
    paged.validate().unwrap();
    let mut update = valid_calls::of("xla_gpu_kv_cache_update").with_operand("kv_cache", claim(F16, &[0, HUGE, 4, 16]));
    update.results[0].dims = vec![0, HUGE, 4, 16];
    refused(update.validate(), &format!("xla_gpu_kv_cache_update: page_size is {HUGE}, expected below 2^31"));
}

#[test]
fn a_rotation_of_no_row_may_have_any_number_of_heads() {
    for heads in [1 << 28, 1 << 40, 1 << 60, 1 << 61, 1 << 62] {
        let rope = RopeCase {
            update: CacheUpdateCase { slots: vec![], ..CacheUpdateCase::default() },
            positions: vec![],
            ..RopeCase::default()
        };
        let mut call = rope.invocation(false).with_operand("query", claim(F32, &[0, heads, 16]));
        call.results[1].dims = vec![0, heads, 16];
        assert_eq!(run_with_views(&call, &call, |_| ())[0], rope.expected()[0]);
    }
}

#[test]
fn wrong_counts_and_kinds_are_refused_by_name() {
    let add = |operands: usize, results: usize| {
        let mut call = Invocation::new("xla_gpu_simple_add");
        call.operands = vec![("", claim(F32, &[2])); operands];
        (0..results).fold(call, |call, _| call.result("", F32, &[2])).validate()
    };
    refused(add(0, 1), "xla_gpu_simple_add: a is missing");
    refused(add(1, 1), "xla_gpu_simple_add: b is missing");
    refused(add(3, 1), "xla_gpu_simple_add: 3 operands given, at most 2 expected (a, b)");
    refused(add(2, 0), "xla_gpu_simple_add: out is missing");
    refused(add(2, 2), "xla_gpu_simple_add: 2 results given, at most 1 expected (out)");
    let a = claim(F32, &[2]);
    let absent = Invocation::new("xla_gpu_simple_add").operand("a", a).operand("b", claim(Dtype(0), &[]));
    refused(absent.result("out", F32, &[2]).validate(), "xla_gpu_simple_add: b is missing");

    let valid = valid_calls::of("xla_gpu_paged_attention");
    let mut fewer = valid.clone();
    fewer.attributes.pop();
    refused(fewer.validate(), "xla_gpu_paged_attention: 3 attributes given, expected 4");
    let with = |name, value| valid.clone().attribute(name, Attr::I64(value)).validate();
    refused(with("scale", 1), "xla_gpu_paged_attention: attribute scale is I64(1), expected F32");
    refused(with("batch_invariant", 0), "xla_gpu_paged_attention: attribute batch_invariant is I64(0), expected Bool");
}

/// Validates a call with these strides of some operands.
fn with_strides(call: &Invocation, strides: &[(usize, &[i64])]) -> Result<(), Error> {
    let mut views = vec![BufferView::NOWHERE; call.operands.len()];
    for (index, strides) in strides {
        views[*index].strides = Some(strides);
    }
    // SAFETY: validation accesses no memory.
    unsafe { call.run_action(Action::Check, &views, &vec![BufferView::NOWHERE; call.results.len()]) }
}

#[test]
fn a_dimension_of_size_one_may_carry_any_stride() {
    let dims = [1, 2, 3];
    let add = Invocation::new("xla_gpu_simple_add").operand("a", claim(F32, &dims)).operand("b", claim(F32, &dims));
    let add = add.result("out", F32, &dims);
    for stride in [77, i64::MIN] {
        with_strides(&add, &[(0, &[stride, 3, 1])]).unwrap();
    }
}

#[test]
fn strides_past_all_addresses_are_refused() {
    let paged = valid_calls::of("xla_gpu_paged_attention");
    let dims = &paged.operands[1].1.dims;
    for (axis, stride) in [(0, i64::MIN), (0, i64::MAX), (0, 1 << 59), (1, i64::MIN), (2, 1 << 62), (2, i64::MIN)] {
        let mut strides = [512, 64, 16, 1];
        strides[axis] = stride;
        let text = format!("kv_cache has shape {dims:?} and strides Some({strides:?}): its size overflows");
        refused(with_strides(&paged, &[(1, &strides)]), &format!("xla_gpu_paged_attention: {text}"));
    }
    with_strides(&paged, &[(1, &[-(1 << 58), 64, 16, 1])]).unwrap();
}

#[test]
fn halves_of_one_cache_can_be_passed_as_k_and_v() {
    // Like torch's kv[0] and kv[1] of a cache [2, P, page_size, Hkv, D].
    let batch = BatchSpec { lengths: vec![(1, 50), (20, 33)], ..BatchSpec::default() }.batch();
    let stacked = AttentionCase::flash(&batch, &MemoryLayout::paged(KvLayout::Stacked, 8)).invocation();
    let expected = run_with_views(&stacked, &stacked, |_| {});
    let cache = &stacked.operands[1].1;
    let half = claim(cache.dtype, &cache.dims[1..]);
    let split = stacked.clone().with_operand("k", half.clone()).with_operand("v", half);
    let actual = run_with_views(&split.attribute("kv_layout", Attr::I64(0)), &stacked, |views| {
        views[2].data = views[1].data.wrapping_add(cache.bytes.len() / 2);
    });
    assert!(actual[..2] == expected[..2]);
}

#[test]
fn a_kv_head_can_be_expanded_with_a_stride_of_0() {
    // Like torch's k.expand(-1, 4, -1): four heads share the memory of one.
    let batch = BatchSpec { heads: (4, 1), lengths: vec![(3, 50), (20, 33)], ..BatchSpec::default() }.batch();
    let case = AttentionCase::flash(&batch, &MemoryLayout::contiguous());
    let invocation = case.invocation();
    let expected = run_with_views(&invocation, &invocation, |_| {});
    let wide = claim(F32, &[case.kv_geometry.num_pages as i64, 4, 64]);
    let expanded = invocation.clone().with_operand("k", wide.clone()).with_operand("v", wide);
    let actual = run_with_views(&expanded, &invocation, |views| {
        views[1..3].iter_mut().for_each(|view| view.strides = Some(&[64, 0, 1]));
    });
    for (actual, expected) in actual.iter().zip(&expected).take(2) {
        for (a, b) in actual.values().into_iter().zip(expected.values()) {
            // Rows of no sequence have an lse of -inf in both results.
            let same = a.to_bits() == b.to_bits() || (a - b).abs() < 1e-5;
            assert!(same, "expanded heads differ from grouped ones");
        }
    }
}

#[test]
fn k_and_v_of_the_first_token_may_be_adjacent_and_those_of_others_not() {
    let batch = BatchSpec { heads: (4, 2), lengths: vec![(1, 50)], ..BatchSpec::default() }.batch();
    let invocation = AttentionCase::flash(&batch, &MemoryLayout::contiguous().bare()).invocation();
    // Tokens of K overlap, and its last row is the last of its memory. All tokens of V are those behind K's first rows.
    let unused = 50 * 2 * 64 - (49 * 64 + 128 + 64);
    let results = run_with_views(&invocation, &invocation, |views| {
        views[1].strides = Some(&[64, 128, 1]);
        views[1].data = views[1].data.wrapping_add(unused * F32.size());
        views[2].strides = Some(&[0, 128, 1]);
        views[2].data = views[1].data.wrapping_add(64 * F32.size());
    });
    let (memory, out) = (invocation.operands[1].1.values(), results[0].values());
    assert_eq!(out.len(), 4 * 64);
    for (head, row) in out.chunks(64).enumerate() {
        let value = &memory[unused + 64 + head / 2 * 128..][..64];
        assert!(row.iter().zip(value).all(|(a, b)| (a - b).abs() < 1e-5), "query head {head}");
    }
}

/// Runs `call` on the CPU, on the buffers of the call `memory`, which has the same results, with changed views of the
/// operands.
fn run_with_views(call: &Invocation, memory: &Invocation, change: impl Fn(&mut [BufferView])) -> Vec<Array> {
    let buffers = memory.guarded(Side::EndsAtGuard);
    let [mut inputs, outputs] = buffers.views();
    change(&mut inputs);
    // SAFETY: the views are of `buffers`, and `change` keeps them within.
    unsafe { call.run_action(Action::RunOnCpu(&RayonPool), &inputs, &outputs) }.unwrap();
    buffers.results()
}

#[test]
#[cfg(not(feature = "cuda"))]
fn a_build_without_cuda_reports_that_it_has_no_backend() {
    let call = valid_calls::of("xla_gpu_simple_add");
    let nowhere = [BufferView::NOWHERE; 2];
    for action in [Action::PrepareCuda, Action::LaunchCuda(xla_attention::Stream(0))] {
        // SAFETY: a build without CUDA returns before it accesses memory.
        let error = unsafe { call.run_action(action, &nowhere, &nowhere) }.unwrap_err();
        assert_eq!(error.code as i32, crate::support::UNIMPLEMENTED);
        let text = "xla_gpu_simple_add: this build has no CUDA backend; build with the feature `cuda`";
        assert_eq!(error.message, text);
    }
}

#[test]
fn impossible_sizes_need_no_workspace() {
    let valid = AttentionSizes {
        num_q_heads: 8,
        num_kv_heads: 8,
        head_dim: 128,
        value_dim: 128,
        dtype: DType::BF16,
        batch_invariant: true,
    };
    assert!(valid.workspace().fixed > 0);
    for absurd in [i64::MIN, -1, 0, 513, i64::MAX / 4, i64::MAX] {
        assert_eq!(AttentionSizes { value_dim: absurd, ..valid }.workspace().fixed, 0, "Dv {absurd}");
    }
    for absurd in [i64::MIN, -1, 0, 1 << 40, i64::MAX] {
        assert_eq!(AttentionSizes { num_kv_heads: absurd, ..valid }.workspace().fixed, 0, "Hkv {absurd}");
        let heads = absurd.max(0);
        // Per row and head: a sum of 128 columns in f32 and two numbers, one number per 64 rows, and dK and dV of a part of four heads; per
        // row three numbers. In f32: one number per row and head.
        let row_bytes = heads.saturating_add(15) / 16 + 12;
        for (dtype, bytes, row_bytes) in [(DType::BF16, 520 + 256, row_bytes), (DType::F32, 4, 0)] {
            let per_row = AttentionSizes { num_q_heads: absurd, dtype, ..valid }.gradients_workspace().per_row;
            assert_eq!(per_row, heads.saturating_mul(bytes).saturating_add(row_bytes), "Hq {absurd}");
        }
    }
}

// Tests of the C interface.

/// A request to add two operands.
fn c_add(operands: &[XaTensor], results: &[XaTensor], action: i32) -> XaCall {
    // SAFETY: the name is a terminated string.
    c_request(unsafe { xa_op(c"xla_gpu_simple_add".as_ptr()) }, action, operands, results)
}

fn c_floats(values: &mut [f32], dims: &[i64]) -> XaTensor {
    c_tensor(F32, dims, None, values.as_mut_ptr().cast())
}

#[test]
fn the_c_interface_computes_and_checks() {
    let (mut a, mut b, mut out, dims) = ([1.0f32, 2.0], [0.5f32, 0.25], [0.0f32; 2], [2i64]);
    let operands = [c_floats(&mut a, &dims), c_floats(&mut b, &dims)];
    let results = [c_floats(&mut out, &dims)];
    assert_eq!(c_call(&c_add(&operands, &results, 1)), (0, String::new()));
    assert_eq!(out.map(f32::to_bits), [1.5f32, 2.25].map(f32::to_bits));

    let wrong_dims = [3i64];
    let wrong = [operands[0], XaTensor { data: null_mut(), dims: wrong_dims.as_ptr(), ..operands[1] }];
    let text = "xla_gpu_simple_add: b has shape [3], expected the shape of a, [2]";
    assert_eq!(c_call(&c_add(&wrong, &results, 0)), (INVALID_ARGUMENT, text.into()));
}

#[test]
fn the_c_interface_knows_every_target_by_name() {
    for (number, op) in Op::ALL.into_iter().enumerate() {
        let name = std::ffi::CString::new(op.signature().target).unwrap();
        // SAFETY: the name is a terminated string.
        assert_eq!(unsafe { xa_op(name.as_ptr()) }, number as i32);
    }
    // SAFETY: the name is a terminated string.
    assert_eq!(unsafe { xa_op(c"xla_gpu_nothing".as_ptr()) }, -1);
}

#[test]
fn invalid_requests_are_refused() {
    let text = |size: usize| {
        format!("xa_call: the request is a struct of {size} bytes, expected 88 or, of another version, from 72 on")
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
    let there = c_floats(&mut [], &[0]);
    let text = "xla_gpu_simple_add: out has rank -1";
    assert_eq!(c_call(&c_add(&[there, there], &[tensor], 0)), (INVALID_ARGUMENT, text.into()));
    let text = "xla_gpu_simple_add: operand 2 has rank -1";
    assert_eq!(c_call(&c_add(&[there, there, tensor], &[there], 0)), (INVALID_ARGUMENT, text.into()));
    let attribute = XaAttribute { kind: 3, real: 0.0, integer: 0 };
    let request = XaCall { attributes: &raw const attribute, num_attributes: 1, ..good };
    let text = "xla_gpu_simple_add: attribute 0 has kind 3, expected 0 to 2";
    assert_eq!(c_call(&raw const request), (INVALID_ARGUMENT, text.into()));
    // SAFETY: the name is a terminated string.
    let op = unsafe { xa_op(c"xla_gpu_paged_attention".as_ptr()) };
    let text = "xla_gpu_paged_attention: attribute batch_invariant has kind 3, expected 0 to 2";
    assert_eq!(c_call(&XaCall { op, ..request }), (INVALID_ARGUMENT, text.into()));
}

/// A request of a later version with further members, without padding.
#[repr(C)]
struct LaterCall {
    known: XaCall,
    unknown: [u32; 4],
}

#[test]
fn a_request_of_a_later_version_is_accepted_unless_it_uses_new_members() {
    let (mut a, mut b, mut out, dims) = ([1.0f32, 2.0], [0.5f32, 0.25], [0.0f32; 2], [2i64]);
    let operands = [c_floats(&mut a, &dims), c_floats(&mut b, &dims)];
    let results = [c_floats(&mut out, &dims)];
    let known = XaCall { struct_size: size_of::<LaterCall>(), ..c_add(&operands, &results, 1) };
    let ask = |unknown| {
        let request = LaterCall { known, unknown };
        c_call((&raw const request).cast())
    };
    assert_eq!(ask([0; 4]), (0, String::new()));
    assert_eq!(out.map(f32::to_bits), [1.5f32, 2.25].map(f32::to_bits));
    let text = "xa_call: the request asks for something that this version does not know, past its 88 bytes";
    for unknown in [[1, 0, 0, 0], [0, 0, 0, 1 << 31]] {
        assert_eq!(ask(unknown), (INVALID_ARGUMENT, text.into()));
    }
}

#[test]
fn a_request_of_the_first_version_is_accepted_whatever_follows_it() {
    let (mut a, mut b, mut out, dims) = ([1.0f32, 2.0], [0.5f32, 0.25], [0.0f32; 2], [2i64]);
    let operands = [c_floats(&mut a, &dims), c_floats(&mut b, &dims)];
    let results = [c_floats(&mut out, &dims)];
    let first =
        XaCall { struct_size: 72, addresses: std::ptr::dangling(), num_addresses: 1, ..c_add(&operands, &results, 1) };
    assert_eq!(c_call(&raw const first), (0, String::new()));
    assert_eq!(out.map(f32::to_bits), [1.5f32, 2.25].map(f32::to_bits));
}

#[test]
fn tensors_have_the_addresses_at_their_indices() {
    let (mut a, mut b, mut out, dims) = ([1.0f32, 2.0], [0.5f32, 0.25], [0.0f32; 2], [2i64]);
    let at = |index: usize| c_tensor(F32, &dims, None, index as *mut u8);
    let addresses: [*mut c_void; 3] = [out.as_mut_ptr().cast(), b.as_mut_ptr().cast(), a.as_mut_ptr().cast()];
    let with = |operands: &[XaTensor; 2], num_addresses| {
        let results = [at(0)];
        c_call(&XaCall { addresses: addresses.as_ptr(), num_addresses, ..c_add(operands, &results, 1) })
    };
    assert_eq!(with(&[at(2), at(1)], 3), (0, String::new()));
    assert_eq!(out.map(f32::to_bits), [1.5f32, 2.25].map(f32::to_bits));
    let text = "xla_gpu_simple_add: a has address 2, of 2";
    assert_eq!(with(&[at(2), at(1)], 2), (INVALID_ARGUMENT, text.into()));
    let left_out = XaTensor { dtype: 0, ..at(7) };
    let text = "xla_gpu_simple_add: b is missing";
    assert_eq!(with(&[at(2), left_out], 3), (INVALID_ARGUMENT, text.into()));
}

/// The view at `index` of a list, or null past its end.
unsafe extern "C" fn view_at(list: *mut c_void, index: isize) -> *mut c_void {
    // SAFETY: the tests below give the address of a vector of views.
    let list = unsafe { &*list.cast::<Vec<XaView>>() };
    list.get(index as usize).map_or(null_mut(), |view| std::ptr::from_ref(view).cast_mut().cast())
}

/// Copies a view; fails for one of a negative rank.
unsafe extern "C" fn describe(view: *mut c_void, to: *mut XaView) -> i32 {
    // SAFETY: `view_at` returns views, and the library gives room for one.
    unsafe {
        let view = *view.cast::<XaView>();
        to.write(view);
        -i32::from(view.rank < 0)
    }
}

/// The key and the addresses of tensors, or the number of a failure.
fn layouts(list: &Vec<XaView>, count: usize, capacity: usize) -> Result<(Vec<u8>, Vec<usize>), i32> {
    let (mut key, mut addresses) = (vec![0u8; capacity], vec![null_mut(); count]);
    let request = XaLayouts {
        struct_size: size_of::<XaLayouts>(),
        list: std::ptr::from_ref(list).cast_mut().cast(),
        count,
        item: Some(view_at),
        describe: Some(describe),
        addresses: addresses.as_mut_ptr(),
        key: key.as_mut_ptr(),
        capacity,
    };
    // SAFETY: the list has views, and both vectors have the given room.
    let size = unsafe { xa_layouts(&raw const request) };
    key.truncate(usize::try_from(size).map_err(|_| size)?);
    Ok((key, addresses.into_iter().map(|address| address as usize).collect()))
}

#[test]
fn the_key_of_layouts_tells_any_two_apart_but_for_addresses() {
    let (dims, swapped, strides) = ([2i64, 300], [300i64, 2], [301i64, 1]);
    let view = |data: usize, dims: &[i64; 2], strides: Option<&[i64; 2]>| XaView {
        data: data as *mut c_void,
        device_type: 2,
        device_id: 0,
        rank: 2,
        dtype: 0x0001_1004,
        dims: dims.as_ptr(),
        strides: strides.map_or(null(), |strides| strides.as_ptr()),
        byte_offset: 0,
    };
    let (a, b) = (view(64, &dims, None), view(128, &dims, Some(&strides)));
    let of = |list: Vec<XaView>| layouts(&list, list.len(), 256);
    let (key, addresses) = of(vec![a, b]).unwrap();
    assert_eq!(addresses, [64, 128]);
    let elsewhere = vec![XaView { data: 256 as *mut _, ..a }, XaView { byte_offset: 8, ..b }];
    assert_eq!(of(elsewhere), Ok((key.clone(), vec![256, 136])));
    let others = [
        vec![a],
        vec![b, a],
        vec![a, XaView { data: a.data, ..b }],
        vec![a, XaView { device_type: 1, ..b }],
        vec![a, XaView { device_id: 1, ..b }],
        vec![a, XaView { rank: 1, ..b }],
        vec![a, XaView { dtype: 0x0001_1002, ..b }],
        vec![a, view(128, &swapped, Some(&strides))],
        vec![a, view(128, &dims, None)],
        vec![a, view(128, &dims, Some(&dims))],
        vec![a, b, b],
    ];
    for other in others {
        assert_ne!(of(other.clone()).unwrap().0, key, "{other:?}");
    }
}

/// A request of a later version with a further member.
#[repr(C)]
struct LaterLayouts {
    known: XaLayouts,
    unknown: usize,
}

#[test]
fn layouts_that_cannot_be_described_or_stored_are_failures() {
    let point = XaView {
        data: 64 as *mut _,
        device_type: 1,
        device_id: 0,
        rank: 0,
        dtype: 2,
        dims: null(),
        strides: null(),
        byte_offset: 0,
    };
    let size = layouts(&vec![point], 1, 256).unwrap().0.len();
    assert!(layouts(&vec![point], 1, size).is_ok());
    assert_eq!(layouts(&vec![point], 1, size - 1), Err(-2));
    assert_eq!(layouts(&vec![point], 2, 256), Err(-1));
    assert_eq!(layouts(&vec![XaView { rank: -1, ..point }], 1, 256), Err(-1));
    let known = XaLayouts {
        struct_size: size_of::<LaterLayouts>(),
        list: null_mut(),
        count: 0,
        item: Some(view_at),
        describe: Some(describe),
        addresses: null_mut(),
        key: null_mut(),
        capacity: 0,
    };
    let ask = |known, unknown| {
        let request = LaterLayouts { known, unknown };
        // SAFETY: there is nothing to describe, and no room that is written to.
        unsafe { xa_layouts((&raw const request).cast()) }
    };
    assert_eq!(ask(known, 0), 0);
    assert_eq!(ask(known, 1), -1);
    assert_eq!(ask(XaLayouts { struct_size: size_of::<XaLayouts>() - 1, ..known }, 0), -1);
    assert_eq!(ask(XaLayouts { item: None, ..known }, 0), -1);
}

#[test]
fn strides_of_an_empty_tensor_are_ignored() {
    let memory_layout = MemoryLayout { workspace: None, ..MemoryLayout::contiguous().bare() };
    let call = AttentionCase::flash(&BatchSpec { lengths: vec![], ..BatchSpec::default() }.batch(), &memory_layout)
        .invocation();
    let buffers = call.guarded(Side::EndsAtGuard);
    let tensor = |dtype, dims: &[i64], memory: &GuardedBuffer| {
        c_tensor(dtype, dims, dims.contains(&0).then_some(&[0; 3][..dims.len()]), memory.data())
    };
    let operands = call.operands.iter().enumerate().map(|(i, (_, x))| tensor(x.dtype, &x.dims, buffers.operand(i)));
    let results = call.results.iter().enumerate().map(|(i, x)| tensor(x.dtype, &x.dims, buffers.result(i)));
    let (operands, results): (Vec<_>, Vec<_>) = (operands.collect(), results.collect());
    let attributes: Vec<_> = call.attributes.iter().map(|(_, value)| c_attribute(value)).collect();
    let request = c_request(call.op() as i32, 1, &operands, &results);
    let (list, count) = (attributes.as_ptr(), attributes.len());
    let request = XaCall { attributes: list, num_attributes: count, ..request };
    assert_eq!(c_call(&raw const request), (0, String::new()));
}

#[test]
fn an_error_text_is_truncated_to_the_given_length() {
    let request = c_add(&[], &[], 0);
    let whole = "xla_gpu_simple_add: a is missing";
    for capacity in [0, 1, 5, whole.len(), whole.len() + 1, 100] {
        let memory = GuardedBuffer::new("message", Side::EndsAtGuard, &vec![0x55; capacity]);
        // SAFETY: `memory` has `capacity` bytes.
        let code = unsafe { xa_call(&raw const request, memory.data().cast(), capacity) };
        assert_eq!(code, INVALID_ARGUMENT);
        if capacity > 0 {
            let text = memory.bytes();
            let end = text.iter().position(|&b| b == 0).expect("the text is terminated");
            assert_eq!(std::str::from_utf8(&text[..end]).unwrap(), &whole[..whole.len().min(capacity - 1)]);
        }
    }
}
