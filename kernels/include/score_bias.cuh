// The bias of scores, a number for each pair of a row and a key (BiasSource).
//
// Prefill stages the bias of a block of keys in shared memory, each warp that of its own rows, while the block's scores
// are computed. Rows of any length are copied 16 bytes at a time: a row of the bias may begin at any element, so what
// is copied is the aligned chunks that hold a row's part, and a row in shared memory begins up to 15 bytes after its
// chunks.
//
//     global   ... previous row | row: keys of the block  | ...        16-byte chunks, of which none is read outside
//              |-------|-------|-------|-------|-------|---            of the operand
//     shared            [       |       |       |       ]              a row's chunks; the row begins at its shift
//
// Rows of 1024 bytes leave no shared memory on GPUs that have 99 KB: their bias is loaded into registers.
#pragma once

#include <cstdint>
#include <type_traits>

#include "column_warps.cuh"
#include "element.cuh"
#include "log2_units.cuh"
#include "logits_transform.cuh"
#include "params/attention.cuh"
#include "params/bias.cuh"
#include "ptx.cuh"
#include "work_tile.cuh"

namespace xa {

/// A row of the bias, counted from its first one; kNoBiasRow stands for a row that has no bias.
using BiasRowIndex = uint32_t;
constexpr BiasRowIndex kNoBiasRow = ~0u;

/// The row of query `query` of a sequence, any number, and of query head `head`.
__device__ __forceinline__ BiasRowIndex bias_row_index(const BiasSource& bias, int32_t sequence, int32_t head,
                                                       int32_t query) {
  const uint32_t rows = bias.rows, matrix = sequence * bias.seq_matrices + head * bias.head_matrices;
  return static_cast<uint32_t>(query) < rows ? matrix * rows + query : kNoBiasRow;
}

/// The element of a row without a bias. A multiple of the elements of a chunk.
constexpr int64_t kNoBias = INT64_MIN;

/// The element of row `row` and its key 0.
__device__ __forceinline__ int64_t bias_row(const BiasSource& bias, BiasRowIndex row) {
  return row != kNoBiasRow ? static_cast<int64_t>(row) * static_cast<uint32_t>(bias.keys) : kNoBias;
}

/// Whether the row at element `row` has a bias of key `key`, any number. Where it has none, the bias is 0.
__device__ __forceinline__ bool has_bias(const BiasSource& bias, int64_t row, int32_t key) {
  return row != kNoBias && static_cast<uint32_t>(key) < static_cast<uint32_t>(bias.keys);
}
/// The bits of the bias of such a key.
template <typename E>
__device__ __forceinline__ uint32_t load_bias_bits(const BiasSource& bias, int64_t row, int32_t key) {
  using Bits = std::conditional_t<Element<E>::kIs16Bit, uint16_t, uint32_t>;
  return __ldg(static_cast<const Bits*>(bias.data) + row + key);
}
/// Their value.
template <typename E>
__device__ __forceinline__ float bias_of_bits(uint32_t bits) {
  if constexpr (Element<E>::kIs16Bit) {
    return Element<E>::to_f32(E{static_cast<uint16_t>(bits)});
  } else {
    return __uint_as_float(bits);
  }
}
template <typename E>
__device__ __forceinline__ float bias_at(const BiasSource& bias, int64_t row, int32_t key) {
  return has_bias(bias, row, key) ? bias_of_bits<E>(load_bias_bits<E>(bias, row, key)) : 0.0f;
}

/// Calls `function(E{})` with the element type of the bias or of its gradient: f32 with `is_f32`, else T.
template <typename T, typename Function>
__device__ __forceinline__ void with_bias_type(int32_t is_f32, const Function& function) {
  if constexpr (Element<T>::kIs16Bit) {
    if (is_f32 != 0) return function(float{});
  }
  function(T{});
}
template <typename T, typename Function>
__device__ __forceinline__ void with_bias_type(const BiasSource& bias, const Function& function) {
  with_bias_type<T>(bias.is_wide, function);
}

/// Starts to copy chunk `chunk` of a row's part that begins at key `first_key`, any number: to `to`, where the chunks
/// of the row are, from the row at element `row`. Keys from the end of the row on become zeros.
template <typename E>
__device__ __forceinline__ void stage_bias_chunk(const BiasSource& bias, uint8_t* to, int64_t row, int32_t first_key,
                                                 int32_t chunk) {
  constexpr int kElements = 16 / static_cast<int>(sizeof(E));
  const int64_t end = row + bias.keys;
  const int64_t from = ((row + first_key) & ~static_cast<int64_t>(kElements - 1)) + chunk * kElements;
  const bool exists = row != kNoBias && from < end && from + kElements > row;
  const E* const data = static_cast<const E*>(bias.data);
  to += chunk * 16;
  if (!exists || from + kElements <= end) {
    ptx::cp_async_16(ptx::shared_address(to), data + (exists ? from : 0), exists);
  } else {
    for (int i = 0; i < kElements; ++i) reinterpret_cast<E*>(to)[i] = from + i < end ? data[from + i] : E{};
  }
}

/// Two adjacent elements in shared memory, aligned to both if `kIsAligned`.
template <bool kIsAligned, typename E>
__device__ __forceinline__ float2 load_bias_pair(const E* from) {
  if constexpr (!kIsAligned) {
    return make_float2(Element<E>::to_f32(from[0]), Element<E>::to_f32(from[1]));
  } else if constexpr (Element<E>::kIs16Bit) {
    return unpack<E>(*reinterpret_cast<const uint32_t*>(from));
  } else {
    return *reinterpret_cast<const float2*>(from);
  }
}

/// The bias of the rows of a tile of prefill. In shared memory it has, after Shape::kSharedBytes, the elements of the
/// tile's rows and their key 0, then the staged rows, which are in registers where those have no room.
template <typename Shape, typename T>
class BiasTile {
  static constexpr int kWarpRows = 16 * Shape::kRowTiles, kKeyTiles = Shape::kKeys / 8;
  static constexpr int kRowBytes = static_cast<int>(sizeof(int64_t) + Shape::kKeys * sizeof(T)) + 16;
  static constexpr bool kStages = Shape::kSharedBytes + Shape::kRows * kRowBytes <= 99 * 1024;
  template <typename E>
  static constexpr int kPitch = Shape::kKeys * static_cast<int>(sizeof(E)) + 16;
  static_assert(Shape::kStages == 1, "the next block is staged when this one has been computed");

