//! BLIS's micro-kernel: an MR x NR block of a matrix product, accumulated in registers. NR is NV vectors.
//!
//! At each step of the depth (the summed dimension) it loads NV vectors of one operand and multiplies them with MR
//! scalars of the other, each broadcast to a vector. A scalar is one lane: an f32, or two bf16 where
//! [`Simd::ELEMENTS_PER_LANE`] is 2.

use super::simd::Simd;

/// The operand whose scalars are broadcast: (row, depth) is at `from[row * row_stride + depth * depth_stride]`.
#[derive(Clone, Copy)]
pub(super) struct BroadcastOperand {
    pub(super) from: *const f32,
    pub(super) row_stride: usize,
    pub(super) depth_stride: usize,
}

/// The operand that is loaded in vectors: the NV vectors of a depth begin at `from[depth * depth_stride]`.
#[derive(Clone, Copy)]
pub(super) struct VectorOperand {
    pub(super) from: *const f32,
    pub(super) depth_stride: usize,
}

/// `sums[r] += sum over depths of scalar (r, depth) * vectors[depth]`
///
/// # Safety
/// The scalars of MR rows and the NV vectors are readable at all depths below `depth`.
#[inline(always)]
pub(super) unsafe fn micro_kernel<S: Simd, const NV: usize, const MR: usize>(
    simd: S,
    scalars: BroadcastOperand,
    vectors: VectorOperand,
    depth: usize,
    mut sums: [[S::V; NV]; MR],
) -> [[S::V; NV]; MR] {
    for k in 0..depth {
        // SAFETY: k < depth, r < MR and v < NV, which the caller says are readable.
        unsafe {
            let mut b = [simd.splat(0.0); NV];
            for (v, b) in b.iter_mut().enumerate() {
                *b = simd.load(vectors.from.add(k * vectors.depth_stride + v * S::LANES));
            }
            for (r, row) in sums.iter_mut().enumerate() {
                let a = simd.splat(scalars.from.add(r * scalars.row_stride + k * scalars.depth_stride).read());
                for (sum, b) in row.iter_mut().zip(b) {
                    *sum = simd.dot(a, b, *sum);
                }
            }
        }
    }
    sums
}

/// Load MR rows of NV vectors, `stride` elements apart.
///
/// # Safety
/// The rows are readable.
#[inline(always)]
pub(super) unsafe fn load_rows<S: Simd, const NV: usize, const MR: usize>(
    simd: S,
    from: *const f32,
    stride: usize,
) -> [[S::V; NV]; MR] {
    let mut rows = [[simd.splat(0.0); NV]; MR];
    for (r, row) in rows.iter_mut().enumerate() {
        for (v, x) in row.iter_mut().enumerate() {
            // SAFETY: r < MR and v < NV: a vector of the rows that the caller says are readable.
            *x = unsafe { simd.load(from.add(r * stride + v * S::LANES)) };
        }
    }
    rows
}

/// Store MR rows of NV vectors, `stride` elements apart.
///
/// # Safety
/// The rows are writable.
#[inline(always)]
pub(super) unsafe fn store_rows<S: Simd, const NV: usize, const MR: usize>(
    simd: S,
    to: *mut f32,
    stride: usize,
    rows: [[S::V; NV]; MR],
) {
    for (r, row) in rows.into_iter().enumerate() {
        for (v, x) in row.into_iter().enumerate() {
            // SAFETY: r < MR and v < NV: a vector of the rows that the caller says are writable.
            unsafe { simd.store(to.add(r * stride + v * S::LANES), x) }
        }
    }
}
