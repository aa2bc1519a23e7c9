//! [`flash_attn_varlen_bwd`]

use super::attention::{softmax_scale, window};
use super::{Host, Memory, On, TensorMut, TensorRef, number, run};
use crate::error::Result;
use crate::problem::Op;
use crate::problem::arguments::flash_attn_varlen_bwd::{Attributes, Operands, Results};

/// Inputs and results of [`flash_attn_varlen`](super::flash_attn_varlen()), and the gradient of its output. Dimensions:
/// `Tq` query rows, `Tk` key rows, `B` sequences, `Hq` and `Hkv` heads, `D` and `Dv` elements per head.
#[derive(Clone, Copy, Debug)]
pub struct FlashAttnVarlenBwdInputs<'a, M = Host> {
    /// `[Tq, Hq, Dv]`, of q's dtype: the gradient of `out`. Rows may be strided.
    pub dout: TensorRef<'a, M>,
    /// `[Tq, Hq, D]`; f16, bf16 or f32. Rows may be strided.
    pub q: TensorRef<'a, M>,
    /// `[Tk, Hkv, D]`, of q's dtype: packed keys. Query head h reads KV head `h / (Hq / Hkv)`. Rows may be strided.
    pub k: TensorRef<'a, M>,
    /// `[Tk, Hkv, Dv]`, of q's dtype. Rows may be strided.
    pub v: TensorRef<'a, M>,
    /// `[Tq, Hq, Dv]`, of q's dtype: the output of the forward call. Rows may be strided.
    pub out: TensorRef<'a, M>,
    /// `f32[Hq, Tq]`: the log-sum-exp of the forward call
    pub softmax_lse: TensorRef<'a, M>,
    /// `i32[B+1]`: first query row of each sequence, and the end of the last
    pub cu_seqlens_q: TensorRef<'a, M>,
}

/// Options of [`flash_attn_varlen_bwd`]: those of the forward call, `dlse` and `deterministic`.
#[derive(Clone, Copy, Debug)]
pub struct FlashAttnVarlenBwdOptions<'a, M = Host> {
    /// `i32[B+1]`: first key row of each sequence, and the end of the last. `None` means `cu_seqlens_q`.
    pub cu_seqlens_k: Option<TensorRef<'a, M>>,
    /// `i32[B]`: number of keys of each sequence
    pub seqused_k: Option<TensorRef<'a, M>>,
    /// `i32[B]`: number of query rows of each sequence
    pub seqused_q: Option<TensorRef<'a, M>>,
    /// `i32[B]`: number of first keys of each sequence that are masked
    pub leftpad_k: Option<TensorRef<'a, M>>,
    /// `f32[Hq]` or `f32[B, Hq]`
    pub alibi_slopes: Option<TensorRef<'a, M>>,
    /// `f32[Hq]`
    pub sinks: Option<TensorRef<'a, M>>,
    /// `f32[Hq, Tq]`: the gradient of `softmax_lse`; `None` is 0
    pub dlse: Option<TensorRef<'a, M>>,
    /// `i32[B]`: the position of each sequence's query 0 among its keys
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
    /// The softcap of the scores; 0 disables it.
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
    /// Two runs must give the same bits. All kernels do, whether this is set or not.
    pub deterministic: bool,
}

impl<M> Default for FlashAttnVarlenBwdOptions<'_, M> {
    fn default() -> Self {
        Self {
            cu_seqlens_k: None,
            seqused_k: None,
            seqused_q: None,
            leftpad_k: None,
            alibi_slopes: None,
            sinks: None,
            dlse: None,
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
            deterministic: false,
        }
    }
}

/// Results of [`flash_attn_varlen_bwd`]: three gradients, and optionally more. `[dq, dk, dv].into()` makes the results
/// without options.
///
/// Padding rows and keys that no query attends to have gradients of 0.
#[derive(Debug)]
pub struct FlashAttnVarlenBwdResults<'a, M = Host> {
    /// `[Tq, Hq, D]`, of q's dtype or f32
    pub dq: TensorMut<'a, M>,
    /// `[Tk, Hkv, D]`, of the dtype of `dq`
    pub dk: TensorMut<'a, M>,
    /// `[Tk, Hkv, Dv]`, of the dtype of `dq`
    pub dv: TensorMut<'a, M>,
    /// `f32[Hq]`
    pub dsinks: Option<TensorMut<'a, M>>,
    /// `u8[N]`, of any size, uninitialized: scratch memory.
    /// [`AttentionSizes::gradients_workspace`](crate::ops::workspace::AttentionSizes::gradients_workspace) returns the
    /// size that the GPU's fastest kernels need. The CPU ignores it.
    pub workspace: Option<TensorMut<'a, M>>,
    /// `[B or 1, Hq or 1, Sq, Sk]`, of the dtype of `bias` or f32: its gradient, summed over the sequences and heads that
    /// share an element. With a bias only.
    pub dbias: Option<TensorMut<'a, M>>,
}

