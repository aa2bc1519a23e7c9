//! What must hold between two calls of the operator, whatever the numbers are.

use crate::support::array::F32;
use crate::support::batch::{Alibi, Batch, Scaled, SequenceData, Shape};
use crate::support::case::Target::FlashAttnVarlen;
use crate::support::oracle::Mask;
use crate::support::random::Random;
use crate::support::rows::{Rows, assert_same_rows, change_rows, rounded};
use crate::support::storage::{Layout, Storage};
use crate::support::strategies::{flash_calls, for_all};
use proptest::prelude::*;

/// f32, so that the order of sums is all that may differ between two sides of a law.
fn f32_calls() -> impl Strategy<Value = (Shape, Storage)> {
    flash_calls().prop_map(|(shape, storage)| (Shape { dtypes: F32.into(), sharpness: 1.0, ..shape }, storage))
}

fn attend(batch: &Batch, storage: &Storage) -> Vec<Rows> {
    crate::support::rows::attend(FlashAttnVarlen, batch, storage)
}

/// The batch with something done to each sequence.
fn each(batch: &Batch, change: impl Fn(&mut SequenceData)) -> Batch {
    let mut batch = batch.clone();
    batch.sequences.iter_mut().for_each(change);
    batch
}

#[test]
fn however_keys_are_stored_the_answer_is_the_same() {
    for_all(32, f32_calls(), |(shape, storage)| {
        let batch = Shape { value_dim: None, ..shape }.batch();
        let expected = attend(&batch, &storage);
        for layout in Layout::ALL {
            for page_size in [1, 7, 16, 128] {
                let other = Storage { layout, page_size, ..storage.clone() };
                assert_same_rows(&attend(&batch, &other), &expected, &format!("{layout:?}, page_size {page_size}"));
            }
        }
    });
}

#[test]
fn a_ragged_batch_is_its_sequences_one_by_one() {
    for_all(32, f32_calls(), |(shape, storage)| {
        let batch = shape.batch();
        for (index, rows) in attend(&batch, &storage).iter().enumerate() {
            let dense = Storage { seed: storage.seed + 1, ..Storage::contiguous().bare() };
            assert_same_rows(&attend(&batch.only(index), &dense), std::slice::from_ref(rows), "alone");
        }
    });
}

#[test]
fn grouped_heads_equal_repeated_heads() {
    for_all(24, f32_calls(), |(shape, storage)| {
        let batch = shape.batch();
        let group = batch.form.q_heads / batch.form.kv_heads;
        let repeat = |rows: &[f64], d: usize| -> Vec<f64> {
            rows.chunks_exact(d).flat_map(|head| std::iter::repeat_n(head, group).flatten().copied()).collect()
        };
        let scale = |values: &mut Option<Vec<f32>>| {
            if let Some(values) = values.as_mut().filter(|v| v.len() > 1) {
                *values = values.iter().flat_map(|x| std::iter::repeat_n(*x, group)).collect();
            }
        };
        let repeated = each(&batch, |s| {
            s.k = repeat(&s.k, batch.form.head_dim);
            s.v = repeat(&s.v, batch.form.value_dim);
        });
        let repeated = repeated.with_form(|form| {
            form.kv_heads = form.q_heads;
            [&mut form.q_scale, &mut form.k_scale, &mut form.v_scale].into_iter().for_each(scale);
        });
        assert_same_rows(&attend(&repeated, &storage), &attend(&batch, &storage), "repeated heads");
    });
}

