//! [`mla_paged_attention`]

use super::attention::{AttentionResults, window};
use super::{Host, Memory, On, TensorRef, number, run};
use crate::error::Result;
use crate::problem::Op;
use crate::problem::arguments::mla_paged_attention::{Attributes, Operands, Results};

/// A ragged batch for [`mla_paged_attention`]. Dimensions: `Tq` query rows, `B` sequence slots, `M` table entries per
/// sequence, `P` pages, `Hq` query heads, `D` elements of a latent row, `Dv` of a value.
#[derive(Clone, Copy, Debug)]
pub struct MlaPagedAttentionInputs<'a, M = Host> {
    /// `[Tq, Hq, D]`: Dv columns that are multiplied by the up-projection of K, then the D - Dv rotated ones; f16, bf16 or
    /// f32. Rows may be strided.
    pub q: TensorRef<'a, M>,
    /// `[P, page_size, D]`: a latent row per token. The dtype is q's, or with f16 or bf16 queries f8e4m3fn or f8e5m2.
    /// Rows may be strided.
    pub kv_cache: TensorRef<'a, M>,
    /// `i32[B+1]`: first query row of each sequence, and the end of the last
    pub cu_seqlens_q: TensorRef<'a, M>,
    /// `i32[B]`: number of keys of each sequence, including those of the new tokens, which are already in the cache
    pub seqused_k: TensorRef<'a, M>,
    /// `i32[B, M]`: the pages of each sequence, in order. Rows may be strided.
    pub block_table: TensorRef<'a, M>,
    /// Multiplies q·k; finite and positive. It is that of the heads before absorption, which D does not tell.
    pub softmax_scale: f32,
}

/// Options of [`mla_paged_attention`] and [`mla_paged_attention_update`](super::mla_paged_attention_update).
#[derive(Clone, Copy, Debug)]
pub struct MlaPagedAttentionOptions<'a, M = Host> {
    /// `i32[1]` or `i32[]`: number of sequences, at most B; all if `None`
    pub num_seqs: Option<TensorRef<'a, M>>,
    /// `f32[Hq]`: the logit of an additional key whose value is 0
    pub sinks: Option<TensorRef<'a, M>>,
    /// `f32[1]`: dequantization scale of the cache
    pub kv_scale: Option<TensorRef<'a, M>>,
    /// Scores become `softcap * tanh(score / softcap)`; 0 is off.
    pub softcap: f32,
    /// No query attends to a key after its own position. Overrides `window_right`. The last query is at the last key.
    pub causal: bool,
    /// Number of keys before its own position that a query attends to; `None` for all.
    pub window_left: Option<usize>,
    /// Number of keys after its own position that a query attends to; `None` for all.
    pub window_right: Option<usize>,
    /// Upper bound of the query rows per sequence. A hint, which never changes which rows are computed.
    pub max_seqlen_q: Option<usize>,
    /// Upper bound of the keys per sequence, a hint as `max_seqlen_q`.
    pub max_seqlen_k: Option<usize>,
    /// The bits of a sequence's rows depend only on that sequence and static sizes.
    pub batch_invariant: bool,
}

impl<M> Default for MlaPagedAttentionOptions<'_, M> {
    fn default() -> Self {
        Self {
            num_seqs: None,
            sinks: None,
            kv_scale: None,
            softcap: 0.0,
            causal: false,
            window_left: None,
            window_right: None,
            max_seqlen_q: None,
            max_seqlen_k: None,
            batch_invariant: false,
        }
    }
}

/// Multi-head latent attention in its absorbed form: all query heads of a ragged batch attend to the latent rows of a paged
/// cache, which are the keys and, in their first Dv columns, the values (`docs/semantics.md#mla_paged_attention`).
///
/// ```
/// use xla_attention::{
///     MlaPagedAttentionInputs, MlaPagedAttentionOptions, On, TensorMut, TensorRef, mla_paged_attention,
/// };
///
/// // A sequence with two rows in page 1. D = 16, of which 8 columns are values.
/// let mut cache = [0.0f32; 2 * 4 * 16]; // [P, page_size, D]
/// cache[4 * 16..][..8].fill(10.0);
/// cache[5 * 16..][..8].fill(30.0);
/// let inputs = MlaPagedAttentionInputs {
///     q: TensorRef::new(&[0.0f32; 2 * 16], &[1, 2, 16]),
///     kv_cache: TensorRef::new(&cache, &[2, 4, 16]),
///     cu_seqlens_q: TensorRef::new(&[0, 1], &[2]),
///     seqused_k: TensorRef::new(&[2], &[1]),
///     block_table: TensorRef::new(&[1], &[1, 1]),
///     softmax_scale: 0.25,
/// };
/// let options = MlaPagedAttentionOptions { causal: true, ..Default::default() };
/// let mut out = [0.0f32; 2 * 8];
/// mla_paged_attention(&inputs, &options, TensorMut::new(&mut out, &[1, 2, 8]), On::cpu())?;
/// assert!(out.iter().all(|x| (x - 20.0).abs() < 1e-5)); // both keys score the same
/// # Ok::<(), xla_attention::Error>(())
/// ```
///
/// # Errors
/// As [`flash_attn_varlen`](super::flash_attn_varlen).
pub fn mla_paged_attention<'a, M: Memory>(
    inputs: &MlaPagedAttentionInputs<M>,
    options: &MlaPagedAttentionOptions<M>,
    results: impl Into<AttentionResults<'a, M>>,
    on: On<M>,
) -> Result {
    let operands = Operands {
        q: inputs.q,
        kv_cache: inputs.kv_cache,
        cu_seqlens_q: inputs.cu_seqlens_q,
        seqused_k: inputs.seqused_k,
        block_table: inputs.block_table,
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
    let results = Results { out, softmax_lse, workspace };
    run(Op::MlaPagedAttention, operands.in_order(), results.in_order(), &attributes.in_order(), on)
}
