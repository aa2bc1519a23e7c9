//! What must hold between two calls of an operator, or between its results, whatever the numbers are.

use super::Operator;
use super::results::{
    GRADIENT, Gradients, LSE, OUT, Rows, assert_close, assert_same_gradients, assert_same_rows, attend, differentiate,
    gradients_of,
};
use crate::support::{
    Alibi, Array, AttentionConfig, Batch, BatchSpec, F32, GradientCase, GradientOptions, Mask, MemoryLayout, Numbers,
    Random, ScaleKind, SequenceData, Side, State,
};

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

pub(crate) fn however_keys_are_stored_the_answer_is_the_same(op: Operator) {
    for_f32_calls(op, 32, |spec, memory_layout, _| {
        let batch = BatchSpec { value_dim: None, ..spec }.batch();
        let expected = attend(op, &batch, &memory_layout);
        for layout in op.layouts() {
            for page_size in [1, 7, 16, 128] {
                let other = MemoryLayout { layout, page_size, ..memory_layout.clone() };
                let what = format!("{layout:?}, page_size {page_size}");
                assert_same_rows(&attend(op, &batch, &other), &expected, &what);
            }
        }
    });
}

pub(crate) fn a_ragged_batch_is_its_sequences_one_by_one(op: Operator) {
    for_f32_calls(op, 32, |spec, memory_layout, _| {
        let batch = BatchSpec { batch_invariant: false, ..spec }.batch();
        let bare = if op.is_paged() { memory_layout.clone() } else { MemoryLayout::contiguous() };
        let dense = MemoryLayout { seed: memory_layout.seed + 1, ..bare.bare() };
        if op != Operator::FlashAttnVarlenBwd {
            for (index, rows) in attend(op, &batch, &memory_layout).iter().enumerate() {
                assert_same_rows(&attend(op, &batch.only(index), &dense), std::slice::from_ref(rows), "alone");
            }
            return;
        }
        let (whole, sinks) = differentiate(&batch, &memory_layout);
        let mut sum = vec![0.0; sinks.len()];
        for (index, gradients) in whole.iter().enumerate() {
            let (alone, own) = differentiate(&batch.only(index), &dense);
            assert_same_gradients(&(alone, vec![]), &(vec![gradients.clone()], vec![]), "alone");
            sum.iter_mut().zip(own).for_each(|(s, x)| *s += x);
        }
        assert_close(&sum, &sinks, GRADIENT, "sinks");
    });
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

pub(crate) fn grouped_heads_equal_repeated_heads(op: Operator) {
    for_f32_calls(op, 24, |spec, memory_layout, _| {
        let batch = spec.batch();
        let AttentionConfig { q_heads, kv_heads, head_dim, value_dim, .. } = batch.config;
        let group = q_heads / kv_heads;
        let repeat = |rows: &[f64], d: usize| -> Vec<f64> {
            rows.chunks_exact(d).flat_map(|head| std::iter::repeat_n(head, group).flatten().copied()).collect()
        };
        let scale = |values: &mut Option<Vec<f32>>| {
            if let Some(values) = values.as_mut().filter(|v| v.len() > 1) {
                *values = values.iter().flat_map(|x| std::iter::repeat_n(*x, group)).collect();
            }
        };
        let repeated = each(&batch, |s| (s.k, s.v) = (repeat(&s.k, head_dim), repeat(&s.v, value_dim)));
        let repeated = repeated.with_config(|config| {
            config.kv_heads = config.q_heads;
            [&mut config.q_scale, &mut config.k_scale, &mut config.v_scale].into_iter().for_each(scale);
        });
        assert_same(op, (&repeated, &batch), &memory_layout, "repeated heads", |_, gradients| {
            gradients.dk = over_groups(&gradients.dk, group, head_dim);
            gradients.dv = over_groups(&gradients.dv, group, value_dim);
        });
    });
}

pub(crate) fn keys_may_stand_in_any_order_where_no_place_counts(op: Operator) {
    for_f32_calls(op, 24, |spec, memory_layout, _| {
        let batch = BatchSpec { mask: Mask::FULL, leftpad: false, alibi: Alibi::Off, ..spec }.batch();
        let rows = [batch.config.head_dim, batch.config.value_dim].map(|d| batch.config.kv_heads * d);
        let order = |len_k: usize| {
            let mut order: Vec<usize> = (0..len_k).collect();
            Random::new(11).shuffle(&mut order);
            order
        };
        let shuffled = each(&batch, |s| {
            let in_order =
                |x: &[f64], row: usize| order(s.len_k).iter().flat_map(|&j| x[j * row..][..row].to_vec()).collect();
            (s.k, s.v) = (in_order(&s.k, rows[0]), in_order(&s.v, rows[1]));
        });
        assert_same(op, (&shuffled, &batch), &memory_layout, "shuffled keys", |sequence, gradients| {
            for (x, row) in [&mut gradients.dk, &mut gradients.dv].into_iter().zip(rows) {
                let shuffled = x.clone();
                for (from, to) in order(sequence.len_k).into_iter().enumerate() {
                    x[to * row..][..row].copy_from_slice(&shuffled[from * row..][..row]);
                }
            }
        });
    });
}

pub(crate) fn padding_on_the_left_equals_slicing_it_off(op: Operator) {
    for_f32_calls(op, 32, |spec, memory_layout, _| {
        // Counted from the last key, the padding has no place.
        let mask = Mask { top_left: false, ..spec.mask };
        let padded = BatchSpec { leftpad: true, mask, ..spec }.batch();
        let rows = [padded.config.head_dim, padded.config.value_dim].map(|d| padded.config.kv_heads * d);
        let sliced = each(&padded, |s| {
            s.len_k -= s.leftpad;
            s.k.drain(..s.leftpad * rows[0]);
            s.v.drain(..s.leftpad * rows[1]);
            s.leftpad = 0;
        });
        let sliced = Batch { leftpad: false, ..sliced };
        assert_same(op, (&padded, &sliced), &memory_layout, "sliced", |sequence, gradients| {
            for (x, row) in [&mut gradients.dk, &mut gradients.dv].into_iter().zip(rows) {
                assert!(x.drain(..sequence.leftpad * row).all(|x| x == 0.0), "padding has a gradient");
            }
        });
    });
}

pub(crate) fn masks_that_show_the_same_keys_give_the_same(op: Operator) {
    for_f32_calls(op, 16, |spec, memory_layout, _| {
        let batch = spec.batch();
        let of = |mask| batch.with_config(|config| config.mask = mask);
        let causal = Mask { causal: true, window_right: 0, ..spec.mask };
        for (one, other) in [
            (Mask::FULL, Mask::window(200, 200)),
            (Mask::FULL, Mask::window(i64::MAX, i64::MAX)),
            (Mask::CAUSAL, Mask { window_left: 200, ..Mask::CAUSAL }),
            (Mask::CAUSAL.top_left(), Mask { window_left: 1 << 40, ..Mask::CAUSAL.top_left() }),
            (Mask::CAUSAL, Mask::window(-1, 0)),
            (causal, Mask { window_right: -1, ..causal }),
            (causal, Mask { window_right: 5, ..causal }),
            (causal, Mask { window_right: i64::MAX, ..causal }),
        ] {
            assert_same(op, (&of(other), &of(one)), &memory_layout, &format!("{other:?}"), as_they_are);
        }
        // For equal lengths both alignments are one.
        let lengths = spec.lengths.iter().map(|&(_, len_k)| (len_k.min(40), len_k.min(40))).collect();
        let batch = BatchSpec { lengths, mask: Mask { top_left: false, ..spec.mask }, ..spec }.batch();
        let top_left = batch.with_config(|config| config.mask = config.mask.top_left());
        assert_same(op, (&top_left, &batch), &memory_layout, "top_left", as_they_are);
    });
}

pub(crate) fn options_that_say_nothing_change_nothing(op: Operator) {
    for_f32_calls(op, 24, |spec, memory_layout, _| {
        let scales = [ScaleKind::None; 3];
        let batch = BatchSpec { leftpad: false, alibi: Alibi::Off, sinks: false, scales, ..spec }.batch();
        let same = |other: &Batch, what| assert_same(op, (other, &batch), &memory_layout, what, as_they_are);
        let flat = Batch { alibi: Alibi::PerSequence, ..batch.clone() };
        same(&each(&flat, |s| s.slopes.fill(0.0)), "slopes of 0");
        // Their gradients are 0, as those of sinks that are not there.
        same(
            &batch.with_config(|config| config.sinks = Some(vec![f32::NEG_INFINITY; config.q_heads])),
            "sinks of -inf",
        );
        if !op.is_paged() {
            same(&Batch { leftpad: true, ..batch.clone() }, "padding of 0");
        }
        if op == Operator::FlashAttnVarlenBwd {
            let [far, none] = [1e6, 0.0].map(|softcap| batch.with_config(|config| config.softcap = softcap));
            return assert_same(op, (&far, &none), &memory_layout, "a cap far away", as_they_are);
        }
        let ones = |config: &mut AttentionConfig| {
            (config.q_scale, config.v_scale) = (Some(vec![1.0]), Some(vec![1.0]));
            config.k_scale = Some(vec![1.0; config.kv_heads]);
        };
        same(&batch.with_config(ones), "scales of 1");
    });
}

pub(crate) fn slopes_repeated_for_each_sequence_are_the_slopes(op: Operator) {
    for_f32_calls(op, 16, |spec, memory_layout, _| {
        let batch = BatchSpec { alibi: Alibi::PerHead, ..spec }.batch();
        let repeated = Batch { alibi: Alibi::PerSequence, ..batch.clone() };
        assert_same(op, (&repeated, &batch), &memory_layout, "repeated slopes", as_they_are);
    });
}

/// The scale of a KV head, if there are any.
fn scale_of(values: Option<&Vec<f32>>, head: usize) -> f64 {
    values.map_or(1.0, |v| f64::from(v[head % v.len()]))
}

pub(crate) fn adding_a_vector_to_every_key_moves_only_the_lse(op: Operator) {
    for_f32_calls(op, 24, |spec, memory_layout, _| {
        // The cap bends scores and a sink stays behind: the law holds without them.
        let batch = BatchSpec { softcap: 0.0, sinks: false, ..spec }.batch();
        let config = &batch.config;
        let d = config.head_dim;
        let mut random = Random::new(7);
        let shift: Vec<f64> = (0..config.kv_heads * d).map(|_| random.normal()).collect();
        let shifted = each(&batch, |s| {
            change_rows(&mut s.k, config.kv_heads, d, |head, row| {
                row.iter_mut().zip(&shift[head * d..]).for_each(|(k, c)| *k = F32.round(*k + c));
            });
        });
        let mut expected = attend(op, &batch, &memory_layout);
        for (rows, sequence) in expected.iter_mut().zip(&batch.sequences) {
            for (index, q) in sequence.q.chunks_exact(d).enumerate() {
                let (row, head) = (index / config.q_heads, index % config.q_heads);
                let kv_head = config.kv_head(head);
                let along: f64 = q.iter().zip(&shift[kv_head * d..]).map(|(q, c)| q * c).sum();
                let scales = scale_of(config.q_scale.as_ref(), kv_head) * scale_of(config.k_scale.as_ref(), kv_head);
                rows.lse[head][row] += f64::from(config.softmax_scale) * scales * along;
            }
        }
        assert_same_rows(&attend(op, &shifted, &memory_layout), &expected, "shifted keys");
    });
}

/// Every row that sees a key moves by as much; no gradient of rows without a sink does.
pub(crate) fn adding_a_number_to_every_value_adds_it_to_every_row_that_sees_a_key(op: Operator) {
    for_f32_calls(op, 24, |spec, memory_layout, _| {
        let batch = BatchSpec { sinks: false, ..spec }.batch().with_config(|config| config.v_scale = None);
        let config = &batch.config;
        let shifted = each(&batch, |s| {
            change_rows(&mut s.v, config.kv_heads, config.value_dim, |head, row| {
                for v in row {
                    *v = F32.round(*v + 1.0 + head as f64);
                }
            });
        });
        if op == Operator::FlashAttnVarlenBwd {
            return assert_same(op, (&shifted, &batch), &memory_layout, "shifted values", as_they_are);
        }
        let mut expected = attend(op, &batch, &memory_layout);
        for rows in &mut expected {
            for (index, o) in rows.out.chunks_exact_mut(config.value_dim).enumerate() {
                let (row, head) = (index / config.q_heads, index % config.q_heads);
                if rows.lse[head][row] > f64::NEG_INFINITY {
                    for o in o {
                        *o += 1.0 + config.kv_head(head) as f64;
                    }
                }
            }
        }
        assert_same_rows(&attend(op, &shifted, &memory_layout), &expected, "shifted values");
    });
}

pub(crate) fn out_lies_between_the_smallest_and_the_largest_value(op: Operator) {
    op.for_calls(24, |spec, memory_layout, _| {
        let batch = spec.batch().with_config(|config| config.v_scale = None);
        for (rows, sequence) in attend(op, &batch, &memory_layout).iter().zip(&batch.sequences) {
            let least = sequence.v.iter().copied().fold(0.0, f64::min);
            let most = sequence.v.iter().copied().fold(0.0, f64::max);
            // Two roundings of 8 bits, of P and of the output.
            let slack = 2f64.powi(-7) * most.max(-least);
            assert!(rows.out.iter().all(|&o| (least - slack..=most + slack).contains(&o)));
        }
    });
}

pub(crate) fn a_sink_takes_its_share_of_every_row(op: Operator) {
    for_f32_calls(op, 32, |spec, memory_layout, _| {
        let batch = BatchSpec { sinks: true, ..spec }.batch();
        let mut expected = attend(op, &batch.with_config(|config| config.sinks = None), &memory_layout);
        let (heads, sinks) = (batch.config.q_heads, batch.config.sinks.clone().unwrap());
        for rows in &mut expected {
            for (index, o) in rows.out.chunks_exact_mut(batch.config.value_dim).enumerate() {
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
        assert_same_rows(&attend(op, &batch, &memory_layout), &expected, "sinks");
    });
}

pub(crate) fn a_sink_is_one_more_key_of_value_0(op: Operator) {
    for_f32_calls(op, 24, |spec, memory_layout, random| {
        // One query a sequence and a KV head for each head, so that a key can be made for every logit.
        let lengths = spec.lengths.iter().map(|&(_, len_k)| (1, len_k)).collect();
        let heads = (spec.heads.1, spec.heads.1);
        let spec = BatchSpec { lengths, heads, mask: Mask::FULL, leftpad: false, alibi: Alibi::Off, ..spec };
        let batch =
            BatchSpec { sinks: true, softcap: 0.0, sharpness: random.between(8, 96) as f64 / 32.0, ..spec }.batch();
        let config = &batch.config;
        let with_key = each(&batch, |s| {
            for (head, sink) in config.sinks.iter().flatten().enumerate() {
                let q = &s.q[head * config.head_dim..][..config.head_dim];
                let scales = scale_of(config.q_scale.as_ref(), head) * scale_of(config.k_scale.as_ref(), head);
                let square: f64 = q.iter().map(|x| x * x).sum();
                let factor = f64::from(*sink) / (f64::from(config.softmax_scale) * scales * square);
                s.k.extend(q.iter().map(|x| F32.round(factor * x)));
            }
            s.v.extend(vec![0.0; config.kv_heads * config.value_dim]);
            s.len_k += 1;
        });
        let with_key = with_key.with_config(|config| config.sinks = None);
        assert_same(op, (&with_key, &batch), &memory_layout, "one more key", as_they_are);
    });
}

pub(crate) fn a_scale_stands_for_multiplied_numbers(op: Operator) {
    for_f32_calls(op, 24, |spec, memory_layout, _| {
        let batch = BatchSpec { scales: [ScaleKind::None; 3], ..spec }.batch();
        // Powers of two, one for each KV head: multiplying by them rounds nothing.
        let factor = |head: usize| [0.5, 2.0, 1.0, 0.25][head % 4];
        let (heads, config) = (batch.config.kv_heads, &batch.config);
        let scales = || Some((0..heads).map(|h| factor(h) as f32).collect::<Vec<f32>>());
        let scaled = batch
            .with_config(|config| (config.q_scale, config.k_scale, config.v_scale) = (scales(), scales(), scales()));
        let multiplied = each(&batch, |s| {
            let times = |by: f64, row: &mut [f64]| row.iter_mut().for_each(|x| *x *= by);
            change_rows(&mut s.q, config.q_heads, config.head_dim, |h, row| times(factor(config.kv_head(h)), row));
            change_rows(&mut s.k, heads, config.head_dim, |h, row| times(factor(h), row));
            change_rows(&mut s.v, heads, config.value_dim, |h, row| times(factor(h), row));
        });
        assert_same(op, (&scaled, &multiplied), &memory_layout, "multiplied", as_they_are);
    });
}

/// The keys of a sequence from `start` to `end`.
fn keys(config: &AttentionConfig, sequence: &SequenceData, start: usize, end: usize) -> SequenceData {
    let rows = |values: &[f64], d: usize| values[start * config.kv_heads * d..end * config.kv_heads * d].to_vec();
    let (k, v) = (rows(&sequence.k, config.head_dim), rows(&sequence.v, config.value_dim));
    SequenceData { len_k: end - start, k, v, ..sequence.clone() }
}

/// The states of two parts of the keys of one sequence, as `merge_attention_states` makes one of them.
fn merged((a, b): (&Rows, &Rows), config: &AttentionConfig) -> Rows {
    let state = |rows: &Rows| {
        State::new(F32, (rows.lse[0].len(), config.q_heads, config.value_dim), &rows.out, &rows.lse.concat())
    };
    let (a, b) = (state(a), state(b));
    let merged = State::of(&a.merge(&b).results(Side::EndsAtGuard));
    merged.assert_merged_from(&a, &b);
    let (lse, rows) = (merged.lse.values(), merged.out.dims[0] as usize);
    let lse = lse.chunks(rows.max(1)).map(<[f64]>::to_vec).collect();
    Rows { out: merged.out.values(), bits: merged.out.bytes, lse }
}

pub(crate) fn keys_that_are_split_anywhere_and_merged_by_their_lse_are_the_keys(op: Operator) {
    for_f32_calls(op, 32, |spec, memory_layout, random| {
        let cut = random.below(1001) as f64 / 1000.0;
        let at = |s: &SequenceData| (cut * s.len_k as f64).round() as usize;
        let assert_merged = |whole: &Batch, second: &Batch| {
            // A sink belongs to exactly one part.
            let first =
                each(whole, |s| *s = keys(&whole.config, s, 0, at(s))).with_config(|config| config.sinks = None);
            let [a, b] = [&first, second].map(|part| attend(op, part, &memory_layout));
            let actual: Vec<Rows> = a.iter().zip(&b).map(|parts| merged(parts, &whole.config)).collect();
            assert_same_rows(&actual, &attend(op, whole, &memory_layout), "merged");
        };
        // Under any mask counted from the first key, so that cutting off the last ones moves no position.
        let whole = BatchSpec { leftpad: false, mask: spec.mask.top_left(), ..spec.clone() }.batch();
        assert_merged(&whole, &Batch { leftpad: true, ..each(&whole, |s| s.leftpad = at(s)) });
        // Without a mask the parts are sequences of their own.
        let whole = BatchSpec { leftpad: false, mask: Mask::FULL, alibi: Alibi::Off, ..spec }.batch();
        assert_merged(&whole, &each(&whole, |s| *s = keys(&whole.config, s, at(s), s.len_k)));
    });
}

pub(crate) fn it_is_causal_flash_attn_varlen(op: Operator) {
    op.for_calls(32, |spec, memory_layout, _| {
        let of = |batch: &Batch| [op, Operator::FlashAttnVarlen].map(|op| attend(op, batch, &memory_layout));
        // In bits where bits are promised.
        let [paged, flash] = of(&BatchSpec { batch_invariant: true, ..spec.clone() }.batch());
        assert!(paged == flash, "the operators differ");
        let spec = BatchSpec { batch_invariant: false, dtypes: F32.into(), sharpness: 1.0, ..spec };
        let [paged, flash] = of(&spec.batch());
        assert_same_rows(&paged, &flash, "the operators");
    });
}

/// The queries `start..end` of a sequence over the keys up to the last of them.
fn chunk(config: &AttentionConfig, sequence: &SequenceData, start: usize, end: usize) -> SequenceData {
    let row = config.q_heads * config.head_dim;
    let q = sequence.q[start * row..end * row].to_vec();
    SequenceData { len_q: end - start, q, ..keys(config, sequence, 0, end) }
}

pub(crate) fn a_prefill_in_chunks_is_the_whole_prefill(op: Operator) {
    for_f32_calls(op, 24, |spec, memory_layout, random| {
        let step = random.between(1, 19);
        let lengths = spec.lengths.iter().map(|&(_, len_k)| (len_k, len_k)).collect();
        let batch = BatchSpec { lengths, ..spec }.batch();
        for (whole, sequence) in attend(op, &batch, &memory_layout).iter().zip(&batch.sequences) {
            // The chunk that ends at each step, over the keys up to there; all in one ragged batch.
            let end = |start: usize| (start + step).min(sequence.len_q);
            let starts = (0..sequence.len_q).step_by(step);
            let sequences = starts.map(|start| chunk(&batch.config, sequence, start, end(start))).collect();
            let chunked = attend(op, &Batch { sequences, ..batch.clone() }, &memory_layout);
            let out: Vec<f64> = chunked.iter().flat_map(|rows| rows.out.clone()).collect();
            assert_close(&out, &whole.out, OUT, "chunked prefill: out");
            for head in 0..batch.config.q_heads {
                let lse: Vec<f64> = chunked.iter().flat_map(|rows| rows.lse[head].clone()).collect();
                assert_close(&lse, &whole.lse[head], LSE, "chunked prefill: lse");
            }
        }
    });
}

/// The weights of a row add up to 1. So without a cap and without a sink, `sum over j of ds_ij` is what `dlse` says of row
/// i, for adding one number to all scores of a row moves nothing but its lse; and dv adds up to the cotangents of the rows
/// that see a key.
pub(crate) fn gradients_of_keys_and_values_add_up_to_what_comes_back_to_the_rows(op: Operator) {
    for_f32_calls(op, 32, |spec, memory_layout, _| {
        let batch = BatchSpec { softcap: 0.0, sinks: false, ..spec }.batch();
        let AttentionConfig { q_heads, kv_heads, head_dim, value_dim, mask, softmax_scale, .. } = batch.config;
        let group = q_heads / kv_heads;
        for (gradients, sequence) in differentiate(&batch, &memory_layout).0.iter().zip(&batch.sequences) {
            let SequenceData { len_q, len_k, leftpad, .. } = *sequence;
            let sees = |row: usize| !mask.visible(row, len_q, len_k, leftpad).is_empty();
            let (mut q, mut dout) = (sequence.q.clone(), gradients.dout.clone());
            for (index, query) in q.chunks_exact_mut(head_dim).enumerate() {
                let of_row = if sees(index / q_heads) { f64::from(softmax_scale) * gradients.dlse[index] } else { 0.0 };
                for x in query {
                    *x *= of_row;
                }
            }
            let unseeing = dout.chunks_exact_mut(q_heads * value_dim).enumerate().filter(|(row, _)| !sees(*row));
            unseeing.for_each(|(_, row)| row.fill(0.0));
            let terms = (1.0 + (len_k as f64).sqrt()) * GRADIENT;
            for (actual, rows, d) in [(&gradients.dk, &q, head_dim), (&gradients.dv, &dout, value_dim)] {
                let expected = over_rows(&over_groups(rows, group, d), kv_heads, d);
                assert_close(&over_rows(actual, kv_heads, d), &expected, terms, "sum of dk, of dv");
            }
        }
    });
}

/// Both are `sum over i, j of ds_ij q_i . k_j`: doubling all queries is doubling all keys.
pub(crate) fn queries_and_keys_have_the_same_product_with_their_gradients(op: Operator) {
    for_f32_calls(op, 32, |spec, memory_layout, _| {
        let batch = spec.batch();
        let AttentionConfig { q_heads, kv_heads, head_dim: d, .. } = batch.config;
        for (gradients, sequence) in differentiate(&batch, &memory_layout).0.iter().zip(&batch.sequences) {
            let products = |x: &[f64], dx: &[f64], heads: usize| -> Vec<f64> {
                let of_row = |(x, dx): (&[f64], &[f64])| x.iter().zip(dx).map(|(x, dx)| x * dx).sum::<f64>();
                let of_rows: Vec<f64> = x.chunks_exact(d).zip(dx.chunks_exact(d)).map(of_row).collect();
                over_rows(&over_groups(&of_rows, heads / kv_heads, 1), kv_heads, 1)
            };
            let of_queries = products(&sequence.q, &gradients.dq, q_heads);
            let of_keys = products(&sequence.k, &gradients.dk, kv_heads);
            let numbers = (1 + gradients.dq.len() + gradients.dk.len()) as f64;
            let most = gradients.dq.iter().chain(&gradients.dk).fold(1.0f64, |m, x| m.max(x.abs()));
            assert_close(&of_queries, &of_keys, GRADIENT * most * numbers.sqrt(), "q . dq and k . dk");
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
        let of_sequences = expected.iter_mut().flat_map(|Gradients { dq, dk, dv, .. }| [dq, dk, dv]);
        of_sequences.chain([&mut sinks]).flatten().for_each(|x| *x *= -4.0);
        let actual = gradients_of(&GradientCase { dout, dlse, ..case }, &batch);
        assert_same_gradients(&actual, &(expected, sinks), "times -4");
    });
}
