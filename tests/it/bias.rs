//! A bias of pairs of rows and keys over several tiles of rows and blocks of keys, of every form and alignment, against the
//! reference on every device, and against other ways to say the same.

use crate::support::{
    ALIBI, Alibi, Array, AttentionCase, BF16, BatchBias, BatchSpec, BiasForm, Dtypes, F16, F32, GradientCase,
    GradientOptions, Invocation, KeyBounds, Mask, MemoryLayout, Numbers, Random, ReferenceCase, Side,
    assert_named_matches_reference, calls_for_tiles, for_each_side, has_gradients,
};

/// Several tiles and blocks, one query over many keys, and more queries than keys.
const LENGTHS: [(usize, usize); 5] = [(150, 150), (1, 401), (70, 310), (40, 12), (9, 200)];

const HEADS: [(usize, usize); 4] = [(4, 2), (3, 1), (2, 2), (8, 1)];

fn spec(seed: usize) -> BatchSpec {
    // Rows of a bias of 401 and 301 keys begin at any element, those of 400 with a chunk of 16 bytes, those of 402 with a pair.
    let longest = [401, 400, 402][seed % 3];
    let lengths = LENGTHS.map(|(rows, keys)| (rows, if keys == 401 { longest } else { keys })).to_vec();
    BatchSpec {
        dtypes: [BF16, F32, F16][seed / 2 % 3].into(),
        heads: HEADS[seed % 4],
        head_dim: [64, 128, 40, 256, 96, 192, 512, 320][seed % 8],
        lengths,
        mask: [Mask::FULL, Mask::CAUSAL, Mask::window(90, 30), Mask::CAUSAL.top_left()][seed / 2 % 4],
        bias: Some(BiasForm::ALL[seed % BiasForm::ALL.len()]),
        leftpad: seed % 4 == 1,
        q_offset: seed % 7 == 2 && seed / 2 % 4 != 3,
        softcap: if seed % 5 == 2 { 2.5 } else { 0.0 },
        alibi: ALIBI[seed / 4 % ALIBI.len()],
        sinks: seed.is_multiple_of(2),
        seed: seed as u64,
        ..BatchSpec::default()
    }
}

fn layout(seed: usize) -> MemoryLayout {
    MemoryLayout {
        rows_around: (3, 5),
        seqused_q: seed % 4 == 2,
        seqused_k: seed % 3 == 1,
        workspace: [Some(19_000_001), None][seed % 2],
        seed: seed as u64,
        ..MemoryLayout::contiguous()
    }
}

#[test]
fn biases_over_several_blocks_agree_with_the_reference() {
    for seed in 0..30 {
        let spec = BatchSpec { batch_invariant: seed % 7 == 3, ..spec(seed) };
        let mut case = AttentionCase::flash(&spec.batch(), &layout(seed));
        assert_named_matches_reference(&format!("{seed}: {spec:?}"), &mut case);
    }
}

/// Biases of q's type and of f32 over several tiles of Hopper's kernels, in rows of a multiple of 16 bytes and in others, some of which are
/// copied where the workspace has room.
#[test]
fn biases_of_long_sequences_agree_with_the_reference() {
    for seed in 0..28 {
        let dtypes = [Dtypes::same(BF16), Dtypes::same(F16), Dtypes::wide(BF16, BF16)][seed % 3];
        let keys = [400, 401, 304, 402, 397][seed / 4 % 5];
        let spec = BatchSpec {
            dtypes,
            heads: [(2, 2), (4, 2), (8, 1), (3, 3)][seed / 2 % 4],
            head_dim: [64, 128, 256, 40, 192][seed % 5],
            lengths: vec![(150, 150), (1, keys), (270, 290), (140, 12), (0, 9), (9, 200)],
            mask: [Mask::FULL, Mask::CAUSAL, Mask::window(90, 30), Mask::CAUSAL.top_left()][seed / 3 % 4],
            bias: Some(BiasForm { dtype: (seed % 7 > 3).then_some(F32), ..BiasForm::OF_QUERY_TYPE[seed / 5 % 5] }),
            leftpad: seed % 4 == 1,
            sinks: seed % 3 == 1,
            seed: seed as u64,
            ..BatchSpec::default()
        };
        let workspace = [Some(19_000_001), None][usize::from(seed % 4 == 3)];
        let layout = MemoryLayout { workspace, seqused_q: seed % 4 == 2, seqused_k: seed % 3 == 2, ..layout(seed) };
        let mut case = AttentionCase::flash(&spec.batch(), &layout);
        assert_named_matches_reference(&format!("{seed}: {spec:?}"), &mut case);
    }
}

