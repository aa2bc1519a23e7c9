//! How elements of K and V become the words that are multiplied.

use crate::cpu::element::{LoadElement, load_8};
use crate::cpu::fp8_decoding::{Fp8Decoding, Fp8ToBf16Table};
use crate::cpu::simd::{MAX_LANES, Simd};
use crate::tensor::DType;
use std::marker::PhantomData;

/// Rows of one element type, for an instruction set with so many elements in a word.
pub(super) trait Source<S: Simd>: Copy {
    /// Of an element.
    const BYTES: usize;
    /// For rows of `dtype`, which is one that this takes.
    fn new(simd: S, dtype: DType) -> Self;
    /// The next elements of a row of which `left` are left, a multiple of 8: a vector of words at most, then zeros.
    ///
    /// # Safety
    /// They are readable; nothing else is read.
    unsafe fn words(self, simd: S, row: *const u8, left: usize) -> S::V;
    /// The next columns of as many rows as a word has elements, of which `left` are left: in each lane a word of one
    /// column, then zeros. Where words are single, the second row is not read.
    ///
    /// # Safety
    /// As `words`.
    unsafe fn columns(self, simd: S, rows: (*const u8, *const u8), left: usize) -> S::V;
    /// Whether two vectors of words cost less together than one after the other.
    const TWICE: bool = false;
    /// The next two vectors of words of a row.
    ///
    /// # Safety
    /// They are readable.
    #[inline(always)]
    unsafe fn words_twice(self, simd: S, row: *const u8) -> [S::V; 2] {
        let n = S::LANES * S::ELEMENTS_PER_LANE;
        // SAFETY: the first and the second n elements of those that this function's contract names.
        unsafe { [self.words(simd, row, n), self.words(simd, row.add(n * Self::BYTES), n)] }
    }
    /// The next four vectors of columns.
    ///
    /// # Safety
    /// They are readable.
    #[inline(always)]
    unsafe fn columns_4(self, simd: S, rows: (*const u8, *const u8)) -> [S::V; 4] {
        let mut columns = [simd.splat(0.0); 4];
        for (i, columns) in columns.iter_mut().enumerate() {
            let at = i * S::LANES * Self::BYTES;
            // SAFETY: LANES columns, from the i-th of four such vectors on.
            *columns = unsafe { self.columns(simd, (rows.0.add(at), rows.1.wrapping_add(at)), S::LANES) };
        }
        columns
    }
}

/// Elements that become f32, one to a word.
pub(super) struct Singles<T>(PhantomData<T>);

impl<T> Clone for Singles<T> {
    fn clone(&self) -> Self {
        *self
    }
}
impl<T> Copy for Singles<T> {}

impl<S: Simd, T: LoadElement> Source<S> for Singles<T> {
    const BYTES: usize = size_of::<T>();
    #[inline(always)]
    fn new(_: S, _: DType) -> Self {
        Self(PhantomData)
    }
    #[inline(always)]
    unsafe fn words(self, simd: S, row: *const u8, left: usize) -> S::V {
        let row = row.cast::<T>();
        // SAFETY: LANES elements, or the 8 that are left where that is fewer.
        unsafe { if left >= S::LANES { T::load(simd, row) } else { load_8(simd, row) } }
    }
    #[inline(always)]
    unsafe fn columns(self, simd: S, rows: (*const u8, *const u8), left: usize) -> S::V {
        // SAFETY: columns of the first row are its elements, which the caller vouches for.
        unsafe { self.words(simd, rows.0, left) }
    }
}

/// 8-bit floats that become f32, one to a word.
#[derive(Clone, Copy)]
pub(super) struct SingleCodes(Fp8Decoding);

impl<S: Simd> Source<S> for SingleCodes {
    const BYTES: usize = 1;
    #[inline(always)]
    fn new(_: S, dtype: DType) -> Self {
        Self(Fp8Decoding::of(dtype))
    }
    #[inline(always)]
    unsafe fn words(self, simd: S, row: *const u8, left: usize) -> S::V {
        let mut padded = [0u8; MAX_LANES];
        let mut from = row;
        if left < S::LANES {
            // SAFETY: what is left is 8 codes.
            unsafe { padded.as_mut_ptr().copy_from_nonoverlapping(row, 8) };
            from = padded.as_ptr();
        }
        // SAFETY: LANES codes.
        unsafe { simd.load_fp8(self.0, from) }
    }
    #[inline(always)]
    unsafe fn columns(self, simd: S, rows: (*const u8, *const u8), left: usize) -> S::V {
        // SAFETY: columns of the first row are its elements, which the caller vouches for.
        unsafe { self.words(simd, rows.0, left) }
    }
}

/// bf16, two to a word.
#[derive(Clone, Copy)]
pub(super) struct Bf16Pairs;

impl<S: Simd> Source<S> for Bf16Pairs {
    const BYTES: usize = 2;
    #[inline(always)]
    fn new(_: S, _: DType) -> Self {
        Self
    }
    #[inline(always)]
    unsafe fn words(self, simd: S, row: *const u8, left: usize) -> S::V {
        // SAFETY: no more than what is left of the row.
        unsafe { simd.load_bf16_pairs(row.cast(), left.min(2 * S::LANES)) }
    }
    #[inline(always)]
    unsafe fn columns(self, simd: S, rows: (*const u8, *const u8), left: usize) -> S::V {
        // SAFETY: no more than what is left of both rows.
        unsafe { simd.interleave_bf16(rows.0.cast(), rows.1.cast(), left.min(S::LANES)) }
    }
}

/// 8-bit floats that become bf16, two to a word.
#[derive(Clone, Copy)]
pub(super) struct CodePairs<S: Simd>(S::Fp8Table);

impl<S: Simd> Source<S> for CodePairs<S> {
    const BYTES: usize = 1;
    #[inline(always)]
    fn new(simd: S, dtype: DType) -> Self {
        Self(simd.fp8_table(Fp8ToBf16Table::of(dtype)))
    }
    #[inline(always)]
    unsafe fn words(self, simd: S, row: *const u8, left: usize) -> S::V {
        // SAFETY: no more than what is left of the row.
        unsafe { simd.load_fp8_pairs(self.0, row, left.min(2 * S::LANES)) }
    }
    #[inline(always)]
    unsafe fn columns(self, simd: S, rows: (*const u8, *const u8), left: usize) -> S::V {
        // SAFETY: no more than what is left of both rows.
        unsafe { simd.interleave_fp8(self.0, rows.0, rows.1, left.min(S::LANES)) }
    }
    const TWICE: bool = true;
    #[inline(always)]
    unsafe fn words_twice(self, simd: S, row: *const u8) -> [S::V; 2] {
        // SAFETY: the caller's word.
        unsafe { simd.load_fp8_pairs_2(self.0, row) }
    }
    #[inline(always)]
    unsafe fn columns_4(self, simd: S, rows: (*const u8, *const u8)) -> [S::V; 4] {
        // SAFETY: the caller's word.
        unsafe { simd.interleave_fp8_4(self.0, rows.0, rows.1) }
    }
}
