//! Attention of packed query rows over the keys of their sequences: the problem that all attention operators share.
//!
//! `docs/semantics.md#attention` defines it. The metadata (`cu_seqlens`, lengths, page tables) lies on the device. It
//! is not read here, and backends do not trust it: they clamp it as [`Queries`] and [`Keys`] describe. Invalid metadata
//! therefore gives the same results on every backend and costs no more than valid metadata of the same shapes.

pub use super::bias::Bias;
pub(super) use super::bias::{bias, or_f32};
use super::kv_layout::KvLayout;
pub use super::tree_mask::TreeMask;
use super::validate::{MAX_HEAD_DIM, Scale, contiguous_rows, dense, optional_indices, row_dim, scale};
use super::{BoolAttribute, CallArguments, CallResult, I64Attribute, KvScaleCache, KvView, Operand};
use crate::error::{Error, Result, ensure};
use crate::tensor::{DType, Dim, Tensor};

/// A validated call. Dimensions: `Tq` query rows, `Hq` query heads, `Hkv` KV heads, `D` and `Dv` the head dimensions of
/// keys and values, `B` sequence slots.
#[derive(Clone, Copy, Debug)]
pub struct Attention<'a> {
    /// `[Tq, Hq, D]`; the last dimension is contiguous
    pub q: Tensor<'a>,
    /// Element type of K and V: with q f32, f16 or bf16 the same; with q f16, bf16 or e4m3fn also e4m3fn; with q f16 or
    /// bf16 also e5m2, and with scales i8
    pub kv_dtype: DType,
    /// K rows, D elements each
    pub k: KvView,
    /// V rows, Dv elements each
    pub v: KvView,
    /// `[Tq, Hq, Dv]`, dense; of q's dtype or f32; f16 or bf16 where q is e4m3fn
    pub out: Tensor<'a>,
    /// `f32[Hq, Tq]`, dense: natural logarithm of the softmax denominator; optional
    pub lse: Option<*mut f32>,
    /// Scratch memory of the call; uninitialized on entry.
    pub workspace: Option<Tensor<'a>>,
    /// The query rows of each sequence.
    pub queries: Queries,
    /// The keys of each sequence.
    pub keys: Keys,
    /// Scale, softcap, mask, bias and sinks.
    pub score: Score,
    /// Scale of V, which multiplies the output.
    pub v_scale: Option<Scale>,
    /// Scales of the rows of K and V, of a cache of i8 or e4m3fn: that of a key multiplies its q·k, that of a value its
    /// weight. There is then neither `k_scale` nor `v_scale`. Scales of keys that a row does not attend to may be anything.
    pub scale_cache: Option<KvScaleCache>,
    /// Tq
    pub num_rows: usize,
    /// Hq
    pub num_q_heads: usize,
    /// Hkv; divides Hq, query head h reads KV head `h / (Hq / Hkv)`
    pub num_kv_heads: usize,
    /// D: a multiple of 8, at most 512; over a latent cache at most 576
    pub head_dim: usize,
    /// Dv: a multiple of 8, at most 512
    pub value_dim: usize,
    /// B
    pub max_seqs: usize,
    /// The bits of a sequence's rows must depend only on that sequence, the options, D, Dv, Hq, Hkv, dtypes and the
    /// page size.
    pub batch_invariant: bool,
}

// SAFETY: the struct consists of addresses and numbers; each access through it states why it is allowed (see `Tensor`).
unsafe impl Send for Attention<'_> {}
// SAFETY: as for `Send`.
unsafe impl Sync for Attention<'_> {}

