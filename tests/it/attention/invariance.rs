//! With `batch_invariant` a sequence's bits depend on nothing but itself, the options and the page size
//! (`docs/semantics.md#batch-invariance`).

use super::Operator;
use super::results::attend;
use crate::support::{Alibi, Batch, Dtypes, Hints, Layout, Mask, Shape, Storage};

/// Somewhere else: everything that is not the sequence's own is as in `other`.
fn elsewhere(storage: &Storage, other: &Storage, batch: &Batch) -> Storage {
    let same_width = batch.form.head_dim == batch.form.value_dim;
    let layout = match (storage.is_paged(), other.is_paged()) {
        // Pages are pages, in whichever order their rows lie.
        (true, true) if same_width || other.layout.has_two_buffers() => other.layout,
        _ => storage.layout,
    };
    Storage { layout, page_size: storage.page_size, ..other.clone() }
}

pub(crate) fn rows_have_the_bits_of_their_sequence_alone_wherever_it_lies(op: Operator) {
    op.for_calls(48, |shape, storage, random| {
        let (_, other) = op.any_call(random);
        let batch = Shape { batch_invariant: true, ..shape }.batch();
        let elsewhere = elsewhere(&storage, &other, &batch);
        let rows = attend(op, &batch, &storage);
        assert!(attend(op, &batch, &elsewhere) == rows, "{elsewhere:?} changed the bits");
        for (index, rows) in rows.into_iter().enumerate() {
            let alone = attend(op, &batch.only(index), &elsewhere);
            assert!(alone[0] == rows, "sequence {index} has other bits in the batch than alone, {elsewhere:?}");
        }
    });
}

/// Sequences of which one is long enough to be split.
fn batch(dtypes: Dtypes, head_dim: usize, mask: Mask, leftpad: bool) -> Batch {
    let lengths = vec![(1, 1300), (20, 90), (1, 3), (3, 3), (1, 64)];
    let shape = Shape { dtypes, heads: (8, 4), head_dim, lengths, mask, leftpad, ..Shape::default() };
    Shape { alibi: Alibi::PerSequence, batch_invariant: true, ..shape }.batch()
}

pub(crate) fn rows_do_not_depend_on_their_place_or_their_neighbours_number(op: Operator) {
    let storages = op.storages();
    for (index, dtypes) in op.dtypes().into_iter().enumerate() {
        let (storage, mask) = (&storages[index % storages.len()], op.masks()[index % op.masks().len()]);
        let batch = batch(dtypes, if op.is_paged() { 256 } else { 128 }, mask, !op.is_paged());
        let expected = attend(op, &batch, storage);
        let order = [4, 3, 2, 1, 0, 1, 2, 3, 4, 3, 2, 0, 3, 4, 2, 3, 4];
        let sequences = order.map(|index| batch.sequences[index].clone()).to_vec();
        let hints = if op.is_paged() { Hints::Unknown } else { Hints::RoundedUp };
        let crowd = Storage { rows_around: (5, 9), spare_entries: 40, workspace: Some(2_000_000), ..storage.clone() };
        let found = attend(op, &Batch { sequences, ..batch }, &Storage { hints, ..crowd });
        for (place, (rows, original)) in found.iter().zip(order).enumerate() {
            assert!(*rows == expected[original], "{dtypes:?}: sequence {original} at place {place}");
        }
    }
}

pub(crate) fn a_long_sequence_does_not_depend_on_the_room_to_split_it(op: Operator) {
    for dtypes in op.dtypes() {
        let batch = batch(dtypes, 128, Mask::CAUSAL, true).only(0);
        let storage = |workspace| Storage { workspace, ..Storage::paged(Layout::Stacked, 16) };
        let expected = attend(op, &batch, &storage(None));
        for workspace in [Some(1), Some(5000), Some(100_000), Some(10_000_000)] {
            let found = attend(op, &batch, &storage(workspace));
            assert!(found == expected, "{dtypes:?}: a workspace of {workspace:?} bytes changed the bits");
        }
    }
}
