//! What the operator computes, against the f64 reference.

use crate::support::array::{BF16, F16, F32};
use crate::support::batch::{Alibi, Dtypes, Scaled, Shape};
use crate::support::case::Case;
use crate::support::check::{check, check_named};
use crate::support::named_shapes::flash_shapes;
use crate::support::oracle::Mask;
use crate::support::storage::{Layout, Storage};
use crate::support::strategies::{flash_calls, for_all};

fn named_cases_agree_with_the_reference(dtypes: Dtypes) {
    for (name, shape, storage) in flash_shapes(dtypes) {
        check_named(name, Case::flash(&shape.batch(), &storage));
    }
}

#[test]
fn named_cases_agree_with_the_reference_in_f32() {
    named_cases_agree_with_the_reference(F32.into());
}

#[test]
fn named_cases_agree_with_the_reference_in_f16() {
    named_cases_agree_with_the_reference(F16.into());
}

#[test]
fn named_cases_agree_with_the_reference_in_bf16() {
    named_cases_agree_with_the_reference(BF16.into());
}

#[test]
fn named_cases_agree_with_the_reference_over_8_bit_caches() {
    for (index, dtypes) in Dtypes::ALL[3..].iter().enumerate() {
        // A sixth of the cases for each of the six.
        for (name, shape, storage) in flash_shapes(*dtypes).into_iter().skip(index).step_by(6) {
            check_named(name, Case::flash(&shape.batch(), &storage));
        }
    }
}

#[test]
fn every_head_dimension_agrees_with_the_reference_in_every_type() {
    for (index, head_dim) in (8..=256).step_by(8).enumerate() {
        let layout = [Layout::Contiguous, Layout::Split][index % 2];
        let value_dims = [head_dim, 8 + (head_dim * 5) % 256, 264 - head_dim];
        // Each head dimension with three types, one of them without 8-bit floats.
        let types = [index % 3, 3 + index % 4, 7 + index % 2];
        for (value_dim, dtypes) in value_dims.into_iter().zip(types.map(|i| Dtypes::ALL[i])) {
            let shape = Shape {
                dtypes,
                head_dim,
                value_dim: Some(value_dim),
                heads: (2, 1),
                lengths: vec![(1, 37), (18, 25), (1, 3)],
                ..Shape::default()
            };
            check(&Case::flash(&shape.batch(), &Storage::paged(layout, 7)));
        }
    }
}

#[test]
fn every_group_size_agrees_with_the_reference() {
    for heads in [(1, 1), (3, 1), (5, 1), (7, 1), (8, 1), (9, 3), (12, 4), (16, 16), (17, 1), (32, 8), (64, 1)] {
        for mask in [Mask::CAUSAL, Mask::FULL] {
            let shape = Shape { heads, head_dim: 16, lengths: vec![(1, 40), (6, 21)], mask, ..Shape::default() };
            check(&Case::flash(&shape.batch(), &Storage::contiguous()));
        }
    }
}

#[test]
fn every_page_size_agrees_with_the_reference() {
    for page_size in [1, 2, 3, 5, 8, 13, 16, 24, 31, 32, 33, 48, 64, 100, 128, 256, 1000] {
        for layout in Layout::PAGED {
            let shape = Shape { head_dim: 24, lengths: vec![(1, 130), (21, 64)], ..Shape::default() };
            check(&Case::flash(&shape.batch(), &Storage::paged(layout, page_size)));
        }
    }
}

#[test]
fn any_call_agrees_with_the_reference() {
    for_all(160, flash_calls(), |(shape, storage)| {
        check(&Case::flash(&shape.batch(), &storage));
    });
}

#[test]
fn each_option_alone_agrees_with_the_reference_in_every_type() {
    for dtypes in Dtypes::ALL {
        let lengths = vec![(1, 90), (9, 9), (0, 4), (21, 64), (7, 2)];
        let plain = Shape { dtypes, lengths, mask: Mask::FULL, ..Shape::default() };
        let scales = |q, k, v| Shape { scales: [q, k, v], ..plain.clone() };
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
            scales(Scaled::AsAWhole, Scaled::AsAWhole, Scaled::AsAWhole),
            scales(Scaled::PerHead, Scaled::No, Scaled::No),
            scales(Scaled::No, Scaled::PerHead, Scaled::No),
            scales(Scaled::No, Scaled::No, Scaled::PerHead),
            Shape { batch_invariant: true, ..plain.clone() },
        ];
        for (shape, layout) in options.into_iter().flat_map(|s| [(s.clone(), Layout::Contiguous), (s, Layout::Split)]) {
            let storage = Storage { seqused_k: layout == Layout::Split, ..Storage::paged(layout, 16) };
            check(&Case::flash(&shape.batch(), &storage));
        }
    }
}

#[test]
fn huge_scores_neither_overflow_nor_lose_the_softmax() {
    for dtypes in Dtypes::ALL {
        for (sharpness, scale) in [(100.0, 100.0), (300.0, 1.0), (1.0, 1e-4), (0.0, 1.0)] {
            let shape =
                Shape { dtypes, sharpness, lengths: vec![(1, 70), (30, 64)], mask: Mask::FULL, ..Shape::default() };
            let mut case = Case::flash(&shape.batch(), &Storage::contiguous());
            case.form.softmax_scale = scale;
            check_named(&format!("scale {scale}, sharpness {sharpness}"), case);
        }
    }
}

#[test]
fn scales_and_slopes_may_be_0_or_negative() {
    for dtypes in Dtypes::ALL {
        let shape = Shape { dtypes, lengths: vec![(1, 70), (30, 64)], alibi: Alibi::PerHead, ..Shape::default() };
        for (q, k, v) in [(0.0, 1.0, 1.0), (1.0, -0.7, 0.0), (-2.0, -0.5, -1.5), (-1.0, 1.0, 2.0)] {
            let mut batch = shape.batch().with_form(|form| {
                form.q_scale = Some(vec![q]);
                form.k_scale = Some(vec![k, 1.1 * k]);
                form.v_scale = Some(vec![v]);
            });
            batch.sequences.iter_mut().for_each(|s| s.slopes = vec![-0.05, 0.0, 1.5, 0.01]);
            check(&Case::flash(&batch, &Storage::contiguous()));
        }
    }
}

#[test]
fn a_sink_may_outweigh_everything_or_nothing() {
    for dtypes in Dtypes::ALL {
        let shape = Shape { dtypes, lengths: vec![(1, 700), (30, 64), (9, 2)], ..Shape::default() };
        let sinks = Some(vec![f32::NEG_INFINITY, -1e30, 200.0, 1e30]);
        let batch = shape.batch().with_form(|form| form.sinks = sinks);
        for storage in [Storage::contiguous(), Storage::paged(Layout::PerPage, 16)] {
            check(&Case::flash(&batch, &storage));
        }
    }
}
