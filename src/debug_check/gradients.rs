//! What is particular about the gradients of attention: how far they may be off, and what is not compared.

use super::compare::{Tolerance, compare, largest};
use super::metadata::Sequence;
use super::numbers::read;
use crate::error::Result;
use crate::problem::flash_attn_varlen_bwd::FlashAttnVarlenBwd;
use crate::tensor::Tensor;
use std::ops::Range;

/// The results of a call, by name, against those of a second one, `expected`; `dout` and `dlse` are what both were given.
///
/// # Errors
/// As [`compare`].
///
/// # Safety
/// All of it is readable host memory; `second` has the results that are expected, `sequences` are those of its metadata.
pub(crate) unsafe fn compare_gradients(
    second: &FlashAttnVarlenBwd,
    sequences: &[Sequence],
    cotangents: &[Tensor],
    results: &[(&str, &Tensor, &Tensor)],
) -> Result {
    let softcap = second.forward.score.softcap > 0.0;
    // SAFETY: this function's contract.
    let (spoiled, size) = unsafe {
        let sizes = cotangents.iter().map(|tensor| largest(tensor));
        (Spoiled::find(second, sequences), sizes.fold(0.0, f64::max))
    };
    for (name, found, expected) in results {
        let tolerance = Tolerance::gradient(found.dtype, softcap, size);
        let skipped = |index: &[usize]| match *name {
            "dq" => spoiled.rows[index[0]],
            "dsinks" => spoiled.any,
            _ => spoiled.keys[index[0]],
        };
        // SAFETY: this function's contract.
        unsafe { compare(name, (found, expected), tolerance, skipped, |_| 0.0) }?;
    }
    Ok(())
}

/// What belongs to sequences that compute with NaN or Inf: where within the sequence it spreads is not said.
struct Spoiled {
    rows: Vec<bool>,
    keys: Vec<bool>,
    any: bool,
}

impl Spoiled {
    /// # Safety
    /// As [`compare_gradients`].
    unsafe fn find(problem: &FlashAttnVarlenBwd, sequences: &[Sequence]) -> Self {
        let finite = |result: &Tensor, rows: &Range<usize>| {
            let width = (result.dims[1] * result.dims[2]) as usize;
            let mut elements = rows.start * width..rows.end * width;
            // SAFETY: rows of a dense result.
            elements.all(|at| unsafe { read(result.dtype, result.data.add(at * result.dtype.size())) }.is_finite())
        };
        let mut spoiled =
            Self { rows: vec![false; problem.forward.num_rows], keys: vec![false; problem.num_keys], any: false };
        for sequence in sequences {
            let rows = sequence.first_row..sequence.first_row + sequence.len_q;
            let keys = sequence.first_key..sequence.first_key + sequence.len_k;
            if !(finite(&problem.dq, &rows) && finite(&problem.dk, &keys) && finite(&problem.dv, &keys)) {
                spoiled.rows[rows].fill(true);
                spoiled.keys[keys].fill(true);
                spoiled.any = true;
            }
        }
        spoiled
    }
}
