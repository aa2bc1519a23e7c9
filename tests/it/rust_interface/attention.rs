//! The attention operators over strided tensors, as eager torch and Rust pass them.

use crate::support::array::{ATTENTION_DTYPES, Array};
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
