// The load warps of multi-head latent attention on Hopper over 8-bit caches: they convert latent rows to the dtype of q
// and store them where TMA would write 16-bit rows, so that the products are the same. Shared memory has no space for
// 8-bit blocks. The first columns of a block are read to registers while its buffer is still in use; the others are
// copied to the buffer once it is free, and converted in place. Strides may be any multiples of 16 bytes.
#pragma once

#include <cstdint>

#include "fp8.cuh"
#include "hopper_mla/ptx.cuh"
#include "hopper_mla/shape.cuh"
#include "mla/latent_rows.cuh"
#include "paged_rows.cuh"
#include "params/attention.cuh"
#include "params/hopper_mla.cuh"
#include "ptx.cuh"
#include "work_tile.cuh"

namespace xa::hopper_mla {

/// Loads all blocks of a work tile. A warp has 16 rows, as two groups of 8. Four lanes have the 64 bytes of a row that
/// become an atom's row, 16 bytes each: a lane copies these to where it stores half of what they become, so that no
/// other thread takes part.
template <typename Shape, typename T>
class Fp8BlockLoader {
  using Atom = typename Shape::Atom;
  using Stored = Fp8<false>;
  static constexpr int kGroups = Shape::kKeysPerLoad / 8, kLoads = kGroups * Shape::kAtomColumns;
  /// Loads of 16 bytes that go to registers, and those of the left half of the value columns. With more in registers
  /// conversions have too few of them to overlap.
  static constexpr int kInRegisters = 4, kLeft = kGroups * Shape::part_start(Shape::kPartsPerHalf);
  /// Bytes that a prefetch to L2 loads; the first ones of a row are in registers.
  static constexpr int32_t kLine = 128;
  static_assert(kGroups == 2);

 public:
  __device__ __forceinline__ Fp8BlockLoader(const HopperMlaParams& params, const Buffers<Shape>& buffers)
      : params_(params.attention), buffers_(buffers), work_(buffers.work_tile()), piece_(threadIdx.x % 4) {
    const int32_t warp = threadIdx.x / 32 % Shape::kLoadWarps, row = threadIdx.x % 32 / 4;
    first_row_ = Shape::kKeysPerLoad * warp;
    to_ = buffers.buffer(0) + kGroups * warp * Atom::kBytes + Atom::offset(row, 2 * piece_);
  }

  /// Loads the tile's blocks, of which the first one has number `number` among those of the CTA.
  __device__ __forceinline__ void load(int32_t& number) {
    const int32_t first = work_.keys.begin / Shape::kKeys, end = (work_.keys.end + Shape::kKeys - 1) / Shape::kKeys;
    if (first < end) {
      if (params_.kv_is_e5m2 != 0) {
        load_blocks<true>(first, end, number);
      } else {
        load_blocks<false>(first, end, number);
      }
    }
    number += end - first;
  }

 private:
  template <bool kIsE5m2>
  __device__ __forceinline__ void load_blocks(int32_t first, int32_t end, int32_t number) {
    uint4 codes[kInRegisters];
    find(first);
    start_block(codes);
    if (first + 1 < end) find(first + 1);
#pragma unroll 1
    for (int32_t block = first; block < end; ++block, ++number) {
      const uint32_t to = to_ + number % 2 * Shape::kBlockBytes;
      buffers_.empty(number, 0).producer_wait();
      copy<kInRegisters, kLeft>(to);
      buffers_.empty(number, 1).producer_wait();
      copy<kLeft, kLoads>(to);
#pragma unroll
      for (int i = 0; i < kInRegisters; ++i) convert<kIsE5m2>(to, i, codes[i], number);
      if (block + 1 < end) start_block(codes);
      // Two blocks ahead, because conversions wait for all loads that precede them.
      if (block + 2 < end) find(block + 2);
      xa::ptx::cp_async_wait<1>();
      convert_copied<kIsE5m2, kInRegisters, kLeft>(to, number);
      xa::ptx::cp_async_wait<0>();
      convert_copied<kIsE5m2, kLeft, kLoads>(to, number);
    }
  }

  /// Starts to copy loads from kFirst to before kEnd to where they are converted, as a cp.async group. The addresses
  /// are those of the block before `start_block` of the next one.
  template <int kFirst, int kEnd>
  __device__ __forceinline__ void copy(uint32_t to) const {
#pragma unroll
    for (int i = kFirst; i < kEnd; ++i) {
      xa::ptx::cp_async_16(to + offset(i), rows_[i % kGroups] + column(i), column(i) < columns_[i % kGroups]);
    }
    xa::ptx::cp_async_commit();
  }
  /// Converts them, with kAhead in registers ahead of the conversion.
  template <bool kIsE5m2, int kFirst, int kEnd>
  __device__ __forceinline__ void convert_copied(uint32_t to, int32_t number) const {
    constexpr int kAhead = kEnd - kFirst < 4 ? kEnd - kFirst : 4;
    uint4 codes[kAhead];
#pragma unroll
    for (int i = 0; i < kAhead; ++i) codes[i] = ptx::load_shared_16(to + offset(kFirst + i));
#pragma unroll
    for (int i = kFirst; i < kEnd; ++i) {
      const uint4 current = codes[(i - kFirst) % kAhead];
      if (i + kAhead < kEnd) codes[(i - kFirst) % kAhead] = ptx::load_shared_16(to + offset(i + kAhead));
      convert<kIsE5m2>(to, i, current, number);
    }
  }

