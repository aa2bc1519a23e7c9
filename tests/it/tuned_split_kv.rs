//! Hopper's prefill whose keys are divided between CTAs: few queries over many keys, against the reference on every device;
//! and on Hopper, that this kernel was launched.

use crate::attention::metadata::corrupt;
use crate::support::{
    ALIBI, AttentionCase, BF16, BatchSpec, Dtypes, F8E4M3FN, F8E5M2, F16, InvalidMetadata, KeyBounds, KvLayout, Mask,
    MemoryLayout, ReferenceCase, ScaleKind, assert_named_matches_reference, calls_for_tiles,
};

/// Room for the partials of every CTA of an H200.
pub(crate) const WORKSPACE: usize = 40_000_000;

/// Tiles of one sequence and of several CTAs, several tiles of a sequence, decode and empty sequences among them.
const LENGTHS: [&[(usize, usize)]; 4] = [
    &[(5, 2000), (0, 300), (16, 700), (1, 1500), (3, 2), (17, 640)],
    &[(9, 3000)],
    &[(4, 900), (4, 901), (4, 1023), (4, 1024), (4, 1025), (2, 0)],
    &[(70, 1800), (1, 1), (1, 2500)],
];

/// More sequences than a warp has lanes, so that all warps plan.
const MANY: [(usize, usize); 40] = [(3, 150); 40];

pub(crate) const MASKS: [Mask; 4] =
    [Mask::CAUSAL, Mask::FULL, Mask { window_left: 333, ..Mask::CAUSAL }, Mask::window(700, 2)];

/// Pages of this size, or contiguous keys for 0, in layouts that take turns.
pub(crate) fn layout(seed: usize, page_size: usize) -> MemoryLayout {
    let layout = match page_size {
        0 => MemoryLayout::contiguous(),
        _ => MemoryLayout::paged(KvLayout::PAGED[seed / 2 % 4], page_size),
    };
    MemoryLayout { seqused_q: seed % 5 == 1, ..with_room(seed, &layout) }
}

/// The layout with rows around its own and a workspace, which has room for a few CTAs' partials only in one of six.
fn with_room(seed: usize, layout: &MemoryLayout) -> MemoryLayout {
    MemoryLayout {
        rows_around: (3, 5),
        workspace: Some(if seed % 6 == 4 { 1_000_000 } else { WORKSPACE }),
        seed: seed as u64,
        ..*layout
    }
}

/// Query heads that fill a tile's padding groups and leave heads of them out; bf16 and f16; each page size that TMA and
/// `cp.async` load, and contiguous keys.
#[test]
fn few_queries_over_many_keys_agree_with_the_reference() {
    let dtypes = [Dtypes::same(BF16), Dtypes::same(F16), Dtypes::wide(BF16, BF16)];
    let heads = [(8, 2), (7, 1), (12, 2), (16, 1), (3, 1), (4, 4), (40, 1)];
    let page_sizes = [16, 1, 24, 128, 12, 0];
    for seed in calls_for_tiles(0..24_usize) {
        let spec = BatchSpec {
            dtypes: dtypes[seed % 3],
            heads: heads[seed % 7],
            head_dim: [128, 64, 256, 80, 192, 128][seed % 6],
            mask: MASKS[seed * 3 / 4 % 4],
            lengths: LENGTHS[seed / 4 % 4].to_vec(),
            leftpad: seed % 3 == 0,
            softcap: if seed % 4 == 3 { 5.0 } else { 0.0 },
            alibi: ALIBI[if seed % 4 == 1 { seed / 4 % ALIBI.len() } else { 0 }],
            sinks: seed % 2 == 0,
            scales: [
                ScaleKind::None,
                ScaleKind::None,
                [ScaleKind::None, ScaleKind::PerTensor, ScaleKind::PerHead][seed / 2 % 3],
            ],
            seed: seed as u64,
            ..BatchSpec::default()
        };
        let layout = layout(seed, page_sizes[seed % 6]);
        let name = format!("{seed}: {spec:?}");
        assert_named_matches_reference(&name, &mut AttentionCase::flash(&spec.batch(), &layout));
    }
}

