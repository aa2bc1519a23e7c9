//! Attention of packed query rows over a paged K/V cache: prefill chunks and decode tokens in one ragged batch.
//!
//! Semantics: SPEC 2.1 and 2.3. The metadata (`query_start_loc`, `context_lens`, `block_tables`, `num_seqs`) is data of
//! the device; it is never read here and never trusted by a backend, which clamps it as SPEC 2.1 defines.

use super::kv_layout::KvLayout;
use super::{AttributeKind, Bound, KvView, Signature};
use crate::error::{Error, Result, ensure};
use crate::tensor::{DType, Dim, Tensor};

/// The interface of `xla_gpu_paged_attention`.
pub const SIGNATURE: Signature = Signature {
    target: "xla_gpu_paged_attention",
    operands: &[
        "query",
        "kv_cache",
        "context_lens",
        "block_tables",
        "query_start_loc",
        "num_seqs",
        "alibi_slopes",
        "sinks",
        "q_scale",
        "k_scale",
        "v_scale",
    ],
    required_operands: 6,
    results: &["out", "softmax_lse", "workspace"],
    required_results: 1,
    attributes: &[
        ("batch_invariant", AttributeKind::Bool),
        ("scale", AttributeKind::F32),
        ("sliding_window", AttributeKind::I64),
        ("soft_cap", AttributeKind::F32),
    ],
};

/// Element types of query, cache and output.
pub const DTYPES: &[DType] = &[DType::F16, DType::BF16, DType::F32];

/// The largest head dimension.
pub const MAX_HEAD_DIM: i64 = 256;

/// A validated call. Letters: `T` query rows, `S` sequence slots, `M` table entries a sequence, `P` pages.
#[derive(Clone, Copy, Debug)]
pub struct PagedAttention<'a> {
    /// `[T, Hq, D]`; the last dimension is contiguous
    pub query: Tensor<'a>,
    /// K rows of the cache, of the query's dtype
    pub k: KvView,
    /// V rows of the cache, of the query's dtype
    pub v: KvView,
    /// `i32[S]`: keys of each sequence, the new tokens included; dense
    pub context_lens: *const i32,
    /// `i32[S, M]`: pages of each sequence, in order; rows are `block_table_stride` apart
    pub block_tables: *const i32,
    /// Elements from a row of `block_tables` to the next.
    pub block_table_stride: i64,
    /// `i32[S+1]`: first row of each sequence and, last, the end; dense
    pub query_start_loc: *const i32,
    /// `i32[1]`: how many of the S slots are in use
    pub num_seqs: *const i32,
    /// `[T, Hq, D]`, dense, of the query's dtype
    pub out: Tensor<'a>,
    /// `f32[Hq, T]`, dense: natural logarithm of the softmax denominator, if wanted
    pub lse: Option<*mut f32>,
    /// T
    pub num_rows: usize,
    /// Hq
    pub num_q_heads: usize,
    /// Hkv; divides Hq, query head h reads KV head `h / (Hq / Hkv)`
    pub num_kv_heads: usize,
    /// D
    pub head_dim: usize,
    /// P
    pub num_pages: usize,
    /// Tokens of a page, at least 1 where there are pages
    pub page_size: usize,
    /// S
    pub max_seqs: usize,
    /// M
    pub max_pages: usize,
    /// Multiplies q·k; finite, positive
    pub scale: f32,
    /// Keys visible before the query's own position; -1 is all of them
    pub window_left: i64,
    /// `soft_cap * tanh(s / soft_cap)`; 0 is off
    pub soft_cap: f32,
    /// The bits of a sequence's rows must not depend on anything but that sequence and static sizes.
    pub batch_invariant: bool,
}

// SAFETY: addresses and numbers; see `Tensor`.
unsafe impl Send for PagedAttention<'_> {}
// SAFETY: as above.
unsafe impl Sync for PagedAttention<'_> {}

