//! A product of two matrices, tile by tile in registers: scalars of one times vectors of the other.

use super::simd::Simd;

/// The scalar operand of a register tile: word (row, step) is `from[row * self.row + step * self.step]`.
#[derive(Clone, Copy)]
pub(super) struct Scalars {
    pub(super) from: *const f32,
    pub(super) row: usize,
    pub(super) step: usize,
}

/// The vector operand: the `[NV]` vectors of step s begin at `from[s * self.step]`.
#[derive(Clone, Copy)]
pub(super) struct Vectors {
    pub(super) from: *const f32,
    pub(super) step: usize,
}

/// `sums[r] += sum over steps of scalar (r, step) * vectors[step]`
///
/// # Safety
/// All scalars and vectors are readable.
#[inline(always)]
pub(super) unsafe fn tile<S: Simd, const NV: usize, const MR: usize>(
    simd: S,
    scalars: Scalars,
    vectors: Vectors,
    steps: usize,
    mut sums: [[S::V; NV]; MR],
) -> [[S::V; NV]; MR] {
    for step in 0..steps {
        // SAFETY: step < steps, r < MR, v < NV.
        unsafe {
            let mut b = [simd.splat(0.0); NV];
            for (v, b) in b.iter_mut().enumerate() {
                *b = simd.load(vectors.from.add(step * vectors.step + v * S::LANES));
            }
            for (r, row) in sums.iter_mut().enumerate() {
                let a = simd.splat(scalars.from.add(r * scalars.row + step * scalars.step).read());
                for (sum, b) in row.iter_mut().zip(b) {
                    *sum = simd.dot(a, b, *sum);
                }
            }
        }
    }
    sums
}

/// Rows of NV vectors, `stride` apart.
///
/// # Safety
/// They are readable.
#[inline(always)]
pub(super) unsafe fn load_rows<S: Simd, const NV: usize, const MR: usize>(
    simd: S,
    from: *const f32,
    stride: usize,
) -> [[S::V; NV]; MR] {
    let mut rows = [[simd.splat(0.0); NV]; MR];
    for (r, row) in rows.iter_mut().enumerate() {
        for (v, x) in row.iter_mut().enumerate() {
            // SAFETY: vector (r, v).
            *x = unsafe { simd.load(from.add(r * stride + v * S::LANES)) };
        }
    }
    rows
}

/// The other way.
///
/// # Safety
/// They are writable.
#[inline(always)]
pub(super) unsafe fn store_rows<S: Simd, const NV: usize, const MR: usize>(
    simd: S,
    to: *mut f32,
    stride: usize,
    rows: [[S::V; NV]; MR],
) {
    for (r, row) in rows.into_iter().enumerate() {
        for (v, x) in row.into_iter().enumerate() {
            // SAFETY: vector (r, v).
            unsafe { simd.store(to.add(r * stride + v * S::LANES), x) }
        }
    }
}
