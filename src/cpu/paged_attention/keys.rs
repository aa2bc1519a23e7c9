//! Addresses of the K and V rows of a block of keys.

use super::plan::Sequence;
use crate::cpu::simd::prefetch;
use crate::ops::paged_attention::PagedAttention;
use std::ops::Range;

/// The most keys of a block.
pub(super) const BLOCK: usize = 64;
const CACHE_LINE: usize = 64;

/// A block of at most [`BLOCK`] keys of one sequence.
pub(super) struct KeyBlock<T> {
    /// Rows of KV head 0; entries past the last key repeat it
    k: [*const T; BLOCK],
    v: [*const T; BLOCK],
    /// Position of the first key
    pub(super) first: usize,
    /// Keys in the block
    pub(super) len: usize,
}

impl<T> KeyBlock<T> {
    pub(super) fn empty() -> Self {
        Self { k: [std::ptr::null(); BLOCK], v: [std::ptr::null(); BLOCK], first: 0, len: 0 }
    }

    /// Look up where the keys lie. Page ids are clamped to the cache.
    ///
    /// # Safety
    /// `keys` are at most [`BLOCK`], below the sequence's `len_k`; the table entries of their pages are readable.
    pub(super) unsafe fn find(&mut self, problem: &PagedAttention, sequence: &Sequence, keys: Range<usize>) {
        (self.first, self.len) = (keys.start, keys.len());
        let (k, v) = (problem.k.data.cast_const().cast::<T>(), problem.v.data.cast_const().cast::<T>());
        let (mut table_entry, mut token) = (keys.start / problem.page_size, keys.start % problem.page_size);
        let mut index = 0;
        while index < self.len {
            // SAFETY: the entry of a key below len_k.
            let page = unsafe { sequence.pages.add(table_entry).read() };
            let page = i64::from(page).clamp(0, problem.num_pages as i64 - 1);
            let in_page = (problem.page_size - token).min(self.len - index);
            for i in 0..in_page {
                // Row (page, token, head 0).
                let at = |view: &crate::ops::KvView| {
                    (page * view.page_stride + (token + i) as i64 * view.token_stride) as isize
                };
                self.k[index + i] = k.wrapping_offset(at(&problem.k));
                self.v[index + i] = v.wrapping_offset(at(&problem.v));
            }
            index += in_page;
            table_entry += 1;
            token = 0;
        }
        if let Some(last) = self.len.checked_sub(1) {
            let (k, v) = (self.k[last], self.v[last]);
            self.k[self.len..].fill(k);
            self.v[self.len..].fill(v);
        }
    }

    /// The rows of one KV head.
    #[inline(always)]
    pub(super) fn of_head<'a>(&'a self, problem: &PagedAttention, head: usize) -> HeadRows<'a, T> {
        let offset = |view: &crate::ops::KvView| head as isize * view.head_stride as isize;
        HeadRows { block: self, k_offset: offset(&problem.k), v_offset: offset(&problem.v) }
    }
}

/// The rows of one KV head of a block.
#[derive(Clone, Copy)]
pub(super) struct HeadRows<'a, T> {
    pub(super) block: &'a KeyBlock<T>,
    k_offset: isize,
    v_offset: isize,
}

impl<T> HeadRows<'_, T> {
    /// K row of the block's key `j`; past the last key, the last one's.
    #[inline(always)]
    pub(super) fn k(&self, j: usize) -> *const T {
        self.block.k[j].wrapping_offset(self.k_offset)
    }
    /// V row, likewise.
    #[inline(always)]
    pub(super) fn v(&self, j: usize) -> *const T {
        self.block.v[j].wrapping_offset(self.v_offset)
    }
}

/// The next block, to be asked for while this one is computed, bit by bit and in the order of its memory (key by key,
/// for each key head by head): only then does the processor's own prefetching help.
pub(super) struct Ahead<'a, T> {
    problem: &'a PagedAttention<'a>,
    block: &'a KeyBlock<T>,
    /// KV heads
    heads: Range<usize>,
    key: usize,
    head: usize,
    /// The next row is V's.
    value: bool,
    /// The row to ask for, and from which element on
    row: *const T,
    element: usize,
}

impl<'a, T> Ahead<'a, T> {
    pub(super) fn new(problem: &'a PagedAttention, block: &'a KeyBlock<T>, heads: Range<usize>) -> Self {
        let row = block.of_head(problem, heads.start).k(0);
        Self { problem, block, head: heads.start, heads, key: 0, value: true, row, element: 0 }
    }

    /// Ask for the next `count` elements.
    #[inline(always)]
    pub(super) fn advance(&mut self, count: usize) {
        let d = self.problem.head_dim;
        // As a rule `count`, a constant where this is compiled into, divides d.
        if self.element + count <= d {
            self.ask(count);
            self.element += count;
        } else {
            let mut left = count;
            while left > 0 {
                let in_row = left.min(d - self.element);
                self.ask(in_row);
                (self.element, left) = (self.element + in_row, left - in_row);
                if left > 0 {
                    self.next_row();
                }
            }
        }
        if self.element == d {
            self.next_row();
        }
    }

    #[inline(always)]
    fn ask(&self, count: usize) {
        for byte in (0..count * size_of::<T>()).step_by(CACHE_LINE) {
            prefetch(self.row.wrapping_add(self.element).wrapping_byte_add(byte));
        }
    }

    #[inline(always)]
    fn next_row(&mut self) {
        self.element = 0;
        let rows = self.block.of_head(self.problem, self.head);
        // Past the end, the last key again: it is there already.
        let key = self.key.min(BLOCK - 1);
        if self.value {
            self.row = rows.v(key);
            self.head += 1;
            if self.head == self.heads.end {
                (self.key, self.head) = (self.key + 1, self.heads.start);
            }
        } else {
            self.row = rows.k(key);
        }
        self.value = !self.value;
    }
}
