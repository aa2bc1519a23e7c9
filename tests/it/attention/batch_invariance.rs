//! With `batch_invariant`, the bits of a sequence's results depend only on the sequence, the options and the page size
//! (`docs/semantics.md#batch-invariance`).

use super::Operator;
use super::results::attend;
use crate::support::{Alibi, Batch, BatchSpec, Dtypes, KvLayout, Mask, MaxSeqlenHints, MemoryLayout};

/// The memory layout `other`, with the page size of `memory_layout` and a KV layout that gives the same bits.
fn elsewhere(memory_layout: &MemoryLayout, other: &MemoryLayout, batch: &Batch) -> MemoryLayout {
    let same_width = batch.config.head_dim == batch.config.value_dim;
    let layout = match (memory_layout.is_paged(), other.is_paged()) {
        // The order of rows within a page does not affect the bits.
        (true, true) if same_width || other.layout.has_two_buffers() => other.layout,
        _ => memory_layout.layout,
    };
    MemoryLayout { layout, page_size: memory_layout.page_size, ..other.clone() }
}

pub(crate) fn rows_have_the_bits_of_their_sequence_alone_in_any_memory_layout(op: Operator) {
    op.for_calls(48, |spec, memory_layout, random| {
        let (_, other) = op.random_call(random);
        let batch = BatchSpec { batch_invariant: true, ..spec }.batch();
        let elsewhere = elsewhere(&memory_layout, &other, &batch);
        let rows = attend(op, &batch, &memory_layout);
        assert!(attend(op, &batch, &elsewhere) == rows, "{elsewhere:?} changed the bits");
        for (index, rows) in rows.into_iter().enumerate() {
            let alone = attend(op, &batch.only(index), &elsewhere);
            assert!(alone[0] == rows, "sequence {index} has other bits in the batch than alone, {elsewhere:?}");
        }
    });
}

/// Sequences of which one is long enough for split-KV.
fn batch(dtypes: Dtypes, head_dim: usize, mask: Mask, leftpad: bool) -> Batch {
    let lengths = vec![(1, 1300), (20, 90), (1, 3), (3, 3), (1, 64)];
    let spec = BatchSpec { dtypes, heads: (8, 4), head_dim, lengths, mask, leftpad, ..BatchSpec::default() };
    BatchSpec { alibi: Alibi::PerSequence, batch_invariant: true, ..spec }.batch()
}

pub(crate) fn rows_do_not_depend_on_their_position_or_on_the_batch_size(op: Operator) {
    let memory_layouts = op.memory_layouts();
    for (index, dtypes) in op.dtypes().into_iter().enumerate() {
        let (memory_layout, mask) =
            (&memory_layouts[index % memory_layouts.len()], op.masks()[index % op.masks().len()]);
        let batch = batch(dtypes, if op.is_paged() { 256 } else { 128 }, mask, !op.is_paged());
        let expected = attend(op, &batch, memory_layout);
        let order = [4, 3, 2, 1, 0, 1, 2, 3, 4, 3, 2, 0, 3, 4, 2, 3, 4];
        let sequences = order.map(|index| batch.sequences[index].clone()).to_vec();
        let hints = if op.is_paged() { MaxSeqlenHints::Unknown } else { MaxSeqlenHints::RoundedUp };
        let crowd = MemoryLayout {
            rows_around: (5, 9),
            spare_entries: 40,
            workspace: Some(2_000_000),
            ..memory_layout.clone()
        };
        let actual = attend(op, &Batch { sequences, ..batch }, &MemoryLayout { hints, ..crowd });
        for (place, (rows, original)) in actual.iter().zip(order).enumerate() {
            assert!(*rows == expected[original], "{dtypes:?}: sequence {original} at place {place}");
        }
    }
}

pub(crate) fn a_long_sequence_does_not_depend_on_the_workspace_size(op: Operator) {
    for dtypes in op.dtypes() {
        let batch = batch(dtypes, 128, Mask::CAUSAL, true).only(0);
        let memory_layout = |workspace| MemoryLayout { workspace, ..MemoryLayout::paged(KvLayout::Stacked, 16) };
        let expected = attend(op, &batch, &memory_layout(None));
        for workspace in [Some(1), Some(5000), Some(100_000), Some(10_000_000)] {
            let actual = attend(op, &batch, &memory_layout(workspace));
            assert!(actual == expected, "{dtypes:?}: a workspace of {workspace:?} bytes changed the bits");
        }
    }
}