impl<'a> PagedAttention<'a> {
    pub(crate) fn new(bound: &Bound<'a>) -> Result<Self> {
        let query = bound.operand("query");
        query.expect_dtype("query", DTYPES)?;
        query.expect_shape("query", &[Dim::Any("T"), Dim::Any("Hq"), Dim::Any("D")])?;
        let (rows, q_heads, head_dim) = (query.dims[0], query.dims[1], query.dims[2]);
        ensure(q_heads > 0, || format!("query has shape {:?}, expected at least one head", query.dims))?;
        check_head_dim("query", head_dim)?;

        let (kv_cache, kv_heads) = kv_cache(bound, &query)?;
        let out = bound.result("out");
        out.expect_dtype("out", &[query.dtype])?;
        out.expect_shape("out", &[Dim::Is("T", rows), Dim::Is("Hq", q_heads), Dim::Is("D", head_dim)])?;

        let context_lens = index("context_lens", bound.operand("context_lens"))?;
        context_lens.expect_shape("context_lens", &[Dim::Any("num_seqs")])?;
        let seqs = context_lens.dims[0];
        let block_tables = index("block_tables", bound.operand("block_tables"))?;
        block_tables.expect_shape("block_tables", &[Dim::Is("num_seqs", seqs), Dim::Any("max_pages")])?;
        let query_start_loc = index("query_start_loc", bound.operand("query_start_loc"))?;
        query_start_loc.expect_shape("query_start_loc", &[Dim::Is("num_seqs+1", seqs + 1)])?;
        let num_seqs = index("num_seqs", bound.operand("num_seqs"))?;
        ensure(num_seqs.dims.is_empty() || num_seqs.dims == [1], || {
            format!("num_seqs has shape {:?}, expected [] or [1]", num_seqs.dims)
        })?;
        let max_pages = block_tables.dims[1];
        check_kernel_sizes(&[("T", rows), ("num_seqs", seqs), ("num_pages", kv_cache.dims[0])])?;
        let capacity = max_pages.checked_mul(kv_cache.dims[1]);
        ensure(capacity.is_some_and(|c| c < i64::from(i32::MAX)), || {
            format!("max_pages={max_pages} pages of {} tokens are 2^31 keys or more", kv_cache.dims[1])
        })?;

        dense("query_start_loc", &query_start_loc)?;
        dense("context_lens", &context_lens)?;
        dense("out", &out)?;
        contiguous_rows("query", &query)?;
        contiguous_rows("kv_cache", &kv_cache)?;
        contiguous_rows("block_tables", &block_tables)?;
        for name in ["alibi_slopes", "sinks", "q_scale", "k_scale", "v_scale"] {
            if bound.optional_operand(name).is_some() {
                return Err(Error::unimplemented(format!(
                    "{name} is not built yet; leave it out (a scalar scale can be folded into the attribute scale)"
                )));
            }
        }
        if let Some(workspace) = bound.optional_result("workspace") {
            workspace.expect_dtype("workspace", &[DType::U8])?;
            workspace.expect_shape("workspace", &[Dim::Any("N")])?;
        }
        let (k, v) = KvLayout::Interleaved.views(&kv_cache);
        let (scale, window_left, soft_cap) = score_attributes(bound)?;
        Ok(Self {
            query,
            k,
            v,
            context_lens: context_lens.data.cast_const().cast(),
            block_tables: block_tables.data.cast_const().cast(),
            block_table_stride: block_tables.stride(0),
            query_start_loc: query_start_loc.data.cast_const().cast(),
            num_seqs: num_seqs.data.cast_const().cast(),
            out,
            lse: softmax_lse(bound, q_heads, rows)?,
            num_rows: rows as usize,
            num_q_heads: q_heads as usize,
            num_kv_heads: kv_heads as usize,
            head_dim: head_dim as usize,
            num_pages: kv_cache.dims[0] as usize,
            page_size: kv_cache.dims[1] as usize,
            max_seqs: seqs as usize,
            max_pages: max_pages as usize,
            scale,
            window_left,
            soft_cap,
            batch_invariant: bound.bool("batch_invariant"),
        })
    }
}

