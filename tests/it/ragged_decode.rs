//! Decode of sequences of different lengths where there are about as many work ranges as tiles, or more: ranges begin with
//! tiles, or inside of them, against the reference on every device. The emulator has a dozen ranges of a KV head.

use crate::support::{
    AttentionCase, BF16, BatchSpec, Dtypes, F8E4M3FN, F16, F32, Mask, MemoryLayout, assert_named_matches_reference,
};

/// Contexts around multiples of the sizes of chunks and splits, none, and a long one.
fn lengths(seqs: usize, seed: usize) -> Vec<(usize, usize)> {
    let edges = [127, 128, 129, 255, 257, 511, 513, 639, 640, 641, 768, 1025, 1, 0, 300, 2300];
    (0..seqs).map(|i| (1 + (i + seed) % 2, edges[(i * 5 + seed * 7) % edges.len()])).collect()
}

#[test]
fn every_number_of_sequences_agrees_with_the_reference() {
    let kinds = [
        (Dtypes::same(BF16), (16, 1), 128),
        (Dtypes::same(F32), (4, 1), 64),
        (Dtypes::over(F16, F8E4M3FN), (8, 2), 128),
        (Dtypes::same(F16), (4, 2), 256),
    ];
    for (seed, (kind, seqs)) in kinds.iter().flat_map(|kind| [3, 7, 9, 12, 20].map(|seqs| (kind, seqs))).enumerate() {
        let &(dtypes, heads, head_dim) = kind;
        let spec = BatchSpec {
            dtypes,
            heads,
            head_dim,
            mask: Mask::CAUSAL,
            lengths: lengths(seqs, seed),
            seed: seed as u64,
            ..BatchSpec::default()
        };
        let layout =
            MemoryLayout { page_size: [16, 64, 20][seed % 3], spare_seqs: seed % 2, ..MemoryLayout::default() };
        assert_named_matches_reference(
            &format!("{seqs} sequences, {dtypes:?}"),
            &mut AttentionCase::paged(&spec.batch(), &layout),
        );
    }
}
