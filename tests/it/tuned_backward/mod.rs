//! Gradients of sequences long enough for several key and query blocks of the kernels that are tuned for one GPU: pairwise
//! combinations of their options against the reference, on every device; and on their own GPU, that these kernels are
//! chosen and give the same bits in every run.

#[cfg(feature = "cuda")]
mod on_their_own_gpu;

use crate::support::{
    Alibi, AttentionCase, BF16, BatchSpec, BiasForm, Dtype, Dtypes, F16, F32, GradientCase, GradientOptions,
    InvalidMetadata, Mask, MemoryLayout, PairwiseOptions, ReferenceCase, YES_OR_NO, assert_calls_match_reference,
    assert_named_matches_reference, calls_for_tiles, skips_slow_test,
};

const DTYPES: [Dtype; 2] = [BF16, F16];

/// D and Dv at the limits of the buckets and between them.
const HEAD_DIMS: [(usize, usize); 11] = [
    (64, 64),
    (128, 128),
    (40, 64),
    (96, 96),
    (128, 72),
    (80, 88),
    (192, 128),
    (192, 192),
    (256, 256),
    (136, 40),
    (64, 200),
];

/// Lengths at and off block boundaries, more keys than queries and fewer, and rows that attend to no key.
const LONG: PairwiseOptions = PairwiseOptions {
    dtypes: &[Dtypes::same(BF16), Dtypes::same(F16)],
    head_dims: &HEAD_DIMS,
    heads: &[(1, 1), (4, 2), (3, 3), (5, 1), (12, 4), (8, 1)],
    work: &[
        &[(128, 128), (64, 256)],
        &[(130, 300), (1, 70), (33, 33), (77, 500)],
        &[(200, 90), (40, 0), (17, 129)],
        &[(600, 40)],
        &[(0, 9), (20, 20), (19, 21), (300, 300), (18, 18)],
        &[(127, 385), (257, 129)],
    ],
    workspace: &[Some(19_000_001)],
    dlse: YES_OR_NO,
    // The sum over this many rows cancels more than the naive formula's error bound allows, on every device.
    dsinks: &[false],
    gradients: &[None, Some(F32)],
    seed: 11,
    ..PairwiseOptions::BEYOND_BLOCKS
};

/// With ALiBi, which the kernels with a soft cap do not support.
const ALIBI: PairwiseOptions = PairwiseOptions {
    mask: &[Mask::FULL, Mask::CAUSAL, Mask::sliding(100)],
    work: &[&[(130, 300), (1, 70), (33, 33), (77, 500)], &[(127, 385), (257, 129)], &[(200, 90), (40, 0), (17, 129)]],
    softcap: &[0.0],
    alibi: &[Alibi::PerHead, Alibi::PerSequence],
    ..LONG
};

/// Packed keys, and a workspace that is large enough for all cases here.
fn large_workspace() -> MemoryLayout {
    MemoryLayout { workspace: Some(19_000_001), ..MemoryLayout::contiguous() }
}

#[test]
fn every_pair_agrees_with_the_reference() {
    if skips_slow_test() {
        return;
    }
    let calls = calls_for_tiles(LONG.calls().into_iter().chain(ALIBI.calls()));
    assert_calls_match_reference("long", calls, |(_, spec, memory_layout, options)| {
        GradientCase::store(&spec.batch(), &memory_layout, options)
    });
}

#[test]
fn calls_without_options_agree_with_the_reference() {
    if skips_slow_test() {
        return;
    }
    for dtype in DTYPES {
        let calls = HEAD_DIMS.into_iter().flat_map(|d| [(d, Mask::FULL), (d, Mask::CAUSAL)]);
        for ((head_dim, value_dim), mask) in calls_for_tiles(calls) {
            let lengths = vec![(129, 129), (6, 77), (90, 460), (300, 270)];
            let value_dim = Some(value_dim);
            let spec = BatchSpec {
                dtypes: dtype.into(),
                head_dim,
                value_dim,
                heads: (4, 2),
                lengths,
                mask,
                ..BatchSpec::default()
            };
            ReferenceCase::assert_matches_reference(&GradientCase::store(
                &spec.batch(),
                &large_workspace(),
                GradientOptions::MINIMAL,
            ));
        }
    }
}

