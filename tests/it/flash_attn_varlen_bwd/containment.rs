//! A NaN in what a query sees may spread within its sequence, and no further (SPEC 2.1).

use crate::support::array::{ATTENTION_DTYPES, Array};
use crate::support::batch::{Batch, Shape};
use crate::support::case::Case;
use crate::support::gradient_case::{GradientCase, Wanted, check_gradients};
use crate::support::guard::Side;
use crate::support::oracle::Mask;
use crate::support::storage::{Storage, put};
use std::ops::Range;

/// What is wrong with a sequence.
const PLACES: [&str; 7] = ["q", "k", "v", "dout", "out", "lse", "dlse"];

/// The case with everything that sequence `ill` reads from `place` NaN, or infinite.
fn poisoned(batch: &Batch, case: &GradientCase, ill: usize, place: &str) -> GradientCase {
    let bad = if ill % 2 == 1 { f64::INFINITY } else { f64::NAN };
    let mut batch = batch.clone();
    let sequence = &mut batch.sequences[ill];
    match place {
        "q" => sequence.q.fill(bad),
        "k" => sequence.k.fill(bad),
        "v" => sequence.v.fill(bad),
        _ => (),
    }
    let mut case = GradientCase { forward: Case::flash(&batch, &Storage::contiguous()), ..case.clone() };
    let (rows, heads, dv) = (case.forward.rows(), batch.form.q_heads, batch.form.value_dim);
    let own = own_rows(&case.forward, ill);
    let all = vec![bad; own.len() * heads * dv];
    let per_head = |array: &mut Array| {
        for head in 0..heads {
            put(array, head * rows + own.start, &all[..own.len()]);
        }
    };
    match place {
        "dout" => put(&mut case.dout, own.start * heads * dv, &all),
        "out" => put(&mut case.out, own.start * heads * dv, &all),
        "lse" => per_head(&mut case.lse),
        "dlse" => case.dlse.as_mut().map_or((), per_head),
        _ => (),
    }
    case
}

fn own_rows(case: &Case, index: usize) -> Range<usize> {
    case.cu_seqlens_q[index] as usize..case.cu_seqlens_q[index + 1] as usize
}

/// The bytes of the rows of dq, dk and dv that are not those of sequence `ill`.
fn others(case: &Case, ill: usize, results: &[Array]) -> Vec<u8> {
    let keys = case.cu_seqlens_k[ill] as usize..case.cu_seqlens_k[ill + 1] as usize;
    let of = |(array, own): (&Array, Range<usize>)| -> Vec<u8> {
        let row = (array.dims[1] * array.dims[2]) as usize * array.dtype.size();
        let rows = array.bytes.chunks_exact(row).enumerate().filter(|(row, _)| !own.contains(row));
        rows.flat_map(|(_, bytes)| bytes.to_vec()).collect()
    };
    results.iter().zip([own_rows(case, ill), keys.clone(), keys]).flat_map(of).collect()
}

#[test]
fn a_sequence_full_of_nan_changes_no_bit_of_another() {
    // Neighbours share tiles: rows touch, and the queries of one sequence end where the next begin.
    let lengths = vec![(1, 30), (9, 40), (1, 50), (20, 23)];
    for dtype in ATTENTION_DTYPES {
        for mask in [Mask::FULL, Mask::window(25, 3)] {
            let shape = Shape { dtypes: dtype.into(), lengths: lengths.clone(), mask, ..Shape::default() };
            let batch = shape.batch();
            let clean = GradientCase::store(&batch, &Storage::contiguous(), Wanted { dsinks: false, ..Wanted::ALL });
            let expected = check_gradients(&clean);
            for (ill, place) in (0..lengths.len()).flat_map(|ill| PLACES.map(|place| (ill, place))) {
                let results = poisoned(&batch, &clean, ill, place).invocation().results(Side::EndsAtGuard);
                assert!(
                    others(&clean.forward, ill, &results) == others(&clean.forward, ill, &expected),
                    "{dtype:?}, {mask:?}: {place} of sequence {ill} reached another"
                );
            }
        }
    }
}

#[test]
fn a_nan_that_a_query_sees_is_not_hidden() {
    for dtype in ATTENTION_DTYPES {
        let batch =
            Shape { dtypes: dtype.into(), lengths: vec![(3, 40)], mask: Mask::FULL, ..Shape::default() }.batch();
        let clean = GradientCase::store(&batch, &Storage::contiguous(), Wanted::ALL);
        for place in PLACES {
            let results = poisoned(&batch, &clean, 0, place).invocation().results(Side::EndsAtGuard);
            // dv is made of p and dout alone.
            let reached = if ["q", "k", "dout", "lse"].contains(&place) { 3 } else { 2 };
            let own = |array: &Array| {
                let row = (array.dims[1] * array.dims[2]) as usize;
                let rows = if row == batch.form.q_heads * batch.form.head_dim { 3 } else { 40 };
                let first = if rows == 40 { clean.forward.cu_seqlens_k[0] as usize } else { 0 };
                array.values()[first * row..][..rows * row].to_vec()
            };
            for gradient in &results[..reached] {
                assert!(own(gradient).iter().all(|x| x.is_nan()), "{dtype:?}: NaN in every {place} gives numbers");
            }
        }
    }
}
