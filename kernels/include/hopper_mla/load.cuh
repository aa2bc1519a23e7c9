// The load warps of multi-head latent attention on Hopper. Each buffer has two warps of its own, so that both may be on
// their way.
//
// Blocks whose keys are all visible come by TMA if pages consist of whole boxes: each of the two warps loads the half
// of the columns that has a full barrier of its own. In a cluster, a CTA loads half of the rows, for both CTAs.
//
// Other blocks come by cp.async, for pages of any size and strides, and with zeros for keys that no row attends to. A
// warp copies 32 rows, four rows by an instruction: eight lanes have the 128 bytes of an atom's row.
#pragma once

#include <cstdint>

#include "hopper/ptx.cuh"
#include "hopper_mla/shape.cuh"
#include "paged_rows.cuh"
#include "params/attention.cuh"
#include "params/hopper_mla.cuh"
#include "ptx.cuh"
#include "work_tile.cuh"

namespace xa::hopper_mla {

/// Where a lane's row of a block is: lane i has row i of its warp's.
struct RowSource {
  int64_t offset;  // in elements
  bool visible;    // whether the tile attends to it; other rows become zeros
};

template <typename Shape, typename T>
__device__ __forceinline__ RowSource find_row(const AttentionParams& params, const WorkTile& work, int32_t block) {
  const int32_t token = block * Shape::kKeys + threadIdx.x % (32 * Shape::kLoadWarps);
  // Entries of the block table of pages without a visible key may be invalid.
  const bool visible = token >= work.keys.begin && token < work.keys.end;
  const TokenSlot slot = visible ? slot_of(params, work.tile, token) : TokenSlot{0, 0};
  const int64_t page = clamp(slot.page, 0, params.num_pages - 1);
  return RowSource{page * params.k.page_stride + slot.offset * params.k.token_stride, visible};
}

/// Starts to copy the warp's rows of a block, in atom columns from kFirst to before kEnd, to the buffer at `to`.
template <typename Shape, typename T, int kFirst, int kEnd>
__device__ __forceinline__ void copy_rows(const AttentionParams& params, const RowSource& source, uint32_t to) {
  using Atom = typename Shape::Atom;
  const int32_t lane = threadIdx.x % 32, chunk = lane % Atom::kChunks, warp = threadIdx.x / 32 % Shape::kLoadWarps;
  const uint32_t visible = __ballot_sync(~0u, source.visible);
  const int32_t columns_left = params.head_dim - 8 * chunk;
#pragma unroll 4
  for (int32_t first = 0; first < Shape::kKeysPerLoad; first += 4) {
    const int32_t row = first + lane / Atom::kChunks;
    const int64_t offset = __shfl_sync(~0u, source.offset, row);
    const bool is_visible = (visible >> row & 1) != 0;
    const T* const from = static_cast<const T*>(params.k.base) + offset + 8 * chunk;
    const uint32_t row_to =
        to + (warp * Shape::kKeysPerLoad / 8 + row / 8) * Atom::kBytes + Atom::offset(row % 8, chunk);
#pragma unroll
    for (int column = kFirst; column < kEnd; ++column) {
      const bool inside = column * Atom::kColumns < columns_left;
      xa::ptx::cp_async_16(row_to + column * Shape::kAtomColumnBytes, from + (inside ? column * Atom::kColumns : 0),
                           is_visible && inside);
    }
  }
}

/// The page of this lane's box of a block, and the box's first row in the page.
struct BoxSource {
  int32_t page;
  int32_t row;
};

/// Loads every second block of a work tile, those of a buffer.
template <typename Shape, typename T>
class BlockLoader {
  static constexpr int kHalf = Shape::kAtomColumnsPerHalf;

 public:
  __device__ __forceinline__ BlockLoader(const HopperMlaParams& params, const Buffers<Shape>& buffers)
      : params_(params),
        buffers_(buffers),
        work_(buffers.work_tile()),
        buffer_(hopper::uniform(threadIdx.x / 32) / Shape::kLoadWarps % 2),
        warp_(threadIdx.x / 32 % Shape::kLoadWarps),
        to_(buffers.buffer(buffer_)) {}

  /// Loads the tile's blocks, of which the first one has number `number` among those of the CTA.
  __device__ __forceinline__ void load(int32_t& number) {
    const int32_t first = work_.keys.begin / Shape::kKeys, end = (work_.keys.end + Shape::kKeys - 1) / Shape::kKeys;
    int32_t block = first + ((number ^ buffer_) & 1);
    if (block < end) find(block);
#pragma unroll 1
    for (; block < end; block += 2) {
      if (comes_by_tma(block)) {
        load_boxes(number + block - first);
        if (block + 2 < end) find(block + 2);
      } else {
        copy(number + block - first, block + 2 < end, block + 2);
      }
    }
    number += end - first;
  }

