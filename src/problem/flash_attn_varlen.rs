//! Attention of packed query rows over packed or paged keys, with all options of scores and masks
//! (`docs/semantics.md#flash_attn_varlen`). The operands follow `flash_attn_varlen_func` of flash-attn.

use super::attention::{
    self, Attention, KeyStorage, Keys, Queries, Score, ScoreAttributes, check_dtypes, check_heads, per_sequence,
    query_sizes,
};
use super::kv_layout::KvLayout;
use super::{BoolAttribute, CallArguments, CallResult, F32Attribute, I64Attribute, KvView, Operand, validate};
use crate::error::{Error, Result, ensure};
use crate::tensor::{DType, Dim, Tensor, missing};

/// Validates a call and returns its problem. Dimensions: `Tq` query rows, `Tk` key rows, `B` sequences, `M` table
/// entries per sequence, `P` pages.
///
/// | operand | shape |
/// |---|---|
/// | q | `[Tq, Hq, D]` |
/// | k, v | `[Tk, Hkv, D]`, `[Tk, Hkv, Dv]`; with a `block_table` `[P, page_size, Hkv, D]`, `[P, page_size, Hkv, Dv]`, or one buffer in k (`kv_layout`) |
/// | `cu_seqlens_q`, `cu_seqlens_k` | `i32[B+1]`; with pages and `seqused_k` the latter is not read and may have any shape |
/// | `seqused_k`, `seqused_q`, `leftpad_k`, `q_offset` | `i32[B]` |
/// | `k_start`, `k_end` | `i32[Tq]` |
/// | `block_table` | `i32[B, M]` |
/// | `bias` | `[B or 1, Hq or 1, Sq, Sk]` |
pub(crate) fn problem<'a>(args: &CallArguments<'a>) -> Result<Attention<'a>> {
    let q = args.operand(Operand::Q);
    let (rows, q_heads, head_dim) = query_sizes("q", "Tq", &q)?;
    let (k, v) = (args.operand(Operand::K), args.operand(Operand::V));
    check_dtypes(("q", q.dtype), ("k", k.dtype), args.result(CallResult::Out).dtype)?;

    let cu_seqlens_q = args.operand(Operand::CuSeqlensQ);
    let starts = validate::indices("cu_seqlens_q", &cu_seqlens_q, &[Dim::Any("B+1")])?;
    ensure(cu_seqlens_q.dims[0] > 0, || "cu_seqlens_q has shape [0], expected [B+1]".into())?;
    let slots = ("B", cu_seqlens_q.dims[0] - 1);
    let seqused_k = per_sequence(args, Operand::SequsedK, slots)?;
    let stored = stored_keys(args, (&k, &v), (q_heads, head_dim), slots)?;

    // If B is 0, `seqused_k` has shape [0], which counts as left out. No length is read then.
    let paged = matches!(stored.storage, KeyStorage::Paged(_));
    let reads_starts = !(paged && (seqused_k.is_some() || slots.1 == 0));
    let cu_seqlens_k =
        || validate::indices("cu_seqlens_k", &args.operand(Operand::CuSeqlensK), &[Dim::Is("B+1", slots.1 + 1)]);
    let [longest_q, longest_k] = attention::longest_sequences(args)?;
    validate::kernel_sizes(&[("Tq", rows), slots])?;
    let attributes = score_attributes(args)?;
    let key_ranges = attention::key_ranges(args, ("Tq", rows))?;
    let score = attention::score(args, &attributes, attention::score_scales(args, stored.kv_heads)?, q_heads, slots)?;
    let bias = attention::bias(args, (q.dtype, k.dtype), paged, !key_ranges.is_none(), (q_heads, slots.1))?;
    Ok(Attention {
        q,
        kv_dtype: k.dtype,
        k: stored.k,
        v: stored.v,
        out: attention::out(args, Dim::Is("Tq", rows), q_heads, Dim::Is("Dv", stored.value_dim))?,
        lse: attention::softmax_lse(args, q_heads, Dim::Is("Tq", rows))?,
        workspace: attention::workspace(args)?,
        queries: Queries {
            num_seqs: None,
            starts,
            used: per_sequence(args, Operand::SequsedQ, slots)?,
            offset: attention::q_offset(args, attributes.top_left, (rows, &stored.storage), slots)?,
            key_ranges,
            tree: None,
            longest: longest_q,
        },
        keys: Keys {
            starts: reads_starts.then(cu_seqlens_k).transpose()?,
            used: seqused_k,
            leftpad: per_sequence(args, Operand::LeftpadK, slots)?,
            storage: stored.storage,
            longest: longest_k,
        },
        score: Score { bias, ..score },
        v_scale: validate::scale(args, Operand::VScale, stored.kv_heads)?,
        scale_cache: None,
        num_rows: rows as usize,
        num_q_heads: q_heads as usize,
        num_kv_heads: stored.kv_heads as usize,
        head_dim: head_dim as usize,
        value_dim: stored.value_dim as usize,
        max_seqs: slots.1 as usize,
        batch_invariant: args.bool(BoolAttribute::BatchInvariant),
    })
}

