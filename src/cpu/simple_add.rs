//! `out = a + b` on the CPU.

use crate::error::Result;
use crate::pool::{Pool, parallel_for};
use crate::problem::simple_add::SimpleAdd;
use crate::tensor::DType;
use half::{bf16, f16};

/// Elements of a task, enough to pay for scheduling it.
const CHUNK: usize = 1 << 15;

/// Compute `out`.
///
/// # Errors
/// `INTERNAL` if a task panicked.
///
/// # Safety
/// The problem's views are valid host memory, `out` writable.
pub(crate) unsafe fn run(problem: &SimpleAdd, pool: &dyn Pool) -> Result {
    macro_rules! add {
        ($t:ty, $sum:expr) => {
            // SAFETY: `problem` has validated dtypes and shapes, and the caller guarantees the memory.
            unsafe { add::<$t>(problem, pool, $sum) }
        };
    }
    match problem.a.dtype {
        DType::F16 => add!(f16, |a, b| a + b),
        DType::BF16 => add!(bf16, |a, b| a + b),
        DType::F32 => add!(f32, |a, b| a + b),
        DType::F64 => add!(f64, |a, b| a + b),
        DType::I8 => add!(i8, i8::wrapping_add),
        DType::U8 => add!(u8, u8::wrapping_add),
        DType::I32 => add!(i32, i32::wrapping_add),
        _ => add!(i64, i64::wrapping_add),
    }
}

/// # Safety
/// As [`run`], with `T` the element type.
unsafe fn add<T: Copy>(problem: &SimpleAdd, pool: &dyn Pool, sum: impl Fn(T, T) -> T + Sync) -> Result {
    let n = problem.out.len();
    parallel_for(
        pool,
        n.div_ceil(CHUNK),
        || (),
        |(), chunk| {
            let (a, b) = (problem.a.data.cast_const().cast::<T>(), problem.b.data.cast_const().cast::<T>());
            let out = problem.out.data.cast::<T>();
            for i in chunk * CHUNK..((chunk + 1) * CHUNK).min(n) {
                // SAFETY: i < n, the number of elements of each view, and no other task has this chunk. Both elements
                // are read before the result is written, since `out` may be a or b.
                unsafe { out.add(i).write(sum(a.add(i).read(), b.add(i).read())) }
            }
        },
    )
}
