//! Packs K and V of a block for the micro-kernels of `gemm`, as BLIS packs its operands. E is
//! [`Simd::ELEMENTS_PER_LANE`], and a lane holds one f32 or two bf16 that are multiplied together:
//!
//! ```text
//! K   [keys][D / E]             a lane holds E elements of one key
//! V   [Dv / MR][keys / E][MR]   micro-panels of MR columns; a lane holds one column of E keys
//! ```

use super::block_rows::BLOCK;
use super::block_step::{BlockBuffers, BlockStep};
use super::kv_loader::{AsF32, Bf16Pairs, Fp8AsBf16Pairs, Fp8AsF32, KvLoader};
use crate::cpu::simd::{Simd, SimdKernel};
use crate::tensor::DType;
use half::{bf16, f16};

/// Pack the block of `block_step`.
///
/// # Safety
/// The rows of the block are readable, and the buffers have room for a block.
#[inline(always)]
pub(super) unsafe fn pack_block<S: Simd>(simd: S, block_step: &BlockStep, buffers: BlockBuffers) {
    // SAFETY: the caller guarantees what `PackBlock` requires: readable rows and buffers with room for a block.
    unsafe { simd.vectorize(PackBlock { block_step, buffers }) };
}

/// # Safety
/// As [`pack_block`].
struct PackBlock<'a> {
    block_step: &'a BlockStep<'a>,
    buffers: BlockBuffers,
}

impl SimdKernel for PackBlock<'_> {
    type Output = ();
    #[inline(always)]
    unsafe fn run<S: Simd>(self, simd: S) {
        let dtype = self.block_step.kv_dtype;
        // SAFETY: each arm names a loader for rows of `dtype`.
        unsafe {
            match dtype {
                DType::BF16 if S::ELEMENTS_PER_LANE == 2 => self.pack::<S, Bf16Pairs>(simd),
                DType::I8 if S::ELEMENTS_PER_LANE == 2 => self.pack::<S, Fp8AsBf16Pairs<S, true>>(simd),
                _ if S::ELEMENTS_PER_LANE == 2 => self.pack::<S, Fp8AsBf16Pairs<S, false>>(simd),
                DType::F16 => self.pack::<S, AsF32<f16>>(simd),
                DType::BF16 => self.pack::<S, AsF32<bf16>>(simd),
                DType::F32 => self.pack::<S, AsF32<f32>>(simd),
                DType::I8 => self.pack::<S, AsF32<i8>>(simd),
                _ => self.pack::<S, Fp8AsF32>(simd),
            }
        }
    }
}

/// The row that is paired with the last one of an odd number: 512 zeros of any element type.
pub(in crate::cpu) static ZEROS: [u64; 256] = [0; 256];

impl PackBlock<'_> {
    /// # Safety
    /// As [`pack_block`]; the loader is one for the rows' dtype.
    #[inline(always)]
    unsafe fn pack<S: Simd, L: KvLoader<S>>(&self, simd: S) {
        let BlockStep { rows, d, dv, kv_dtype, .. } = *self.block_step;
        let BlockBuffers { k, v, .. } = self.buffers;
        let loader = L::new(simd, kv_dtype);
        let len = rows.block.len;
        for j in 0..len {
            // SAFETY: K row j of the block is readable, and the buffer has D / E lanes for each of BLOCK keys, and V
            // after them.
            unsafe { pack_row(simd, loader, rows.k(j), k.add(j * d / S::ELEMENTS_PER_LANE), d) };
        }
        for j in (0..len).step_by(S::ELEMENTS_PER_LANE) {
            // The p of the missing partner of an odd last key is 0, and so has V to be: 0 * NaN would be NaN.
            let second = if j + 1 < len { rows.v(j + 1) } else { ZEROS.as_ptr().cast() };
            // SAFETY: V row j of the block is readable, and so are V row j + 1 and ZEROS. The buffer has Dv padded to
            // whole vectors for each of BLOCK keys.
            unsafe {
                let to = v.add(j * S::MR / S::ELEMENTS_PER_LANE);
                pack_interleaved(simd, loader, (rows.v(j), second), (to, BLOCK / S::ELEMENTS_PER_LANE * S::MR), dv);
            }
        }
    }
}

/// A row of `d` elements, E per lane. The last vector may go beyond the row with zeros; in a packed block the next row,
/// or V, overwrites them later.
///
/// # Safety
/// The row is readable, and `to` has room for the row rounded up to whole vectors.
#[inline(always)]
pub(in crate::cpu) unsafe fn pack_row<S: Simd, L: KvLoader<S>>(
    simd: S,
    loader: L,
    row: *const u8,
    to: *mut f32,
    d: usize,
) {
    let vector = S::LANES * S::ELEMENTS_PER_LANE;
    let whole = d / vector * vector;
    // SAFETY: elements i to i + vector of the row, then the d - whole elements that are left, which go to the lanes of
    // the same elements.
    unsafe {
        for i in (0..whole).step_by(vector) {
            simd.store(to.add(i / S::ELEMENTS_PER_LANE), loader.load(simd, row.add(i * L::BYTES), vector));
        }
        if whole < d {
            let last = loader.load(simd, row.add(whole * L::BYTES), d - whole);
            simd.store(to.add(whole / S::ELEMENTS_PER_LANE), last);
        }
    }
}

/// E rows of `d` columns, interleaved: a lane holds a column. Micro-panels of MR columns begin `panel_stride` lanes
/// apart, the first one at `to`; if they are MR lanes apart, the columns are one row.
///
/// # Safety
/// The rows are readable, and from `to` on there is room for the micro-panels of `d` columns rounded up to whole
/// vectors.
#[inline(always)]
pub(in crate::cpu) unsafe fn pack_interleaved<S: Simd, L: KvLoader<S>>(
    simd: S,
    loader: L,
    rows: (*const u8, *const u8),
    (to, panel_stride): (*mut f32, usize),
    d: usize,
) {
    let whole = d / S::LANES * S::LANES;
    // SAFETY: columns i to i + LANES of both rows, then the d - whole columns that are left; column i belongs to
    // micro-panel i / MR.
    unsafe {
        for i in (0..whole).step_by(S::LANES) {
            let x = loader.load_interleaved(simd, (rows.0.add(i * L::BYTES), rows.1.add(i * L::BYTES)), S::LANES);
            simd.store_groups(to.add(i / S::MR * panel_stride), panel_stride, x);
        }
        if whole < d {
            let at = whole * L::BYTES;
            let x = loader.load_interleaved(simd, (rows.0.add(at), rows.1.add(at)), d - whole);
            simd.store_groups(to.add(whole / S::MR * panel_stride), panel_stride, x);
        }
    }
}
