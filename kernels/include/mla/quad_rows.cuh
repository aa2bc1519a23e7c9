// Blocks of 8-bit latent rows in shared memory for groups of warps that have four lanes per row of a block: a copy is
// one instruction with constant offsets, where latent_rows.cuh takes ten.
#pragma once

#include <cstdint>

#include "mla/shape.cuh"
#include "paged_rows.cuh"
#include "params/attention.cuh"
#include "ptx.cuh"
#include "work_tile.cuh"

namespace xa::mla {

/// As LatentRing, for rows of multiples of 16 bytes at addresses of 16 bytes. A lane copies every fourth 16 bytes of
/// its row.
template <typename Shape, typename Stored>
class QuadRing {
  static constexpr int kStages = Shape::kStages, kBytes = 64, kCopies = kLatentDim / kBytes;
  static_assert(sizeof(Stored) == 1 && 8 * Shape::kGroupWarps == Shape::kKeys && kLatentDim % kBytes == 0);

 public:
  /// `group` is the shared address of what the group has, less Shape::kStagesOffset; `first` is the first key of its
  /// first block.
  __device__ __forceinline__ QuadRing(const AttentionParams& params, const WorkTile& work, uint32_t group,
                                      int32_t first)
      : params_(params), work_(work), begin_(work.keys.begin), end_(work.keys.end), next_key_(first) {
    const int32_t thread = static_cast<int32_t>(threadIdx.x) % (32 * Shape::kGroupWarps);
    // Rows r and r + 4, which eight lanes have, do not share banks.
    row_ = thread / 32 * 8 + thread / 8 % 4 + thread / 4 % 2 * 4;
    column_ = 16 * (thread % 4);
    stages_ = group + Shape::kStagesOffset + row_ * Shape::StoredRows::kPitch + column_;
    find();
  }

  /// Starts to copy the next block, and commits a group even if there is none. The stage must be free.
  __device__ __forceinline__ void fetch() {
    if (next_key_ < end_) {
      const uint32_t to = stages_ + write_stage_ * Shape::kStageBytes;
      const int64_t page = clamp(slot_.page, 0, params_.num_pages - 1);
      const Stored* const from = static_cast<const Stored*>(params_.k.base) + page * params_.k.page_stride +
                                 slot_.offset * params_.k.token_stride;
      const bool visible = is_visible_;
      if (params_.head_dim == kLatentDim) {
#pragma unroll
        for (int i = 0; i < kCopies; ++i) ptx::cp_async_16(to + kBytes * i, from + column_ + kBytes * i, visible);
      } else {
#pragma unroll 1
        for (int i = 0; i < kCopies; ++i) {
          const int32_t column = column_ + kBytes * i;
          const bool inside = column < params_.head_dim;
          ptx::cp_async_16(to + kBytes * i, from + (inside ? column : 0), visible && inside);
        }
      }
      next_key_ += Shape::kKeys * Shape::kKeyGroups;
      // The page of the block after is read ahead, because a look-up takes as long as a block.
      find();
    }
    write_stage_ = write_stage_ + 1 == kStages ? 0 : write_stage_ + 1;
    ptx::cp_async_commit();
  }

  /// As LatentRing::take.
  __device__ __forceinline__ uint32_t take() {
    const uint32_t block = stages_ - row_ * Shape::StoredRows::kPitch - column_ + read_stage_ * Shape::kStageBytes;
    read_stage_ = read_stage_ + 1 == kStages ? 0 : read_stage_ + 1;
    return block;
  }

 private:
  /// Looks up the lane's row of the block at next_key_.
  __device__ __forceinline__ void find() {
    const uint32_t key = next_key_ + row_;
    // Entries of the block table of pages without a visible key may be invalid.
    is_visible_ = key >= begin_ && key < end_;
    slot_ = is_visible_ ? slot_of(params_, work_.tile, key) : TokenSlot{0, 0};
  }

  const AttentionParams& params_;
  const WorkTile& work_;
  const uint32_t begin_;
  const uint32_t end_;
  uint32_t next_key_;  // of the next block; may be past the last key, and past 2^31
  uint32_t stages_;    // the address of the lane's part of its row of stage 0
  int32_t row_;
  int32_t column_;
  TokenSlot slot_;  // of the lane's row of the next block
  bool is_visible_;
  int32_t write_stage_ = 0;
  int32_t read_stage_ = 0;
};

}  // namespace xa::mla
