//! Gradients of sequences long enough for several key and query blocks of the kernels that are tuned for one GPU: pairwise
//! combinations of their options against the reference, on every device; and on their own GPU, that these kernels are
//! chosen and give the same bits in every run.

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

#[cfg(feature = "cuda")]
mod on_their_own_gpu {
    use super::{
        Alibi, BF16, BatchSpec, BiasForm, F16, F32, GradientCase, GradientOptions, Mask, MemoryLayout, large_workspace,
        of_both_types, portable_workspace,
    };
    use crate::support::device::{BufferPadding, Gpu};
    use crate::support::log_capture::{assert_logged, log};
    use crate::support::{AttentionCase, KeyBounds};

    /// D, Dv and the value of the kernels' axis `head_dim`.
    const HEAD_DIMS: [(usize, usize, &str); 6] = [
        (64, 64, "64"),
        (96, 96, "96"),
        (128, 128, "128"),
        (192, 128, "192x128"),
        (192, 192, "192"),
        (256, 256, "256"),
    ];

    /// The value of the kernels' axis `logits`, and the options that select it.
    const LOGITS: [(&str, f32, Alibi, KeyBounds, Option<BiasForm>); 6] = [
        ("none", 0.0, Alibi::Off, KeyBounds::None, None),
        ("softcap", 2.0, Alibi::Off, KeyBounds::None, None),
        ("alibi", 0.0, Alibi::PerHead, KeyBounds::None, None),
        ("key_ranges", 0.0, Alibi::Off, KeyBounds::Both, None),
        ("bias", 0.0, Alibi::Off, KeyBounds::None, Some(BiasForm::OWN)),
        ("bias_f32", 0.0, Alibi::Off, KeyBounds::None, Some(BiasForm { dtype: Some(F32), ..BiasForm::OWN })),
    ];

