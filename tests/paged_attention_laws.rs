//! What must hold between two calls of `xla_gpu_paged_attention`, whatever the numbers are.

#![allow(clippy::unwrap_used, reason = "a failed step is a failed test")]

mod support;

use proptest::prelude::*;
use support::array::{ATTENTION_DTYPES, F32};
use support::cases::{Batch, PagedCase, SequenceData, Shape, Storage};
use support::guard::Side;
use support::oracle::distance;
use support::random::Random;
use support::strategies::{for_all, shapes, storages};

/// The rows of one sequence: `out [len_q, Hq, D]` as values and bytes, `lse [Hq][len_q]`.
#[derive(Clone, PartialEq, Debug)]
struct Rows {
    out: Vec<f64>,
    bits: Vec<u8>,
    lse: Vec<Vec<f64>>,
}

/// Run `batch` and cut the results into sequences.
fn attend(batch: &Batch, storage: &Storage) -> Vec<Rows> {
    let case = PagedCase::store(batch, storage);
    let results = case.invocation().results(Side::EndsAtGuard);
    let (out, lse) = (results[0].values(), results[1].values());
    let (row_len, size) = (case.q_heads * case.head_dim, case.dtype.size());
    let rows_of = |index: usize, sequence: &SequenceData| {
        let first = case.query_start_loc[index] as usize;
        let elements = first * row_len..(first + sequence.len_q) * row_len;
        Rows {
            out: out[elements.clone()].to_vec(),
            bits: results[0].bytes[elements.start * size..elements.end * size].to_vec(),
            lse: (0..case.q_heads).map(|h| lse[h * case.rows() + first..][..sequence.len_q].to_vec()).collect(),
        }
    };
    batch.sequences.iter().enumerate().map(|(index, s)| rows_of(index, s)).collect()
}

/// Equal but for twice what SPEC 2.1 allows one f32 answer to be off by: outputs a little over 1e-5, lse 1e-4.
fn assert_close(a: &[f64], b: &[f64], each_off_by: f64, what: &str) {
    let size = a.iter().chain(b).copied().filter(|x| x.is_finite()).fold(1.0f64, |m, x| m.max(x.abs()));
    let pairs: (Vec<f64>, Vec<f64>) = a.iter().zip(b).filter(|(a, b)| a.to_bits() != b.to_bits()).unzip();
    let off = distance(&pairs.0, &pairs.1);
    assert!(off <= 2.0 * each_off_by * size, "{what}: off by {off:e}");
}

const OUT: f64 = 1.5e-5;
const LSE: f64 = 1e-4;

fn assert_same_rows(a: &[Rows], b: &[Rows], what: &str) {
    assert_eq!(a.len(), b.len());
    for (a, b) in a.iter().zip(b) {
        assert_close(&a.out, &b.out, OUT, &format!("{what}: out"));
        assert_close(&a.lse.concat(), &b.lse.concat(), LSE, &format!("{what}: lse"));
    }
}

/// f32, so that the order of sums is all that may differ between two sides of a law.
fn f32_shapes() -> impl Strategy<Value = Shape> {
    shapes().prop_map(|shape| Shape { dtype: F32, sharpness: 1.0, ..shape })
}

#[test]
fn pages_may_lie_in_any_order() {
    for_all(24, (shapes(), storages(), 0..1000u64), |(shape, storage, seed)| {
        let batch = Shape { batch_invariant: true, ..shape }.batch();
        let shuffled = Storage { seed, spare_pages: storage.spare_pages + 4, ..storage.clone() };
        let (a, b) = (attend(&batch, &storage), attend(&batch, &shuffled));
        assert!(a == b, "other page ids changed the bits");
    });
}

#[test]
fn any_page_size_gives_the_same_answer() {
    for_all(24, (f32_shapes(), storages()), |(shape, storage)| {
        let batch = shape.batch();
        let expected = attend(&batch, &storage);
        for page_size in [1, 3, 16, 128] {
            let other = attend(&batch, &Storage { page_size, ..storage.clone() });
            assert_same_rows(&other, &expected, &format!("page_size {page_size}"));
        }
    });
}

#[test]
fn a_batch_is_its_sequences_one_by_one() {
    for_all(24, (f32_shapes(), storages()), |(shape, storage)| {
        let batch = Shape { batch_invariant: false, ..shape }.batch();
        for (index, rows) in attend(&batch, &storage).iter().enumerate() {
            assert_same_rows(&attend(&batch.only(index), &storage), std::slice::from_ref(rows), "alone");
        }
    });
}

