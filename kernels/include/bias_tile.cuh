// The bias of a tile of prefill (score_bias.cuh): staged in shared memory, added to scores.
//
// Each warp stages the bias of its own rows and the next block of keys between the parts of the product P V, when it
// has added that of this block, so one buffer is enough. All copies at once would keep the product's operands waiting
// behind them.
//
// A row that does not begin with a chunk has one chunk more than a block: its last one is the first one of the next
// block, and is copied within shared memory.
//
//     block i      [ 0 | 1 | 2 | ... | n ]
//     block i + 1                  [ 0 | 1 | 2 | ... | n ]
//
// Rows of 1024 bytes leave no shared memory on GPUs that have 99 KB: their bias is loaded into registers.
#pragma once

#include <cmath>
#include <cstdint>
#include <type_traits>

#include "column_warps.cuh"
#include "element.cuh"
#include "loaded_bias.cuh"
#include "log2_units.cuh"
#include "logits_transform.cuh"
#include "params/attention.cuh"
#include "params/bias.cuh"
#include "ptx.cuh"
#include "score_bias.cuh"
#include "work_tile.cuh"

namespace xa {

/// Reads adjacent entries of a table.
template <int kCount>
__device__ __forceinline__ void load_adjacent(uint32_t (&entries)[kCount], const uint32_t* from) {
  static_assert(kCount == 2 || kCount == 4);
  if constexpr (kCount == 4) {
    const uint4 four = *reinterpret_cast<const uint4*>(from);
    entries[0] = four.x, entries[1] = four.y, entries[2] = four.z, entries[3] = four.w;
  } else {
    const uint2 two = *reinterpret_cast<const uint2*>(from);
    entries[0] = two.x, entries[1] = two.y;
  }
}

/// Copies of a block of keys of a warp's kRows rows, of which each has a bias, by whole chunks: kChunks of a row, and
/// one more if it does not begin with one.
template <typename E, int kRows, int kChunks>
class BiasCopies {
  // Adjacent lanes copy adjacent chunks, because an LDGSTS takes a cycle for each 128 bytes that it touches.
  static constexpr int kLaneRows = kRows * kChunks / 32, kGroupRows = kLaneRows < 4 ? kLaneRows : 4;
  static constexpr int kPitch = 16 * (kChunks + 1);
  static_assert(32 % kChunks == 0 && kLaneRows % kGroupRows == 0);

 public:
  static constexpr int kGroups = kLaneRows / kGroupRows;

  /// `table` has the warp's rows of the bias, and `staged` room for them.
  __device__ __forceinline__ BiasCopies(const BiasSource& bias, const uint32_t* table, uint8_t* staged, int32_t lane,
                                        int32_t first_key)
      : table_(table),
        staged_(staged),
        lane_(lane),
        row_bytes_(static_cast<uint32_t>(bias.keys) * static_cast<uint32_t>(sizeof(E))),
        data_(reinterpret_cast<uint64_t>(bias.data) + static_cast<uint64_t>(first_key) * sizeof(E)) {}

  /// Starts to copy each row's first chunk, if it has one more than kChunks.
  __device__ __forceinline__ void copy_first() const {
    if (has_one_more() && lane_ < kRows) copy(table_[lane_], 0, ptx::shared_address(staged_ + lane_ * kPitch), true);
  }
  /// The same where the block before is staged. All lanes have read it.
  __device__ __forceinline__ void carry_first() const {
    if (!has_one_more()) return;
    if (lane_ < kRows) {
      uint4* const chunks = reinterpret_cast<uint4*>(staged_ + lane_ * kPitch);
      chunks[0] = chunks[kChunks];
    }
    __syncwarp();
  }
  /// Starts to copy the others of a group of rows, if `exist`.
  __device__ __forceinline__ void copy_group(int group, bool exist) const {
    const int32_t first_row = lane_ / kChunks * kLaneRows + group * kGroupRows;
    const uint32_t column = (has_one_more() ? 16 : 0) + lane_ % kChunks * 16;
    const uint32_t to = ptx::shared_address(staged_ + first_row * kPitch) + column;
    // All rows first: ptxas puts three instructions between loads from shared memory and a copy.
    uint32_t rows[kGroupRows];
    load_adjacent(rows, table_ + first_row);
#pragma unroll
    for (int i = 0; i < kGroupRows; ++i) copy(rows[i], column, to + i * kPitch, exist);
  }

