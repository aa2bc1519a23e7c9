//! Causal attention of packed query rows over a paged K/V cache, with prefill chunks and decode tokens in one ragged
//! batch (`docs/semantics.md#paged_attention`).

use super::attention::{self, Attention, KeyStorage, Keys, Queries, ScoreAttributes, check_dtypes, query_sizes};
use super::kv_layout::KvLayout;
use super::tree_mask::TreeMask;
use super::{BoolAttribute, CallArguments, CallResult, F32Attribute, I64Attribute, KvScaleCache, Operand, validate};
use crate::error::{Result, ensure};
use crate::tensor::{DType, Dim};

/// Validates a call and returns its problem. Dimensions: `T` query rows, `S` sequence slots, `M` table entries per
/// sequence, `P` pages.
///
/// | operand | shape |
/// |---|---|
/// | query | `[T, Hq, D]` |
/// | `kv_cache` | `[P, page_size, 2*Hkv, D]`, K of head h at 2h, V at 2h+1 |
/// | `context_lens` | `i32[S]`: keys of each sequence, the new tokens included |
/// | `block_tables` | `i32[S, M]` |
/// | `query_start_loc` | `i32[S+1]`: first query row of each sequence, and the end of the last |
/// | `num_seqs` | `i32[1]` or `i32[]`: number of sequences, at most S |
/// | `k_start`, `k_end` | `i32[T]` |
/// | `tree_mask` | i32 or u32 `[S, q_max, ceil(q_max / 32)]` |
/// | `kv_scale_cache` | f32 `[P, page_size, 2*Hkv]` |
pub(crate) fn problem<'a>(args: &CallArguments<'a>) -> Result<Attention<'a>> {
    let query = args.operand(Operand::Query);
    let (rows, q_heads, head_dim) = query_sizes("query", "T", &query)?;
    let cache = args.operand(Operand::KvCache);
    let scale_cache = KvScaleCache::operand(args, "kv_cache", &cache, KvLayout::Interleaved)?;
    let out = args.result(CallResult::Out);
    if scale_cache.is_some() {
        query.expect_dtype("query with kv_scale_cache", &[DType::F16, DType::BF16])?;
        out.expect_dtype("out", &[query.dtype, DType::F32])?;
    } else {
        check_dtypes(("query", query.dtype), ("kv_cache", cache.dtype), out.dtype)?;
    }
    let (k, v, pages, page_size, kv_heads) =
        attention::paged_in_one_buffer("kv_cache", &cache, KvLayout::Interleaved, (q_heads, head_dim))?;

    let context_lens = args.operand(Operand::ContextLens);
    let lens = validate::indices("context_lens", &context_lens, &[Dim::Any("num_seqs")])?;
    let slots = ("num_seqs", context_lens.dims[0]);
    let table = attention::page_table(
        "block_tables",
        &args.operand(Operand::BlockTables),
        slots,
        "kv_cache",
        (pages, page_size),
    )?;
    let ends = [Dim::Is("num_seqs+1", slots.1 + 1)];
    let starts = validate::indices("query_start_loc", &args.operand(Operand::QueryStartLoc), &ends)?;
    validate::kernel_sizes(&[("T", rows), slots, ("num_pages", pages)])?;
    let window = args.i64(I64Attribute::SlidingWindow);
    ensure(window == -1 || window >= 1, || format!("sliding_window is {window}, expected >= 1, or -1 for none"))?;
    let attributes = ScoreAttributes {
        scale: ("scale", args.f32(F32Attribute::Scale)),
        softcap: ("soft_cap", args.f32(F32Attribute::SoftCap)),
        // `sliding_window` counts the query's own position, `window_left` does not.
        window_left: if window == -1 { -1 } else { window - 1 },
        window_right: 0,
        top_left: false,
    };
    Ok(Attention {
        q: query,
        kv_dtype: cache.dtype,
        k,
        v,
        out: attention::out(args, Dim::Is("T", rows), q_heads, Dim::Is("D", head_dim))?,
        lse: attention::softmax_lse(args, q_heads, Dim::Is("T", rows))?,
        workspace: attention::workspace(args)?,
        queries: Queries {
            num_seqs: Some(attention::num_seqs(&args.operand(Operand::NumSeqs))?),
            starts,
            used: None,
            offset: None,
            key_ranges: attention::key_ranges(args, ("T", rows))?,
            tree: TreeMask::of(args, slots)?,
            longest: 0,
        },
        keys: Keys { starts: None, used: Some(lens), leftpad: None, storage: KeyStorage::Paged(table), longest: 0 },
        score: attention::score(args, &attributes, attention::score_scales(args, kv_heads)?, q_heads, slots)?,
        v_scale: validate::scale(args, Operand::VScale, kv_heads)?,
        scale_cache,
        num_rows: rows as usize,
        num_q_heads: q_heads as usize,
        num_kv_heads: kv_heads as usize,
        head_dim: head_dim as usize,
        value_dim: head_dim as usize,
        max_seqs: slots.1 as usize,
        batch_invariant: args.bool(BoolAttribute::BatchInvariant),
    })
}
