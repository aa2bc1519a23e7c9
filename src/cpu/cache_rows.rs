//! Writing K and V rows into a paged cache: slots of tokens, scaling, and conversion to the cache's dtype.

use super::element::{Element, narrow};
use super::fp8_encoding::Fp8Encoding;
use super::row_quantization::RowQuantization;
use super::simd::Simd;
use crate::error::Result;
use crate::pool::{Pool, parallel_for};
use crate::problem::KvView;
use crate::problem::kv_cache_update::{CacheCopy, KvCacheUpdate, NewRows};
use crate::tensor::DType;
use std::marker::PhantomData;

/// Bytes of a cache that one task copies.
const COPY_CHUNK: usize = 1 << 20;

/// Copy the caches that are not updated in place from the operands to the results.
///
/// # Errors
/// `INTERNAL` if a task panicked.
///
/// # Safety
/// The problem's caches are valid host memory, the results writable and not otherwise accessed.
pub(super) unsafe fn copy_unaliased_caches(problem: &KvCacheUpdate, pool: &dyn Pool) -> Result {
    for copy in problem.copies.iter().flatten().filter(|copy| copy.is_needed()) {
        // SAFETY: the caller guarantees valid caches. `is_needed` says that operand and result are different buffers,
        // and the problem has validated that they have one size.
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
            // SAFETY: first + count <= bytes, the size of both buffers, and no other task has this chunk.
            unsafe { copy.to.data.add(first).copy_from_nonoverlapping(copy.from.data.add(first), count) };
        },
    )
}

/// The slot of a token in the cache.
#[derive(Clone, Copy)]
pub(super) struct Slot {
    page: i64,
    offset: i64,
}

/// The slot of a token; `None` if it is out of range, which skips the token.
///
/// # Safety
/// The problem's slot mapping is readable and has more than `token` elements.
pub(super) unsafe fn slot_of(problem: &KvCacheUpdate, token: usize) -> Option<Slot> {
    let slots = &problem.slot_mapping;
    // SAFETY: the caller guarantees element `token`, and the problem has validated that the dtype is i32 or i64.
    let slot = unsafe {
        match slots.dtype {
            DType::I32 => i64::from(slots.data.cast::<i32>().add(token).read()),
            _ => slots.data.cast::<i64>().add(token).read(),
        }
    };
    let (pages, page_size) = (problem.num_pages as i64, problem.page_size as i64);
    (0..pages * page_size).contains(&slot).then(|| Slot { page: slot / page_size, offset: slot % page_size })
}

/// Offset of the row of a slot and head, in elements.
#[inline(always)]
fn row_offset(of: &KvView, slot: Slot, head: usize) -> isize {
    (slot.page * of.page_stride + slot.offset * of.token_stride + head as i64 * of.head_stride) as isize
}

/// Writes rows of one head of K or V into a cache. New rows have the element type `T`.
pub(super) struct CacheWriter<T> {
    cache: KvView,
    head: usize,
    /// New numbers are divided by the scale.
    scale: Option<f32>,
    /// `None` if the cache has the type `T`, or is of i8, whose rows are written by [`CacheWriter::quantize`] alone.
    fp8: Option<Fp8Encoding>,
    element: PhantomData<T>,
}

impl<T: Element> CacheWriter<T> {
    /// # Safety
    /// The scales of `new` are readable and `head` is below Hkv.
    #[inline(always)]
    pub(super) unsafe fn new(problem: &KvCacheUpdate, new: &NewRows, head: usize) -> Self {
        // SAFETY: a scale has Hkv values if it is per head, and one otherwise.
        let scale = new.scale.map(|scale| unsafe { scale.values.add(if scale.per_head { head } else { 0 }).read() });
        Self { cache: new.cache, head, scale, fp8: Fp8Encoding::of(problem.cache_dtype), element: PhantomData }
    }

    /// Whether rows without scales of their own are copied bit by bit, without scale or conversion.
    #[inline(always)]
    pub(super) fn copies_bits(&self) -> bool {
        self.scale.is_none() && self.fp8.is_none()
    }

    /// Store a whole row as codes and a scale, to a cache of i8 or f8e4m3fn and its `scales` of the same rows.
    ///
    /// # Safety
    /// The slot is one of the cache and of the scales, which are writable; `row` has D elements.
    #[inline(always)]
    pub(super) unsafe fn quantize(&self, quantization: RowQuantization, slot: Slot, row: &[f32], scales: KvView) {
        // SAFETY: the caller guarantees a row of D bytes in the cache, and a scale of it.
        unsafe {
            let scale = quantization.quantize(row, self.cache.data.offset(self.offset(slot, 0)));
            scales.data.cast::<f32>().offset(row_offset(&scales, slot, self.head)).write(scale);
        }
    }

    /// Offset of element `first` of the slot's row, in elements of the cache.
    #[inline(always)]
    fn offset(&self, slot: Slot, first: usize) -> isize {
        row_offset(&self.cache, slot, self.head) + first as isize
    }

    /// Copy `count` elements of a new row to elements from `first` on, where [`CacheWriter::copies_bits`].
    ///
    /// # Safety
    /// The slot is one of the cache, which is writable; `first + count` is at most D; `from` has `count` readable
    /// elements.
    #[inline(always)]
    pub(super) unsafe fn copy(&self, slot: Slot, first: usize, from: *const T, count: usize) {
        debug_assert!(self.copies_bits());
        // SAFETY: elements first to first + count <= D of a row of the cache, whose type is `T` as bits are copied.
        unsafe {
            self.cache.data.cast::<T>().offset(self.offset(slot, first)).copy_from_nonoverlapping(from, count);
        }
    }

    /// Store numbers to elements from `first` on, divided by the scale (in place) and rounded.
    ///
    /// # Safety
    /// The slot is one of the cache, which is writable; `first + numbers.len()` is at most D.
    #[inline(always)]
    pub(super) unsafe fn store<S: Simd>(&self, simd: S, slot: Slot, first: usize, numbers: &mut [f32]) {
        if let Some(scale) = self.scale {
            for x in numbers.iter_mut() {
                *x /= scale;
            }
        }
        let offset = self.offset(slot, first);
        // SAFETY: elements from first on, at most D, of a row of the cache. They have one byte if there is an fp8
        // encoding, and the type `T` otherwise.
        unsafe {
            if let Some(format) = self.fp8 {
                let to = self.cache.data.offset(offset);
                for (i, x) in numbers.iter().enumerate() {
                    to.add(i).write(format.encode(*x));
                }
            } else {
                narrow(simd, numbers.as_ptr(), self.cache.data.cast::<T>().offset(offset), numbers.len());
            }
        }
    }
}
