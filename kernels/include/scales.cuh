// Factors of q, K and V by KV head.
#pragma once

#include <cstdint>

#include "params/attention.cuh"

namespace xa {

/// The factor of a KV head; 1 where there is none.
__device__ __forceinline__ float scale_of(const ScaleSource& scale, int32_t kv_head) {
  return scale.values == nullptr ? 1.0f : __ldg(scale.values + kv_head * scale.head_stride);
}

}  // namespace xa