#[test]
fn adding_a_vector_to_every_key_moves_only_the_lse() {
    for_all(24, f32_calls(), |(shape, storage)| {
        // The cap bends scores and a sink stays behind: the law holds without them.
        let batch = Shape { softcap: 0.0, sinks: false, ..shape }.batch();
        let form = &batch.form;
        let d = form.head_dim;
        let mut random = Random::new(7);
        let shift: Vec<f64> = (0..form.kv_heads * d).map(|_| random.normal()).collect();
        let shifted = each(&batch, |s| {
            change_rows(&mut s.k, form.kv_heads, d, |head, row| {
                row.iter_mut().zip(&shift[head * d..]).for_each(|(k, c)| *k = F32.round(*k + c));
            });
        });
        let scale = |values: &Option<Vec<f32>>, head| values.as_ref().map_or(1.0, |v| f64::from(v[head % v.len()]));
        let mut expected = attend(&batch, &storage);
        for (rows, sequence) in expected.iter_mut().zip(&batch.sequences) {
            for (index, q) in sequence.q.chunks_exact(d).enumerate() {
                let (row, head) = (index / form.q_heads, index % form.q_heads);
                let kv_head = form.kv_head(head);
                let along: f64 = q.iter().zip(&shift[kv_head * d..]).map(|(q, c)| q * c).sum();
                let scales = scale(&form.q_scale, kv_head) * scale(&form.k_scale, kv_head);
                rows.lse[head][row] += f64::from(form.softmax_scale) * scales * along;
            }
        }
        assert_same_rows(&attend(&shifted, &storage), &expected, "shifted keys");
    });
}

#[test]
fn adding_a_number_to_every_value_adds_it_to_every_row_that_sees_a_key() {
    for_all(24, f32_calls(), |(shape, storage)| {
        let batch = Shape { sinks: false, ..shape }.batch().with_form(|form| form.v_scale = None);
        let form = &batch.form;
        let shifted = each(&batch, |s| {
            change_rows(&mut s.v, form.kv_heads, form.value_dim, |head, row| {
                for v in row {
                    *v = F32.round(*v + 3.0 + head as f64);
                }
            });
        });
        let mut expected = attend(&batch, &storage);
        for rows in &mut expected {
            let lse = rows.lse.clone();
            for (index, o) in rows.out.chunks_exact_mut(form.value_dim).enumerate() {
                let (row, head) = (index / form.q_heads, index % form.q_heads);
                if lse[head][row] > f64::NEG_INFINITY {
                    for o in o {
                        *o += 3.0 + form.kv_head(head) as f64;
                    }
                }
            }
        }
        assert_same_rows(&attend(&shifted, &storage), &expected, "shifted values");
    });
}

#[test]
fn keys_may_stand_in_any_order_where_no_place_counts() {
    for_all(24, f32_calls(), |(shape, storage)| {
        let shape = Shape { mask: Mask::FULL, leftpad: false, alibi: Alibi::Off, ..shape };
        let batch = shape.batch();
        let form = &batch.form;
        let shuffled = each(&batch, |s| {
            let mut order: Vec<usize> = (0..s.len_k).collect();
            Random::new(11).shuffle(&mut order);
            let in_order = |rows: &[f64], row: usize| -> Vec<f64> {
                order.iter().flat_map(|&j| rows[j * row..][..row].to_vec()).collect()
            };
            s.k = in_order(&s.k, form.kv_heads * form.head_dim);
            s.v = in_order(&s.v, form.kv_heads * form.value_dim);
        });
        assert_same_rows(&attend(&shuffled, &storage), &attend(&batch, &storage), "shuffled keys");
    });
}

#[test]
fn doubling_the_keys_keeps_out_and_adds_ln_2_to_the_lse() {
    for_all(24, f32_calls(), |(shape, storage)| {
        let shape = Shape { mask: Mask::FULL, leftpad: false, alibi: Alibi::Off, sinks: false, ..shape };
        let batch = shape.batch();
        let doubled = each(&batch, |s| {
            s.len_k *= 2;
            s.k.extend_from_within(..);
            s.v.extend_from_within(..);
        });
        let mut expected = attend(&batch, &storage);
        expected.iter_mut().flat_map(|rows| &mut rows.lse).flatten().for_each(|lse| *lse += std::f64::consts::LN_2);
        assert_same_rows(&attend(&doubled, &storage), &expected, "doubled keys");
    });
}

#[test]
fn out_lies_between_the_smallest_and_the_largest_value() {
    for_all(24, flash_calls(), |(shape, storage)| {
        let batch = shape.batch().with_form(|form| form.v_scale = None);
        for (rows, sequence) in attend(&batch, &storage).iter().zip(&batch.sequences) {
            let least = sequence.v.iter().copied().fold(0.0, f64::min);
            let most = sequence.v.iter().copied().fold(0.0, f64::max);
            // Two roundings of 8 bits, of P and of the output.
            let slack = 2f64.powi(-7) * most.max(-least);
            assert!(rows.out.iter().all(|&o| (least - slack..=most + slack).contains(&o)));
        }
    });
}