 public:
  /// Whether each warp stages the next block of the rows that it alone reads before the product P V. At D 64 it costs
  /// more instructions there than are waited for otherwise.
  static constexpr bool kStagesEarly =
      kStages && Shape::kColumnWarps == 1 && !(Element<T>::kIs16Bit && Shape::kWarpColumns <= 64);

  /// Each warp finds its own rows, which begin at row `warp_row` of the tile; of warps with the same rows the first
  /// one.
  __device__ __forceinline__ BiasTile(const AttentionParams& params, const BiasSource& bias, const WorkTile& work,
                                      int32_t warp_row, uint8_t* shared)
      : bias_(bias), shared_(shared + Shape::kSharedBytes) {
    if (first_warp_column<Shape>() == 0) {
      const RowMap map(params, work.tile, work.kv_head);
      for (int32_t row = warp_row + static_cast<int32_t>(threadIdx.x % 32); row < warp_row + kWarpRows; row += 32) {
        row_at(row) = row < work.tile.num_rows
                          ? bias_row(bias, bias_row_index(bias, work.tile.sequence, map.head(row), map.rows.query(row)))
                          : kNoBias;
      }
    }
    if constexpr (kStages || Shape::kColumnWarps == 1) {
      __syncwarp();
    } else {
      __syncthreads();  // All warps of the rows load their bias.
    }
  }

