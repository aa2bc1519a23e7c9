//! Results that are composed of several calls, and equal operators.

use super::{each, for_f32_calls};
use crate::attention::Operator;
use crate::attention::results::{LSE, OUT, Rows, assert_close, assert_same_rows, attend};
use crate::support::{Alibi, AttentionConfig, Batch, BatchSpec, F32, Mask, SequenceData, Side, State, shifted};

/// The keys `start..end` of a sequence. With offsets, the queries keep their positions.
fn keys(config: &AttentionConfig, sequence: &SequenceData, start: usize, end: usize) -> SequenceData {
    let rows = |values: &[f64], d: usize| values[start * config.kv_heads * d..end * config.kv_heads * d].to_vec();
    let (k, v) = (rows(&sequence.k, config.head_dim), rows(&sequence.v, config.value_dim));
    let q_offset = sequence.q_offset - start as i32;
    let key_ranges = shifted(&sequence.key_ranges, start);
    SequenceData { len_k: end - start, q_offset, key_ranges, k, v, ..sequence.clone() }
}

/// Merges the states of two splits of the keys by `merge_attention_states`.
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

pub(crate) fn merging_the_states_of_two_splits_gives_the_whole(op: Operator) {
    for_f32_calls(op, 32, |spec, memory_layout, random| {
        let cut = random.below(1001) as f64 / 1000.0;
        let at = |s: &SequenceData| (cut * s.len_k as f64).round() as usize;
        let assert_merged = |whole: &Batch, second: &Batch| {
            // Only one split has the sink.
            let first =
                each(whole, |s| *s = keys(&whole.config, s, 0, at(s))).with_config(|config| config.sinks = None);
            let [a, b] = [&first, second].map(|part| attend(op, part, &memory_layout));
            let actual: Vec<Rows> = a.iter().zip(&b).map(|parts| merged(parts, &whole.config)).collect();
            assert_same_rows(&actual, &attend(op, whole, &memory_layout), "merged");
        };
        // Under any mask that counts from the first key, removing the last keys changes no position.
        let mask = if spec.q_offset { spec.mask } else { spec.mask.top_left() };
        let whole = BatchSpec { leftpad: false, mask, ..spec.clone() }.batch();
        assert_merged(&whole, &Batch { leftpad: true, ..each(&whole, |s| s.leftpad = at(s)) });
        // With offsets, and without a mask, each split is a sequence.
        if spec.q_offset {
            let whole = BatchSpec { leftpad: false, ..spec.clone() }.batch();
            assert_merged(&whole, &each(&whole, |s| *s = keys(&whole.config, s, at(s), s.len_k)));
        }
        let whole = BatchSpec { leftpad: false, mask: Mask::FULL, alibi: Alibi::Off, ..spec }.batch();
        assert_merged(&whole, &each(&whole, |s| *s = keys(&whole.config, s, at(s), s.len_k)));
    });
}

pub(crate) fn paged_attention_equals_causal_flash_attn_varlen(op: Operator) {
    op.for_calls(32, |spec, memory_layout, _| {
        let spec = BatchSpec { tree: None, ..spec };
        let of = |batch: &Batch| [op, Operator::FlashAttnVarlen].map(|op| attend(op, batch, &memory_layout));
        // With `batch_invariant` both operators must give the same bits.
        let [paged, flash] = of(&BatchSpec { batch_invariant: true, ..spec.clone() }.batch());
        assert!(paged == flash, "the operators differ");
        let spec = BatchSpec { batch_invariant: false, dtypes: F32.into(), sharpness: 1.0, ..spec };
        let [paged, flash] = of(&spec.batch());
        assert_same_rows(&paged, &flash, "the operators");
    });
}

/// The queries `start..end` of a sequence, over the keys up to the last of these queries.
fn chunk(config: &AttentionConfig, sequence: &SequenceData, start: usize, end: usize) -> SequenceData {
    let row = config.q_heads * config.head_dim;
    let q = sequence.q[start * row..end * row].to_vec();
    let key_ranges = sequence.key_ranges[start..end].to_vec();
    let q_offset = sequence.q_offset + start as i32;
    SequenceData { len_q: end - start, q_offset, key_ranges, q, ..keys(config, sequence, 0, end) }
}

pub(crate) fn chunked_prefill_equals_whole_prefill(op: Operator) {
    for_f32_calls(op, 24, |spec, memory_layout, random| {
        let step = random.between(1, 19);
        let lengths = spec.lengths.iter().map(|&(_, len_k)| (len_k, len_k)).collect();
        let batch = BatchSpec { lengths, tree: None, ..spec }.batch();
        for (whole, sequence) in attend(op, &batch, &memory_layout).iter().zip(&batch.sequences) {
            // One ragged batch holds all chunks, each over the keys up to its end.
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