#[test]
fn padding_on_the_left_equals_slicing_it_off() {
    for_all(32, f32_calls(), |(shape, storage)| {
        // Counted from the last key, the padding has no place.
        let mask = Mask { top_left: false, ..shape.mask };
        let batch = Shape { leftpad: true, mask, ..shape }.batch();
        let form = &batch.form;
        let sliced = each(&batch, |s| {
            s.len_k -= s.leftpad;
            s.k.drain(..s.leftpad * form.kv_heads * form.head_dim);
            s.v.drain(..s.leftpad * form.kv_heads * form.value_dim);
            s.leftpad = 0;
        });
        let sliced = Batch { leftpad: false, ..sliced };
        assert_same_rows(&attend(&sliced, &storage), &attend(&batch, &storage), "sliced");
    });
}

#[test]
fn for_equal_lengths_both_alignments_are_one() {
    for_all(24, f32_calls(), |(shape, storage)| {
        let lengths = shape.lengths.iter().map(|&(_, len_k)| (len_k.min(40), len_k.min(40))).collect();
        let batch = Shape { lengths, mask: Mask { top_left: false, ..shape.mask }, ..shape }.batch();
        let top_left = batch.with_form(|form| form.mask = form.mask.top_left());
        assert_same_rows(&attend(&top_left, &storage), &attend(&batch, &storage), "top_left");
    });
}

#[test]
fn a_window_over_all_keys_is_none() {
    for_all(24, f32_calls(), |(shape, storage)| {
        let batch = shape.batch();
        for (open, wide) in [
            (Mask::FULL, Mask::window(200, 200)),
            (Mask::FULL, Mask::window(i64::MAX, i64::MAX)),
            (Mask::CAUSAL, Mask { window_left: 200, ..Mask::CAUSAL }),
            (Mask::CAUSAL.top_left(), Mask { window_left: 1 << 40, ..Mask::CAUSAL.top_left() }),
            (Mask::CAUSAL, Mask::window(-1, 0)),
        ] {
            let of = |mask| attend(&batch.with_form(|form| form.mask = mask), &storage);
            assert_same_rows(&of(wide), &of(open), &format!("{wide:?}"));
        }
    });
}

#[test]
fn causal_overrules_the_window_to_the_right() {
    for_all(16, flash_calls(), |(shape, storage)| {
        let batch = Shape { mask: Mask { causal: true, window_right: 0, ..shape.mask }, ..shape }.batch();
        let expected = attend(&batch, &storage);
        for window_right in [-1, 1, 5, i64::MAX] {
            let other = batch.with_form(|form| form.mask.window_right = window_right);
            assert!(attend(&other, &storage) == expected, "window_right {window_right}");
        }
    });
}

#[test]
fn a_sink_takes_its_share_of_every_row() {
    for_all(32, f32_calls(), |(shape, storage)| {
        let batch = Shape { sinks: true, ..shape }.batch();
        let mut expected = attend(&batch.with_form(|form| form.sinks = None), &storage);
        let (heads, sinks) = (batch.form.q_heads, batch.form.sinks.clone().unwrap());
        for rows in &mut expected {
            for (index, o) in rows.out.chunks_exact_mut(batch.form.value_dim).enumerate() {
                let lse = &mut rows.lse[index % heads][index / heads];
                let sink = f64::from(sinks[index % heads]);
                let largest = lse.max(sink);
                let with_sink = largest + ((*lse - largest).exp() + (sink - largest).exp()).ln();
                for o in o {
                    *o *= (*lse - with_sink).exp();
                }
                *lse = with_sink;
            }
        }
        assert_same_rows(&attend(&batch, &storage), &expected, "sinks");
    });
}

