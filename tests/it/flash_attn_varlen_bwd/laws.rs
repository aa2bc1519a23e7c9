//! What must hold between two calls of the operator, or between its results, whatever the numbers are.

use super::calls::f32_calls;
use crate::support::array::{Array, F32};
use crate::support::batch::{Alibi, Batch, SequenceData, Shape};
use crate::support::case::Case;
use crate::support::gradient_case::{GradientCase, Wanted};
use crate::support::guard::Side;
use crate::support::oracle::Mask;
use crate::support::random::Random;
use crate::support::rows::{assert_close, change_rows};
use crate::support::storage::Storage;
use crate::support::strategies::for_all;

/// What a gradient in f32 may be off by, a little over what SPEC 2.1 allows one answer.
const EACH: f64 = 1.5e-4;

/// The gradients of one sequence.
#[derive(Clone, PartialEq, Debug)]
struct Parts {
    /// `[len_q, Hq, D]`
    dq: Vec<f64>,
    /// `[len_k, Hkv, D]`
    dk: Vec<f64>,
    /// `[len_k, Hkv, Dv]`
    dv: Vec<f64>,
    /// Its cotangents: `[len_q, Hq, Dv]`, `[len_q, Hq]`
    dout: Vec<f64>,
    dlse: Vec<f64>,
}

/// What a call gives, cut into sequences, and `dsinks`.
fn differentiate(batch: &Batch, storage: &Storage) -> (Vec<Parts>, Vec<f64>) {
    parts_of(&GradientCase::store(batch, storage, Wanted::ALL), batch)
}

fn parts_of(case: &GradientCase, batch: &Batch) -> (Vec<Parts>, Vec<f64>) {
    let results: Vec<Vec<f64>> = case.invocation().results(Side::EndsAtGuard).iter().map(Array::values).collect();
    let form = &batch.form;
    let (dout, dlse) = (case.dout.values(), case.dlse.as_ref().unwrap().values());
    let forward: &Case = &case.forward;
    let of = |(index, sequence): (usize, &SequenceData)| {
        let (row, key) = (forward.cu_seqlens_q[index] as usize, forward.cu_seqlens_k[index] as usize);
        let cut = |all: &[f64], first: usize, len: usize, width: usize| all[first * width..][..len * width].to_vec();
        let (heads, kv_heads) = (form.q_heads, form.kv_heads);
        let rows = (row..row + sequence.len_q).flat_map(|i| (0..heads).map(move |h| h * forward.rows() + i));
        Parts {
            dq: cut(&results[0], row, sequence.len_q, heads * form.head_dim),
            dk: cut(&results[1], key, sequence.len_k, kv_heads * form.head_dim),
            dv: cut(&results[2], key, sequence.len_k, kv_heads * form.value_dim),
            dout: cut(&dout, row, sequence.len_q, heads * form.value_dim),
            dlse: rows.map(|at| dlse[at]).collect(),
        }
    };
    (batch.sequences.iter().enumerate().map(of).collect(), results[3].clone())
}

fn assert_same((a, a_sinks): &(Vec<Parts>, Vec<f64>), (b, b_sinks): &(Vec<Parts>, Vec<f64>), what: &str) {
    assert_eq!(a.len(), b.len(), "{what}");
    for (a, b) in a.iter().zip(b) {
        assert_close(&a.dq, &b.dq, EACH, &format!("{what}: dq"));
        assert_close(&a.dk, &b.dk, EACH, &format!("{what}: dk"));
        assert_close(&a.dv, &b.dv, EACH, &format!("{what}: dv"));
    }
    assert_close(a_sinks, b_sinks, EACH, &format!("{what}: dsinks"));
}

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

/// The batch with something done to each sequence.
fn each(batch: &Batch, change: impl Fn(&mut SequenceData)) -> Batch {
    let mut batch = batch.clone();
    batch.sequences.iter_mut().for_each(change);
    batch
}

#[test]
fn a_ragged_batch_is_its_sequences_one_by_one() {
    for_all(32, f32_calls(), |(shape, storage)| {
        let batch = shape.batch();
        let (whole, sinks) = differentiate(&batch, &storage);
        let mut sum = vec![0.0; sinks.len()];
        for (index, parts) in whole.iter().enumerate() {
            let dense = Storage { seed: storage.seed + 1, ..Storage::contiguous().bare() };
            let (alone, own) = differentiate(&batch.only(index), &dense);
            assert_same(&(alone, vec![]), &(vec![parts.clone()], vec![]), "alone");
            sum.iter_mut().zip(own).for_each(|(s, x)| *s += x);
        }
        assert_close(&sum, &sinks, EACH, "sinks");
    });
}