/// The same over pages of 8 bits, with scales of q and K too.
#[test]
fn few_queries_over_8_bit_pages_agree_with_the_reference() {
    let dtypes = [
        Dtypes::over(BF16, F8E4M3FN),
        Dtypes::over(F16, F8E5M2),
        Dtypes::wide(BF16, F8E4M3FN),
        Dtypes::over(F16, F8E4M3FN),
    ];
    let scales = [ScaleKind::None, ScaleKind::PerTensor, ScaleKind::PerHead];
    for seed in calls_for_tiles(0..12_usize) {
        let spec = BatchSpec {
            dtypes: dtypes[seed % 4],
            heads: [(8, 2), (7, 1), (12, 2), (16, 1), (4, 4)][seed % 5],
            head_dim: [128, 64, 256][seed % 3],
            mask: MASKS[seed % 4],
            lengths: if seed < 3 { MANY.to_vec() } else { LENGTHS[seed / 3 % 4].to_vec() },
            leftpad: seed % 3 == 0,
            sinks: seed % 2 == 0,
            scales: [scales[seed % 3], scales[seed / 2 % 3], scales[seed / 4 % 3]],
            seed: seed as u64,
            ..BatchSpec::default()
        };
        let layout = layout(seed, [16, 24, 8, 128][seed / 3 % 4]);
        let name = format!("{seed}: {spec:?}");
        assert_named_matches_reference(&name, &mut AttentionCase::flash(&spec.batch(), &layout));
    }
}

/// The same with a scale per row; those that no query attends to are NaN and infinities.
#[test]
fn few_queries_over_scaled_rows_agree_with_the_reference() {
    for seed in calls_for_tiles(0..12_usize) {
        let spec = BatchSpec {
            dtypes: Dtypes::SCALED[seed % 6],
            heads: [(8, 2), (7, 1), (12, 2), (16, 1), (4, 4)][seed % 5],
            head_dim: [128, 64, 256][seed % 3],
            mask: if seed % 4 == 1 { Mask::sliding(333) } else { Mask::CAUSAL },
            lengths: if seed < 3 { MANY.to_vec() } else { LENGTHS[seed / 3 % 4].to_vec() },
            sinks: seed % 2 == 0,
            scales: [[ScaleKind::None, ScaleKind::PerTensor][seed / 3 % 2], ScaleKind::None, ScaleKind::None],
            seed: seed as u64,
            ..BatchSpec::default()
        };
        let layout = with_room(seed, &MemoryLayout::paged(KvLayout::Interleaved, [16, 24, 8, 128][seed / 3 % 4]));
        assert_named_matches_reference(&format!("{seed}: {spec:?}"), &mut AttentionCase::paged(&spec.batch(), &layout));
    }
}

/// Trees of one tile and of several, among sequences without one, and bounds of rows' keys; keys that no row attends to hold
/// NaN.
#[test]
fn rows_with_masks_of_their_own_agree_with_the_reference() {
    let dtypes = [Dtypes::same(BF16), Dtypes::same(F16), Dtypes::wide(BF16, BF16)];
    for seed in calls_for_tiles(0..24_usize) {
        let tree = [Some(40), Some(70), None][seed / 2 % 3];
        let masks = if tree.is_some() { [Mask::CAUSAL, Mask::sliding(150), Mask::CAUSAL, Mask::CAUSAL] } else { MASKS };
        let spec = BatchSpec {
            dtypes: dtypes[seed % 3],
            heads: [(8, 2), (7, 1), (4, 4), (40, 1)][seed % 4],
            head_dim: [128, 64, 256][(seed / 2 + seed / 6) % 3],
            lengths: [LENGTHS[seed / 3 % 4], &[(9, 200), (40, 300), (1, 400), (70, 90), (12, 7), (33, 33)]][seed % 2]
                .to_vec(),
            mask: masks[seed % 4],
            tree,
            key_bounds: KeyBounds::ALL[(seed + 1) % KeyBounds::ALL.len()],
            leftpad: tree.is_none() && seed % 2 == 0,
            sinks: seed % 2 == 0,
            seed: seed as u64,
            ..BatchSpec::default()
        };
        let layout = with_room(seed, &MemoryLayout::paged(KvLayout::Interleaved, [16, 64, 24, 8][seed / 3 % 4]));
        let batch = spec.batch();
        let mut case = match tree {
            Some(_) => AttentionCase::paged(&batch, &layout),
            None => AttentionCase::flash(&batch, &MemoryLayout { seqused_q: seed % 4 == 1, ..layout }),
        };
        assert_named_matches_reference(&format!("{seed}: {spec:?}"), &mut case);
    }
}

