//! [`paged_attention`]

use super::attention::{AttentionResults, softmax_scale, window};
use super::{Host, Memory, On, TensorRef, run};
use crate::error::Result;
use crate::problem::Op;
use crate::problem::arguments::paged_attention::{Attributes, Operands, Results};

/// A ragged batch for [`paged_attention`]. Dimensions: `T` query rows, `S` sequence slots, `M` table entries per
/// sequence, `P` pages, `Hq` and `Hkv` heads, `D` elements per head.
#[derive(Clone, Copy, Debug)]
pub struct PagedAttentionInputs<'a, M = Host> {
    /// `[T, Hq, D]`; f16, bf16, f32 or f8e4m3fn. Rows may be strided.
    pub query: TensorRef<'a, M>,
    /// `[P, page_size, 2*Hkv, D]`, K of head h at 2h, V at 2h+1. The dtype is the query's, f8e4m3fn or f8e5m2; with f32
    /// or f8e4m3fn queries only the query's; with [`kv_scale_cache`](PagedAttentionOptions::kv_scale_cache) i8 or f8e4m3fn.
    /// Query head h reads KV head `h / (Hq / Hkv)`. Rows may be strided.
    pub kv_cache: TensorRef<'a, M>,
    /// `i32[S]`: number of keys of each sequence, including those of the new tokens, which are already in the cache
    pub context_lens: TensorRef<'a, M>,
    /// `i32[S, M]`: the pages of each sequence, in order. Rows may be strided.
    pub block_tables: TensorRef<'a, M>,
    /// `i32[S+1]`: first query row of each sequence, and the end of the last
    pub query_start_loc: TensorRef<'a, M>,
    /// `i32[1]` or `i32[]`: number of sequences, at most S
    pub num_seqs: TensorRef<'a, M>,
}

/// Options of [`paged_attention`].
#[derive(Clone, Copy, Debug)]
pub struct PagedAttentionOptions<'a, M = Host> {
    /// Multiplies q·k; finite and positive. `None` is `D^-0.5`.
    pub scale: Option<f32>,
    /// Number of last keys that a query attends to, including its own; at least 1. `None` for all.
    pub sliding_window: Option<usize>,
    /// Scores become `soft_cap * tanh(score / soft_cap)`; 0 disables it.
    pub soft_cap: f32,
    /// `f32[Hq]` or `f32[S, Hq]`: `-slope * |distance|` is added to a score.
    pub alibi_slopes: Option<TensorRef<'a, M>>,
    /// `f32[Hq]`: the logit of an additional key whose value is 0
    pub sinks: Option<TensorRef<'a, M>>,
    /// `f32[1]` or `f32[Hkv]`: dequantization scale of q
    pub q_scale: Option<TensorRef<'a, M>>,
    /// `f32[1]` or `f32[Hkv]`: dequantization scale of K
    pub k_scale: Option<TensorRef<'a, M>>,
    /// `f32[1]` or `f32[Hkv]`: dequantization scale of V
    pub v_scale: Option<TensorRef<'a, M>>,
    /// `i32[T]`: the first key of its sequence that each query row may attend to, besides what masks hide; `None` for 0.
    /// Clamped to the sequence's keys.
    pub k_start: Option<TensorRef<'a, M>>,
    /// `i32[T]`: the end of the keys that each query row may attend to; `None` for all. A row whose range is empty attends
    /// to no key.
    pub k_end: Option<TensorRef<'a, M>>,
    /// i32 or u32 `[S, q_max, ceil(q_max / 32)]`: which of the newest keys, those of its sequence's own query rows, each row
    /// attends to, in place of the causal mask, bit j of a row's words being the key of row j; `None` for the causal mask,
    /// which a sequence of more than `q_max` rows has too.
    pub tree_mask: Option<TensorRef<'a, M>>,
    /// f32 `[P, page_size, 2*Hkv]`: the scale of each row of a cache of i8 or f8e4m3fn, in place of `k_scale` and `v_scale`.
    /// A call that updates the cache takes it with the cache ([`ScaledCache`](super::ScaledCache)).
    pub kv_scale_cache: Option<TensorRef<'a, M>>,
    /// The bits of a sequence's rows depend only on that sequence and static sizes.
    pub batch_invariant: bool,
}

