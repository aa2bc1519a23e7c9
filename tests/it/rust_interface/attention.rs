//! The attention operators over strided tensors, as eager torch and Rust pass them, and the strides that they refuse.

use super::{PAGED_ATTRIBUTES, check, claim, paged_claims, refused};
use crate::support::array::{ATTENTION_DTYPES, Array, BF16, F32, I32};
use crate::support::batch::{Dtypes, Shape};
use crate::support::case::Case;
use crate::support::gradient_case::{GradientCase, Wanted};
use crate::support::guard::{Side, for_both_sides};
use crate::support::invocation::{Attr, Invocation, POISON};
use crate::support::oracle::Mask;
use crate::support::spread::Spread;
use crate::support::storage::{Layout, Storage};
use xla_attention::{Action, Attribute, Call, Op, Pool, RayonPool, SingleThread, Tensor, call};

/// `flash_attn_varlen` without a mask, of the default layout.
pub(crate) const FLASH_ATTRIBUTES: [Attribute; 10] = [
    Attribute::Bool(false),
    Attribute::Bool(false),
    Attribute::I64(0),
    Attribute::I64(0),
    Attribute::I64(0),
    Attribute::F32(0.0),
    Attribute::F32(0.5),
    Attribute::Bool(false),
    Attribute::I64(-1),
    Attribute::I64(-1),
];

/// `flash_attn_varlen_bwd` without a mask.
const FLASH_BWD_ATTRIBUTES: [Attribute; 9] = [
    Attribute::Bool(false),
    Attribute::Bool(false),
    Attribute::I64(0),
    Attribute::I64(0),
    Attribute::F32(0.0),
    Attribute::F32(0.5),
    Attribute::Bool(false),
    Attribute::I64(-1),
    Attribute::I64(-1),
];

/// The five required operands of a right call of `flash_attn_varlen`, packed.
fn flash_claims() -> [Tensor<'static>; 5] {
    [claim(BF16, &[6, 4, 16]), claim(BF16, &[9, 2, 16]), claim(BF16, &[9, 2, 24]), claim(I32, &[4]), claim(I32, &[4])]
}

#[test]
fn a_check_needs_no_memory() {
    let out = [claim(BF16, &[6, 4, 24]), claim(F32, &[4, 6])];
    check(Op::FlashAttnVarlen, &flash_claims(), &out, &FLASH_ATTRIBUTES).unwrap();
    check(Op::PagedAttention, &paged_claims(), &[claim(BF16, &[6, 4, 16])], &PAGED_ATTRIBUTES).unwrap();
}

/// Operand `index` of a right call with these dims and strides is refused.
fn paged_refuses(index: usize, dims: &'static [i64], strides: &'static [i64], text: &str) {
    let mut operands = paged_claims();
    operands[index] = Tensor { strides: Some(strides), ..claim(if dims.len() < 3 { I32 } else { BF16 }, dims) };
    let outcome = check(Op::PagedAttention, &operands, &[claim(BF16, &[6, 4, 16])], &PAGED_ATTRIBUTES);
    refused(outcome, &format!("xla_gpu_paged_attention: {text}"));
}

#[test]
fn paged_attention_refuses_strides_that_no_kernel_can_follow() {
    let last = "expected 1 for the last dimension";
    paged_refuses(0, &[6, 4, 16], &[64, 16], "query has 2 strides, expected 3");
    paged_refuses(0, &[6, 4, 16], &[128, 32, 2], &format!("query has strides Some([128, 32, 2]), {last}"));
    let strides = "kv_cache has strides Some([1, 5, 40, 160])";
    paged_refuses(1, &[5, 8, 4, 16], &[1, 5, 40, 160], &format!("{strides}, {last}"));
    paged_refuses(3, &[3, 2], &[1, 3], &format!("block_tables has strides Some([1, 3]), {last}"));
    paged_refuses(2, &[3], &[2], "context_lens has strides Some([2]), expected a dense tensor");
    paged_refuses(4, &[4], &[2], "query_start_loc has strides Some([2]), expected a dense tensor");

    let out = claim(BF16, &[6, 4, 16]);
    let outs = [Tensor { strides: Some(&[128, 16, 1]), ..out }];
    let dense = "xla_gpu_paged_attention: out has strides Some([128, 16, 1]), expected a dense tensor";
    refused(check(Op::PagedAttention, &paged_claims(), &outs, &PAGED_ATTRIBUTES), dense);
    let lse = [out, Tensor { strides: Some(&[12, 2]), ..claim(F32, &[4, 6]) }];
    let dense = "xla_gpu_paged_attention: softmax_lse has strides Some([12, 2]), expected a dense tensor";
    refused(check(Op::PagedAttention, &paged_claims(), &lse, &PAGED_ATTRIBUTES), dense);
}

