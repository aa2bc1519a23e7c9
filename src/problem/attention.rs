//! Attention of packed query rows over the keys of their sequences: the one problem that every attention operator
//! states and every backend solves.
//!
//! Semantics: `docs/semantics.md#attention`. The metadata (starts, lengths, page tables) is data of the device; it is
//! never read here and never trusted by a backend, which clamps it as [`Queries`] and [`Keys`] say, so that hostile
//! metadata gives the same results everywhere and costs no more than right metadata of the same shapes.

use super::kv_layout::KvLayout;
use super::validate::{Scale, contiguous_rows, dense, head_dim, optional_indices, scale};
use super::{CallArguments, CallResult, KvView, Operand};
use crate::error::{Error, Result, ensure};
use crate::tensor::{DType, Dim, Tensor};

/// A validated call. Letters: `Tq` query rows, `Hq` query heads, `Hkv` KV heads, `D` and `Dv` the head dimensions of
/// keys and values, `B` sequence slots.
#[derive(Clone, Copy, Debug)]
pub struct Attention<'a> {
    /// `[Tq, Hq, D]`; the last dimension is contiguous
    pub q: Tensor<'a>,
    /// Element type of K and V: with q f32, f16 or bf16 the same; with q f16, bf16 or e4m3fn also e4m3fn; with q f16 or
    /// bf16 also e5m2
    pub kv_dtype: DType,
    /// K rows, D elements each
    pub k: KvView,
    /// V rows, Dv elements each
    pub v: KvView,
    /// `[Tq, Hq, Dv]`, dense; of q's dtype, or f16 or bf16 where q is e4m3fn
    pub out: Tensor<'a>,
    /// `f32[Hq, Tq]`, dense: natural logarithm of the softmax denominator, if wanted
    pub lse: Option<*mut f32>,
    /// Bytes that the call may use as it likes; arbitrary on entry.
    pub workspace: Option<Tensor<'a>>,
    /// Which rows belong to which sequence.
    pub queries: Queries,
    /// Which keys belong to which sequence.
    pub keys: Keys,
    /// From q·k to the softmax.
    pub score: Score,
    /// Multiplies the output.
    pub v_scale: Option<Scale>,
    /// Tq
    pub num_rows: usize,
    /// Hq
    pub num_q_heads: usize,
    /// Hkv; divides Hq, query head h reads KV head `h / (Hq / Hkv)`
    pub num_kv_heads: usize,
    /// D: a multiple of 8, at most 256
    pub head_dim: usize,
    /// Dv: a multiple of 8, at most 256
    pub value_dim: usize,
    /// B
    pub max_seqs: usize,
    /// The bits of a sequence's rows must not depend on anything but that sequence, the options, D, Dv, Hq, Hkv, dtypes
    /// and the page size.
    pub batch_invariant: bool,
}

// SAFETY: addresses and numbers; see `Tensor`.
unsafe impl Send for Attention<'_> {}
// SAFETY: as above.
unsafe impl Sync for Attention<'_> {}

/// Starts are read as their running maximum, so that sequences never overlap: sequence b has the rows from
/// `max over b' <= b of clamp(starts[b'], 0, Tq)` to where sequence b+1 begins, of which only the first `used[b]` are its
/// own where `used` is given.
#[derive(Clone, Copy, Debug)]
pub struct Queries {
    /// `i32[1]`: how many of the B slots are in use, clamped to `[0, B]`; all of them without it
    pub num_seqs: Option<*const i32>,
    /// `i32[B+1]`, dense
    pub starts: *const i32,
    /// `i32[B]`, dense
    pub used: Option<*const i32>,
    /// The longest sequence as the caller knows it, 0 for unknown: advice, never to be relied on.
    pub longest: usize,
}

