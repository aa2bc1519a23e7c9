//! [`flash_attn_varlen`]

use super::attention::{AttentionResults, softmax_scale, window};
use super::{Host, Kv, Memory, On, TensorRef, number, run};
use crate::error::{Error, Result};
use crate::problem::Op;
use crate::problem::arguments::flash_attn_varlen::{Attributes, Operands, Results};

/// A ragged batch for [`flash_attn_varlen`]. Dimensions: `Tq` query rows, `Tk` key rows, `B` sequences, `M` table
/// entries per sequence, `P` pages, `Hq` and `Hkv` heads, `D` and `Dv` elements per head.
#[derive(Clone, Copy, Debug)]
pub struct FlashAttnVarlenInputs<'a, M = Host> {
    /// `[Tq, Hq, D]`; f16, bf16, f32 or f8e4m3fn. Rows may be strided.
    pub q: TensorRef<'a, M>,
    /// Packed keys and values, or with a `block_table` a paged cache in any layout. Their dtype is q's, f8e4m3fn or
    /// f8e5m2; with f32 or f8e4m3fn queries only q's. Query head h reads KV head `h / (Hq / Hkv)`. Rows may be strided.
    pub kv: Kv<TensorRef<'a, M>>,
    /// `i32[B+1]`: first query row of each sequence, and the end of the last
    pub cu_seqlens_q: TensorRef<'a, M>,
}

/// Options of [`flash_attn_varlen`].
#[derive(Clone, Copy, Debug)]
pub struct FlashAttnVarlenOptions<'a, M = Host> {
    /// `i32[B+1]`: first key row of each sequence, and the end of the last. `None` means `cu_seqlens_q` for packed
    /// keys; paged keys then need `seqused_k`. Paged keys without `seqused_k` number `cu_seqlens_k[b+1] -
    /// cu_seqlens_k[b]`.
    pub cu_seqlens_k: Option<TensorRef<'a, M>>,
    /// `i32[B]`: number of keys of each sequence; the keys after these are not read
    pub seqused_k: Option<TensorRef<'a, M>>,
    /// `i32[B, M]`: the pages of each sequence, in order. Rows may be strided.
    pub block_table: Option<TensorRef<'a, M>>,
    /// `i32[B]`: number of query rows of each sequence; the rows after these are padding
    pub seqused_q: Option<TensorRef<'a, M>>,
    /// `i32[B]`: number of first keys of each sequence that are masked. They still count in alignment, windows and
    /// `ALiBi`.
    pub leftpad_k: Option<TensorRef<'a, M>>,
    /// `f32[Hq]` or `f32[B, Hq]`: `-slope * |distance|` is added to a score.
    pub alibi_slopes: Option<TensorRef<'a, M>>,
    /// `f32[Hq]`: the logit of an additional key whose value is 0
    pub sinks: Option<TensorRef<'a, M>>,
    /// `f32[1]` or `f32[Hkv]`: dequantization scale of q
    pub q_scale: Option<TensorRef<'a, M>>,
    /// `f32[1]` or `f32[Hkv]`: dequantization scale of K
    pub k_scale: Option<TensorRef<'a, M>>,
    /// `f32[1]` or `f32[Hkv]`: dequantization scale of V
    pub v_scale: Option<TensorRef<'a, M>>,
    /// `i32[B]`: the position of each sequence's query 0 among its keys, of any sign, instead of an alignment; not with
    /// `top_left`. Numbers saturate to 2^28 in magnitude.
    pub q_offset: Option<TensorRef<'a, M>>,
    /// `i32[Tq]`: the first key of its sequence that each query row may attend to, besides what masks hide; `None` for 0.
    /// Clamped to the sequence's keys.
    pub k_start: Option<TensorRef<'a, M>>,
    /// `i32[Tq]`: the end of the keys that each query row may attend to; `None` for all. A row whose range is empty attends
    /// to no key.
    pub k_end: Option<TensorRef<'a, M>>,
    /// `[B or 1, Hq or 1, Sq, Sk]`, of q's dtype or f32: element `[b, h, i, j]` is added to the score of row i of sequence b
    /// and its key j; what lies past Sq and Sk is 0. Packed keys of q's dtype, without `k_start` and `k_end`.
    pub bias: Option<TensorRef<'a, M>>,
    /// Multiplies q·k; finite and positive. `None` is `D^-0.5`.
    pub softmax_scale: Option<f32>,
    /// Scores become `softcap * tanh(score / softcap)`; 0 is off.
    pub softcap: f32,
    /// No query attends to a key after its own position. Overrides `window_right`.
    pub causal: bool,
    /// Number of keys before its own position that a query attends to; `None` for all.
    pub window_left: Option<usize>,
    /// Number of keys after its own position that a query attends to; `None` for all.
    pub window_right: Option<usize>,
    /// Top-left alignment: query 0 is at key 0. Otherwise bottom-right: the last query is at the last key.
    pub top_left: bool,
    /// Upper bound of the query rows per sequence. A hint for tile sizes, which never changes which rows are computed.
    pub max_seqlen_q: Option<usize>,
    /// Upper bound of the keys per sequence, a hint as `max_seqlen_q`.
    pub max_seqlen_k: Option<usize>,
    /// The bits of a sequence's rows depend only on that sequence and static sizes.
    pub batch_invariant: bool,
}