/// The query rows of each sequence, as metadata on the device.
///
/// `starts` is read as its running maximum, so that sequences never overlap: the rows of sequence b begin at
/// `max over b' <= b of clamp(starts[b'], 0, Tq)` and end where sequence b+1 begins. With `used`, only the first
/// `used[b]` of them belong to the sequence; the others are padding rows.
#[derive(Clone, Copy, Debug)]
pub struct Queries {
    /// `i32[1]`: number of sequences, clamped to `[0, B]`; B if `None`
    pub num_seqs: Option<*const i32>,
    /// `i32[B+1]`, dense
    pub starts: *const i32,
    /// `i32[B]`, dense
    pub used: Option<*const i32>,
    /// `i32[B]`, dense: the position of query 0 among the keys, clamped to `[-LARGEST_Q_OFFSET, LARGEST_Q_OFFSET]`,
    /// instead of what [`Score::top_left`] says
    pub offset: Option<*const i32>,
    /// Bounds of the keys of each row.
    pub key_ranges: KeyRanges,
    /// Trees among the newest keys.
    pub tree: Option<TreeMask>,
    /// The caller's upper bound of the sequence lengths (`max_seqlen_q`), 0 if unknown. It is a hint that affects only
    /// speed, because it may be wrong.
    pub longest: usize,
}

/// Bounds of the keys that each query row attends to, besides the masks, as metadata on the device: key j of the row's
/// sequence only if `start <= j < end`. Entries are clamped to `[0, len_k]`.
#[derive(Clone, Copy, Debug)]
pub struct KeyRanges {
    /// `i32[Tq]`, dense; 0 if `None`
    pub start: Option<*const i32>,
    /// `i32[Tq]`, dense; `len_k` if `None`
    pub end: Option<*const i32>,
}

impl KeyRanges {
    /// No bounds.
    pub const NONE: Self = Self { start: None, end: None };

    /// Whether there is no bound.
    #[must_use]
    pub fn is_none(&self) -> bool {
        self.start.is_none() && self.end.is_none()
    }
}

/// The place and the number of each sequence's keys, as metadata on the device. The number, `len_k`, is clamped to
/// `[0, capacity]`.
#[derive(Clone, Copy, Debug)]
pub struct Keys {
    /// `i32[B+1]`, dense. Contiguous keys always have it: it is read like [`Queries::starts`], the rows of sequence b
    /// are its keys, and their number is the capacity. Paged keys have it only without `used` and if B is not 0:
    /// `len_k` is then `max(0, starts[b+1] - starts[b])`.
    pub starts: Option<*const i32>,
    /// `i32[B]`, dense: `len_k`, if given
    pub used: Option<*const i32>,
    /// `i32[B]`, dense, clamped to `[0, len_k]`: the number of first keys that are masked for all queries
    pub leftpad: Option<*const i32>,
    /// Contiguous or paged.
    pub storage: KeyStorage,
    /// The caller's upper bound of the sequence lengths (`max_seqlen_k`), 0 if unknown; a hint as in [`Queries`].
    pub longest: usize,
}

/// The largest magnitude of a `q_offset`, and the most query rows and keys of a call that has offsets. Sums of an offset,
/// a window and numbers of rows and keys fit 32 bits.
pub const LARGEST_Q_OFFSET: i32 = 1 << 28;

/// The position of query 0 of a sequence among its keys. `offset` is its entry of [`Queries::offset`].
#[must_use]
pub fn position_of_query_0(score: &Score, offset: Option<i32>, len_q: usize, len_k: usize) -> i64 {
    match offset {
        Some(offset) => offset.clamp(-LARGEST_Q_OFFSET, LARGEST_Q_OFFSET).into(),
        None if score.top_left => 0,
        None => len_k as i64 - len_q as i64,
    }
}

/// How key j of a sequence maps to a row of K and V.
#[derive(Clone, Copy, Debug)]
pub enum KeyStorage {
    /// Key j of sequence b is row `starts[b] + j`. Rows are `token_stride` apart, and `page_stride` is not used.
    Contiguous {
        /// Number of rows of K and V.
        total: usize,
    },
    /// Key j of sequence b is token `j % page_size` of page `table[b][j / page_size]`, where the page is clamped to
    /// `[0, num_pages)`. The capacity is `max_pages * page_size`, or 0 if there are no pages.
    Paged(PageTable),
}

