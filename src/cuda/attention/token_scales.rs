//! Caches with a scale per token and KV head: what their kernels leave to the CPU, and the parameter of the portable ones.

use crate::cuda::params::attention::{AttentionParams, KvSource};
use crate::cuda::params::token_scales::TokenScaleParams;
use crate::error::{Error, Result, ensure};
use crate::problem::KvScaleCache;
use crate::problem::attention::Attention;

/// Refuses calls with scales that no kernel computes.
pub(super) fn check(problem: &Attention) -> Result {
    let Some(KvScaleCache { k, v }) = &problem.scale_cache else { return Ok(()) };
    let queries = &problem.queries;
    let unsupported = if queries.tree.is_some() {
        Some("tree_mask")
    } else if queries.key_ranges.is_none() {
        None
    } else {
        Some("k_start or k_end")
    };
    if let Some(name) = unsupported {
        return Err(Error::unimplemented(format!(
            "kv_scale_cache and {name} are given; CUDA kernels take one of them. An f8e4m3fn cache with k_scale and v_scale may \
             have both"
        )));
    }
    for scales in [k, v] {
        ensure((scales.data as usize).is_multiple_of(size_of::<f32>()), || {
            format!("kv_scale_cache lies at {:p}, expected a multiple of 4 bytes", scales.data)
        })?;
        // Decode multiplies by the lower 32 bits of strides.
        for stride in [scales.page_stride, scales.token_stride] {
            ensure(u32::try_from(stride).is_ok(), || {
                format!("kv_scale_cache has a stride of {stride} numbers; CUDA kernels take strides of 0 to 2^32 - 1")
            })?;
        }
    }
    Ok(())
}

impl TokenScaleParams {
    pub(super) fn new(attention: &AttentionParams, scales: &KvScaleCache) -> Self {
        Self { attention: *attention, k_scales: KvSource::new(&scales.k), v_scales: KvSource::new(&scales.v) }
    }
}

#[cfg(test)]
mod tests {
    use super::super::tests::{device, named_on, problem};
    use super::*;
    use crate::cuda::device::Device;
    use crate::problem::KvView;
    use crate::problem::attention::{KeyRanges, Queries, TreeMask};
    use crate::tensor::{DType, Tensor};
    use std::ptr::{dangling, null_mut};

    /// A call of these sizes over a cache of i8 with scales.
    fn scaled(rows: usize, seqs: usize, head_dim: usize) -> Attention<'static> {
        let view = KvView { data: null_mut(), page_stride: 0, token_stride: 0, head_stride: 0 };
        let plain = problem(rows, seqs, 8, head_dim);
        let q = Tensor { dtype: DType::BF16, ..plain.q };
        Attention { q, kv_dtype: DType::I8, scale_cache: Some(KvScaleCache { k: view, v: view }), ..plain }
    }

    #[test]
    fn decode_and_prefill_take_every_call() {
        let [decode, prefill] = ["decode", "prefill"].map(|shape| format!("attention_token_scales_i8_128_{shape}"));
        let with_8_rows = format!("{decode}_8rows");
        for capability in [90, 100, 120] {
            let named = |problem: &Attention| named_on(problem, &Device { capability, ..device(true) });
            assert_eq!(named(&scaled(40, 40, 128)), [(&*with_8_rows, 1, i32::MAX)]);
            assert_eq!(named(&scaled(64, 64, 72)), [(&*with_8_rows, 1, i32::MAX)]);
            assert_eq!(named(&scaled(5000, 7, 128)), [(&*prefill, 5, i32::MAX), (&*decode, 1, 4)]);
            let wide = ["attention_token_scales_i8_512_prefill_scales", "attention_token_scales_i8_512_decode"];
            assert_eq!(named(&scaled(5000, 7, 320)), [(wide[0], 5, i32::MAX), (wide[1], 1, 4)]);
        }
        let older = Device { capability: 80, ..device(false) };
        assert_eq!(named_on(&scaled(4, 4, 128), &older)[0].0, "attention_token_scales_sm80_i8_128_decode_8rows");
    }

    #[test]
    fn options_without_a_kernel_are_refused_by_name() {
        let plain = scaled(64, 4, 128);
        let with = |queries| Attention { queries, ..plain };
        let key_ranges = KeyRanges { start: None, end: Some(dangling()) };
        let tree = Some(TreeMask { words: dangling(), max_queries: 8, query_words: 1 });
        for (problem, name) in [
            (with(Queries { key_ranges, ..plain.queries }), "k_start or k_end"),
            (with(Queries { tree, ..plain.queries }), "tree_mask"),
        ] {
            assert!(check(&problem).is_err_and(|error| error.message.contains(name)), "{name}");
        }
        assert!(check(&plain).is_ok());
        for stride in [-1, 1 << 32] {
            let view = KvView { data: null_mut(), page_stride: stride, token_stride: 0, head_stride: 0 };
            let strided = Attention { scale_cache: Some(KvScaleCache { k: view, v: view }), ..plain };
            assert!(check(&strided).is_err_and(|error| error.message.contains("stride")), "{stride}");
        }
    }
}
