//! Bounds of the keys of each row over several blocks of keys and tiles of rows, in the forms that they have in use and with gaps,
//! against the reference on every device. Keys that no row attends to hold NaN.

use crate::support::{
    ALIBI, Alibi, AttentionCase, BF16, BatchSpec, Dtypes, F8E4M3FN, F16, F32, GradientCase, GradientOptions, KeyBounds,
    KvLayout, Mask, MemoryLayout, assert_named_matches_reference, has_gradients,
};

/// Several tiles and blocks, one query over many keys, and more queries than keys.
const LENGTHS: [(usize, usize); 5] = [(150, 150), (1, 400), (70, 310), (40, 12), (9, 200)];

const HEADS: [(usize, usize); 4] = [(4, 2), (3, 1), (2, 2), (8, 1)];

fn spec(seed: usize) -> BatchSpec {
    BatchSpec {
        heads: HEADS[seed % 4],
        head_dim: [64, 128, 40, 256, 96, 192, 512, 320][seed % 8],
        lengths: LENGTHS.to_vec(),
        mask: [Mask::FULL, Mask::CAUSAL, Mask::window(90, 30), Mask::CAUSAL.top_left()][seed / 2 % 4],
        key_bounds: KeyBounds::ALL[1 + seed % 3],
        leftpad: seed % 4 == 1,
        softcap: if seed % 5 == 2 { 2.5 } else { 0.0 },
        alibi: ALIBI[seed / 4 % ALIBI.len()],
        sinks: seed.is_multiple_of(2),
        seed: seed as u64,
        ..BatchSpec::default()
    }
}

#[test]
fn ranges_over_several_blocks_agree_with_the_reference() {
    const DTYPES: [Dtypes; 6] = [
        Dtypes::same(BF16),
        Dtypes::same(F32),
        Dtypes::same(F16),
        Dtypes::over(BF16, F8E4M3FN),
        Dtypes::narrow(BF16),
        Dtypes::wide(F16, F16),
    ];
    for seed in 0..30 {
        let spec = BatchSpec { dtypes: DTYPES[seed % 6], batch_invariant: seed % 7 == 3, ..spec(seed / 6 + seed) };
        let layout = match seed % 3 {
            0 => MemoryLayout::contiguous(),
            1 => MemoryLayout::paged(KvLayout::PAGED[seed / 3 % 4], 16),
            _ => MemoryLayout::paged(KvLayout::PAGED[seed / 3 % 4], 7),
        };
        let layout = MemoryLayout { rows_around: (3, 5), seqused_q: seed % 4 == 2, seed: seed as u64, ..layout };
        assert_named_matches_reference(&format!("{seed}: {spec:?}"), &mut AttentionCase::flash(&spec.batch(), &layout));
    }
}

/// Calls that Hopper's kernel takes: packed keys in 16 bits, without a logits transform.
#[test]
fn ranges_of_long_packed_sequences_agree_with_the_reference() {
    for seed in 0..12 {
        let spec = BatchSpec {
            dtypes: [BF16, F16][seed / 3 % 2].into(),
            lengths: vec![(300, 500), (3, 40), (190, 190), (40, 1500)],
            softcap: 0.0,
            alibi: Alibi::Off,
            key_bounds: KeyBounds::ALL[1 + seed / 2 % 3],
            batch_invariant: seed % 5 == 3,
            ..spec(seed)
        };
        let layout = MemoryLayout { rows_around: (3, 5), seqused_q: seed % 4 == 2, ..MemoryLayout::contiguous() };
        let layout = MemoryLayout { workspace: [Some(9_000_001), None][seed / 4 % 2], ..layout };
        assert_named_matches_reference(&format!("{seed}: {spec:?}"), &mut AttentionCase::flash(&spec.batch(), &layout));
    }
}

#[test]
fn gradients_of_ranges_over_several_blocks_agree_with_the_reference() {
    for seed in 0..18 {
        let dtypes = [BF16, F32, F16][seed % 3].into();
        let spec = BatchSpec { dtypes, ..spec(seed / 3 + seed) };
        if !has_gradients(spec.dtypes.q, spec.head_dim) {
            continue;
        }
        let workspace = [Some(9_000_001), None][seed % 2];
        let layout =
            MemoryLayout { rows_around: (3, 5), seqused_q: seed % 4 == 2, workspace, ..MemoryLayout::contiguous() };
        let options = GradientOptions::from_seed(seed as u64 + 1);
        let mut case = GradientCase::store(&spec.batch(), &layout, options);
        assert_named_matches_reference(&format!("{seed}: {spec:?}"), &mut case);
    }
}

/// Calls that Hopper's kernel up to 128 columns takes: operands in 16 bits, without a logits transform.
#[test]
fn gradients_of_ranges_of_long_sequences_agree_with_the_reference() {
    for seed in 0..12 {
        let spec = BatchSpec {
            dtypes: [BF16, F16][seed / 3 % 2].into(),
            head_dim: [128, 64, 88][seed % 3],
            lengths: vec![(300, 500), (3, 40), (190, 190), (0, 9), (270, 130)],
            softcap: 0.0,
            alibi: Alibi::Off,
            key_bounds: KeyBounds::ALL[1 + seed / 3 % 3],
            ..spec(seed)
        };
        let layout = MemoryLayout { rows_around: (3, 5), seqused_q: seed % 4 == 2, ..MemoryLayout::contiguous() };
        let layout = MemoryLayout { workspace: Some(9_000_001), ..layout };
        let options = GradientOptions::from_seed(seed as u64 + 1);
        let mut case = GradientCase::store(&spec.batch(), &layout, options);
        assert_named_matches_reference(&format!("{seed}: {spec:?}"), &mut case);
    }
}

/// So many sequences that Hopper's kernel goes through the keys of a causal mask from the last to the first.
#[test]
fn gradients_of_ranges_of_many_causal_sequences_agree_with_the_reference() {
    for (head_dim, key_bounds) in [(128, KeyBounds::End), (64, KeyBounds::Both)] {
        let spec = BatchSpec {
            dtypes: BF16.into(),
            heads: (1, 1),
            head_dim,
            lengths: vec![(140, 290); 10],
            mask: Mask::CAUSAL,
            key_bounds,
            seed: head_dim as u64,
            ..BatchSpec::default()
        };
        let layout = MemoryLayout { workspace: Some(9_000_001), ..MemoryLayout::contiguous() };
        let mut case = GradientCase::store(&spec.batch(), &layout, GradientOptions::MINIMAL);
        assert_named_matches_reference(&format!("{head_dim}"), &mut case);
    }
}
