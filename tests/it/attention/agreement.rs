//! The results agree with the reference.

use super::{Operator, ordinary};
use crate::support::{Alibi, BatchSpec, F32, Mask, MemoryLayout, assert_named_matches_reference};

pub(crate) fn named_cases_agree_with_the_reference(op: Operator) {
    for (index, dtypes) in op.dtypes().into_iter().enumerate() {
        // Each batch runs in f32, f16 and bf16, and in one of the six combinations with fp8.
        let (first, step) = if index < 3 { (0, 1) } else { (index - 3, 6) };
        for (name, spec, memory_layout) in op.named_batches(dtypes).into_iter().skip(first).step_by(step) {
            assert_named_matches_reference(name, &mut *op.call(&spec.batch(), &memory_layout));
        }
    }
}

pub(crate) fn every_head_dimension_agrees_with_the_reference_in_every_type(op: Operator) {
    let (all, memory_layouts) = (op.dtypes(), op.memory_layouts());
    for (index, head_dim) in (8..=256).step_by(8).enumerate() {
        let memory_layout = MemoryLayout { page_size: 7, ..memory_layouts[index % memory_layouts.len()].clone() };
        let own_width = memory_layout.layout.has_two_buffers();
        let value_dims = if own_width { [head_dim, 8 + (head_dim * 5) % 256, 264 - head_dim] } else { [head_dim; 3] };
        // Three combinations of dtypes for each head dimension, one of them without fp8.
        let types =
            if all.len() == 3 { [0, 1, 2].map(|i| (index + i) % 3) } else { [index % 3, 3 + index % 4, 7 + index % 2] };
        for (value_dim, dtypes) in value_dims.into_iter().zip(types.map(|i| all[i])) {
            let (value_dim, lengths) = (Some(value_dim), vec![(1, 37), (18, 25), (1, 3)]);
            let spec = BatchSpec { dtypes, head_dim, value_dim, heads: (2, 1), lengths, ..BatchSpec::default() };
            op.call(&spec.batch(), &memory_layout).assert_matches_reference();
        }
    }
}

pub(crate) fn every_group_size_agrees_with_the_reference(op: Operator) {
    for heads in [(1, 1), (3, 1), (5, 1), (7, 1), (8, 1), (9, 3), (12, 4), (16, 16), (17, 1), (32, 8), (64, 1)] {
        for &mask in op.masks() {
            let spec = BatchSpec { heads, head_dim: 16, lengths: vec![(1, 40), (6, 21)], mask, ..BatchSpec::default() };
            op.call(&spec.batch(), &op.memory_layouts()[0]).assert_matches_reference();
        }
    }
}

pub(crate) fn any_call_agrees_with_the_reference(op: Operator) {
    let count = if op == Operator::PagedAttentionUpdate { 64 } else { 160 };
    op.for_calls(count, |spec, memory_layout, _| {
        drop(op.call(&spec.batch(), &memory_layout).assert_matches_reference());
    });
}

pub(crate) fn huge_scores_neither_overflow_nor_lose_the_softmax(op: Operator) {
    for dtypes in op.dtypes() {
        // The lse of the forward pass has an absolute error of eps times the score, so a gradient's softmax weights in
        // f32 have a relative error of that size.
        let large = match op {
            Operator::FlashAttnVarlenBwd if dtypes.q == F32 => [(10.0, 1.0), (1.0, 10.0)],
            Operator::FlashAttnVarlenBwd => [(100.0, 1.0), (1.0, 100.0)],
            _ => [(100.0, 100.0), (300.0, 1.0)],
        };
        for (sharpness, scale) in large.into_iter().chain([(1.0, 1e-4), (0.0, 1.0)]) {
            let (lengths, mask) = (vec![(1, 70), (30, 64)], *op.masks().last().unwrap());
            let spec = BatchSpec { dtypes, lengths, mask, sharpness, ..BatchSpec::default() };
            let batch = spec.batch().with_config(|config| config.softmax_scale = scale);
            let name = format!("scale {scale}, sharpness {sharpness}");
            assert_named_matches_reference(&name, &mut *op.call(&batch, &op.memory_layouts()[0]));
        }
    }
}

pub(crate) fn a_sink_may_outweigh_everything_or_nothing(op: Operator) {
    for dtypes in op.dtypes() {
        // The last sequence has rows that attend to nothing but the sink.
        let spec = BatchSpec { dtypes, lengths: vec![(1, 700), (30, 64), (9, 2)], ..BatchSpec::default() };
        let sinks = Some(vec![f32::NEG_INFINITY, -1e30, 200.0, 1e30]);
        let batch = spec.batch().with_config(|config| config.sinks = sinks);
        for memory_layout in op.memory_layouts() {
            op.call(&batch, &memory_layout).assert_matches_reference();
        }
    }
}

pub(crate) fn scales_and_slopes_may_be_0_or_negative(op: Operator) {
    for dtypes in op.dtypes() {
        let spec =
            BatchSpec { dtypes, lengths: vec![(1, 70), (30, 64)], alibi: Alibi::PerHead, ..BatchSpec::default() };
        for (q, k, v) in [(0.0, 1.0, 1.0), (1.0, -0.7, 0.0), (-2.0, -0.5, -1.5), (-1.0, 1.0, 2.0)] {
            let mut batch = spec.batch().with_config(|config| {
                config.q_scale = Some(vec![q]);
                config.k_scale = Some(vec![k, 1.1 * k]);
                config.v_scale = Some(vec![v]);
            });
            batch.sequences.iter_mut().for_each(|s| s.slopes = vec![-0.05, 0.0, 1.5, 0.01]);
            op.call(&batch, &op.memory_layouts()[0]).assert_matches_reference();
        }
    }
}

pub(crate) fn long_sequences_agree_with_the_reference(op: Operator) {
    let masks = if op.is_paged() {
        [Mask::CAUSAL, Mask::CAUSAL, Mask::sliding(2300)]
    } else {
        [Mask::CAUSAL, Mask::FULL, Mask::sliding(200)]
    };
    let forms = [((8, 4), 128), ((8, 4), 64), ((3, 1), 256)];
    for ((dtypes, mask), (heads, head_dim)) in op.dtypes().into_iter().zip(masks).zip(forms) {
        // The reference of the gradients would be slow for that many keys.
        let spec = match op {
            Operator::FlashAttnVarlenBwd => {
                BatchSpec { heads: (2, 1), lengths: vec![(700, 700), (5, 300), (300, 513)], ..ordinary(dtypes) }
            }
            _ => BatchSpec { heads, head_dim, lengths: vec![(1, 3000), (20, 2500)], ..ordinary(dtypes) },
        };
        op.call(&BatchSpec { mask, ..spec }.batch(), &op.memory_layouts()[0]).assert_matches_reference();
    }
}