/// Query heads are split where there are few tiles. Some rows are of no sequence, some keys are not seen.
#[test]
fn split_query_heads_agree_with_the_reference() {
    let calls = [
        ((16, 1), BF16, (128, 128), Mask::CAUSAL, 0.0, Alibi::Off, None),
        ((16, 2), F16, (64, 40), Mask::CAUSAL, 3.0, Alibi::Off, Some(F32)),
        ((8, 1), BF16, (72, 96), Mask::CAUSAL, 0.0, Alibi::PerHead, None),
        ((16, 4), F16, (128, 128), Mask::CAUSAL, 0.0, Alibi::Off, None),
        ((24, 8), BF16, (96, 96), Mask::FULL, 0.0, Alibi::Off, None),
        ((16, 8), BF16, (128, 64), Mask::sliding(60), 0.0, Alibi::Off, Some(F32)),
        ((16, 1), BF16, (192, 192), Mask::CAUSAL, 0.0, Alibi::Off, None),
        ((12, 3), F16, (256, 200), Mask::FULL, 2.0, Alibi::Off, Some(F32)),
        ((32, 4), BF16, (192, 128), Mask::sliding(70), 0.0, Alibi::PerHead, None),
        ((4, 2), BF16, (256, 256), Mask::CAUSAL, 0.0, Alibi::Off, Some(F32)),
        ((20, 4), BF16, (128, 128), Mask::CAUSAL, 0.0, Alibi::Off, None),
        ((14, 2), F16, (192, 128), Mask::CAUSAL, 0.0, Alibi::Off, Some(F32)),
        // Parts of two heads, and a last one of one.
        ((19, 1), BF16, (128, 128), Mask::CAUSAL, 0.0, Alibi::Off, None),
        ((34, 2), F16, (64, 96), Mask::sliding(60), 0.0, Alibi::PerHead, Some(F32)),
        ((17, 1), BF16, (192, 128), Mask::CAUSAL, 0.0, Alibi::Off, None),
    ];
    for (heads, dtype, (head_dim, value_dim), mask, softcap, alibi, gradients) in calls {
        let (dtypes, value_dim) = (dtype.into(), Some(value_dim));
        let lengths = vec![(170, 240), (0, 9), (130, 20), (45, 131)];
        let spec =
            BatchSpec { dtypes, heads, head_dim, value_dim, lengths, mask, softcap, alibi, ..BatchSpec::default() };
        let layout = MemoryLayout { rows_around: (2, 3), ..large_workspace() };
        let options = GradientOptions { dtype: gradients, ..GradientOptions::ALL };
        assert_named_matches_reference(
            &format!("{heads:?} heads"),
            &mut GradientCase::store(&spec.batch(), &layout, options),
        );
    }
}

/// Biases of every form that the fastest kernels take, of q's type and of f32, in rows of a multiple of 16 bytes and in others.
#[test]
fn biases_agree_with_the_reference() {
    for (seed, spec) in calls_for_tiles(0..20).flat_map(|seed| of_both_types(biased(seed)).map(|spec| (seed, spec))) {
        assert_biased_matches_reference(&spec, seed, large_workspace().workspace);
    }
}

/// The same by the portable kernels on every GPU: the workspace has room for delta and a copy of the bias, but not for dQ in f32.
#[test]
fn biases_of_portable_kernels_agree_with_the_reference() {
    for seed in calls_for_tiles(0..20) {
        let spec = biased(seed);
        assert_biased_matches_reference(&spec, seed, portable_workspace(&spec).workspace);
    }
}

/// The same by the portable kernels with room for dS of all pairs, which dK and dV store for dQ and the gradient of the bias: Hopper's
/// do not take few queries per slot in groups of four heads.
#[test]
fn biases_with_stored_ds_agree_with_the_reference() {
    for seed in calls_for_tiles(0..15) {
        let any = BatchSpec {
            heads: [(4, 1), (8, 2), (8, 1)][seed % 3],
            lengths: vec![(70, 130), (1, [136, 141][seed % 2]), (33, 65), (40, 3), (0, 9), (2, 131)],
            ..biased(seed)
        };
        let layout = MemoryLayout { rows_around: (3, 5), spare_seqs: 16, seed: seed as u64, ..large_workspace() };
        for spec in of_both_types(any) {
            let mut case = GradientCase::store(&spec.batch(), &layout, GradientOptions::ALL);
            assert_named_matches_reference(&format!("{seed}: {spec:?}"), &mut case);
        }
    }
}

