//! Splitting the keys anywhere and merging the parts by their lse gives the whole. The merge is done here, in f64.

use crate::support::array::F32;
use crate::support::batch::{Alibi, Batch, SequenceData, Shape};
use crate::support::case::Target::FlashAttnVarlen;
use crate::support::oracle::Mask;
use crate::support::rows::{Rows, assert_same_rows, attend};
use crate::support::storage::Storage;
use crate::support::strategies::{flash_calls, for_all};
use proptest::prelude::*;

/// Two parts of the keys of one sequence, as one.
fn merged(a: &Rows, b: &Rows, heads: usize) -> Rows {
    let mut whole = a.clone();
    let len_q = a.lse[0].len();
    let d = a.out.len().checked_div(heads * len_q).unwrap_or(0);
    for (i, head) in (0..len_q).flat_map(|i| (0..heads).map(move |h| (i, h))) {
        let (la, lb) = (a.lse[head][i], b.lse[head][i]);
        let largest = la.max(lb);
        if largest == f64::NEG_INFINITY {
            continue;
        }
        let (wa, wb) = ((la - largest).exp(), (lb - largest).exp());
        whole.lse[head][i] = largest + (wa + wb).ln();
        let row = (i * heads + head) * d..(i * heads + head + 1) * d;
        for at in row {
            whole.out[at] = (wa * a.out[at] + wb * b.out[at]) / (wa + wb);
        }
    }
    whole
}

/// The keys of a sequence from `start` to `end`.
fn part(batch: &Batch, sequence: &SequenceData, start: usize, end: usize) -> SequenceData {
    let form = &batch.form;
    let rows = |values: &[f64], row: usize| values[start * row..end * row].to_vec();
    SequenceData {
        len_k: end - start,
        k: rows(&sequence.k, form.kv_heads * form.head_dim),
        v: rows(&sequence.v, form.kv_heads * form.value_dim),
        ..sequence.clone()
    }
}

/// The batch with something else done to each sequence.
fn each(batch: &Batch, change: impl Fn(&SequenceData) -> SequenceData) -> Batch {
    Batch { sequences: batch.sequences.iter().map(change).collect(), ..batch.clone() }
}

fn f32_calls() -> impl Strategy<Value = (Shape, Storage)> {
    flash_calls().prop_map(|(shape, storage)| (Shape { dtypes: F32.into(), sharpness: 1.0, ..shape }, storage))
}

fn assert_merged(parts: [&Batch; 2], whole: &Batch, storage: &Storage) {
    let [a, b] = parts.map(|part| attend(FlashAttnVarlen, part, storage));
    let found: Vec<Rows> = a.iter().zip(&b).map(|(a, b)| merged(a, b, whole.form.q_heads)).collect();
    assert_same_rows(&found, &attend(FlashAttnVarlen, whole, storage), "merged");
}

#[test]
fn under_any_mask_counted_from_the_first_key() {
    for_all(32, (f32_calls(), 0.0..=1.0f64), |((shape, storage), cut)| {
        // Positions are counted from the first key, so that cutting off the last ones moves nobody.
        let mask = shape.mask.top_left();
        let batch = Shape { leftpad: false, mask, ..shape }.batch();
        let at = |s: &SequenceData| (cut * s.len_k as f64).round() as usize;
        let first = each(&batch, |s| part(&batch, s, 0, at(s)));
        // A sink belongs to exactly one part.
        let first = first.with_form(|form| form.sinks = None);
        let second = each(&batch, |s| SequenceData { leftpad: at(s), ..s.clone() });
        assert_merged([&first, &Batch { leftpad: true, ..second }], &batch, &storage);
    });
}

#[test]
fn without_a_mask_the_parts_are_sequences_of_their_own() {
    for_all(32, (f32_calls(), 0.0..=1.0f64), |((shape, storage), cut)| {
        let batch = Shape { leftpad: false, mask: Mask::FULL, alibi: Alibi::Off, ..shape }.batch();
        let at = |s: &SequenceData| (cut * s.len_k as f64).round() as usize;
        let first = each(&batch, |s| part(&batch, s, 0, at(s)));
        let second = each(&batch, |s| part(&batch, s, at(s), s.len_k)).with_form(|form| form.sinks = None);
        assert_merged([&first, &second], &batch, &storage);
    });
}

#[test]
fn key_by_key() {
    for storage in [Storage::contiguous(), Storage::default()] {
        let batch = Shape { lengths: vec![(1, 40), (3, 21)], mask: Mask::FULL, ..Shape::default() }.batch();
        for (sequence, whole) in batch.sequences.iter().zip(attend(FlashAttnVarlen, &batch, &storage)) {
            let keys = (0..sequence.len_k).map(|j| part(&batch, sequence, j, j + 1));
            let keys = Batch { sequences: keys.collect(), ..batch.clone() };
            let rows = attend(FlashAttnVarlen, &keys, &storage);
            let merged = rows.into_iter().reduce(|a, b| merged(&a, &b, batch.form.q_heads)).unwrap();
            assert_same_rows(&[merged], &[whole], "key by key");
        }
    }
}
