//! Hopper's prefill kernels: sequences long enough for their tiles and blocks, with all pairs of the options that matter
//! to them, against the reference on every device; and on Hopper, that these kernels were launched.

mod eight_bit_caches;
#[cfg(feature = "cuda")]
mod on_their_own_gpu;

use crate::support::{
    ALIBI, AttentionCase, BF16, BatchSpec, Dtypes, F16, F32, InvalidMetadata, KvLayout, Mask, MemoryLayout,
    PairwiseOptions, ReferenceCase, ScaleKind, Side, assert_calls_match_reference, assert_named_matches_reference,
    calls_for_tiles, for_each_side, skips_slow_test,
};

const DTYPES: [Dtypes; 5] =
    [Dtypes::same(BF16), Dtypes::same(F16), Dtypes::narrow(BF16), Dtypes::narrow(F16), Dtypes::same(F32)];

/// The pairs of D and Dv that have variants.
const HEAD_DIMS: [(usize, usize); 6] = [(64, 64), (96, 96), (128, 128), (192, 192), (192, 128), (256, 256)];

/// Pairs that run in the tile of larger ones: every multiple of 8, and D and Dv that differ.
fn head_dims_between_tiles() -> impl Iterator<Item = (usize, usize)> {
    let equal = (8..=256).step_by(8).map(|dim| (dim, dim));
    let unequal = [(8, 256), (256, 8), (64, 128), (96, 64), (72, 104), (136, 128), (192, 40), (80, 192), (200, 64)];
    let wide = [(264, 264), (320, 320), (384, 384), (512, 512), (504, 504), (512, 264), (264, 512), (512, 64)];
    equal.chain(unequal).chain(wide).filter(|dims| !HEAD_DIMS.contains(dims))
}

/// Whether Hopper's prefill has a tile for a call's dtype and head dimensions. Portable kernels, which have tests of their own, compute f32
/// past 128 columns.
fn has_tile(spec: &BatchSpec) -> bool {
    spec.dtypes.q != F32 || spec.head_dim.max(spec.value_dim.unwrap_or(spec.head_dim)) <= 128
}

/// A call with these head dimensions, of a mask, a dtype and heads that depend on `index`.
fn between_tiles(index: usize, (head_dim, value_dim): (usize, usize)) -> BatchSpec {
    BatchSpec {
        dtypes: [Dtypes::same(BF16), Dtypes::same(F16), Dtypes::wide(BF16, BF16), Dtypes::same(F32)][index % 4],
        head_dim,
        value_dim: Some(value_dim),
        heads: [(8, 2), (3, 3), (12, 2), (32, 1)][index / 4 % 4],
        // None is short enough for decode, nor are queries few enough beside the pages for hopper_split_kv: whether those take
        // a call depends on the page size.
        lengths: vec![(110, 260), (120, 270)],
        mask: [Mask::CAUSAL, Mask::FULL][index % 2],
        softcap: if index.is_multiple_of(5) { 2.5 } else { 0.0 },
        seed: index as u64,
        ..BatchSpec::default()
    }
}

/// Those of the f32 kernel.
const F32_HEAD_DIMS: [(usize, usize); 2] = [(64, 64), (128, 128)];

/// Those of the fp8 kernel.
const FP8_HEAD_DIMS: [(usize, usize); 3] = [(64, 64), (128, 128), (256, 256)];

/// Work tiles that a sequence fills and does not fill, more keys than queries and fewer, and sequences for decode; one
/// `PackGQA` pack per KV head and several, packs of more heads than a warp has rows; TMA boxes of one row group, of two, of a
/// whole block, and pages that are no multiple of 8 tokens.
const LONG: PairwiseOptions = PairwiseOptions {
    dtypes: &[DTYPES[0], DTYPES[1], DTYPES[2], DTYPES[3], DTYPES[4], Dtypes::wide(BF16, BF16), Dtypes::wide(F16, F16)],
    head_dims: &[
        (64, 64),
        (96, 96),
        (128, 128),
        (192, 192),
        (192, 128),
        (256, 256),
        (40, 40),
        (80, 80),
        (136, 120),
        (512, 512),
        (320, 320),
    ],
    heads: &[(1, 1), (4, 2), (8, 1), (6, 2), (12, 1), (32, 1)],
    work: &[
        &[(128, 128), (64, 256)],
        &[(130, 300), (1, 70), (33, 33), (77, 500)],
        &[(200, 90), (40, 0), (17, 129)],
        &[(40, 600)],
        &[(20, 20), (19, 21), (18, 18), (25, 40), (300, 300)],
    ],
    layout: &KvLayout::ALL,
    page_size: &[0, 8, 16, 24, 48, 128, 256, 1, 4, 12, 100],
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
    let calls = LONG.calls().into_iter().filter(|(_, spec, ..)| has_tile(spec));
    assert_calls_match_reference("long", calls_for_tiles(calls), |(_, spec, memory_layout, _)| {
        AttentionCase::flash(&spec.batch(), &memory_layout)
    });
}

