//! Trees of query rows over several tiles of rows and blocks of keys, against the reference on every device. Keys that no row
//! attends to hold NaN.

use crate::attention::Operator;
use crate::attention::results::assert_same_bits_alone;
use crate::support::{
    ALIBI, AttentionCase, BF16, Batch, BatchSpec, Dtypes, F8E4M3FN, F16, F32, KeyBounds, KvLayout, Mask, MemoryLayout,
    PagedUpdateCase, ReferenceCase, SequenceData, Side, assert_named_matches_reference, runs_on_cpu,
};

/// Drafts of one tile and of several, one query, a sequence too long for a tree, more queries than keys, and many keys.
const LENGTHS: [(usize, usize); 7] = [(9, 200), (40, 300), (1, 400), (70, 90), (12, 7), (33, 33), (5, 1700)];

const HEADS: [(usize, usize); 4] = [(4, 2), (3, 1), (2, 2), (8, 1)];

const DTYPES: [Dtypes; 6] = [
    Dtypes::same(BF16),
    Dtypes::same(F32),
    Dtypes::same(F16),
    Dtypes::over(BF16, F8E4M3FN),
    Dtypes::narrow(BF16),
    Dtypes::wide(F16, F16),
];

fn spec(seed: usize) -> BatchSpec {
    BatchSpec {
        dtypes: DTYPES[seed % 6],
        heads: HEADS[seed / 2 % 4],
        head_dim: [64, 128, 40, 256, 96, 192, 512, 320][(seed / 6 + seed) % 8],
        lengths: LENGTHS.to_vec(),
        mask: if seed % 3 == 1 { Mask::sliding(24) } else { Mask::CAUSAL },
        tree: Some([40, 64, 70, 200][seed % 4]),
        key_bounds: KeyBounds::ALL[if seed % 5 == 3 { 3 } else { 0 }],
        softcap: if seed % 5 == 2 { 2.5 } else { 0.0 },
        alibi: ALIBI[seed / 4 % ALIBI.len()],
        sinks: seed.is_multiple_of(2),
        batch_invariant: seed % 3 == 2,
        seed: seed as u64,
        ..BatchSpec::default()
    }
}

fn layout(seed: usize) -> MemoryLayout {
    MemoryLayout {
        page_size: [16, 7, 32][seed % 3],
        rows_around: (3, 5),
        spare_seqs: 2,
        workspace: [Some(9_000_001), Some(300_000), None, Some(40_000_000)]
            [seed / 3 % if runs_on_cpu() { 3 } else { 4 }],
        seed: seed as u64,
        ..MemoryLayout::paged(KvLayout::Interleaved, 16)
    }
}

#[test]
fn trees_over_several_tiles_and_blocks_agree_with_the_reference() {
    for seed in 0..24 {
        let spec = spec(seed);
        let mut case = AttentionCase::paged(&spec.batch(), &layout(seed));
        assert_named_matches_reference(&format!("{seed}: {spec:?}"), &mut case);
    }
}

#[test]
fn trees_over_a_cache_that_is_updated_agree_with_the_reference() {
    for seed in 0..6 {
        PagedUpdateCase::new(&spec(seed).batch(), &layout(seed)).assert_matches_reference();
    }
}

#[test]
fn trees_have_the_bits_of_their_sequence_alone() {
    for (seed, dtypes) in [Dtypes::same(BF16), Dtypes::same(F32), Dtypes::over(F16, F8E4M3FN)].into_iter().enumerate() {
        let spec = BatchSpec {
            dtypes,
            head_dim: [128, 64, 40][seed],
            lengths: vec![(5, 1700), (9, 200), (40, 1300), (1, 1100), (3, 3)],
            tree: Some(40),
            key_bounds: KeyBounds::ALL[seed],
            batch_invariant: true,
            ..BatchSpec::default()
        };
        let batch = spec.batch();
        let layouts = [None, Some(300_000), Some(9_000_001)].map(|workspace| MemoryLayout { workspace, ..layout(0) });
        assert_same_bits_alone(Operator::PagedAttention, &batch, &layouts, &format!("{dtypes:?}"));
    }
}

