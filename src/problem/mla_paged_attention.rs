//! Multi-head latent attention in its absorbed form: all query heads attend to one paged cache of latent rows, which are
//! the keys and, in their first Dv columns, the values (`docs/semantics.md#mla_paged_attention`).

use super::attention::{self, Attention, KeyRanges, KeyStorage, Keys, Queries, ScoreAttributes};
use super::validate::{self, MAX_LATENT_DIM, MAX_LATENT_VALUE_DIM};
use super::{BoolAttribute, CallArguments, CallResult, F32Attribute, KvView, Operand};
use crate::error::{Error, Result, ensure};
use crate::tensor::{DType, Dim, Tensor};

/// The supported dtypes, for error messages.
const DTYPE_TABLE: &str = "f32 queries over f32; f16 or bf16 queries over the same, f8e4m3fn or f8e5m2; with an output \
                           of the query's dtype or f32";

/// Validates a call and returns its problem: attention with one KV head, whose K and V are two views of the same rows.
/// Dimensions: `Tq` query rows, `B` sequence slots, `M` table entries per sequence, `P` pages.
///
/// | operand | shape |
/// |---|---|
/// | q | `[Tq, Hq, D]` |
/// | `kv_cache` | `[P, page_size, D]` |
/// | `cu_seqlens_q` | `i32[B+1]`: first query row of each sequence, and the end of the last |
/// | `seqused_k` | `i32[B]`: keys of each sequence, the new tokens included |
/// | `block_table` | `i32[B, M]` |
pub(crate) fn problem<'a>(args: &CallArguments<'a>) -> Result<Attention<'a>> {
    let q = args.operand(Operand::Q);
    let (rows, q_heads, head_dim) = attention::query_sizes_up_to(MAX_LATENT_DIM, "q", "Tq", &q)?;
    let (cache, out) = (args.operand(Operand::KvCache), args.result(CallResult::Out));
    check_dtypes(q.dtype, cache.dtype, out.dtype)?;
    cache.expect_shape("kv_cache", &[Dim::Any("num_pages"), Dim::Any("page_size"), Dim::Is("D", head_dim)])?;
    validate::contiguous_rows("kv_cache", &cache)?;
    let latent = view(&cache);
    let out = attention::out(args, Dim::Is("Tq", rows), q_heads, Dim::Any("Dv"))?;
    let value_dim = out.dims[2];
    ensure(value_dim <= head_dim, || {
        format!(
            "out has head dimension {value_dim}, expected at most D={head_dim}: values are the first columns of keys"
        )
    })?;
    validate::row_dim("out", value_dim, MAX_LATENT_VALUE_DIM)?;

    let cu_seqlens_q = args.operand(Operand::CuSeqlensQ);
    let starts = validate::indices("cu_seqlens_q", &cu_seqlens_q, &[Dim::Any("B+1")])?;
    ensure(cu_seqlens_q.dims[0] > 0, || "cu_seqlens_q has shape [0], expected [B+1]".into())?;
    let slots = ("B", cu_seqlens_q.dims[0] - 1);
    let used = validate::indices("seqused_k", &args.operand(Operand::SequsedK), &[Dim::Is(slots.0, slots.1)])?;
    let (pages, page_size) = (cache.dims[0], cache.dims[1]);
    let table = args.operand(Operand::BlockTable);
    let table = attention::page_table("block_table", &table, slots, "kv_cache", (pages, page_size))?;
    validate::kernel_sizes(&[("Tq", rows), slots, ("num_pages", pages)])?;
    let num_seqs = args.optional_operand(Operand::NumSeqs).map(|tensor| attention::num_seqs(&tensor)).transpose()?;
    let [longest_q, longest_k] = attention::longest_sequences(args)?;
    let (window_left, window_right) = attention::windows(args)?;
    let attributes = ScoreAttributes {
        scale: ("softmax_scale", args.f32(F32Attribute::SoftmaxScale)),
        softcap: ("softcap", args.f32(F32Attribute::Softcap)),
        window_left,
        window_right,
        top_left: false,
    };
    let kv_scale = validate::scale_of_all(args, Operand::KvScale)?;
    Ok(Attention {
        q,
        kv_dtype: cache.dtype,
        k: latent,
        v: latent,
        out,
        lse: attention::softmax_lse(args, q_heads, Dim::Is("Tq", rows))?,
        workspace: attention::workspace(args)?,
        queries: Queries {
            num_seqs,
            starts,
            used: None,
            offset: None,
            key_ranges: KeyRanges::NONE,
            tree: None,
            longest: longest_q,
        },
        keys: Keys {
            starts: None,
            used: Some(used),
            leftpad: None,
            storage: KeyStorage::Paged(table),
            longest: longest_k,
        },
        score: attention::score_without_alibi(args, &attributes, [None, kv_scale], q_heads)?,
        v_scale: kv_scale,
        scale_cache: None,
        num_rows: rows as usize,
        num_q_heads: q_heads as usize,
        num_kv_heads: 1,
        head_dim: head_dim as usize,
        value_dim: value_dim as usize,
        max_seqs: slots.1 as usize,
        batch_invariant: args.bool(BoolAttribute::BatchInvariant),
    })
}

/// The rows of a cache `[P, page_size, D]`.
pub(super) fn view(cache: &Tensor) -> KvView {
    KvView { data: cache.data, page_stride: cache.stride(0), token_stride: cache.stride(1), head_stride: 0 }
}

/// Refuses a combination of dtypes of q, the cache and the output that is not supported.
fn check_dtypes(q: DType, cache: DType, out: DType) -> Result {
    let fits = match q {
        DType::F32 => cache == DType::F32,
        DType::F16 | DType::BF16 => [q, DType::F8E4M3FN, DType::F8E5M2].contains(&cache),
        _ => false,
    };
    if fits && [q, DType::F32].contains(&out) {
        return Ok(());
    }
    Err(Error::unimplemented(format!("q is {q}, kv_cache is {cache} and out is {out}; there is {DTYPE_TABLE}")))
}