impl KeyStorage {
    /// The maximum number of keys of a sequence, with its name in messages.
    #[must_use]
    pub fn capacity(&self) -> (&'static str, usize) {
        match self {
            Self::Contiguous { total } => ("Tk", *total),
            Self::Paged(table) => ("max_pages * page_size", table.capacity()),
        }
    }
}

/// The pages of each sequence (`block_table`).
#[derive(Clone, Copy, Debug)]
pub struct PageTable {
    /// `i32[B, max_pages]`: rows are `stride` apart; only entries below `ceil(len_k / page_size)` are read
    pub entries: *const i32,
    /// Stride of the rows in elements.
    pub stride: i64,
    /// M
    pub max_pages: usize,
    /// P
    pub num_pages: usize,
    /// Tokens per page; at least 1 if there are pages.
    pub page_size: usize,
}

impl PageTable {
    /// The maximum number of keys of a sequence.
    #[must_use]
    pub fn capacity(&self) -> usize {
        if self.num_pages == 0 { 0 } else { self.max_pages * self.page_size }
    }
}

/// How q·k becomes a softmax weight: scale, softcap, bias, mask and sinks.
#[derive(Clone, Copy, Debug)]
pub struct Score {
    /// Multiplies q·k; finite, positive
    pub softmax_scale: f32,
    /// Dequantization scale of q; multiplies q·k.
    pub q_scale: Option<Scale>,
    /// Dequantization scale of K; multiplies q·k.
    pub k_scale: Option<Scale>,
    /// Scores become `softcap * tanh(s / softcap)`; 0 disables it
    pub softcap: f32,
    /// Keys visible before the query's own position; -1 is all of them
    pub window_left: i64,
    /// Keys visible after it; 0 is causal, -1 is all of them
    pub window_right: i64,
    /// Top-left alignment: query 0 is at key 0. Otherwise bottom-right: the last query is at the last key.
    pub top_left: bool,
    /// `-slope * |distance|` is added to a score
    pub alibi: Option<Alibi>,
    /// `f32[Hq]`, dense: the logit of an additional key whose value is 0
    pub sinks: Option<*const f32>,
    /// Added to scores after the soft cap.
    pub bias: Option<Bias>,
}

impl Score {
    /// Whether the window hides keys from some queries, as a causal mask does.
    #[must_use]
    pub fn is_masked(&self) -> bool {
        self.window_left >= 0 || self.window_right >= 0
    }
}

/// `ALiBi` slopes.
#[derive(Clone, Copy, Debug)]
pub struct Alibi {
    /// `f32[Hq]`, or `f32[B, Hq]`; dense
    pub slopes: *const f32,
    /// Whether each sequence has its own slopes.
    pub per_sequence: bool,
}

/// The supported dtypes (`docs/semantics.md#dtypes`) for error messages.
const DTYPE_TABLE: &str = "f32 queries over f32; f16 or bf16 queries over the same, f8e4m3fn or f8e5m2, with an output \
                           of the query's dtype or f32; f8e4m3fn queries over f8e4m3fn, with an output of bf16 or f16";

/// Refuses a combination of dtypes of q, K/V and output that is not supported.
pub(super) fn check_dtypes(q: (&str, DType), kv: (&str, DType), out: DType) -> Result {
    let kv_fits = match q.1 {
        DType::F32 => kv.1 == DType::F32,
        DType::F16 | DType::BF16 => [q.1, DType::F8E4M3FN, DType::F8E5M2].contains(&kv.1),
        DType::F8E4M3FN => kv.1 == DType::F8E4M3FN,
        _ => false,
    };
    let out_fits = if q.1 == DType::F8E4M3FN {
        [DType::BF16, DType::F16].contains(&out)
    } else {
        [q.1, DType::F32].contains(&out)
    };
    if kv_fits && out_fits {
        return Ok(());
    }
    Err(Error::unimplemented(format!(
        "{} is {}, {} is {} and out is {out}; there is {DTYPE_TABLE}",
        q.0, q.1, kv.0, kv.1
    )))
}