#[test]
fn batch_invariant_rows_have_the_bits_of_their_sequence_alone() {
    for_all(32, (shapes(), storages(), storages()), |(shape, storage, other)| {
        let batch = Shape { batch_invariant: true, ..shape }.batch();
        let elsewhere = Storage { page_size: storage.page_size, ..other };
        for (index, rows) in attend(&batch, &storage).into_iter().enumerate() {
            let alone = attend(&batch.only(index), &elsewhere);
            assert!(alone[0] == rows, "sequence {index} has other bits in the batch than alone");
        }
    });
}

#[test]
fn batch_invariant_rows_do_not_depend_on_their_place_or_their_neighbours_number() {
    for dtype in ATTENTION_DTYPES {
        let lengths = vec![(1, 700), (40, 90), (1, 3), (3, 3), (1, 64)];
        let (heads, head_dim) = ((8, 4), 256);
        let shape = Shape { dtype, heads, head_dim, lengths, batch_invariant: true, ..Shape::default() };
        let batch = shape.batch();
        let expected = attend(&batch, &Storage::default());
        let mut crowded = batch.clone();
        crowded.sequences.reverse();
        for copies in 0..20 {
            crowded.sequences.push(batch.sequences[copies % 5].clone());
        }
        let found = attend(&crowded, &Storage { rows_around: (5, 9), spare_entries: 40, ..Storage::default() });
        for (index, rows) in found.iter().enumerate() {
            let original = if index < 5 { 4 - index } else { index % 5 };
            assert!(*rows == expected[original], "{dtype:?}: copy {index} of sequence {original}");
        }
    }
}

#[test]
fn grouped_heads_equal_repeated_heads() {
    for_all(24, (f32_shapes(), storages()), |(shape, storage)| {
        let batch = shape.batch();
        let (group, d) = (batch.q_heads / batch.kv_heads, batch.head_dim);
        let repeat = |rows: &[f64]| -> Vec<f64> {
            rows.chunks_exact(d).flat_map(|head| std::iter::repeat_n(head, group).flatten().copied()).collect()
        };
        let mut repeated = Batch { kv_heads: batch.q_heads, ..batch.clone() };
        for sequence in &mut repeated.sequences {
            (sequence.k, sequence.v) = (repeat(&sequence.k), repeat(&sequence.v));
        }
        assert_same_rows(&attend(&repeated, &storage), &attend(&batch, &storage), "repeated heads");
    });
}

/// Apply `change(head, [D] row)` to every row of `[n, heads, D]`.
fn change_rows(rows: &mut [f64], heads: usize, d: usize, change: impl Fn(usize, &mut [f64])) {
    for (index, row) in rows.chunks_exact_mut(d).enumerate() {
        change(index % heads, row);
    }
}

#[test]
fn adding_a_vector_to_every_key_moves_only_the_lse() {
    for_all(24, (f32_shapes(), storages()), |(shape, storage)| {
        // The soft cap bends scores: the law holds without it.
        let batch = Shape { soft_cap: 0.0, ..shape }.batch();
        let d = batch.head_dim;
        let mut random = Random::new(7);
        let shift: Vec<f64> = (0..batch.kv_heads * d).map(|_| random.normal()).collect();
        let mut shifted = batch.clone();
        for sequence in &mut shifted.sequences {
            change_rows(&mut sequence.k, batch.kv_heads, d, |head, row| {
                row.iter_mut().zip(&shift[head * d..]).for_each(|(k, c)| *k += c);
            });
        }
        let mut expected = attend(&batch, &storage);
        for (rows, sequence) in expected.iter_mut().zip(&batch.sequences) {
            for (index, q) in sequence.q.chunks_exact(d).enumerate() {
                let (row, head) = (index / batch.q_heads, index % batch.q_heads);
                let kv_head = head / (batch.q_heads / batch.kv_heads);
                let along: f64 = q.iter().zip(&shift[kv_head * d..]).map(|(q, c)| q * c).sum();
                rows.lse[head][row] += f64::from(batch.scale) * along;
            }
        }
        assert_same_rows(&attend(&shifted, &storage), &expected, "shifted keys");
    });
}

#[test]
fn adding_a_vector_to_every_value_adds_it_to_every_row_that_sees_a_key() {
    for_all(24, (f32_shapes(), storages()), |(shape, storage)| {
        let batch = shape.batch();
        let mut shifted = batch.clone();
        for sequence in &mut shifted.sequences {
            change_rows(&mut sequence.v, batch.kv_heads, batch.head_dim, |head, row| {
                for v in row {
                    *v += 3.0 + head as f64;
                }
            });
        }
        let mut expected = attend(&batch, &storage);
        for rows in &mut expected {
            let (heads, group, lse) = (batch.q_heads, batch.q_heads / batch.kv_heads, rows.lse.clone());
            for (index, o) in rows.out.chunks_exact_mut(batch.head_dim).enumerate() {
                let (row, head) = (index / heads, index % heads);
                if lse[head][row] > f64::NEG_INFINITY {
                    for o in o {
                        *o += 3.0 + (head / group) as f64;
                    }
                }
            }
        }
        assert_same_rows(&attend(&shifted, &storage), &expected, "shifted values");
    });
}

