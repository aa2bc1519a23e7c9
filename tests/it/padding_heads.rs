//! Hopper's prefill with packs that end with padding heads: sequences of few queries, and query heads per KV head that are no
//! power of two, against the reference on every device.

use crate::attention::metadata::corrupt;
use crate::support::{
    AttentionCase, BF16, BatchSpec, Dtypes, F16, InvalidMetadata, KvLayout, Mask, MemoryLayout, ReferenceCase,
    ScaleKind, assert_named_matches_reference,
};

/// Several tiles with padding heads per sequence, which would be more without. Keys are too few for `hopper_split_kv`.
const LENGTHS: [(usize, usize); 6] = [(60, 70), (44, 90), (64, 64), (33, 120), (50, 10), (64, 100)];

/// (Hq, Hkv) whose packs have 8, 8, 4, 16, 32 and 64 heads, with padding heads: O leaves by TMA in boxes of 16 rows, and row
/// by row from 32 on.
const HEADS: [(usize, usize); 6] = [(14, 2), (5, 1), (9, 3), (12, 1), (23, 1), (33, 1)];

#[test]
fn few_queries_agree_with_the_reference() {
    let dtypes = [Dtypes::same(BF16), Dtypes::same(F16), Dtypes::wide(BF16, BF16)];
    for seed in 0..24_usize {
        let page_size = [16, 0, 1, 24, 16][seed % 5];
        let spec = BatchSpec {
            dtypes: dtypes[seed / 2 % 3],
            heads: HEADS[seed % 6],
            head_dim: [128, 64, 128, 256, 80, 192, 96][seed % 7],
            mask: [Mask::CAUSAL, Mask::FULL, Mask::window(20, 3)][seed / 3 % 3],
            lengths: LENGTHS.to_vec(),
            leftpad: seed % 4 == 1,
            sinks: seed % 2 == 0,
            scales: [ScaleKind::None, ScaleKind::None, [ScaleKind::None, ScaleKind::PerHead][seed / 4 % 2]],
            seed: seed as u64,
            ..BatchSpec::default()
        };
        let layout = match page_size {
            0 => MemoryLayout::contiguous(),
            _ => MemoryLayout::paged(KvLayout::PAGED[seed % 4], page_size),
        };
        let layout = MemoryLayout {
            rows_around: (3, 5),
            seqused_q: seed % 3 == 1,
            // Without a workspace, or not in pages of 16 tokens, prefill is a launch of its own.
            workspace: [Some(9_000_001), None][seed / 5 % 2],
            seed: seed as u64,
            ..layout
        };
        assert_named_matches_reference(&format!("{seed}: {spec:?}"), &mut AttentionCase::flash(&spec.batch(), &layout));
    }
}

#[test]
fn hostile_metadata_does_not_affect_valid_sequences() {
    for seed in 0..16 {
        let spec = BatchSpec {
            dtypes: BF16.into(),
            heads: HEADS[seed as usize % 3],
            head_dim: 128,
            lengths: LENGTHS.to_vec(),
            seed,
            ..BatchSpec::default()
        };
        let workspace = [Some(9_000_001), None][seed as usize / 3 % 2];
        let layout = MemoryLayout { workspace, ..MemoryLayout::paged(KvLayout::Interleaved, 16) };
        let mut case = AttentionCase::paged(&spec.batch(), &layout);
        corrupt(&mut case, seed);
        case.compare_with_reference(InvalidMetadata::Unspecified);
    }
}
