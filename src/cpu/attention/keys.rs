//! Addresses of the K and V rows of a block of keys.

use super::sequences::{Sequence, StoredKeys};
use crate::cpu::simd::{CACHE_LINE, prefetch_row};
use crate::problem::KvView;
use crate::problem::attention::{Attention, KeyStorage, PageTable};
use std::ops::Range;

/// The most keys of a block.
pub(super) const BLOCK: usize = 128;

/// K or V as bytes: element (page, token, head, 0) lies at `data + page * page + token * token + head * head`.
#[derive(Clone, Copy)]
struct Rows {
    data: *const u8,
    page: isize,
    token: isize,
    head: isize,
    /// Bytes of a row.
    len: usize,
}

impl Rows {
    fn of(view: &KvView, element: usize, elements: usize) -> Self {
        let bytes = |stride: i64| stride as isize * element as isize;
        Self {
            data: view.data,
            page: bytes(view.page_stride),
            token: bytes(view.token_stride),
            head: bytes(view.head_stride),
            len: elements * element,
        }
    }
}

/// Where the rows of a call's K and V are.
#[derive(Clone, Copy)]
pub(super) struct Cache {
    k: Rows,
    v: Rows,
    table: Option<PageTable>,
}

impl Cache {
    pub(super) fn new(problem: &Attention) -> Self {
        let element = problem.kv_dtype.size();
        Self {
            k: Rows::of(&problem.k, element, problem.head_dim),
            v: Rows::of(&problem.v, element, problem.value_dim),
            table: match problem.keys.storage {
                KeyStorage::Contiguous { .. } => None,
                KeyStorage::Paged(table) => Some(table),
            },
        }
    }
}

/// Addresses are there for a multiple of so many keys: kernels that take several at a time need not ask how many.
pub(super) const PADDING: usize = 32;

/// A block of at most [`BLOCK`] keys of one sequence.
pub(super) struct KeyBlock {
    /// Rows of KV head 0; entries past the last key, up to a multiple of [`PADDING`], repeat it
    k: [*const u8; BLOCK],
    v: [*const u8; BLOCK],
    /// Position of the first key
    pub(super) first: usize,
    /// Keys in the block
    pub(super) len: usize,
}

impl KeyBlock {
    pub(super) fn empty() -> Self {
        Self { k: [std::ptr::null(); BLOCK], v: [std::ptr::null(); BLOCK], first: 0, len: 0 }
    }

    /// Look up where the keys lie. Page ids are clamped to the cache.
    ///
    /// # Safety
    /// `keys` are at most [`BLOCK`], below the sequence's `len_k`; the table entries of their pages are readable.
    pub(super) unsafe fn find(&mut self, cache: &Cache, sequence: &Sequence, keys: Range<usize>) {
        (self.first, self.len) = (keys.start, keys.len());
        match (sequence.keys, cache.table) {
            (StoredKeys::Pages(pages), Some(table)) => {
                let (mut entry, mut token) = (0, 0);
                if !keys.is_empty() {
                    (entry, token) = (keys.start / table.page_size, keys.start % table.page_size);
                }
                let mut index = 0;
                while index < self.len {
                    // SAFETY: the entry of a key below len_k.
                    let page = unsafe { pages.add(entry).read() };
                    let page = i64::from(page).clamp(0, table.num_pages as i64 - 1) as isize;
                    let in_page = (table.page_size - token).min(self.len - index);
                    self.fill(cache, index..index + in_page, page, token);
                    index += in_page;
                    entry += 1;
                    token = 0;
                }
            }
            (StoredKeys::Rows(first), _) => self.fill(cache, 0..self.len, 0, first + keys.start),
            // A sequence has pages where the call has a table.
            (StoredKeys::Pages(_), None) => self.len = 0,
        }
        if let Some(last) = self.len.checked_sub(1) {
            let (k, v) = (self.k[last], self.v[last]);
            let padding = self.len..self.padded_len();
            self.k[padding.clone()].fill(k);
            self.v[padding].fill(v);
        }
    }

    fn padded_len(&self) -> usize {
        self.len.next_multiple_of(PADDING).max(1)
    }

    /// The block's keys `range` are neighbours in a page, from this token on.
    fn fill(&mut self, cache: &Cache, range: Range<usize>, page: isize, token: usize) {
        let at =
            |rows: &Rows, i: usize| rows.data.wrapping_offset(page * rows.page + (token + i) as isize * rows.token);
        for (i, index) in range.enumerate() {
            self.k[index] = at(&cache.k, i);
            self.v[index] = at(&cache.v, i);
        }
    }

