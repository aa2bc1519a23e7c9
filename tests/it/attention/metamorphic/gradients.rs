//! Identities of the gradients.

use super::{for_f32_calls, over_groups, over_rows};
use crate::attention::Operator;
use crate::attention::results::{
    GRADIENT, Gradients, assert_close, assert_same_gradients, differentiate, gradients_of,
};
use crate::support::{Array, AttentionConfig, BatchSpec, GradientCase, GradientOptions, SequenceData};

/// The softmax weights of a row sum to 1. Without a soft cap and a sink, adding a number to all scores of a row
/// therefore changes only its lse, so `sum over j of ds_ij` is the row's `dlse`; and dv sums to the cotangents of the
/// rows that attend to a key.
pub(crate) fn dk_and_dv_sum_to_the_cotangents_of_the_rows(op: Operator) {
    for_f32_calls(op, 32, |spec, memory_layout, _| {
        let batch = BatchSpec { softcap: 0.0, sinks: false, ..spec }.batch();
        let AttentionConfig { q_heads, kv_heads, head_dim, value_dim, softmax_scale, .. } = batch.config;
        let group = q_heads / kv_heads;
        for (gradients, sequence) in differentiate(&batch, &memory_layout).0.iter().zip(&batch.sequences) {
            let SequenceData { len_k, .. } = *sequence;
            let has_keys = |row: usize| !batch.visible(sequence, row).is_empty();
            let (mut q, mut dout) = (sequence.q.clone(), gradients.dout.clone());
            for (index, query) in q.chunks_exact_mut(head_dim).enumerate() {
                let factor =
                    if has_keys(index / q_heads) { f64::from(softmax_scale) * gradients.dlse[index] } else { 0.0 };
                for x in query {
                    *x *= factor;
                }
            }
            let without_keys =
                dout.chunks_exact_mut(q_heads * value_dim).enumerate().filter(|(row, _)| !has_keys(*row));
            without_keys.for_each(|(_, row)| row.fill(0.0));
            let terms = (1.0 + (len_k as f64).sqrt()) * GRADIENT;
            for (actual, rows, d) in [(&gradients.dk, &q, head_dim), (&gradients.dv, &dout, value_dim)] {
                let expected = over_rows(&over_groups(rows, group, d), kv_heads, d);
                assert_close(&over_rows(actual, kv_heads, d), &expected, terms, "sum of dk, of dv");
            }
        }
    });
}

/// Both products are `sum over i, j of ds_ij q_i . k_j`: a factor of all queries and the same factor of all keys have
/// the same effect.
pub(crate) fn q_times_dq_equals_k_times_dk(op: Operator) {
    for_f32_calls(op, 32, |spec, memory_layout, _| {
        let batch = spec.batch();
        let AttentionConfig { q_heads, kv_heads, head_dim: d, .. } = batch.config;
        for (gradients, sequence) in differentiate(&batch, &memory_layout).0.iter().zip(&batch.sequences) {
            let products = |x: &[f64], dx: &[f64], heads: usize| -> Vec<f64> {
                let factor = |(x, dx): (&[f64], &[f64])| x.iter().zip(dx).map(|(x, dx)| x * dx).sum::<f64>();
                let row_products: Vec<f64> = x.chunks_exact(d).zip(dx.chunks_exact(d)).map(factor).collect();
                over_rows(&over_groups(&row_products, heads / kv_heads, 1), kv_heads, 1)
            };
            let query_products = products(&sequence.q, &gradients.dq, q_heads);
            let key_products = products(&sequence.k, &gradients.dk, kv_heads);
            let numbers = (1 + gradients.dq.len() + gradients.dk.len()) as f64;
            let largest = gradients.dq.iter().chain(&gradients.dk).fold(1.0f64, |m, x| m.max(x.abs()));
            assert_close(&query_products, &key_products, GRADIENT * largest * numbers.sqrt(), "q . dq and k . dk");
        }
    });
}

pub(crate) fn gradients_are_linear_in_the_cotangents(op: Operator) {
    for_f32_calls(op, 24, |spec, memory_layout, _| {
        let batch = spec.batch();
        let case = GradientCase::store(&batch, &memory_layout, GradientOptions::ALL);
        let (mut expected, mut sinks) = gradients_of(&case, &batch);
        let scaled = |array: &Array| {
            let values: Vec<f64> = array.values().iter().map(|x| -4.0 * x).collect();
            Array::new(array.dtype, &array.dims, &values)
        };
        let (dout, dlse) = (scaled(&case.dout), case.dlse.as_ref().map(scaled));
        let sequence_gradients = expected.iter_mut().flat_map(|Gradients { dq, dk, dv, .. }| [dq, dk, dv]);
        sequence_gradients.chain([&mut sinks]).flatten().for_each(|x| *x *= -4.0);
        let actual = gradients_of(&GradientCase { dout, dlse, ..case }, &batch);
        assert_same_gradients(&actual, &(expected, sinks), "times -4");
    });
}
