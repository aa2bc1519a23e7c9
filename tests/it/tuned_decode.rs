//! Decode by clusters, which takes few sequences on Hopper: all pairs of the options that matter to it and tiles that are
//! split in every way, against the reference on every device; and on Hopper, that its kernels were launched. With the
//! emulator's 4 SMs clusters have up to three CTAs, with `XLA_ATTENTION_EMULATOR_SMS=132` up to eight.

use crate::attention::metadata::corrupt;
use crate::support::{
    ALIBI, AttentionCase, BF16, BatchSpec, Dtypes, F8E4M3FN, F8E5M2, F16, I8, InvalidMetadata, KvLayout, Mask,
    MaxSeqlenHints, MemoryLayout, PagedUpdateCase, PairwiseOptions, ReferenceCase, ScaleKind,
    assert_calls_match_reference, assert_named_matches_reference, skips_slow_test,
};

const DTYPES: [Dtypes; 2] = [Dtypes::same(BF16), Dtypes::same(F16)];

/// Caches of 8 bits, without and with a scale per row.
const EIGHT_BITS: [Dtypes; 6] = [
    Dtypes::over(BF16, F8E4M3FN),
    Dtypes::scaled(BF16, I8, BF16),
    Dtypes::over(F16, F8E5M2),
    Dtypes::scaled(F16, F8E4M3FN, F16),
    Dtypes::narrow(BF16),
    Dtypes::scaled(F16, I8, F16),
];

/// The buckets, dimensions between them, and D other than Dv.
const HEAD_DIMS: [(usize, usize); 6] = [(64, 64), (128, 128), (256, 256), (40, 40), (96, 72), (192, 128)];

/// Few and several queries per sequence, empty sequences, and keys of one block, of one CTA and of a whole cluster.
const SHORT: PairwiseOptions = PairwiseOptions {
    dtypes: &[
        DTYPES[0],
        DTYPES[1],
        Dtypes::wide(BF16, BF16),
        Dtypes::wide(F16, F16),
        EIGHT_BITS[0],
        EIGHT_BITS[2],
        EIGHT_BITS[4],
        Dtypes::wide(BF16, F8E4M3FN),
    ],
    head_dims: &HEAD_DIMS,
    heads: &[(1, 1), (4, 1), (8, 2), (6, 3)],
    work: &[
        &[(1, 1300)],
        &[(3, 700), (1, 0), (2, 130), (0, 60), (1, 17)],
        &[(1, 128), (1, 384), (1, 1), (1, 640)],
        &[(2, 1), (1, 2200), (1, 40)],
    ],
    layout: &KvLayout::ALL,
    page_size: &[0, 1, 8, 16, 24, 100, 256],
    alibi: ALIBI,
    scales: &[[ScaleKind::None; 3], [ScaleKind::PerTensor; 3], [ScaleKind::PerHead; 3]],
    hints: &[MaxSeqlenHints::RoundedUp],
    workspace: &[None, Some(9_000_001)],
    seed: 11,
    ..PairwiseOptions::BEYOND_BLOCKS
};

#[test]
fn every_pair_agrees_with_the_reference() {
    if skips_slow_test() {
        return;
    }
    assert_calls_match_reference("short", SHORT.calls(), |(_, spec, memory_layout, _)| {
        AttentionCase::flash(&spec.batch(), &memory_layout)
    });
}

/// A batch of one query per sequence over contexts of these lengths.
fn decode(lengths: &[usize], seed: u64) -> BatchSpec {
    BatchSpec {
        dtypes: DTYPES[seed as usize % 2],
        heads: [(4, 1), (2, 2), (16, 1)][seed as usize % 3],
        head_dim: [128, 64, 256][seed as usize / 3 % 3],
        mask: Mask::CAUSAL,
        lengths: lengths.iter().map(|&length| (1, length)).collect(),
        sinks: seed % 4 == 1,
        seed,
        ..BatchSpec::default()
    }
}

/// Contexts around the sizes at which work moves to another CTA; tiles that two, three and all CTAs of a cluster split, that
/// end where a range ends, and several in a CTA.
fn contexts(chunk: usize) -> Vec<Vec<usize>> {
    let mut cases: Vec<Vec<usize>> = (1..=9).flat_map(|n| [vec![n * chunk - 1], vec![n * chunk + 1]]).collect();
    cases.extend((1..=8).map(|n| vec![chunk; n]));
    cases.extend([
        vec![1024; 2],
        vec![300, 3000, 700, 100],
        vec![0, 512, 0, 0, 640, 0],
        vec![2000, 1, 1, 1, 1],
        vec![1; 14],
        vec![512; 9],
        (0..16).map(|n| n * 63).collect(),
        vec![384; 8],
        vec![100, 1800, 100],
        vec![0; 3],
    ]);
    cases
}