/// Few queries, whose keys are divided between CTAs: one tile of decode per sequence, several, and empty sequences.
#[test]
fn few_queries_over_many_keys_agree_with_the_reference() {
    let lengths: [&[(usize, usize)]; 4] = [
        &[(1, 700), (1, 33), (0, 20), (1, 2001), (1, 1)],
        &[(5, 2000), (0, 300), (16, 700), (1, 1500), (3, 2), (17, 640)],
        &[(9, 3001)],
        &[(70, 1803), (1, 1), (1, 2500)],
    ];
    for seed in calls_for_tiles(0..24_usize) {
        let dtypes = [Dtypes::same(BF16), Dtypes::same(F32), Dtypes::same(F16), Dtypes::wide(BF16, BF16)][seed % 4];
        let spec = BatchSpec {
            dtypes,
            heads: [(8, 2), (7, 1), (4, 4), (16, 1), (20, 1)][seed % 5],
            head_dim: [64, 128, 256, 80, 512][seed % 5],
            lengths: lengths[seed / 2 % 4].to_vec(),
            mask: [Mask::FULL, Mask::CAUSAL, Mask::window(900, 30), Mask::CAUSAL.top_left()][seed / 3 % 4],
            bias: Some(BiasForm::ALL[seed / 2 % BiasForm::ALL.len()]),
            q_offset: false,
            ..spec(seed)
        };
        let mut case = AttentionCase::flash(&spec.batch(), &layout(seed));
        assert_named_matches_reference(&format!("{seed}: {spec:?}"), &mut case);
    }
}

/// The lowest numbers of f32 and bf16, with which programs mask keys, are -inf in base 2. They hide keys, also all of a row.
#[test]
fn the_lowest_biases_hide_keys_as_minus_infinity_does() {
    let lengths = [(1, 5001), (3, 2000), (40, 700), (150, 290)];
    for (dtype, bias_dtype, head_dim) in [(F32, F32, 64), (BF16, BF16, 128), (BF16, F32, 64), (BF16, BF16, 256)] {
        for (rows, keys) in lengths {
            let (dtypes, lengths, bias) = (dtype.into(), vec![(rows, keys)], Some(BiasForm::SHARED));
            let spec = BatchSpec { dtypes, heads: (4, 2), head_dim, lengths, bias, ..BatchSpec::default() };
            let with = |hidden: f64| {
                let mut batch = BatchSpec { bias: None, ..spec.clone() }.batch();
                let of = |_, _, row: usize, key: usize| {
                    if row.is_multiple_of(2) || key.is_multiple_of(3) { hidden } else { 0.5 }
                };
                batch.bias = Some(BatchBias { dtype: bias_dtype, ..bias_of(&spec, of) });
                batch
            };
            let lowest = if bias_dtype == F32 { f64::from(f32::MIN) } else { f64::from(f32::from_bits(0xff7f_0000)) };
            let layout = MemoryLayout { workspace: Some(19_000_001), ..MemoryLayout::contiguous().bare() };
            let of_lowest = AttentionCase::flash(&with(lowest), &layout).invocation();
            let (_, bias) = of_lowest.operands.iter().find(|(name, _)| *name == "bias").unwrap();
            let infinite = with(f64::NEG_INFINITY);
            let calls = [
                AttentionCase::flash(&infinite, &layout).invocation(),
                GradientCase::store(&infinite, &layout, GradientOptions::ALL).invocation(),
            ];
            let calls = calls.map(|infinite| {
                let mut lowest = infinite.clone();
                lowest.operands.iter_mut().find(|(name, _)| *name == "bias").unwrap().1 = bias.clone();
                [lowest, infinite]
            });
            for_each_side(|side| {
                for [lowest, infinite] in &calls {
                    let what = format!("{dtype:?} {bias_dtype:?} {head_dim} {rows} over {keys}");
                    for (at, (one, other)) in results(lowest, side).iter().zip(results(infinite, side)).enumerate() {
                        assert!(one.values() == other.values(), "{what}: result {at} of {}", lowest.target);
                    }
                }
            });
        }
    }
}