/// A bias of f32, whose dS is stored where it is the gradient and in the workspace, if that has room.
#[test]
fn biases_of_f32_agree_with_the_reference() {
    for seed in calls_for_tiles(0..30) {
        let any = biased(seed + seed / 5);
        let head_dim = [64, 128, 96, 40, 72, 256, 136, 512][seed % 8];
        let lengths = match seed % 3 {
            0 => any.lengths.clone(),
            1 => vec![[(129, 257), (40, 260), (258, 130), (65, 129), (20, 140)][seed % 5]; 3],
            _ => vec![(70, 130), (1, [136, 141][seed % 2]), (33, 65), (40, 3), (0, 9), (2, 131)],
        };
        let bias = any.bias.map(|form| BiasForm { dtype: Some(F32), ..form });
        let spec = BatchSpec { head_dim, lengths, bias, leftpad: false, ..any };
        let memory = [large_workspace(), portable_workspace(&spec)][usize::from(seed % 5 == 4)].clone();
        let memory = MemoryLayout { rows_around: (3, 5), seed: seed as u64, ..memory };
        let memory = if seed % 3 == 1 { memory.bare() } else { memory };
        let options = [GradientOptions::ALL, GradientOptions::MINIMAL][usize::from(seed % 7 == 6)];
        let mut case = GradientCase::store(&spec.batch(), &memory, options);
        assert_named_matches_reference(&format!("{seed}: {spec:?}"), &mut case);
    }
}

/// The same past 128 columns, where dS of shared rows is stored if it has room. Sequences begin within blocks of keys, or all have the
/// rows and keys of the bias and begin with blocks.
#[test]
fn biases_of_wide_heads_agree_with_the_reference() {
    for seed in calls_for_tiles(0..25) {
        let begin_with_blocks = seed / 2 % 2 == 1;
        let lengths = if begin_with_blocks {
            vec![[(20, 141), (136, 136), (40, 261), (129, 257), (9, 17)][seed % 5]; 3]
        } else {
            vec![(70, 130), (1, [136, 141][seed % 2]), (33, 65), (40, 3), (0, 9), (2, 131)]
        };
        let dim = [256, 512, 136, 200, 320][seed / 3 % 5];
        let (head_dim, value_dim) = [(dim, None), (dim, Some(72)), (72, Some(dim))][[0, 0, 2, 0, 1][seed % 5]];
        let any = biased(seed + seed / 5);
        let bias = if seed % 2 == 0 { Some(BiasForm::OWN) } else { any.bias };
        let spec = BatchSpec {
            heads: [(4, 1), (2, 2), (3, 3)][seed % 3],
            head_dim,
            value_dim,
            lengths,
            bias,
            leftpad: false,
            ..any
        };
        let plain = [large_workspace(), portable_workspace(&spec)][usize::from(seed % 7 == 5)].clone();
        let memory = if begin_with_blocks {
            plain.bare()
        } else {
            MemoryLayout { rows_around: (3, 5), spare_seqs: 16, seed: seed as u64, ..plain }
        };
        let mut case = GradientCase::store(&spec.batch(), &memory, GradientOptions::ALL);
        assert_named_matches_reference(&format!("{seed}: {spec:?}"), &mut case);
    }
}

/// Sequences that all have the rows and keys of the bias: blocks of the kernels begin with them. Other starts of the same rows are of
/// sequences that begin within blocks, and that are longer than the bias.
#[test]
fn biases_of_equal_sequences_agree_with_the_reference() {
    for seed in calls_for_tiles(0..20) {
        let spec = BatchSpec {
            heads: [(4, 1), (8, 2), (3, 3)][seed % 3],
            lengths: vec![[(20, 141), (141, 141), (40, 261), (13, 133), (9, 17)][seed % 5]; 3],
            leftpad: false,
            ..biased(seed + seed / 5)
        };
        let memory = [portable_workspace(&spec), large_workspace()][seed / 2 % 2].clone().bare();
        let mut forward = AttentionCase::flash(&spec.batch(), &memory);
        forward.name = format!("{seed}: {spec:?}");
        GradientCase::of(forward.clone(), GradientOptions::ALL).assert_matches_reference();
        for shift in [-3, 5] {
            let mut moved = forward.clone();
            moved.cu_seqlens_k[1] += shift;
            moved.cu_seqlens_k[2] -= [0, 8, 2 * shift][seed % 3];
            moved.cu_seqlens_q[1] += [0, shift][seed % 2];
            moved.name = format!("{:?}, {:?}: {}", moved.cu_seqlens_q, moved.cu_seqlens_k, moved.name);
            GradientCase::of(moved, GradientOptions::ALL).compare_with_reference(InvalidMetadata::Clamped);
        }
    }
}

