// The load warps of multi-head latent attention on Hopper: blocks of latent rows by cp.async, for pages of any size and
// strides. Each buffer has two warps of its own, so that both may be on their way. A warp copies 32 rows of a block,
// four rows by an instruction: eight lanes have the 128 bytes of an atom's row.
#pragma once

#include <cstdint>

#include "hopper/ptx.cuh"
#include "hopper_mla/shape.cuh"
#include "paged_rows.cuh"
#include "params/attention.cuh"
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
  const TokenSlot slot = visible ? slot_of(params, work, token) : TokenSlot{0, 0};
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

/// Tells the compute warps that what this warp has waited for is in shared memory.
__device__ __forceinline__ void announce(const Barrier& full) {
  hopper::ptx::fence_proxy_async_shared();
  __syncwarp();
  if (threadIdx.x % 32 == 0) full.arrive();
}

/// Loads every second block of a work tile, those of a buffer.
template <typename Shape, typename T>
__device__ __forceinline__ void load_blocks(const AttentionParams& params, const Buffers<Shape>& buffers, int buffer,
                                            int32_t& count) {
  constexpr int kHalf = Shape::kAtomColumnsPerHalf;
  const WorkTile& work = buffers.work_tile();
  const int32_t first = work.keys.begin / Shape::kKeys + buffer,
                end = (work.keys.end + Shape::kKeys - 1) / Shape::kKeys;
  if (first >= end) return;
  const uint32_t to = buffers.block(buffer);
  RowSource source = find_row<Shape, T>(params, work, first);
#pragma unroll 1
  for (int32_t block = first; block < end; block += 2, ++count) {
    buffers.empty(buffer, 0, count).producer_wait();
    copy_rows<Shape, T, 0, kHalf>(params, source, to);
    copy_rows<Shape, T, 2 * kHalf, Shape::kAtomColumns>(params, source, to);
    xa::ptx::cp_async_commit();
    buffers.empty(buffer, 1, count).producer_wait();
    copy_rows<Shape, T, kHalf, 2 * kHalf>(params, source, to);
    xa::ptx::cp_async_commit();
    // The rows of the next block are looked up while these are on their way.
    if (block + 2 < end) source = find_row<Shape, T>(params, work, block + 2);
    xa::ptx::cp_async_wait<1>();
    announce(buffers.full(buffer, 0, count));
    xa::ptx::cp_async_wait<0>();
    announce(buffers.full(buffer, 1, count));
  }
}

/// Loads the query rows of a work tile. The compute threads call this.
template <typename Shape, typename T>
__device__ __forceinline__ void load_query(const AttentionParams& params, const Buffers<Shape>& buffers,
                                           int32_t thread) {
  using Atom = typename Shape::Atom;
  constexpr int kThreadsPerRow = Shape::kComputeThreads / Shape::kRows, kChunks = kLatentDim / 8;
  const WorkTile& work = buffers.work_tile();
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