#[test]
fn gradients_with_biases_over_several_blocks_agree_with_the_reference() {
    for seed in 0..20 {
        let spec = spec(seed);
        if !has_gradients(spec.dtypes.q, spec.head_dim) {
            continue;
        }
        let options = GradientOptions::from_seed(seed as u64 + 1);
        let mut case = GradientCase::store(&spec.batch(), &layout(seed), options);
        assert_named_matches_reference(&format!("{seed}: {spec:?}"), &mut case);
    }
}

/// Small sequences, for comparisons of two calls.
fn small(seed: usize) -> BatchSpec {
    BatchSpec { lengths: vec![(17, 33), (1, 20), (5, 5), (40, 64)], bias: None, q_offset: false, ..spec(seed) }
}

/// A bias `[sequences, Hq, rows, keys]` with these elements.
fn bias_of(spec: &BatchSpec, of: impl Fn(usize, usize, usize, usize) -> f64) -> BatchBias {
    let longest = |of: fn(&(usize, usize)) -> usize| spec.lengths.iter().map(of).max().unwrap();
    let (rows, keys, heads) = (longest(|of| of.0), longest(|of| of.1), spec.heads.0);
    let mut values = Vec::new();
    for (b, h, i) in (0..spec.lengths.len()).flat_map(|b| (0..heads * rows).map(move |x| (b, x / rows, x % rows))) {
        values.extend((0..keys).map(|j| F32.round(of(b, h, i, j))));
    }
    BatchBias { dtype: F32, per_sequence: true, heads, rows, keys, values }
}

/// Asserts that two calls give nearly the same numbers.
fn assert_similar(a: &Invocation, b: &Invocation, what: &str) {
    for_each_side(|side| {
        for (index, (a, b)) in results(a, side).iter().zip(results(b, side)).enumerate() {
            for (x, y) in a.values().into_iter().zip(b.values()) {
                let same = x.to_bits() == y.to_bits() || (x - y).abs() <= 2e-5 * x.abs().max(1.0);
                assert!(same, "{what}: result {index} has {x} and {y}");
            }
        }
    });
}

/// The results that both calls have.
fn results(call: &Invocation, side: Side) -> Vec<Array> {
    let names = call.results.iter().zip(call.results(side));
    names.filter(|(of, _)| !["workspace", "dbias"].contains(&of.name)).map(|(_, result)| result).collect()
}

#[test]
fn a_bias_equals_slopes_bounds_and_masks() {
    for seed in 0..4 {
        let plain = BatchSpec { dtypes: F32.into(), alibi: Alibi::Off, leftpad: false, ..small(seed) };
        let layout = MemoryLayout { seqused_q: false, ..layout(seed) };
        let with = |bias: BatchBias, spec: &BatchSpec| {
            let mut batch = spec.batch();
            batch.bias = Some(bias);
            batch
        };
        let slopes = BatchSpec { alibi: Alibi::PerSequence, ..plain.clone() };
        let batch = slopes.batch();
        let of_slopes = bias_of(&plain, |b, h, i, j| {
            let sequence = &batch.sequences[b];
            let position = plain.mask.position(i, sequence.len_q, sequence.len_k);
            -f64::from(sequence.slopes[h]) * (position - j as i64).abs() as f64
        });
        let bounds = BatchSpec { key_bounds: KeyBounds::Both, mask: Mask::FULL, ..plain.clone() };
        let bounded = bounds.batch();
        let of_bounds = bias_of(&plain, |b, _, i, j| {
            let range = bounded.sequences[b].key_ranges.get(i).copied().unwrap_or_default();
            if i64::from(range.0) <= j as i64 && (j as i64) < i64::from(range.1) { 0.0 } else { f64::NEG_INFINITY }
        });
        let unmasked = BatchSpec { mask: Mask::FULL, ..plain.clone() };
        // The same numbers in both calls, also where bounds or a mask hide a key and the bias does too.
        for (what, other, bias, of) in
            [("slopes", batch, of_slopes, &plain), ("bounds", bounded.clone(), of_bounds, &unmasked)]
        {
            let mut biased = with(bias, of);
            biased.sequences = other.sequences.clone();
            let forward = [&other, &biased].map(|batch| AttentionCase::flash(batch, &layout).invocation());
            assert_similar(&forward[0], &forward[1], what);
            let [a, b] =
                [&other, &biased].map(|batch| GradientCase::store(batch, &layout, GradientOptions::ALL).invocation());
            assert_similar(&a, &b, what);
        }
    }
}