    /// Run under compute-sanitizer's slower tools: short, with a call of every kernel.
    #[test]
    fn tuned_backward_kernels_are_chosen() {
        let Some(gpu) = Gpu::with_tuned_kernels_or_skip() else { return };
        let log = log();
        for (dtype, name) in [(BF16, "bf16"), (F16, "f16")] {
            for ((head_dim, value_dim, dims), (logits, softcap, alibi, key_bounds, bias)) in
                HEAD_DIMS.into_iter().flat_map(|d| LOGITS.map(|logits| (d, logits)))
            {
                let has_ranges = key_bounds != KeyBounds::None;
                if (has_ranges || bias.is_some()) && head_dim > 128 {
                    continue;
                }
                // The first call per head dimension has more tiles than an H200 has SMs, and several query blocks in each.
                let is_first = (dtype, logits) == (BF16, "none");
                let (heads, lengths) = if is_first { (24, (900, 1000)) } else { (2, (200, 304)) };
                let (dtypes, heads, lengths) = (dtype.into(), (heads, heads), vec![lengths]);
                let value_dim = Some(value_dim);
                let spec =
                    BatchSpec { dtypes, heads, head_dim, value_dim, lengths, softcap, alibi, ..BatchSpec::default() };
                run(&gpu, &BatchSpec { key_bounds, bias, ..spec });
                let main = if head_dim <= 128 { "hopper_bwd" } else { "hopper_bwd_wide" };
                assert_logged(log, &format!("hopper_bwd_prepare_{name}_{head_dim} with"));
                assert_logged(log, &format!("{main}_{name}_{dims}_{logits} with"));
                if has_ranges {
                    assert_logged(log, &format!("hopper_bwd_plan_ranges_{dims} with"));
                }
            }
        }
        let runs_kernel = |spec: &BatchSpec, kernel: &str| {
            run(&gpu, spec);
            assert_logged(log, kernel);
        };
        let base = BatchSpec { dtypes: BF16.into(), heads: (2, 1), lengths: vec![(30, 40)], ..BatchSpec::default() };
        let both = BatchSpec { softcap: 2.0, alibi: Alibi::PerHead, head_dim: 128, ..base.clone() };
        runs_kernel(&both, "attention_bwd_dq_bf16_128_small_softcap_alibi with");
        let wide_both = BatchSpec { head_dim: 256, ..both };
        runs_kernel(&wide_both, "attention_bwd_dq_bf16_256_small_softcap_alibi with");
        let bounded = BatchSpec { key_bounds: KeyBounds::End, head_dim: 256, ..base.clone() };
        runs_kernel(&bounded, "attention_bwd_dq_bf16_256_key_ranges_softcap_alibi with");
        let one_kv_head = BatchSpec { heads: (16, 1), lengths: vec![(200, 240)], mask: Mask::CAUSAL, ..base.clone() };
        runs_kernel(&one_kv_head, "hopper_bwd_combine_bf16 with");
        for (head_dim, bias) in [(64, BiasForm::SHARED), (128, BiasForm { per_head: true, ..BiasForm::SHARED })] {
            let lengths = vec![(200, 304), (30, 40)];
            let shared = BatchSpec { head_dim, lengths, bias: Some(bias), ..base.clone() };
            for (spec, of_type) in of_both_types(shared).into_iter().zip(["16_bits", "f32"]) {
                runs_kernel(&spec, &format!("hopper_bwd_dbias_bf16_{head_dim}_{of_type} with"));
            }
        }
        // Rows of 301 keys are copied, each by a warp of eight; the batch has two empty sequences more.
        for (rows, form, head_dim, mask, copied) in
            [(160, BiasForm::OWN, 96, Mask::FULL, 3 * 2 * 160), (200, BiasForm::SHARED, 64, Mask::CAUSAL, 200)]
        {
            let odd = BatchSpec { head_dim, lengths: vec![(rows, 301)], bias: Some(form), mask, ..base.clone() };
            runs_kernel(&odd, &format!("copy_bias_rows with LaunchConfig {{ grid: [{}, 1, 1]", copied / 8));
        }
        // The portable kernels store the gradient of each pair's own bias where it belongs.
        for (head_dim, mask) in [(64, Mask::FULL), (96, Mask::CAUSAL)] {
            let bias = Some(BiasForm::OWN);
            let own = BatchSpec { head_dim, lengths: vec![(160, 301)], bias, mask, ..base.clone() };
            let bucket = if head_dim == 64 { "64" } else { "128" };
            runs_kernel(&own, &format!("attention_bwd_dq_from_ds_bf16_{bucket}_shifted with"));
        }
        let run_portable = |spec: &BatchSpec, kernels: &[&str]| {
            let layout = portable_workspace(spec);
            let case = GradientCase::of_any_results(AttentionCase::flash(&spec.batch(), &layout), GradientOptions::ALL);
            case.invocation().assert_logs(&gpu, kernels);
        };
        for (head_dim, keys) in [(64, 304), (128, 301)] {
            let few = BatchSpec { heads: (8, 1), head_dim, lengths: vec![(40, keys); 1], ..base.clone() };
            let shared = BatchSpec { bias: Some(BiasForm::SHARED), ..few };
            let layout = MemoryLayout { spare_seqs: 16, ..large_workspace() };
            let forward = AttentionCase::flash(&shared.batch(), &layout);
            let case = GradientCase::of_any_results(forward, GradientOptions::ALL);
            let from_ds = format!("attention_bwd_dq_from_ds_bf16_{head_dim}_aligned with");
            case.invocation().assert_logs(&gpu, &[&from_ds, "attention_bwd_dbias_sum_bf16 with"]);
            let odd = BatchSpec { head_dim, lengths: vec![(200, keys), (30, 40)], ..base.clone() };
            let of_shape = format!("attention_bwd_dq_bf16_{head_dim}_bias_aligned_none with");
            let summing = format!("attention_bwd_dbias_aligned_bf16_{head_dim} with");
            run_portable(&BatchSpec { bias: Some(BiasForm::SHARED), ..odd.clone() }, &[&of_shape, &summing]);
            let own = BatchSpec { bias: Some(BiasForm::OWN), ..odd };
            let rows = if keys == 301 { "shifted" } else { "aligned" };
            let dkdv = format!("attention_bwd_dkdv_bf16_{head_dim}_bias_{rows}_none with");
            let from_ds = format!("attention_bwd_dq_from_ds_bf16_{head_dim}_{rows} with");
            run_portable(&own, &["attention_bwd_delta_bf16 with", &dkdv, &from_ds]);
        }
        for (head_dim, of_dim) in [(192, "256"), (320, "512")] {
            for (form, keys, rows, other) in [
                (BiasForm::OWN, 304, "aligned", "attention_bwd_delta_bf16 with"),
                (BiasForm::OWN, 301, "shifted", "attention_bwd_delta_bf16 with"),
                (BiasForm::SHARED, 304, "aligned", "attention_bwd_dbias_sum_bf16 with"),
            ] {
                let wide = BatchSpec { head_dim, lengths: vec![(40, keys)], bias: Some(form), ..base.clone() };
                let forward = AttentionCase::flash(&wide.batch(), &large_workspace());
                let from_ds = format!("attention_bwd_dq_from_ds_bf16_{of_dim}_{rows} with");
                let dkdv = format!("attention_bwd_dkdv_bf16_{of_dim}_bias_large_none with");
                let case = GradientCase::of_any_results(forward, GradientOptions::ALL);
                case.invocation().assert_logs(&gpu, &[other, &dkdv, &from_ds]);
            }
        }
        let short = vec![(3, 40); 40];
        runs_kernel(
            &BatchSpec { heads: (8, 1), lengths: short, head_dim: 64, ..base },
            "attention_bwd_dq_bf16_64_small_none with",
        );
    }

