//! Gradients of [`super::flash_attn_varlen`] over packed keys.
//!
//! `docs/semantics.md#flash_attn_varlen_bwd` has the formulas, which are those of `FlashAttention-2` (Dao 2023, section
//! 3.1.2) with a gradient of the lse. Metadata is clamped as in [`super::attention`]. Paged keys and 8-bit dtypes have
//! no gradient.

use super::attention::{
    Attention, Bias, KeyStorage, Keys, Queries, Score, bias, key_ranges, or_f32, per_sequence, q_offset, query_sizes,
    score,
};
use super::flash_attn_varlen::{packed_keys, score_attributes};
use super::validate::{self, contiguous_rows, dense, kernel_sizes};
use super::{BoolAttribute, CallArguments, CallResult, I64Attribute, Operand};
use crate::error::{Error, Result, ensure};
use crate::tensor::{DType, Dim, Tensor};

/// Element types of q, which K, V, the output and the gradients share.
const DTYPES: &[DType] = &[DType::F32, DType::F16, DType::BF16];

/// A validated call. Dimensions as of [`Attention`], and `Tk` key rows.
#[derive(Clone, Copy, Debug)]
pub struct FlashAttnVarlenBwd<'a> {
    /// The forward call, over contiguous keys and without scales of q, K and V. Its results `out` (whose last dimension
    /// is contiguous) and `lse` are inputs here. It has no workspace.
    pub forward: Attention<'a>,
    /// `[Tq, Hq, Dv]`, of q's dtype; the last dimension is contiguous
    pub dout: Tensor<'a>,
    /// `f32[Hq, Tq]`, dense; `None` is 0
    pub dlse: Option<*const f32>,
    /// `[Tq, Hq, D]`, dense, of q's dtype or f32
    pub dq: Tensor<'a>,
    /// `[Tk, Hkv, D]`, dense, of the dtype of dq
    pub dk: Tensor<'a>,
    /// `[Tk, Hkv, Dv]`, dense, of the dtype of dq
    pub dv: Tensor<'a>,
    /// `f32[Hq]`, dense, optional; 0 if the forward call has no sinks
    pub dsinks: Option<*mut f32>,
    /// `[B or 1, Hq or 1, Sq, Sk]`, dense, of the dtype of the bias or f32; only with a bias
    pub dbias: Option<Tensor<'a>>,
    /// Scratch memory of the call; uninitialized on entry.
    pub workspace: Option<Tensor<'a>>,
    /// Tk
    pub num_keys: usize,
    /// Whether two runs must give the same bits.
    pub deterministic: bool,
}

// SAFETY: the struct consists of addresses and numbers; each access through it states why it is allowed (see `Tensor`).
unsafe impl Send for FlashAttnVarlenBwd<'_> {}
// SAFETY: as for `Send`.
unsafe impl Sync for FlashAttnVarlenBwd<'_> {}

impl FlashAttnVarlenBwd<'_> {
    /// Bytes of the workspace, 0 without one.
    #[cfg(feature = "cuda")]
    pub(crate) fn workspace_bytes(&self) -> usize {
        self.workspace.as_ref().and_then(|workspace| workspace.dims.first()).map_or(0, |bytes| *bytes as usize)
    }
}

