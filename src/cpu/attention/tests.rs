//! What is planned; what is computed is held against the definition in `tests/it`, with every instruction set.

use super::plan::Plan;
use crate::cpu::simd::Isa;
use crate::problem::{Attribute, CallArguments, Op, paged_attention};
use crate::tensor::{DType, Tensor};

const ROWS: i32 = 600;

/// How many items and tasks are planned for queries of one row at these starts, and no keys.
fn planned(starts: &[i32]) -> usize {
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
    // SAFETY: the problem's arrays are above.
    let plan = unsafe { Plan::new(&problem, Isa::best().vector_shape(), 4) }.unwrap();
    plan.items.len() + plan.tasks.len()
}

#[test]
fn what_is_planned_for_hostile_starts_is_no_more_than_for_right_ones() {
    // Each query is an item of its own.
    let right = planned(&(0..=ROWS).collect::<Vec<_>>());
    assert!(right >= ROWS as usize, "{right}");
    for start in [|b: i32| b % 2 * ROWS, |b| if b % 2 == 0 { b } else { ROWS }, |b| ROWS - b] {
        let hostile = planned(&(0..=ROWS).map(start).collect::<Vec<_>>());
        assert!(hostile <= right, "{hostile} items and tasks, {right} for right starts");
    }
}
