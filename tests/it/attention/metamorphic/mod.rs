//! Metamorphic properties: relations between the results of two calls that hold for all numbers.

mod changed_inputs;
mod equivalent_inputs;
mod gradients;
mod splits;

pub(crate) use {changed_inputs::*, equivalent_inputs::*, gradients::*, splits::*};

use crate::attention::Operator;
use crate::attention::results::{Gradients, assert_same_gradients, assert_same_rows, attend, differentiate};
use crate::support::{Batch, BatchSpec, F32, MemoryLayout, Random, SequenceData};

/// Calls `property` with small calls in f32, so that only the order of sums may differ between two results.
fn for_f32_calls(op: Operator, count: u64, property: impl Fn(BatchSpec, MemoryLayout, &mut Random)) {
    op.for_calls(count, |spec, memory_layout, random| {
        property(BatchSpec { dtypes: F32.into(), sharpness: 1.0, ..spec }, memory_layout, random);
    });
}

/// The batch with every sequence changed.
fn each(batch: &Batch, change: impl Fn(&mut SequenceData)) -> Batch {
    let mut batch = batch.clone();
    batch.sequences.iter_mut().for_each(change);
    batch
}

/// Calls `change(head, row)` for every row `[D]` of `[n, heads, D]`.
fn change_rows(rows: &mut [f64], heads: usize, d: usize, change: impl Fn(usize, &mut [f64])) {
    for (index, row) in rows.chunks_exact_mut(d).enumerate() {
        change(index % heads, row);
    }
}

/// Asserts that two calls give the same results. For gradients, `back` first maps those of the keys and values of the
/// changed batch to the original one.
fn assert_same(
    op: Operator,
    (changed, original): (&Batch, &Batch),
    memory_layout: &MemoryLayout,
    description: &str,
    back: impl Fn(&SequenceData, &mut Gradients),
) {
    if op != Operator::FlashAttnVarlenBwd {
        return assert_same_rows(
            &attend(op, changed, memory_layout),
            &attend(op, original, memory_layout),
            description,
        );
    }
    let mut actual = differentiate(changed, memory_layout);
    actual.0.iter_mut().zip(&changed.sequences).for_each(|(gradients, sequence)| back(sequence, gradients));
    assert_same_gradients(&actual, &differentiate(original, memory_layout), description);
}

fn unchanged(_: &SequenceData, _: &mut Gradients) {}

/// The sum over the rows of `[n, heads, d]`, `[heads, d]`.
fn over_rows(rows: &[f64], heads: usize, d: usize) -> Vec<f64> {
    let mut sum = vec![0.0; heads * d];
    rows.chunks_exact(heads * d).for_each(|row| sum.iter_mut().zip(row).for_each(|(s, x)| *s += x));
    sum
}

/// The sum over the query heads of each KV head: `[n, Hq, d]` to `[n, Hkv, d]`.
fn over_groups(rows: &[f64], group: usize, d: usize) -> Vec<f64> {
    rows.chunks_exact(group * d).flat_map(|heads| over_rows(heads, 1, d)).collect()
}

/// The scale of a KV head; 1 without scales.
fn scale_of(values: Option<&Vec<f32>>, head: usize) -> f64 {
    values.map_or(1.0, |v| f64::from(v[head % v.len()]))
}
