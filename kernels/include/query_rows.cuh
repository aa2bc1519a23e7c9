// Loads a tile's query rows into shared memory.
#pragma once

#include <cstdint>

#include "fp8.cuh"
#include "paged_rows.cuh"
#include "params/attention.cuh"
#include "ptx.cuh"
#include "work_tile.cuh"

namespace xa {

/// Starts to copy the tile's query rows. Rows past the last one and columns past head_dim become zeros.
template <typename Shape, typename T>
__device__ __forceinline__ void copy_query(const AttentionParams& params, const RowMap& map, uint32_t destination) {
  using Grid = LaneGrid<Shape::kQueryRowBytes>;
  constexpr int kElements = 16 / sizeof(T);
  const int32_t warp = threadIdx.x / 32;
  const Grid grid;
#pragma unroll 4
  for (int32_t row = warp * Grid::kRowsPerStep + grid.row; row < Shape::kRows;
       row += Shape::kWarps * Grid::kRowsPerStep) {
    const bool live = row < map.num_rows;
    const int32_t source_row = live ? row : 0;
    const T* const from = static_cast<const T*>(params.q) + map.token(source_row) * params.q_token_stride +
                          map.head(source_row) * params.q_head_stride;
#pragma unroll
    for (int step = 0; step < Grid::kStepsPerRow; ++step) {
      const int32_t chunk = grid.chunk + 32 * step;
      const bool inside = chunk * kElements < params.head_dim;
      if (!grid.has_chunk(step)) continue;
      ptx::cp_async_16(destination + row * Shape::kQueryPitch + chunk * 16, from + (inside ? chunk * kElements : 0),
                       live && inside);
    }
  }
}

/// The largest of `largest` and the two numbers of a pair of bf16 without their signs, as bits.
__device__ __forceinline__ uint32_t largest_magnitude(uint32_t largest, uint32_t pair) {
  return max(largest, max(pair & 0x7fffu, pair >> 16 & 0x7fffu));
}

/// Converts a row from bf16 to f16 after multiplying it by a power of two, which brings its largest number into
/// [2^14, 2^15). What f16 then cannot hold is below 2^-38 of that number. `inverse` undoes the factor.
struct QueryScale {
  float factor;
  float inverse;

  /// `largest`: the largest number of the row without its sign, as bits.
  explicit __device__ __forceinline__ QueryScale(int32_t largest) {
    const int32_t exponent = largest >> 7;
    // At most 2^126, so rows of zeros or subnormal numbers stay small; rows with an infinity or NaN are left as they
    // are.
    const int32_t shift = exponent == 255 ? 0 : min(127 + 14 - exponent, 126);
    factor = __uint_as_float(static_cast<uint32_t>(127 + shift) << 23);
    inverse = __uint_as_float(static_cast<uint32_t>(127 - shift) << 23);
  }
  __device__ __forceinline__ uint32_t apply(uint32_t pair) const {
    return ptx::pack_f16(__uint_as_float(pair << 16) * factor, __uint_as_float(pair & 0xffff0000u) * factor);
  }
};

/// Converts the columns that a lane has of a row of q to f16, if q is bf16. The lanes of the warp have all columns
/// together. Returns the factor by which the row's scores have to be multiplied.
template <int kCount>
__device__ __forceinline__ float convert_row(const AttentionParams& params, uint4 (&x)[kCount]) {
  if (params.q_type != QueryType::Bf16) return 1.0f;
  uint32_t largest = 0;
#pragma unroll
  for (int i = 0; i < kCount; ++i) {
#pragma unroll
    for (const uint32_t pair : {x[i].x, x[i].y, x[i].z, x[i].w}) largest = largest_magnitude(largest, pair);
  }
  const QueryScale scale(__reduce_max_sync(~0u, static_cast<int32_t>(largest)));
#pragma unroll
  for (uint4& part : x) {
    part = make_uint4(scale.apply(part.x), scale.apply(part.y), scale.apply(part.z), scale.apply(part.w));
  }
  return scale.inverse;
}

/// A query row on its way to f16 in shared memory, with its columns in the order in which 8-bit K of type `Stored` is
/// read (tile_math.cuh). A warp has a row, each lane eight of up to 256 columns at a time.
template <typename Shape, typename Stored>
class ConvertedRow {
  static constexpr int kCount = (Shape::kHeadDim + 255) / 256;
  uint4 x_[kCount];

