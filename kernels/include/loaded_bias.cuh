// The bias of scores (score_bias.cuh) in registers: each lane loads that of its own scores from where it is.
#pragma once

#include <cstdint>

#include "element.cuh"
#include "log2_units.cuh"
#include "params/bias.cuh"
#include "ptx.cuh"
#include "score_bias.cuh"
#include "work_tile.cuh"

namespace xa {

/// The bias of a lane's scores of two rows and a block of keys, as bits.
template <int kKeyTiles>
class LoadedBias {
  uint32_t bits_[2][kKeyTiles][2];

 public:
  /// Loads that of the row of a half, which is at element `row` of the bias, and of the block of keys that begins at
  /// `first_key`.
  template <typename E>
  __device__ __forceinline__ void load(const BiasSource& bias, int half, int64_t row, int32_t first_key) {
#pragma unroll
    for (int block = 0; block < kKeyTiles; ++block) {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const int32_t key = first_key + 8 * block + 2 * (ptx::opaque(threadIdx.x) % 4) + i;
        bits_[half][block][i] = has_bias(bias, row, key) ? load_bias_bits<E>(bias, row, key) : 0;
      }
    }
  }

  /// Multiplies the scores of a half by `factor` and adds the bias, multiplied by `bias_factor`.
  template <typename E>
  __device__ __forceinline__ void add(float (&scores)[kKeyTiles][4], int half, float factor, float bias_factor) const {
#pragma unroll
    for (int block = 0; block < kKeyTiles; ++block) {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        float& score = scores[block][2 * half + i];
        score = __fmaf_rn(score, factor, bias_factor * bias_of_bits<E>(bits_[half][block][i]));
      }
    }
  }
};

/// The bias of the scores of a warp of decode, whose 16 rows are all of the tile, and whose blocks of keys follow each
/// other in steps of kStep keys. With `kFetchesEarly`, which takes registers, loads have the time of a step.
template <typename T, int kKeys, int kStep, bool kFetchesEarly>
class DecodeBias {
 public:
  static constexpr bool kHasPages = false;
  __device__ __forceinline__ DecodeBias(const BiasParams& params, const WorkTile& work)
      : bias_(params.bias), work_(work) {
    const RowMap map(params.attention, work.tile, work.kv_head);
    for_halves([&](int half) {
      // Rows past the last one have the bias of that one.
      const int32_t row = min(8 * half + static_cast<int32_t>(threadIdx.x % 32 / 4), work.tile.num_rows - 1);
      rows_[half] = bias_row_index(bias_, work.tile.sequence, map.head(row), map.rows.query(row));
    });
  }

  /// Before the step of the block of keys that begins at `first_key`.
  __device__ __forceinline__ void fetch(int32_t first_key) {
    if constexpr (kFetchesEarly) load(first_key);
  }

  /// Adds the bias to logits in base 2 of the block that begins at `first_key`, and fetches that of the next block.
  __device__ __forceinline__ void add(float (&scores)[kKeys / 8][4], int32_t first_key) {
    if constexpr (!kFetchesEarly) load(first_key);
    with_bias_type<T>(bias_, [&](auto type) {
      for_halves([&](int half) { loaded_.template add<decltype(type)>(scores, half, 1.0f, kLog2E); });
    });
    fetch(first_key + kStep);
  }

 private:
  /// Calls `function(half)` for rows 0 to 7 and, unless they are past the tile's last row, for rows 8 to 15.
  template <typename Function>
  __device__ __forceinline__ void for_halves(const Function& function) const {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      if (half == 0 || work_.tile.num_rows > 8) function(half);
    }
  }

  __device__ __forceinline__ void load(int32_t first_key) {
    with_bias_type<T>(bias_, [&](auto type) {
      for_halves([&](int half) {
        loaded_.template load<decltype(type)>(bias_, half, bias_row(bias_, rows_[half]), first_key);
      });
    });
  }

  const BiasSource& bias_;
  const WorkTile& work_;
  BiasRowIndex rows_[2];
  LoadedBias<kKeys / 8> loaded_;
};

}  // namespace xa