#[test]
fn flash_attn_varlen_refuses_strides_that_no_kernel_can_follow() {
    let out = [claim(BF16, &[6, 4, 24]), claim(F32, &[4, 6])];
    let last = "expected 1 for the last dimension";
    let rows: [(usize, &'static [i64], String); 5] = [
        (0, &[64, 16, 2], format!("q has strides Some([64, 16, 2]), {last}")),
        (1, &[64, 32, 2], format!("k has strides Some([64, 32, 2]), {last}")),
        (2, &[1, 9, 18], format!("v has strides Some([1, 9, 18]), {last}")),
        (3, &[2], "cu_seqlens_q has strides Some([2]), expected a dense tensor".into()),
        (4, &[3], "cu_seqlens_k has strides Some([3]), expected a dense tensor".into()),
    ];
    for (index, strides, text) in rows {
        let mut operands = flash_claims();
        operands[index].strides = Some(strides);
        let outcome = check(Op::FlashAttnVarlen, &operands, &out, &FLASH_ATTRIBUTES);
        refused(outcome, &format!("xla_gpu_flash_attn_varlen: {text}"));
    }
    // Optional operands after the five: each alone, the ones before it left out.
    let names = ["seqused_q", "leftpad_k", "alibi_slopes", "sinks", "q_scale", "k_scale", "v_scale"];
    let dims: [&'static [i64]; 7] = [&[3], &[3], &[3, 4], &[4], &[2], &[2], &[2]];
    for (index, (name, dims)) in names.into_iter().zip(dims).enumerate() {
        let strides: &[i64] = if dims.len() == 2 { &[8, 1] } else { &[2] };
        let tensor = Tensor { strides: Some(strides), ..claim(if index < 2 { I32 } else { F32 }, dims) };
        let mut operands = flash_claims().to_vec();
        operands.resize(7 + index, Tensor::ABSENT);
        operands.push(tensor);
        let outcome = check(Op::FlashAttnVarlen, &operands, &out, &FLASH_ATTRIBUTES);
        let text = format!("{name} has strides Some({strides:?}), expected a dense tensor");
        refused(outcome, &format!("xla_gpu_flash_attn_varlen: {text}"));
    }
}

fn attributes(invocation: &Invocation) -> Vec<Attribute> {
    let value = |value: &Attr| match value {
        Attr::Bool(v) => Attribute::Bool(*v),
        Attr::I64(v) => Attribute::I64(*v),
        Attr::F32(v) => Attribute::F32(*v),
        _ => panic!("{value:?} is no attribute of an operator"),
    };
    invocation.attributes.iter().map(|(_, v)| value(v)).collect()
}

/// Results of the types and shapes of `like`.
fn run(op: Op, invocation: &Invocation, operands: &[Tensor], pool: &dyn Pool, like: &[Array]) -> Vec<Array> {
    let poisoned = |r: &Array| Array::filled(r.dtype, &r.dims, POISON);
    let results: Vec<Spread> = like.iter().map(|r| Spread::new("result", Side::EndsAtGuard, &poisoned(r), 0)).collect();
    let tensors: Vec<Tensor> = results.iter().map(Spread::tensor).collect();
    let attributes = attributes(invocation);
    let action = Action::RunOnCpu(pool);
    // SAFETY: the tensors describe memory that the caller and this function hold.
    unsafe { call(&Call { op, action, operands, results: &tensors, attributes: &attributes }) }.unwrap();
    results.iter().zip(like).map(|(found, r)| Array { bytes: found.packed(), ..r.clone() }).collect()
}

/// Run with these operands; the first results are `expected`.
fn gives(op: Op, invocation: &Invocation, operands: &[Tensor], expected: &[Array]) {
    for pool in [&SingleThread as &dyn Pool, &RayonPool] {
        assert!(run(op, invocation, operands, pool, expected) == expected, "{}", invocation.what);
    }
}

/// Spread the operands out in memory; nothing changes.
fn follows_strides(op: Op, invocation: &Invocation, computed: usize) {
    let expected = invocation.results(Side::EndsAtGuard);
    for_both_sides(|side| {
        let spread = |(name, array): &(&'static str, Array)| Spread::new(name, side, array, gap(name));
        let operands: Vec<Spread> = invocation.operands.iter().map(spread).collect();
        let operands: Vec<Tensor> = operands.iter().map(Spread::tensor).collect();
        gives(op, invocation, &operands, &expected[..computed]);
    });
}

fn gap(name: &str) -> i64 {
    match name {
        "q" | "query" => 24,
        "k" | "kv_cache" => 40,
        "v" | "dout" => 16,
        "out" => 8,
        "block_table" | "block_tables" => 3,
        _ => 0,
    }
}

#[test]
fn paged_attention_follows_the_strides_of_query_cache_and_tables() {
    for dtype in ATTENTION_DTYPES {
        let shape = Shape { dtypes: dtype.into(), lengths: vec![(1, 50), (20, 33)], ..Shape::default() };
        let case = Case::paged(&shape.batch(), &Storage { page_size: 7, ..Storage::default() });
        follows_strides(Op::PagedAttention, &case.invocation(), 2);
    }
}

#[test]
fn flash_attn_varlen_follows_the_strides_of_queries_keys_values_and_tables() {
    for (dtypes, layout) in Dtypes::ALL.into_iter().zip(Layout::ALL.into_iter().cycle()) {
        let value_dim = layout.has_two_buffers().then_some(24);
        let lengths = vec![(1, 50), (20, 33)];
        let shape = Shape { dtypes, lengths, value_dim, mask: Mask::FULL, ..Shape::default() };
        let case = Case::flash(&shape.batch(), &Storage::paged(layout, 7));
        follows_strides(Op::FlashAttnVarlen, &case.invocation(), 2);
    }
}

#[test]
fn flash_attn_varlen_bwd_follows_the_strides_of_all_rows() {
    for dtype in ATTENTION_DTYPES {
        let lengths = vec![(1, 50), (20, 33)];
        let shape = Shape { dtypes: dtype.into(), lengths, value_dim: Some(24), ..Shape::default() };
        let case = GradientCase::store(&shape.batch(), &Storage::contiguous(), Wanted::ALL);
        follows_strides(Op::FlashAttnVarlenBwd, &case.invocation(), 4);
    }
}

#[test]
fn flash_attn_varlen_bwd_refuses_strides_that_no_kernel_can_follow() {
    let (wide, rows, keys) = (claim(BF16, &[6, 4, 24]), claim(BF16, &[6, 4, 16]), claim(BF16, &[9, 2, 16]));
    let (values, lse, starts) = (claim(BF16, &[9, 2, 24]), claim(F32, &[4, 6]), claim(I32, &[4]));
    let operands = [wide, rows, keys, values, wide, lse, starts, starts];
    let results = [rows, keys, values];
    let refuses = |operands: &[Tensor], results: &[Tensor], text: &str| {
        let outcome = check(Op::FlashAttnVarlenBwd, operands, results, &FLASH_BWD_ATTRIBUTES);
        refused(outcome, &format!("xla_gpu_flash_attn_varlen_bwd: {text}"));
    };
    check(Op::FlashAttnVarlenBwd, &operands, &results, &FLASH_BWD_ATTRIBUTES).unwrap();
    let (apart, transposed): (&'static [i64], &'static [i64]) = (&[200, 48, 2], &[1, 8]);
    for (index, name) in ["dout", "q", "k", "v", "out"].into_iter().enumerate() {
        let mut operands = operands;
        operands[index].strides = Some(apart);
        refuses(&operands, &results, &format!("{name} has strides Some({apart:?}), expected 1 for the last dimension"));
    }
    let dense = |name: &str, strides: &[i64]| format!("{name} has strides Some({strides:?}), expected a dense tensor");
    for (index, name, strides) in [(5, "softmax_lse", transposed), (6, "cu_seqlens_q", &[2]), (7, "cu_seqlens_k", &[3])]
    {
        let mut operands = operands;
        operands[index].strides = Some(strides);
        refuses(&operands, &results, &dense(name, strides));
    }
    let with_dlse = |dlse: Tensor<'static>| {
        let mut operands = operands.to_vec();
        operands.resize(13, Tensor::ABSENT);
        operands.push(dlse);
        operands
    };
    let dlse = Tensor { strides: Some(transposed), ..lse };
    refuses(&with_dlse(dlse), &results, &dense("dlse", transposed));
    for (index, name) in ["dq", "dk", "dv"].into_iter().enumerate() {
        let mut results = results;
        results[index].strides = Some(&[400, 40, 1]);
        refuses(&operands, &results, &dense(name, &[400, 40, 1]));
    }
}

/// The call's operands in guarded memory.
fn placed(invocation: &Invocation) -> Vec<Spread> {
    invocation.operands.iter().map(|(name, array)| Spread::new(name, Side::EndsAtGuard, array, 0)).collect()
}

#[test]
fn halves_of_one_cache_serve_as_k_and_v() {
    // torch's kv[0], kv[1] of a cache [2, P, page_size, Hkv, D].
    let batch = Shape { lengths: vec![(1, 50), (20, 33)], ..Shape::default() }.batch();
    let stacked = Case::flash(&batch, &Storage::paged(Layout::Stacked, 8)).invocation();
    let expected = stacked.results(Side::EndsAtGuard);
    let spread = placed(&stacked);
    let mut operands: Vec<Tensor> = spread.iter().map(Spread::tensor).collect();
    let (cache, dims) = (operands[1], stacked.operands[1].1.dims.clone());
    let half = dims[1..].iter().product::<i64>() as usize * cache.dtype.size();
    let view = |by: usize| Tensor { dims: &dims[1..], strides: None, data: cache.data.wrapping_add(by), ..cache };
    (operands[1], operands[2]) = (view(0), view(half));
    let mut split = stacked.clone().attribute("kv_layout", Attr::I64(0));
    split.attributes.sort_by_key(|(name, _)| *name);
    gives(Op::FlashAttnVarlen, &split, &operands, &expected[..2]);
}

#[test]
fn one_kv_head_may_stand_for_all_with_a_stride_of_0() {
    // torch's k.expand(-1, 4, -1): four heads in the memory of one.
    let batch = Shape { heads: (4, 1), lengths: vec![(3, 50), (20, 33)], ..Shape::default() }.batch();
    let case = Case::flash(&batch, &Storage::contiguous());
    let invocation = case.invocation();
    let expected = invocation.results(Side::EndsAtGuard);
    let spread = placed(&invocation);
    let mut operands: Vec<Tensor> = spread.iter().map(Spread::tensor).collect();
    let (dims, strides) = ([case.place.num_pages as i64, 4, 64], [64i64, 0, 1]);
    for operand in &mut operands[1..3] {
        operand.dims = &dims;
        operand.strides = Some(&strides);
    }
    let found = run(Op::FlashAttnVarlen, &invocation, &operands, &SingleThread, &expected[..2]);
    for (found, expected) in found.iter().zip(&expected) {
        for (a, b) in found.values().into_iter().zip(expected.values()) {
            // Rows of no sequence have an lse of -inf in both.
            let same = a.to_bits() == b.to_bits() || (a - b).abs() < 1e-5;
            assert!(same, "expanded heads differ from grouped ones");
        }
    }
}
