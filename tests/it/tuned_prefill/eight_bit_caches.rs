//! 16-bit queries over pages of e4m3fn and e5m2, which Hopper's prefill converts to f16.

use crate::support::{
    ALIBI, AttentionCase, BF16, BatchSpec, Dtypes, F8E4M3FN, F8E5M2, F16, KvLayout, Mask, MemoryLayout,
    PairwiseOptions, ReferenceCase, ScaleKind, assert_calls_match_reference, calls_for_tiles, skips_slow_test,
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
    heads: &[(1, 1), (4, 2), (8, 1), (6, 2), (12, 1), (32, 1)],
    work: &[
        &[(128, 128), (64, 256)],
        &[(130, 300), (1, 70), (33, 33), (77, 500)],
        &[(200, 90), (40, 0), (17, 129)],
        &[(40, 600)],
        &[(20, 20), (19, 21), (18, 18), (25, 40), (300, 300)],
    ],
    layout: &KvLayout::PAGED,
    page_size: &[8, 16, 24, 48, 128, 256],
    alibi: ALIBI,
    scales: &[[ScaleKind::None; 3], [ScaleKind::PerTensor; 3], [ScaleKind::PerHead; 3]],
    workspace: &[None, Some(13), Some(9_000_001)],
    seed: 7,
    ..PairwiseOptions::BEYOND_BLOCKS
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

#[cfg(feature = "cuda")]
mod on_their_own_gpu {
    use super::{AttentionCase, BatchSpec, DTYPES, HEAD_DIMS, KvLayout, MemoryLayout};
    use crate::support::device::Gpu;

    /// Short, with a call of every variant: the slower tools of compute-sanitizer run it (tests/gpu/run.py).
    #[test]
    fn tuned_kernels_are_chosen() {
        let Some(gpu) = Gpu::with_tuned_kernels_or_skip() else { return };
        for (index, (head_dim, _)) in HEAD_DIMS.into_iter().enumerate() {
            for (softcap, logits) in [(0.0, "row_scaled"), (2.5, "softcap_alibi")] {
                // More work tiles than SMs, each with several blocks of keys.
                let spec = BatchSpec {
                    dtypes: DTYPES[index],
                    head_dim,
                    softcap,
                    heads: (Gpu::sms().div_ceil(4), 1),
                    lengths: vec![(900, 1000)],
                    ..BatchSpec::default()
                };
                AttentionCase::flash(&spec.batch(), &MemoryLayout::paged(KvLayout::Stacked, 16))
                    .invocation()
                    .assert_logs(&gpu, &[&format!("hopper_prefill_8bit_{head_dim}_8bit_{logits} with")]);
            }
        }
    }
}
