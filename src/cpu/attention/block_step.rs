//! What a kernel is given for a block of keys, and what it does with it.

use super::keys::{Ahead, HeadRows};
use super::lanes::Lanes;
use super::score::ScoreForm;
use super::state::State;
use crate::cpu::simd::Simd;
use crate::tensor::DType;

/// A block of keys and the queries of one KV head that attend to it.
pub(super) struct BlockStep<'a> {
    pub(super) rows: HeadRows<'a>,
    /// Words.
    pub(super) q: *const f32,
    pub(super) state: State,
    pub(super) lanes: &'a Lanes,
    /// Index of the KV head among the item's.
    pub(super) head: usize,
    pub(super) form: ScoreForm,
    pub(super) kv_dtype: DType,
    /// D and Dv: multiples of 8, at most 256
    pub(super) d: usize,
    pub(super) dv: usize,
}

/// Where a block's intermediate results stand.
#[derive(Clone, Copy)]
pub(super) struct Buffers {
    /// `[BLOCK]` steps of a panel's lanes
    pub(super) scores: *mut f32,
    /// Words of `[BLOCK][D]`
    pub(super) k: *mut f32,
    /// Words of `[BLOCK][Dv padded to whole vectors]`, in an order of the kernel's
    pub(super) v: *mut f32,
}

/// What to do with a block of keys; a kernel belongs to one arrangement of rows.
pub(super) trait RowKernel<S: Simd> {
    /// Keys that it takes at a time, at most [`super::keys::BLOCK`].
    const KEYS: usize;
    /// Bring the state up to date with a block of keys; ask for the rows of `ahead` meanwhile.
    ///
    /// # Safety
    /// The rows are readable; q, state, lanes and buffers are the item's.
    unsafe fn attend(simd: S, block_step: BlockStep, ahead: &mut Ahead, buffers: Buffers);
}
