//! Metamorphic properties: relations between the results of two calls that hold for all numbers.

mod changed_inputs;
mod equivalent_inputs;
mod gradients;
mod splits;

pub(crate) use {changed_inputs::*, equivalent_inputs::*, gradients::*, splits::*};

use crate::attention::Operator;
use crate::attention::results::{Gradients, assert_same_gradients, assert_same_rows, attend, differentiate};
use crate::support::{Batch, BatchSpec, F32, MemoryLayout, Random, SequenceData};

/// A law holds for small calls in f32, so that the order of sums is all that may differ between its two sides.
fn for_f32_calls(op: Operator, count: u64, law: impl Fn(BatchSpec, MemoryLayout, &mut Random)) {
    op.for_calls(count, |spec, memory_layout, random| {
        law(BatchSpec { dtypes: F32.into(), sharpness: 1.0, ..spec }, memory_layout, random);
    });
}

/// The batch with something done to each sequence.
fn each(batch: &Batch, change: impl Fn(&mut SequenceData)) -> Batch {
    let mut batch = batch.clone();
    batch.sequences.iter_mut().for_each(change);
    batch
}

/// Apply `change(head, [D] row)` to every row of `[n, heads, D]`.
fn change_rows(rows: &mut [f64], heads: usize, d: usize, change: impl Fn(usize, &mut [f64])) {
    for (index, row) in rows.chunks_exact_mut(d).enumerate() {
        change(index % heads, row);
    }
}

/// Two calls, each as the operator takes it, give the same; of gradients, when `back` has brought those of the keys and
/// values of the first call's sequence to where the second one has them.
fn assert_same(
    op: Operator,
    (changed, original): (&Batch, &Batch),
    memory_layout: &MemoryLayout,
    what: &str,
    back: impl Fn(&SequenceData, &mut Gradients),
) {
    if op != Operator::FlashAttnVarlenBwd {
        return assert_same_rows(&attend(op, changed, memory_layout), &attend(op, original, memory_layout), what);
    }
    let mut actual = differentiate(changed, memory_layout);
    actual.0.iter_mut().zip(&changed.sequences).for_each(|(gradients, sequence)| back(sequence, gradients));
    assert_same_gradients(&actual, &differentiate(original, memory_layout), what);
}

fn as_they_are(_: &SequenceData, _: &mut Gradients) {}

/// The sum over the rows of `[n, heads, d]`: `[heads, d]`.
fn over_rows(rows: &[f64], heads: usize, d: usize) -> Vec<f64> {
    let mut sum = vec![0.0; heads * d];
    rows.chunks_exact(heads * d).for_each(|row| sum.iter_mut().zip(row).for_each(|(s, x)| *s += x));
    sum
}

/// The sum over the heads of each group: `[n, Hkv, d]` of `[n, Hq, d]`.
fn over_groups(rows: &[f64], group: usize, d: usize) -> Vec<f64> {
    rows.chunks_exact(group * d).flat_map(|heads| over_rows(heads, 1, d)).collect()
}

/// The scale of a KV head, if there are any.
fn scale_of(values: Option<&Vec<f32>>, head: usize) -> f64 {
    values.map_or(1.0, |v| f64::from(v[head % v.len()]))
}
