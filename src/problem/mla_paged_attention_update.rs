//! Writes the latent rows of new tokens into a paged cache in place and computes multi-head latent attention over the
//! updated cache (`docs/semantics.md#mla_paged_attention_update`).

use super::attention::Attention;
use super::kv_cache_update::{CacheCopy, DTYPES, FP8_DTYPES, KvCacheUpdate, NewRows, same_cache};
use super::validate::{contiguous_rows, dense};
use super::{CallArguments, CallResult, KvView, Operand, mla_paged_attention};
use crate::error::{Error, Result};
use crate::tensor::{DType, Dim, Tensor};

/// A validated call.
#[derive(Clone, Copy, Debug)]
pub struct MlaPagedAttentionUpdate<'a> {
    /// `[Tq, Dv]`: the first columns of the new rows; the last dimension is contiguous
    pub c_kv: Tensor<'a>,
    /// `[Tq, D - Dv]`: the other columns
    pub k_pe: Tensor<'a>,
    /// `[Tq]`, i32 or i64, dense
    pub slot_mapping: Tensor<'a>,
    /// Operand and result of the cache.
    pub copy: CacheCopy<'a>,
    /// The attention over the updated cache, whose `kv_scale` also divides the rows that are stored.
    pub attention: Attention<'a>,
}

/// Validates a call. It has the operands of `mla_paged_attention` and these:
///
/// | operand | shape |
/// |---|---|
/// | `c_kv` | `[Tq, Dv]`, of the cache's dtype, or under an fp8 cache f16, bf16 or f32 |
/// | `k_pe` | `[Tq, D - Dv]`, of the same dtype |
/// | `slot_mapping` | `[Tq]`, i32 or i64 |
pub(crate) fn problem<'a>(args: &CallArguments<'a>) -> Result<MlaPagedAttentionUpdate<'a>> {
    let attention = mla_paged_attention::problem(args)?;
    let [rows, head_dim, value_dim] =
        [attention.num_rows, attention.head_dim, attention.value_dim].map(|size| size as i64);
    if head_dim == value_dim {
        return Err(Error::unimplemented(format!(
            "out has head dimension {value_dim}, all of D; k_pe has no column then, of which there are at least 8"
        )));
    }
    let (c_kv, k_pe) = (args.operand(Operand::CKv), args.operand(Operand::KPe));
    let stored = [attention.kv_dtype];
    c_kv.expect_dtype("c_kv", if FP8_DTYPES.contains(&attention.kv_dtype) { DTYPES } else { &stored })?;
    c_kv.expect_shape("c_kv", &[Dim::Is("Tq", rows), Dim::Is("Dv", value_dim)])?;
    contiguous_rows("c_kv", &c_kv)?;
    k_pe.expect_dtype("k_pe", &[c_kv.dtype])?;
    k_pe.expect_shape("k_pe", &[Dim::Is("Tq", rows), Dim::Is("D-Dv", head_dim - value_dim)])?;
    contiguous_rows("k_pe", &k_pe)?;
    let slot_mapping = args.operand(Operand::SlotMapping);
    slot_mapping.expect_dtype("slot_mapping", &[DType::I32, DType::I64])?;
    slot_mapping.expect_shape("slot_mapping", &[Dim::Is("Tq", rows)])?;
    dense("slot_mapping", &slot_mapping)?;
    let copy = same_cache("kv_cache", args.operand(Operand::KvCache), args.result(CallResult::KvCache))?;
    let latent = mla_paged_attention::view(&copy.to);
    let attention = Attention { k: latent, v: latent, ..attention };
    Ok(MlaPagedAttentionUpdate { c_kv, k_pe, slot_mapping, copy, attention })
}

impl MlaPagedAttentionUpdate<'_> {
    /// Calls `with` with the update as that of a cache with one head, whose keys are the first columns of a latent row and
    /// whose values are the others.
    pub(crate) fn with_cache_update<R>(&self, with: impl FnOnce(&KvCacheUpdate) -> R) -> R {
        let [rows, pages, page_size] = [self.c_kv.dims[0], self.copy.to.dims[0], self.copy.to.dims[1]];
        let (c_kv_dims, k_pe_dims) = ([rows, 1, self.c_kv.dims[1]], [rows, 1, self.k_pe.dims[1]]);
        // The distance of heads is that of a row; there is one head.
        let (c_kv_strides, k_pe_strides) =
            ([self.c_kv.stride(0), c_kv_dims[2], 1], [self.k_pe.stride(0), k_pe_dims[2], 1]);
        let latent = self.attention.k;
        let first_bytes = self.attention.value_dim * self.attention.kv_dtype.size();
        let rest = KvView { data: latent.data.wrapping_add(first_bytes), ..latent };
        let scale = self.attention.v_scale;
        with(&KvCacheUpdate {
            key: NewRows {
                rows: Tensor { dims: &c_kv_dims, strides: Some(&c_kv_strides), ..self.c_kv },
                cache: latent,
                scale,
            },
            value: NewRows {
                rows: Tensor { dims: &k_pe_dims, strides: Some(&k_pe_strides), ..self.k_pe },
                cache: rest,
                scale,
            },
            cache_dtype: self.attention.kv_dtype,
            scale_cache: None,
            slot_mapping: self.slot_mapping,
            copies: [Some(self.copy), None],
            num_pages: pages as usize,
            page_size: page_size as usize,
        })
    }
}
