// The tile of multi-head latent attention on Hopper, and its shared memory.
//
// A CTA has 64 packed rows, two buffers of 64 latent rows, two compute warpgroups and a load warpgroup. Each compute
// warpgroup has half of the output's columns. They take turns in computing scores: the first one those of even blocks,
// the second one those of odd blocks, and each passes P on.
#pragma once

#include <cstdint>

#include "element.cuh"
#include "hopper/pipeline.cuh"
#include "hopper/ptx.cuh"
#include "hopper/swizzle_atom.cuh"
#include "mla/shape.cuh"
#include "ptx.cuh"
#include "tiles/mla.cuh"
#include "work_range.cuh"
#include "work_tile.cuh"

namespace xa::hopper_mla {

using hopper::Barrier;
using hopper::PipelineState;
using mla::kLatentDim;
using mla::kLatentValueDim;

template <typename Config>
struct Shape : Config {
  static constexpr int kRows = Config::kRows, kKeys = Config::kKeys;
  static constexpr int kThreads = 32 * Config::kWarps, kComputeThreads = kThreads - 128;
  /// Load warps of each buffer, and the rows of a block that one of them copies.
  static constexpr int kLoadWarps = 2, kKeysPerLoad = kKeys / kLoadWarps;
  /// Value columns of a compute warpgroup.
  static constexpr int kColumns = kLatentValueDim / 2;
  static constexpr int kRegisters = 224, kLoaderRegisters = 56;

  /// Q and the blocks: [atom column][row], 64 columns per atom.
  using Atom = hopper::SwizzleAtom<64>;
  static constexpr int kAtomColumns = kLatentDim / Atom::kColumns, kAtomColumnsPerHalf = kColumns / Atom::kColumns;
  static constexpr int kAtomColumnBytes = kKeys * Atom::kRowBytes;
  static constexpr int kBlockBytes = kAtomColumns * kAtomColumnBytes;
  static constexpr int kBlocksOffset = kBlockBytes;
  /// P of a block as the threads of a warpgroup have it, then the maxima of their rows. A thread of one warpgroup
  /// passes them to the thread of the other one that has the same rows.
  static constexpr int kPOffset = kBlocksOffset + 2 * kBlockBytes;
  static constexpr int kMaximaOffset = kPOffset + 128 * 64;
  static constexpr int kWorkTileOffset = kMaximaOffset + 128 * 8;
  static constexpr int kWorkRangeOffset = kWorkTileOffset + static_cast<int>(sizeof(WorkTile));
  static constexpr int kBarriersOffset = kWorkRangeOffset + static_cast<int>(sizeof(WorkRange));
  /// At the end of a tile, the output in f32 takes the place of the blocks, and sums and maxima that of P.
  static constexpr int kOutputPitch = 4 * (kLatentValueDim + 4);
  static constexpr int kAlignment = 1024;

  static_assert(kRows == 64 && kKeys == 64 && kKeysPerLoad == 32 && Config::kWarps == 12 && Config::kStages == 2);
  static_assert(kRows * kOutputPitch <= 2 * kBlockBytes);
  static_assert(Config::kSharedBytes == kBarriersOffset + 10 * 8 + kAlignment,
                "shared_bytes in variants.toml is what the launch asks for");
  static_assert(Config::kSharedBytes <= 227 * 1024);
};

/// Addresses of the buffers and mbarriers of a CTA. Uses of a buffer are counted over all tiles.
template <typename Shape>
class Buffers {
 public:
  /// `shared` is dynamic shared memory of kSharedBytes bytes. The buffers start at its first aligned address.
  __device__ __forceinline__ explicit Buffers(uint8_t* shared) {
    const uint32_t address = xa::ptx::shared_address(shared), unaligned = -address % Shape::kAlignment;
    shared_ = shared + unaligned;
    address_ = address + unaligned;
  }
  /// Called by one thread; __syncthreads must follow.
  __device__ __forceinline__ void init() const {
    for (int buffer = 0; buffer < 2; ++buffer) {
      for (int half = 0; half < 2; ++half) {
        hopper::ptx::mbarrier_init(full(buffer, half, 0).address, Shape::kLoadWarps);
        hopper::ptx::mbarrier_init(empty(buffer, half, 0).address, 4);
      }
      hopper::ptx::mbarrier_init(p_full(buffer, 0).address, 4);
    }
    hopper::ptx::fence_mbarrier_init();
  }

  /// A half of the columns of the block that is use `count` of a buffer is loaded: 0 is the left value columns and
  /// those that are of keys only, 1 the right value columns.
  __device__ __forceinline__ Barrier full(int buffer, int half, int32_t count) const {
    return barrier(2 * buffer + half, count);
  }
  /// The warpgroup of those value columns has read them. By then the scores of the block have been computed.
  __device__ __forceinline__ Barrier empty(int buffer, int half, int32_t count) const {
    return barrier(4 + 2 * buffer + half, count);
  }
  /// P of that block is in shared memory.
  __device__ __forceinline__ Barrier p_full(int buffer, int32_t count) const { return barrier(8 + buffer, count); }

  __device__ __forceinline__ uint32_t query() const { return address_; }
  __device__ __forceinline__ uint32_t block(int buffer) const {
    return address_ + Shape::kBlocksOffset + buffer * Shape::kBlockBytes;
  }
  __device__ __forceinline__ uint8_t* output() const { return shared_ + Shape::kBlocksOffset; }
  /// f32 [2, kRows] sums of the warpgroups, then [kRows] maxima.
  __device__ __forceinline__ float* row_states() const { return reinterpret_cast<float*>(shared_ + Shape::kPOffset); }
  /// [4][128]
  __device__ __forceinline__ uint4* p() const { return reinterpret_cast<uint4*>(shared_ + Shape::kPOffset); }
  /// [128]
  __device__ __forceinline__ float2* maxima() const {
    return reinterpret_cast<float2*>(shared_ + Shape::kMaximaOffset);
  }
  __device__ __forceinline__ WorkTile& work_tile() const {
    return *reinterpret_cast<WorkTile*>(shared_ + Shape::kWorkTileOffset);
  }
  __device__ __forceinline__ WorkRange& work_range() const {
    return *reinterpret_cast<WorkRange*>(shared_ + Shape::kWorkRangeOffset);
  }

 private:
  __device__ __forceinline__ Barrier barrier(int index, int32_t count) const {
    return Barrier{address_ + Shape::kBarriersOffset + 8 * index, static_cast<uint32_t>(count & 1)};
  }

  uint8_t* shared_;
  uint32_t address_;
};

/// Uses of the two buffers so far, the same in all warps.
struct BufferCounts {
  int32_t even = 0;
  int32_t odd = 0;
};

}  // namespace xa::hopper_mla
