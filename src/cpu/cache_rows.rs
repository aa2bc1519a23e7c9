//! Rows of K and V on their way into a paged cache: which slot a token has, and what a cache makes of a number.

use super::element::{Element, narrow};
use super::fp8_encoding::Fp8Encoding;
use super::simd::Simd;
use crate::error::Result;
use crate::pool::{Pool, parallel_for};
use crate::problem::KvView;
use crate::problem::kv_cache_update::{CacheCopy, KvCacheUpdate, NewRows};
use crate::tensor::DType;
use std::marker::PhantomData;

/// Bytes that a task copies.
const COPY_CHUNK: usize = 1 << 20;

/// Copy the caches that are not updated in place.
///
/// # Errors
/// `INTERNAL` if a task panicked.
///
/// # Safety
/// The problem's caches are valid host memory, the results writable and not otherwise accessed.
pub(super) unsafe fn copy_unaliased_caches(problem: &KvCacheUpdate, pool: &dyn Pool) -> Result {
    for copy in problem.copies.iter().flatten().filter(|copy| copy.is_needed()) {
        // SAFETY: the caller's word; operand and result are different buffers of one size.
        unsafe { copy_cache(copy, pool)? };
    }
    Ok(())
}

/// # Safety
/// Both buffers are valid, of one size, dense, and do not overlap.
unsafe fn copy_cache(copy: &CacheCopy, pool: &dyn Pool) -> Result {
    let bytes = copy.from.bytes();
    parallel_for(
        pool,
        bytes.div_ceil(COPY_CHUNK),
        || (),
        |(), chunk| {
            let first = chunk * COPY_CHUNK;
            let count = COPY_CHUNK.min(bytes - first);
            // SAFETY: within both buffers; chunks are disjoint.
            unsafe { copy.to.data.add(first).copy_from_nonoverlapping(copy.from.data.add(first), count) };
        },
    )
}

/// A token of the cache.
#[derive(Clone, Copy)]
pub(super) struct Place {
    page: i64,
    offset: i64,
}

/// Where a token's rows go; `None` if its slot lies outside the cache.
///
/// # Safety
/// The problem's slots are readable, more than `token` of them.
pub(super) unsafe fn place(problem: &KvCacheUpdate, token: usize) -> Option<Place> {
    let slots = &problem.slot_mapping;
    // SAFETY: slot `token` is readable; the problem has checked that the slots are i32 or i64.
    let slot = unsafe {
        match slots.dtype {
            DType::I32 => i64::from(slots.data.cast::<i32>().add(token).read()),
            _ => slots.data.cast::<i64>().add(token).read(),
        }
    };
    let (pages, page_size) = (problem.num_pages as i64, problem.page_size as i64);
    (0..pages * page_size).contains(&slot).then(|| Place { page: slot / page_size, offset: slot % page_size })
}

/// One head of K or V of a cache whose keys and values have the type `T`.
pub(super) struct CacheRow<T> {
    cache: KvView,
    head: usize,
    /// What is stored is divided by it.
    scale: Option<f32>,
    /// `None` where the cache has the type `T`.
    fp8: Option<Fp8Encoding>,
    element: PhantomData<T>,
}

impl<T: Element> CacheRow<T> {
    /// # Safety
    /// The scales of `new` are readable and `head` is below Hkv.
    #[inline(always)]
    pub(super) unsafe fn new(problem: &KvCacheUpdate, new: &NewRows, head: usize) -> Self {
        // SAFETY: there is one scale, or one for each head.
        let scale = new.scale.map(|scale| unsafe { scale.values.add(if scale.per_head { head } else { 0 }).read() });
        Self { cache: new.cache, head, scale, fp8: Fp8Encoding::of(problem.cache_dtype), element: PhantomData }
    }

    /// Rows go into the cache bit by bit.
    #[inline(always)]
    pub(super) fn copies_bits(&self) -> bool {
        self.scale.is_none() && self.fp8.is_none()
    }

    /// Element `first` of the head of a token, counted in elements of the cache.
    #[inline(always)]
    fn element(&self, place: Place, first: usize) -> isize {
        let cache = &self.cache;
        let row = place.page * cache.page_stride + place.offset * cache.token_stride;
        (row + self.head as i64 * cache.head_stride) as isize + first as isize
    }

    /// Elements `first` to `first + count` of a new row, where [`CacheRow::copies_bits`].
    ///
    /// # Safety
    /// `place` is of the cache, which is writable; `first + count` is at most D; `from` has `count` readable elements.
    #[inline(always)]
    pub(super) unsafe fn copy(&self, place: Place, first: usize, from: *const T, count: usize) {
        debug_assert!(self.copies_bits());
        // SAFETY: elements first.. of a row of the cache, of D elements; `T` is the cache's type where bits are copied.
        unsafe {
            self.cache.data.cast::<T>().offset(self.element(place, first)).copy_from_nonoverlapping(from, count);
        }
    }

    /// Numbers for the elements from `first` on, divided by the scale (in place) and rounded.
    ///
    /// # Safety
    /// `place` is of the cache, which is writable; `first` and the numbers after it are at most D.
    #[inline(always)]
    pub(super) unsafe fn store<S: Simd>(&self, simd: S, place: Place, first: usize, numbers: &mut [f32]) {
        if let Some(scale) = self.scale {
            for x in numbers.iter_mut() {
                *x /= scale;
            }
        }
        let element = self.element(place, first);
        // SAFETY: elements first.. of a row of the cache, of D elements: of one byte for 8-bit floats, otherwise of type `T`.
        unsafe {
            if let Some(format) = self.fp8 {
                let to = self.cache.data.offset(element);
                for (i, x) in numbers.iter().enumerate() {
                    to.add(i).write(format.encode(*x));
                }
            } else {
                narrow(simd, numbers.as_ptr(), self.cache.data.cast::<T>().offset(element), numbers.len());
            }
        }
    }
}
