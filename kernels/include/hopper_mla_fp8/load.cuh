// Loads of multi-head latent attention over 8-bit caches on Hopper: the load warps copy latent rows as they are stored,
// the compute warps convert query rows. Strides may be any multiples of 16 bytes.
#pragma once

#include <cstdint>

#include "fp8.cuh"
#include "hopper/ptx.cuh"
#include "hopper_bwd/ptx.cuh"
#include "hopper_mla_fp8/shape.cuh"
#include "paged_rows.cuh"
#include "params/attention.cuh"
#include "ptx.cuh"
#include "query_rows.cuh"
#include "work_tile.cuh"

namespace xa::hopper_mla_fp8 {

/// Copies the blocks of a work tile. Four lanes have a row, of which each copies every fourth 16 bytes, so that a copy
/// is one instruction with constant offsets.
template <typename Shape>
class BlockLoader {
  using Rows = typename Shape::StoredRows;
  static constexpr int kBytes = 64, kCopies = kLatentDim / kBytes;
  /// Rows of a block that a thread has.
  static constexpr int kRowStep = Shape::kLoadThreads / 4, kRows = Shape::kKeys / kRowStep;

 public:
  __device__ __forceinline__ BlockLoader(const AttentionParams& params, const Buffers<Shape>& buffers)
      : params_(params),
        buffers_(buffers),
        work_(buffers.work_tile()),
        row_(threadIdx.x % Shape::kLoadThreads / 4),
        column_(16 * (threadIdx.x % 4)),
        to_(Rows::offset(row_, threadIdx.x % 4)) {}

  /// Copies the tile's blocks, of which the first one has number `number` among those of the CTA.
  __device__ __forceinline__ void load(int32_t& number) {
    const int32_t first = work_.keys.begin / Shape::kKeys, end = (work_.keys.end + Shape::kKeys - 1) / Shape::kKeys;
    if (first < end) find(first);
#pragma unroll 1
    for (int32_t block = first; block < end; ++block, ++number) {
      const uint8_t* from[kRows];
      bool visible[kRows];
#pragma unroll
      for (int i = 0; i < kRows; ++i) {
        const int64_t page = clamp(slots_[i].page, 0, params_.num_pages - 1);
        visible[i] = slots_[i].offset >= 0;
        from[i] = static_cast<const uint8_t*>(params_.k.base) + page * params_.k.page_stride +
                  (visible[i] ? slots_[i].offset : 0) * params_.k.token_stride + column_;
      }
      // A block ahead, because a look-up takes as long as a block.
      if (block + 1 < end) find(block + 1);
      buffers_.empty(number).producer_wait();
      const uint32_t to = buffers_.stage(number) + to_;
#pragma unroll
      for (int i = 0; i < kRows; ++i) copy(to + i * kRowStep * Rows::kPitch, from[i], visible[i]);
      hopper::ptx::cp_async_arrive(buffers_.full(number).address);
    }
  }

 private:
  /// Looks up the pages of the thread's rows of a block.
  __device__ __forceinline__ void find(int32_t block) {
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
      const int32_t token = block * Shape::kKeys + row_ + i * kRowStep;
      // Entries of the block table of pages without a visible key may be invalid.
      const bool visible = token >= work_.keys.begin && token < work_.keys.end;
      slots_[i] = visible ? slot_of(params_, work_.tile, token) : TokenSlot{0, -1};
    }
  }
  /// Starts to copy the thread's part of a row. Rows that no query row attends to, and columns from D on, become zeros.
  __device__ __forceinline__ void copy(uint32_t to, const uint8_t* from, bool visible) const {
    if (params_.head_dim == kLatentDim) {
#pragma unroll
      for (int i = 0; i < kCopies; ++i) xa::ptx::cp_async_16(to + kBytes * i, from + kBytes * i, visible);
    } else {
#pragma unroll 1
      for (int i = 0; i < kCopies; ++i) {
        const bool inside = column_ + kBytes * i < params_.head_dim;
        xa::ptx::cp_async_16(to + kBytes * i, from + (inside ? kBytes * i : -column_), visible && inside);
      }
    }
  }

  const AttentionParams& params_;
  const Buffers<Shape>& buffers_;
  const WorkTile& work_;
  const int32_t row_;       // the thread's first row of a block
  const int32_t column_;    // its first 16 bytes of a row
  const uint32_t to_;       // where they are in a stage
  TokenSlot slots_[kRows];  // the offset of a row that no query row attends to is negative
};

/// Loads the query rows of a work tile as f16, and sets the factors by which their scores have to be multiplied.
/// Columns are permuted into the order in which a lane has those of a latent row (compute.cuh). The compute threads
/// call this.
template <typename Shape>
__device__ __forceinline__ void load_query(const AttentionParams& params, const Buffers<Shape>& buffers) {
  using Atom = typename Shape::Atom;
  constexpr int kWarps = Shape::kComputeThreads / 32, kCount = (kLatentDim + 255) / 256;
  const WorkTile& work = buffers.work_tile();
  const RowMap map(params, work.tile, work.kv_head);
  const int32_t warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const auto chunk_address = [&](int32_t row, int i, int32_t chunk) {
    return buffers.query() + (4 * i + lane / Atom::kChunks) * Shape::kQueryAtomColumnBytes + row / 8 * Atom::kBytes +
           Atom::offset(row % 8, chunk);
  };
  // A warp has whole rows, and a lane eight columns of each 256. All rows are on their way at the same time.
#pragma unroll 1
  for (int32_t row = warp; row < Shape::kRows; row += kWarps) {
    const bool is_live = row < map.num_rows;
    const int32_t source_row = is_live ? row : 0;
    const uint16_t* const from = static_cast<const uint16_t*>(params.q) +
                                 map.token(source_row) * params.q_token_stride +
                                 map.head(source_row) * params.q_head_stride;
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      const int32_t column = 256 * i + 8 * lane;
      if (column >= kLatentDim) continue;
      const bool inside = column < params.head_dim;
      xa::ptx::cp_async_16(chunk_address(row, i, lane % Atom::kChunks), from + (inside ? column : 0),
                           is_live && inside);
    }
  }
  xa::ptx::cp_async_commit();
  xa::ptx::cp_async_wait<0>();
#pragma unroll 1
  for (int32_t row = warp; row < Shape::kRows; row += kWarps) {
    uint4 x[kCount];
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      x[i] = 256 * i + 8 * lane < kLatentDim ? xa::ptx::load_shared_16(chunk_address(row, i, lane % Atom::kChunks))
                                             : make_uint4(0, 0, 0, 0);
    }
    const float factor = convert_row(params, x);
    if (lane == 0) buffers.row_factors()[row] = factor * work.score_factor;
    // Of 16 columns, which two lanes have read by now, first the even pairs, then the odd ones.
    __syncwarp();
    const int32_t chunk = lane / 2 * 2 % Atom::kChunks, half = 8 * (lane % 2);
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      if (256 * i + 8 * lane >= kLatentDim) continue;
      hopper::ptx::store_shared_8(chunk_address(row, i, chunk) + half, x[i].x, x[i].z);
      hopper::ptx::store_shared_8(chunk_address(row, i, chunk + 1) + half, x[i].y, x[i].w);
    }
  }
  hopper::ptx::fence_proxy_async_shared();
}

}  // namespace xa::hopper_mla_fp8