/// Validates query rows `[T, Hq, D]`, the operand `name` whose T is called `rows`, and returns the sizes.
pub(super) fn query_sizes(name: &str, rows: &'static str, q: &Tensor) -> Result<(i64, i64, i64)> {
    query_sizes_up_to(MAX_HEAD_DIM, name, rows, q)
}

/// [`query_sizes`] with D up to `largest`.
pub(super) fn query_sizes_up_to(largest: i64, name: &str, rows: &'static str, q: &Tensor) -> Result<(i64, i64, i64)> {
    q.expect_shape(name, &[Dim::Any(rows), Dim::Any("Hq"), Dim::Any("D")])?;
    ensure(q.dims[1] > 0, || format!("{name} has shape {:?}, expected at least one head", q.dims))?;
    row_dim(name, q.dims[2], largest)?;
    contiguous_rows(name, q)?;
    Ok((q.dims[0], q.dims[1], q.dims[2]))
}

/// Refuses a number of KV heads that does not divide Hq. The message begins with `has`, and `heads` is the expected
/// size.
pub(super) fn check_heads(q_heads: i64, kv_heads: i64, heads: &str, has: impl FnOnce() -> String) -> Result {
    ensure(kv_heads > 0 && q_heads % kv_heads == 0, || {
        format!("{}, expected {heads} heads with Hkv a divisor of Hq={q_heads}", has())
    })
}

/// Validates a buffer that holds K and V in `layout`; returns both views, P, `page_size` and Hkv.
pub(super) fn paged_in_one_buffer(
    name: &str,
    cache: &Tensor,
    layout: KvLayout,
    (q_heads, head_dim): (i64, i64),
) -> Result<(KvView, KvView, i64, i64, i64)> {
    cache.expect_shape(name, &layout.shape(Dim::Any("Hkv"), head_dim))?;
    let (pages, tokens) = layout.axes();
    let heads = if layout == KvLayout::Interleaved { "2*Hkv" } else { "Hkv" };
    // An odd number of interleaved heads becomes Hkv = 0, which `check_heads` refuses.
    let kv_heads = layout.kv_heads(cache).unwrap_or(0);
    check_heads(q_heads, kv_heads, heads, || format!("{name} has shape {:?}", cache.dims))?;
    contiguous_rows(name, cache)?;
    let (k, v) = layout.views(cache);
    Ok((k, v, cache.dims[pages], cache.dims[tokens], kv_heads))
}

/// Validates a page table `i32[B, M]` for the cache named `cache`.
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

/// Validates `out [T, Hq, Dv]`, dense. [`check_dtypes`] has validated its dtype.
pub(super) fn out<'a>(args: &CallArguments<'a>, rows: Dim, q_heads: i64, value_dim: Dim) -> Result<Tensor<'a>> {
    let out = args.result(CallResult::Out);
    out.expect_shape("out", &[rows, Dim::Is("Hq", q_heads), value_dim])?;
    dense("out", &out)?;
    Ok(out)
}

/// Validates the optional result `softmax_lse f32[Hq, T]`. With T = 0 its shape is `[Hq, 0]`, which is not left out.
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

/// Validates the optional result `workspace u8[N]`.
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