/// Where the keys of a sequence are, and how many: `len_k`, before it is clamped to `[0, capacity]`.
#[derive(Clone, Copy, Debug)]
pub struct Keys {
    /// `i32[B+1]`, dense. Contiguous: always there, and read as those of [`Queries`]; the rows of sequence b are its
    /// keys, and their number is the capacity. Paged: there only without `used` and with a sequence, and `len_k` is
    /// `starts[b+1] - starts[b]`, 0 where that is negative.
    pub starts: Option<*const i32>,
    /// `i32[B]`, dense: `len_k`, if given
    pub used: Option<*const i32>,
    /// `i32[B]`, dense, clamped to `[0, len_k]`: the first keys, which no query sees
    pub leftpad: Option<*const i32>,
    /// Rows or pages.
    pub storage: KeyStorage,
    /// The longest sequence as the caller knows it, 0 for unknown: advice, never to be relied on.
    pub longest: usize,
}

/// How a position in a sequence becomes a row of K and V.
#[derive(Clone, Copy, Debug)]
pub enum KeyStorage {
    /// Key j of sequence b is row `starts[b] + j`, `token_stride` apart; the views' `page_stride` has no meaning.
    Contiguous {
        /// Rows of K and V.
        total: usize,
    },
    /// Key j of sequence b is token `j % page_size` of page `table[b][j / page_size]`, the page clamped to
    /// `[0, num_pages)`; the capacity is `max_pages * page_size`, 0 without pages.
    Paged(PageTable),
}

/// The pages of each sequence.
#[derive(Clone, Copy, Debug)]
pub struct PageTable {
    /// `i32[B, max_pages]`: rows are `stride` apart; only entries below `ceil(len_k / page_size)` are read
    pub entries: *const i32,
    /// Elements from a row to the next.
    pub stride: i64,
    /// M
    pub max_pages: usize,
    /// P
    pub num_pages: usize,
    /// Tokens of a page, at least 1 where there are pages.
    pub page_size: usize,
}

impl PageTable {
    /// The longest context that a row of the table can name.
    #[must_use]
    pub fn capacity(&self) -> usize {
        if self.num_pages == 0 { 0 } else { self.max_pages * self.page_size }
    }
}

/// From q·k to the softmax: scale, cap, bias, mask, sink.
#[derive(Clone, Copy, Debug)]
pub struct Score {
    /// Multiplies q·k; finite, positive
    pub softmax_scale: f32,
    /// Multiply q·k too.
    pub q_scale: Option<Scale>,
    /// As `q_scale`.
    pub k_scale: Option<Scale>,
    /// `softcap * tanh(s / softcap)`; 0 is off
    pub softcap: f32,
    /// Keys visible before the query's own position; -1 is all of them
    pub window_left: i64,
    /// Keys visible after it; 0 is causal, -1 is all of them
    pub window_right: i64,
    /// Query 0 stands at key 0, not the last query at the last key.
    pub top_left: bool,
    /// `-slope * |distance|` is added to a score
    pub alibi: Option<Alibi>,
    /// `f32[Hq]`, dense: the logit of one more column, whose value is 0
    pub sinks: Option<*const f32>,
}

/// Slopes of the linear bias.
#[derive(Clone, Copy, Debug)]
pub struct Alibi {
    /// `f32[Hq]`, or `f32[B, Hq]`; dense
    pub slopes: *const f32,
    /// Whether each sequence has its own.
    pub per_sequence: bool,
}

/// The dtypes of `docs/semantics.md#dtypes`, as an error tells them.
const DTYPE_TABLE: &str = "f32 queries over f32; f16 or bf16 queries over the same, f8e4m3fn or f8e5m2, with an output \
                           of the query's dtype; f8e4m3fn queries over f8e4m3fn, with an output of bf16 or f16";

/// q's dtype, that of K and V, and that of the output stand in the table.
pub(super) fn check_dtypes(q: (&str, DType), kv: (&str, DType), out: DType) -> Result {
    let kv_fits = match q.1 {
        DType::F32 => kv.1 == DType::F32,
        DType::F16 | DType::BF16 => [q.1, DType::F8E4M3FN, DType::F8E5M2].contains(&kv.1),
        DType::F8E4M3FN => kv.1 == DType::F8E4M3FN,
        _ => false,
    };
    let out_fits = if q.1 == DType::F8E4M3FN { [DType::BF16, DType::F16].contains(&out) } else { out == q.1 };
    if kv_fits && out_fits {
        return Ok(());
    }
    Err(Error::unimplemented(format!(
        "{} is {}, {} is {} and out is {out}; there is {DTYPE_TABLE}",
        q.0, q.1, kv.0, kv.1
    )))
}

