// The tile of multi-head latent attention on Hopper, and its shared memory.
//
// A CTA has 64 packed rows, two buffers of 64 latent rows, two compute warpgroups and a load warpgroup. Each compute
// warpgroup has half of the output's columns. The left one computes the scores, and passes P on.
//
// A tile has the rows of one CTA, or of a cluster of two, which attend to the same keys: TMA of each CTA writes half of
// the rows of a block to both.
#pragma once

#include <cstdint>

#include "element.cuh"
#include "hopper/cluster_ptx.cuh"
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
  /// Packed rows of a tile and of a CTA.
  static constexpr int kTileRows = Config::kRows, kRows = 64, kKeys = Config::kKeys;
  /// CTAs of a cluster.
  static constexpr int kCtas = kTileRows / kRows;
  static constexpr int kThreads = 32 * Config::kWarps, kComputeThreads = kThreads - 128;
  /// Load warps of each buffer, and the rows of a block that one of them copies.
  static constexpr int kLoadWarps = 2, kKeysPerLoad = kKeys / kLoadWarps;
  /// Rows of a block that TMA of one CTA loads.
  static constexpr int kKeysPerCta = kKeys / kCtas;
  /// Value columns of a compute warpgroup.
  static constexpr int kColumns = kLatentValueDim / 2;
  static constexpr int kRegisters = 224, kLoaderRegisters = 56;

  /// Q and the blocks: [atom column][row], 64 columns per atom.
  using Atom = hopper::SwizzleAtom<64>;
  static constexpr int kAtomColumns = kLatentDim / Atom::kColumns, kAtomColumnsPerHalf = kColumns / Atom::kColumns;
  static constexpr int kAtomColumnBytes = kKeys * Atom::kRowBytes;
  static constexpr int kBlockBytes = kAtomColumns * kAtomColumnBytes;
  /// The atom columns of a block in the order of their loads, as parts that each have a barrier: the left value columns
  /// with those that are of keys only, then the right value columns. Each half is two parts.
  static constexpr int kParts = 4;
  static __device__ constexpr int part_start(int part) { return part < 2 ? 2 * part : 2 * part + 1; }
  static __device__ constexpr int atom_column(int index) {
    return index < kAtomColumnsPerHalf ? index : index == kAtomColumnsPerHalf ? kAtomColumns - 1 : index - 1;
  }
  static constexpr int kBlocksOffset = kBlockBytes;
  /// P of a block as the threads of a warpgroup have it, then the maxima of their rows. A thread of the left warpgroup
  /// passes them to the thread of the right one that has the same rows.
  static constexpr int kPOffset = kBlocksOffset + 2 * kBlockBytes;
  static constexpr int kMaximaOffset = kPOffset + 128 * 64;
  static constexpr int kWorkTileOffset = kMaximaOffset + 128 * 8;
  /// The cluster's work tile, then in a cluster the CTA's rows of it.
  static constexpr int kCtaTileOffset = kWorkTileOffset + (kCtas > 1 ? static_cast<int>(sizeof(WorkTile)) : 0);
  static constexpr int kWorkRangeOffset = kCtaTileOffset + static_cast<int>(sizeof(WorkTile));
  static constexpr int kBarriersOffset = kWorkRangeOffset + static_cast<int>(sizeof(WorkRange));
  /// The mbarriers: full ones of the parts of two blocks, then empty ones of the halves of two blocks, then those of P.
  static constexpr int kEmptyBarriers = 2 * kParts, kPBarriers = kEmptyBarriers + 4, kBarriers = kPBarriers + 2;
  /// At the end of a tile, the output in f32 takes the place of the blocks, and sums and maxima that of P.
  static constexpr int kOutputPitch = 4 * (kLatentValueDim + 4);
  static constexpr int kAlignment = 1024;

  static_assert(kTileRows == kCtas * kRows && kCtas <= 2 && kKeys == 64);
  static_assert(Config::kWarps == 12 && Config::kStages == 2);
  static_assert(kRows * kOutputPitch <= 2 * kBlockBytes);
  static_assert(Config::kSharedBytes == kBarriersOffset + kBarriers * 8 + kAlignment,
                "shared_bytes in variants.toml is what the launch asks for");
  static_assert(Config::kSharedBytes <= 227 * 1024);
};