    #[test]
    fn runs_have_the_same_bits() {
        // The emulator runs CTAs one after another.
        let real = |_: &Gpu| std::env::var_os("XLA_ATTENTION_EMULATOR").is_none();
        let Some(gpu) = Gpu::with_tuned_kernels_or_skip().filter(real) else { return };
        let beside = Gpu::first().unwrap();
        let load = BatchSpec { dtypes: BF16.into(), head_dim: 256, lengths: vec![(900, 900)], ..BatchSpec::default() };
        let load = any_results(&BatchSpec { heads: (6, 6), ..load }).invocation();
        let lengths: [&[(usize, usize)]; 4] = [
            &[(640, 640), (640, 640)],
            &[(700, 400), (130, 904), (1, 300), (500, 500)],
            &[(100, 100); 12],
            &[(2500, 2500)],
        ];
        let masks = [Mask::FULL, Mask::CAUSAL, Mask::sliding(300)];
        for (head_dim, shapes, launches) in [(64, 14, 100), (128, 14, 100), (96, 3, 20), (192, 3, 20), (256, 3, 20)] {
            for index in 0..shapes {
                let (lengths, mask) = (lengths[index % 4].to_vec(), masks[index % 3]);
                let (_, softcap, alibi, key_bounds, bias) = LOGITS[[0, 3, 1, 2, 4][index / 3]];
                let (dtypes, heads) = ([BF16, F16][index % 2].into(), [(8, 8), (8, 2)][index / 2 % 2]);
                let spec = BatchSpec { dtypes, heads, head_dim, lengths, mask, softcap, alibi, ..BatchSpec::default() };
                let case = any_results(&BatchSpec { key_bounds, bias, ..spec });
                for beside in [None, Some((&beside, &load))] {
                    case.invocation().assert_same_bits(&gpu, launches, 4, beside);
                }
            }
        }
    }

    fn any_results(spec: &BatchSpec) -> GradientCase {
        let memory_layout = MemoryLayout { workspace: Some(60_000_001), ..large_workspace() };
        GradientCase::of_any_results(AttentionCase::flash(&spec.batch(), &memory_layout), GradientOptions::ALL)
    }

    fn run(gpu: &Gpu, spec: &BatchSpec) {
        any_results(spec).invocation().run_on_gpu(gpu, BufferPadding::Redzones, 0).unwrap();
    }
}