#[test]
fn adding_a_number_to_the_biases_of_a_row_changes_only_its_lse() {
    for seed in 0..4 {
        let spec = BatchSpec { dtypes: F32.into(), sinks: false, bias: Some(BiasForm::ALL[1]), ..small(seed) };
        let batch = spec.batch();
        let mut shifted = batch.clone();
        let bias = shifted.bias.as_mut().unwrap();
        for (row, values) in bias.values.chunks_exact_mut(bias.keys).enumerate() {
            for x in values {
                *x = F32.round(*x + [0.5, -1.25, 3.0][row % 3]);
            }
        }
        let cases = [&batch, &shifted].map(|batch| AttentionCase::flash(batch, &layout(seed)));
        let [a, b] = cases.map(|case| case.assert_matches_reference());
        for (x, y) in a[0].values().into_iter().zip(b[0].values()) {
            assert!((x - y).abs() < 2e-5, "{x} and {y}");
        }
    }
}

/// A bias that sequences or heads share equals its copies, bit for bit, and its gradient is the sum of theirs.
#[test]
fn a_shared_bias_equals_its_copies() {
    let mut random = Random::new(3);
    for (seed, form) in BiasForm::ALL.into_iter().enumerate().filter(|(_, form)| !form.per_sequence) {
        let spec = BatchSpec { bias: Some(form), dtypes: F32.into(), ..small(seed) };
        let batch = spec.batch();
        let mut copied = batch.clone();
        let (count, heads) = (spec.lengths.len(), spec.heads.0);
        let bias = copied.bias.as_mut().unwrap();
        let of_head = bias.rows * bias.keys;
        let head = |h: usize| if bias.heads == 1 { 0 } else { h };
        let copies = (0..count * heads).flat_map(|copy| &bias.values[head(copy % heads) * of_head..][..of_head]);
        bias.values = copies.copied().collect();
        (bias.per_sequence, bias.heads) = (true, heads);
        let layout = MemoryLayout { spare_seqs: 0, workspace: Some(random.below(2) * 19_000_001), ..layout(seed) };
        let calls = [&batch, &copied].map(|batch| AttentionCase::flash(batch, &layout).invocation());
        let gradients =
            [&batch, &copied].map(|batch| GradientCase::store(batch, &layout, GradientOptions::ALL).invocation());
        for_each_side(|side| {
            assert!(results(&calls[0], side) == results(&calls[1], side), "{form:?}");
            assert!(results(&gradients[0], side) == results(&gradients[1], side), "{form:?}");
            let [shared, copies] = [0, 1].map(|call| gradients[call].results(side).pop().unwrap());
            let mut sums = vec![0.0; shared.values().len()];
            for (copy, values) in copies.values().chunks_exact(of_head).enumerate() {
                let heads_of_bias = shared.dims[1] as usize;
                let to = &mut sums[copy % heads % heads_of_bias * of_head..][..of_head];
                to.iter_mut().zip(values).for_each(|(to, x)| *to += x);
            }
            for (x, y) in shared.values().into_iter().zip(sums) {
                assert!((x - y).abs() < 1e-4, "{form:?}: {x} and {y}");
            }
        });
    }
}