#[test]
fn ranges_of_every_kind_agree_with_the_reference() {
    if skips_slow_test() {
        return;
    }
    for (seed, lengths) in contexts(128).into_iter().enumerate() {
        let spec = decode(&lengths, seed as u64);
        let memory_layout =
            MemoryLayout { page_size: [16, 1, 64, 20][seed % 4], spare_seqs: seed % 3, ..MemoryLayout::default() };
        assert_named_matches_reference(
            &format!("ranges {seed}"),
            &mut AttentionCase::paged(&spec.batch(), &memory_layout),
        );
        // Every sequence has the key of its query.
        let with_new_keys: Vec<usize> = lengths.iter().map(|&length| length.max(1)).collect();
        PagedUpdateCase::new(&decode(&with_new_keys, seed as u64).batch(), &memory_layout).assert_matches_reference();
    }
}

#[test]
fn ranges_of_every_kind_over_caches_of_8_bits_agree_with_the_reference() {
    if skips_slow_test() {
        return;
    }
    for (seed, lengths) in contexts(256).into_iter().enumerate() {
        let dtypes = EIGHT_BITS[seed / 3 % 6];
        let spec = BatchSpec { dtypes, ..decode(&lengths, seed as u64) };
        let memory_layout =
            MemoryLayout { page_size: [16, 1, 64, 20, 32][seed % 5], spare_seqs: seed % 3, ..MemoryLayout::default() };
        assert_named_matches_reference(
            &format!("ranges {seed}"),
            &mut AttentionCase::paged(&spec.batch(), &memory_layout),
        );
    }
}

#[test]
fn hostile_metadata_does_not_affect_valid_sequences() {
    if skips_slow_test() {
        return;
    }
    for seed in 0..48 {
        // On Hopper the second batch has a cluster per sequence.
        let lengths: [&[usize]; 2] = [&[300, 40, 1200, 16, 129], &[300, 40, 900, 16, 129, 1, 64, 128, 500, 7]];
        for dtypes in [DTYPES[seed as usize % 2], EIGHT_BITS[seed as usize % 6]] {
            let spec = BatchSpec { dtypes, ..decode(lengths[seed as usize / 24], seed) };
            let mut case = AttentionCase::paged(&spec.batch(), &MemoryLayout::default());
            corrupt(&mut case, seed);
            case.compare_with_reference(InvalidMetadata::Unspecified);
        }
    }
}

#[cfg(feature = "cuda")]
mod on_their_own_gpu {
    use super::{
        AttentionCase, BF16, BatchSpec, DTYPES, Dtypes, F8E4M3FN, F8E5M2, F16, I8, Mask, MemoryLayout, decode,
    };
    use crate::support::device::Gpu;

    /// Short, with a call of every variant.
    #[test]
    fn cluster_decode_is_chosen() {
        let Some(gpu) = Gpu::with_tuned_kernels_or_skip() else { return };
        let (few, many) = (decode(&[500, 0, 130, 1, 260], 0), decode(&[700, 0, 130, 1, 260, 5, 64, 900, 2, 30], 0));
        let fit_many = Gpu::sms() > many.lengths.len();
        let expect = |spec: &BatchSpec, variant: &str| {
            AttentionCase::paged(&spec.batch(), &MemoryLayout::default())
                .invocation()
                .assert_logs(&gpu, &[&format!("cluster_decode_{variant} with")]);
        };
        for head_dim in [64, 128, 256] {
            for (dtypes, variant) in [
                (Dtypes::over(BF16, F8E4M3FN), format!("fp8_fp8_{head_dim}_softcap_alibi_any")),
                (Dtypes::over(F16, F8E5M2), format!("fp8_fp8_{head_dim}_softcap_alibi_any")),
                (Dtypes::scaled(BF16, F8E4M3FN, BF16), format!("token_scales_fp8_{head_dim}")),
                (Dtypes::scaled(F16, I8, F16), format!("token_scales_i8_{head_dim}")),
            ] {
                expect(&BatchSpec { dtypes, head_dim, heads: (4, 1), ..few.clone() }, &variant);
            }
            if fit_many {
                let spec = BatchSpec { dtypes: Dtypes::over(BF16, F8E4M3FN), head_dim, heads: (4, 1), ..many.clone() };
                expect(&spec, &format!("fp8_fp8_{head_dim}_softcap_alibi_any_per_sequence"));
            }
        }
        for (dtypes, name) in DTYPES.into_iter().zip(["bf16", "f16"]) {
            for head_dim in [64, 128, 256] {
                for (softcap, mask, of_few, of_many) in [
                    (0.0, Mask::CAUSAL, "none_plain", "none_per_sequence"),
                    (0.0, Mask { window_left: 500, ..Mask::CAUSAL }, "none_any", "none_any_per_sequence"),
                    (2.5, Mask::CAUSAL, "softcap_alibi_any", "softcap_alibi_any_per_sequence"),
                ] {
                    let spec = BatchSpec { dtypes, head_dim, softcap, mask, heads: (4, 1), ..few.clone() };
                    expect(&spec, &format!("{name}_{head_dim}_{of_few}"));
                    if fit_many {
                        let lengths = many.lengths.clone();
                        expect(&BatchSpec { lengths, ..spec }, &format!("{name}_{head_dim}_{of_many}"));
                    }
                }
            }
        }
    }
}
