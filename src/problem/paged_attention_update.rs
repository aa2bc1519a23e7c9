//! Write the K and V rows of new tokens into a paged cache, in place, and attend over it: a step of a layer in one call.
//!
//! The rows go into the cache at their slots as [`super::kv_cache_update`] defines, then the queries attend over the
//! updated cache as [`super::paged_attention`] defines: both results have the bits of the two calls in this order. The
//! scales are the same operands for both, so that a key is divided by `k_scale` where it is stored and its score
//! multiplied by it, whatever the cache's type; likewise values and `v_scale`. `context_lens` counts the new tokens.
//!
//! The new tokens of a sequence are its query rows, and they are its last keys: the row of query i of `len_q` is the
//! key `i + len_k - len_q`. A caller names that key's place twice, by `slot_mapping` and by `block_tables`, and the slot
//! belongs to no other sequence of the batch. Where the two do not name the same place, as with a slot of -1 for a row
//! of a sequence, or where another sequence reads the slot, a backend may take such a key from `key` and `value`, from
//! the cache before the call or from the cache after it; the sequences that see it have unspecified rows. Other
//! sequences are not touched by it, and the cache that results is always that of the update.
//!
//! Rows of no sequence (padding) have a slot of -1, or are stored like any other.

use super::attention::Attention;
use super::kv_cache_update::{DTYPES, FP8_DTYPES, KvCacheUpdate};
use super::kv_layout::KvLayout;
use super::{CallArguments, Operand, paged_attention};
use crate::error::Result;
use crate::tensor::Dim;

/// A validated call: what to write, and the attention over what is written.
///
/// A backend that has a kernel for it may read the last `len_q` keys of a sequence from `update` instead.
#[derive(Clone, Copy, Debug)]
pub struct PagedAttentionUpdate<'a> {
    /// The new rows and where they go; to be carried out first.
    pub update: KvCacheUpdate<'a>,
    /// Over the result cache.
    pub attention: Attention<'a>,
}

/// `paged_attention`'s operands, then
///
/// | operand | shape |
/// |---|---|
/// | key, value | `[T, Hkv, D]`, of the cache's dtype, or under an fp8 cache f16, bf16 or f32 |
/// | `slot_mapping` | `[T]`, i32 or i64 |
pub(crate) fn problem<'a>(args: &CallArguments<'a>) -> Result<PagedAttentionUpdate<'a>> {
    let attention = paged_attention::problem(args)?;
    // The query and the cache agree by now, so that it is the key which has to fit.
    let stored = [attention.kv_dtype];
    let key = args.operand(Operand::Key);
    key.expect_dtype("key", if FP8_DTYPES.contains(&attention.kv_dtype) { DTYPES } else { &stored })?;
    let [rows, heads, head_dim] =
        [attention.num_rows, attention.num_kv_heads, attention.head_dim].map(|size| size as i64);
    key.expect_shape("key", &[Dim::Is("T", rows), Dim::Is("Hkv", heads), Dim::Is("D", head_dim)])?;
    let update = KvCacheUpdate::in_one_buffer(args, KvLayout::Interleaved)?;
    let attention = Attention { k: update.key.cache, v: update.value.cache, ..attention };
    Ok(PagedAttentionUpdate { update, attention })
}