  /// Starts to stage the bias of the block of keys that begins at `first_key`, in the next cp.async group, or to load
  /// it. All lanes have read the block before.
  __device__ __forceinline__ void fetch(int32_t first_key) {
    with_bias_type<T>(bias_, [&](auto type) {
      using E = decltype(type);
      if constexpr (!kStages) {
        for_pairs([&](int tile, int half, int block, int64_t row, int32_t, int32_t column) {
          uint32_t (&pair)[2] = loaded_[tile][half][block];
#pragma unroll
          for (int i = 0; i < 2; ++i) {
            const int32_t key = first_key + column + i;
            pair[i] = has_bias(bias_, row, key) ? load_bias_bits<E>(bias_, row, key) : 0;
          }
        });
      } else if (first_warp_column<Shape>() == 0) {
        if constexpr (kStagesEarly) __syncwarp();
        stage<E>(first_key);
      }
    });
  }
  /// Multiplies the scores of the block by `factor` and adds the bias. It has been fetched, and the CTA's threads have
  /// passed a barrier since.
  __device__ __forceinline__ void add(float (&scores)[Shape::kRowTiles][kKeyTiles][4], float factor,
                                      int32_t first_key) const {
    with_bias_type<T>(bias_, [&](auto type) {
      using E = decltype(type);
      const auto add_pair = [&](float (&score)[4], int half, float2 pair) {
        score[2 * half] = __fmaf_rn(score[2 * half], factor, pair.x);
        score[2 * half + 1] = __fmaf_rn(score[2 * half + 1], factor, pair.y);
      };
      const auto add_staged = [&](auto is_aligned) {
        for_pairs([&](int tile, int half, int block, int64_t row, int32_t in_tile, int32_t column) {
          const E* const from = staged<E>(row, in_tile, first_key) + column;
          add_pair(scores[tile][block], half, load_bias_pair<decltype(is_aligned)::value>(from));
        });
      };
      if constexpr (!kStages) {
        for_pairs([&](int tile, int half, int block, int64_t, int32_t, int32_t) {
          const uint32_t (&bits)[2] = loaded_[tile][half][block];
          add_pair(scores[tile][block], half, make_float2(bias_of_bits<E>(bits[0]), bias_of_bits<E>(bits[1])));
        });
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
  };

  /// The element of a row of the tile and its key 0.
  __device__ __forceinline__ int64_t& row_at(int32_t row) const { return reinterpret_cast<int64_t*>(shared_)[row]; }
  /// The chunks of a row of the tile.
  template <typename E>
  __device__ __forceinline__ uint8_t* chunks_of(int32_t row) const {
    return shared_ + Shape::kRows * static_cast<int>(sizeof(int64_t)) + row * kPitch<E>;
  }
  /// Where a row of the tile begins among its chunks.
  template <typename E>
  __device__ __forceinline__ const E* staged(int64_t row, int32_t in_tile, int32_t first_key) const {
    constexpr int kElements = 16 / static_cast<int>(sizeof(E));
    return reinterpret_cast<const E*>(chunks_of<E>(in_tile)) +
           (static_cast<int32_t>(row + first_key) & (kElements - 1));
  }

  template <typename E>
  __device__ __forceinline__ void stage(int32_t first_key) const {
    constexpr int kElements = 16 / static_cast<int>(sizeof(E)), kChunks = Shape::kKeys / kElements;
    constexpr int kRowsPerStep = 32 / kChunks;
    static_assert(32 % kChunks == 0 && kWarpRows % kRowsPerStep == 0);
    const Place place;
    const int32_t chunk = place.lane % kChunks, first_row = place.row + place.lane / kChunks;
    // Every row begins and ends with a chunk, or all chunks of the block end before their rows do.
    const bool is_aligned = bias_.keys % kElements == 0;
    if (is_aligned || first_key + Shape::kKeys + kElements <= bias_.keys) {
      const bool inside = !is_aligned || first_key + chunk * kElements < bias_.keys;
      constexpr int kAtOnce = kWarpRows < 4 * kRowsPerStep ? kWarpRows / kRowsPerStep : 4;
#pragma unroll 1
      for (int32_t row = 0; row < kWarpRows; row += kAtOnce * kRowsPerStep) {
        stage_whole_chunks<E, kAtOnce>(first_row + row, kRowsPerStep, chunk, first_key, inside);
      }
#pragma unroll 1
      for (int32_t row = is_aligned ? kWarpRows : place.lane; row < kWarpRows; row += 32) {
        stage_whole_chunks<E, 1>(place.row + row, 0, kChunks, first_key, true);
      }
      return;
    }
#pragma unroll 1
    for (int32_t row = 0; row < kWarpRows; row += kRowsPerStep) stage_chunk<E>(first_row + row, chunk, first_key);
#pragma unroll 1
    for (int32_t row = place.lane; row < kWarpRows; row += 32) stage_chunk<E>(place.row + row, kChunks, first_key);
  }
  /// Starts to copy chunk `chunk` of `kCount` rows, from row `first_row` of the tile on and `step` apart, or to store
  /// zeros unless it is `inside`.
  template <typename E, int kCount>
  __device__ __forceinline__ void stage_whole_chunks(int32_t first_row, int32_t step, int32_t chunk, int32_t first_key,
                                                     bool inside) const {
    constexpr int kElements = 16 / static_cast<int>(sizeof(E));
    const uint64_t data = reinterpret_cast<uint64_t>(bias_.data) + chunk * 16;
    // All rows first: ptxas puts three instructions between a load from shared memory and a copy.
    int64_t begins[kCount];
#pragma unroll
    for (int i = 0; i < kCount; ++i) begins[i] = row_at(first_row + i * step);
    const uint32_t to = ptx::shared_address(chunks_of<E>(first_row)) + chunk * 16;
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      // Of kNoBias it is in the first row, because that is INT64_MIN.
      const auto from = static_cast<uint64_t>(begins[i] + first_key) & ~static_cast<uint64_t>(kElements - 1);
      ptx::cp_async_16(to + i * step * kPitch<E>, reinterpret_cast<const void*>(data + from * sizeof(E)),
                       inside && static_cast<int32_t>(begins[i] >> 32) != static_cast<int32_t>(kNoBias >> 32));
    }
  }
  template <typename E>
  __device__ __forceinline__ void stage_chunk(int32_t row, int32_t chunk, int32_t first_key) const {
    stage_bias_chunk<E>(bias_, chunks_of<E>(row), row_at(row), first_key, chunk);
  }

  /// Calls `visit(tile, half, block, row, row of the tile, column)` for each pair of adjacent columns of the lane's
  /// scores of a block.
  template <typename Visit>
  __device__ __forceinline__ void for_pairs(const Visit& visit) const {
    const Place place;
#pragma unroll
    for (int tile = 0; tile < Shape::kRowTiles; ++tile) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int32_t in_tile = place.row + 16 * tile + 8 * half + place.lane / 4;
        const int64_t row = row_at(in_tile);
#pragma unroll
        for (int block = 0; block < kKeyTiles; ++block) {
          visit(tile, half, block, row, in_tile, 8 * block + 2 * (place.lane % 4));
        }
      }
    }
  }

  const BiasSource& bias_;
  uint8_t* const shared_;
  uint32_t loaded_[Shape::kRowTiles][2][kKeyTiles][2];  // unless kStages: the bits of the fetched block
};

/// Softmax scale, soft cap and ALiBi, then the bias: scores become logits.
template <typename Shape, typename T>
struct logits_bias : logits_softcap_alibi {
  static constexpr bool kFetchesByWarps = BiasTile<Shape, T>::kStagesEarly;
  BiasTile<Shape, T>& bias_;

  __device__ __forceinline__ logits_bias(const AttentionParams& params, BiasTile<Shape, T>& bias)
      : logits_softcap_alibi(params), bias_(bias) {}

  __device__ __forceinline__ float log2_unit() const { return kLog2E; }
  /// Starts to load what the block of keys from `first_key` on needs.
  __device__ __forceinline__ void fetch_block(int32_t first_key) const { bias_.fetch(first_key); }
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
    bias_.add(scores, factor, first_key);
  }
};

}  // namespace xa
