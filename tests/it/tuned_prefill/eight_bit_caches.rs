//! 16-bit queries over pages of 8 bits, which Hopper's prefill converts to f16.

use super::LONG;
use crate::support::{
    AttentionCase, BF16, BatchSpec, Dtypes, F8E4M3FN, F8E5M2, F16, KvLayout, Mask, MemoryLayout, PairwiseOptions,
    ReferenceCase, ScaleKind, assert_calls_match_reference, assert_named_matches_reference, calls_for_tiles,
    skips_slow_test,
};

const DTYPES: [Dtypes; 6] = [
    Dtypes::over(BF16, F8E4M3FN),
    Dtypes::over(F16, F8E4M3FN),
    Dtypes::over(BF16, F8E5M2),
    Dtypes::over(F16, F8E5M2),
    Dtypes::wide(BF16, F8E4M3FN),
    Dtypes::wide(F16, F8E5M2),
];

const HEAD_DIMS: [(usize, usize); 3] = [(64, 64), (128, 128), (256, 256)];

const CALLS: PairwiseOptions = PairwiseOptions {
    dtypes: &DTYPES,
    head_dims: &HEAD_DIMS,
    layout: &KvLayout::PAGED,
    page_size: &[8, 16, 24, 48, 128, 256],
    ..LONG
};

#[test]
fn every_pair_agrees_with_the_reference() {
    if skips_slow_test() {
        return;
    }
    assert_calls_match_reference("8 bits", calls_for_tiles(CALLS.calls()), |(_, spec, memory_layout, _)| {
        AttentionCase::flash(&spec.batch(), &memory_layout)
    });
}

/// More tiles than an H200 has SMs, whose rows may be staged in V, and tiles of one block of keys between longer ones.
#[test]
fn batches_of_many_tiles_agree_with_the_reference() {
    let (equal, mixed) = (vec![(200, 200); 10], [(40, 40), (200, 700), (30, 20)].repeat(6));
    let masks = [Mask::CAUSAL, Mask::FULL, Mask::window(90, 30)];
    let calls = HEAD_DIMS.into_iter().enumerate().flat_map(|dims| [(dims, &equal), (dims, &mixed)]);
    for (call, ((index, (head_dim, _)), lengths)) in calls_for_tiles(calls.enumerate()) {
        let spec = BatchSpec {
            dtypes: DTYPES[call % DTYPES.len()],
            heads: (8, 4),
            head_dim,
            lengths: lengths.clone(),
            mask: masks[(index + call) % masks.len()],
            ..BatchSpec::default()
        };
        let layout = MemoryLayout::paged(KvLayout::PAGED[call % KvLayout::PAGED.len()], [16, 8, 64][index]);
        ReferenceCase::assert_matches_reference(&AttentionCase::flash(&spec.batch(), &layout));
    }
}

/// Scales of rows, those of rows that no query attends to NaN and infinities, and tiles of several CTAs.
#[test]
fn caches_with_scales_of_rows_agree_with_the_reference() {
    for seed in calls_for_tiles(0..9_usize) {
        let lengths = match seed % 3 {
            0 => vec![(130, 300), (1, 70), (33, 33), (77, 500), (0, 9), (40, 20)],
            1 => vec![(40, 600)],
            _ => [(40, 40), (200, 700), (30, 20)].repeat(4),
        };
        let spec = BatchSpec {
            dtypes: Dtypes::SCALED[seed % 6],
            heads: [(4, 2), (12, 1), (8, 1), (6, 2), (3, 3)][seed % 5],
            head_dim: HEAD_DIMS[seed / 3 % 3].0,
            lengths,
            mask: if seed % 4 == 1 { Mask::sliding(150) } else { Mask::CAUSAL },
            sinks: seed.is_multiple_of(2),
            scales: [
                [ScaleKind::None, ScaleKind::PerTensor, ScaleKind::PerHead][seed / 2 % 3],
                ScaleKind::None,
                ScaleKind::None,
            ],
            seed: seed as u64,
            ..BatchSpec::default()
        };
        let layout = MemoryLayout {
            workspace: [Some(9_000_001), None][seed % 2],
            seed: seed as u64,
            ..MemoryLayout::paged(KvLayout::Interleaved, [16, 8, 64, 24][seed % 4])
        };
        assert_named_matches_reference(&format!("{spec:?}"), &mut AttentionCase::paged(&spec.batch(), &layout));
    }
}

#[cfg(feature = "cuda")]
mod on_their_own_gpu {
    use super::{AttentionCase, BatchSpec, DTYPES, Dtypes, HEAD_DIMS, KvLayout, MemoryLayout};
    use crate::support::device::Gpu;

    /// Short, with a call of every variant: the slower tools of compute-sanitizer run it (tests/gpu/run.py).
    #[test]
    fn tuned_kernels_are_chosen() {
        let Some(gpu) = Gpu::with_tuned_kernels_or_skip() else { return };
        for (index, (head_dim, _)) in HEAD_DIMS.into_iter().enumerate() {
            // More work tiles than SMs, each with several blocks of keys.
            let plain = BatchSpec {
                head_dim,
                heads: (Gpu::sms().div_ceil(4), 1),
                lengths: vec![(900, 1000)],
                ..BatchSpec::default()
            };
            for (softcap, logits) in [(0.0, "row_scaled"), (2.5, "softcap_alibi")] {
                let spec = BatchSpec { dtypes: DTYPES[index], softcap, ..plain.clone() };
                AttentionCase::flash(&spec.batch(), &MemoryLayout::paged(KvLayout::Stacked, 16))
                    .invocation()
                    .assert_logs(&gpu, &[&format!("hopper_prefill_8bit_{head_dim}_8bit_{logits} with")]);
            }
            let spec = BatchSpec { dtypes: Dtypes::SCALED[index], ..plain };
            AttentionCase::paged(&spec.batch(), &MemoryLayout::paged(KvLayout::Interleaved, 16))
                .invocation()
                .assert_logs(&gpu, &[&format!("hopper_prefill_token_scales_{head_dim}_token_scales with")]);
        }
    }
}