#[test]
fn calls_without_options_agree_with_the_reference() {
    for dtypes in DTYPES {
        let head_dims = match dtypes.q {
            F32 => &F32_HEAD_DIMS[..],
            _ if dtypes.q == dtypes.out => &HEAD_DIMS,
            _ => &FP8_HEAD_DIMS,
        };
        let calls = head_dims.iter().flat_map(|d| [(d, Mask::FULL), (d, Mask::CAUSAL)]);
        for (&(head_dim, value_dim), mask) in calls_for_tiles(calls) {
            let spec = BatchSpec {
                dtypes,
                head_dim,
                value_dim: Some(value_dim),
                heads: (8, 2),
                // None is short enough for decode, whose kernel depends on the page size too, nor are there keys enough to split.
                lengths: vec![(129, 129), (6, 77), (90, 460), (70, 64)],
                mask,
                ..BatchSpec::default()
            };
            let batch = spec.batch();
            let layout = if head_dim == value_dim { KvLayout::Interleaved } else { KvLayout::Split };
            let paged =
                |page_size| MemoryLayout { spare_seqs: 0, spare_entries: 0, ..MemoryLayout::paged(layout, page_size) };
            let contiguous =
                ReferenceCase::assert_matches_reference(&AttentionCase::flash(&batch, &MemoryLayout::contiguous()));
            // The portable kernel computes 8-bit keys in pages that are no multiple of 8 tokens.
            for page_size in if dtypes.q == dtypes.out { &[1, 8, 12, 128][..] } else { &[8, 128] } {
                // The memory layout of keys must not change a bit.
                let pages = AttentionCase::flash(&batch, &paged(*page_size)).invocation();
                for_each_side(|side| {
                    let same = pages.results(side)[..2] == contiguous;
                    assert!(same, "{dtypes:?}, D {head_dim}, Dv {value_dim}, pages of {page_size}");
                });
            }
        }
    }
}

#[test]
fn head_dimensions_between_tiles_agree_with_the_reference() {
    let specs = head_dims_between_tiles().enumerate().map(|(index, dims)| (index, dims, between_tiles(index, dims)));
    for (index, dims, spec) in calls_for_tiles(specs.filter(|(.., spec)| has_tile(spec))) {
        let batch = spec.batch();
        let contiguous =
            ReferenceCase::assert_matches_reference(&AttentionCase::flash(&batch, &MemoryLayout::contiguous()));
        let layout = if dims.0 == dims.1 { KvLayout::Interleaved } else { KvLayout::Split };
        for page_size in [[8, 12], [128, 1], [48, 12]][index % 3] {
            let pages = AttentionCase::flash(&batch, &MemoryLayout::paged(layout, page_size)).invocation();
            let same = pages.results(Side::EndsAtGuard)[..2] == contiguous;
            assert!(same, "D {}, Dv {}, pages of {page_size}", dims.0, dims.1);
        }
    }
}

#[test]
fn large_scores_agree_with_the_reference() {
    let (bf16, f16, fp8) = (Dtypes::same(BF16), Dtypes::same(F16), Dtypes::narrow(BF16));
    // wgmma of fp8 adds with 14 bits, which is visible in very large scores.
    for (dtypes, head_dim, sharpness, scale) in [
        (bf16, 64, 30.0, 0.125),
        (bf16, 64, 1000.0, 0.125),
        (f16, 64, 100.0, 100.0),
        (bf16, 64, 300.0, 1.0),
        (fp8, 128, 30.0, 0.088),
    ] {
        let spec =
            BatchSpec { dtypes, head_dim, sharpness, lengths: vec![(150, 400), (60, 60)], ..BatchSpec::default() };
        let mut case = AttentionCase::flash(&spec.batch(), &MemoryLayout::contiguous());
        case.config.softmax_scale = scale;
        assert_named_matches_reference(&format!("{dtypes:?}, scale {scale}, sharpness {sharpness}"), &mut case);
    }
}

