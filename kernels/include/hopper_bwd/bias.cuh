// A bias of pairs of rows and keys (../score_bias.cuh), of q's type or of f32, in the backward up to 128 columns.
//
// Each compute warpgroup has stages of shared memory for the bias of a step's queries and its own 64 keys, as TMA
// writes it: boxes with a row per query, one swizzle atom wide. Scores are transposed, [key, query], so `ldmatrix` and
// `stmatrix` transpose; of f32, a thread reads single elements. Where each pair has a bias of its own, dS is its
// gradient: each warp stores it in the place of the bias that it has read, and TMA copies the stage to memory before
// the bias of a later step replaces it.
#pragma once

#include <cstdint>

#include "element.cuh"
#include "hopper_bwd/pipeline.cuh"
#include "hopper_bwd/schedule.cuh"
#include "params/hopper_bwd.cuh"

namespace xa::hopper {

/// The parameter that begins with `params`.
__device__ __forceinline__ const HopperBiasBackwardParams& with_bias(const HopperBackwardParams& params) {
  return reinterpret_cast<const HopperBiasBackwardParams&>(params);
}

/// Copies the bias of each step to shared memory, and the gradient of a step before from there when the stage is needed
/// again. L2 may evict both first, because it has the accumulators of dQ too. Called by one thread. What it needs from
/// step to step is in shared memory, because that thread has few registers.
template <typename Shape>
class BiasCopy {
 public:
  __device__ __forceinline__ BiasCopy(const HopperBackwardParams& params, const BackwardPipeline<Shape>& pipeline)
      : params_(with_bias(params)), pipeline_(pipeline), places_(pipeline.bias_places()) {}

  /// Called once, before the first tile.
  __device__ __forceinline__ void init() const {
    for (int stage = 0; stage < Shape::kBiasStages; ++stage) places_.steps[stage].matrix = -1;
  }
  /// Begins a tile.
  __device__ __forceinline__ void begin(const BackwardTile& tile) const {
    const SequenceStart& start = params_.common.sequence_starts[tile.sequence];
    places_.first_query = tile.first_query - __ldg(&start.query);
    places_.first_key = tile.first_key - __ldg(&start.key) + tile.key_block * Shape::kKeys;
    places_.first_matrix = tile.sequence * params_.seq_matrices;
    const int32_t rows = params_.rows, first_row = places_.first_query + tile.first_block * Shape::kQueries;
    const int32_t before = min(first_row, rows);
    const int32_t of_steps = min(first_row + tile.num_blocks * Shape::kQueries, rows) - before;
    places_.rows_before_steps = before;
    places_.rows_of_steps = of_steps;
    places_.hidden_rows = rows - of_steps;
    places_.hidden_share = ceil_div(rows - of_steps, tile.num_blocks);
  }

  /// Copies the bias of step `step` of the CTA, which has the tile's queries from `row` on and query head `head`.
  __device__ __forceinline__ void copy_step(int32_t step, int32_t row, int32_t head) const {
    const int32_t matrix = places_.first_matrix + head * params_.head_matrices;
    replace(step, [&](int32_t warpgroup) {
      const Barrier full = pipeline_.bias_full(step, warpgroup);
      full.arrive_expect_tx(Shape::kBiasBytes);
#pragma unroll
      for (int box = 0; box < Shape::kBiasBoxes; ++box) {
        const uint32_t to = pipeline_.bias(step, warpgroup) + box * Shape::kBiasBoxBytes;
        const int32_t key = places_.first_key + 64 * warpgroup + box * Shape::kBiasBoxKeys;
        const int32_t query = places_.first_query + row;
        if (params_.evicts_bias_first != 0) {
          ptx::tma_load(to, params_.bias, full.address, key, query, matrix, 0, 0, xa::ptx::evict_first_policy());
        } else {
          ptx::tma_load(to, params_.bias, full.address, key, query, matrix, 0, 0);
        }
      }
    });
    volatile auto& place = places_.steps[BiasState(step).stage];
    place.key = places_.first_key;
    place.query = places_.first_query + row;
    place.matrix = matrix;
  }

  /// Copies the gradients of the last steps; `step` is the number of all steps.
  __device__ __forceinline__ void end(int32_t step) const {
#pragma unroll 1
    for (int stage = 0; stage < Shape::kBiasStages; ++stage) replace(step + stage, [](int32_t) {});
  }

