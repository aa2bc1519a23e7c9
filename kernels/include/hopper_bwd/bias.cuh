// A bias of pairs of rows and keys (../score_bias.cuh), of q's type, in the backward up to 128 columns.
//
// Each compute warpgroup has one stage of shared memory for the bias of a step's queries and its own 64 keys, as TMA
// writes it: a row per query, one swizzle atom wide. Scores are transposed, [key, query], so `ldmatrix` and `stmatrix`
// transpose. Where each pair has a bias of its own, dS is its gradient: each warp stores it in the place of the bias
// that it has read, and TMA copies the stage to memory before the bias of the next step replaces it.
#pragma once

#include <cstdint>

#include "element.cuh"
#include "hopper_bwd/pipeline.cuh"
#include "params/hopper_bwd.cuh"

namespace xa::hopper {

/// The parameter that begins with `params`.
__device__ __forceinline__ const HopperBiasBackwardParams& with_bias(const HopperBackwardParams& params) {
  return reinterpret_cast<const HopperBiasBackwardParams&>(params);
}

/// Copies the bias of each step of a tile to shared memory, and the gradient of the step before from there. Called by
/// one thread. What it needs from step to step is in shared memory, because that thread has few registers.
template <typename Shape>
class BiasCopy {
 public:
  __device__ __forceinline__ BiasCopy(const HopperBackwardParams& params, const BackwardPipeline<Shape>& pipeline)
      : params_(with_bias(params)), pipeline_(pipeline), box_(pipeline.bias_box()) {}

  /// Begins a tile.
  __device__ __forceinline__ void begin(const BackwardTile& tile) const {
    const SequenceStart& start = params_.common.sequence_starts[tile.sequence];
    box_.first_query = tile.first_query - __ldg(&start.query);
    box_.key = tile.first_key - __ldg(&start.key) + tile.key_block * Shape::kKeys;
    box_.first_matrix = tile.sequence * params_.seq_matrices;
    box_.matrix = -1;
  }

  /// Copies the bias of step `step` of the CTA, any number of the same parity, which has the tile's queries from `row`
  /// on and query head `head`.
  __device__ __forceinline__ void copy_step(int32_t step, int32_t row, int32_t head) const {
    for_stages(step, [&](int32_t warpgroup) {
      const Barrier full = pipeline_.bias_full(step, warpgroup);
      full.arrive_expect_tx(Shape::kBiasBytes);
      ptx::tma_load(pipeline_.bias(warpgroup), params_.bias, full.address, box_.key + 64 * warpgroup,
                    box_.first_query + row, box_.first_matrix + head * params_.head_matrices, 0, 0);
    });
    box_.query = box_.first_query + row;
    box_.matrix = box_.first_matrix + head * params_.head_matrices;
  }

  /// Copies the gradient of the tile's last step; `step` is the next one.
  __device__ __forceinline__ void end(int32_t step) const {
    for_stages(step, [](int32_t) {});
  }

 private:
  /// Calls `use(warpgroup)` for each stage when it is free for a step, after the gradient in it has been copied.
  template <typename Use>
  __device__ __forceinline__ void for_stages(int32_t step, const Use& use) const {
#pragma unroll
    for (int32_t warpgroup = 0; warpgroup < 2; ++warpgroup) {
      pipeline_.bias_empty(step, warpgroup).producer_wait();
      if (params_.stores_dbias != 0 && box_.matrix >= 0) {
        ptx::tma_store(pipeline_.bias(warpgroup), params_.dbias, box_.key + 64 * warpgroup, box_.query, box_.matrix, 0,
                       0);
        ptx::bulk_commit_group();
        ptx::bulk_wait_group_read();
      }
      use(warpgroup);
    }
  }