/// The short sequences are few enough that Hopper's prefill computes them too.
#[test]
fn short_sequences_among_long_ones_agree_with_the_reference() {
    let calls = HEAD_DIMS.into_iter().zip([Mask::CAUSAL, Mask::FULL].into_iter().cycle());
    for ((head_dim, value_dim), mask) in calls_for_tiles(calls) {
        let spec = BatchSpec {
            dtypes: BF16.into(),
            head_dim,
            value_dim: Some(value_dim),
            heads: (2, 1),
            lengths: vec![(1, 40), (1500, 1400), (3, 500), (0, 7), (300, 300)],
            mask,
            ..BatchSpec::default()
        };
        ReferenceCase::assert_matches_reference(&AttentionCase::flash(&spec.batch(), &MemoryLayout::contiguous()));
    }
}

/// Sequences that hardly fill the smallest tile, one that is longer than all others together, and more of them than a warp has
/// lanes.
#[test]
fn batches_of_short_sequences_agree_with_the_reference() {
    let many: Vec<_> = (0..45).map(|i| (i * 7 % 50, i * 7 % 50 + i % 3)).collect();
    let ragged = vec![(64, 64), (1, 40), (0, 7), (65, 60), (300, 300), (3, 0), (17, 90), (2, 2)];
    let windows = [Mask::CAUSAL, Mask::FULL, Mask::window(20, 3)];
    let dims = [(64, 64), (128, 128), (40, 64), (96, 80), (192, 192), (96, 96), (136, 168), (192, 128)];
    for (index, (head_dim, value_dim)) in dims.into_iter().enumerate() {
        for lengths in [&many, &ragged] {
            let spec = BatchSpec {
                dtypes: [BF16, F16][index % 2].into(),
                heads: [(2, 1), (3, 3)][index / 2 % 2],
                head_dim,
                value_dim: Some(value_dim),
                lengths: lengths.clone(),
                mask: windows[(index + lengths.len()) % 3],
                ..BatchSpec::default()
            };
            for page_size in [None, Some([16, 4][index % 2])] {
                let layout =
                    page_size.map_or(MemoryLayout::contiguous(), |size| MemoryLayout::paged(KvLayout::Split, size));
                ReferenceCase::assert_matches_reference(&AttentionCase::flash(&spec.batch(), &layout));
            }
        }
    }
}

/// A batch with 8 query and 4 KV heads of D and Dv `dims`.
fn assert_batch_matches(
    dtypes: Dtypes,
    dims: (usize, usize),
    lengths: &[(usize, usize)],
    mask: Mask,
    layout: &MemoryLayout,
) {
    let (head_dim, value_dim) = (dims.0, Some(dims.1));
    let lengths = lengths.to_vec();
    let spec = BatchSpec { dtypes, heads: (8, 4), head_dim, value_dim, lengths, mask, ..BatchSpec::default() };
    ReferenceCase::assert_matches_reference(&AttentionCase::flash(&spec.batch(), layout));
}

/// Sequences of the same length, which are grouped by sequences, and tiles of one block of keys between longer ones, whose rows may
/// be staged in V: from D 128 on more tiles than an H200 has SMs, so that some CTAs have several. Then a sequence long enough for
/// tiles of three warpgroups at D 64.
#[test]
fn batches_of_many_tiles_agree_with_the_reference() {
    let (equal, mixed) = (vec![(200, 200); 10], [(40, 40), (200, 200), (30, 20)].repeat(6));
    let long = vec![(600, 650)];
    let masks = [Mask::CAUSAL, Mask::window(90, 0), Mask::FULL, Mask::CAUSAL, Mask::window(90, 30)];
    let batches = [(&equal, 0), (&mixed, 3), (&long, 1)];
    let calls = HEAD_DIMS.into_iter().enumerate().flat_map(|dims| batches.map(|batch| (dims, batch)));
    for ((index, dims), (lengths, shift)) in calls_for_tiles(calls) {
        let mask = masks[(index + shift) % masks.len()];
        assert_batch_matches(BF16.into(), dims, lengths, mask, &MemoryLayout::contiguous());
    }
}