/// Beside 16-bit operands it may come from other kernels.
#[test]
fn dbias_changes_no_other_gradient_of_f32() {
    for seed in 0..3 {
        let spec = BatchSpec { bias: Some(BiasForm::ALL[seed]), dtypes: F32.into(), ..small(seed) };
        let call = GradientCase::store(&spec.batch(), &layout(seed), GradientOptions::ALL).invocation();
        let mut without = call.clone();
        without.results.retain(|result| result.name != "dbias");
        for_each_side(|side| assert!(results(&call, side) == results(&without, side), "{}", call.description));
    }
}

#[cfg(feature = "cuda")]
mod on_their_own_gpu {
    use super::{AttentionCase, BF16, BatchSpec, BiasForm, F16, F32, Mask, MemoryLayout};
    use crate::support::device::Gpu;

    const F32_OWN: BiasForm = BiasForm { dtype: Some(F32), ..BiasForm::OWN };

    #[test]
    fn few_queries_are_decoded() {
        let Some(gpu) = Gpu::with_tuned_kernels_or_skip() else { return };
        for (dtype, head_dim, lengths, kernel) in [
            (BF16, 64, vec![(1, 900); 3], "bf16_64"),
            (F16, 128, vec![(5, 9002)], "f16_128"),
            (BF16, 128, vec![(1, 90); 70], "bf16_128"),
            (F32, 128, vec![(1, 901)], "f32_128"),
            (BF16, 512, vec![(2, 902)], "bf16_512"),
        ] {
            let (dtypes, bias) = (dtype.into(), Some(BiasForm::SHARED));
            let spec = BatchSpec { dtypes, heads: (4, 2), head_dim, lengths, bias, ..BatchSpec::default() };
            AttentionCase::flash(&spec.batch(), &MemoryLayout::contiguous())
                .invocation()
                .assert_logs(&gpu, &[&format!("attention_bias_decode_{kernel} with")]);
        }
    }

    /// Run under compute-sanitizer's slower tools: short, with a call of every kernel.
    #[test]
    fn tuned_kernels_with_a_bias_are_chosen() {
        let Some(gpu) = Gpu::with_tuned_kernels_or_skip() else { return };
        for (dtype, name) in [(BF16, "bf16"), (F16, "f16")] {
            let kernels = [
                (64, 504, BiasForm::OWN, "64"),
                (64, 501, BiasForm::OWN, "64_shifted"),
                (64, 501, F32_OWN, "64_f32_bias"),
                (128, 504, BiasForm::OWN, "128"),
                (128, 501, BiasForm::OWN, "128_shifted"),
                (128, 504, F32_OWN, "128_f32_bias"),
                (256, 504, BiasForm::OWN, "256"),
            ];
            for (head_dim, keys, bias, kernel) in kernels {
                let (dtypes, lengths, bias) = (dtype.into(), vec![(300, keys)], Some(bias));
                let spec = BatchSpec { dtypes, heads: (4, 2), head_dim, lengths, bias, ..BatchSpec::default() };
                AttentionCase::flash(&spec.batch(), &MemoryLayout::contiguous())
                    .invocation()
                    .assert_logs(&gpu, &[&format!("hopper_bias_{name}_{kernel} with")]);
            }
        }
        // Rows of 501 keys are copied, each by a warp of eight: 299 of four heads and of three sequences, of which two are empty.
        let (dtypes, lengths, bias) = (BF16.into(), vec![(299, 501)], Some(BiasForm::OWN));
        let base = BatchSpec { mask: Mask::FULL, heads: (4, 2), head_dim: 256, ..BatchSpec::default() };
        let spec = BatchSpec { dtypes, lengths, bias, ..base };
        let layout = MemoryLayout { workspace: Some(4_000_001), ..MemoryLayout::contiguous() };
        let call = AttentionCase::flash(&spec.batch(), &layout).invocation();
        call.assert_logs(&gpu, &["copy_bias_rows with LaunchConfig { grid: [449, 1, 1]"]);
    }
}