pub(super) fn score_attributes(args: &CallArguments) -> Result<ScoreAttributes> {
    let (window_left, window_right) = attention::windows(args)?;
    Ok(ScoreAttributes {
        scale: ("softmax_scale", args.f32(F32Attribute::SoftmaxScale)),
        softcap: ("softcap", args.f32(F32Attribute::Softcap)),
        window_left,
        window_right,
        top_left: args.bool(BoolAttribute::TopLeft),
    })
}

/// K and V, and how a sequence's keys are stored.
pub(super) struct StoredKeys {
    pub(super) k: KvView,
    pub(super) v: KvView,
    storage: KeyStorage,
    pub(super) kv_heads: i64,
    pub(super) value_dim: i64,
}

fn stored_keys(
    args: &CallArguments,
    (k, v): (&Tensor, &Tensor),
    (q_heads, head_dim): (i64, i64),
    slots: (&'static str, i64),
) -> Result<StoredKeys> {
    let number = args.i64(I64Attribute::KvLayout);
    let block_table = args.optional_operand(Operand::BlockTable);
    if number != 0 {
        let layout = KvLayout::from_number(number)
            .ok_or_else(|| Error::invalid(format!("kv_layout is {number}, expected 0, 1, 2 or 3")))?;
        ensure(v.is_left_out(), || {
            format!("v has shape {:?}, expected [0]: with kv_layout={number} k holds the values too", v.dims)
        })?;
        let (k, v, pages, page_size, kv_heads) = attention::paged_in_one_buffer("k", k, layout, (q_heads, head_dim))?;
        let table = no_table_or(block_table, slots)?;
        return Ok(StoredKeys {
            k,
            v,
            storage: paged(&table, slots, (pages, page_size))?,
            kv_heads,
            value_dim: head_dim,
        });
    }
    ensure(!v.is_left_out(), || "v has no element, expected the values (kv_layout is 0)".into())?;
    if v.dtype != k.dtype {
        return Err(Error::unimplemented(format!("k is {} and v is {}; they have one dtype", k.dtype, v.dtype)));
    }
    let Some(table) = block_table else { return packed_keys(k, v, (q_heads, head_dim)) };
    let d = Dim::Is("D", head_dim);
    k.expect_shape("k", &[Dim::Any("num_pages"), Dim::Any("page_size"), Dim::Any("Hkv"), d])?;
    let [pages, page_size, kv_heads] = [0, 1, 2].map(|axis| k.dims[axis]);
    let same = [Dim::Is("num_pages", pages), Dim::Is("page_size", page_size), Dim::Is("Hkv", kv_heads)];
    v.expect_shape("v", &[same[0], same[1], same[2], Dim::Any("Dv")])?;
    rows_of(k, v, (q_heads, kv_heads))?;
    Ok(StoredKeys {
        k: KvView::alone(k),
        v: KvView::alone(v),
        storage: paged(&table, slots, (pages, page_size))?,
        kv_heads,
        value_dim: v.dims[3],
    })
}

/// The page table, which is required if K and V share a buffer. If B is 0 an empty table counts as left out.
fn no_table_or<'a>(table: Option<Tensor<'a>>, (_, seqs): (&str, i64)) -> Result<Tensor<'a>> {
    match table {
        Some(table) => Ok(table),
        None if seqs == 0 => Ok(Tensor::dense(DType::I32, std::ptr::null_mut(), &[0, 0])),
        None => Err(missing("block_table")),
    }
}

fn paged(table: &Tensor, slots: (&'static str, i64), (pages, page_size): (i64, i64)) -> Result<KeyStorage> {
    validate::kernel_sizes(&[("num_pages", pages)])?;
    Ok(KeyStorage::Paged(attention::page_table("block_table", table, slots, "k", (pages, page_size))?))
}

/// Validates packed keys and values, k `[Tk, Hkv, D]` and v `[Tk, Hkv, Dv]`.
pub(super) fn packed_keys(k: &Tensor, v: &Tensor, (q_heads, head_dim): (i64, i64)) -> Result<StoredKeys> {
    k.expect_shape("k", &[Dim::Any("Tk"), Dim::Any("Hkv"), Dim::Is("D", head_dim)])?;
    let (total, kv_heads) = (k.dims[0], k.dims[1]);
    v.expect_shape("v", &[Dim::Is("Tk", total), Dim::Is("Hkv", kv_heads), Dim::Any("Dv")])?;
    rows_of(k, v, (q_heads, kv_heads))?;
    validate::kernel_sizes(&[("Tk", total)])?;
    Ok(StoredKeys {
        k: KvView::packed(k),
        v: KvView::packed(v),
        storage: KeyStorage::Contiguous { total: total as usize },
        kv_heads,
        value_dim: v.dims[2],
    })
}

/// Validates heads, head dimensions and contiguous rows of K and V in separate buffers, packed or paged.
fn rows_of(k: &Tensor, v: &Tensor, (q_heads, kv_heads): (i64, i64)) -> Result {
    check_heads(q_heads, kv_heads, "Hkv", || format!("k has shape {:?}", k.dims))?;
    validate::head_dim("v", v.dims[v.dims.len() - 1])?;
    validate::contiguous_rows("k", k)?;
    validate::contiguous_rows("v", v)
}
