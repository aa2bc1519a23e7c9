//! Software prefetch of the next block's K and V rows.

use super::block_rows::{BlockRows, KvTensors};
use crate::cpu::simd::{CACHE_LINE, prefetch_row};
use std::ops::Range;

/// Prefetches the next block while the current one is computed, a few cache lines at a time and in memory order (key by
/// key, and for each key head by head), so that the CPU's hardware prefetchers recognise the stream too.
///
/// The rows of a key are prefetched in chunks, runs of adjacent bytes, as few as the layout allows.
pub(super) struct Prefetcher<'a> {
    kv: &'a KvTensors,
    block: &'a BlockRows,
    first_head: usize,
    chunks: Chunks,
    key: usize,
    chunk: usize,
    /// What is left of the current chunk.
    at: *const u8,
    end: *const u8,
}

/// Adjacent bytes of a key's rows. Chunk c belongs to K if c is even and to V if it is odd, and begins at head
/// `first_head + c / 2`.
#[derive(Clone, Copy)]
struct Chunks {
    count: usize,
    /// Bytes of a chunk of K, and of V.
    len: [usize; 2],
}

impl Chunks {
    fn new(kv: &KvTensors, heads: usize) -> Self {
        let (k, v) = (kv.k, kv.v);
        let [k_heads_adjacent, v_heads_adjacent] = [k, v].map(|rows| heads == 1 || rows.head == rows.len as isize);
        if kv.is_interleaved() {
            Self { count: 1, len: [heads * (k.len + v.len), 0] }
        } else if k_heads_adjacent && v_heads_adjacent {
            Self { count: 2, len: [heads * k.len, heads * v.len] }
        } else {
            Self { count: 2 * heads, len: [k.len, v.len] }
        }
    }
}

impl<'a> Prefetcher<'a> {
    pub(super) fn new(kv: &'a KvTensors, block: &'a BlockRows, heads: Range<usize>) -> Self {
        let chunks = Chunks::new(kv, heads.len());
        let mut prefetcher = Self {
            kv,
            block,
            first_head: heads.start,
            chunks,
            key: 0,
            chunk: 0,
            at: std::ptr::null(),
            end: std::ptr::null(),
        };
        prefetcher.begin_chunk();
        prefetcher
    }

    /// Bytes that each of `calls` calls of [`Self::prefetch`] has to take so that together they cover the block.
    pub(super) fn bytes_per_call(&self, calls: usize) -> usize {
        let bytes_per_key: usize = (0..self.chunks.count).map(|c| self.chunks.len[c % 2]).sum();
        (self.block.len * bytes_per_key).div_ceil(calls).next_multiple_of(CACHE_LINE)
    }

    /// Prefetch the next `bytes` into the L2 cache, whatever the chunks.
    pub(super) fn prefetch(&mut self, bytes: usize) {
        let mut left = bytes;
        while left > 0 {
            let in_chunk = left.min(self.end as usize - self.at as usize);
            self.prefetch_in_chunk(in_chunk);
            left -= in_chunk;
        }
    }

    /// Prefetch the next `bytes`, a constant, into the L2 cache, in pieces that most chunks are a multiple of. This
    /// compiles to a few scalar instructions without a call, so that a loop around it keeps its vectors in registers.
    #[inline(always)]
    pub(super) fn prefetch_in_pieces(&mut self, bytes: usize) {
        const PIECE: usize = 256;
        for _ in 0..bytes.div_ceil(PIECE) {
            self.prefetch_in_chunk(bytes.min(PIECE));
        }
    }

    /// Prefetch the next `bytes` of the current chunk; what goes beyond its end is not carried over to the next chunk.
    #[inline(always)]
    fn prefetch_in_chunk(&mut self, bytes: usize) {
        prefetch_row(self.at, bytes);
        self.at = self.at.wrapping_add(bytes);
        if self.at >= self.end {
            self.chunk += 1;
            if self.chunk == self.chunks.count {
                // Past the end of the block the last key, which is cached by then, is prefetched again.
                (self.key, self.chunk) = ((self.key + 1).min(self.block.padded_len - 1), 0);
            }
            self.begin_chunk();
        }
    }

    #[inline(always)]
    fn begin_chunk(&mut self) {
        let rows = self.block.of_head(self.kv, self.first_head + self.chunk / 2);
        self.at = if self.chunk.is_multiple_of(2) { rows.k(self.key) } else { rows.v(self.key) };
        self.end = self.at.wrapping_add(self.chunks.len[self.chunk % 2]);
    }
}
