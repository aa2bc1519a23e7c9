// Tiles of multi-head latent attention over 8-bit caches on Hopper, and their shared memory.
//
// Blocks of 64 latent rows are in shared memory as they are stored. A load warpgroup copies them, and two compute
// warpgroups convert them to f16 in registers, as the operand of 64 rows of their products (compute.cuh). How these
// divide the work depends on how much of the output a warpgroup has registers for:
//
//   rows per tile   S and P of                             O
//   16, 32          alternate blocks, for themselves       of their blocks, merged at the end of the tile
//   64              alternate blocks, for both             each half of the value columns, of all blocks
#pragma once

#include <cstdint>

#include "hopper/pipeline.cuh"
#include "hopper/ptx.cuh"
#include "hopper/swizzle_atom.cuh"
#include "mla/shape.cuh"
#include "ptx.cuh"
#include "shared_rows.cuh"
#include "work_range.cuh"
#include "work_tile.cuh"

namespace xa::hopper_mla_fp8 {

using hopper::Barrier;
using mla::kLatentDim;
using mla::kLatentValueDim;

template <typename Config>
struct Shape : Config {
  static constexpr int kRows = Config::kRows, kKeys = Config::kKeys;
  /// Whether each compute warpgroup has a state of its own, over its blocks.
  static constexpr bool kDividesKeys = Config::kKeyGroups > 1;
  /// Compute warpgroups that share the maxima of rows, warps of these, and groups of them.
  static constexpr int kSharers = kDividesKeys ? 1 : 2, kSharerWarps = 4 * kSharers, kStates = 2 / kSharers;
  /// Value columns of a compute warpgroup.
  static constexpr int kColumns = kLatentValueDim / kSharers;
  static constexpr int kThreads = 32 * Config::kWarps, kComputeThreads = 256, kLoadThreads = kThreads - kComputeThreads;
  static constexpr int kRegisters = 232, kLoaderRegisters = 40;

  /// Q in f16: [atom column][row], 64 columns per atom.
  using Atom = hopper::SwizzleAtom<64>;
  static constexpr int kAtomColumns = kLatentDim / Atom::kColumns;
  static constexpr int kQueryAtomColumnBytes = kRows * Atom::kRowBytes;
  static constexpr int kStagesOffset = kAtomColumns * kQueryAtomColumnBytes;
  using StoredRows = SwizzledRows<kLatentDim>;
  static constexpr int kStageBytes = kKeys * StoredRows::kPitch;
  /// P of two blocks of each warpgroup, [row][key] in atoms.
  static constexpr int kPOffset = kStagesOffset + Config::kStages * kStageBytes;
  static constexpr int kPBytes = kRows * Atom::kRowBytes;
  /// [state][kSharerWarps + 2][row] f32: of each warp the maxima of a block, or at the end of a tile the sums; then the
  /// maxima so far, and the factors of what has been summed when some of them have risen.
  static constexpr int kStatesOffset = kPOffset + 4 * kPBytes;
  static constexpr int kStateBytes = (kSharerWarps + 2) * 4 * kRows;
  /// The factors of the scores of the tile's rows, f32.
  static constexpr int kFactorsOffset = kStatesOffset + kStates * kStateBytes;
  static constexpr int kWorkTileOffset = kFactorsOffset + 4 * kRows;
  static constexpr int kWorkRangeOffset = kWorkTileOffset + static_cast<int>(sizeof(WorkTile));
  static constexpr int kBarriersOffset = kWorkRangeOffset + static_cast<int>(sizeof(WorkRange));
  /// At the end of a tile, the outputs in f32 take the place of Q and of the stages: [state][row].
  static constexpr int kOutputPitch = 4 * (kLatentValueDim + 4);
  static constexpr int kAlignment = 1024;

  static_assert(kKeys == 64 && Config::kWarps == 12);
  static_assert(kStates * kRows * kOutputPitch <= kPOffset);
  static_assert(Config::kSharedBytes == kBarriersOffset + 2 * 8 * Config::kStages + kAlignment,
                "shared_bytes in variants.toml is what the launch asks for");
  static_assert(Config::kSharedBytes <= 227 * 1024);
};

/// Addresses of the buffers and mbarriers of a CTA. Blocks are numbered over all its tiles; block n has stage
/// n % kStages.
template <typename Shape>
class Buffers {
  using State = hopper::PipelineState<Shape::kStages>;

 public:
  /// `shared` is dynamic shared memory of kSharedBytes bytes. The buffers start at its first aligned address.
  __device__ __forceinline__ explicit Buffers(uint8_t* shared) {
    const uint32_t address = xa::ptx::shared_address(shared), unaligned = -address % Shape::kAlignment;
    shared_ = shared + unaligned;
    address_ = address + unaligned;
  }
  /// Called by a warp, whose lanes initialise a barrier each; __syncthreads must follow.
  __device__ __forceinline__ void init(int32_t lane) const {
    if (lane < 2 * Shape::kStages) {
      const uint32_t arrivals = lane < Shape::kStages ? Shape::kLoadThreads : Shape::kSharerWarps;
      hopper::ptx::mbarrier_init(address_ + Shape::kBarriersOffset + 8 * lane, arrivals);
    }
    hopper::ptx::fence_mbarrier_init();
  }

  /// The load threads' copies of a block are complete.
  __device__ __forceinline__ Barrier full(int32_t number) const { return barrier(0, number); }
  /// The warps that attend to a block have read it.
  __device__ __forceinline__ Barrier empty(int32_t number) const { return barrier(Shape::kStages, number); }

  __device__ __forceinline__ uint32_t query() const { return address_; }
  __device__ __forceinline__ uint32_t stage(int32_t number) const {
    return address_ + Shape::kStagesOffset + State(number).stage * Shape::kStageBytes;
  }
  /// P of the block with index `index` among those of a warpgroup.
  __device__ __forceinline__ uint32_t p(int group, int32_t index) const {
    return address_ + Shape::kPOffset + (2 * group + index % 2) * Shape::kPBytes;
  }
  /// f32 [kSharerWarps + 2, kRows]
  __device__ __forceinline__ float* state(int index) const {
    return reinterpret_cast<float*>(shared_ + Shape::kStatesOffset + index * Shape::kStateBytes);
  }
  /// f32 [kRows]
  __device__ __forceinline__ float* row_factors() const {
    return reinterpret_cast<float*>(shared_ + Shape::kFactorsOffset);
  }
  /// A row of the output of a state.
  __device__ __forceinline__ float* output(int state, int32_t row) const {
    return reinterpret_cast<float*>(shared_ + (state * Shape::kRows + row) * Shape::kOutputPitch);
  }
  __device__ __forceinline__ WorkTile& work_tile() const {
    return *reinterpret_cast<WorkTile*>(shared_ + Shape::kWorkTileOffset);
  }
  __device__ __forceinline__ WorkRange& work_range() const {
    return *reinterpret_cast<WorkRange*>(shared_ + Shape::kWorkRangeOffset);
  }

 private:
  __device__ __forceinline__ Barrier barrier(int first, int32_t number) const {
    const State state(number);
    return Barrier{address_ + Shape::kBarriersOffset + 8 * (first + state.stage), state.phase};
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

}  // namespace xa::hopper_mla_fp8
