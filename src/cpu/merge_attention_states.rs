//! Merges attention states on the CPU. A task is a range of rows.

use super::element::{Element, narrow, widen};
use super::simd::{Isa, Simd, SimdKernel};
use crate::error::Result;
use crate::pool::{Pool, parallel_for};
use crate::problem::merge_attention_states::{MergeAttentionStates, State};
use crate::tensor::DType;
use half::{bf16, f16};
use std::marker::PhantomData;
use std::ops::Range;

/// Elements of a task, enough to pay for scheduling it.
const TASK_ELEMENTS: usize = 1 << 15;
/// Elements that are converted to f32 at a time.
const CHUNK: usize = 256;

/// Compute the merged `out` and `lse`.
///
/// # Errors
/// `INTERNAL` if a task panicked.
///
/// # Safety
/// The problem's views are valid host memory, the results writable and not otherwise accessed.
pub(crate) unsafe fn run(problem: &MergeAttentionStates, pool: &dyn Pool) -> Result {
    if problem.is_empty() {
        return Ok(());
    }
    let rows_of_task = (TASK_ELEMENTS / (problem.num_heads * problem.head_dim)).max(1);
    parallel_for(
        pool,
        problem.num_rows.div_ceil(rows_of_task),
        || (),
        |(), task| {
            let first = task * rows_of_task;
            let rows = first..(first + rows_of_task).min(problem.num_rows);
            // SAFETY: the caller guarantees valid views, the problem has validated that all have this dtype, and no
            // other task has these rows.
            unsafe {
                match problem.out.dtype {
                    DType::F16 => Isa::best().dispatch(MergeRows::<f16> { problem, rows, element: PhantomData }),
                    DType::BF16 => Isa::best().dispatch(MergeRows::<bf16> { problem, rows, element: PhantomData }),
                    _ => Isa::best().dispatch(MergeRows::<f32> { problem, rows, element: PhantomData }),
                }
            }
        },
    )
}

/// How the merged row is computed.
enum Merge {
    /// Zeros: both states are empty.
    Zero,
    /// A copy of the row of a: b is empty.
    A,
    /// A copy of the row of b: a is empty.
    B,
    /// The sum of both rows with these weights, which add up to 1.
    Both(f32, f32),
}

/// How two states with these log-sum-exps merge, and the log-sum-exp of the merged state.
fn merge(lse_a: f32, lse_b: f32) -> (Merge, f32) {
    match (lse_a.is_finite(), lse_b.is_finite()) {
        (false, false) => (Merge::Zero, f32::NEG_INFINITY),
        (true, false) => (Merge::A, lse_a),
        (false, true) => (Merge::B, lse_b),
        (true, true) => {
            let largest = lse_a.max(lse_b);
            // The larger of the two is 1.
            let (weight_a, weight_b) = ((lse_a - largest).exp(), (lse_b - largest).exp());
            let sum = weight_a + weight_b;
            (Merge::Both(weight_a / sum, weight_b / sum), largest + weight_a.min(weight_b).ln_1p())
        }
    }
}

/// Merges a range of rows.
///
/// # Safety
/// As [`run`], with `T` the element type; the rows are below n, and nothing else accesses their results.
struct MergeRows<'a, T> {
    problem: &'a MergeAttentionStates<'a>,
    rows: Range<usize>,
    element: PhantomData<T>,
}

impl<T: Element> SimdKernel for MergeRows<'_, T> {
    type Output = ();
    #[inline(always)]
    unsafe fn run<S: Simd>(self, simd: S) {
        let problem = self.problem;
        let (heads, d) = (problem.num_heads, problem.head_dim);
        for (row, head) in self.rows.flat_map(|row| (0..heads).map(move |head| (row, head))) {
            // lse [h, n], out [n, h, d]
            let (sum, first) = (head * problem.num_rows + row, (row * heads + head) * d);
            // SAFETY: row < n and head < h; the problem has validated sizes, strides and dtypes; no other task has this
            // row.
            unsafe {
                let out = problem.out.data.cast::<T>().add(first);
                let (merge, lse) = merge(problem.a.lse.add(sum).read(), problem.b.lse.add(sum).read());
                problem.lse.add(sum).write(lse);
                match merge {
                    Merge::Zero => out.write_bytes(0, d),
                    Merge::A => out.copy_from_nonoverlapping(row_of(&problem.a, row, head), d),
                    Merge::B => out.copy_from_nonoverlapping(row_of(&problem.b, row, head), d),
                    Merge::Both(weight_a, weight_b) => {
                        let (a, b) = (row_of(&problem.a, row, head), row_of(&problem.b, row, head));
                        add_weighted::<S, T>(simd, (weight_a, a), (weight_b, b), out, d);
                    }
                }
            }
        }
    }
}

/// The output row of a head.
///
/// # Safety
/// The state has the row and the head, and its dtype is `T`.
#[inline(always)]
unsafe fn row_of<T>(state: &State, row: usize, head: usize) -> *const T {
    let element = row as i64 * state.out.stride(0) + head as i64 * state.out.stride(1);
    // SAFETY: the state has this row and head, so the offset stays within its output.
    unsafe { state.out.data.cast_const().cast::<T>().offset(element as isize) }
}

/// `out = weight_a * a + weight_b * b`
///
/// # Safety
/// `a` and `b` have `d` readable elements, `out` has `d` writable ones.
#[inline(always)]
unsafe fn add_weighted<S: Simd, T: Element>(
    simd: S,
    (weight_a, a): (f32, *const T),
    (weight_b, b): (f32, *const T),
    out: *mut T,
    d: usize,
) {
    let (mut wide_a, mut wide_b) = ([0.0f32; CHUNK], [0.0f32; CHUNK]);
    for first in (0..d).step_by(CHUNK) {
        let count = CHUNK.min(d - first);
        // SAFETY: first + count <= d, and count <= CHUNK, the length of both arrays.
        unsafe {
            widen(simd, a.add(first), wide_a.as_mut_ptr(), count);
            widen(simd, b.add(first), wide_b.as_mut_ptr(), count);
            for (a, b) in wide_a[..count].iter_mut().zip(&wide_b[..count]) {
                *a = weight_a * *a + weight_b * b;
            }
            narrow(simd, wide_a.as_ptr(), out.add(first), count);
        }
    }
}