/// Addresses of the buffers and mbarriers of a CTA. Blocks are numbered over all its tiles; block n has buffer n % 2.
template <typename Shape>
class Buffers {
 public:
  /// `shared` is dynamic shared memory of kSharedBytes bytes. The buffers start at its first aligned address.
  __device__ __forceinline__ explicit Buffers(uint8_t* shared) {
    const uint32_t address = xa::ptx::shared_address(shared), unaligned = -address % Shape::kAlignment;
    shared_ = shared + unaligned;
    address_ = address + unaligned;
  }
  /// Called by a warp, whose lanes initialise a barrier each; __syncthreads must follow.
  __device__ __forceinline__ void init(int32_t lane) const {
    if (lane < Shape::kBarriers) {
      const uint32_t arrivals = lane < Shape::kEmptyBarriers ? Shape::kLoadWarps
                                : lane < Shape::kPBarriers   ? 4 * Shape::kCtas
                                                             : 4;
      hopper::ptx::mbarrier_init(barrier(lane, 0).address, arrivals);
    }
    hopper::ptx::fence_mbarrier_init();
  }

  /// Part `part` of a block is loaded.
  __device__ __forceinline__ Barrier full(int32_t block, int part) const {
    return barrier(Shape::kParts * (block % 2) + part, block / 2);
  }
  /// The warpgroup of a half of the value columns has read them, in all CTAs of the cluster. By then the scores of the
  /// block have been computed.
  __device__ __forceinline__ Barrier empty(int32_t block, int half) const {
    return barrier(Shape::kEmptyBarriers + 2 * (block % 2) + half, block / 2);
  }
  /// A warp of that warpgroup has read them.
  __device__ __forceinline__ void release(int32_t block, int half) const {
    if (threadIdx.x % 32 != 0) return;
    const Barrier barrier = empty(block, half);
    if constexpr (Shape::kCtas == 1) {
      barrier.arrive();
    } else {
#pragma unroll
      for (int rank = 0; rank < Shape::kCtas; ++rank) hopper::ptx::mbarrier_arrive_at_rank(barrier.address, rank);
    }
  }
  /// P of a block is in shared memory.
  __device__ __forceinline__ Barrier p_full(int32_t block) const { return barrier(Shape::kPBarriers, block); }
  /// The right warpgroup has read it.
  __device__ __forceinline__ Barrier p_empty(int32_t block) const { return barrier(Shape::kPBarriers + 1, block); }

  __device__ __forceinline__ uint32_t query() const { return address_; }
  __device__ __forceinline__ uint32_t buffer(int buffer) const {
    return address_ + Shape::kBlocksOffset + buffer * Shape::kBlockBytes;
  }
  __device__ __forceinline__ uint8_t* output() const { return shared_ + Shape::kBlocksOffset; }
  /// f32 [kRows] sums, then [kRows] maxima.
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
  /// The CTA's rows of the work tile; may be none.
  __device__ __forceinline__ WorkTile& cta_tile() const {
    return *reinterpret_cast<WorkTile*>(shared_ + Shape::kCtaTileOffset);
  }
  /// Sets them. One thread calls this; a barrier must follow.
  __device__ __forceinline__ void set_cta_tile() const {
    if constexpr (Shape::kCtas > 1) {
      const int32_t first = cta_rank() * Shape::kRows;
      WorkTile& tile = cta_tile();
      copy_work(tile, work_tile());
      tile.tile.first_row += first;
      tile.tile.num_rows = clamp(tile.tile.num_rows - first, 0, Shape::kRows);
    }
  }
  static __device__ __forceinline__ int32_t cta_rank() { return static_cast<int32_t>(blockIdx.y) % Shape::kCtas; }
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

/// Waits for all threads of the CTA. Not __syncthreads, which all of them would have to call at the same place: load
/// and compute warps wait in loops of their own.
template <typename Shape>
__device__ __forceinline__ void sync_cta() {
  hopper::ptx::named_barrier_sync(2, Shape::kThreads);
}

/// Waits for all threads of the cluster. What they have stored is visible then.
template <typename Shape>
__device__ __forceinline__ void sync_cluster() {
  if constexpr (Shape::kCtas == 1) {
    sync_cta<Shape>();
  } else {
    xa::ptx::cluster_arrive();
    xa::ptx::cluster_wait();
  }
}

}  // namespace xa::hopper_mla