impl<'a, M> From<[TensorMut<'a, M>; 3]> for FlashAttnVarlenBwdResults<'a, M> {
    fn from([dq, dk, dv]: [TensorMut<'a, M>; 3]) -> Self {
        Self { dq, dk, dv, dsinks: None, workspace: None, dbias: None }
    }
}

/// Gradients of [`flash_attn_varlen`](super::flash_attn_varlen()) over packed keys
/// (`docs/semantics.md#flash_attn_varlen_bwd`).
///
/// Lengths and starts may be any numbers, as in the forward call.
///
/// ```
/// use xla_attention::{
///     FlashAttnVarlenBwdInputs, FlashAttnVarlenBwdOptions, On, TensorMut, TensorRef, flash_attn_varlen_bwd,
/// };
///
/// // One query and two keys with equal scores: out is the mean of two values, and each value gets half of its gradient.
/// let (q, k, v) = ([1.0f32; 8], [0.0f32; 2 * 8], [10.0f32; 2 * 8]);
/// let inputs = FlashAttnVarlenBwdInputs {
///     dout: TensorRef::new(&[6.0f32; 8], &[1, 1, 8]),
///     q: TensorRef::new(&q, &[1, 1, 8]),
///     k: TensorRef::new(&k, &[2, 1, 8]),
///     v: TensorRef::new(&v, &[2, 1, 8]),
///     out: TensorRef::new(&[10.0f32; 8], &[1, 1, 8]),
///     softmax_lse: TensorRef::new(&[std::f32::consts::LN_2], &[1, 1]),
///     cu_seqlens_q: TensorRef::new(&[0, 1], &[2]),
/// };
/// let cu_seqlens_k = TensorRef::new(&[0, 2], &[2]);
/// let options = FlashAttnVarlenBwdOptions { cu_seqlens_k: Some(cu_seqlens_k), ..Default::default() };
/// let (mut dq, mut dk, mut dv) = ([0.0f32; 8], [0.0f32; 2 * 8], [0.0f32; 2 * 8]);
/// let results = [
///     TensorMut::new(&mut dq, &[1, 1, 8]),
///     TensorMut::new(&mut dk, &[2, 1, 8]),
///     TensorMut::new(&mut dv, &[2, 1, 8]),
/// ];
/// flash_attn_varlen_bwd(&inputs, &options, results, On::cpu())?;
/// assert!(dv.iter().all(|x| (x - 3.0).abs() < 1e-5));
/// // Both values are equal, so the weights have no effect on out, and dq and dk are 0.
/// assert!(dq.iter().chain(&dk).all(|x| x.abs() < 1e-4));
/// # Ok::<(), xla_attention::Error>(())
/// ```
///
/// # Errors
/// As [`flash_attn_varlen`](super::flash_attn_varlen()); also [`Unimplemented`](crate::Code::Unimplemented) for paged
/// keys and 8-bit dtypes, which have no gradients.
pub fn flash_attn_varlen_bwd<'a, M: Memory>(
    inputs: &FlashAttnVarlenBwdInputs<M>,
    options: &FlashAttnVarlenBwdOptions<M>,
    results: impl Into<FlashAttnVarlenBwdResults<'a, M>>,
    on: On<M>,
) -> Result {
    let FlashAttnVarlenBwdResults { dq, dk, dv, dsinks, workspace, dbias } = results.into();
    let operands = Operands {
        dout: inputs.dout,
        q: inputs.q,
        k: inputs.k,
        v: inputs.v,
        out: inputs.out,
        softmax_lse: inputs.softmax_lse,
        cu_seqlens_q: inputs.cu_seqlens_q,
        cu_seqlens_k: options.cu_seqlens_k.unwrap_or(inputs.cu_seqlens_q),
        seqused_k: options.seqused_k,
        seqused_q: options.seqused_q,
        leftpad_k: options.leftpad_k,
        alibi_slopes: options.alibi_slopes,
        sinks: options.sinks,
        dlse: options.dlse,
        q_offset: options.q_offset,
        k_start: options.k_start,
        k_end: options.k_end,
        bias: options.bias,
    };
    let attributes = Attributes {
        causal: options.causal,
        deterministic: options.deterministic,
        max_seqlen_k: number(options.max_seqlen_k.unwrap_or(0)),
        max_seqlen_q: number(options.max_seqlen_q.unwrap_or(0)),
        softcap: options.softcap,
        softmax_scale: softmax_scale(options.softmax_scale, inputs.q),
        top_left: options.top_left,
        window_left: window(options.window_left),
        window_right: window(options.window_right),
    };
    let results = Results { dq, dk, dv, dsinks, workspace, dbias };
    run(Op::FlashAttnVarlenBwd, operands.in_order(), results.in_order(), &attributes.in_order(), on)
}