/// Tiles like these over pages that are no multiple of 8 tokens, which two load warps copy row by row and a third one publishes.
#[test]
fn batches_of_many_tiles_over_small_pages_agree_with_the_reference() {
    let (equal, mixed) = (vec![(200, 200); 10], [(40, 40), (200, 700), (30, 20)].repeat(6));
    let masks = [Mask::window(90, 0), Mask::FULL, Mask::CAUSAL];
    for (index, dims) in calls_for_tiles(HEAD_DIMS.into_iter().chain([(512, 512)]).enumerate()) {
        let (lengths, page_size) = [(&equal, 1), (&mixed, 12)][index % 2];
        let layout = MemoryLayout::paged(KvLayout::PAGED[index % 2], page_size);
        assert_batch_matches(BF16.into(), dims, lengths, masks[index % masks.len()], &layout);
    }
}

/// The same in fp8, with more than twice as many keys as queries, which the tiles of three warpgroups take: warpgroups pass over
/// blocks at both ends of a tile, and those without rows over all of them.
#[test]
fn batches_of_many_fp8_tiles_agree_with_the_reference() {
    if skips_slow_test() {
        return;
    }
    let (equal, mixed) = (vec![(200, 410); 12], [(40, 40), (200, 600), (30, 20)].repeat(6));
    let long = vec![(600, 1300)];
    let masks = [Mask::CAUSAL, Mask::window(90, 30), Mask::FULL, Mask::window(90, 0)];
    let batches = [(&equal, 0), (&mixed, 1), (&long, 2)];
    let calls = FP8_HEAD_DIMS.into_iter().enumerate().flat_map(|dims| batches.map(|batch| (dims, batch)));
    for ((index, dims), (lengths, shift)) in calls_for_tiles(calls) {
        let dtypes = Dtypes::narrow([BF16, F16][shift % 2]);
        let mask = masks[(index + shift) % masks.len()];
        assert_batch_matches(dtypes, dims, lengths, mask, &MemoryLayout::contiguous());
    }
}

/// Lengths and heads of a batch, and its memory.
type ClusterBatch<'a> = (&'a [(usize, usize)], (usize, usize), &'a MemoryLayout);

/// Calls over packed keys of each D and Dv and of each batch. A call's number decides whether it has leftpad,
/// sinks, `seqused_k`, a workspace or starts out of order.
fn assert_cluster_calls_match(dims: &[(usize, usize)], batches: &[ClusterBatch], mask: Mask) {
    let calls = dims.iter().flat_map(|dims| batches.iter().map(move |batch| (dims, batch)));
    for (index, (&(head_dim, value_dim), &(lengths, heads, layout))) in calls_for_tiles(calls.enumerate()) {
        let seed = index as u64 + 1;
        let spec = BatchSpec {
            dtypes: [Dtypes::same(BF16), Dtypes::same(F16), Dtypes::wide(BF16, BF16)][seed as usize % 3],
            heads,
            head_dim,
            value_dim: Some(value_dim),
            lengths: lengths.to_vec(),
            mask,
            leftpad: seed % 4 == 1,
            sinks: seed % 3 == 1,
            seed,
            ..BatchSpec::default()
        };
        let memory_layout = MemoryLayout {
            seqused_k: seed % 4 == 3,
            workspace: [None, Some(9_000_001)][seed as usize % 2],
            seed,
            ..layout.clone()
        };
        let mut case = AttentionCase::flash(&spec.batch(), &memory_layout);
        if seed.is_multiple_of(4) {
            case.disorder(false, seed);
            case.compare_with_reference(InvalidMetadata::Clamped);
        } else {
            assert_named_matches_reference(&format!("clusters {seed}, {mask:?}"), &mut case);
        }
    }
}

/// Calls without a mask that Hopper computes in clusters of two CTAs: sequences of one length, whose tiles are all in pairs; and
/// others, where one of a cluster's CTAs has few rows or none, and sequences with few keys, one block, or none.
#[test]
fn calls_without_a_mask_agree_with_the_reference() {
    if skips_slow_test() {
        return;
    }
    let equal = MemoryLayout::contiguous().bare();
    // With 8 rows of no sequence.
    let around = MemoryLayout { rows_around: (3, 5), spare_pages: 7, ..equal.clone() };
    let dims = [(192, 192), (256, 256), (256, 200), (136, 176), (200, 64), (512, 512), (320, 448)];
    let batches = [
        (&[(128, 250); 5][..], (16, 2), &equal),
        (&[(256, 200); 4], (4, 1), &equal),
        // 512 on average.
        (&[(700, 300), (503, 0), (401, 77), (444, 96)], (16, 1), &equal),
        (&[(700, 300), (503, 0), (401, 77), (436, 96)], (16, 1), &around),
    ];
    assert_cluster_calls_match(&dims, &batches, Mask::FULL);
}