/// Under a causal mask the first rows of a sequence with more rows than keys attend to none. A block of dQ from dS has no other rows, and some
/// of them are in a block of the kernel for dQ with rows that attend to keys.
#[test]
fn blocks_of_rows_without_keys_have_gradients_of_zero() {
    for head_dim in [64, 128] {
        let (lengths, mask, bias) = (vec![(300, 130); 2], Mask::CAUSAL, Some(BiasForm::OWN));
        let heads = (2, 2);
        let own = BatchSpec { dtypes: BF16.into(), heads, head_dim, lengths, mask, bias, ..BatchSpec::default() };
        for spec in of_both_types(own) {
            let case = GradientCase::store(&spec.batch(), &portable_workspace(&spec).bare(), GradientOptions::ALL);
            ReferenceCase::assert_matches_reference(&case);
        }
    }
}

/// Sequences whose last blocks of keys and of packed query rows have one or two, which are computed one after the other.
#[test]
fn biases_with_blocks_of_few_rows_agree_with_the_reference() {
    for seed in calls_for_tiles(0..15) {
        let spec = BatchSpec {
            heads: [(2, 2), (4, 2), (3, 3)][seed % 3],
            lengths: vec![[(129, 257), (130, 130), (65, 129), (258, 258), (129, 131)][seed % 5]; 1 + seed % 3],
            leftpad: false,
            ..biased(seed + seed / 5)
        };
        let memory = [portable_workspace(&spec), large_workspace()][seed / 2 % 2].clone().bare();
        let mut forward = AttentionCase::flash(&spec.batch(), &memory);
        forward.name = format!("{seed}: {spec:?}");
        GradientCase::of(forward, GradientOptions::ALL).assert_matches_reference();
    }
}

/// The same of keys that the bias has not: the last sequence is longer than that, in rows that begin anywhere and with chunks.
#[test]
fn a_bias_without_the_few_keys_of_a_block_agrees_with_the_reference() {
    for (lengths, start) in [([(20, 129), (20, 129)], 126), ([(20, 136), (20, 122)], 112)] {
        let bias = Some(BiasForm::OWN);
        let spec =
            BatchSpec { dtypes: BF16.into(), heads: (2, 2), lengths: lengths.into(), bias, ..BatchSpec::default() };
        let mut forward = AttentionCase::flash(&spec.batch(), &portable_workspace(&spec).bare());
        forward.cu_seqlens_k[1] = start;
        GradientCase::of(forward, GradientOptions::ALL).compare_with_reference(InvalidMetadata::Clamped);
    }
}

/// More sequences than the kernels for the gradient of a shared bias describe at a time.
#[test]
fn a_bias_of_many_sequences_agrees_with_the_reference() {
    for (seed, form) in BiasForm::OF_QUERY_TYPE.into_iter().enumerate() {
        let lengths: Vec<_> = (0..53).map(|i| if i % 9 == 7 { (130 + i % 40, 150) } else { (i % 7, i % 30) }).collect();
        let spec = BatchSpec {
            dtypes: DTYPES[seed % 2].into(),
            heads: [(2, 1), (3, 3)][seed / 2 % 2],
            head_dim: [64, 96][seed / 2 % 2],
            lengths,
            mask: [Mask::FULL, Mask::CAUSAL][seed % 2],
            bias: Some(form),
            seed: seed as u64,
            ..BatchSpec::default()
        };
        for memory in [large_workspace(), portable_workspace(&spec)] {
            let mut case = GradientCase::store(&spec.batch(), &memory, GradientOptions::ALL);
            assert_named_matches_reference(&format!("{seed}: {spec:?}"), &mut case);
        }
    }
}

/// The call, whose bias is of q's type, and the same with a bias of f32.
fn of_both_types(spec: BatchSpec) -> [BatchSpec; 2] {
    let bias = spec.bias.map(|form| BiasForm { dtype: Some(F32), ..form });
    [spec.clone(), BatchSpec { bias, ..spec }]
}

/// Sequences with a bias, of several tiles of keys and rows and of few.
fn biased(seed: usize) -> BatchSpec {
    let masks = [Mask::FULL, Mask::CAUSAL, Mask::window(90, 30), Mask::CAUSAL.top_left()];
    let heads = [(2, 2), (4, 2), (8, 1), (3, 3)];
    let keys = [400, 401, 304, 402, 397][seed / 4 % 5];
    BatchSpec {
        dtypes: DTYPES[seed % 2].into(),
        heads: heads[seed / 2 % 4],
        head_dim: [64, 128, 96, 40, 72][seed % 5],
        lengths: vec![(150, 150), (1, keys), (70, 290), (140, 12), (0, 9), (9, 200)],
        mask: masks[seed / 3 % 4],
        bias: Some(BiasForm::OF_QUERY_TYPE[seed / 5 % 5]),
        leftpad: seed % 4 == 1,
        sinks: seed % 3 == 1,
        seed: seed as u64,
        ..BatchSpec::default()
    }
}

