//! Decode of so many short sequences that each warp computes tiles alone, against the reference on every device. Which calls these
//! are is tested in `src/cuda/attention/tiles.rs`; one long sequence, or one with two queries, makes CTAs compute all tiles.

use crate::attention::metadata::corrupt;
use crate::support::{
    AttentionCase, BF16, BatchSpec, Dtypes, F8E4M3FN, F8E5M2, F16, InvalidMetadata, KvLayout, Mask, MaxSeqlenHints,
    MemoryLayout, PagedUpdateCase, ReferenceCase, ScaleKind, assert_named_matches_reference, on_emulator, runs_on_cpu,
};
use crate::tuned_split_kv;

/// Sequences of a batch, more than clusters take.
const SEQS: usize = 40;

const DTYPES: [Dtypes; 3] = [Dtypes::same(BF16), Dtypes::same(F16), Dtypes::wide(BF16, BF16)];

/// Caches of 8 bits.
const EIGHT_BITS: [Dtypes; 4] =
    [Dtypes::over(BF16, F8E4M3FN), Dtypes::over(F16, F8E5M2), Dtypes::narrow(BF16), Dtypes::wide(F16, F8E4M3FN)];

/// Contexts of one block of keys, of several, of the longest, and on either side of their ends.
const CONTEXTS: [usize; 16] = [1, 15, 16, 17, 31, 33, 63, 64, 65, 100, 127, 128, 129, 240, 255, 256];

/// A batch of one query per sequence over short contexts, some of them without a query or without keys, or over longer ones, of about
/// the same length or so many that a warp has several tiles. With 26 KV heads there are eight tiles for each of an H200's SMs, with 80
/// two for each of their warps.
fn batch(seed: usize) -> BatchSpec {
    let kv_heads = match seed % 8 {
        _ if runs_on_cpu() || on_emulator() => 2,
        4 => 80,
        _ => 26,
    };
    let sequence = |i: usize| match (i + seed) % 11 {
        0 => (0, 20),
        1 => (1, 0),
        _ => (1, CONTEXTS[(i * (seed + 3) + seed) % 16]),
    };
    let mut lengths: Vec<(usize, usize)> = (0..SEQS).map(sequence).collect();
    match seed % 8 {
        4 => lengths = (0..SEQS).map(|i| (1, 1 + i * 61 % 512)).collect(),
        5 => lengths = (0..SEQS).map(|i| (1, 400 + (i * 37) % 113)).collect(),
        6 => lengths[17] = (1, 700),
        7 => lengths[23] = (2, 100),
        _ => {}
    }
    let masks = [Mask::CAUSAL, Mask::FULL, Mask::sliding(37), Mask { window_left: 140, ..Mask::CAUSAL }];
    BatchSpec {
        dtypes: DTYPES[seed % 3],
        heads: ([4, 1, 8, 7, 3][seed % 5] * kv_heads, kv_heads),
        head_dim: [128, 64, 256, 128][seed / 3 % 4],
        mask: masks[seed / 2 % 4],
        lengths,
        leftpad: seed % 4 == 1,
        sinks: seed % 3 == 1,
        seed: seed as u64,
        ..BatchSpec::default()
    }
}

/// Pages of whole blocks, pages that are not, and contiguous keys.
fn layout(seed: usize) -> MemoryLayout {
    MemoryLayout {
        spare_seqs: seed % 3,
        // One query per sequence: without that there are so many rows that some sequences may be long.
        hints: MaxSeqlenHints::TooSmall,
        ..tuned_split_kv::layout(seed, [16, 48, 0, 128, 20][seed % 5])
    }
}

#[test]
fn short_sequences_agree_with_the_reference() {
    for seed in 0..15 {
        let spec = batch(seed);
        assert_named_matches_reference(&format!("{seed}"), &mut AttentionCase::flash(&spec.batch(), &layout(seed)));
    }
}

#[test]
fn short_sequences_over_caches_of_8_bits_agree_with_the_reference() {
    let scales = [ScaleKind::None, ScaleKind::PerTensor, ScaleKind::PerHead];
    for seed in 0..8 {
        let scales = [scales[seed % 3], scales[seed / 2 % 3], scales[seed / 4 % 3]];
        let spec = BatchSpec { dtypes: EIGHT_BITS[seed % 4], scales, ..batch(seed) };
        assert_named_matches_reference(&format!("{seed}"), &mut AttentionCase::flash(&spec.batch(), &layout(seed)));
    }
}

#[test]
fn new_tokens_are_stored_and_attended_to() {
    for seed in 0..4 {
        let plain = batch(seed);
        // Every sequence has the key of its query.
        let lengths = plain.lengths.iter().map(|&(queries, keys)| (queries, keys.max(queries))).collect();
        let spec = BatchSpec { lengths, leftpad: false, mask: Mask::CAUSAL, ..plain };
        let layout =
            MemoryLayout { seqused_q: false, ..MemoryLayout::paged(KvLayout::Interleaved, [16, 32][seed % 2]) };
        PagedUpdateCase::new(&spec.batch(), &layout).assert_matches_reference();
    }
}

#[test]
fn hostile_metadata_does_not_affect_valid_sequences() {
    for seed in 0..8 {
        let layout = MemoryLayout::paged(KvLayout::Interleaved, 16);
        let plain = batch(seed);
        let dtypes = if seed < 6 { plain.dtypes } else { EIGHT_BITS[seed % 4] };
        let spec = BatchSpec { dtypes, leftpad: false, mask: Mask::CAUSAL, ..plain };
        let mut case = AttentionCase::paged(&spec.batch(), &layout);
        corrupt(&mut case, seed as u64);
        case.compare_with_reference(InvalidMetadata::Unspecified);
    }
}
