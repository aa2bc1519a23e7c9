// Scales of q, K and V, one for all KV heads or one per KV head.
#pragma once

#include <cstdint>

#include "params/attention.cuh"

namespace xa {

/// The scale of a KV head; 1 if the call has none.
__device__ __forceinline__ float scale_of(const ScaleSource& scale, int32_t kv_head) {
  return scale.values == nullptr ? 1.0f : __ldg(scale.values + kv_head * scale.head_stride);
}

}  // namespace xa
