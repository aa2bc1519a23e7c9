//! What a batch of a test looks like.

use crate::tensor::DType;

/// Where K and V are.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) enum Storage {
    /// `[Tk, Hkv, D]` and `[Tk, Hkv, Dv]`
    Contiguous,
    /// In pages of so many tokens, with this `kv_layout`.
    Paged(usize, i64),
}

/// Which operator states the problem.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) enum Through {
    PagedAttention,
    FlashAttnVarlen,
}

/// Sizes, options and lengths.
#[derive(Clone, Debug)]
#[expect(clippy::struct_excessive_bools, reason = "options that are on or off")]
pub(super) struct Shape {
    pub(super) through: Through,
    pub(super) q_dtype: DType,
    pub(super) kv_dtype: DType,
    pub(super) out_dtype: DType,
    pub(super) q_heads: usize,
    pub(super) kv_heads: usize,
    pub(super) d: usize,
    pub(super) dv: usize,
    pub(super) storage: Storage,
    /// `window_left`, `window_right`; -1 is off
    pub(super) window: (i64, i64),
    pub(super) top_left: bool,
    pub(super) softcap: f32,
    /// Slopes: none, for each head, or (true) for each sequence and head
    pub(super) alibi: Option<bool>,
    pub(super) sinks: bool,
    /// Scales of q, K and V: none, one each, or (true) one for each KV head
    pub(super) scales: Option<bool>,
    pub(super) leftpad: bool,
    /// Slots have more rows than their sequences use.
    pub(super) seqused_q: bool,
    /// `len_k` is given, not the distance between starts.
    pub(super) seqused_k: bool,
    /// (`len_q`, `len_k`) of each sequence
    pub(super) lengths: Vec<(usize, usize)>,
    /// Rows before the first sequence, and behind the last
    pub(super) rows_around: (usize, usize),
    pub(super) seed: u64,
}

impl Default for Shape {
    fn default() -> Self {
        Self {
            through: Through::PagedAttention,
            q_dtype: DType::F32,
            kv_dtype: DType::F32,
            out_dtype: DType::F32,
            q_heads: 4,
            kv_heads: 2,
            d: 64,
            dv: 64,
            storage: Storage::Paged(16, 1),
            window: (-1, 0),
            top_left: false,
            softcap: 0.0,
            alibi: None,
            sinks: false,
            scales: None,
            leftpad: false,
            seqused_q: false,
            seqused_k: true,
            lengths: vec![(1, 40)],
            rows_around: (0, 0),
            seed: 1,
        }
    }
}

impl Shape {
    /// Full attention over contiguous keys.
    pub(super) fn varlen() -> Self {
        Self { through: Through::FlashAttnVarlen, storage: Storage::Contiguous, window: (-1, -1), ..Self::default() }
    }

    /// One element type for everything.
    pub(super) fn of(self, dtype: DType) -> Self {
        Self { q_dtype: dtype, kv_dtype: dtype, out_dtype: dtype, ..self }
    }

    /// D and Dv.
    pub(super) fn head_dims(self, d: usize, dv: usize) -> Self {
        Self { d, dv, ..self }
    }

    pub(super) fn softmax_scale(&self) -> f32 {
        1.7 / (self.d as f32).sqrt()
    }

    /// Keys that stand at the front of sequence `b` for nothing.
    pub(super) fn leftpad_of(&self, b: usize) -> usize {
        if self.leftpad { (3 * b + 2).min(self.lengths[b].1) } else { 0 }
    }

    /// Rows of the slot of sequence `b` that it does not use.
    pub(super) fn spare_rows(&self, b: usize) -> usize {
        if self.seqused_q { b % 3 } else { 0 }
    }

    /// Key rows of its slot that it does not use.
    pub(super) fn spare_keys(&self, b: usize) -> usize {
        if self.seqused_k && matches!(self.storage, Storage::Contiguous) { (b + 1) % 3 } else { 0 }
    }
}
