//! Inputs that are equivalent: both calls give the same result.

use super::{assert_same, change_rows, each, for_f32_calls, over_groups, unchanged};
use crate::attention::Operator;
use crate::attention::results::{
    GRADIENT, assert_close, assert_same_gradients, assert_same_rows, attend, differentiate,
};
use crate::support::{
    Alibi, AttentionConfig, Batch, BatchSpec, KeyBounds, Mask, MemoryLayout, Random, ScaleKind, shifted,
};

pub(crate) fn every_layout_and_page_size_gives_the_same_result(op: Operator) {
    for_f32_calls(op, 32, |spec, memory_layout, _| {
        let batch = BatchSpec { value_dim: None, ..spec }.batch();
        let expected = attend(op, &batch, &memory_layout);
        for layout in op.layouts() {
            for page_size in [1, 7, 16, 128] {
                let changed = MemoryLayout { layout, page_size, ..memory_layout.clone() };
                let description = format!("{layout:?}, page_size {page_size}");
                assert_same_rows(&attend(op, &batch, &changed), &expected, &description);
            }
        }
    });
}

pub(crate) fn a_ragged_batch_gives_the_results_of_its_sequences_alone(op: Operator) {
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

pub(crate) fn permuting_keys_changes_nothing_without_mask_and_bias(op: Operator) {
    for_f32_calls(op, 24, |spec, memory_layout, _| {
        let key_bounds = KeyBounds::None;
        let batch = BatchSpec { mask: Mask::FULL, leftpad: false, key_bounds, alibi: Alibi::Off, ..spec }.batch();
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

pub(crate) fn left_padding_equals_removing_the_keys(op: Operator) {
    for_f32_calls(op, 32, |spec, memory_layout, _| {
        // Positions count from the last key, so that the padding does not affect them; offsets count from the first.
        let mask = Mask { top_left: false, ..spec.mask };
        let padded = BatchSpec { leftpad: true, mask, ..spec }.batch();
        let rows = [padded.config.head_dim, padded.config.value_dim].map(|d| padded.config.kv_heads * d);
        let sliced = each(&padded, |s| {
            s.len_k -= s.leftpad;
            s.q_offset -= s.leftpad as i32;
            s.key_ranges = shifted(&s.key_ranges, s.leftpad);
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

pub(crate) fn equivalent_masks_give_the_same_result(op: Operator) {
    for_f32_calls(op, 16, |spec, memory_layout, _| {
        // The masks have an alignment.
        let spec = BatchSpec { q_offset: false, ..spec };
        let batch = spec.batch();
        let with = |mask| batch.with_config(|config| config.mask = mask);
        let causal = Mask { causal: true, window_right: 0, ..spec.mask };
        for (mask, equivalent) in [
            (Mask::FULL, Mask::window(200, 200)),
            (Mask::FULL, Mask::window(i64::MAX, i64::MAX)),
            (Mask::CAUSAL, Mask { window_left: 200, ..Mask::CAUSAL }),
            (Mask::CAUSAL.top_left(), Mask { window_left: 1 << 40, ..Mask::CAUSAL.top_left() }),
            (Mask::CAUSAL, Mask::window(-1, 0)),
            (causal, Mask { window_right: -1, ..causal }),
            (causal, Mask { window_right: 5, ..causal }),
            (causal, Mask { window_right: i64::MAX, ..causal }),
        ] {
            assert_same(op, (&with(equivalent), &with(mask)), &memory_layout, &format!("{equivalent:?}"), unchanged);
        }
        // Both alignments are the same for equal lengths.
        let lengths = spec.lengths.iter().map(|&(_, len_k)| (len_k.min(40), len_k.min(40))).collect();
        let batch = BatchSpec { lengths, mask: Mask { top_left: false, ..spec.mask }, ..spec }.batch();
        let top_left = batch.with_config(|config| config.mask = config.mask.top_left());
        assert_same(op, (&top_left, &batch), &memory_layout, "top_left", unchanged);
    });
}

pub(crate) fn neutral_option_values_change_nothing(op: Operator) {
    for_f32_calls(op, 24, |spec, memory_layout, _| {
        let scales = [ScaleKind::None; 3];
        let batch = BatchSpec { leftpad: false, alibi: Alibi::Off, sinks: false, scales, ..spec }.batch();
        let same =
            |changed: &Batch, description| assert_same(op, (changed, &batch), &memory_layout, description, unchanged);
        let flat = Batch { alibi: Alibi::PerSequence, ..batch.clone() };
        same(&each(&flat, |s| s.slopes.fill(0.0)), "slopes of 0");
        // Sinks of -inf have gradients of 0, as have missing sinks.
        same(
            &batch.with_config(|config| config.sinks = Some(vec![f32::NEG_INFINITY; config.q_heads])),
            "sinks of -inf",
        );
        if !op.is_paged() {
            same(&Batch { leftpad: true, ..batch.clone() }, "padding of 0");
        }
        if op == Operator::FlashAttnVarlenBwd {
            let [far, none] = [1e6, 0.0].map(|softcap| batch.with_config(|config| config.softcap = softcap));
            return assert_same(op, (&far, &none), &memory_layout, "a cap far away", unchanged);
        }
        let ones = |config: &mut AttentionConfig| {
            (config.q_scale, config.v_scale) = (Some(vec![1.0]), Some(vec![1.0]));
            config.k_scale = Some(vec![1.0; config.kv_heads]);
        };
        same(&batch.with_config(ones), "scales of 1");
    });
}

pub(crate) fn slopes_per_sequence_equal_slopes_per_head(op: Operator) {
    for_f32_calls(op, 16, |spec, memory_layout, _| {
        let batch = BatchSpec { alibi: Alibi::PerHead, ..spec }.batch();
        let repeated = Batch { alibi: Alibi::PerSequence, ..batch.clone() };
        assert_same(op, (&repeated, &batch), &memory_layout, "repeated slopes", unchanged);
    });
}

pub(crate) fn a_scale_equals_multiplied_operands(op: Operator) {
    for_f32_calls(op, 24, |spec, memory_layout, _| {
        let batch = BatchSpec { scales: [ScaleKind::None; 3], ..spec }.batch();
        // Powers of two, which multiply without rounding, one per KV head.
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
        assert_same(op, (&scaled, &multiplied), &memory_layout, "multiplied", unchanged);
    });
}