    /// The rows of one KV head.
    #[inline(always)]
    pub(super) fn of_head(&self, cache: &Cache, head: usize) -> HeadRows<'_> {
        HeadRows { block: self, k_offset: head as isize * cache.k.head, v_offset: head as isize * cache.v.head }
    }
}

/// The rows of one KV head of a block.
#[derive(Clone, Copy)]
pub(super) struct HeadRows<'a> {
    pub(super) block: &'a KeyBlock,
    k_offset: isize,
    v_offset: isize,
}

impl HeadRows<'_> {
    /// K row of the block's key `j`; past the last key, the last one's.
    #[inline(always)]
    pub(super) fn k(&self, j: usize) -> *const u8 {
        self.block.k[j].wrapping_offset(self.k_offset)
    }
    /// V row, likewise.
    #[inline(always)]
    pub(super) fn v(&self, j: usize) -> *const u8 {
        self.block.v[j].wrapping_offset(self.v_offset)
    }
}

/// The next block, to be asked for while this one is computed, bit by bit and in the order of its memory (key by key,
/// for each key head by head): only then does the processor's own prefetching help.
///
/// The rows of a key are asked for in chunks, as few as the layout allows.
pub(super) struct Ahead<'a> {
    cache: &'a Cache,
    block: &'a KeyBlock,
    first_head: usize,
    chunks: Chunks,
    key: usize,
    /// Chunk of the key.
    chunk: usize,
    /// What is left of it.
    at: *const u8,
    end: *const u8,
}

/// Neighbouring bytes of a key's rows of some KV heads: chunk c belongs to K if it is even, to V if it is odd, and to the
/// head `c / 2` further on.
#[derive(Clone, Copy)]
struct Chunks {
    count: usize,
    /// Bytes of a chunk of K, and of V.
    len: [usize; 2],
}

impl Chunks {
    fn new(cache: &Cache, heads: usize) -> Self {
        let (k, v) = (cache.k, cache.v);
        let [k_heads, v_heads] = [k, v].map(|rows| heads == 1 || rows.head == rows.len as isize);
        if k.head == v.head && k.head == (k.len + v.len) as isize && v.data == k.data.wrapping_add(k.len) {
            // K and V of one head after the other.
            Self { count: 1, len: [heads * (k.len + v.len), 0] }
        } else if k_heads && v_heads {
            Self { count: 2, len: [heads * k.len, heads * v.len] }
        } else {
            Self { count: 2 * heads, len: [k.len, v.len] }
        }
    }
}

impl<'a> Ahead<'a> {
    pub(super) fn new(cache: &'a Cache, block: &'a KeyBlock, heads: Range<usize>) -> Self {
        let chunks = Chunks::new(cache, heads.len());
        let mut ahead = Self {
            cache,
            block,
            first_head: heads.start,
            chunks,
            key: 0,
            chunk: 0,
            at: std::ptr::null(),
            end: std::ptr::null(),
        };
        ahead.begin_chunk();
        ahead
    }

    /// Bytes that each of `parts` calls of [`Self::ask_for`] has to ask for.
    pub(super) fn share(&self, parts: usize) -> usize {
        let of_key: usize = (0..self.chunks.count).map(|c| self.chunks.len[c % 2]).sum();
        (self.block.len * of_key).div_ceil(parts).next_multiple_of(CACHE_LINE)
    }

    /// Ask for the next `bytes`.
    pub(super) fn ask_for(&mut self, bytes: usize) {
        let mut left = bytes;
        while left > 0 {
            let in_chunk = left.min(self.end as usize - self.at as usize);
            self.advance(in_chunk);
            left -= in_chunk;
        }
    }

    /// Ask for the next `bytes`, of this chunk only. This is no more than a few scalar instructions, without a call, so
    /// that the vectors of a loop may stay where they are.
    #[inline(always)]
    pub(super) fn advance(&mut self, bytes: usize) {
        prefetch_row(self.at, bytes);
        self.at = self.at.wrapping_add(bytes);
        if self.at >= self.end {
            self.chunk += 1;
            if self.chunk == self.chunks.count {
                // Past the end, the last key again: it is there already.
                (self.key, self.chunk) = ((self.key + 1).min(self.block.padded_len() - 1), 0);
            }
            self.begin_chunk();
        }
    }

    #[inline(always)]
    fn begin_chunk(&mut self) {
        let rows = self.block.of_head(self.cache, self.first_head + self.chunk / 2);
        self.at = if self.chunk.is_multiple_of(2) { rows.k(self.key) } else { rows.v(self.key) };
        self.end = self.at.wrapping_add(self.chunks.len[self.chunk % 2]);
    }
}