#[test]
fn grouped_heads_equal_the_sum_over_repeated_heads() {
    for_all(24, f32_calls(), |(shape, storage)| {
        let batch = shape.batch();
        let form = &batch.form;
        let group = form.q_heads / form.kv_heads;
        let repeat = |rows: &[f64], d: usize| -> Vec<f64> {
            rows.chunks_exact(d).flat_map(|head| std::iter::repeat_n(head, group).flatten().copied()).collect()
        };
        let repeated = each(&batch, |s| {
            s.k = repeat(&s.k, form.head_dim);
            s.v = repeat(&s.v, form.value_dim);
        });
        let repeated = repeated.with_form(|form| form.kv_heads = form.q_heads);
        let mut found = differentiate(&repeated, &storage);
        for parts in &mut found.0 {
            parts.dk = over_groups(&parts.dk, group, form.head_dim);
            parts.dv = over_groups(&parts.dv, group, form.value_dim);
        }
        assert_same(&found, &differentiate(&batch, &storage), "repeated heads");
    });
}

/// Without a cap and without a sink, `sum over j of ds_ij` is what `dlse` says of row i: the weights add up to 1, and
/// adding one number to all scores of a row moves nothing but its lse.
#[test]
fn gradients_of_keys_add_up_to_the_queries_times_dlse() {
    for_all(32, f32_calls(), |(shape, storage)| {
        let batch = Shape { softcap: 0.0, sinks: false, ..shape }.batch();
        let form = &batch.form;
        let (group, d) = (form.q_heads / form.kv_heads, form.head_dim);
        for (parts, sequence) in differentiate(&batch, &storage).0.iter().zip(&batch.sequences) {
            let mut weighted = sequence.q.clone();
            for (index, query) in weighted.chunks_exact_mut(d).enumerate() {
                let SequenceData { len_q, len_k, leftpad, .. } = *sequence;
                let sees = !form.mask.visible(index / form.q_heads, len_q, len_k, leftpad).is_empty();
                let factor = if sees { f64::from(form.softmax_scale) * parts.dlse[index] } else { 0.0 };
                for x in query {
                    *x *= factor;
                }
            }
            let expected = over_rows(&over_groups(&weighted, group, d), form.kv_heads, d);
            let found = over_rows(&parts.dk, form.kv_heads, d);
            let terms = 1.0 + (sequence.len_k as f64).sqrt();
            assert_close(&found, &expected, terms * EACH, "sum of dk");
        }
    });
}

/// The weights of a row add up to 1, where no sink takes a share.
#[test]
fn gradients_of_values_add_up_to_those_of_the_rows_that_see_a_key() {
    for_all(32, f32_calls(), |(shape, storage)| {
        let batch = Shape { sinks: false, ..shape }.batch();
        let form = &batch.form;
        let (group, d) = (form.q_heads / form.kv_heads, form.value_dim);
        for (parts, sequence) in differentiate(&batch, &storage).0.iter().zip(&batch.sequences) {
            let SequenceData { len_q, len_k, leftpad, .. } = *sequence;
            let rows = parts.dout.chunks_exact(form.q_heads * d).enumerate();
            let seeing = rows.filter(|(i, _)| !form.mask.visible(*i, len_q, len_k, leftpad).is_empty());
            let dout: Vec<f64> = seeing.flat_map(|(_, row)| row.to_vec()).collect();
            let expected = over_rows(&over_groups(&dout, group, d), form.kv_heads, d);
            let found = over_rows(&parts.dv, form.kv_heads, d);
            let terms = 1.0 + (sequence.len_k as f64).sqrt();
            assert_close(&found, &expected, terms * EACH, "sum of dv");
        }
    });
}

/// Both are `sum over i, j of ds_ij q_i . k_j`: doubling all queries is doubling all keys.
#[test]
fn queries_and_keys_have_the_same_product_with_their_gradients() {
    for_all(32, f32_calls(), |(shape, storage)| {
        let batch = shape.batch();
        let form = &batch.form;
        let d = form.head_dim;
        for (parts, sequence) in differentiate(&batch, &storage).0.iter().zip(&batch.sequences) {
            let products = |x: &[f64], dx: &[f64], heads: usize| -> Vec<f64> {
                let of_row = |(x, dx): (&[f64], &[f64])| x.iter().zip(dx).map(|(x, dx)| x * dx).sum::<f64>();
                let of_rows: Vec<f64> = x.chunks_exact(d).zip(dx.chunks_exact(d)).map(of_row).collect();
                over_rows(&over_groups(&of_rows, heads / form.kv_heads, 1), form.kv_heads, 1)
            };
            let of_queries = products(&sequence.q, &parts.dq, form.q_heads);
            let of_keys = products(&sequence.k, &parts.dk, form.kv_heads);
            let numbers = (1 + parts.dq.len() + parts.dk.len()) as f64;
            let most = parts.dq.iter().chain(&parts.dk).fold(1.0f64, |m, x| m.max(x.abs()));
            assert_close(&of_queries, &of_keys, EACH * most * numbers.sqrt(), "q . dq and k . dk");
        }
    });
}

