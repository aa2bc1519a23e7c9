//! A NaN that a query attends to may spread within its sequence and no further (`docs/semantics.md#isolation-of-nan`).

use super::{Call, Operator};
use crate::support::{
    Array, AttentionCase, Batch, BatchSpec, Dtypes, F8E4M3FN, GradientCase, GradientOptions, KvLayout, Mask,
    MemoryLayout, Numbers, Side, put,
};
use std::ops::Range;

/// Operands in which a sequence may hold NaN; the last four are those of the gradients.
const PLACES: [&str; 7] = ["q", "k", "v", "dout", "out", "lse", "dlse"];

fn places(op: Operator) -> &'static [&'static str] {
    if op == Operator::FlashAttnVarlenBwd { &PLACES } else { &PLACES[..3] }
}

/// The call without NaN. It has no gradient of the sinks, which all sequences share.
fn clean(op: Operator, batch: &Batch, memory_layout: &MemoryLayout) -> Call {
    match op {
        Operator::FlashAttnVarlenBwd => {
            GradientCase::store(batch, memory_layout, GradientOptions { dsinks: false, ..GradientOptions::ALL }).into()
        }
        _ => op.call(batch, memory_layout),
    }
}

/// The call in which all rows of sequence `affected` in operand `place` are NaN, or infinite for some dtypes.
fn poisoned(clean: &Call, batch: &Batch, memory_layout: &MemoryLayout, affected: usize, place: &str) -> Call {
    let infinite = batch.config.dtypes.kv != F8E4M3FN && affected % 2 == 1 && place != "q";
    let bad = if infinite { f64::INFINITY } else { f64::NAN };
    let mut batch = batch.clone();
    let sequence = &mut batch.sequences[affected];
    match place {
        "q" => sequence.q.fill(bad),
        "k" => sequence.k.fill(bad),
        "v" => sequence.v.fill(bad),
        _ => (),
    }
    let case = AttentionCase::store(clean.case().target, &batch, memory_layout);
    let Call::Backward(clean) = clean else { return case.into() };
    let (rows, heads, dv) = (case.rows(), batch.config.q_heads, batch.config.value_dim);
    let own = own_rows(&case, affected);
    let mut case = GradientCase { forward: case, ..GradientCase::clone(clean) };
    let all = vec![bad; own.len() * heads * dv];
    let per_head =
        |array: &mut Array| (0..heads).for_each(|head| put(array, head * rows + own.start, &all[..own.len()]));
    match place {
        "dout" => put(&mut case.dout, own.start * heads * dv, &all),
        "out" => put(&mut case.out, own.start * heads * dv, &all),
        "lse" => per_head(&mut case.lse),
        "dlse" => case.dlse.as_mut().map_or((), per_head),
        _ => (),
    }
    case.into()
}

fn own_rows(case: &AttentionCase, index: usize) -> Range<usize> {
    case.cu_seqlens_q[index] as usize..case.cu_seqlens_q[index + 1] as usize
}

/// The bytes of the rows of sequence `affected`, or of all other rows, per result.
fn rows(call: &Call, results: &[Array], affected: usize, own: bool) -> Vec<Vec<u8>> {
    let case = call.case();
    let queries = own_rows(case, affected);
    let of = |(index, array): (usize, &Array)| -> Vec<u8> {
        // out, dq, dk and dv are [n, heads, D], an lse is [Hq, Tq].
        let is_lse = array.dims.len() == 2;
        let row = if is_lse { 1 } else { (array.dims[1] * array.dims[2]) as usize } * array.dtype.size();
        let range = match call {
            Call::Backward(_) if index > 0 => {
                case.cu_seqlens_k[affected] as usize..case.cu_seqlens_k[affected + 1] as usize
            }
            _ => queries.clone(),
        };
        let is_own = |at: usize| range.contains(&if is_lse { at % case.rows() } else { at });
        array
            .bytes
            .chunks_exact(row)
            .enumerate()
            .filter(|(at, _)| is_own(*at) == own)
            .flat_map(|(_, b)| b.to_vec())
            .collect()
    };
    call.computed(results).iter().enumerate().map(of).collect()
}

/// Dtypes with a memory layout and a mask.
fn settings(op: Operator) -> impl Iterator<Item = (Dtypes, MemoryLayout, Mask)> {
    let layouts = match op {
        Operator::FlashAttnVarlen => [(KvLayout::Contiguous, Mask::FULL), (KvLayout::Stacked, Mask::window(25, 3))],
        Operator::FlashAttnVarlenBwd => {
            [(KvLayout::Contiguous, Mask::FULL), (KvLayout::Contiguous, Mask::window(25, 3))]
        }
        _ => [(KvLayout::Interleaved, Mask::CAUSAL), (KvLayout::Interleaved, Mask::sliding(25))],
    };
    let memory_layout =
        |layout| MemoryLayout { seqused_k: layout != KvLayout::Contiguous, ..MemoryLayout::paged(layout, 16) };
    op.dtypes().into_iter().flat_map(move |dtypes| layouts.map(|(layout, mask)| (dtypes, memory_layout(layout), mask)))
}

pub(crate) fn a_sequence_full_of_nan_changes_no_bit_of_another(op: Operator) {
    // Rows of adjacent sequences share tiles.
    let lengths = vec![(1, 30), (9, 40), (1, 50), (20, 23)];
    for (dtypes, memory_layout, mask) in settings(op) {
        let batch = BatchSpec { dtypes, lengths: lengths.clone(), mask, ..BatchSpec::default() }.batch();
        let clean = clean(op, &batch, &memory_layout);
        let expected = clean.assert_matches_reference();
        for (affected, place) in
            (0..lengths.len()).flat_map(|affected| places(op).iter().map(move |place| (affected, place)))
        {
            let results = poisoned(&clean, &batch, &memory_layout, affected, place).call().results(Side::EndsAtGuard);
            assert!(
                rows(&clean, &results, affected, false) == rows(&clean, &expected, affected, false),
                "{dtypes:?}, {mask:?}, {:?}: {place} of sequence {affected} reached another",
                memory_layout.layout
            );
        }
    }
}

pub(crate) fn a_visible_nan_propagates(op: Operator) {
    for (dtypes, memory_layout, mask) in settings(op).step_by(2) {
        let batch = BatchSpec { dtypes, lengths: vec![(3, 40)], mask, ..BatchSpec::default() }.batch();
        let clean = clean(op, &batch, &memory_layout);
        for place in places(op) {
            let results = poisoned(&clean, &batch, &memory_layout, 0, place).call().results(Side::EndsAtGuard);
            // The lse depends on q and k only, dv on the softmax weights and dout only.
            let reached = match (op, *place) {
                (Operator::FlashAttnVarlenBwd, "v" | "out" | "dlse") => 2,
                (Operator::FlashAttnVarlenBwd, _) => 3,
                _ => 1,
            };
            for (bytes, result) in rows(&clean, &results, 0, true).iter().zip(&results).take(reached) {
                let hidden = bytes.chunks_exact(result.dtype.size()).any(|x| result.dtype.decode(x).is_finite());
                assert!(!hidden, "{dtypes:?}: NaN in every {place} gives numbers");
            }
        }
    }
}