 private:
  __device__ __forceinline__ bool has_one_more() const { return row_bytes_ % 16 != 0; }
  __device__ __forceinline__ void copy(uint32_t row, uint32_t column, uint32_t to, bool exists) const {
    const uint64_t from = (data_ + column + static_cast<uint64_t>(row) * row_bytes_) & ~uint64_t{15};
    if (exists) ptx::cp_async_16(to, reinterpret_cast<const void*>(from), true);
  }

  const uint32_t* table_;
  uint8_t* staged_;
  int32_t lane_;
  uint32_t row_bytes_;
  uint64_t data_;
};

/// The bias of the rows of a tile of prefill. In shared memory it has, after Shape::kSharedBytes, two tables of the
/// tile's rows. Where there is room, a number for each warp and the staged rows follow.
template <typename Shape, typename T>
class BiasTile {
  /// Rows of a warp, and those of a lane: row g of each 8 is of lanes 4g to 4g + 3, as in the scores.
  static constexpr int kWarpRows = 16 * Shape::kRowTiles, kLaneRows = kWarpRows / 8, kKeyTiles = Shape::kKeys / 8;
  static constexpr int kStagedOffset = 8 * Shape::kRows + 16;
  static constexpr bool kStages =
      Shape::kSharedBytes + kStagedOffset + Shape::kRows * (Shape::kKeys * static_cast<int>(sizeof(T)) + 16) <=
      99 * 1024;
  /// Elements of a chunk, and chunks of a row's part that begins with one.
  template <typename E>
  static constexpr int kElements = 16 / static_cast<int>(sizeof(E));
  template <typename E>
  static constexpr int kChunks = Shape::kKeys / kElements<E>;
  template <typename E>
  static constexpr int kPitch = 16 * (kChunks<E> + 1);
  static_assert(Shape::kStages == 1, "the next block is staged when this one has been computed");
  static_assert(Shape::kRows / kWarpRows <= 4);

 public:
  /// Whether each warp stages the next block of the rows that it alone reads during the product P V.
  static constexpr bool kStagesByWarps = kStages && Shape::kColumnWarps == 1;

  /// Each warp finds its own rows, which begin at row `warp_row` of the tile; of warps with the same rows the first
  /// one.
  __device__ __forceinline__ BiasTile(const AttentionParams& params, const BiasSource& bias, const WorkTile& work,
                                      int32_t warp_row, uint8_t* shared)
      : bias_(bias), shared_(shared + Shape::kSharedBytes) {
    if (first_warp_column<Shape>() == 0) {
      with_bias_type<T>(bias, [&](auto type) { find_rows<decltype(type)>(params, work, warp_row); });
    }
    if constexpr (kStages || Shape::kColumnWarps == 1) {
      __syncwarp();
    } else {
      __syncthreads();  // All warps of the rows load their bias.
    }
  }

  /// Starts to stage the bias of the block of keys that begins at `first_key`, in the next cp.async group, or to load
  /// it. All lanes have read the block before, if it is not the tile's first one.
  template <bool kIsFirst>
  __device__ __forceinline__ void fetch(int32_t first_key) {
    with_bias_type<T>(bias_, [&](auto type) {
      using E = decltype(type);
      const Place place;
      if constexpr (!kStages) {
        for_lane_rows([&](int tile, int half) {
          const int64_t row = bias_row(bias_, table()[place.row_of(tile, half)]);
          loaded_[tile].template load<E>(bias_, half, row, first_key);
        });
      } else if (first_warp_column<Shape>() == 0) {
        if (first_key > whole_until(place.row)) return stage_chunks<E>(place, first_key);
        const auto copies = copies_of<E>(place, first_key);
        if constexpr (kIsFirst) {
          copies.copy_first();
        } else {
          copies.carry_first();
        }
#pragma unroll
        for (int group = 0; group < copies.kGroups; ++group) copies.copy_group(group, true);
      }
    });
  }
  /// The same during `multiply(between)`, which calls `between(i, n)` after part i of n; nothing but the product unless
  /// the block `exists`.
  template <typename Multiply>
  __device__ __forceinline__ void fetch_between(int32_t first_key, bool exists, const Multiply& multiply) const {
    with_bias_type<T>(bias_, [&](auto type) {
      using E = decltype(type);
      const Place place;
      const auto copies = copies_of<E>(place, first_key);
      const bool is_whole = exists && first_key <= whole_until(place.row);
      if (exists) {
        __syncwarp();  // All lanes have read the block before.
        if (is_whole) {
          copies.carry_first();
        } else {
          stage_chunks<E>(place, first_key);
        }
      }
      multiply([&](int part, int parts) {
#pragma unroll
        for (int group = 0; group < copies.kGroups; ++group) {
          if (group * parts / copies.kGroups == part) copies.copy_group(group, is_whole);
        }
      });
    });
  }