#[test]
fn keys_may_stand_in_any_order_where_no_place_counts() {
    for_all(24, f32_calls(), |(shape, storage)| {
        let shape = Shape { mask: Mask::FULL, leftpad: false, alibi: Alibi::Off, ..shape };
        let batch = shape.batch();
        let form = &batch.form;
        let order = |len_k: usize| {
            let mut order: Vec<usize> = (0..len_k).collect();
            Random::new(11).shuffle(&mut order);
            order
        };
        let in_order = |rows: &[f64], len_k: usize, row: usize| -> Vec<f64> {
            order(len_k).iter().flat_map(|&j| rows[j * row..][..row].to_vec()).collect()
        };
        let (k_row, v_row) = (form.kv_heads * form.head_dim, form.kv_heads * form.value_dim);
        let shuffled = each(&batch, |s| {
            s.k = in_order(&s.k, s.len_k, k_row);
            s.v = in_order(&s.v, s.len_k, v_row);
        });
        let mut expected = differentiate(&batch, &storage);
        for (parts, sequence) in expected.0.iter_mut().zip(&batch.sequences) {
            parts.dk = in_order(&parts.dk, sequence.len_k, k_row);
            parts.dv = in_order(&parts.dv, sequence.len_k, v_row);
        }
        assert_same(&differentiate(&shuffled, &storage), &expected, "shuffled keys");
    });
}

#[test]
fn padding_on_the_left_equals_slicing_it_off() {
    for_all(32, f32_calls(), |(shape, storage)| {
        // Counted from the last key, the padding has no place.
        let mask = Mask { top_left: false, ..shape.mask };
        let batch = Shape { leftpad: true, mask, ..shape }.batch();
        let form = &batch.form;
        let (k_row, v_row) = (form.kv_heads * form.head_dim, form.kv_heads * form.value_dim);
        let sliced = each(&batch, |s| {
            s.len_k -= s.leftpad;
            s.k.drain(..s.leftpad * k_row);
            s.v.drain(..s.leftpad * v_row);
            s.leftpad = 0;
        });
        let mut expected = differentiate(&batch, &storage);
        for (parts, sequence) in expected.0.iter_mut().zip(&batch.sequences) {
            let padding = parts.dk.drain(..sequence.leftpad * k_row).chain(parts.dv.drain(..sequence.leftpad * v_row));
            assert!(padding.into_iter().all(|x| x == 0.0), "padding has a gradient");
        }
        let sliced = Batch { leftpad: false, ..sliced };
        assert_same(&differentiate(&sliced, &storage), &expected, "sliced");
    });
}

#[test]
fn gradients_are_linear_in_the_cotangents() {
    for_all(24, f32_calls(), |(shape, storage)| {
        let batch = shape.batch();
        let case = GradientCase::store(&batch, &storage, Wanted::ALL);
        let (mut expected, mut sinks) = parts_of(&case, &batch);
        let scaled = |array: &Array| {
            let values: Vec<f64> = array.values().iter().map(|x| -4.0 * x).collect();
            Array::new(array.dtype, &array.dims, &values)
        };
        let (dout, dlse) = (scaled(&case.dout), case.dlse.as_ref().map(scaled));
        for parts in &mut expected {
            let Parts { dq, dk, dv, .. } = parts;
            [dq, dk, dv].into_iter().flatten().for_each(|x| *x *= -4.0);
        }
        for x in &mut sinks {
            *x *= -4.0;
        }
        assert_same(&parts_of(&GradientCase { dout, dlse, ..case }, &batch), &(expected, sinks), "times -4");
    });
}

#[test]
fn adding_a_vector_to_every_value_changes_no_gradient_of_rows_without_a_sink() {
    for_all(24, f32_calls(), |(shape, storage)| {
        let batch = Shape { sinks: false, ..shape }.batch();
        let form = &batch.form;
        let shifted = each(&batch, |s| {
            change_rows(&mut s.v, form.kv_heads, form.value_dim, |head, row| {
                for v in row {
                    *v = F32.round(*v + 1.0 + head as f64);
                }
            });
        });
        assert_same(&differentiate(&shifted, &storage), &differentiate(&batch, &storage), "shifted values");
    });
}

#[test]
fn options_that_say_nothing_change_nothing() {
    for_all(24, f32_calls(), |(shape, storage)| {
        let batch = Shape { leftpad: false, alibi: Alibi::Off, sinks: false, ..shape }.batch();
        let expected = differentiate(&batch, &storage);
        let flat = each(&Batch { alibi: Alibi::PerSequence, ..batch.clone() }, |s| s.slopes.fill(0.0));
        assert_same(&differentiate(&flat, &storage), &expected, "slopes of 0");
        let padded = Batch { leftpad: true, ..batch.clone() };
        assert_same(&differentiate(&padded, &storage), &expected, "padding of 0");
        let sinks = batch.with_form(|form| form.sinks = Some(vec![f32::NEG_INFINITY; form.q_heads]));
        let without = differentiate(&sinks, &storage);
        assert!(without.1.iter().all(|&x| x == 0.0), "a sink of -inf has a gradient");
        assert_same(&without, &expected, "sinks of -inf");
        let far = batch.with_form(|form| form.softcap = 1e6);
        let plain = batch.with_form(|form| form.softcap = 0.0);
        assert_same(&differentiate(&far, &storage), &differentiate(&plain, &storage), "a cap far away");
    });
}
