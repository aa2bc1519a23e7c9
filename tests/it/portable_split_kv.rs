//! Few queries over many keys where no kernel is made for them: all sequences in decode or in the kernel of rows with masks, against
//! the reference on every device; and on a GPU, that these were launched.

use crate::support::{
    Alibi, AttentionCase, BF16, BatchSpec, Dtypes, F8E4M3FN, F8E5M2, F16, F32, KeyBounds, KvLayout, Mask, MemoryLayout,
    PagedUpdateCase, ReferenceCase, ScaleKind, assert_named_matches_reference, calls_for_tiles,
};
use crate::tuned_split_kv::{MASKS, WORKSPACE, layout};

/// One tile of decode per sequence, several, more than one of the other kernel's; empty sequences and single queries among them.
const LENGTHS: [&[(usize, usize)]; 4] = [
    &[(5, 2000), (0, 300), (16, 700), (1, 1500), (3, 2), (17, 640)],
    &[(9, 3000)],
    &[(7, 900), (7, 901), (7, 1023), (7, 1024), (7, 1025), (2, 0)],
    &[(70, 1800), (1, 1), (1, 2500)],
];

const HEADS: [(usize, usize); 5] = [(8, 2), (7, 1), (12, 2), (16, 1), (4, 4)];

/// Cases with these dtypes, head dimensions and page sizes (0: contiguous keys), which take turns with the options.
fn assert_cases(count: usize, dtypes: &[Dtypes], head_dims: &[usize], page_sizes: &[usize]) {
    let scales = [ScaleKind::None, ScaleKind::PerTensor, ScaleKind::PerHead];
    for seed in calls_for_tiles(0..count) {
        let spec = BatchSpec {
            dtypes: dtypes[seed % dtypes.len()],
            heads: HEADS[seed % 5],
            head_dim: head_dims[seed % head_dims.len()],
            mask: MASKS[seed * 3 / 4 % 4],
            lengths: LENGTHS[seed / 2 % 4].to_vec(),
            leftpad: seed % 3 == 0,
            sinks: seed % 2 == 0,
            softcap: if seed % 3 == 1 { 4.0 } else { 0.0 },
            alibi: if seed % 3 == 2 { Alibi::PerHead } else { Alibi::Off },
            scales: [scales[seed % 3], scales[seed / 2 % 3], scales[seed / 4 % 3]],
            seed: seed as u64,
            ..BatchSpec::default()
        };
        let layout = layout(seed, page_sizes[seed % page_sizes.len()]);
        let name = format!("{seed}: {spec:?}");
        assert_named_matches_reference(&name, &mut AttentionCase::flash(&spec.batch(), &layout));
    }
}

#[test]
fn sixteen_bits_agree_with_the_reference() {
    let dtypes = [Dtypes::same(BF16), Dtypes::same(F16), Dtypes::wide(BF16, BF16)];
    assert_cases(24, &dtypes, &[128, 64, 256, 80, 192, 320, 96], &[16, 1, 24, 128, 0]);
}

#[test]
fn thirty_two_bits_agree_with_the_reference() {
    assert_cases(12, &[Dtypes::same(F32)], &[64, 128, 24, 256, 512], &[16, 1, 24, 0]);
}

#[test]
fn eight_bits_agree_with_the_reference() {
    let dtypes =
        [Dtypes::over(BF16, F8E4M3FN), Dtypes::over(F16, F8E5M2), Dtypes::narrow(BF16), Dtypes::wide(F16, F8E5M2)];
    assert_cases(16, &dtypes, &[128, 96, 64, 256, 512], &[20, 16, 4]);
}