/// A workspace with room for delta and a copy of the bias, but for no more than a part of what Hopper's kernels take.
fn portable_workspace(spec: &BatchSpec) -> MemoryLayout {
    let plain = large_workspace();
    let bias = spec.batch().bias.expect("it has one");
    let sequences = if bias.per_sequence { spec.lengths.len() + plain.spare_seqs } else { 1 };
    let rows: usize = spec.lengths.iter().map(|(rows, _)| rows + 2).sum();
    let copy = 2 * sequences * bias.heads * bias.rows * bias.keys.next_multiple_of(8);
    MemoryLayout { workspace: Some(copy + 20 * 4 * spec.heads.0 * rows), ..plain }
}

fn assert_biased_matches_reference(spec: &BatchSpec, seed: usize, workspace: Option<usize>) {
    let layout = MemoryLayout {
        rows_around: (3, 5),
        seqused_q: seed % 4 == 2,
        seqused_k: seed % 3 == 2,
        seed: seed as u64,
        workspace,
        ..large_workspace()
    };
    let options = [GradientOptions::ALL, GradientOptions::MINIMAL][usize::from(seed % 7 == 6)];
    let mut case = GradientCase::store(&spec.batch(), &layout, options);
    assert_named_matches_reference(&format!("{seed}: {spec:?}"), &mut case);
}

#[test]
fn small_weights_and_large_scores_lose_nothing() {
    // With logits of -200 and less, a missing key would outweigh all others if it were not masked.
    let cases = [(BF16, 30.0, 0.125), (F16, 100.0, 1.0), (BF16, 300.0, 1.0), (F16, 0.0, 1.0)];
    for ((dtype, sharpness, scale), head_dim) in cases.into_iter().flat_map(|case| [(case, 64), (case, 192)]) {
        let lengths = vec![(150, 400), (60, 60), (65, 129)];
        let spec = BatchSpec { dtypes: dtype.into(), head_dim, sharpness, lengths, ..BatchSpec::default() };
        let batch = spec.batch().with_config(|config| config.softmax_scale = scale);
        let mut case = GradientCase::store(&batch, &large_workspace(), GradientOptions::ALL);
        assert_named_matches_reference(&format!("{dtype:?}, scale {scale}, sharpness {sharpness}"), &mut case);
    }
}

#[test]
fn gradients_of_sinks_agree_with_the_reference() {
    for (dtype, head_dim) in [(BF16, 64), (F16, 128), (BF16, 256)] {
        let lengths = vec![(1, 150), (30, 64), (9, 2)];
        let spec = BatchSpec { dtypes: dtype.into(), head_dim, lengths, sinks: true, ..BatchSpec::default() };
        ReferenceCase::assert_matches_reference(&GradientCase::store(
            &spec.batch(),
            &large_workspace(),
            GradientOptions::ALL,
        ));
    }
}

/// More sequences than the planning CTA has threads, most of them without a row.
#[test]
fn many_sequences_agree_with_the_reference() {
    let lengths: Vec<_> = (0..700).map(|i| if i % 90 == 7 { (i % 70, 150) } else { (i % 3 % 2, i % 5) }).collect();
    for head_dim in [64, 192] {
        let lengths = lengths.clone();
        let spec = BatchSpec { dtypes: BF16.into(), heads: (2, 1), head_dim, lengths, ..BatchSpec::default() };
        ReferenceCase::assert_matches_reference(&GradientCase::store(
            &spec.batch(),
            &large_workspace(),
            GradientOptions::ALL,
        ));
    }
}

#[test]
fn no_sequence_at_all_gives_zeros() {
    for head_dim in [64, 192] {
        let spec = BatchSpec { dtypes: BF16.into(), head_dim, lengths: vec![], ..BatchSpec::default() };
        ReferenceCase::assert_matches_reference(&GradientCase::store(
            &spec.batch(),
            &MemoryLayout { rows_around: (2, 3), ..large_workspace() },
            GradientOptions::ALL,
        ));
    }
}