  /// Multiplies the scores of the block by `factor` and adds the bias. It has been fetched, and the CTA's threads have
  /// passed a barrier since.
  __device__ __forceinline__ void add(float (&scores)[Shape::kRowTiles][kKeyTiles][4], float factor) const {
    with_bias_type<T>(bias_, [&](auto type) {
      using E = decltype(type);
      const auto add_pair = [&](float (&score)[4], int half, float2 pair) {
        score[2 * half] = __fmaf_rn(score[2 * half], factor, pair.x);
        score[2 * half + 1] = __fmaf_rn(score[2 * half + 1], factor, pair.y);
      };
      const auto add_staged = [&](auto is_aligned) {
        const Place place;
        uint32_t begins[kLaneRows];
        load_adjacent(begins, begins_of_rows() + place.row + place.lane / 4 * kLaneRows);
        for_lane_rows([&](int tile, int half) {
          const E* const from = reinterpret_cast<const E*>(staged() + begins[2 * tile + half]) + 2 * (place.lane % 4);
#pragma unroll
          for (int block = 0; block < kKeyTiles; ++block) {
            add_pair(scores[tile][block], half, load_bias_pair<decltype(is_aligned)::value>(from + 8 * block));
          }
        });
      };
      if constexpr (!kStages) {
        for_lane_rows([&](int tile, int half) { loaded_[tile].template add<E>(scores[tile], half, factor, 1.0f); });
      } else if (bias_.keys % 2 == 0) {
        add_staged(std::true_type{});
      } else {
        add_staged(std::false_type{});
      }
    });
  }

 private:
  /// The warp's first row, and the lane. They are computed again at each use, because registers are scarcest here.
  struct Place {
    int32_t row;
    int32_t lane;
    __device__ __forceinline__ Place() {
      const int32_t thread = ptx::opaque(threadIdx.x);
      row = thread / (32 * Shape::kColumnWarps) * kWarpRows;
      lane = thread % 32;
    }
    __device__ __forceinline__ int32_t row_of(int tile, int half) const {
      return row + 16 * tile + 8 * half + lane / 4;
    }
  };

  /// The row of the bias of each row of the tile.
  __device__ __forceinline__ uint32_t* table() const { return reinterpret_cast<uint32_t*>(shared_); }
  /// Where in `staged` each row begins, at its shift among its chunks; those of a lane are adjacent.
  __device__ __forceinline__ uint32_t* begins_of_rows() const { return table() + Shape::kRows; }
  /// Up to this first key of a block the chunks of the warp's rows are copied without a test of each.
  __device__ __forceinline__ int32_t& whole_until(int32_t warp_row) const {
    return reinterpret_cast<int32_t*>(table() + 2 * Shape::kRows)[warp_row / kWarpRows];
  }
  __device__ __forceinline__ uint8_t* staged() const { return shared_ + kStagedOffset; }

  template <typename E>
  __device__ __forceinline__ BiasCopies<E, kWarpRows, kChunks<E>> copies_of(const Place& place,
                                                                            int32_t first_key) const {
    return {bias_, table() + place.row, staged() + place.row * kPitch<E>, place.lane, first_key};
  }

  template <typename E>
  __device__ __forceinline__ void find_rows(const AttentionParams& params, const WorkTile& work, int32_t warp_row) {
    const RowMap map(params, work.tile, work.kv_head);
    // Rows past the last one have the bias of that one, so that copies need no test of them.
    const int32_t index = threadIdx.x % 32 % kWarpRows, row = min(warp_row + index, work.tile.num_rows - 1);
    const int32_t query = map.rows.query(row);
    const BiasRowIndex bias_index = bias_row_index(bias_, work.tile.sequence, map.head(row), query);
    table()[warp_row + index] = bias_index;
    if constexpr (kStages) {
      const uint32_t shift = static_cast<uint32_t>(bias_row(bias_, bias_index)) & (kElements<E> - 1);
      begins_of_rows()[warp_row + index % 8 * kLaneRows + index / 8] =
          (warp_row + index) * kPitch<E> + shift * static_cast<uint32_t>(sizeof(E));
      // Chunks past the end of a row may be read if another row follows and no key past the end counts.
      const int32_t more = bias_.keys % kElements<E> == 0 ? 0 : kElements<E>;
      const bool may_pass_end =
          query < bias_.rows - 1 && work.keys.end <= bias_.keys && bias_.keys >= Shape::kKeys + more;
      int32_t until = may_pass_end ? INT32_MAX : bias_.keys - Shape::kKeys - more;
      if (bias_index == kNoBiasRow || bias_.keys >= INT32_MAX / static_cast<int>(sizeof(E))) until = INT32_MIN;
#pragma unroll
      for (int step = 16; step > 0; step /= 2) until = min(until, __shfl_xor_sync(~0u, until, step));
      whole_until(warp_row) = until;
    }
  }

