//! Compares results with a second computation.

use super::accuracy;
use super::metadata::Sequence;
use super::numbers::read;
use crate::error::{Error, Result};
use crate::problem::attention::Attention;
use crate::tensor::{DType, Tensor};

/// The largest error that a number may have.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Tolerance {
    /// Relative to the number, or with `relative_to_largest` to the largest magnitude in the result.
    relative: f64,
    absolute: f64,
    relative_to_largest: bool,
}

/// The spacing of the numbers of a dtype around 1.
fn spacing(dtype: DType) -> f64 {
    let mantissa_bits = match dtype {
        DType::F8E5M2 => 2,
        DType::F8E4M3FN => 3,
        DType::BF16 => 7,
        DType::F16 => 10,
        DType::F32 => 23,
        DType::F64 => 52,
        // The results of integer operators are exact.
        _ => return 0.0,
    };
    f64::from(-mantissa_bits).exp2()
}

impl Tolerance {
    /// The tolerance of numbers that are rounded once: one unit in the last place. Subnormal numbers may be flushed to
    /// 0.
    pub(crate) fn rounded_once(dtype: DType) -> Self {
        let absolute = match dtype {
            DType::F8E5M2 => (-14f64).exp2(),
            DType::F8E4M3FN => (-6f64).exp2(),
            DType::F64 => f64::MIN_POSITIVE,
            _ if spacing(dtype) > 0.0 => 1e-6,
            _ => 0.0,
        };
        Self { relative: 1.01 * spacing(dtype), absolute, relative_to_largest: false }
    }

    /// The tolerance of weighted sums with weights that add up to 1: several roundings, and with softcap in f16 or bf16
    /// a hyperbolic tangent of 11 bits.
    pub(crate) fn weighted_sum(dtype: DType, softcap: bool) -> Self {
        let relative = if dtype == DType::F32 { 1e-4 } else { spacing(dtype) * 4.0 };
        let capped = if softcap && dtype != DType::F32 { 0.06 } else { 0.0 };
        Self { relative: relative + capped, absolute: 1e-5, relative_to_largest: true }
    }

    /// The tolerance of the log-sum-exp.
    pub(crate) fn lse(dtype: DType, softcap: bool) -> Self {
        let relative = if softcap && dtype != DType::F32 { accuracy::LSE_CAPPED } else { accuracy::LSE };
        Self { relative, absolute: relative, relative_to_largest: false }
    }

    /// The tolerance of dq, dk and dv, which are sums over gradients of scores. In f16 and bf16 these gradients may
    /// themselves be rounded. Terms that cancel have the magnitude of the cotangents, of which `size` is the largest.
    pub(crate) fn gradient(dtype: DType, softcap: bool, size: f64) -> Self {
        let relative = if dtype == DType::F32 { 2e-4 } else { spacing(dtype) * 8.0 };
        let capped = if softcap && dtype != DType::F32 { 0.06 } else { 0.0 };
        Self { relative: relative + capped, absolute: 1e-4 * size, relative_to_largest: true }
    }

    /// Whether the error is at most this tolerance plus `excess`.
    fn allows(self, found: f64, expected: f64, largest: f64, excess: impl FnOnce() -> f64) -> bool {
        if !expected.is_finite() {
            return found.to_bits() == expected.to_bits() || found.is_nan() && expected.is_nan();
        }
        let unit = if self.relative_to_largest { largest } else { expected.abs() };
        let beyond = (found - expected).abs() - (self.relative * unit + self.absolute);
        self.relative > 0.0 && (beyond <= 0.0 || beyond <= excess())
    }
}

/// Compares a result with the expected one. Indices for which `skipped` holds are not compared; at the others the error
/// may exceed the tolerance by `excess`.
///
/// # Errors
/// `INTERNAL`, with the name of the result, the first wrong index and both numbers.
///
/// # Safety
/// Both tensors are readable host memory and have the same dtype and shape.
pub(crate) unsafe fn compare(
    name: &str,
    (found, expected): (&Tensor, &Tensor),
    tolerance: Tolerance,
    skipped: impl Fn(&[usize]) -> bool,
    excess: impl Fn(&[usize]) -> f64,
) -> Result {
    let dtype = found.dtype;
    // SAFETY: the caller guarantees readable host memory, and `index` is an index of the tensor.
    let number = |tensor: &Tensor, index: &[usize]| unsafe { read(dtype, place(tensor, index)) };
    // Equal bits are compared first. For integers this is the whole comparison.
    let bits = |tensor: &Tensor, index: &[usize]| {
        // SAFETY: as for `number`; an element has `dtype.size()` bytes.
        unsafe { std::slice::from_raw_parts(place(tensor, index), dtype.size()) }
    };
    // SAFETY: the caller guarantees readable host memory.
    let largest = if tolerance.relative_to_largest { unsafe { largest(expected) } } else { 0.0 };
    let (mut first, mut off) = (None, 0usize);
    for_each_index(found.dims, |index| {
        if bits(found, index) == bits(expected, index) || skipped(index) {
            return;
        }
        let (actual, exact) = (number(found, index), number(expected, index));
        if !tolerance.allows(actual, exact, largest, || excess(index)) {
            off += 1;
            first.get_or_insert_with(|| (index.to_vec(), actual, exact));
        }
    });
    let Some((index, actual, exact)) = first else { return Ok(()) };
    Err(Error::internal(format!(
        "{name}{index:?} is {actual}, expected {exact}; {off} of {} elements are off",
        found.len()
    )))
}

/// The address of the element at `index`.
fn place(tensor: &Tensor, index: &[usize]) -> *const u8 {
    let offset: i64 = index.iter().enumerate().map(|(axis, &i)| i as i64 * tensor.stride(axis)).sum();
    tensor.data.wrapping_offset(offset as isize * tensor.dtype.size() as isize).cast_const()
}

/// The largest finite magnitude of a tensor.
///
/// # Safety
/// The tensor is readable host memory.
pub(super) unsafe fn largest(tensor: &Tensor) -> f64 {
    let mut largest = 0.0f64;
    for_each_index(tensor.dims, |index| {
        // SAFETY: the caller guarantees readable host memory, and `index` is an index of the tensor.
        let x = unsafe { read(tensor.dtype, place(tensor, index)) }.abs();
        largest = largest.max(if x.is_finite() { x } else { 0.0 });
    });
    largest
}

/// Calls `visit` with every index of a shape in row-major order.
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

/// Per row, whether its sequence has NaN or Inf anywhere in `out`. The definition does not say how these spread within
/// a sequence, so such rows cannot be compared.
///
/// # Safety
/// The problem's results are readable host memory, and `sequences` are the sequences of its metadata.
pub(crate) unsafe fn nonfinite_rows(problem: &Attention, sequences: &[Sequence]) -> Vec<bool> {
    let (width, size) = (problem.num_q_heads * problem.value_dim, problem.out.dtype.size());
    let mut nonfinite = vec![false; problem.num_rows];
    for sequence in sequences {
        let rows = sequence.first_row..sequence.first_row + sequence.len_q;
        let elements = rows.start * width..rows.end * width;
        // SAFETY: `at` is an element of the sequence's rows in the dense `out [Tq, Hq, Dv]`.
        let number = |at: usize| unsafe { read(problem.out.dtype, problem.out.data.add(at * size)) };
        if !elements.clone().all(|at| number(at).is_finite()) {
            nonfinite[rows].fill(true);
        }
    }
    nonfinite
}