/// Validates a call and returns its problem.
///
/// | operand | shape |
/// |---|---|
/// | q | `[Tq, Hq, D]` |
/// | k, v | `[Tk, Hkv, D]`, `[Tk, Hkv, Dv]` |
/// | dout, out | `[Tq, Hq, Dv]` |
/// | `softmax_lse`, dlse | `f32[Hq, Tq]` |
/// | `cu_seqlens_q`, `cu_seqlens_k` | `i32[B+1]` |
/// | `seqused_k`, `seqused_q`, `leftpad_k`, `q_offset` | `i32[B]` |
/// | `k_start`, `k_end` | `i32[Tq]` |
/// | bias | `[B or 1, Hq or 1, Sq, Sk]` |
pub(crate) fn problem<'a>(args: &CallArguments<'a>) -> Result<FlashAttnVarlenBwd<'a>> {
    let [q, k, v, out, dout] =
        [Operand::Q, Operand::K, Operand::V, Operand::Out, Operand::Dout].map(|name| args.operand(name));
    if !DTYPES.contains(&q.dtype) {
        return Err(Error::unimplemented(format!("q is {}; there are gradients of f32, f16 and bf16", q.dtype)));
    }
    for (name, tensor) in [("k", &k), ("v", &v), ("out", &out), ("dout", &dout)] {
        tensor.expect_dtype(name, &[q.dtype])?;
    }
    let (rows, q_heads, head_dim) = query_sizes("q", "Tq", &q)?;
    if k.dims.len() == 4 {
        return Err(Error::unimplemented(format!(
            "k has shape {:?}; there are gradients of packed keys [Tk, Hkv, D], not of pages",
            k.dims
        )));
    }
    let stored = packed_keys(&k, &v, (q_heads, head_dim))?;
    let [keys, kv_heads, value_dim] = [v.dims[0], stored.kv_heads, stored.value_dim];

    let cu_seqlens_q = args.operand(Operand::CuSeqlensQ);
    let starts_q = validate::indices("cu_seqlens_q", &cu_seqlens_q, &[Dim::Any("B+1")])?;
    ensure(cu_seqlens_q.dims[0] > 0, || "cu_seqlens_q has shape [0], expected [B+1]".into())?;
    let slots = ("B", cu_seqlens_q.dims[0] - 1);
    let starts_k =
        validate::indices("cu_seqlens_k", &args.operand(Operand::CuSeqlensK), &[Dim::Is("B+1", slots.1 + 1)])?;
    let lengths =
        [("max_seqlen_q", args.i64(I64Attribute::MaxSeqlenQ)), ("max_seqlen_k", args.i64(I64Attribute::MaxSeqlenK))];
    for (name, length) in lengths {
        ensure(length >= 0, || format!("{name} is {length}, expected >= 0 (0 is unknown)"))?;
    }
    kernel_sizes(&[("Tq", rows), slots])?;

    let [tq, hq, hkv] = [Dim::Is("Tq", rows), Dim::Is("Hq", q_heads), Dim::Is("Hkv", kv_heads)];
    let [tk, d, dv] = [Dim::Is("Tk", keys), Dim::Is("D", head_dim), Dim::Is("Dv", value_dim)];
    for (name, tensor) in [("out", &out), ("dout", &dout)] {
        tensor.expect_shape(name, &[tq, hq, dv])?;
        contiguous_rows(name, tensor)?;
    }
    let lse = per_row("softmax_lse", &args.operand(Operand::SoftmaxLse), [hq, tq])?;
    let dlse = args.optional_operand(Operand::Dlse).map(|dlse| per_row("dlse", &dlse, [hq, tq])).transpose()?;
    let dq = args.result(CallResult::Dq);
    let gradient = |result: CallResult, shape: &[Dim]| {
        let (name, gradient) = (result.name(), args.result(result));
        gradient.expect_dtype(name, &[if dq.dtype == DType::F32 { DType::F32 } else { q.dtype }])?;
        gradient.expect_shape(name, shape)?;
        dense(name, &gradient)?;
        Ok(gradient)
    };
    let attributes = score_attributes(args)?;
    let storage = KeyStorage::Contiguous { total: keys as usize };
    let key_ranges = key_ranges(args, ("Tq", rows))?;
    let bias = bias(args, (q.dtype, k.dtype), false, !key_ranges.is_none(), (q_heads, slots.1))?;
    Ok(FlashAttnVarlenBwd {
        forward: Attention {
            q,
            kv_dtype: k.dtype,
            k: stored.k,
            v: stored.v,
            out,
            lse: Some(lse),
            workspace: None,
            queries: Queries {
                num_seqs: None,
                starts: starts_q,
                used: per_sequence(args, Operand::SequsedQ, slots)?,
                offset: q_offset(args, attributes.top_left, (rows, &storage), slots)?,
                key_ranges,
                tree: None,
                longest: lengths[0].1 as usize,
            },
            keys: Keys {
                starts: Some(starts_k),
                used: per_sequence(args, Operand::SequsedK, slots)?,
                leftpad: per_sequence(args, Operand::LeftpadK, slots)?,
                storage,
                longest: lengths[1].1 as usize,
            },
            score: Score { bias, ..score(args, &attributes, [None, None], q_heads, slots)? },
            v_scale: None,
            scale_cache: None,
            num_rows: rows as usize,
            num_q_heads: q_heads as usize,
            num_kv_heads: kv_heads as usize,
            head_dim: head_dim as usize,
            value_dim: value_dim as usize,
            max_seqs: slots.1 as usize,
            batch_invariant: false,
        },
        dout,
        dlse: dlse.map(<*mut f32>::cast_const),
        dq: gradient(CallResult::Dq, &[tq, hq, d])?,
        dk: gradient(CallResult::Dk, &[tk, hkv, d])?,
        dv: gradient(CallResult::Dv, &[tk, hkv, dv])?,
        dsinks: sink_gradient(args, hq)?,
        dbias: bias_gradient(args, bias)?,
        workspace: super::attention::workspace(args)?,
        num_keys: keys as usize,
        deterministic: args.bool(BoolAttribute::Deterministic),
    })
}

/// Validates the optional result `dsinks`.
fn sink_gradient(args: &CallArguments, heads: Dim) -> Result<Option<*mut f32>> {
    let dsinks = args.optional_result(CallResult::Dsinks).map(|dsinks| {
        dsinks.expect_dtype("dsinks", &[DType::F32])?;
        dsinks.expect_shape("dsinks", &[heads])?;
        dense("dsinks", &dsinks)?;
        Ok(dsinks.data.cast())
    });
    dsinks.transpose()
}

/// Validates the optional result `dbias`, which only a call with a bias has.
fn bias_gradient<'a>(args: &CallArguments<'a>, bias: Option<Bias>) -> Result<Option<Tensor<'a>>> {
    let Some(dbias) = args.optional_result(CallResult::Dbias) else { return Ok(None) };
    let bias = bias.ok_or_else(|| Error::invalid("dbias is a result, and there is no bias"))?;
    dbias.expect_dtype("dbias", or_f32(&[bias.dtype, DType::F32]))?;
    let sizes = [("B", bias.seqs), ("Hq", bias.heads), ("Sq", bias.rows), ("Sk", bias.keys)];
    dbias.expect_shape("dbias", &sizes.map(|(name, size)| Dim::Is(name, size as i64)))?;
    dense("dbias", &dbias)?;
    Ok(Some(dbias))
}

/// Validates a dense `f32[Hq, Tq]`.
fn per_row(name: &str, tensor: &Tensor, shape: [Dim; 2]) -> Result<*mut f32> {
    tensor.expect_dtype(name, &[DType::F32])?;
    tensor.expect_shape(name, &shape)?;
    dense(name, tensor)?;
    Ok(tensor.data.cast())
}
