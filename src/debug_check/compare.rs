//! Results held against what was computed a second time.

use super::accuracy;
use super::metadata::Sequence;
use super::numbers::read;
use crate::error::{Error, Result};
use crate::problem::attention::Attention;
use crate::tensor::{DType, Tensor};

/// How far a number may be off.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Tolerance {
    /// In units of the number, or of the largest one of the result.
    relative: f64,
    absolute: f64,
    of_largest: bool,
}

/// The distance of neighbouring numbers around 1.
fn spacing(dtype: DType) -> f64 {
    let mantissa_bits = match dtype {
        DType::F8E5M2 => 2,
        DType::F8E4M3FN => 3,
        DType::BF16 => 7,
        DType::F16 => 10,
        DType::F32 => 23,
        DType::F64 => 52,
        // Integers are exact.
        _ => return 0.0,
    };
    f64::from(-mantissa_bits).exp2()
}

impl Tolerance {
    /// Numbers that are rounded once: the neighbour on either side. What is smaller than normal may be taken for 0.
    pub(crate) fn rounded_once(dtype: DType) -> Self {
        let absolute = match dtype {
            DType::F8E5M2 => (-14f64).exp2(),
            DType::F8E4M3FN => (-6f64).exp2(),
            DType::F64 => f64::MIN_POSITIVE,
            _ if spacing(dtype) > 0.0 => 1e-6,
            _ => 0.0,
        };
        Self { relative: 1.01 * spacing(dtype), absolute, of_largest: false }
    }

    /// Sums of products with weights that sum to 1. Several roundings, and in 16 bits a hyperbolic tangent of 11 bits.
    pub(crate) fn weighted_sum(dtype: DType, softcap: bool) -> Self {
        let relative = if dtype == DType::F32 { 1e-4 } else { spacing(dtype) * 4.0 };
        let capped = if softcap && dtype != DType::F32 { 0.06 } else { 0.0 };
        Self { relative: relative + capped, absolute: 1e-5, of_largest: true }
    }

    /// A log-sum-exp.
    pub(crate) fn lse(dtype: DType, softcap: bool) -> Self {
        let relative = if softcap && dtype != DType::F32 { accuracy::LSE_CAPPED } else { accuracy::LSE };
        Self { relative, absolute: relative, of_largest: false }
    }

    /// Sums of products with gradients of scores, which in 16 bits may be rounded themselves. What cancels in them is in
    /// units of the cotangents, of which the largest is `size`.
    pub(crate) fn gradient(dtype: DType, softcap: bool, size: f64) -> Self {
        let relative = if dtype == DType::F32 { 2e-4 } else { spacing(dtype) * 8.0 };
        let capped = if softcap && dtype != DType::F32 { 0.06 } else { 0.0 };
        Self { relative: relative + capped, absolute: 1e-4 * size, of_largest: true }
    }

    /// `excess` says how much further off the number may be.
    fn allows(self, found: f64, expected: f64, largest: f64, excess: impl FnOnce() -> f64) -> bool {
        if !expected.is_finite() {
            return found.to_bits() == expected.to_bits() || found.is_nan() && expected.is_nan();
        }
        let unit = if self.of_largest { largest } else { expected.abs() };
        let beyond = (found - expected).abs() - (self.relative * unit + self.absolute);
        self.relative > 0.0 && (beyond <= 0.0 || beyond <= excess())
    }
}

/// A result as it is and as it was computed a second time; `skipped` indices may hold anything, others may be off by
/// their `excess` more than the tolerance says.
///
/// # Errors
/// `INTERNAL`, naming the result, the first index that is off, and both numbers.
///
/// # Safety
/// Both are readable host memory, of one dtype and shape.
pub(crate) unsafe fn compare(
    name: &str,
    (found, expected): (&Tensor, &Tensor),
    tolerance: Tolerance,
    skipped: impl Fn(&[usize]) -> bool,
    excess: impl Fn(&[usize]) -> f64,
) -> Result {
    let dtype = found.dtype;
    // SAFETY: this function's contract; an index of the tensor.
    let number = |tensor: &Tensor, index: &[usize]| unsafe { read(dtype, place(tensor, index)) };
    // Bits are compared first, which is all that integers need.
    let bits = |tensor: &Tensor, index: &[usize]| {
        // SAFETY: as above.
        unsafe { std::slice::from_raw_parts(place(tensor, index), dtype.size()) }
    };
    // SAFETY: this function's contract.
    let largest = if tolerance.of_largest { unsafe { largest(expected) } } else { 0.0 };
    let (mut first, mut off) = (None, 0usize);
    for_each_index(found.dims, |index| {
        if bits(found, index) == bits(expected, index) || skipped(index) {
            return;
        }
        let (is, should) = (number(found, index), number(expected, index));
        if !tolerance.allows(is, should, largest, || excess(index)) {
            off += 1;
            first.get_or_insert_with(|| (index.to_vec(), is, should));
        }
    });
    let Some((index, is, should)) = first else { return Ok(()) };
    Err(Error::internal(format!(
        "{name}{index:?} is {is}, expected {should}; {off} of {} elements are off",
        found.len()
    )))
}

/// The address of an element.
fn place(tensor: &Tensor, index: &[usize]) -> *const u8 {
    let offset: i64 = index.iter().enumerate().map(|(axis, &i)| i as i64 * tensor.stride(axis)).sum();
    tensor.data.wrapping_offset(offset as isize * tensor.dtype.size() as isize).cast_const()
}

/// The magnitude of the largest number, NaN and Inf aside.
///
/// # Safety
/// The tensor is readable host memory.
pub(super) unsafe fn largest(tensor: &Tensor) -> f64 {
    let mut largest = 0.0f64;
    for_each_index(tensor.dims, |index| {
        // SAFETY: this function's contract; an index of the tensor.
        let x = unsafe { read(tensor.dtype, place(tensor, index)) }.abs();
        largest = largest.max(if x.is_finite() { x } else { 0.0 });
    });
    largest
}

/// Every index of a shape, the last axis fastest.
fn for_each_index(dims: &[i64], mut visit: impl FnMut(&[usize])) {
    let mut index = vec![0usize; dims.len()];
    if dims.contains(&0) {
        return;
    }
    loop {
        visit(&index);
        let Some(axis) = (0..dims.len()).rev().find(|&axis| index[axis] + 1 < dims[axis] as usize) else { return };
        index[axis] += 1;
        index[axis + 1..].fill(0);
    }
}

/// The rows of sequences that compute with NaN or Inf, by row: where within the sequence it spreads is not said.
///
/// # Safety
/// The problem's results are readable host memory; `sequences` are those of its metadata.
pub(crate) unsafe fn nonfinite_rows(problem: &Attention, sequences: &[Sequence]) -> Vec<bool> {
    let (width, size) = (problem.num_q_heads * problem.value_dim, problem.out.dtype.size());
    let mut spoiled = vec![false; problem.num_rows];
    for sequence in sequences {
        let rows = sequence.first_row..sequence.first_row + sequence.len_q;
        let elements = rows.start * width..rows.end * width;
        // SAFETY: rows of the dense [Tq, Hq, Dv].
        let number = |at: usize| unsafe { read(problem.out.dtype, problem.out.data.add(at * size)) };
        if !elements.clone().all(|at| number(at).is_finite()) {
            spoiled[rows].fill(true);
        }
    }
    spoiled
}