  /// Looks up the page of a row of a block: lanes i and i + 16 have row i of their warp's.
  __device__ __forceinline__ void find(int32_t block) {
    const int32_t token = block * Shape::kKeys + first_row_ + static_cast<int32_t>(threadIdx.x % Shape::kKeysPerLoad);
    // Entries of the block table of pages without a visible key may be invalid.
    const bool visible = token >= work_.keys.begin && token < work_.keys.end;
    slot_ = visible ? slot_of(params_, work_, token) : TokenSlot{0, -1};
  }
  /// Turns to the block whose pages have been looked up, and starts to read it.
  __device__ __forceinline__ void start_block(uint4 (&codes)[kInRegisters]) {
    const int64_t page = clamp(slot_.page, 0, params_.num_pages - 1);
    const int64_t offset = page * params_.k.page_stride + slot_.offset * params_.k.token_stride;
    const uint32_t visible = __ballot_sync(~0u, slot_.offset >= 0);
    const int32_t row = threadIdx.x % 32 / 4;
#pragma unroll
    for (int group = 0; group < kGroups; ++group) {
      rows_[group] =
          static_cast<const uint8_t*>(params_.k.base) + __shfl_sync(~0u, offset, row + 8 * group) + 16 * piece_;
      columns_[group] = (visible >> (row + 8 * group) & 1) != 0 ? params_.head_dim - 16 * piece_ : 0;
    }
#pragma unroll
    for (int i = 0; i < kInRegisters; ++i) {
      codes[i] = ptx::load_global_16(rows_[i % kGroups] + column(i), column(i) < columns_[i % kGroups]);
    }
    // The rest of the row is copied a block later.
#pragma unroll
    for (int group = 0; group < kGroups; ++group) {
      if (kLine * (piece_ + 1) < columns_[group] + 16 * piece_) {
        ptx::prefetch_l2(rows_[group] + kLine + (kLine - 16) * piece_);
      }
    }
  }
  // Load `index` of a block: atom column after atom column, both groups of rows of each.

  /// Its first column for the first piece.
  static __device__ __forceinline__ int32_t column(int index) {
    return Shape::atom_column(index / kGroups) * Atom::kColumns;
  }
  /// Where it is stored, relative to the first one.
  static __device__ __forceinline__ int32_t offset(int index) {
    return Shape::atom_column(index / kGroups) * Shape::kAtomColumnBytes + index % kGroups * Atom::kBytes;
  }
  /// Converts it and stores it, and tells the compute warps after the last one of a part.
  template <bool kIsE5m2>
  __device__ __forceinline__ void convert(uint32_t to, int index, const uint4& codes, int32_t number) const {
    const uint2 a = mla::decode_four<T, Stored, kIsE5m2>(codes.x), b = mla::decode_four<T, Stored, kIsE5m2>(codes.y);
    const uint2 c = mla::decode_four<T, Stored, kIsE5m2>(codes.z), d = mla::decode_four<T, Stored, kIsE5m2>(codes.w);
    xa::ptx::store_shared_16(to + offset(index), make_uint4(a.x, a.y, b.x, b.y));
    // The swizzle puts the two chunks of a pair beside each other, in either order.
    xa::ptx::store_shared_16((to ^ 16) + offset(index), make_uint4(c.x, c.y, d.x, d.y));
#pragma unroll
    for (int part = 0; part < Shape::kParts; ++part) {
      if (index + 1 == kGroups * Shape::part_start(part + 1)) announce(number, part);
    }
  }
  /// Tells the compute warps that this warp's rows of a part of the columns are in shared memory. The fence for wgmma
  /// is theirs (Buffers::wait_for_part).
  __device__ __forceinline__ void announce(int32_t number, int part) const {
    __syncwarp();
    if (threadIdx.x % 32 == 0) buffers_.full(number, part).arrive();
  }

  const AttentionParams& params_;
  const Buffers<Shape>& buffers_;
  const WorkTile& work_;
  const int32_t piece_;  // of an atom's row of 64 bytes
  int32_t first_row_;    // of a block, of the warp
  uint32_t to_;          // where the thread stores in the first buffer
  TokenSlot slot_;       // of the lane's row; the offset of a row that no query row attends to is negative
  const uint8_t* rows_[kGroups];
  int32_t columns_[kGroups];  // from the thread's piece on; none of a row that no query row attends to
};

}  // namespace xa::hopper_mla
