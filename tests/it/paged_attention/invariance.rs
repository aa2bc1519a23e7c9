//! With `batch_invariant` a sequence's bits depend on nothing but itself (SPEC 2.1).

use crate::support::batch::{Alibi, Batch, Dtypes, Shape};
use crate::support::case::Target::PagedAttention;
use crate::support::rows::attend;
use crate::support::storage::Storage;
use crate::support::strategies::{for_all, paged_shapes, paged_storages};

#[test]
fn pages_may_lie_in_any_order() {
    for_all(24, (paged_shapes(), paged_storages(), 0..1000u64), |(shape, storage, seed)| {
        let batch = Shape { batch_invariant: true, ..shape }.batch();
        let shuffled = Storage { seed, spare_pages: storage.spare_pages + 4, ..storage.clone() };
        let (a, b) = (attend(PagedAttention, &batch, &storage), attend(PagedAttention, &batch, &shuffled));
        assert!(a == b, "other page ids changed the bits");
    });
}

#[test]
fn rows_have_the_bits_of_their_sequence_alone() {
    for_all(32, (paged_shapes(), paged_storages(), paged_storages()), |(shape, storage, other)| {
        let batch = Shape { batch_invariant: true, ..shape }.batch();
        let elsewhere = Storage { page_size: storage.page_size, ..other };
        for (index, rows) in attend(PagedAttention, &batch, &storage).into_iter().enumerate() {
            let alone = attend(PagedAttention, &batch.only(index), &elsewhere);
            assert!(alone[0] == rows, "sequence {index} has other bits in the batch than alone");
        }
    });
}

#[test]
fn rows_do_not_depend_on_their_place_or_their_neighbours_number() {
    for dtypes in Dtypes::ALL {
        let lengths = vec![(1, 700), (20, 90), (1, 3), (3, 3), (1, 64)];
        let (heads, head_dim, alibi) = ((8, 4), 256, Alibi::PerSequence);
        let shape = Shape { dtypes, heads, head_dim, lengths, alibi, batch_invariant: true, ..Shape::default() };
        let batch = shape.batch();
        let expected = attend(PagedAttention, &batch, &Storage::default());
        let order = [4, 3, 2, 1, 0, 1, 2, 3, 4, 3, 2, 3, 4, 2, 3, 4];
        let sequences = order.map(|index| batch.sequences[index].clone()).to_vec();
        let storage =
            Storage { rows_around: (5, 9), spare_entries: 40, workspace: Some(2_000_000), ..Storage::default() };
        let found = attend(PagedAttention, &Batch { sequences, ..batch }, &storage);
        for (place, (rows, original)) in found.iter().zip(order).enumerate() {
            assert!(*rows == expected[original], "{dtypes:?}: sequence {original} at place {place}");
        }
    }
}
