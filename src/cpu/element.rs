//! Element types that operators read and write. Arithmetic is in f32.

use super::bf16_rounding::round_to_bf16;
use super::simd::{MAX_LANES, Simd};
use half::{bf16, f16};

/// An element type that is read: converted to f32, which is exact.
pub(super) trait LoadElement: Copy + Send + Sync + 'static {
    /// One element as f32.
    fn to_f32(self) -> f32;
    /// `LANES` elements as f32.
    /// # Safety
    /// `from` has `LANES` readable elements.
    unsafe fn load<S: Simd>(simd: S, from: *const Self) -> S::V;
}

/// An element type that is read and written.
pub(super) trait Element: LoadElement {
    /// x rounded to nearest even.
    fn from_f32(x: f32) -> Self;
    /// Store `LANES` elements, rounded to nearest even.
    /// # Safety
    /// `to` has `LANES` writable elements.
    unsafe fn store<S: Simd>(simd: S, to: *mut Self, x: S::V);
}

impl LoadElement for f32 {
    #[inline(always)]
    fn to_f32(self) -> f32 {
        self
    }
    #[inline(always)]
    unsafe fn load<S: Simd>(simd: S, from: *const Self) -> S::V {
        // SAFETY: the caller guarantees LANES readable elements.
        unsafe { simd.load(from) }
    }
}

impl Element for f32 {
    #[inline(always)]
    fn from_f32(x: f32) -> Self {
        x
    }
    #[inline(always)]
    unsafe fn store<S: Simd>(simd: S, to: *mut Self, x: S::V) {
        // SAFETY: the caller guarantees LANES writable elements.
        unsafe { simd.store(to, x) }
    }
}

impl LoadElement for f16 {
    #[inline(always)]
    fn to_f32(self) -> f32 {
        self.to_f32_const()
    }
    #[inline(always)]
    unsafe fn load<S: Simd>(simd: S, from: *const Self) -> S::V {
        // SAFETY: the caller guarantees LANES readable elements.
        unsafe { simd.load_f16(from.cast()) }
    }
}

impl Element for f16 {
    #[inline(always)]
    fn from_f32(x: f32) -> Self {
        f16::from_f32_const(x)
    }
    #[inline(always)]
    unsafe fn store<S: Simd>(simd: S, to: *mut Self, x: S::V) {
        // SAFETY: the caller guarantees LANES writable elements.
        unsafe { simd.store_f16(to.cast(), x) }
    }
}

impl LoadElement for bf16 {
    #[inline(always)]
    fn to_f32(self) -> f32 {
        f32::from_bits(u32::from(self.to_bits()) << 16)
    }
    #[inline(always)]
    unsafe fn load<S: Simd>(simd: S, from: *const Self) -> S::V {
        // SAFETY: the caller guarantees LANES readable elements.
        unsafe { simd.load_bf16(from.cast()) }
    }
}

impl Element for bf16 {
    #[inline(always)]
    fn from_f32(x: f32) -> Self {
        round_to_bf16(x)
    }
    #[inline(always)]
    unsafe fn store<S: Simd>(simd: S, to: *mut Self, x: S::V) {
        // SAFETY: the caller guarantees LANES writable elements.
        unsafe { simd.store_bf16(to.cast(), x) }
    }
}

impl LoadElement for i8 {
    #[inline(always)]
    fn to_f32(self) -> f32 {
        self.into()
    }
    #[inline(always)]
    unsafe fn load<S: Simd>(simd: S, from: *const Self) -> S::V {
        // SAFETY: the caller guarantees LANES readable elements.
        unsafe { simd.load_i8(from) }
    }
}

/// 8 elements, followed by zeros: the end of a row whose length is a multiple of 8 but not of `LANES`, which is 16
/// here.
///
/// # Safety
/// `from` has 8 readable elements; nothing beyond is read.
#[inline(always)]
pub(super) unsafe fn load_8<S: Simd, T: LoadElement>(simd: S, from: *const T) -> S::V {
    #[repr(align(64))]
    struct Padded([u8; MAX_LANES * size_of::<f32>()]);
    let mut padded = Padded([0; MAX_LANES * size_of::<f32>()]);
    // SAFETY: the caller guarantees 8 elements. `padded` has room for MAX_LANES elements of any type, and zero bytes
    // are 0.0 in each.
    unsafe {
        padded.0.as_mut_ptr().copy_from_nonoverlapping(from.cast(), 8 * size_of::<T>());
        T::load(simd, padded.0.as_ptr().cast())
    }
}

/// Convert a row of `n` elements to f32.
///
/// # Safety
/// `from` has `n` readable elements, `to` has `n` writable ones.
#[inline(always)]
pub(super) unsafe fn widen<S: Simd, T: LoadElement>(simd: S, from: *const T, to: *mut f32, n: usize) {
    let whole = n - n % S::LANES;
    for i in (0..whole).step_by(S::LANES) {
        // SAFETY: i + LANES <= n, and both rows have n elements.
        unsafe { simd.store(to.add(i), T::load(simd, from.add(i))) }
    }
    for i in whole..n {
        // SAFETY: i < n, and both rows have n elements.
        unsafe { to.add(i).write(from.add(i).read().to_f32()) }
    }
}

/// Convert a row of `n` f32 to `T`, rounded to nearest even.
///
/// # Safety
/// `from` has `n` readable elements, `to` has `n` writable ones.
#[inline(always)]
pub(super) unsafe fn narrow<S: Simd, T: Element>(simd: S, from: *const f32, to: *mut T, n: usize) {
    let whole = n - n % S::LANES;
    for i in (0..whole).step_by(S::LANES) {
        // SAFETY: i + LANES <= n, and both rows have n elements.
        unsafe { T::store(simd, to.add(i), simd.load(from.add(i))) }
    }
    for i in whole..n {
        // SAFETY: i < n, and both rows have n elements.
        unsafe { to.add(i).write(T::from_f32(from.add(i).read())) }
    }
}
