//! What must hold between two calls of the operator, whatever the numbers are. Laws that know nothing of pages are in
//! `tests/it/flash_attn_varlen`.

use crate::support::array::F32;
use crate::support::batch::{Alibi, Batch, SequenceData, Shape};
use crate::support::case::Target::{FlashAttnVarlen, PagedAttention};
use crate::support::rows::{LSE, OUT, assert_close, assert_same_rows, attend};
use crate::support::storage::Storage;
use crate::support::strategies::{for_all, paged_shapes, paged_storages};
use proptest::prelude::*;

/// f32, so that the order of sums is all that may differ between two sides of a law.
fn f32_shapes() -> impl Strategy<Value = Shape> {
    paged_shapes().prop_map(|shape| Shape { dtypes: F32.into(), sharpness: 1.0, ..shape })
}

#[test]
fn any_page_size_gives_the_same_answer() {
    for_all(24, (f32_shapes(), paged_storages()), |(shape, storage)| {
        let batch = shape.batch();
        let expected = attend(PagedAttention, &batch, &storage);
        for page_size in [1, 3, 16, 128] {
            let other = attend(PagedAttention, &batch, &Storage { page_size, ..storage.clone() });
            assert_same_rows(&other, &expected, &format!("page_size {page_size}"));
        }
    });
}

#[test]
fn a_batch_is_its_sequences_one_by_one() {
    for_all(24, (f32_shapes(), paged_storages()), |(shape, storage)| {
        let batch = Shape { batch_invariant: false, ..shape }.batch();
        for (index, rows) in attend(PagedAttention, &batch, &storage).iter().enumerate() {
            let alone = attend(PagedAttention, &batch.only(index), &storage);
            assert_same_rows(&alone, std::slice::from_ref(rows), "alone");
        }
    });
}

#[test]
fn it_is_causal_flash_attn_varlen() {
    for_all(32, (paged_shapes(), paged_storages()), |(shape, storage)| {
        // In bits where SPEC promises bits.
        let batch = Shape { batch_invariant: true, ..shape.clone() }.batch();
        let (paged, flash) = (attend(PagedAttention, &batch, &storage), attend(FlashAttnVarlen, &batch, &storage));
        assert!(paged == flash, "the operators differ");
        let batch = Shape { batch_invariant: false, dtypes: F32.into(), sharpness: 1.0, ..shape }.batch();
        let (paged, flash) = (attend(PagedAttention, &batch, &storage), attend(FlashAttnVarlen, &batch, &storage));
        assert_same_rows(&paged, &flash, "the operators");
    });
}

/// The queries `start..end` of a sequence over the keys up to the last of them.
fn chunk(batch: &Batch, sequence: &SequenceData, start: usize, end: usize) -> SequenceData {
    let (q_row, kv_row) = (batch.form.q_heads * batch.form.head_dim, batch.form.kv_heads * batch.form.head_dim);
    SequenceData {
        len_q: end - start,
        len_k: end,
        leftpad: 0,
        q: sequence.q[start * q_row..end * q_row].to_vec(),
        k: sequence.k[..end * kv_row].to_vec(),
        v: sequence.v[..end * kv_row].to_vec(),
        slopes: sequence.slopes.clone(),
    }
}

#[test]
fn a_prefill_in_chunks_is_the_whole_prefill() {
    for_all(24, (f32_shapes(), paged_storages(), 1..20usize), |(shape, storage, step)| {
        let lengths = shape.lengths.iter().map(|&(_, len_k)| (len_k, len_k)).collect();
        let batch = Shape { lengths, ..shape }.batch();
        for (whole, sequence) in attend(PagedAttention, &batch, &storage).iter().zip(&batch.sequences) {
            // The chunk that ends at each step, over the keys up to there; all in one ragged batch.
            let starts = (0..sequence.len_q).step_by(step);
            let sequences = starts.map(|start| chunk(&batch, sequence, start, (start + step).min(sequence.len_q)));
            let chunked = Batch { sequences: sequences.collect(), ..batch.clone() };
            let chunked = attend(PagedAttention, &chunked, &storage);
            let out: Vec<f64> = chunked.iter().flat_map(|rows| rows.out.clone()).collect();
            assert_close(&out, &whole.out, OUT, "chunked prefill: out");
            for head in 0..batch.form.q_heads {
                let lse: Vec<f64> = chunked.iter().flat_map(|rows| rows.lse[head].clone()).collect();
                assert_close(&lse, &whole.lse[head], LSE, "chunked prefill: lse");
            }
        }
    });
}

#[test]
fn slopes_repeated_for_each_sequence_are_the_slopes() {
    for_all(16, (f32_shapes(), paged_storages()), |(shape, storage)| {
        let batch = Shape { alibi: Alibi::PerHead, ..shape }.batch();
        let repeated = Batch { alibi: Alibi::PerSequence, ..batch.clone() };
        let rows = attend(PagedAttention, &repeated, &storage);
        assert_same_rows(&rows, &attend(PagedAttention, &batch, &storage), "repeated slopes");
    });
}
