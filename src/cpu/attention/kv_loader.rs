//! How elements of K and V are loaded for multiplication: as f32, one per lane, or as bf16, two per lane.

use crate::cpu::element::{LoadElement, load_8};
use crate::cpu::fp8_decoding::{Fp8Decoding, Fp8ToBf16Table};
use crate::cpu::simd::{MAX_LANES, Simd};
use crate::tensor::DType;
use std::marker::PhantomData;

/// Loads vectors from rows of one element type. E is [`Simd::ELEMENTS_PER_LANE`], for which the loader is made.
pub(in crate::cpu) trait KvLoader<S: Simd>: Copy {
    /// Bytes of an element.
    const BYTES: usize;
    /// A loader for rows of `dtype`, which must be a type of this loader.
    fn new(simd: S, dtype: DType) -> Self;
    /// The next E * LANES elements of a row, or its last `left`, a multiple of 8, followed by zeros.
    ///
    /// # Safety
    /// The elements are readable; nothing else is read.
    unsafe fn load(self, simd: S, row: *const u8, left: usize) -> S::V;
    /// The next LANES columns of E rows, or their last `left`, a multiple of 8, followed by zeros: each lane holds a
    /// column. Where E is 1, the second row is not read.
    ///
    /// # Safety
    /// The columns are readable in E rows; nothing else is read.
    unsafe fn load_interleaved(self, simd: S, rows: (*const u8, *const u8), left: usize) -> S::V;
    /// Whether one `load_2` is cheaper than two `load`.
    const PREFERS_LOAD_2: bool = false;
    /// The next two vectors of a row.
    ///
    /// # Safety
    /// 2 * E * LANES elements are readable.
    #[inline(always)]
    unsafe fn load_2(self, simd: S, row: *const u8) -> [S::V; 2] {
        let n = S::LANES * S::ELEMENTS_PER_LANE;
        // SAFETY: the first n and the second n of the 2 * n elements that the caller says are readable.
        unsafe { [self.load(simd, row, n), self.load(simd, row.add(n * Self::BYTES), n)] }
    }
    /// The next two vectors of columns.
    ///
    /// # Safety
    /// 2 * LANES columns are readable in E rows.
    #[inline(always)]
    unsafe fn load_interleaved_2(self, simd: S, rows: (*const u8, *const u8)) -> [S::V; 2] {
        let at = S::LANES * Self::BYTES;
        let second = (rows.0.wrapping_add(at), rows.1.wrapping_add(at));
        // SAFETY: the first and the second LANES of the 2 * LANES columns that the caller says are readable.
        unsafe { [self.load_interleaved(simd, rows, S::LANES), self.load_interleaved(simd, second, S::LANES)] }
    }
    /// The next four vectors of columns.
    ///
    /// # Safety
    /// 4 * LANES columns are readable in E rows.
    #[inline(always)]
    unsafe fn load_interleaved_4(self, simd: S, rows: (*const u8, *const u8)) -> [S::V; 4] {
        let at = 2 * S::LANES * Self::BYTES;
        let second = (rows.0.wrapping_add(at), rows.1.wrapping_add(at));
        // SAFETY: the first and the second half of the 4 * LANES columns that the caller says are readable.
        unsafe {
            let ([a, b], [c, d]) = (self.load_interleaved_2(simd, rows), self.load_interleaved_2(simd, second));
            [a, b, c, d]
        }
    }
}

/// f32, f16, bf16 or i8 as f32, one per lane.
pub(in crate::cpu) struct AsF32<T>(PhantomData<T>);

impl<T> Clone for AsF32<T> {
    fn clone(&self) -> Self {
        *self
    }
}
impl<T> Copy for AsF32<T> {}

impl<S: Simd, T: LoadElement> KvLoader<S> for AsF32<T> {
    const BYTES: usize = size_of::<T>();
    #[inline(always)]
    fn new(_: S, _: DType) -> Self {
        Self(PhantomData)
    }
    #[inline(always)]
    unsafe fn load(self, simd: S, row: *const u8, left: usize) -> S::V {
        let row = row.cast::<T>();
        // SAFETY: at least `left` elements are readable. If `left` is below LANES, at most 16, it is 8.
        unsafe { if left >= S::LANES { T::load(simd, row) } else { load_8(simd, row) } }
    }
    #[inline(always)]
    unsafe fn load_interleaved(self, simd: S, rows: (*const u8, *const u8), left: usize) -> S::V {
        // SAFETY: with E = 1 the columns are the elements of the first row, which the caller says are readable.
        unsafe { KvLoader::<S>::load(self, simd, rows.0, left) }
    }
}

/// 8-bit floats as f32, one per lane.
#[derive(Clone, Copy)]
pub(super) struct Fp8AsF32(Fp8Decoding);