#[test]
fn the_last_query_does_not_care_for_the_order_of_its_keys() {
    for_all(24, (f32_shapes(), storages()), |(shape, storage)| {
        // One query without a window sees every key, wherever it stands.
        let lengths = shape.lengths.iter().map(|&(_, len_k)| (1, len_k)).collect();
        let batch = Shape { lengths, window: None, ..shape }.batch();
        let token = batch.kv_heads * batch.head_dim;
        let mut shuffled = batch.clone();
        for sequence in &mut shuffled.sequences {
            let mut order: Vec<usize> = (0..sequence.len_k).collect();
            Random::new(11).shuffle(&mut order);
            let in_order = |rows: &[f64]| -> Vec<f64> {
                order.iter().flat_map(|&j| rows[j * token..][..token].to_vec()).collect()
            };
            (sequence.k, sequence.v) = (in_order(&sequence.k), in_order(&sequence.v));
        }
        assert_same_rows(&attend(&shuffled, &storage), &attend(&batch, &storage), "shuffled keys");
    });
}

#[test]
fn doubling_the_keys_of_a_query_keeps_out_and_adds_ln_2_to_the_lse() {
    for_all(24, (f32_shapes(), storages()), |(shape, storage)| {
        let lengths = shape.lengths.iter().map(|&(_, len_k)| (1, len_k)).collect();
        let batch = Shape { lengths, window: None, ..shape }.batch();
        let mut doubled = batch.clone();
        for sequence in &mut doubled.sequences {
            sequence.len_k *= 2;
            sequence.k.extend_from_within(..);
            sequence.v.extend_from_within(..);
        }
        let mut expected = attend(&batch, &storage);
        expected.iter_mut().flat_map(|rows| &mut rows.lse).flatten().for_each(|lse| *lse += std::f64::consts::LN_2);
        assert_same_rows(&attend(&doubled, &storage), &expected, "doubled keys");
    });
}

#[test]
fn a_prefill_in_chunks_is_the_whole_prefill() {
    for_all(24, (f32_shapes(), storages(), 1..20usize), |(shape, storage, chunk)| {
        let lengths = shape.lengths.iter().map(|&(_, len_k)| (len_k, len_k)).collect();
        let batch = Shape { lengths, ..shape }.batch();
        let (q_row, kv_row) = (batch.q_heads * batch.head_dim, batch.kv_heads * batch.head_dim);
        for (whole, sequence) in attend(&batch, &storage).iter().zip(&batch.sequences) {
            // The chunk that ends at each token, over the keys up to there; all in one ragged batch.
            let starts: Vec<usize> = (0..sequence.len_q).step_by(chunk).collect();
            let chunks = starts.iter().map(|&start| {
                let end = (start + chunk).min(sequence.len_q);
                SequenceData {
                    len_q: end - start,
                    len_k: end,
                    q: sequence.q[start * q_row..end * q_row].to_vec(),
                    k: sequence.k[..end * kv_row].to_vec(),
                    v: sequence.v[..end * kv_row].to_vec(),
                }
            });
            let chunked = attend(&Batch { sequences: chunks.collect(), ..batch.clone() }, &storage);
            let out: Vec<f64> = chunked.iter().flat_map(|rows| rows.out.clone()).collect();
            assert_close(&out, &whole.out, OUT, "chunked prefill: out");
            for head in 0..batch.q_heads {
                let lse: Vec<f64> = chunked.iter().flat_map(|rows| rows.lse[head].clone()).collect();
                assert_close(&lse, &whole.lse[head], LSE, "chunked prefill: lse");
            }
        }
    });
}

#[test]
fn out_lies_between_the_smallest_and_the_largest_value() {
    for_all(24, (f32_shapes(), storages()), |(shape, storage)| {
        let batch = shape.batch();
        for (rows, sequence) in attend(&batch, &storage).iter().zip(&batch.sequences) {
            let least = sequence.v.iter().copied().fold(0.0, f64::min);
            let most = sequence.v.iter().copied().fold(0.0, f64::max);
            let slack = 1e-5 * most.max(-least);
            assert!(rows.out.iter().all(|&o| (least - slack..=most + slack).contains(&o)));
        }
    });
}