 private:
  __device__ __forceinline__ bool comes_by_tma(int32_t block) const {
    return params_.box_rows != 0 && block * Shape::kKeys >= work_.keys.begin &&
           (block + 1) * Shape::kKeys <= work_.keys.end;
  }
  /// Looks up the pages of a block, one ahead of its load.
  __device__ __forceinline__ void find(int32_t block) {
    if (!comes_by_tma(block)) {
      rows_ = find_row<Shape, T>(params_.attention, work_, block);
      return;
    }
    const int32_t first = threadIdx.x % 32 * params_.box_rows;
    num_boxes_ = __popc(__ballot_sync(~0u, first < Shape::kKeysPerCta));
    if (first >= Shape::kKeysPerCta) return;
    const int32_t token = block * Shape::kKeys + buffers_.cta_rank() * Shape::kKeysPerCta + first;
    const TokenSlot slot = slot_of(params_.attention, work_.tile, token);
    boxes_ = BoxSource{clamp(slot.page, 0, params_.attention.num_pages - 1), slot.offset};
  }
  __device__ __forceinline__ void load_boxes(int32_t number) const {
    buffers_.empty(number, warp_).producer_wait();
    if (warp_ == 0) {
      load_part<0>(number);
      load_part<1>(number);
    } else {
      load_part<2>(number);
      load_part<3>(number);
    }
  }
  template <int kPart>
  __device__ __forceinline__ void load_part(int32_t number) const {
    constexpr int kBegin = Shape::part_start(kPart), kEnd = Shape::part_start(kPart + 1);
    const Barrier full = buffers_.full(number, kPart);
    const bool is_leader = hopper::ptx::elect_one();
    if (is_leader) {
      // For both warps that arrive where rows are copied. The other CTA's boxes may have come before.
      full.arrive_expect_tx((kEnd - kBegin) * Shape::kAtomColumnBytes);
      full.arrive();
    }
    uint32_t to = to_ + buffers_.cta_rank() * Shape::kKeysPerCta * Shape::Atom::kRowBytes;
    // One lane loads all boxes: several lanes would take turns at each instruction, whose operands are in uniform
    // registers.
#pragma unroll 1
    for (int32_t box = 0; box < num_boxes_; ++box, to += params_.box_rows * Shape::Atom::kRowBytes) {
      const int32_t row = __shfl_sync(~0u, boxes_.row, box), page = __shfl_sync(~0u, boxes_.page, box);
      if (!is_leader) continue;
#pragma unroll
      for (int i = kBegin; i < kEnd; ++i) {
        const int column = Shape::atom_column(i);
        const uint32_t box_to = to + column * Shape::kAtomColumnBytes;
        const int32_t first = column * Shape::Atom::kColumns;
        if constexpr (Shape::kCtas > 1) {
          hopper::ptx::tma_load_pair(box_to, params_.cache, full.address, first, row, page, 0, 0);
        } else {
          hopper::ptx::tma_load(box_to, params_.cache, full.address, first, row, page, 0, 0);
        }
      }
    }
    __syncwarp();
  }
  /// Copies a block's rows, and looks up block `next`, if it exists, while they are on their way.
  __device__ __forceinline__ void copy(int32_t number, bool has_next, int32_t next) {
    const AttentionParams& params = params_.attention;
    // A warp that loads boxes waits for its own half only. With its own half first, it is not two phases behind at the
    // other one (Barrier): each warpgroup has left the block before the last one when the other has left the last one.
    if (params_.box_rows != 0) buffers_.empty(number, warp_).producer_wait();
    buffers_.empty(number, 0).producer_wait();
    copy_rows<Shape, T, 0, kHalf>(params, rows_, to_);
    copy_rows<Shape, T, 2 * kHalf, Shape::kAtomColumns>(params, rows_, to_);
    xa::ptx::cp_async_commit();
    buffers_.empty(number, 1).producer_wait();
    copy_rows<Shape, T, kHalf, 2 * kHalf>(params, rows_, to_);
    xa::ptx::cp_async_commit();
    if (has_next) find(next);
    xa::ptx::cp_async_wait<1>();
    announce(number, 0);
    xa::ptx::cp_async_wait<0>();
    announce(number, 1);
  }

  /// Tells the compute warps that this warp's rows of a half of the columns are in shared memory.
  __device__ __forceinline__ void announce(int32_t number, int half) const {
    hopper::ptx::fence_proxy_async_shared();
    __syncwarp();
    if (threadIdx.x % 32 != 0) return;
    buffers_.full(number, 2 * half).arrive();
    buffers_.full(number, 2 * half + 1).arrive();
  }

  const HopperMlaParams& params_;
  const Buffers<Shape>& buffers_;
  const WorkTile& work_;
  const int buffer_;
  const int warp_;
  const uint32_t to_;
  RowSource rows_;
  BoxSource boxes_;
  int32_t num_boxes_;  // that the CTA loads; lanes past them have none
};

/// Loads the query rows of a work tile. The compute threads call this.
template <typename Shape, typename T>
__device__ __forceinline__ void load_query(const AttentionParams& params, const Buffers<Shape>& buffers,
                                           int32_t thread) {
  using Atom = typename Shape::Atom;
  constexpr int kThreadsPerRow = Shape::kComputeThreads / Shape::kRows, kChunks = kLatentDim / 8;
  const WorkTile& work = buffers.cta_tile();
  const RowMap map(params, work.tile, work.kv_head);
  const int32_t row = thread / kThreadsPerRow;
  const bool live = row < map.num_rows;
  const int32_t source_row = live ? row : 0;
  const T* const from = static_cast<const T*>(params.q) + map.token(source_row) * params.q_token_stride +
                        map.head(source_row) * params.q_head_stride;
  const uint32_t to = buffers.query() + row / 8 * Atom::kBytes;
#pragma unroll 2
  for (int32_t chunk = thread % kThreadsPerRow; chunk < kChunks; chunk += kThreadsPerRow) {
    const bool inside = 8 * chunk < params.head_dim;
    xa::ptx::cp_async_16(
        to + chunk / Atom::kChunks * Shape::kAtomColumnBytes + Atom::offset(row % 8, chunk % Atom::kChunks),
        from + (inside ? 8 * chunk : 0), live && inside);
  }
  xa::ptx::cp_async_commit();
  xa::ptx::cp_async_wait<0>();
  hopper::ptx::fence_proxy_async_shared();
}

}  // namespace xa::hopper_mla
