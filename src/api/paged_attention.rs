//! [`paged_attention`]

use super::attention::{AttentionResults, softmax_scale, window};
use super::{Host, Memory, On, TensorRef, run};
use crate::error::Result;
use crate::problem::Op;
use crate::problem::arguments::paged_attention::{Attributes, Operands, Results};

/// A ragged batch for [`paged_attention`]. Letters: `T` query rows, `S` sequence slots, `M` table entries a sequence, `P`
/// pages, `Hq` and `Hkv` heads, `D` elements of a head.
#[derive(Clone, Copy, Debug)]
pub struct PagedAttentionInputs<'a, M = Host> {
    /// `[T, Hq, D]`; f16, bf16, f32 or f8e4m3fn. Rows may lie apart.
    pub query: TensorRef<'a, M>,
    /// `[P, page_size, 2*Hkv, D]`, K of head h at 2h, V at 2h+1; of the query's dtype, f8e4m3fn or f8e5m2 (with f32 or
    /// f8e4m3fn queries the query's dtype alone). Query head h reads KV head `h / (Hq / Hkv)`. Rows may lie apart.
    pub kv_cache: TensorRef<'a, M>,
    /// `i32[S]`: keys of each sequence, those of the new tokens included, which are already in the cache
    pub context_lens: TensorRef<'a, M>,
    /// `i32[S, M]`: the pages of each sequence, in order. Rows may lie apart.
    pub block_tables: TensorRef<'a, M>,
    /// `i32[S+1]`: first query row of each sequence and, last, the end
    pub query_start_loc: TensorRef<'a, M>,
    /// `i32[1]` or `i32[]`: how many of the slots are in use
    pub num_seqs: TensorRef<'a, M>,
}

/// Options of [`paged_attention`].
#[derive(Clone, Copy, Debug)]
pub struct PagedAttentionOptions<'a, M = Host> {
    /// Multiplies q·k; finite and positive. `None` is `D^-0.5`.
    pub scale: Option<f32>,
    /// How many of the last keys a query sees, its own included; at least 1. `None` is all.
    pub sliding_window: Option<usize>,
    /// Scores become `soft_cap * tanh(score / soft_cap)`; 0 is off.
    pub soft_cap: f32,
    /// `f32[Hq]` or `f32[S, Hq]`: `-slope * |distance|` is added to a score.
    pub alibi_slopes: Option<TensorRef<'a, M>>,
    /// `f32[Hq]`: the logit of one more column of each row, whose value is 0
    pub sinks: Option<TensorRef<'a, M>>,
    /// `f32[1]` or `f32[Hkv]`: what the stored numbers are to be multiplied with.
    pub q_scale: Option<TensorRef<'a, M>>,
    /// As `q_scale`.
    pub k_scale: Option<TensorRef<'a, M>>,
    /// As `q_scale`.
    pub v_scale: Option<TensorRef<'a, M>>,
    /// The bits of a sequence's rows depend on nothing but that sequence and static sizes.
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
            batch_invariant: false,
        }
    }
}

/// Attention of a ragged batch, prefill chunks and decode tokens mixed, over a paged cache: causal, the last query at the
/// last key ([`crate::problem::paged_attention`]).
///
/// Lengths, pages and starts may hold any number: they are clamped, and the worst that wrong ones do is to give the
/// sequence they belong to unspecified rows.
///
/// ```
/// use xla_attention::{On, PagedAttentionInputs, PagedAttentionOptions, TensorMut, TensorRef, paged_attention};
///
/// // One sequence of two keys in page 1, and its last token as the query: one head, D = 8.
/// let mut cache = [f32::NAN; 2 * 4 * 2 * 8]; // [P, page_size, 2*Hkv, D]; what is not the sequence's has no effect
/// for (slot, value) in [(4, 10.0), (5, 30.0)] {
///     cache[slot * 16..][..8].fill(0.0); // K: both keys score the same
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
/// [`Unavailable`](crate::Code::Unavailable) or [`FailedPrecondition`](crate::Code::FailedPrecondition) without a driver
/// or GPU that can run it.
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