#[test]
fn hostile_metadata_does_not_affect_valid_sequences() {
    for seed in 0..32 {
        let spec = BatchSpec {
            dtypes: BF16.into(),
            heads: [(7, 1), (8, 2)][seed as usize % 2],
            head_dim: 128,
            mask: [MASKS[0], MASKS[2]][seed as usize / 2 % 2],
            lengths: vec![(5, 300), (2, 40), (17, 1200), (1, 16), (3, 129)],
            softcap: [0.0, 5.0][seed as usize / 4 % 2],
            tree: [None, Some(10)][seed as usize / 8 % 2],
            seed,
            ..BatchSpec::default()
        };
        let layout = MemoryLayout { workspace: Some(WORKSPACE), ..MemoryLayout::paged(KvLayout::Interleaved, 16) };
        let mut case = AttentionCase::paged(&spec.batch(), &layout);
        corrupt(&mut case, seed);
        case.compare_with_reference(InvalidMetadata::Unspecified);
    }
}

#[cfg(feature = "cuda")]
mod on_their_own_gpu {
    use super::{AttentionCase, BF16, BatchSpec, Dtypes, F8E4M3FN, F16, KvLayout, Mask, MemoryLayout, WORKSPACE};
    use crate::support::device::Gpu;

    /// Short, with a call of every variant: the slower tools of compute-sanitizer run it (tests/gpu/run.py).
    #[test]
    fn the_kernel_is_chosen() {
        let Some(gpu) = Gpu::with_tuned_kernels_or_skip() else { return };
        for (dtype, name) in [(BF16, "bf16"), (F16, "f16")] {
            for head_dim in [64, 128, 256] {
                let spec = BatchSpec {
                    dtypes: dtype.into(),
                    heads: (7, 1),
                    head_dim,
                    lengths: vec![(5, 3000), (5, 900)],
                    mask: Mask::CAUSAL,
                    ..BatchSpec::default()
                };
                let [contiguous, pages] = [MemoryLayout::contiguous(), MemoryLayout::paged(KvLayout::Interleaved, 16)]
                    .map(|layout| MemoryLayout { workspace: Some(WORKSPACE), ..layout });
                for (softcap, logits) in [(0.0, "none"), (2.5, "softcap_alibi")] {
                    let batch = BatchSpec { softcap, ..spec.clone() }.batch();
                    for (layout, keys) in [(&contiguous, "contiguous"), (&pages, "paged")] {
                        AttentionCase::flash(&batch, layout).invocation().assert_logs(
                            &gpu,
                            &[&format!("hopper_split_kv_{name}_{head_dim}_split_kv_{keys}_{logits} with")],
                        );
                    }
                }
                let with_tree = BatchSpec { tree: Some(5), ..spec };
                AttentionCase::paged(&with_tree.batch(), &pages)
                    .invocation()
                    .assert_logs(&gpu, &[&format!("hopper_row_masks_{name}_{head_dim}_row_masks with")]);
            }
        }
        for head_dim in [64, 128, 256] {
            let spec = BatchSpec {
                dtypes: Dtypes::over(BF16, F8E4M3FN),
                heads: (7, 1),
                head_dim,
                lengths: vec![(5, 3000), (1, 900)],
                ..BatchSpec::default()
            };
            let layout = MemoryLayout { workspace: Some(WORKSPACE), ..MemoryLayout::paged(KvLayout::Interleaved, 16) };
            AttentionCase::flash(&spec.batch(), &layout)
                .invocation()
                .assert_logs(&gpu, &[&format!("hopper_split_kv_8bit_{head_dim}_8bit_split_kv with")]);
            // Left to decode.
            if head_dim == 256 {
                continue;
            }
            let spec = BatchSpec { dtypes: Dtypes::SCALED[0], ..spec };
            AttentionCase::paged(&spec.batch(), &layout)
                .invocation()
                .assert_logs(&gpu, &[&format!("hopper_split_kv_token_scales_{head_dim}_token_scales_split_kv with")]);
        }
    }
}
