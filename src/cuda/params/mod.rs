//! The parameters of the kernels, and the constants that host and kernels share.
//!
//! Each file is declared here and nowhere else: `build_support/params.rs` has cbindgen write it as the header
//! `params/<file>.cuh` that the kernels include. A kernel takes one of these structs by value.

#![allow(unreachable_pub, reason = "cbindgen exports constants that are `pub` alone")]

pub(crate) mod attention;
pub(crate) mod attention_bwd;
pub(crate) mod attention_bwd_sinks;
pub(crate) mod bias;
pub(crate) mod cache_rows;
pub(crate) mod clear_tile_counter;
pub(crate) mod cluster_decode;
pub(crate) mod combine;
pub(crate) mod divisor;
pub(crate) mod gather_kv_cache;
pub(crate) mod gather_token_scales;
pub(crate) mod hopper_bwd;
pub(crate) mod hopper_mla;
pub(crate) mod hopper_prefill;
pub(crate) mod key_ranges;
pub(crate) mod merge_attention_states;
pub(crate) mod rope_kv_cache_update;
pub(crate) mod simple_add;
pub(crate) mod slots;
pub(crate) mod tensor_map;
pub(crate) mod token_scale_update;
pub(crate) mod token_scales;
pub(crate) mod tree_mask;

/// The parameter of a kernel.
///
/// # Safety
/// The type is the struct that the kernel's own declaration names: `#[repr(C)]`, declared in a file of this folder.
pub(crate) unsafe trait KernelParams: Copy {}

macro_rules! kernel_params {
    ($($params:ty,)*) => {
        $(
            // SAFETY: the struct is `#[repr(C)]`, and kernels include the header that cbindgen writes from it.
            unsafe impl KernelParams for $params {}
        )*
    };
}
kernel_params!(
    attention::AttentionParams,
    attention_bwd::BackwardParams,
    bias::BiasBackwardParams,
    bias::BiasParams,
    bias::CopyRowsParams,
    cache_rows::CacheUpdateParams,
    clear_tile_counter::ClearTileCounterParams,
    gather_kv_cache::GatherParams,
    gather_token_scales::GatherTokenScaleParams,
    hopper_bwd::CombineGradientsParams,
    hopper_bwd::HopperBackwardParams,
    hopper_bwd::HopperBiasBackwardParams,
    hopper_bwd::HopperDbiasParams,
    hopper_bwd::HopperKeyRangeBackwardParams,
    hopper_bwd::HopperWideBackwardParams,
    hopper_mla::HopperMlaParams,
    hopper_prefill::HopperBiasParams,
    hopper_prefill::HopperFusedParams,
    hopper_prefill::HopperKeyRangeParams,
    hopper_prefill::HopperPrefillParams,
    hopper_prefill::HopperRowMaskParams,
    hopper_prefill::HopperTokenScaleParams,
    key_ranges::KeyRangeBackwardParams,
    key_ranges::KeyRangeParams,
    merge_attention_states::MergeStatesParams,
    rope_kv_cache_update::RopeParams,
    simple_add::SimpleAddParams,
    token_scale_update::TokenScaleUpdateParams,
    token_scales::TokenScaleParams,
    tree_mask::RowMaskParams,
);
