//! [`paged_attention_update`]

use super::attention::{AttentionResults, softmax_scale, window};
use super::paged_attention::PagedAttentionOptions;
use super::{Host, Memory, On, ScaledCache, TensorMut, TensorRef, run};
use crate::error::{Result, ensure};
use crate::problem::Op;
use crate::problem::arguments::paged_attention_update::{Attributes, Operands, Results};

/// A ragged batch of new tokens for [`paged_attention_update`]. Dimensions: `T` tokens, `S` sequence slots, `M` table
/// entries per sequence, `Hq` and `Hkv` heads, `D` elements per head.
#[derive(Clone, Copy, Debug)]
pub struct PagedAttentionUpdateInputs<'a, M = Host> {
    /// `[T, Hq, D]`; f16, bf16, f32 or f8e4m3fn. Rows may be strided.
    pub query: TensorRef<'a, M>,
    /// `i32[S]`: number of keys of each sequence, including those of the new tokens
    pub context_lens: TensorRef<'a, M>,
    /// `i32[S, M]`: the pages of each sequence, in order. Rows may be strided.
    pub block_tables: TensorRef<'a, M>,
    /// `i32[S+1]`: first row of each sequence, and the end of the last
    pub query_start_loc: TensorRef<'a, M>,
    /// `i32[1]` or `i32[]`: number of sequences, at most S
    pub num_seqs: TensorRef<'a, M>,
    /// `[T, Hkv, D]`: the keys of the new tokens, of the cache's dtype, or f16, bf16 or f32 for a cache of 8 bits. Rows
    /// may be strided.
    pub key: TensorRef<'a, M>,
    /// `[T, Hkv, D]`: the values of the new tokens, of the keys' dtype. Rows may be strided.
    pub value: TensorRef<'a, M>,
    /// `i32[T]` or `i64[T]`: `page * page_size + offset` of each token, the same place that `block_tables` gives for
    /// its key. Slots outside the cache are skipped, so -1 marks padding.
    pub slot_mapping: TensorRef<'a, M>,
}

/// Writes the keys and values of new tokens into a paged cache in place and computes attention over it:
/// [`kv_cache_update`](super::kv_cache_update), then [`paged_attention`](super::paged_attention), in one call
/// (`docs/semantics.md#paged_attention_update`).
///
/// `kv_cache` is `[P, page_size, 2*Hkv, D]`, K of head h at 2h, V at 2h+1. `k_scale` and `v_scale` divide rows when
/// they are stored and multiply them when they are read. A [`ScaledCache`] has a scale per row instead, which the call
/// computes.
///
/// ```
/// use xla_attention::{
///     On, PagedAttentionOptions, PagedAttentionUpdateInputs, TensorMut, TensorRef, paged_attention_update,
/// };
///
/// // A sequence with one key in page 1 gets its second: one head, D = 8.
/// let mut cache = [0.0f32; 2 * 4 * 2 * 8]; // [P, page_size, 2*Hkv, D]
/// cache[4 * 16 + 8..][..8].fill(10.0); // V of page 1, token 0
/// let (row, value) = ([0.0f32; 8], [30.0f32; 8]);
/// let inputs = PagedAttentionUpdateInputs {
///     query: TensorRef::new(&row, &[1, 1, 8]),
///     context_lens: TensorRef::new(&[2], &[1]),
///     block_tables: TensorRef::new(&[1], &[1, 1]),
///     query_start_loc: TensorRef::new(&[0, 1], &[2]),
///     num_seqs: TensorRef::new(&[1], &[1]),
///     key: TensorRef::new(&row, &[1, 1, 8]),
///     value: TensorRef::new(&value, &[1, 1, 8]),
///     slot_mapping: TensorRef::new(&[4 + 1], &[1]),
/// };
/// let mut out = [0.0f32; 8];
/// paged_attention_update(
///     &inputs,
///     &PagedAttentionOptions::default(),
///     TensorMut::new(&mut cache, &[2, 4, 2, 8]),
///     TensorMut::new(&mut out, &[1, 1, 8]),
///     On::cpu(),
/// )?;
/// assert!(out.iter().all(|x| (x - 20.0).abs() < 1e-5)); // the mean of 10 and 30
/// assert_eq!(cache[5 * 16 + 8..][..8], [30.0; 8]);
/// # Ok::<(), xla_attention::Error>(())
/// ```
///
/// # Errors
/// As [`paged_attention`](super::paged_attention) and [`kv_cache_update`](super::kv_cache_update).
pub fn paged_attention_update<'a, M: Memory>(
    inputs: &PagedAttentionUpdateInputs<M>,
    options: &PagedAttentionOptions<M>,
    kv_cache: impl Into<ScaledCache<'a, TensorMut<'a, M>, M>>,
    results: impl Into<AttentionResults<'a, M>>,
    on: On<M>,
) -> Result {
    ensure(options.kv_scale_cache.is_none(), || "kv_scale_cache is an option, expected it beside the cache".into())?;
    let ScaledCache { kv_cache, kv_scale_cache } = kv_cache.into();
    let operands = Operands {
        query: inputs.query,
        kv_cache: kv_cache.as_operand(),
        context_lens: inputs.context_lens,
        block_tables: inputs.block_tables,
        query_start_loc: inputs.query_start_loc,
        num_seqs: inputs.num_seqs,
        key: inputs.key,
        value: inputs.value,
        slot_mapping: inputs.slot_mapping,
        alibi_slopes: options.alibi_slopes,
        sinks: options.sinks,
        q_scale: options.q_scale,
        k_scale: options.k_scale,
        v_scale: options.v_scale,
        k_start: options.k_start,
        k_end: options.k_end,
        tree_mask: options.tree_mask,
        kv_scale_cache: kv_scale_cache.as_ref().map(TensorMut::as_operand),
    };
    let attributes = Attributes {
        batch_invariant: options.batch_invariant,
        scale: softmax_scale(options.scale, inputs.query),
        sliding_window: window(options.sliding_window),
        soft_cap: options.soft_cap,
    };
    let AttentionResults { out, softmax_lse, workspace } = results.into();
    let results = Results { out, kv_cache, softmax_lse, workspace, kv_scale_cache };
    run(Op::PagedAttentionUpdate, operands.in_order(), results.in_order(), &attributes.in_order(), on)
}