impl<S: Simd> KvLoader<S> for Fp8AsF32 {
    const BYTES: usize = 1;
    #[inline(always)]
    fn new(_: S, dtype: DType) -> Self {
        Self(Fp8Decoding::of(dtype))
    }
    #[inline(always)]
    unsafe fn load(self, simd: S, row: *const u8, left: usize) -> S::V {
        let mut padded = [0u8; MAX_LANES];
        let mut from = row;
        if left < S::LANES {
            // SAFETY: a multiple of 8 below LANES, at most 16, is 8, and `left` elements are readable.
            unsafe { padded.as_mut_ptr().copy_from_nonoverlapping(row, 8) };
            from = padded.as_ptr();
        }
        // SAFETY: `from` is the row, of which LANES elements are left, or `padded`, which has MAX_LANES.
        unsafe { simd.load_fp8(self.0, from) }
    }
    #[inline(always)]
    unsafe fn load_interleaved(self, simd: S, rows: (*const u8, *const u8), left: usize) -> S::V {
        // SAFETY: with E = 1 the columns are the elements of the first row, which the caller says are readable.
        unsafe { KvLoader::<S>::load(self, simd, rows.0, left) }
    }
    const PREFERS_LOAD_2: bool = true;
    #[inline(always)]
    unsafe fn load_2(self, simd: S, row: *const u8) -> [S::V; 2] {
        // SAFETY: E is 1 here, so the caller guarantees 2 * LANES readable elements.
        unsafe { simd.load_fp8_2(self.0, row) }
    }
    #[inline(always)]
    unsafe fn load_interleaved_2(self, simd: S, rows: (*const u8, *const u8)) -> [S::V; 2] {
        // SAFETY: with E = 1 the columns are the elements of the first row, of which 2 * LANES are readable.
        unsafe { simd.load_fp8_2(self.0, rows.0) }
    }
}

/// bf16, two per lane.
#[derive(Clone, Copy)]
pub(in crate::cpu) struct Bf16Pairs;

impl<S: Simd> KvLoader<S> for Bf16Pairs {
    const BYTES: usize = 2;
    #[inline(always)]
    fn new(_: S, _: DType) -> Self {
        Self
    }
    #[inline(always)]
    unsafe fn load(self, simd: S, row: *const u8, left: usize) -> S::V {
        // SAFETY: no more than the `left` elements that the caller says are readable.
        unsafe { simd.load_bf16_pairs(row.cast(), left.min(2 * S::LANES)) }
    }
    #[inline(always)]
    unsafe fn load_interleaved(self, simd: S, rows: (*const u8, *const u8), left: usize) -> S::V {
        // SAFETY: no more than the `left` columns that the caller says are readable in both rows.
        unsafe { simd.interleave_bf16(rows.0.cast(), rows.1.cast(), left.min(S::LANES)) }
    }
    #[inline(always)]
    unsafe fn load_interleaved_2(self, simd: S, rows: (*const u8, *const u8)) -> [S::V; 2] {
        // SAFETY: E is 2 here, so the caller guarantees 2 * LANES readable columns in both rows.
        unsafe { simd.interleave_bf16_2(rows.0.cast(), rows.1.cast()) }
    }
}

/// 8-bit floats, or i8, as bf16, two per lane.
#[derive(Clone, Copy)]
pub(super) struct Fp8AsBf16Pairs<S: Simd, const I8: bool>(S::Fp8Table);

impl<S: Simd, const I8: bool> KvLoader<S> for Fp8AsBf16Pairs<S, I8> {
    const BYTES: usize = 1;
    #[inline(always)]
    fn new(simd: S, dtype: DType) -> Self {
        Self(simd.fp8_table(Fp8ToBf16Table::of(dtype)))
    }
    #[inline(always)]
    unsafe fn load(self, simd: S, row: *const u8, left: usize) -> S::V {
        // SAFETY: no more than the `left` elements that the caller says are readable.
        unsafe { simd.load_fp8_pairs::<I8>(self.0, row, left.min(2 * S::LANES)) }
    }
    #[inline(always)]
    unsafe fn load_interleaved(self, simd: S, rows: (*const u8, *const u8), left: usize) -> S::V {
        // SAFETY: no more than the `left` columns that the caller says are readable in both rows.
        unsafe { simd.interleave_fp8::<I8>(self.0, rows.0, rows.1, left.min(S::LANES)) }
    }
    const PREFERS_LOAD_2: bool = true;
    #[inline(always)]
    unsafe fn load_2(self, simd: S, row: *const u8) -> [S::V; 2] {
        // SAFETY: E is 2 here, so the caller guarantees 4 * LANES readable elements.
        unsafe { simd.load_fp8_pairs_2::<I8>(self.0, row) }
    }
    #[inline(always)]
    unsafe fn load_interleaved_4(self, simd: S, rows: (*const u8, *const u8)) -> [S::V; 4] {
        // SAFETY: E is 2 here, so the caller guarantees 4 * LANES readable columns in both rows.
        unsafe { simd.interleave_fp8_4::<I8>(self.0, rows.0, rows.1) }
    }
}
