//! [`mla_paged_attention_update`]

use super::attention::{AttentionResults, window};
use super::{Host, Memory, MlaPagedAttentionOptions, On, TensorMut, TensorRef, number, run};
use crate::error::Result;
use crate::problem::Op;
use crate::problem::arguments::mla_paged_attention_update::{Attributes, Operands, Results};

/// A ragged batch of new tokens for [`mla_paged_attention_update`]. Dimensions are those of
/// [`MlaPagedAttentionInputs`](super::MlaPagedAttentionInputs).
#[derive(Clone, Copy, Debug)]
pub struct MlaPagedAttentionUpdateInputs<'a, M = Host> {
    /// `[Tq, Hq, D]`: Dv columns that are multiplied by the up-projection of K, then the D - Dv rotated ones; f16, bf16 or
    /// f32. Rows may be strided.
    pub q: TensorRef<'a, M>,
    /// `i32[B+1]`: first row of each sequence, and the end of the last
    pub cu_seqlens_q: TensorRef<'a, M>,
    /// `i32[B]`: number of keys of each sequence, including those of the new tokens
    pub seqused_k: TensorRef<'a, M>,
    /// `i32[B, M]`: the pages of each sequence, in order. Rows may be strided.
    pub block_table: TensorRef<'a, M>,
    /// `[Tq, Dv]`: the compressed K and V of the new tokens, of the cache's dtype, or f16, bf16 or f32 for an fp8 cache.
    /// Rows may be strided.
    pub c_kv: TensorRef<'a, M>,
    /// `[Tq, D - Dv]`: the rotated key part of the new tokens, of the dtype of `c_kv`. Rows may be strided.
    pub k_pe: TensorRef<'a, M>,
    /// `i32[Tq]` or `i64[Tq]`: `page * page_size + offset` of each token, the same place that `block_table` gives for its
    /// row. Slots outside the cache are skipped, so -1 marks padding.
    pub slot_mapping: TensorRef<'a, M>,
    /// Multiplies q·k; finite and positive. It is that of the heads before absorption, which D does not tell.
    pub softmax_scale: f32,
}

/// Writes the latent rows of new tokens into a paged cache in place and computes attention over it, in one call
/// (`docs/semantics.md#mla_paged_attention_update`).
///
/// `kv_cache` is `[P, page_size, D]`. `kv_scale` divides rows when they are stored and multiplies them when they are read.
///
/// ```
/// use xla_attention::{
///     MlaPagedAttentionOptions, MlaPagedAttentionUpdateInputs, On, TensorMut, TensorRef, mla_paged_attention_update,
/// };
///
/// // A sequence with one row in page 1 gets its second. D = 16, of which 8 columns are values.
/// let mut cache = [0.0f32; 2 * 4 * 16]; // [P, page_size, D]
/// cache[4 * 16..][..8].fill(10.0);
/// let inputs = MlaPagedAttentionUpdateInputs {
///     q: TensorRef::new(&[0.0f32; 16], &[1, 1, 16]),
///     cu_seqlens_q: TensorRef::new(&[0, 1], &[2]),
///     seqused_k: TensorRef::new(&[2], &[1]),
///     block_table: TensorRef::new(&[1], &[1, 1]),
///     c_kv: TensorRef::new(&[30.0f32; 8], &[1, 8]),
///     k_pe: TensorRef::new(&[1.0f32; 8], &[1, 8]),
///     slot_mapping: TensorRef::new(&[4 + 1], &[1]),
///     softmax_scale: 0.25,
/// };
/// let mut out = [0.0f32; 8];
/// mla_paged_attention_update(
///     &inputs,
///     &MlaPagedAttentionOptions::default(),
///     TensorMut::new(&mut cache, &[2, 4, 16]),
///     TensorMut::new(&mut out, &[1, 1, 8]),
///     On::cpu(),
/// )?;
/// assert!(out.iter().all(|x| (x - 20.0).abs() < 1e-5)); // the mean of 10 and 30
/// assert_eq!(cache[5 * 16..][..16], [[30.0; 8], [1.0; 8]].concat());
/// # Ok::<(), xla_attention::Error>(())
/// ```
///
/// # Errors
/// As [`mla_paged_attention`](super::mla_paged_attention) and [`kv_cache_update`](super::kv_cache_update).
pub fn mla_paged_attention_update<'a, M: Memory>(
    inputs: &MlaPagedAttentionUpdateInputs<M>,
    options: &MlaPagedAttentionOptions<M>,
    kv_cache: TensorMut<'a, M>,
    results: impl Into<AttentionResults<'a, M>>,
    on: On<M>,
) -> Result {
    let operands = Operands {
        q: inputs.q,
        kv_cache: kv_cache.as_operand(),
        cu_seqlens_q: inputs.cu_seqlens_q,
        seqused_k: inputs.seqused_k,
        block_table: inputs.block_table,
        c_kv: inputs.c_kv,
        k_pe: inputs.k_pe,
        slot_mapping: inputs.slot_mapping,
        num_seqs: options.num_seqs,
        sinks: options.sinks,
        kv_scale: options.kv_scale,
    };
    let attributes = Attributes {
        batch_invariant: options.batch_invariant,
        causal: options.causal,
        max_seqlen_k: number(options.max_seqlen_k.unwrap_or(0)),
        max_seqlen_q: number(options.max_seqlen_q.unwrap_or(0)),
        softcap: options.softcap,
        softmax_scale: inputs.softmax_scale,
        window_left: window(options.window_left),
        window_right: window(options.window_right),
    };
    let AttentionResults { out, softmax_lse, workspace } = results.into();
    let results = Results { out, kv_cache, softmax_lse, workspace };
    run(Op::MlaPagedAttentionUpdate, operands.in_order(), results.in_order(), &attributes.in_order(), on)
}
