//! K and V of a block as words, for the register tiles of `many_rows`: K as `[keys][words of D]`, V as
//! `[Dv / MR][words of keys][MR]`, which is how the tiles walk.

use super::block_step::{BlockStep, Buffers};
use super::keys::BLOCK;
use super::sources::{Bf16Pairs, CodePairs, SingleCodes, Singles, Source};
use crate::cpu::simd::{Simd, SimdKernel};
use crate::tensor::DType;
use half::{bf16, f16};

/// Stage the block of `block_step`.
///
/// # Safety
/// The rows are readable, the buffers a block's.
#[inline(always)]
pub(super) unsafe fn stage<S: Simd>(simd: S, block_step: &BlockStep, buffers: Buffers) {
    // SAFETY: rows and buffers are those of this function's contract.
    unsafe { simd.vectorize(Stage { block_step, buffers }) };
}

/// # Safety
/// As [`stage`].
struct Stage<'a> {
    block_step: &'a BlockStep<'a>,
    buffers: Buffers,
}

impl SimdKernel for Stage<'_> {
    type Output = ();
    #[inline(always)]
    unsafe fn run<S: Simd>(self, simd: S) {
        let dtype = self.block_step.kv_dtype;
        // SAFETY: each source is one of rows of `dtype`.
        unsafe {
            match dtype {
                DType::BF16 if S::ELEMENTS_PER_LANE == 2 => self.rows::<S, Bf16Pairs>(simd),
                _ if S::ELEMENTS_PER_LANE == 2 => self.rows::<S, CodePairs<S>>(simd),
                DType::F16 => self.rows::<S, Singles<f16>>(simd),
                DType::BF16 => self.rows::<S, Singles<bf16>>(simd),
                DType::F32 => self.rows::<S, Singles<f32>>(simd),
                _ => self.rows::<S, SingleCodes>(simd),
            }
        }
    }
}

/// A V row of the key behind the last, in any element type.
static ZEROS: [u64; 64] = [0; 64];

impl Stage<'_> {
    /// # Safety
    /// As [`stage`]; the rows are of the source's type.
    #[inline(always)]
    unsafe fn rows<S: Simd, T: Source<S>>(&self, simd: S) {
        let BlockStep { rows, d, dv, kv_dtype, .. } = *self.block_step;
        let Buffers { k, v, .. } = self.buffers;
        let source = T::new(simd, kv_dtype);
        let len = rows.block.len;
        for j in 0..len {
            // SAFETY: K row j; the buffer has room for its words.
            unsafe { stage_key(simd, source, rows.k(j), k.add(j * d / S::ELEMENTS_PER_LANE), d) };
        }
        for j in (0..len).step_by(S::ELEMENTS_PER_LANE) {
            // The partner of a last key without one has to be 0 as well as its p.
            let second = if j + 1 < len { rows.v(j + 1) } else { ZEROS.as_ptr().cast() };
            // SAFETY: V rows j and j + 1; the buffer has room for whole vectors of tiles.
            unsafe { stage_values(simd, source, (rows.v(j), second), v.add(j * S::MR / S::ELEMENTS_PER_LANE), dv) };
        }
    }
}

/// A K row of `d` elements. What zeros fill behind it is written later: the next row, or V.
///
/// # Safety
/// The row is readable, `to` has room for its words and a vector behind them.
#[inline(always)]
unsafe fn stage_key<S: Simd, T: Source<S>>(simd: S, source: T, row: *const u8, to: *mut f32, d: usize) {
    let vector = S::LANES * S::ELEMENTS_PER_LANE;
    let whole = d / vector * vector;
    // SAFETY: elements i on of the row.
    unsafe {
        for i in (0..whole).step_by(vector) {
            simd.store(to.add(i / S::ELEMENTS_PER_LANE), source.words(simd, row.add(i * T::BYTES), vector));
        }
        if whole < d {
            simd.store(to.add(whole / S::ELEMENTS_PER_LANE), source.words(simd, row.add(whole * T::BYTES), d - whole));
        }
    }
}

/// V rows that share words, `dv` columns of them, to the first word of a tile.
///
/// # Safety
/// The rows are readable; from `to` on the buffer has room for whole vectors of tiles.
#[inline(always)]
unsafe fn stage_values<S: Simd, T: Source<S>>(
    simd: S,
    source: T,
    rows: (*const u8, *const u8),
    to: *mut f32,
    dv: usize,
) {
    let whole = dv / S::LANES * S::LANES;
    let tile_stride = BLOCK / S::ELEMENTS_PER_LANE * S::MR;
    // SAFETY: columns i on of both rows; column i stands in tile i / MR.
    unsafe {
        for i in (0..whole).step_by(S::LANES) {
            let x = source.columns(simd, (rows.0.add(i * T::BYTES), rows.1.add(i * T::BYTES)), S::LANES);
            simd.store_groups(to.add(i / S::MR * tile_stride), tile_stride, x);
        }
        if whole < dv {
            let at = whole * T::BYTES;
            let x = source.columns(simd, (rows.0.add(at), rows.1.add(at)), dv - whole);
            simd.store_groups(to.add(whole / S::MR * tile_stride), tile_stride, x);
        }
    }
}
