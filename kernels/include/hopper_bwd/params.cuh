// The one argument of the backward kernels of sm_90a. src/cuda/flash_attn_varlen_bwd/hopper.rs holds the same struct.
#pragma once

#include <cstddef>
#include <cstdint>

#include "bwd/params.cuh"
#include "hopper/ptx.cuh"

namespace xa::hopper {

/// One sequence as the kernels see it: the queries that see some key, and the keys that some query sees. Both are
/// counted from the first of them. Query i sees the keys from i + shift - window_left to i + shift + window_right.
struct SequencePlan {
  int32_t tiles_before;  // of the sequences before it in this list, of all KV heads
  int32_t first_query;   // row of Q
  int32_t num_queries;
  int32_t first_key;  // row of K and V
  int32_t num_keys;   // 0 where num_queries is
  int32_t shift;
  int32_t first_group;  // of the sums of dQ
  int32_t first_turn;   // its first block of queries among the turns of a head
};

/// What hopper_bwd_prepare leaves for the kernels after it, besides lists.
struct BackwardPlan {
  unsigned long long next_tile;
  int32_t num_tiles;
  int32_t num_sections;
};

struct HopperBackwardParams {
  BackwardParams base;  // `delta` is there
  // [2^31, rows, 2^30 rows, head, column]; see ragged_row(). A box is 64 columns of a block's rows of one head.
  TensorMap q;
  TensorMap k;
  TensorMap v;
  TensorMap dout;
  TensorMap dk;
  TensorMap dv;
  float* lse_log2;          // [Hq, Tq]
  float* dq_sums;           // [Hq, bucket / 64, num_groups, 1024]; see sum_chunk()
  int32_t* turns;           // [Hq, num_turns]: blocks of keys whose share of dQ is in the sums
  SequencePlan* sequences;  // [B], in the order of tiles
  SequencePlan* by_row;     // [B], in the order of rows
  BackwardPlan* plan;
  int32_t num_groups;
  int32_t num_turns;  // of a head
};

// src/cuda/flash_attn_varlen_bwd/hopper.rs asserts the same numbers.
static_assert(sizeof(SequencePlan) == 32 && sizeof(BackwardPlan) == 16);
static_assert(offsetof(HopperBackwardParams, q) == 576 && offsetof(HopperBackwardParams, lse_log2) == 1344);
static_assert(sizeof(HopperBackwardParams) == 1408 && alignof(HopperBackwardParams) == 64);

/// Where a box of a sequence's rows lies: a tensor map whose third axis ends at 2^30 clips a box that begins at
/// 2^30 - rows + row at the sequence's end. The fourth axis goes on from there, and the fifth goes back by what the
/// third has gone too far, modulo 2^64.
struct RaggedRows {
  static constexpr int32_t kEnd = 1 << 30;
  int32_t base;  // on the third axis, of row 0
  int32_t end;   // on the fourth

  __device__ __forceinline__ RaggedRows(int32_t first, int32_t count) : base(kEnd - count), end(first + count) {}
};

}  // namespace xa::hopper