/// Causal calls that Hopper computes in clusters of two CTAs: the first tile of a pair ends before the second one, or has no keys.
#[test]
fn causal_calls_in_clusters_agree_with_the_reference() {
    if skips_slow_test() {
        return;
    }
    let bare = MemoryLayout::contiguous().bare();
    // Rows of K and V of no sequence make the keys four times as many as the rows.
    let spacious = MemoryLayout { spare_pages: 4096, ..bare.clone() };
    let batches = [
        (&[(128, 700); 3][..], (8, 2), &bare),
        // 128 on average.
        (&[(130, 900), (1, 70), (253, 1100)], (4, 1), &bare),
        (&[(512, 512), (512, 200)], (2, 1), &spacious),
    ];
    assert_cluster_calls_match(&[(192, 192), (256, 256), (200, 136), (512, 512)], &batches, Mask::CAUSAL);
}

/// Long and short sequences in pages that the fused kernel takes.
#[test]
fn fused_prefill_and_decode_agrees_with_the_reference() {
    if skips_slow_test() {
        return;
    }
    let lengths = [
        &[(300, 500), (1, 700), (2, 90), (0, 30), (1, 1300), (1, 17), (150, 150)][..],
        &[(1, 1), (260, 260), (1, 2000)],
        // No long sequences; below, no short ones.
        &[(0, 0), (1, 400), (1, 2), (0, 900), (1, 1000)],
        &[(90, 100), (200, 300), (0, 5)],
    ];
    let masks = [Mask::CAUSAL, Mask { window_left: 140, ..Mask::CAUSAL }, Mask::FULL, Mask::window(300, 5)];
    let dtypes = [Dtypes::same(BF16), Dtypes::same(F16), Dtypes::wide(BF16, BF16)];
    let heads = [((8, 2), 16), ((4, 4), 48), ((12, 1), 128), ((32, 1), 16)];
    let calls = dtypes.into_iter().flat_map(|dtypes| heads.map(|heads| (dtypes, heads)));
    let calls = calls.flat_map(|call| masks.into_iter().zip(lengths).map(move |batch| (call, batch)));
    for (seed, ((dtypes, (heads, page_size)), (mask, lengths))) in calls_for_tiles((1..).zip(calls)) {
        let spec = BatchSpec {
            dtypes,
            heads,
            head_dim: 128,
            mask,
            lengths: lengths.to_vec(),
            leftpad: seed % 3 == 0,
            sinks: seed % 2 == 0,
            scales: [
                ScaleKind::None,
                ScaleKind::None,
                if seed % 5 == 0 { ScaleKind::PerTensor } else { ScaleKind::None },
            ],
            seed,
            ..BatchSpec::default()
        };
        let memory_layout = MemoryLayout {
            rows_around: (3, 300),
            seqused_q: seed % 4 == 1,
            workspace: Some([9_000_001, 40_000, 1200][seed as usize % 3]),
            seed,
            ..MemoryLayout::paged(KvLayout::ALL[1 + seed as usize % 4], page_size)
        };
        assert_named_matches_reference(
            &format!("fused {seed}"),
            &mut AttentionCase::flash(&spec.batch(), &memory_layout),
        );
    }
}

/// More short sequences than decode CTAs: a CTA decodes several one after the other with the same mbarriers.
#[test]
fn many_fused_decode_sequences_agree_with_the_reference() {
    let decoded = (0..48).map(|i| (1 + i % 2, 3 + 37 * i % 190));
    let lengths: Vec<_> = std::iter::once((100, 3000)).chain(decoded).collect();
    for (dtypes, heads) in [(Dtypes::same(BF16), (16, 1)), (Dtypes::same(F16), (4, 1))] {
        let spec = BatchSpec {
            dtypes,
            heads,
            head_dim: 128,
            mask: Mask::CAUSAL,
            lengths: lengths.clone(),
            ..BatchSpec::default()
        };
        let memory_layout = MemoryLayout {
            rows_around: (3, 900),
            workspace: Some(9_000_001),
            ..MemoryLayout::paged(KvLayout::Interleaved, 16)
        };
        assert_named_matches_reference(&format!("{heads:?}"), &mut AttentionCase::flash(&spec.batch(), &memory_layout));
    }
}
