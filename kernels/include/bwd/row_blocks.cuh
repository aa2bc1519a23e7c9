// The blocks of rows that CTAs of the gradients with a bias hold. Where all sequences have as many rows, as in a batch
// of matrices, each of them begins with a block:
//
//     rows                 |     sequence 0     |     sequence 1     |       a period each
//     blocks               |   0   |   1   | 2  |   3   |   4   | 5  |       kHeld rows, the last one of a period fewer
//     in turns of 2        |   0   |   1   | 4  |   2   |   3   | 5  |
//     in turns of 1        |   0   |   2   | 4  |   1   |   3   | 5  |
//
// Then a block has rows of one sequence, and its keys begin with a chunk of 16 bytes of the bias and of dS, however
// long a sequence is. Elsewhere all rows are one period.
#pragma once

#include <cstdint>

#include "bwd/sequence_segment.cuh"
#include "params/attention.cuh"
#include "params/bias.cuh"
#include "ptx.cuh"
#include "work_tile.cuh"

namespace xa {

template <int kHeld>
struct RowBlocks {
  uint32_t rows;
  uint32_t period;

  /// `rows` is a multiple of `period`.
  __device__ __forceinline__ RowBlocks(int32_t rows, int32_t period) : rows(rows), period(period) {}

  /// The first row of block `index`; `rows` if there is no such block. Periods take turns of `turn` blocks.
  __device__ __forceinline__ int32_t first_row(uint32_t index, uint32_t turn) const {
    const uint32_t periods = rows / period, blocks = (period + kHeld - 1) / kHeld;
    const uint32_t before = index / (periods * turn) * turn, in_round = index - before * periods;
    // In the last round a turn has the blocks that are left.
    const uint32_t size = before < blocks ? min(turn, blocks - before) : 1;
    const uint32_t of = in_round / size, block = before + in_round % size;
    const uint64_t row = static_cast<uint64_t>(of) * period + static_cast<uint64_t>(block) * kHeld;
    return static_cast<int32_t>(min(row, static_cast<uint64_t>(rows)));
  }
  /// How many rows the block from row `first` on has.
  __device__ __forceinline__ int32_t count(uint32_t first) const {
    return static_cast<int32_t>(min(period - first % period, static_cast<uint32_t>(kHeld)));
  }
};

/// How many rows the CTA's block has, in shared memory.
__device__ __forceinline__ int32_t& block_rows() {
  __shared__ int32_t rows;
  return rows;
}

/// Segments of such a block, which are those of `Held` (sequence_segment.cuh) without the rows past its end.
template <typename Held>
struct HeldInBlock {
  static __device__ __forceinline__ void describe(const AttentionParams& params, const QoTile& sequence, int32_t first,
                                                  SequenceSegment& segment) {
    Held::describe(params, sequence, first, segment);
    const int32_t rows = block_rows();
    if (rows == Held::kRows) return;
    segment.tile.num_rows = min(segment.tile.num_rows, rows - segment.tile.first_row);
    segment.common = {0, 0};
    if (segment.tile.num_rows <= 0) segment.columns = {0, 0};
  }
};

/// The rows of K after which blocks of keys begin anew, in shared memory. `find_key_period` has found them.
__device__ __forceinline__ int32_t& key_period() {
  __shared__ int32_t period;
  return period;
}

/// Finds those that the host proposes, if sequence i begins with the i-th of them throughout the batch, else all. All
/// threads of the CTA call it. `start(period)` may start to copy rows of a block meanwhile, and is called once more if
/// these are not the proposed ones.
template <int kThreads, typename Start>
__device__ __forceinline__ void find_key_period(const BiasBackwardParams& params, const Start& start) {
  const AttentionParams& forward = params.backward.forward;
  int32_t period = min(params.key_period, forward.capacity);
#pragma unroll 1
  while (true) {
    start(period);
    if (threadIdx.x == 0) key_period() = period;
    if (period == forward.capacity) break;
    bool begin_with_periods = true;
#pragma unroll 1
    for (int32_t i = threadIdx.x; i <= live_sequences(forward); i += kThreads) {
      begin_with_periods &= key_start_of(forward, i) == i * period;
    }
    if (__syncthreads_and(begin_with_periods) != 0) break;
    ptx::cp_async_commit();
    ptx::cp_async_wait<0>();
    period = forward.capacity;
  }
  __syncthreads();
}

}  // namespace xa
