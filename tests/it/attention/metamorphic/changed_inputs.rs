//! Changes of the inputs whose effect on the results is known.

use super::{assert_same, change_rows, each, for_f32_calls, scale_of, unchanged};
use crate::attention::Operator;
use crate::attention::results::{assert_same_rows, attend};
use crate::support::{Alibi, BatchSpec, F32, KeyBounds, Mask, Numbers, Random};

pub(crate) fn adding_a_vector_to_every_key_changes_only_the_lse(op: Operator) {
    for_f32_calls(op, 24, |spec, memory_layout, _| {
        // The relation does not hold with a soft cap, which is not linear, or with a sink, whose score does not change.
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

/// The gradients do not change, for rows without a sink.
pub(crate) fn adding_a_number_to_every_value_adds_it_to_every_row_that_attends_to_a_key(op: Operator) {
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
            return assert_same(op, (&shifted, &batch), &memory_layout, "shifted values", unchanged);
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
            let lowest = sequence.v.iter().copied().fold(0.0, f64::min);
            let highest = sequence.v.iter().copied().fold(0.0, f64::max);
            // Two fp8 roundings: of the softmax weights and of the output.
            let slack = 2f64.powi(-7) * highest.max(-lowest);
            assert!(rows.out.iter().all(|&o| (lowest - slack..=highest + slack).contains(&o)));
        }
    });
}

pub(crate) fn a_sink_scales_every_row(op: Operator) {
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

pub(crate) fn a_sink_equals_a_key_with_value_0(op: Operator) {
    for_f32_calls(op, 24, |spec, memory_layout, random| {
        // One query per sequence and one KV head per query head, so that a key can be made for each sink.
        let lengths = spec.lengths.iter().map(|&(_, len_k)| (1, len_k)).collect();
        let heads = (spec.heads.1, spec.heads.1);
        let (alibi, key_bounds) = (Alibi::Off, KeyBounds::None);
        let spec = BatchSpec { lengths, heads, mask: Mask::FULL, leftpad: false, alibi, key_bounds, ..spec };
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
        assert_same(op, (&with_key, &batch), &memory_layout, "one more key", unchanged);
    });
}