/// The attributes of a [`Score`]; scale and softcap with the names that the target gives them.
pub(super) struct ScoreAttributes {
    pub(super) scale: (&'static str, f32),
    pub(super) softcap: (&'static str, f32),
    pub(super) window_left: i64,
    pub(super) window_right: i64,
    pub(super) top_left: bool,
}

/// Validates the optional scales of q and K.
pub(super) fn score_scales(args: &CallArguments, kv_heads: i64) -> Result<[Option<Scale>; 2]> {
    Ok([scale(args, Operand::QScale, kv_heads)?, scale(args, Operand::KScale, kv_heads)?])
}

/// Validates the attributes and optional operands of a [`Score`]. `slots` is the target's name of B, `seqs` its value.
pub(super) fn score(
    args: &CallArguments,
    attributes: &ScoreAttributes,
    scales: [Option<Scale>; 2],
    q_heads: i64,
    slots: (&'static str, i64),
) -> Result<Score> {
    let score = score_without_alibi(args, attributes, scales, q_heads)?;
    Ok(Score { alibi: alibi(args, q_heads, slots)?, ..score })
}

/// [`score`] of a target that has no slopes.
pub(super) fn score_without_alibi(
    args: &CallArguments,
    attributes: &ScoreAttributes,
    [q_scale, k_scale]: [Option<Scale>; 2],
    q_heads: i64,
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
        alibi: None,
        sinks: sinks(args, q_heads)?,
        bias: None,
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

/// Validates the attributes `window_left`, `window_right` and `causal`, and returns the two windows.
pub(super) fn windows(args: &CallArguments) -> Result<(i64, i64)> {
    let windows =
        [("window_left", args.i64(I64Attribute::WindowLeft)), ("window_right", args.i64(I64Attribute::WindowRight))];
    for (name, window) in windows {
        ensure(window >= -1, || format!("{name} is {window}, expected >= 0, or -1 for unlimited"))?;
    }
    Ok((windows[0].1, if args.bool(BoolAttribute::Causal) { 0 } else { windows[1].1 }))
}

/// Validates the hints `max_seqlen_q` and `max_seqlen_k`.
pub(super) fn longest_sequences(args: &CallArguments) -> Result<[usize; 2]> {
    let lengths =
        [("max_seqlen_q", args.i64(I64Attribute::MaxSeqlenQ)), ("max_seqlen_k", args.i64(I64Attribute::MaxSeqlenK))];
    for (name, length) in lengths {
        ensure(length >= 0, || format!("{name} is {length}, expected >= 0 (0 is unknown)"))?;
    }
    Ok(lengths.map(|(_, length)| length as usize))
}

/// Validates the operand `num_seqs`, `i32[1]` or `i32[]`.
pub(super) fn num_seqs(num_seqs: &Tensor) -> Result<*const i32> {
    num_seqs.expect_dtype("num_seqs", &[DType::I32])?;
    ensure(num_seqs.dims.is_empty() || num_seqs.dims == [1], || {
        format!("num_seqs has shape {:?}, expected [] or [1]", num_seqs.dims)
    })?;
    Ok(num_seqs.data.cast_const().cast())
}

/// Validates the optional operand `q_offset i32[B]`.
pub(super) fn q_offset(
    args: &CallArguments,
    top_left: bool,
    (rows, keys): (i64, &KeyStorage),
    seqs: (&'static str, i64),
) -> Result<Option<*const i32>> {
    let offset = per_sequence(args, Operand::QOffset, seqs)?;
    if offset.is_none() {
        return Ok(None);
    }
    ensure(!top_left, || "q_offset and top_left are given; top_left is a q_offset of 0".into())?;
    let capacity = keys.capacity();
    for (name, size) in [("Tq", rows), (capacity.0, capacity.1 as i64)] {
        if size > LARGEST_Q_OFFSET.into() {
            return Err(Error::unimplemented(format!("{name} is {size}; with q_offset it is at most 2^28")));
        }
    }
    Ok(offset)
}

/// Validates the optional operands `k_start i32[Tq]` and `k_end i32[Tq]`; `rows` is the target's name of Tq and its value.
pub(super) fn key_ranges(args: &CallArguments, rows: (&'static str, i64)) -> Result<KeyRanges> {
    let start = optional_indices(args, Operand::KStart, rows)?;
    Ok(KeyRanges { start, end: optional_indices(args, Operand::KEnd, rows)? })
}

/// Validates an optional operand `i32[B]`.
pub(super) fn per_sequence(
    args: &CallArguments,
    operand: Operand,
    seqs: (&'static str, i64),
) -> Result<Option<*const i32>> {
    optional_indices(args, operand, seqs)
}