/// Query rows `[T, Hq, D]` named `name`, T called `rows`: the sizes.
pub(super) fn query_sizes(name: &str, rows: &'static str, q: &Tensor) -> Result<(i64, i64, i64)> {
    q.expect_shape(name, &[Dim::Any(rows), Dim::Any("Hq"), Dim::Any("D")])?;
    ensure(q.dims[1] > 0, || format!("{name} has shape {:?}, expected at least one head", q.dims))?;
    head_dim(name, q.dims[2])?;
    contiguous_rows(name, q)?;
    Ok((q.dims[0], q.dims[1], q.dims[2]))
}

/// Hkv, which `has` tells of and which is called `heads` there, divides Hq.
pub(super) fn check_heads(q_heads: i64, kv_heads: i64, heads: &str, has: impl FnOnce() -> String) -> Result {
    ensure(kv_heads > 0 && q_heads % kv_heads == 0, || {
        format!("{}, expected {heads} heads with Hkv a divisor of Hq={q_heads}", has())
    })
}

/// K and V in one buffer of a layout: the views, P, `page_size`, Hkv.
pub(super) fn paged_in_one_buffer(
    name: &str,
    cache: &Tensor,
    layout: KvLayout,
    (q_heads, head_dim): (i64, i64),
) -> Result<(KvView, KvView, i64, i64, i64)> {
    cache.expect_shape(name, &layout.shape(Dim::Any("Hkv"), head_dim))?;
    let (pages, tokens) = layout.axes();
    let heads = if layout == KvLayout::Interleaved { "2*Hkv" } else { "Hkv" };
    // Heads that are no pairs are no number of KV heads.
    let kv_heads = layout.kv_heads(cache).unwrap_or(0);
    check_heads(q_heads, kv_heads, heads, || format!("{name} has shape {:?}", cache.dims))?;
    contiguous_rows(name, cache)?;
    let (k, v) = layout.views(cache);
    Ok((k, v, cache.dims[pages], cache.dims[tokens], kv_heads))
}

/// `block_table i32[B, M]` over pages of a cache named `cache`.
pub(super) fn page_table(
    name: &str,
    table: &Tensor,
    (slots, seqs): (&'static str, i64),
    cache: &str,
    (pages, page_size): (i64, i64),
) -> Result<PageTable> {
    table.expect_dtype(name, &[DType::I32])?;
    table.expect_shape(name, &[Dim::Is(slots, seqs), Dim::Any("max_pages")])?;
    contiguous_rows(name, table)?;
    ensure(pages == 0 || page_size > 0, || {
        format!("{cache} has pages of 0 tokens, expected a page_size of at least 1")
    })?;
    let max_pages = table.dims[1];
    let capacity = max_pages.checked_mul(page_size);
    ensure(capacity.is_some_and(|c| c < i64::from(i32::MAX)), || {
        format!("max_pages={max_pages} pages of {page_size} tokens are 2^31 keys or more")
    })?;
    Ok(PageTable {
        entries: table.data.cast_const().cast(),
        stride: table.stride(0),
        max_pages: max_pages as usize,
        num_pages: pages as usize,
        page_size: page_size as usize,
    })
}

/// `out [T, Hq, Dv]`, dense, of a dtype that [`check_dtypes`] has seen.
pub(super) fn out<'a>(args: &CallArguments<'a>, rows: Dim, q_heads: i64, value_dim: Dim) -> Result<Tensor<'a>> {
    let out = args.result(CallResult::Out);
    out.expect_shape("out", &[rows, Dim::Is("Hq", q_heads), value_dim])?;
    dense("out", &out)?;
    Ok(out)
}