 private:
  using BiasState = PipelineState<Shape::kBiasStages>;

  /// Calls `load(warpgroup)` when the warpgroup's stage is free for step `step`, after the gradient in it has been
  /// copied. With several stages both gradients are under way at a time, with one the first warpgroup needs its stage
  /// before the second one has stored dS.
  template <typename Load>
  __device__ __forceinline__ void replace(int32_t step, const Load& load) const {
    if constexpr (Shape::kBiasStages == 1) {
#pragma unroll
      for (int32_t warpgroup = 0; warpgroup < 2; ++warpgroup) {
        copy_gradient(step, warpgroup);
        ptx::bulk_wait_group_read();
        load(warpgroup);
      }
    } else {
      copy_gradient(step, 0);
      copy_gradient(step, 1);
      ptx::bulk_wait_group_read<1>();
      load(0);
      ptx::bulk_wait_group_read();
      load(1);
    }
  }
  /// Starts to copy the gradient that is where the bias of step `step` will be, when the warpgroup has stored it.
  __device__ __forceinline__ void copy_gradient(int32_t step, int32_t warpgroup) const {
    pipeline_.bias_empty(step, warpgroup).producer_wait();
    const volatile auto& place = places_.steps[BiasState(step).stage];
    if (params_.stores_dbias != 0 && place.matrix >= 0) {
#pragma unroll
      for (int box = 0; box < Shape::kBiasBoxes; ++box) {
        const uint32_t from = pipeline_.bias(step, warpgroup) + box * Shape::kBiasBoxBytes;
        const int32_t key = place.key + 64 * warpgroup + box * Shape::kBiasBoxKeys;
        if (params_.evicts_dbias_first != 0) {
          ptx::tma_store(from, params_.dbias, key, place.query, place.matrix, 0, 0, xa::ptx::evict_first_policy());
        } else {
          ptx::tma_store(from, params_.dbias, key, place.query, place.matrix, 0, 0);
        }
      }
    }
    ptx::bulk_commit_group();
  }

  const HopperBiasBackwardParams& params_;
  const BackwardPipeline<Shape>& pipeline_;
  volatile BiasPlaces<Shape::kBiasStages>& places_;
};

/// Stores zeros to the gradient of a bias in the *hidden rows* of a tile: those whose query blocks do not attend to the
/// tile's keys, so that no step has them. Each step stores a share of them, while its products run. Executed by a warp.
template <typename Shape>
class HiddenRows {
 public:
  __device__ __forceinline__ HiddenRows(const HopperBackwardParams& params, const BackwardPipeline<Shape>& pipeline)
      : params_(with_bias(params)), places_(pipeline.bias_places()) {}

  /// Clears those of query head `head` that are the share of the tile's query block number `block`, in order of steps.
  __device__ __forceinline__ void clear_share(int32_t block, int32_t head) const {
    // Those before the rows of the tile's steps, then those after them.
#pragma unroll 1
    for (int part = 0; part < 2; ++part) {
      const int32_t share = places_.hidden_share, hidden = places_.hidden_rows, before = places_.rows_before_steps;
      const int32_t first_hidden = block * share, end_hidden = min(first_hidden + share, hidden);
      const int32_t begin = part == 0 ? first_hidden : max(first_hidden, before);
      const int32_t end = part == 0 ? min(end_hidden, before) : end_hidden;
      const int32_t lane = xa::ptx::opaque(threadIdx.x) % 32, in_step = lane / kRowLanes;
      const int32_t row = begin + in_step + (part == 0 ? 0 : places_.rows_of_steps);
      const int32_t key = places_.first_key + lane % kRowLanes * kChunk;
      const int64_t row_index = static_cast<int64_t>(places_.first_matrix + head) * params_.rows + row;
      auto* to = static_cast<uint8_t*>(params_.dbias_data) + (row_index * params_.keys + key) * kBytes;
      int32_t left = key < params_.keys ? end - begin - in_step : 0;
#pragma unroll 4
      for (; left > 0; left -= kRows) {
        *reinterpret_cast<uint4*>(to) = make_uint4(0, 0, 0, 0);
        to += static_cast<int64_t>(params_.keys) * (kRows * kBytes);
      }
    }
  }

