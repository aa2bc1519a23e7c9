//! Parameters of the kernels that read caches with a scale per token and KV head.

use super::attention::{AttentionParams, KvSource};

/// The parameter of `attention_token_scales`.
#[derive(Clone, Copy)]
#[repr(C)]
pub struct TokenScaleParams {
    pub attention: AttentionParams,
    /// The f32 scales of the rows of K and of V. Strides are in scales.
    pub k_scales: KvSource,
    pub v_scales: KvSource,
}
