//! Addresses of the K and V rows of a block of keys, in pages or packed.

use super::sequences::{LONGEST_COVER, Sequence, SequenceKeys, Window};
use crate::cpu::simd::load_lines;
use crate::problem::attention::{Attention, KeyStorage, PageTable};
use crate::problem::{KvScaleCache, KvView};
use std::ops::Range;

/// Maximum keys of a block.
pub(super) const BLOCK: usize = LONGEST_COVER;

/// K or V with strides in bytes: element (page, token, head, 0) is at `data + page * page + token * token + head *
/// head`. Packed keys are one page.
#[derive(Clone, Copy)]
pub(super) struct StridedRows {
    pub(super) data: *const u8,
    page: isize,
    token: isize,
    pub(super) head: isize,
    /// Bytes of a row.
    pub(super) len: usize,
}

impl StridedRows {
    fn of(view: &KvView, element_bytes: usize, elements: usize) -> Self {
        let bytes = |stride: i64| stride as isize * element_bytes as isize;
        Self {
            data: view.data,
            page: bytes(view.page_stride),
            token: bytes(view.token_stride),
            head: bytes(view.head_stride),
            len: elements * element_bytes,
        }
    }
}

/// K and V of a call, in pages or packed.
#[derive(Clone, Copy)]
pub(super) struct KvTensors {
    pub(super) k: StridedRows,
    pub(super) v: StridedRows,
    /// `None` for packed keys.
    table: Option<PageTable>,
    /// The scales of the rows.
    pub(super) scales: Option<ScaleRows>,
}

/// Scales of the rows of K and V, whose places differ by a constant.
#[derive(Clone, Copy)]
pub(super) struct ScaleRows {
    k: StridedRows,
    /// Bytes from the scale of a K row to that of the V row.
    to_v: isize,
}

impl ScaleRows {
    fn of(scales: &KvScaleCache) -> Self {
        let to_v = scales.v.data as isize - scales.k.data as isize;
        Self { k: StridedRows::of(&scales.k, size_of::<f32>(), 1), to_v }
    }
}

impl KvTensors {
    pub(super) fn new(problem: &Attention) -> Self {
        let element_bytes = problem.kv_dtype.size();
        Self {
            k: StridedRows::of(&problem.k, element_bytes, problem.head_dim),
            v: StridedRows::of(&problem.v, element_bytes, problem.value_dim),
            table: match problem.keys.storage {
                KeyStorage::Contiguous { .. } => None,
                KeyStorage::Paged(table) => Some(table),
            },
            scales: problem.scale_cache.as_ref().map(ScaleRows::of),
        }
    }

    /// Whether K and V of a head are adjacent, and the heads of a token too, in every token.
    pub(super) fn is_interleaved(&self) -> bool {
        let (k, v) = (&self.k, &self.v);
        let (k_strides, v_strides) = ([k.page, k.token, k.head], [v.page, v.token, v.head]);
        k_strides == v_strides && k.head == (k.len + v.len) as isize && v.data == k.data.wrapping_add(k.len)
    }
}

/// Row addresses of a block of at most [`BLOCK`] keys of one sequence.
pub(super) struct BlockRows {
    /// K rows of KV head 0; entries past the last key, up to `padded_len`, repeat the last key's.
    k: [*const u8; BLOCK],
    /// V rows of KV head 0, padded in the same way.
    v: [*const u8; BLOCK],
    /// Scales of the K rows of KV head 0, of the keys in the block; of a cache without scales not set.
    scales: [*const u8; BLOCK],
    /// Position of the first key in the sequence.
    pub(super) first: usize,
    /// Keys in the block.
    pub(super) len: usize,
    /// Keys with row addresses, so that kernels may always load several keys at a time; at least 1.
    pub(super) padded_len: usize,
}

impl BlockRows {
    pub(super) fn empty() -> Self {
        let none = [std::ptr::null(); BLOCK];
        Self { k: none, v: none, scales: none, first: 0, len: 0, padded_len: 1 }
    }

    /// Make this the block of the sequence's `keys`, with row addresses up to a multiple of `padding`, a power of two
    /// up to [`BLOCK`]. Page ids are clamped to the cache.
    ///
    /// # Safety
    /// `keys` are at most [`BLOCK`] and below the sequence's `len_k`; the table entries of their pages are readable.
    pub(super) unsafe fn locate(&mut self, kv: &KvTensors, sequence: &Sequence, keys: Range<usize>, padding: usize) {
        (self.first, self.len) = (keys.start, keys.len());
        self.padded_len = self.len.next_multiple_of(padding).max(1);
        match (sequence.keys, kv.table) {
            (SequenceKeys::Pages(pages), Some(table)) => {
                let (mut entry, mut token) = (0, 0);
                if !keys.is_empty() {
                    (entry, token) = (keys.start / table.page_size, keys.start % table.page_size);
                }
                let mut index = 0;
                while index < self.len {
                    // SAFETY: `entry` is the page of a key below len_k, whose table entry the caller says is readable.
                    let page = unsafe { pages.add(entry).read() };
                    let page = i64::from(page).clamp(0, table.num_pages as i64 - 1) as isize;
                    let in_page = (table.page_size - token).min(self.len - index);
                    self.fill(kv, index..index + in_page, page, token);
                    index += in_page;
                    entry += 1;
                    token = 0;
                }
            }
            (SequenceKeys::Rows(first), _) => self.fill(kv, 0..self.len, 0, first + keys.start),
            // Not reached: `sequences` gives a sequence pages only where the call has a table.
            (SequenceKeys::Pages(_), None) => self.len = 0,
        }
        if let Some(last) = self.len.checked_sub(1) {
            let (k, v) = (self.k[last], self.v[last]);
            let padding = self.len..self.padded_len;
            self.k[padding.clone()].fill(k);
            self.v[padding].fill(v);
        }
    }

