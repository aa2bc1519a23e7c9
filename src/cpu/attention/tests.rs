//! Tests of the plan. `tests/it` compares results with the definition, for every instruction set.

use super::plan::FwdPlan;
use crate::cpu::simd::Isa;
use crate::problem::{Attribute, CallArguments, Op, paged_attention};
use crate::tensor::{DType, Tensor};

const ROWS: i32 = 600;

/// The number of tiles and tasks that are planned for sequences with these starts and no keys.
fn num_planned(starts: &[i32]) -> usize {
    let dims = [i64::from(ROWS), 256, 8];
    let (mut query, mut cache) = (vec![0.0f32; dims.iter().product::<i64>() as usize], [0.0f32; 32]);
    let (lengths, num_seqs) = (vec![0; starts.len() - 1], [starts.len() as i32 - 1]);
    let (seqs, tables) = ([lengths.len() as i64], [lengths.len() as i64, 1]);
    let starts_dims = [starts.len() as i64];
    let index = |values: &[i32], dims| Tensor::dense(DType::I32, values.as_ptr().cast_mut().cast(), dims);
    let query = Tensor::dense(DType::F32, query.as_mut_ptr().cast(), &dims);
    let operands = [
        query,
        Tensor::dense(DType::F32, cache.as_mut_ptr().cast(), &[1, 2, 2, 8]),
        index(&lengths, &seqs),
        index(&lengths, &tables),
        index(starts, &starts_dims),
        index(&num_seqs, &[1]),
    ];
    let attributes = [Attribute::Bool(false), Attribute::F32(0.5), Attribute::I64(-1), Attribute::F32(0.0)];
    let results = [query];
    let args = CallArguments::new(Op::PagedAttention.signature(), &operands, &results, &attributes, true).unwrap();
    let problem = paged_attention::problem(&args).unwrap();
    // SAFETY: the problem's metadata are the arrays above, which are live.
    let plan = unsafe { FwdPlan::new(&problem, Isa::best().vector_shape(), 4) }.unwrap();
    plan.tiles.len() + plan.tasks.len()
}

#[test]
fn hostile_starts_plan_no_more_work_than_valid_ones() {
    // Each sequence has one query and is a work tile.
    let valid = num_planned(&(0..=ROWS).collect::<Vec<_>>());
    assert!(valid >= ROWS as usize, "{valid}");
    for start in [|b: i32| b % 2 * ROWS, |b| if b % 2 == 0 { b } else { ROWS }, |b| ROWS - b] {
        let hostile = num_planned(&(0..=ROWS).map(start).collect::<Vec<_>>());
        assert!(hostile <= valid, "{hostile} tiles and tasks, {valid} for valid starts");
    }
}