  /// Calls `visit(tile, half)` for each of the lane's rows.
  template <typename Visit>
  static __device__ __forceinline__ void for_lane_rows(const Visit& visit) {
#pragma unroll
    for (int tile = 0; tile < Shape::kRowTiles; ++tile) {
#pragma unroll
      for (int half = 0; half < 2; ++half) visit(tile, half);
    }
  }

  /// Stages a block with a test of each chunk.
  template <typename E>
  __device__ __forceinline__ void stage_chunks(const Place& place, int32_t first_key) const {
#pragma unroll 1
    for (int32_t row = place.row + place.lane / 4; row < place.row + kWarpRows; row += 8) {
      const int64_t begin = bias_row(bias_, table()[row]);
#pragma unroll 1
      for (int32_t chunk = place.lane % 4; chunk <= kChunks<E>; chunk += 4) {
        stage_bias_chunk<E>(bias_, staged() + row * kPitch<E>, begin, first_key, chunk);
      }
    }
  }

  const BiasSource& bias_;
  uint8_t* const shared_;
  LoadedBias<kKeyTiles> loaded_[Shape::kRowTiles];  // unless kStages: of the fetched block
};

/// Softmax scale, soft cap and ALiBi, then the bias: scores become logits.
template <typename Shape, typename T>
struct logits_bias : logits_softcap_alibi {
  static constexpr bool kFetchesByWarps = BiasTile<Shape, T>::kStagesByWarps;
  BiasTile<Shape, T>& bias_;

  __device__ __forceinline__ logits_bias(const AttentionParams& params, BiasTile<Shape, T>& bias)
      : logits_softcap_alibi(params), bias_(bias) {}

  __device__ __forceinline__ float log2_unit() const { return kLog2E; }
  /// Starts to load what the block of keys from `first_key` on needs.
  template <bool kIsFirst>
  __device__ __forceinline__ void fetch_block(int32_t first_key) const {
    bias_.template fetch<kIsFirst>(first_key);
  }
  template <typename Multiply>
  __device__ __forceinline__ void fetch_block_between(int32_t first_key, bool exists, const Multiply& multiply) const {
    bias_.fetch_between(first_key, exists, multiply);
  }
  /// Transforms the scores of all of the warp's rows, which begin at row `warp_row` of the tile. Soft cap and ALiBi
  /// come first, in base 2. Without them one instruction per score scales it and adds the bias, where there is a
  /// register for the factor.
  template <int kRowTiles, int kKeyTiles>
  __device__ __forceinline__ void apply_to_block(float (&scores)[kRowTiles][kKeyTiles][4], const WorkTile& work,
                                                 int32_t warp_row, int32_t first_key) const {
    constexpr bool kHasFactor = kRowTiles * (Shape::kKeys + Shape::kWarpColumns) <= 288;
    float factor = kLn2;
    if (!kHasFactor || this->params_.softcap_log2 > 0.0f || this->params_.alibi_slopes != nullptr) {
#pragma unroll
      for (int tile = 0; tile < kRowTiles; ++tile) {
        this->template apply<T>(scores[tile], this->rows(work, warp_row + 16 * tile), first_key);
      }
    } else {
      factor *= work.score_factor;
    }
    bias_.add(scores, factor);
  }
  /// Clears the sums of rows whose largest logit is -inf in base 2. Programs mask keys with the lowest f32 or bf16,
  /// too; rows in which these hide all keys attend to none.
  template <typename State>
  __device__ __forceinline__ void finish(State& state) const {
#pragma unroll
    for (int tile = 0; tile < Shape::kRowTiles; ++tile) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        if (state.max[tile][half] * kLog2E == -INFINITY) state.sum[tile][half] = 0.0f;
      }
    }
  }
};

}  // namespace xa