#[test]
fn a_sink_is_one_more_key_of_value_0() {
    for_all(24, (f32_calls(), 8..=96usize), |((shape, storage), sharp)| {
        // One query a sequence and a KV head for each head, so that a key can be made for every logit.
        let lengths = shape.lengths.iter().map(|&(_, len_k)| (1, len_k)).collect();
        let heads = (shape.heads.1, shape.heads.1);
        let shape = Shape { lengths, heads, mask: Mask::FULL, leftpad: false, alibi: Alibi::Off, ..shape };
        let batch = Shape { sinks: true, softcap: 0.0, sharpness: sharp as f64 / 32.0, ..shape }.batch();
        let form = batch.form.clone();
        let sinks = form.sinks.clone().unwrap();
        let scale = |values: &Option<Vec<f32>>, head| values.as_ref().map_or(1.0, |v| f64::from(v[head % v.len()]));
        let with_key = each(&batch, |s| {
            for (head, sink) in sinks.iter().enumerate() {
                let q = &s.q[head * form.head_dim..][..form.head_dim];
                let scales = f64::from(form.softmax_scale) * scale(&form.q_scale, head) * scale(&form.k_scale, head);
                let square: f64 = q.iter().map(|x| x * x).sum();
                let factor = f64::from(*sink) / (scales * square);
                s.k.extend(rounded(F32, &q.iter().map(|x| factor * x).collect::<Vec<_>>()));
            }
            s.v.extend(vec![0.0; form.kv_heads * form.value_dim]);
            s.len_k += 1;
        });
        let with_key = with_key.with_form(|form| form.sinks = None);
        assert_same_rows(&attend(&with_key, &storage), &attend(&batch, &storage), "one more key");
    });
}

#[test]
fn options_that_say_nothing_change_nothing() {
    for_all(24, f32_calls(), |(shape, storage)| {
        let scales = [Scaled::No; 3];
        let batch = Shape { leftpad: false, alibi: Alibi::Off, sinks: false, scales, ..shape }.batch();
        let expected = attend(&batch, &storage);
        let heads = batch.form.kv_heads;
        let flat = each(&Batch { alibi: Alibi::PerSequence, ..batch.clone() }, |s| s.slopes.fill(0.0));
        assert_same_rows(&attend(&flat, &storage), &expected, "slopes of 0");
        let ones = batch.with_form(|form| {
            form.q_scale = Some(vec![1.0]);
            form.k_scale = Some(vec![1.0; heads]);
            form.v_scale = Some(vec![1.0]);
        });
        assert_same_rows(&attend(&ones, &storage), &expected, "scales of 1");
        let padded = Batch { leftpad: true, ..batch.clone() };
        assert_same_rows(&attend(&padded, &storage), &expected, "padding of 0");
        let sinks = batch.with_form(|form| form.sinks = Some(vec![f32::NEG_INFINITY; form.q_heads]));
        assert_same_rows(&attend(&sinks, &storage), &expected, "sinks of -inf");
    });
}

#[test]
fn a_scale_stands_for_multiplied_numbers() {
    for_all(24, f32_calls(), |(shape, storage)| {
        let batch = Shape { scales: [Scaled::No; 3], ..shape }.batch();
        // Powers of two, one for each KV head: multiplying by them rounds nothing.
        let factor = |head: usize| [0.5, 2.0, 1.0, 0.25][head % 4];
        let (heads, q_heads) = (batch.form.kv_heads, batch.form.q_heads);
        let scales = || Some((0..heads).map(|h| factor(h) as f32).collect::<Vec<f32>>());
        let scaled =
            batch.with_form(|form| (form.q_scale, form.k_scale, form.v_scale) = (scales(), scales(), scales()));
        let multiplied = each(&batch, |s| {
            let times = |by: f64, row: &mut [f64]| row.iter_mut().for_each(|x| *x *= by);
            change_rows(&mut s.q, q_heads, batch.form.head_dim, |h, row| times(factor(batch.form.kv_head(h)), row));
            change_rows(&mut s.k, heads, batch.form.head_dim, |h, row| times(factor(h), row));
            change_rows(&mut s.v, heads, batch.form.value_dim, |h, row| times(factor(h), row));
        });
        assert_same_rows(&attend(&scaled, &storage), &attend(&multiplied, &storage), "multiplied");
    });
}