/// `softmax_lse f32[Hq, T]`, if wanted. An empty one is `[Hq, 0]`, not left out, yet has nothing to write.
pub(super) fn softmax_lse(args: &CallArguments, q_heads: i64, rows: Dim) -> Result<Option<*mut f32>> {
    let lse = args.optional_result(CallResult::SoftmaxLse);
    lse.map(|lse| {
        lse.expect_dtype("softmax_lse", &[DType::F32])?;
        lse.expect_shape("softmax_lse", &[Dim::Is("Hq", q_heads), rows])?;
        dense("softmax_lse", &lse)?;
        Ok(lse.data.cast())
    })
    .transpose()
}

/// `workspace u8[N]`, if there is one.
pub(super) fn workspace<'a>(args: &CallArguments<'a>) -> Result<Option<Tensor<'a>>> {
    let workspace = args.optional_result(CallResult::Workspace);
    workspace
        .map(|workspace| {
            workspace.expect_dtype("workspace", &[DType::U8])?;
            workspace.expect_shape("workspace", &[Dim::Any("N")])?;
            dense("workspace", &workspace)?;
            Ok(workspace)
        })
        .transpose()
}

/// The attributes of a score by the names that a target gives them, and its optional operands.
pub(super) struct ScoreAttributes {
    pub(super) scale: (&'static str, f32),
    pub(super) softcap: (&'static str, f32),
    pub(super) window_left: i64,
    pub(super) window_right: i64,
    pub(super) top_left: bool,
}

/// The scales of q and K.
pub(super) fn score_scales(args: &CallArguments, kv_heads: i64) -> Result<[Option<Scale>; 2]> {
    Ok([scale(args, Operand::QScale, kv_heads)?, scale(args, Operand::KScale, kv_heads)?])
}

/// Scales, cap, bias and sinks; `seqs` is B under the name that the target gives it.
pub(super) fn score(
    args: &CallArguments,
    attributes: &ScoreAttributes,
    [q_scale, k_scale]: [Option<Scale>; 2],
    q_heads: i64,
    (slots, seqs): (&'static str, i64),
) -> Result<Score> {
    let ScoreAttributes { scale: (scale_name, softmax_scale), softcap: (softcap_name, softcap), .. } = *attributes;
    ensure(softmax_scale.is_finite() && softmax_scale > 0.0, || {
        format!("{scale_name} is {softmax_scale}, expected finite and > 0")
    })?;
    ensure(softcap.is_finite() && softcap >= 0.0, || {
        format!("{softcap_name} is {softcap}, expected finite and >= 0 (0 is off)")
    })?;
    Ok(Score {
        softmax_scale,
        q_scale,
        k_scale,
        softcap,
        window_left: attributes.window_left,
        window_right: attributes.window_right,
        top_left: attributes.top_left,
        alibi: alibi(args, q_heads, (slots, seqs))?,
        sinks: sinks(args, q_heads)?,
    })
}

fn alibi(args: &CallArguments, q_heads: i64, (slots, seqs): (&'static str, i64)) -> Result<Option<Alibi>> {
    let Some(slopes) = args.optional_operand(Operand::AlibiSlopes) else { return Ok(None) };
    slopes.expect_dtype("alibi_slopes", &[DType::F32])?;
    let per_sequence = slopes.dims == [seqs, q_heads];
    ensure(per_sequence || slopes.dims == [q_heads], || {
        format!("alibi_slopes has shape {:?}, expected [Hq={q_heads}] or [{slots}={seqs}, Hq={q_heads}]", slopes.dims)
    })?;
    dense("alibi_slopes", &slopes)?;
    Ok(Some(Alibi { slopes: slopes.data.cast_const().cast(), per_sequence }))
}

fn sinks(args: &CallArguments, q_heads: i64) -> Result<Option<*const f32>> {
    let Some(sinks) = args.optional_operand(Operand::Sinks) else { return Ok(None) };
    sinks.expect_dtype("sinks", &[DType::F32])?;
    sinks.expect_shape("sinks", &[Dim::Is("Hq", q_heads)])?;
    dense("sinks", &sinks)?;
    Ok(Some(sinks.data.cast_const().cast()))
}

/// An optional per-sequence operand, `i32[B]`.
pub(super) fn per_sequence(
    args: &CallArguments,
    operand: Operand,
    seqs: (&'static str, i64),
) -> Result<Option<*const i32>> {
    optional_indices(args, operand, seqs)
}