/// `out` of the sequence's query `i`, in a call with the one sequence.
fn row(batch: &Batch, sequence: &SequenceData, i: usize) -> Vec<f64> {
    let batch = Batch { sequences: vec![sequence.clone()], ..batch.clone() };
    let results = AttentionCase::paged(&batch, &MemoryLayout::default().bare()).invocation().results(Side::EndsAtGuard);
    let row = batch.config.q_heads * batch.config.value_dim;
    results[0].values()[i * row..][..row].to_vec()
}

/// The queries and keys of the sequence that are on the path to query `i` of its tree, after the older keys.
fn path(batch: &Batch, sequence: &SequenceData, i: usize) -> SequenceData {
    let config = &batch.config;
    let older = sequence.len_k - sequence.len_q;
    let bits = &sequence.tree.as_ref().expect("a tree")[i];
    let on_path: Vec<usize> = (0..sequence.len_q).filter(|j| bits[*j]).collect();
    let take = |rows: &[f64], width: usize, first: usize, keep: usize| -> Vec<f64> {
        let newest = on_path.iter().flat_map(|j| &rows[(first + j) * width..][..width]);
        rows[..keep * width].iter().chain(newest).copied().collect()
    };
    let width = config.kv_heads * config.head_dim;
    SequenceData {
        len_q: on_path.len(),
        len_k: older + on_path.len(),
        q: take(&sequence.q, config.q_heads * config.head_dim, 0, 0),
        k: take(&sequence.k, width, older, older),
        v: take(&sequence.v, width, older, older),
        tree: None,
        ..sequence.clone()
    }
}

#[test]
fn the_row_of_a_node_is_the_last_row_of_its_path() {
    let mut seed = 0;
    for len_q in [2, 9, 33] {
        let spec = |seed| BatchSpec { lengths: vec![(len_q, 70)], tree: Some(40), seed, ..BatchSpec::default() };
        // A tree whose nodes follow their parents.
        let is_ordered = |sequence: &SequenceData| {
            let tree = sequence.tree.as_ref().expect("a tree");
            (0..len_q).all(|i| tree[i][i] && !tree[i][i + 1..].contains(&true))
                && !tree[len_q - 1][..len_q - 1].iter().all(|bit| *bit)
        };
        let batch = loop {
            seed += 1;
            let batch = spec(seed).batch();
            if is_ordered(&batch.sequences[0]) {
                break batch;
            }
        };
        let sequence = &batch.sequences[0];
        let causal = Batch { tree: None, ..batch.clone() };
        for i in (0..len_q).step_by(len_q.div_ceil(5)) {
            let alone = path(&batch, sequence, i);
            let expected = row(&causal, &alone, alone.len_q - 1);
            let actual = row(&batch, sequence, i);
            let error = actual.iter().zip(expected).map(|(a, b)| (a - b).abs()).fold(0.0, f64::max);
            assert!(error < 1e-5, "query {i} of {len_q}: {error}");
        }
    }
}

#[test]
fn a_chain_has_the_bits_of_the_causal_mask_on_the_cpu() {
    if !runs_on_cpu() {
        return;
    }
    let batch = BatchSpec { lengths: vec![(9, 80), (1, 5)], tree: Some(9), ..BatchSpec::default() }.batch();
    let mut chain = batch.clone();
    for sequence in &mut chain.sequences {
        let len_q = sequence.len_q;
        sequence.tree = Some((0..len_q).map(|i| (0..len_q).map(|j| j <= i).collect()).collect());
    }
    let results = |batch: &Batch| {
        AttentionCase::paged(batch, &MemoryLayout::default().bare()).invocation().results(Side::EndsAtGuard)
    };
    let mut causal = batch;
    causal.tree = None;
    causal.sequences.iter_mut().for_each(|sequence| sequence.tree = None);
    assert!(results(&chain) == results(&causal));
}