  const HopperBiasBackwardParams& params_;
  const BackwardPipeline<Shape>& pipeline_;
  volatile BiasBox& box_;
};

/// Clears the first `count` rows of K and V, fewer than 8. No query attends to these keys, so they may hold NaN, whose
/// product with 0 is NaN. Executed by a warp.
template <typename Shape>
__device__ __forceinline__ void clear_hidden_keys(uint32_t keys, uint32_t values, int32_t count) {
  using Atom = typename Shape::Atom;
  const int32_t lane = xa::ptx::opaque(threadIdx.x) % 32, row = lane / 4;
  if (row >= count) return;
#pragma unroll
  for (int chunk = 0; chunk < Shape::kHeadDim / 8; chunk += 4) {
    // The swizzle permutes the chunks of a row, so it does not matter here.
    const uint32_t offset = chunk / Atom::kChunks * Shape::kKeyAtomColumnBytes + row * Atom::kRowBytes +
                            (chunk % Atom::kChunks + lane % 4) * 16;
    xa::ptx::clear_shared_16(keys + offset);
    xa::ptx::clear_shared_16(values + offset);
  }
}

/// The bytes of eight queries in a stage.
constexpr uint32_t kBiasTileBytes = 8 * 128;

/// The bias of the scores [64 keys, kQueries] of a warpgroup, in its stage at shared address `stage`.
class StepBias {
 public:
  /// `warp` and `lane` are those of the calling thread in its warpgroup.
  __device__ __forceinline__ StepBias(uint32_t stage, int32_t warp, int32_t lane)
      : matrix_row_(stage + lane / 16 * kBiasTileBytes + lane % 8 * 128 + ((2 * warp + lane / 8 % 2) ^ lane % 8) * 16) {
  }

  /// The bias of a column tile, in the layout of its packed scores. Loads of two tiles would take registers that 128
  /// queries per step do not leave.
  __device__ __forceinline__ void load(int column, uint32_t (&bias)[2]) const {
    xa::ptx::ldmatrix_x2_trans(bias, matrix_row_ + kBiasTileBytes * column);
  }
  /// Stores dS of two adjacent column tiles, the first of which is 2 `pair`, in the place of their bias.
  __device__ __forceinline__ void store(int pair, const uint32_t (&ds)[4]) const {
    ptx::stmatrix_x4_trans(matrix_row_ + 2 * kBiasTileBytes * pair, ds);
  }

 private:
  uint32_t matrix_row_;  // of which this lane passes the address to ldmatrix and stmatrix
};

/// Clears the bias of element `i` of this thread's scores in column tile `column`: that of a masked score may be
/// anything. The warp must converge before it loads the bias.
__device__ __forceinline__ void clear_bias(uint32_t stage, int column, int i) {
  const int32_t thread = xa::ptx::opaque(threadIdx.x), lane = thread % 32, warp = thread % 128 / 32;
  const int32_t query = 2 * (lane % 4) + i % 2, chunk = 2 * warp + i / 2;
  xa::ptx::store_shared_2(stage + kBiasTileBytes * column + query * 128 + (chunk ^ query) * 16 + lane / 4 * 2, 0);
}

/// Clears P and dS of keys past the tile's last one and of hidden keys, whatever they are. A mask of their scores takes
/// a select and a store for each pair, in all steps of a tile.
template <typename Shape, int kSteps>
__device__ __forceinline__ void clear_absent_keys(const BackwardTile& tile, uint32_t (&p)[kSteps][4],
                                                  uint32_t (&ds)[kSteps][4]) {
  const int32_t thread = xa::ptx::opaque(threadIdx.x) - 128, num_keys = tile.num_keys, hidden_keys = tile.hidden_keys;
  const int32_t first_key = tile.key_block * Shape::kKeys, own_key = first_key + thread / 32 * 16 + thread % 32 / 4;
  if (first_key + Shape::kKeys <= num_keys && first_key >= hidden_keys) return;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int32_t key = own_key + 8 * half;
    const uint32_t kept = key >= hidden_keys && key < num_keys ? ~0u : 0;
#pragma unroll
    for (int step = 0; step < kSteps; ++step) {
#pragma unroll
      for (int i = half; i < 4; i += 2) {
        p[step][i] &= kept;
        ds[step][i] &= kept;
      }
    }
  }
}

}  // namespace xa::hopper