#[test]
fn scaled_rows_agree_with_the_reference() {
    for seed in calls_for_tiles(0..12_usize) {
        let spec = BatchSpec {
            dtypes: Dtypes::SCALED[seed % 6],
            heads: HEADS[seed % 5],
            head_dim: [256, 96, 128, 512][seed % 4],
            mask: if seed % 4 == 1 { Mask::sliding(333) } else { Mask::CAUSAL },
            lengths: LENGTHS[seed / 3 % 4].to_vec(),
            sinks: seed % 2 == 0,
            seed: seed as u64,
            ..BatchSpec::default()
        };
        let layout = MemoryLayout {
            rows_around: (3, 5),
            workspace: Some(WORKSPACE),
            seed: seed as u64,
            ..MemoryLayout::paged(KvLayout::Interleaved, [20, 16, 1][seed % 3])
        };
        assert_named_matches_reference(&format!("{seed}: {spec:?}"), &mut AttentionCase::paged(&spec.batch(), &layout));
    }
}

#[test]
fn rows_with_bounds_agree_with_the_reference() {
    for seed in calls_for_tiles(0..8_usize) {
        let spec = BatchSpec {
            dtypes: [Dtypes::same(BF16), Dtypes::same(F32), Dtypes::over(F16, F8E5M2)][seed % 3],
            heads: HEADS[seed % 5],
            head_dim: [128, 64, 256, 96][seed % 4],
            mask: MASKS[seed % 4],
            key_bounds: KeyBounds::ALL[1 + seed % 3],
            lengths: LENGTHS[[3, 0][seed / 4]].to_vec(),
            seed: seed as u64,
            ..BatchSpec::default()
        };
        let layout = if seed % 2 == 0 { MemoryLayout::contiguous() } else { MemoryLayout::default() };
        let layout = MemoryLayout { workspace: Some(WORKSPACE), seed: seed as u64, ..layout };
        assert_named_matches_reference(&format!("{seed}: {spec:?}"), &mut AttentionCase::flash(&spec.batch(), &layout));
    }
}

/// Decode stores the new tokens of sequences that have several of its tiles.
#[test]
fn new_tokens_are_stored_and_attended_to() {
    for (dtype, softcap) in [(BF16, 3.0), (F32, 0.0)] {
        let lengths = vec![(9, 3000), (7, 20), (1, 900), (0, 5)];
        let spec = BatchSpec { dtypes: dtype.into(), heads: (8, 2), softcap, lengths, ..BatchSpec::default() };
        let layout = MemoryLayout { workspace: Some(WORKSPACE), ..MemoryLayout::default() };
        PagedUpdateCase::new(&spec.batch(), &layout).assert_matches_reference();
    }
}

#[cfg(feature = "cuda")]
mod on_their_own_gpu {
    use super::{AttentionCase, BF16, BatchSpec, Dtypes, F32, KvLayout, Mask, MemoryLayout, WORKSPACE};
    use crate::support::device::Gpu;

    #[test]
    fn the_kernels_are_chosen() {
        let Some(gpu) = Gpu::with_tuned_kernels_or_skip() else { return };
        let long = BatchSpec { heads: (7, 1), head_dim: 128, mask: Mask::CAUSAL, ..BatchSpec::default() };
        for (dtypes, softcap, lengths, kernel) in [
            (Dtypes::same(BF16), 3.5, vec![(37, 9001)], "attention_row_masks_bf16_128 with"),
            (Dtypes::same(BF16), 3.5, vec![(3, 9002), (3, 64)], "attention_bf16_128_decode_8warps_softcap_alibi with"),
            (Dtypes::same(F32), 0.0, vec![(37, 9003)], "attention_f32_128_decode_none with"),
            (Dtypes::SCALED[0], 0.0, vec![(37, 9004)], "attention_token_scales_i8_256_decode with"),
        ] {
            let head_dim = if dtypes.scaled { 256 } else { 128 };
            let spec = BatchSpec { dtypes, head_dim, lengths, softcap, ..long.clone() };
            let layout = MemoryLayout { workspace: Some(WORKSPACE), ..MemoryLayout::paged(KvLayout::Interleaved, 16) };
            AttentionCase::paged(&spec.batch(), &layout).invocation().assert_logs(&gpu, &[kernel]);
        }
    }
}
