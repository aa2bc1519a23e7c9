//! What the operator computes, against the f64 reference.

use super::calls::{case, gradient_calls, pairs_of_options};
use crate::support::array::{ATTENTION_DTYPES, F32};
use crate::support::batch::{Alibi, Shape};
use crate::support::gradient_case::{GradientCase, Wanted, check_gradients, check_gradients_named};
use crate::support::oracle::Mask;
use crate::support::storage::Storage;
use crate::support::strategies::for_all;

#[test]
fn every_pair_of_options_agrees_with_the_reference() {
    for (index, (shape, storage, wanted)) in pairs_of_options().into_iter().enumerate() {
        let case = GradientCase::store(&shape.batch(), &storage, wanted);
        check_gradients_named(&format!("pairwise {index}"), case);
    }
}

#[test]
fn every_head_dimension_agrees_with_the_reference_in_every_type() {
    for (index, head_dim) in (8..=256).step_by(8).enumerate() {
        let value_dims = [head_dim, 8 + (head_dim * 5) % 256, 264 - head_dim];
        for (value_dim, dtype) in value_dims.into_iter().zip([0, 1, 2].map(|i| ATTENTION_DTYPES[(index + i) % 3])) {
            let shape = Shape {
                dtypes: dtype.into(),
                head_dim,
                value_dim: Some(value_dim),
                heads: (2, 1),
                lengths: vec![(1, 37), (18, 25), (1, 3)],
                ..Shape::default()
            };
            check_gradients(&case(&shape, &Storage::contiguous()));
        }
    }
}

#[test]
fn every_group_size_agrees_with_the_reference() {
    for heads in [(1, 1), (3, 1), (5, 1), (7, 1), (8, 1), (9, 3), (12, 4), (16, 16), (17, 1), (32, 8), (64, 1)] {
        for mask in [Mask::CAUSAL, Mask::FULL] {
            let shape = Shape { heads, head_dim: 16, lengths: vec![(1, 40), (6, 21)], mask, ..Shape::default() };
            check_gradients(&case(&shape, &Storage::contiguous()));
        }
    }
}

#[test]
fn lengths_around_every_size_of_a_block_agree_with_the_reference() {
    let around = [15, 16, 17, 31, 33, 63, 64, 65, 127, 129];
    for (index, &length) in around.iter().enumerate() {
        let dtypes = ATTENTION_DTYPES[index % 3].into();
        let lengths = vec![(length, length), (length, 2 * length + 1), (2 * length, 7)];
        for mask in [Mask::CAUSAL, Mask::FULL, Mask::window(length as i64, 3)] {
            let shape =
                Shape { dtypes, heads: (2, 1), head_dim: 32, lengths: lengths.clone(), mask, ..Shape::default() };
            check_gradients(&case(&shape, &Storage::contiguous()));
        }
    }
}

#[test]
fn long_sequences_agree_with_the_reference() {
    for (dtype, mask) in ATTENTION_DTYPES.into_iter().zip([Mask::CAUSAL, Mask::FULL, Mask::sliding(200)]) {
        let lengths = vec![(700, 700), (5, 300), (300, 513)];
        let shape = Shape { dtypes: dtype.into(), heads: (2, 1), head_dim: 64, lengths, mask, ..Shape::default() };
        check_gradients(&case(&shape, &Storage::contiguous()));
    }
}

#[test]
fn any_call_agrees_with_the_reference() {
    for_all(160, gradient_calls(), |(shape, storage, wanted)| {
        check_gradients(&GradientCase::store(&shape.batch(), &storage, wanted));
    });
}

#[test]
fn each_option_alone_agrees_with_the_reference_in_every_type() {
    for dtype in ATTENTION_DTYPES {
        let lengths = vec![(1, 90), (9, 9), (0, 4), (21, 64), (7, 2)];
        let plain = Shape { dtypes: dtype.into(), lengths, mask: Mask::FULL, ..Shape::default() };
        let masked = |mask| Shape { mask, ..plain.clone() };
        let options = [
            plain.clone(),
            masked(Mask::CAUSAL),
            masked(Mask::CAUSAL.top_left()),
            masked(Mask::window(13, -1)),
            masked(Mask::window(-1, 5)),
            masked(Mask::window(0, 0)),
            masked(Mask::window(3, 17).top_left()),
            Shape { value_dim: Some(40), ..plain.clone() },
            Shape { leftpad: true, ..plain.clone() },
            Shape { softcap: 2.0, ..plain.clone() },
            Shape { alibi: Alibi::PerHead, ..plain.clone() },
            Shape { alibi: Alibi::PerSequence, ..plain.clone() },
            Shape { sinks: true, ..plain.clone() },
        ];
        for shape in options {
            let contiguous = Storage::contiguous();
            check_gradients(&case(&shape, &contiguous));
            check_gradients(&case(&shape, &Storage { seqused_q: true, seqused_k: true, ..contiguous.clone() }));
            check_gradients(&GradientCase::store(&shape.batch(), &contiguous, Wanted::LEAST));
        }
    }
}

#[test]
fn huge_scores_neither_overflow_nor_lose_the_softmax() {
    for dtype in ATTENTION_DTYPES {
        // The lse is exact, scores are not: in f32 a weight cannot be better than eps times the score.
        let large = if dtype == F32 { 10.0 } else { 100.0 };
        for (sharpness, scale) in [(large, 1.0), (1.0, large as f32), (1.0, 1e-4), (0.0, 1.0)] {
            let lengths = vec![(1, 70), (30, 64)];
            let shape = Shape { dtypes: dtype.into(), sharpness, lengths, mask: Mask::FULL, ..Shape::default() };
            let batch = shape.batch().with_form(|form| form.softmax_scale = scale);
            let case = GradientCase::store(&batch, &Storage::contiguous(), Wanted::ALL);
            check_gradients_named(&format!("scale {scale}, sharpness {sharpness}"), case);
        }
    }
}

#[test]
fn a_sink_may_outweigh_everything_or_nothing() {
    for dtype in ATTENTION_DTYPES {
        // The last sequence has rows that see nothing but the sink.
        let shape = Shape { dtypes: dtype.into(), lengths: vec![(1, 700), (30, 64), (9, 2)], ..Shape::default() };
        let sinks = Some(vec![f32::NEG_INFINITY, -1e30, 200.0, 1e30]);
        let batch = shape.batch().with_form(|form| form.sinks = sinks);
        check_gradients(&GradientCase::store(&batch, &Storage::contiguous(), Wanted::ALL));
    }
}