    /// Set the addresses of the block's keys `range`, which are neighbours in a page from `token` on.
    fn fill(&mut self, kv: &KvTensors, range: Range<usize>, page: isize, token: usize) {
        let at = |rows: &StridedRows, i: usize| {
            rows.data.wrapping_offset(page * rows.page + (token + i) as isize * rows.token)
        };
        for (i, index) in range.clone().enumerate() {
            self.k[index] = at(&kv.k, i);
            self.v[index] = at(&kv.v, i);
        }
        if let Some(scales) = &kv.scales {
            range.enumerate().for_each(|(i, index)| self.scales[index] = at(&scales.k, i));
        }
    }

    /// Give keys that no query of a tile attends to the addresses of one that some query attends to: their probabilities
    /// are 0, which times a NaN or an Inf in a value would be NaN. Returns whether there is a key with queries.
    pub(super) fn hide_unattended(&mut self, sequence: &Sequence, queries: &Range<usize>, window: Window) -> bool {
        if !sequence.has_row_masks() {
            return true;
        }
        let mut attended = [false; BLOCK];
        let attended = &mut attended[..self.len];
        sequence.cover(queries, window, self.first, attended);
        let Some(shown) = attended.iter().position(|attended| *attended) else { return false };
        for j in (0..self.padded_len).filter(|j| !attended.get(*j).is_some_and(|attended| *attended)) {
            (self.k[j], self.v[j]) = (self.k[shown], self.v[shown]);
        }
        true
    }

    /// Load a byte of each cache line of the rows of `heads`, in the order of the memory. The CPU's hardware prefetchers
    /// run ahead of these loads, but not of software prefetches of the same lines, nor of the kernels' loads, which go
    /// from a key's row to that of the next key.
    ///
    /// # Safety
    /// The rows are readable.
    pub(super) unsafe fn load(&self, kv: &KvTensors, heads: Range<usize>) {
        let (k, v) = (&kv.k, &kv.v);
        if kv.is_interleaved() {
            // SAFETY: as below; K and V of a head and those of the next one are adjacent.
            return unsafe { load_rows(&self.k[..self.len], k, heads, k.len + v.len) };
        }
        // SAFETY: the caller guarantees readable rows.
        unsafe {
            load_rows(&self.k[..self.len], k, heads.clone(), k.len);
            load_rows(&self.v[..self.len], v, heads, v.len);
        }
    }

    /// The scales of the rows of one KV head.
    #[inline(always)]
    pub(super) fn scales_of_head(&self, scales: &ScaleRows, head: usize) -> HeadScales<'_> {
        let k_offset = head as isize * scales.k.head;
        HeadScales { scales: &self.scales[..self.len], k_offset, v_offset: k_offset + scales.to_v }
    }

    /// The rows of one KV head.
    #[inline(always)]
    pub(super) fn of_head(&self, kv: &KvTensors, head: usize) -> HeadRows<'_> {
        HeadRows { block: self, k_offset: head as isize * kv.k.head, v_offset: head as isize * kv.v.head }
    }
}

/// [`BlockRows::load`] of K or V, whose rows of KV head 0 are at `rows`, with `len` bytes per head.
///
/// # Safety
/// As [`BlockRows::load`].
unsafe fn load_rows(rows: &[*const u8], strides: &StridedRows, heads: Range<usize>, len: usize) {
    let at = |row: &*const u8, head: usize| row.wrapping_offset(head as isize * strides.head);
    // SAFETY: the caller guarantees readable rows.
    unsafe {
        if strides.head == len as isize {
            for row in rows {
                load_lines(at(row, heads.start), heads.len() * len);
            }
            return;
        }
        for head in heads {
            for row in rows {
                load_lines(at(row, head), len);
            }
        }
    }
}

/// Row addresses of a block for one KV head.
#[derive(Clone, Copy)]
pub(super) struct HeadRows<'a> {
    pub(super) block: &'a BlockRows,
    k_offset: isize,
    v_offset: isize,
}

impl HeadRows<'_> {
    /// K row of the block's key `j`; past the last key, up to the padding, the last key's.
    #[inline(always)]
    pub(super) fn k(&self, j: usize) -> *const u8 {
        self.block.k[j].wrapping_offset(self.k_offset)
    }
    /// V row of the block's key `j`, padded like [`HeadRows::k`].
    #[inline(always)]
    pub(super) fn v(&self, j: usize) -> *const u8 {
        self.block.v[j].wrapping_offset(self.v_offset)
    }
}

/// Addresses of the scales of a block's rows for one KV head.
#[derive(Clone, Copy)]
pub(super) struct HeadScales<'a> {
    scales: &'a [*const u8],
    k_offset: isize,
    v_offset: isize,
}

impl HeadScales<'_> {
    /// Keys of the block.
    #[inline(always)]
    pub(super) fn len(&self) -> usize {
        self.scales.len()
    }

    /// The scales of the K row and of the V row of the block's key `j`.
    ///
    /// # Safety
    /// `j` is below the block's length, and its scales are readable.
    #[inline(always)]
    pub(super) unsafe fn of_key(&self, j: usize) -> (f32, f32) {
        let at = |offset| self.scales[j].wrapping_offset(offset).cast::<f32>();
        // SAFETY: the caller guarantees readable scales.
        unsafe { (at(self.k_offset).read(), at(self.v_offset).read()) }
    }
}
