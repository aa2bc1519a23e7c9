//! Writes the K and V rows of new tokens into a paged cache in place and computes attention over the updated cache
//! (`docs/semantics.md#paged_attention_update`): [`super::kv_cache_update`], then [`super::paged_attention`], in one
//! call.

use super::attention::Attention;
use super::kv_cache_update::{DTYPES, KvCacheUpdate};
use super::kv_layout::KvLayout;
use super::{CallArguments, Operand, paged_attention};
use crate::error::Result;
use crate::tensor::Dim;

/// A validated call.
///
/// A backend may read the last `len_q` keys of a sequence from `update` instead of from the cache.
#[derive(Clone, Copy, Debug)]
pub struct PagedAttentionUpdate<'a> {
    /// The cache update, which comes first.
    pub update: KvCacheUpdate<'a>,
    /// The attention over the updated cache.
    pub attention: Attention<'a>,
}

/// Validates a call. It has the operands of `paged_attention` and these:
///
/// | operand | shape |
/// |---|---|
/// | key, value | `[T, Hkv, D]`, of the cache's dtype, or under a cache of i8 or fp8 f16, bf16 or f32 |
/// | `slot_mapping` | `[T]`, i32 or i64 |
pub(crate) fn problem<'a>(args: &CallArguments<'a>) -> Result<PagedAttentionUpdate<'a>> {
    let attention = paged_attention::problem(args)?;
    // `paged_attention::problem` has validated query and cache against each other, so an error names the key.
    let stored = [attention.kv_dtype];
    let key = args.operand(Operand::Key);
    key.expect_dtype("key", if attention.kv_dtype.size() == 1 { DTYPES } else { &stored })?;
    let [rows, heads, head_dim] =
        [attention.num_rows, attention.num_kv_heads, attention.head_dim].map(|size| size as i64);
    key.expect_shape("key", &[Dim::Is("T", rows), Dim::Is("Hkv", heads), Dim::Is("D", head_dim)])?;
    let update = KvCacheUpdate::with_scale_cache(args, KvLayout::Interleaved)?;
    let attention =
        Attention { k: update.key.cache, v: update.value.cache, scale_cache: update.scale_cache, ..attention };
    Ok(PagedAttentionUpdate { update, attention })
}