 private:
  /// Bytes of an element, elements of 16 bytes, lanes that have the tile's keys of a row, and rows per store of a warp.
  static constexpr int kBytes = Shape::kHasF32Bias ? 4 : 2, kChunk = 16 / kBytes, kRowLanes = Shape::kKeys / kChunk,
                       kRows = 32 / kRowLanes;

  const HopperBiasBackwardParams& params_;
  const volatile BiasPlaces<Shape::kBiasStages>& places_;
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

/// The bytes of eight queries in a box.
constexpr uint32_t kBiasTileBytes = 8 * 128;

/// The bias of the scores [64 keys, kQueries] of a warpgroup, of the operands' type, in its stage at shared address
/// `stage`.
class StepBias {
 public:
  /// `warp` and `lane` are those of the calling thread in its warpgroup.
  __device__ __forceinline__ StepBias(uint32_t stage, int32_t warp, int32_t lane)
      : matrix_row_(stage + lane / 16 * kBiasTileBytes + lane % 8 * 128 + ((2 * warp + lane / 8 % 2) ^ lane % 8) * 16) {
  }
  /// In the stage that is `offset` bytes further.
  __device__ __forceinline__ StepBias(const StepBias& other, uint32_t offset)
      : matrix_row_(other.matrix_row_ + offset) {}

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

/// The same of f32. A thread accesses the elements of its own scores alone, so lanes need not converge before, and an
/// instruction of a warp those of 8 keys and 4 queries, which are in different banks.
template <typename Shape>
class F32StepBias {
 public:
  __device__ __forceinline__ F32StepBias(uint32_t stage, int32_t warp, int32_t lane)
      : own_(stage + warp / 2 * Shape::kBiasBoxBytes + lane % 4 * 256 +
             ((warp % 2 * 4 + lane / 16) ^ lane % 4 * 2) * 16 + lane / 4 % 4 * 4) {}
  __device__ __forceinline__ F32StepBias(const F32StepBias& other, uint32_t offset) : own_(other.own_ + offset) {}

  /// The bias of element `i` of this thread's scores in column tile `column`.
  __device__ __forceinline__ float load(int column, int i) const { return ptx::load_shared_f32(address(column, i)); }
  /// Stores dS of such an element in the place of its bias, if `stores`.
  __device__ __forceinline__ void store(int column, int i, float ds, bool stores = true) const {
    ptx::store_shared_f32_if(address(column, i), ds, stores);
  }

 private:
  __device__ __forceinline__ uint32_t address(int column, int i) const {
    // The next query is in the next row, whose chunks are swapped in pairs. The keys of i >= 2 are two chunks further.
    return (own_ ^ (i % 2 * 16 + i / 2 * 32)) + i % 2 * 128 + kBiasTileBytes * column;
  }
  uint32_t own_;
};

/// Clears the bias of element `i` of this thread's scores in column tile `column`: that of a masked score may be
/// anything. The warp must converge before it loads the bias.
__device__ __forceinline__ void clear_bias(uint32_t stage, int column, int i) {
  const int32_t thread = xa::ptx::opaque(threadIdx.x), lane = thread % 32, warp = thread % 128 / 32;
  const int32_t query = 2 * (lane % 4) + i % 2, chunk = 2 * warp + i / 2;
  xa::ptx::store_shared_2(stage + kBiasTileBytes * column + query * 128 + (chunk ^ query) * 16 + lane / 4 * 2, 0);
}

/// Clears P and dS of keys past the tile's last one and of hidden keys, whatever they are, and calls `clear(half)` if
/// the thread's first or second key (`half` 1) is one. A mask of their scores takes a select and a store for each pair,
/// in all steps of a tile.
template <typename Shape, int kSteps, typename Clear>
__device__ __forceinline__ void clear_absent_keys(const BackwardTile& tile, uint32_t (&p)[kSteps][4],
                                                  uint32_t (&ds)[kSteps][4], const Clear& clear) {
  const int32_t thread = xa::ptx::opaque(threadIdx.x) - 128, num_keys = tile.num_keys, hidden_keys = tile.hidden_keys;
  const int32_t first_key = tile.key_block * Shape::kKeys, own_key = first_key + thread / 32 * 16 + thread % 32 / 4;
  if (first_key + Shape::kKeys <= num_keys && first_key >= hidden_keys) return;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int32_t key = own_key + 8 * half;
    const uint32_t kept = key >= hidden_keys && key < num_keys ? ~0u : 0;
    if (kept == 0) clear(half);
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
