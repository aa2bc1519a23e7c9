//! Compares the gradients of attention: their tolerance, and which of them cannot be compared.

use super::compare::{Tolerance, compare, largest};
use super::metadata::Sequence;
use super::numbers::read;
use crate::error::Result;
use crate::problem::flash_attn_varlen_bwd::FlashAttnVarlenBwd;
use crate::tensor::Tensor;
use std::ops::Range;

/// Compares the results of a call, as (name, result, expected). `cotangents` are `dout` and, if given, `dlse`.
///
/// # Errors
/// As [`compare`].
///
/// # Safety
/// All tensors are readable host memory. `second` has the expected results, and `sequences` are its sequences.
pub(crate) unsafe fn compare_gradients(
    second: &FlashAttnVarlenBwd,
    sequences: &[Sequence],
    cotangents: &[Tensor],
    results: &[(&str, &Tensor, &Tensor)],
) -> Result {
    let softcap = second.forward.score.softcap > 0.0;
    // SAFETY: the caller guarantees that all tensors are readable host memory.
    let (nonfinite, size) = unsafe {
        let sizes = cotangents.iter().map(|tensor| largest(tensor));
        (Nonfinite::find(second, sequences), sizes.fold(0.0, f64::max))
    };
    for (name, found, expected) in results {
        let tolerance = Tolerance::gradient(found.dtype, softcap, size);
        let skipped = |index: &[usize]| match *name {
            "dq" => nonfinite.rows[index[0]],
            "dsinks" => nonfinite.any,
            _ => nonfinite.keys[index[0]],
        };
        // SAFETY: the caller guarantees that all tensors are readable host memory.
        unsafe { compare(name, (found, expected), tolerance, skipped, |_| 0.0) }?;
    }
    Ok(())
}

/// Query rows and keys of sequences with NaN or Inf in a gradient. The definition does not say how these spread within
/// a sequence, so such rows cannot be compared.
struct Nonfinite {
    rows: Vec<bool>,
    keys: Vec<bool>,
    any: bool,
}

impl Nonfinite {
    /// # Safety
    /// As [`compare_gradients`].
    unsafe fn find(problem: &FlashAttnVarlenBwd, sequences: &[Sequence]) -> Self {
        let finite = |result: &Tensor, rows: &Range<usize>| {
            let width = (result.dims[1] * result.dims[2]) as usize;
            let mut elements = rows.start * width..rows.end * width;
            // SAFETY: `at` is an element of these rows of a dense result.
            elements.all(|at| unsafe { read(result.dtype, result.data.add(at * result.dtype.size())) }.is_finite())
        };
        let mut nonfinite =
            Self { rows: vec![false; problem.forward.num_rows], keys: vec![false; problem.num_keys], any: false };
        for sequence in sequences {
            let rows = sequence.first_row..sequence.first_row + sequence.len_q;
            let keys = sequence.first_key..sequence.first_key + sequence.len_k;
            if !(finite(&problem.dq, &rows) && finite(&problem.dk, &keys) && finite(&problem.dv, &keys)) {
                nonfinite.rows[rows].fill(true);
                nonfinite.keys[keys].fill(true);
                nonfinite.any = true;
            }
        }
        nonfinite
    }
}
