//! With `batch_invariant` a sequence's bits depend on nothing but itself, the options and the page size (SPEC 2.1).

use crate::support::batch::{Alibi, Batch, Dtypes, Shape};
use crate::support::case::Target::FlashAttnVarlen;
use crate::support::oracle::Mask;
use crate::support::rows::attend;
use crate::support::storage::{Hints, Layout, Storage};
use crate::support::strategies::{flash_calls, for_all};

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

#[test]
fn rows_have_the_bits_of_their_sequence_alone() {
    for_all(48, (flash_calls(), flash_calls()), |((shape, storage), (_, other))| {
        let batch = Shape { batch_invariant: true, ..shape }.batch();
        let elsewhere = elsewhere(&storage, &other, &batch);
        for (index, rows) in attend(FlashAttnVarlen, &batch, &storage).into_iter().enumerate() {
            let alone = attend(FlashAttnVarlen, &batch.only(index), &elsewhere);
            assert!(alone[0] == rows, "sequence {index} has other bits in the batch than alone, {elsewhere:?}");
        }
    });
}

#[test]
fn rows_do_not_depend_on_where_the_batch_lies() {
    for_all(32, (flash_calls(), flash_calls()), |((shape, storage), (_, other))| {
        let batch = Shape { batch_invariant: true, ..shape }.batch();
        let elsewhere = elsewhere(&storage, &other, &batch);
        let (a, b) = (attend(FlashAttnVarlen, &batch, &storage), attend(FlashAttnVarlen, &batch, &elsewhere));
        assert!(a == b, "{elsewhere:?} changed the bits");
    });
}

/// Sequences of which one is long enough to be split.
fn batch(dtypes: Dtypes, mask: Mask) -> Batch {
    let shape = Shape {
        dtypes,
        heads: (8, 4),
        head_dim: 128,
        lengths: vec![(1, 1300), (20, 90), (1, 3), (3, 3), (1, 64)],
        mask,
        alibi: Alibi::PerSequence,
        leftpad: true,
        batch_invariant: true,
        ..Shape::default()
    };
    shape.batch()
}

#[test]
fn rows_do_not_depend_on_their_place_or_their_neighbours_number() {
    let storages = [(Storage::contiguous(), Mask::FULL), (Storage::paged(Layout::Split, 16), Mask::CAUSAL)];
    for (dtypes, (storage, mask)) in Dtypes::ALL.into_iter().zip(storages.into_iter().cycle()) {
        let batch = batch(dtypes, mask);
        let expected = attend(FlashAttnVarlen, &batch, &storage);
        let order = [4, 3, 2, 1, 0, 1, 2, 3, 4, 3, 2, 0, 3, 4, 2, 3, 4];
        let sequences = order.map(|index| batch.sequences[index].clone()).to_vec();
        let crowd = Storage {
            rows_around: (5, 9),
            spare_entries: 40,
            workspace: Some(2_000_000),
            hints: Hints::RoundedUp,
            ..storage
        };
        let found = attend(FlashAttnVarlen, &Batch { sequences, ..batch }, &crowd);
        for (place, (rows, original)) in found.iter().zip(order).enumerate() {
            assert!(*rows == expected[original], "{dtypes:?}: sequence {original} at place {place}");
        }
    }
}

#[test]
fn a_long_sequence_does_not_depend_on_the_room_to_split_it() {
    for dtypes in Dtypes::ALL {
        let batch = batch(dtypes, Mask::CAUSAL).only(0);
        let storage = |workspace| Storage { workspace, ..Storage::paged(Layout::Stacked, 16) };
        let expected = attend(FlashAttnVarlen, &batch, &storage(None));
        for workspace in [Some(1), Some(5000), Some(100_000), Some(10_000_000)] {
            let found = attend(FlashAttnVarlen, &batch, &storage(workspace));
            assert!(found == expected, "{dtypes:?}: a workspace of {workspace:?} bytes changed the bits");
        }
    }
}