impl<M> Default for PagedAttentionOptions<'_, M> {
    fn default() -> Self {
        Self {
            scale: None,
            sliding_window: None,
            soft_cap: 0.0,
            alibi_slopes: None,
            sinks: None,
            q_scale: None,
            k_scale: None,
            v_scale: None,
            k_start: None,
            k_end: None,
            tree_mask: None,
            kv_scale_cache: None,
            batch_invariant: false,
        }
    }
}

/// Causal attention over a paged cache for a ragged batch of prefill chunks and decode tokens
/// (`docs/semantics.md#paged_attention`).
///
/// Lengths, pages and starts may be any numbers. They are clamped, so that invalid ones give unspecified rows of their
/// own sequence at worst.
///
/// ```
/// use xla_attention::{On, PagedAttentionInputs, PagedAttentionOptions, TensorMut, TensorRef, paged_attention};
///
/// // One sequence of two keys in page 1, and its last token as the query: one head, D = 8.
/// let mut cache = [f32::NAN; 2 * 4 * 2 * 8]; // [P, page_size, 2*Hkv, D]; slots outside the sequence have no effect
/// for (slot, value) in [(4, 10.0), (5, 30.0)] {
///     cache[slot * 16..][..8].fill(0.0); // K: both keys have the same score
///     cache[slot * 16 + 8..][..8].fill(value);
/// }
/// let inputs = PagedAttentionInputs {
///     query: TensorRef::new(&[1.0f32; 8], &[1, 1, 8]),
///     kv_cache: TensorRef::new(&cache, &[2, 4, 2, 8]),
///     context_lens: TensorRef::new(&[2], &[1]),
///     block_tables: TensorRef::new(&[1], &[1, 1]),
///     query_start_loc: TensorRef::new(&[0, 1], &[2]),
///     num_seqs: TensorRef::new(&[1], &[1]),
/// };
/// let mut out = [0.0f32; 8];
/// paged_attention(&inputs, &PagedAttentionOptions::default(), TensorMut::new(&mut out, &[1, 1, 8]), On::cpu())?;
/// assert!(out.iter().all(|x| (x - 20.0).abs() < 1e-5)); // the mean of 10 and 30
///
/// let last = PagedAttentionOptions { sliding_window: Some(1), ..Default::default() };
/// paged_attention(&inputs, &last, TensorMut::new(&mut out, &[1, 1, 8]), On::cpu())?;
/// assert!(out.iter().all(|x| (x - 30.0).abs() < 1e-5));
/// # Ok::<(), xla_attention::Error>(())
/// ```
///
/// # Errors
/// [`InvalidArgument`](crate::Code::InvalidArgument), naming the operand or option, where shapes, dtypes or numbers do
/// not fit; [`Unimplemented`](crate::Code::Unimplemented) for dtypes or a head dimension without a kernel;
/// [`Unavailable`](crate::Code::Unavailable) or [`FailedPrecondition`](crate::Code::FailedPrecondition) without a
/// driver or GPU that can run it.
pub fn paged_attention<'a, M: Memory>(
    inputs: &PagedAttentionInputs<M>,
    options: &PagedAttentionOptions<M>,
    results: impl Into<AttentionResults<'a, M>>,
    on: On<M>,
) -> Result {
    let operands = Operands {
        query: inputs.query,
        kv_cache: inputs.kv_cache,
        context_lens: inputs.context_lens,
        block_tables: inputs.block_tables,
        query_start_loc: inputs.query_start_loc,
        num_seqs: inputs.num_seqs,
        alibi_slopes: options.alibi_slopes,
        sinks: options.sinks,
        q_scale: options.q_scale,
        k_scale: options.k_scale,
        v_scale: options.v_scale,
        k_start: options.k_start,
        k_end: options.k_end,
        tree_mask: options.tree_mask,
        kv_scale_cache: options.kv_scale_cache,
    };
    let attributes = Attributes {
        batch_invariant: options.batch_invariant,
        scale: softmax_scale(options.scale, inputs.query),
        sliding_window: window(options.sliding_window),
        soft_cap: options.soft_cap,
    };
    let AttentionResults { out, softmax_lse, workspace } = results.into();
    let results = Results { out, softmax_lse, workspace };
    run(Op::PagedAttention, operands.in_order(), results.in_order(), &attributes.in_order(), on)
}
