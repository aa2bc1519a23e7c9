// Blocks of latent rows in shared memory: a ring of cp.async copies, and the conversion of fp8.
#pragma once

#include <cstdint>
#include <type_traits>

#include "element.cuh"
#include "fp8.cuh"
#include "mla/shape.cuh"
#include "paged_rows.cuh"
#include "params/attention.cuh"
#include "ptx.cuh"
#include "work_tile.cuh"

namespace xa::mla {

/// Streams the latent rows of a work tile through Shape::kStages stages. A block is one cp.async group. Every thread of
/// the CTA calls each function.
template <typename Shape, typename Stored>
class LatentRing {
  static_assert(Shape::kKeyGroups == 1);
  static constexpr int kStages = Shape::kStages, kKeys = Shape::kKeys;

 public:
  /// The ring is at Shape::kStagesOffset from shared address `shared`; `first` is the first key of the first block.
  __device__ __forceinline__ LatentRing(const AttentionParams& params, const WorkTile& work, uint32_t shared,
                                        int32_t first)
      : loader_(params, work),
        end_(work.keys.end),
        stages_(shared + Shape::kStagesOffset),
        next_key_(first),
        slot_(loader_.find(next_key_ + warp_key())) {}

  /// Starts to copy the next block, and commits a group even if there is none. The stage must be free.
  __device__ __forceinline__ void fetch() {
    if (next_key_ < end_) {
      const TokenSlot slot = slot_;
      const uint32_t to = address(write_stage_) + warp_key() * Shape::StoredRows::kPitch;
      loader_.load_keys(to, next_key_ + warp_key(), slot);
      next_key_ += kKeys;
      // The page of the block after is read ahead, because a look-up takes as long as a block.
      if (next_key_ < end_) slot_ = loader_.find(next_key_ + warp_key());
    }
    write_stage_ = write_stage_ + 1 == kStages ? 0 : write_stage_ + 1;
    ptx::cp_async_commit();
  }

  /// Shared address of the oldest block, which becomes the caller's: its stage is free when the next one is taken.
  __device__ __forceinline__ uint32_t take() {
    const uint32_t block = address(read_stage_);
    read_stage_ = read_stage_ + 1 == kStages ? 0 : read_stage_ + 1;
    return block;
  }

 private:
  static __device__ __forceinline__ int32_t warp_key() {
    return static_cast<int32_t>(threadIdx.x / 32) * Shape::kKeysPerLoad;
  }
  __device__ __forceinline__ uint32_t address(int32_t stage) const { return stages_ + stage * Shape::kStageBytes; }

  const RowLoader<Stored, kLatentDim, Shape::kKeysPerLoad> loader_;
  const uint32_t end_;
  const uint32_t stages_;
  uint32_t next_key_;  // of the next block; may be past the last key, and past 2^31
  TokenSlot slot_;     // of the warp's rows of the next block
  int32_t write_stage_ = 0;
  int32_t read_stage_ = 0;
};

/// Four fp8 numbers as two pairs of T. e4m3fn numbers are divided by 2^8 (fp8.cuh).
template <typename T, typename Stored, bool kIsE5m2>
__device__ __forceinline__ uint2 decode_four(uint32_t codes) {
  const TwoPairs pairs = decode_neighbours<Stored, kIsE5m2>(codes);
  const auto in_type = [](uint32_t pair) {
    if constexpr (std::is_same_v<T, F16>) {
      return pair;
    } else {
      // Exact: bf16 has the exponents of f32, and fp8 fewer bits.
      return Element<T>::pack(ptx::f16_to_f32(static_cast<uint16_t>(pair)),
                              ptx::f16_to_f32(static_cast<uint16_t>(pair >> 16)));
    }
  };
  return make_uint2(in_type(pairs.first), in_type(pairs.second));
}

/// Converts a block of fp8 rows at `from` to rows of T at `to`. Every thread of the CTA calls this.
template <typename Shape, typename T, typename Stored, bool kIsE5m2>
__device__ __forceinline__ void convert_block(const uint8_t* from, uint8_t* to) {
  constexpr int kChunks = kLatentDim / 16;
#pragma unroll 2
  for (int32_t item = threadIdx.x; item < Shape::kKeys * kChunks; item += Shape::kThreads) {
    const int32_t row = item / kChunks, chunk = item - row * kChunks;
    const uint4 codes = *reinterpret_cast<const uint4*>(from + Shape::StoredRows::offset(row, chunk));
    const uint2 a = decode_four<T, Stored, kIsE5m2>(codes.x), b = decode_four<T, Stored, kIsE5m2>(codes.y);
    const uint2 c = decode_four<T, Stored, kIsE5m2>(codes.z), d = decode_four<T, Stored, kIsE5m2>(codes.w);
    uint4* const target = reinterpret_cast<uint4*>(to + Shape::Rows::offset(row, 2 * chunk));
    target[0] = make_uint4(a.x, a.y, b.x, b.y);
    target[1] = make_uint4(c.x, c.y, d.x, d.y);
  }
}

}  // namespace xa::mla
