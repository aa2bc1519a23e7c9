// The one argument of the kernels of attention's gradients. src/cuda/flash_attn_varlen_bwd holds the same struct.
#pragma once

#include <cstddef>
#include <cstdint>

#include "attention_params.cuh"

namespace xa {

/// Letters as of AttentionParams, and Tk key rows. Strides are in elements.
struct BackwardParams {
  AttentionParams forward;  // over contiguous keys; its out and lse are read
  const void* dout;         // [Tq, Hq, Dv]
  int64_t dout_token_stride;
  int64_t dout_head_stride;
  const float* dlse;  // [Hq, Tq]; null is 0
  void* dq;           // [Tq, Hq, D], dense
  void* dk;           // [Tk, Hkv, D], dense
  void* dv;           // [Tk, Hkv, Dv], dense
  float* dsinks;      // [Hq]
  float* delta;       // [Hq, Tq], which attention_bwd_dq writes for the others; null where there is no room for it
  float softmax_scale;
  int32_t reserved;
};

// src/cuda/flash_attn_varlen_bwd asserts the same numbers.
static_assert(offsetof(BackwardParams, dout) == 480 && offsetof(BackwardParams, dlse) == 504);
static_assert(offsetof(BackwardParams, softmax_scale) == 552 && sizeof(BackwardParams) == 560);

}  // namespace xa
