// What cluster_decode.cu is compiled for: any call, or plain ones alone. Few short sequences are bound by instructions
// that run once, so plain calls, of which the host knows more, have a variant without the rest.
#pragma once

#include <cstdint>

#include "params/attention.cuh"

namespace xa {

// Values of the axis `call` of variants.toml.
struct call_any {
  static constexpr bool kIsPlain = false, kHasClusterPerSequence = false;

  template <int kHeadDim>
  static __device__ __forceinline__ const AttentionParams& known(const AttentionParams& params) {
    return params;
  }
};
/// Any call, with a cluster per sequence slot and KV head.
struct call_any_per_sequence : call_any {
  static constexpr bool kHasClusterPerSequence = true;
};
/// The call is causal. D and Dv are the bucket; pages are a power of two and hold whole blocks; strides are the same
/// for K and V and have 31 bits; lengths are in `seqused_k`; out has the type of q; there is no window, `leftpad_k`,
/// `q_offset`, `seqused_q`, sink or scale of V.
struct call_plain {
  static constexpr bool kIsPlain = true, kHasClusterPerSequence = false;

  /// The parameters, with constants for what is known of them.
  template <int kHeadDim>
  static __device__ __forceinline__ AttentionParams known(const AttentionParams& params) {
    AttentionParams known = params;
    known.block_table = present(params.block_table);
    known.seqused_k = present(params.seqused_k);
    known.cu_seqlens_q = present(params.cu_seqlens_q);
    known.block_table_stride = static_cast<uint32_t>(params.block_table_stride);
    known.k.page_stride = known.v.page_stride = static_cast<uint32_t>(params.k.page_stride);
    known.k.token_stride = known.v.token_stride = static_cast<uint32_t>(params.k.token_stride);
    known.k.head_stride = known.v.head_stride = static_cast<uint32_t>(params.k.head_stride);
    known.cu_seqlens_k = known.seqused_q = known.leftpad_k = known.q_offset = nullptr;
    known.window_left = -1;
    known.window_right = known.top_left = 0;
    known.head_dim = known.value_dim = kHeadDim;
    known.sinks = known.v_scale.values = nullptr;
    known.value_factor = 1.0f;
    known.widens_out = 0;
    return known;
  }

 private:
  /// A pointer that is not null, of which the compiler does not know.
  static __device__ __forceinline__ const int32_t* present(const int32_t* pointer) {
    if (pointer == nullptr) __builtin_unreachable();
    return pointer;
  }
};
/// A plain call with a cluster per sequence slot and KV head.
struct call_per_sequence : call_plain {
  static constexpr bool kHasClusterPerSequence = true;
};

}  // namespace xa