/// `kv_cache [P, page_size, 2*Hkv, D]` and its Hkv.
fn kv_cache<'a>(bound: &Bound<'a>, query: &Tensor) -> Result<(Tensor<'a>, i64)> {
    let (q_heads, head_dim) = (query.dims[1], query.dims[2]);
    let cache = bound.operand("kv_cache");
    if [DType::F8E4M3FN, DType::F8E5M2].contains(&cache.dtype) {
        return Err(Error::unimplemented(format!(
            "kv_cache has dtype {}, which is not built yet; a cache of the query's dtype, {}, works",
            cache.dtype, query.dtype
        )));
    }
    cache.expect_dtype("kv_cache", &[query.dtype])?;
    let heads = Dim::Any("2*Hkv");
    let d = Dim::Is("D", head_dim);
    cache.expect_shape("kv_cache", &[Dim::Any("num_pages"), Dim::Any("page_size"), heads, d])?;
    let both = cache.dims[2];
    ensure(both >= 2 && both % 2 == 0 && q_heads % (both / 2) == 0, || {
        format!("kv_cache has shape {:?}, expected 2*Hkv heads with Hkv a divisor of Hq={q_heads}", cache.dims)
    })?;
    ensure(cache.dims[0] == 0 || cache.dims[1] > 0, || {
        format!("kv_cache has shape {:?}, expected a page_size of at least 1", cache.dims)
    })?;
    Ok((cache, both / 2))
}

/// `softmax_lse f32[Hq, T]`, if wanted. An empty one is `[Hq, 0]`, not left out, yet has nothing to write.
fn softmax_lse(bound: &Bound, q_heads: i64, rows: i64) -> Result<Option<*mut f32>> {
    let Some(lse) = bound.optional_result("softmax_lse") else { return Ok(None) };
    lse.expect_dtype("softmax_lse", &[DType::F32])?;
    lse.expect_shape("softmax_lse", &[Dim::Is("Hq", q_heads), Dim::Is("T", rows)])?;
    dense("softmax_lse", &lse)?;
    Ok(Some(lse.data.cast()))
}

/// (scale, `window_left`, `soft_cap`) of the attributes.
fn score_attributes(bound: &Bound) -> Result<(f32, i64, f32)> {
    let (scale, window, soft_cap) = (bound.f32("scale"), bound.i64("sliding_window"), bound.f32("soft_cap"));
    ensure(scale.is_finite() && scale > 0.0, || format!("scale is {scale}, expected finite and > 0"))?;
    ensure(soft_cap.is_finite() && soft_cap >= 0.0, || {
        format!("soft_cap is {soft_cap}, expected finite and >= 0 (0 is off)")
    })?;
    ensure(window == -1 || window >= 1, || format!("sliding_window is {window}, expected >= 1, or -1 for none"))?;
    // A window of W keys counts the query's own.
    Ok((scale, if window == -1 { -1 } else { window - 1 }, soft_cap))
}

/// A head dimension that SPEC 2.1 allows.
pub(crate) fn check_head_dim(name: &str, head_dim: i64) -> Result {
    ensure(head_dim > 0, || format!("{name} has head dimension {head_dim}, expected at least 8"))?;
    if head_dim % 8 != 0 || head_dim > MAX_HEAD_DIM {
        return Err(Error::unimplemented(format!(
            "{name} has head dimension {head_dim}; every multiple of 8 up to {MAX_HEAD_DIM} works"
        )));
    }
    Ok(())
}

/// Sizes that the kernels hold in 32 bits.
pub(crate) fn check_kernel_sizes(sizes: &[(&str, i64)]) -> Result {
    for (name, size) in sizes {
        ensure(*size < i64::from(i32::MAX), || format!("{name} is {size}, expected below 2^31"))?;
    }
    Ok(())
}

/// An operand of 32-bit indices.
fn index<'a>(name: &str, tensor: Tensor<'a>) -> Result<Tensor<'a>> {
    tensor.expect_dtype(name, &[DType::I32])?;
    Ok(tensor)
}

pub(crate) fn dense(name: &str, tensor: &Tensor) -> Result {
    ensure(tensor.is_dense(), || format!("{name} has strides {:?}, expected a dense tensor", tensor.strides))
}

/// The last dimension is contiguous, whatever the other strides.
pub(crate) fn contiguous_rows(name: &str, tensor: &Tensor) -> Result {
    let last = tensor.dims.len() - 1;
    ensure(tensor.dims[last] <= 1 || tensor.stride(last) == 1, || {
        format!("{name} has strides {:?}, expected 1 for the last dimension", tensor.strides)
    })
}
