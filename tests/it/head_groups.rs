//! Hopper's prefill of few queries, whose tiles have whole queries of all heads of a group that is no power of two, against the
//! reference on every device.

use crate::attention::metadata::corrupt;
use crate::support::{
    ALIBI, AttentionCase, BF16, BatchSpec, Dtypes, F8E4M3FN, F16, F32, InvalidMetadata, KvLayout, Mask, MemoryLayout,
    ReferenceCase, ScaleKind, assert_named_matches_reference,
};

/// Several tiles per sequence, which would be more with fewer heads each. Keys are too few for `hopper_split_kv`.
const LENGTHS: [(usize, usize); 6] = [(60, 70), (44, 90), (64, 64), (33, 120), (50, 10), (64, 100)];

/// (Hq, Hkv) of packs of 7, 5, 3, 12, 23, 33 and 13 heads: tiles of 18, 25, 42, 10, 5, 3 and 9 queries.
const HEADS: [(usize, usize); 7] = [(14, 2), (5, 1), (9, 3), (12, 1), (23, 1), (33, 1), (26, 2)];

#[test]
fn few_queries_agree_with_the_reference() {
    let dtypes =
        [Dtypes::same(BF16), Dtypes::same(F16), Dtypes::wide(BF16, BF16), Dtypes::narrow(BF16), Dtypes::same(F32)];
    for seed in 0..35_usize {
        let page_size = [16, 0, 1, 24, 16][seed % 5];
        let dtypes = dtypes[seed / 2 % 5];
        let spec = BatchSpec {
            dtypes,
            heads: HEADS[seed % 7],
            head_dim: if dtypes.q == F8E4M3FN {
                [64, 128, 256][seed % 3]
            } else {
                [128, 64, 128, 256, 80, 192, 96][seed / 3 % 7]
            },
            mask: [Mask::CAUSAL, Mask::FULL, Mask::window(20, 3)][seed / 3 % 3],
            softcap: if seed % 4 == 2 { 2.5 } else { 0.0 },
            alibi: ALIBI[seed / 4 % ALIBI.len()],
            lengths: LENGTHS.to_vec(),
            leftpad: seed % 4 == 1,
            q_offset: seed % 5 == 3,
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