  static __device__ __forceinline__ bool has_fp8_query(const AttentionParams& params) {
    return !kHasTokenScales<Stored> && params.q_type == QueryType::Fp8;
  }

 public:
  /// Starts to load row `row` of the map for lane `lane`. Rows past the last one and columns past head_dim become
  /// zeros.
  __device__ __forceinline__ void load(const AttentionParams& params, const RowMap& map, int32_t row, int32_t lane) {
    bool live[kCount];
    int64_t first[kCount];
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      x_[i] = make_uint4(0, 0, 0, 0);
      const int32_t own = 8 * lane + 256 * i;
      live[i] = row < map.num_rows && own < params.head_dim;
      first[i] = live[i] ? map.token(row) * params.q_token_stride + map.head(row) * params.q_head_stride + own : 0;
    }
    if (has_fp8_query(params)) {
#pragma unroll
      for (int i = 0; i < kCount; ++i) {
        if (!live[i]) continue;
        const uint2 codes = __ldg(reinterpret_cast<const uint2*>(static_cast<const uint8_t*>(params.q) + first[i]));
        x_[i].x = codes.x;
        x_[i].y = codes.y;
      }
    } else {
#pragma unroll
      for (int i = 0; i < kCount; ++i) {
        if (live[i]) x_[i] = __ldg(reinterpret_cast<const uint4*>(static_cast<const uint16_t*>(params.q) + first[i]));
      }
    }
  }
  /// Converts the row and stores it in row `row` of `destination`, and in `row_factors` the factor by which its scores
  /// have to be multiplied.
  __device__ __forceinline__ void store(const AttentionParams& params, int32_t row, int32_t lane, uint8_t* destination,
                                        float* row_factors) {
    float factor = 1.0f;
    if (has_fp8_query(params)) {
#pragma unroll
      for (uint4& part : x_) {
        const TwoPairs low = decode_neighbours<Stored, false>(part.x), high = decode_neighbours<Stored, false>(part.y);
        part = make_uint4(low.first, low.second, high.first, high.second);
      }
    } else {
      factor = convert_row(params, x_);
    }
    if (lane == 0) row_factors[row] = factor;
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      if (8 * lane + 256 * i >= Shape::kHeadDim) continue;
      // 16 columns (two lanes) are 32 bytes: first the even pairs of columns, then the odd ones.
      uint8_t* const to = destination + row * Shape::kQueryPitch + 512 * i + lane / 2 * 32 + lane % 2 * 8;
      *reinterpret_cast<uint2*>(to) = make_uint2(x_[i].x, x_[i].z);
      *reinterpret_cast<uint2*>(to + 16) = make_uint2(x_[i].y, x_[i].w);
    }
  }
};

/// As `copy_query`, but converts to f16 and permutes columns (ConvertedRow). Sets `row_factors` [kRows], by which the
/// scores of the rows have to be multiplied.
template <typename Shape, typename Stored>
__device__ __forceinline__ void convert_query(const AttentionParams& params, const RowMap& map, uint8_t* destination,
                                              float* row_factors) {
  // Opaque: addresses are computed for each tile, because in registers throughout the loop over keys they spill.
  const int32_t thread = ptx::opaque(threadIdx.x), lane = thread % 32;
#pragma unroll 2
  for (int32_t row = thread / 32; row < Shape::kRows; row += Shape::kWarps) {
    ConvertedRow<Shape, Stored> converted;
    converted.load(params, map, row, lane);
    converted.store(params, row, lane, destination, row_factors);
  }
}

/// Starts to load the work tile's query rows to the beginning of `shared`, as a separate cp.async group.
template <typename Shape, typename T, typename Stored>
__device__ __forceinline__ void fetch_query(const AttentionParams& params, const WorkTile& work, uint8_t* shared,
                                            float* row_factors) {
  const RowMap map(params, work.tile, work.kv_head);
  if constexpr (Shape::kIsFp8) {
    convert_query<Shape, Stored>(params, map, shared, row_factors);
  } else {
    copy_query<Shape, T>(params, map, ptx::shared_address(shared));
  }
  ptx::cp_async_commit();
}

}  // namespace xa
