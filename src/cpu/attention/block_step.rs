//! One block step: what a kernel is given for a block of keys, and what it does with it.

use super::block_rows::{HeadRows, HeadScales};
use super::lanes::FwdLanes;
use super::prefetcher::Prefetcher;
use super::score::LogitsTransform;
use super::softmax_state::SoftmaxState;
use crate::cpu::simd::Simd;
use crate::tensor::DType;

/// A block of keys, and the queries of one KV head that attend to it.
pub(super) struct BlockStep<'a> {
    pub(super) rows: HeadRows<'a>,
    /// Where the scales of the keys are, of a cache that has them.
    pub(super) scales: Option<HeadScales<'a>>,
    /// Packed queries of the KV head, in the work tile's layout (`softmax_state`).
    pub(super) q: *const f32,
    pub(super) state: SoftmaxState,
    pub(super) lanes: &'a FwdLanes,
    /// Index of the KV head among those of the work tile.
    pub(super) head: usize,
    pub(super) transform: LogitsTransform,
    pub(super) kv_dtype: DType,
    /// D and Dv: multiples of 8, at most 576 and 512.
    pub(super) d: usize,
    pub(super) dv: usize,
}

/// Memory for the intermediate results of a block step. E is [`Simd::ELEMENTS_PER_LANE`].
#[derive(Clone, Copy)]
pub(super) struct BlockBuffers {
    /// Scores, then probabilities: `[BLOCK][lanes of a micro-panel]`.
    pub(super) scores: *mut f32,
    /// Packed K: `[BLOCK][D / E]`.
    pub(super) k: *mut f32,
    /// Packed V: `[Dv / MR][BLOCK / E][MR]`, with Dv padded to whole vectors.
    pub(super) v: *mut f32,
    /// Two times [`super::key_scales::SCALES`] scales of keys, of a cache that has them.
    pub(super) scales: *mut f32,
}

/// Computes block steps for one [`super::plan::QueryLayout`].
pub(super) trait BlockKernel<S: Simd> {
    /// The kernel loads the rows of a block up to a multiple of this many keys.
    const PADDING: usize;
    /// Keys of a block whose rows have `key_bytes` per key, in all heads of the work tile together: a multiple of
    /// PADDING, at most [`super::block_rows::BLOCK`].
    fn block_keys(key_bytes: usize) -> usize;
    /// Update the softmax state with a block of keys, and meanwhile prefetch the rows of the next block.
    ///
    /// # Safety
    /// The rows of the block are readable; q, state, lanes and buffers have the sizes of the work tile.
    unsafe fn attend(simd: S, block_step: BlockStep, prefetcher: &mut Prefetcher, buffers: BlockBuffers);
}