impl<M> Default for FlashAttnVarlenOptions<'_, M> {
    fn default() -> Self {
        Self {
            cu_seqlens_k: None,
            seqused_k: None,
            block_table: None,
            seqused_q: None,
            leftpad_k: None,
            alibi_slopes: None,
            sinks: None,
            q_scale: None,
            k_scale: None,
            v_scale: None,
            q_offset: None,
            k_start: None,
            k_end: None,
            bias: None,
            softmax_scale: None,
            softcap: 0.0,
            causal: false,
            window_left: None,
            window_right: None,
            top_left: false,
            max_seqlen_q: None,
            max_seqlen_k: None,
            batch_invariant: false,
        }
    }
}

/// Attention of a ragged batch of query rows over packed keys or a paged cache, with the options of
/// `flash_attn_varlen_func` of flash-attn (`docs/semantics.md#flash_attn_varlen`).
///
/// Lengths, pages and starts may be any numbers. They are clamped, so that invalid ones give unspecified rows of their
/// own sequence at worst.
///
/// ```
/// use xla_attention::{FlashAttnVarlenInputs, FlashAttnVarlenOptions, Kv, On, TensorMut, TensorRef, flash_attn_varlen};
///
/// // Two sequences of 2 rows and 1, one head, D = 8. All keys score the same: a row is the mean of its visible values.
/// let q = [1.0f32; 3 * 8];
/// let v: Vec<f32> = [10.0, 30.0, 7.0].into_iter().flat_map(|value| [value; 8]).collect();
/// let inputs = FlashAttnVarlenInputs {
///     q: TensorRef::new(&q, &[3, 1, 8]),
///     kv: Kv::Split { k: TensorRef::new(&[0.0f32; 3 * 8], &[3, 1, 8]), v: TensorRef::new(&v, &[3, 1, 8]) },
///     cu_seqlens_q: TensorRef::new(&[0, 2, 3], &[3]),
/// };
/// let mut out = [0.0f32; 3 * 8];
/// let causal = FlashAttnVarlenOptions { causal: true, ..Default::default() };
/// flash_attn_varlen(&inputs, &causal, TensorMut::new(&mut out, &[3, 1, 8]), On::cpu())?;
/// for (row, expected) in out.chunks(8).zip([10.0, 20.0, 7.0]) {
///     assert!(row.iter().all(|x| (x - expected).abs() < 1e-5));
/// }
/// # Ok::<(), xla_attention::Error>(())
/// ```
///
/// # Errors
/// [`InvalidArgument`](crate::Code::InvalidArgument), naming the operand or option, where shapes, dtypes or numbers do
/// not fit; [`Unimplemented`](crate::Code::Unimplemented) for dtypes or a head dimension without a kernel;
/// [`Unavailable`](crate::Code::Unavailable) or [`FailedPrecondition`](crate::Code::FailedPrecondition) without a
/// driver or GPU that can run it.
pub fn flash_attn_varlen<'a, M: Memory>(
    inputs: &FlashAttnVarlenInputs<M>,
    options: &FlashAttnVarlenOptions<M>,
    results: impl Into<AttentionResults<'a, M>>,
    on: On<M>,
) -> Result {
    let (kv_layout, k, v) = inputs.kv.parts();
    let operands = Operands {
        q: inputs.q,
        k,
        // With both in one buffer, a buffer without an element stands for the values.
        v,
        cu_seqlens_q: inputs.cu_seqlens_q,
        cu_seqlens_k: cu_seqlens_k(inputs, options)?,
        seqused_k: options.seqused_k,
        block_table: options.block_table,
        seqused_q: options.seqused_q,
        leftpad_k: options.leftpad_k,
        alibi_slopes: options.alibi_slopes,
        sinks: options.sinks,
        q_scale: options.q_scale,
        k_scale: options.k_scale,
        v_scale: options.v_scale,
        q_offset: options.q_offset,
        k_start: options.k_start,
        k_end: options.k_end,
        bias: options.bias,
    };
    let attributes = Attributes {
        batch_invariant: options.batch_invariant,
        causal: options.causal,
        kv_layout,
        max_seqlen_k: number(options.max_seqlen_k.unwrap_or(0)),
        max_seqlen_q: number(options.max_seqlen_q.unwrap_or(0)),
        softcap: options.softcap,
        softmax_scale: softmax_scale(options.softmax_scale, inputs.q),
        top_left: options.top_left,
        window_left: window(options.window_left),
        window_right: window(options.window_right),
    };
    let AttentionResults { out, softmax_lse, workspace } = results.into();
    let results = Results { out, softmax_lse, workspace };
    run(Op::FlashAttnVarlen, operands.in_order(), results.in_order(), &attributes.in_order(), on)
}

/// The operand `cu_seqlens_k`, by default the starts of the queries: packed keys then lie like the queries. Paged keys must
/// have `seqused_k` in that case, and the operand is not read.
fn cu_seqlens_k<'a, M: Memory>(
    inputs: &FlashAttnVarlenInputs<'a, M>,
    options: &FlashAttnVarlenOptions<'a, M>,
) -> Result<TensorRef<'a, M>> {
    if options.cu_seqlens_k.is_none() && options.block_table.is_some() && options.seqused_k.is_none() {
        let error = Error::invalid("a block_table needs seqused_k or cu_seqlens_k, which tell lengths");
        return Err(error.of(Op::FlashAttnVarlen.signature().target));
    }
    Ok(options.cu_seqlens_k.unwrap_or(inputs.cu_seqlens_q))
}
