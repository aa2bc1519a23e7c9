//! A NaN in what a query sees may spread within its sequence, and no further (SPEC 2.1).

use crate::support::array::{Array, F8E4M3FN};
use crate::support::batch::{Batch, Dtypes, Shape};
use crate::support::case::Case;
use crate::support::check::check;
use crate::support::guard::Side;
use crate::support::oracle::Mask;
use crate::support::storage::{Layout, Storage};

/// `batch` with everything that sequence `ill` reads from `place` NaN, or infinite where the type has infinities.
fn poisoned(batch: &Batch, ill: usize, place: &str) -> Batch {
    let mut batch = batch.clone();
    let infinite = batch.form.dtypes.kv != F8E4M3FN && ill % 2 == 1 && place != "q";
    let sequence = &mut batch.sequences[ill];
    let values = match place {
        "q" => &mut sequence.q,
        "k" => &mut sequence.k,
        _ => &mut sequence.v,
    };
    values.fill(if infinite { f64::INFINITY } else { f64::NAN });
    batch
}

/// The bytes of the rows of `[out, softmax_lse]` that are not those of sequence `ill`.
fn others(case: &Case, ill: usize, results: &[Array]) -> Vec<u8> {
    let row_bytes = case.form.q_heads * case.form.value_dim * results[0].dtype.size();
    let own = case.cu_seqlens_q[ill] as usize..case.cu_seqlens_q[ill + 1] as usize;
    let (out, lse) = (results[0].bytes.chunks_exact(row_bytes), results[1].bytes.chunks_exact(4));
    let out = out.enumerate().filter(|(row, _)| !own.contains(row));
    let lse = lse.enumerate().filter(|(at, _)| !own.contains(&(at % case.rows())));
    out.chain(lse).flat_map(|(_, bytes)| bytes.to_vec()).collect()
}

#[test]
fn a_sequence_full_of_nan_changes_no_bit_of_another() {
    // Neighbours share tiles: contiguous rows touch, and the queries of one sequence end where the next begin.
    let lengths = vec![(1, 30), (9, 40), (1, 50), (20, 23)];
    for dtypes in Dtypes::ALL {
        for (layout, mask) in [(Layout::Contiguous, Mask::FULL), (Layout::Stacked, Mask::window(25, 3))] {
            let batch = Shape { dtypes, lengths: lengths.clone(), mask, ..Shape::default() }.batch();
            let storage = Storage { seqused_k: layout != Layout::Contiguous, ..Storage::paged(layout, 16) };
            let clean = Case::flash(&batch, &storage);
            let expected = check(&clean);
            for (ill, place) in (0..lengths.len()).flat_map(|ill| ["q", "k", "v"].map(|place| (ill, place))) {
                let case = Case::flash(&poisoned(&batch, ill, place), &storage);
                let results = case.invocation().results(Side::EndsAtGuard);
                assert!(
                    others(&clean, ill, &results) == others(&clean, ill, &expected),
                    "{dtypes:?}, {layout:?}: {place} of sequence {ill} reached another"
                );
            }
        }
    }
}

#[test]
fn a_nan_that_a_query_sees_is_not_hidden() {
    for dtypes in Dtypes::ALL {
        let batch = Shape { dtypes, lengths: vec![(3, 40)], mask: Mask::FULL, ..Shape::default() }.batch();
        for place in ["q", "k", "v"] {
            let case = Case::flash(&poisoned(&batch, 0, place), &Storage::contiguous().bare());
            let out = case.invocation().results(Side::EndsAtGuard)[0].values();
            assert!(out.iter().all(|x| !x.is_finite()), "{dtypes:?}: NaN in every {place} gives numbers");
        }
    }
}
