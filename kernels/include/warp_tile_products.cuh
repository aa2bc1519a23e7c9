// The products of a tile that a warp computes alone (warp_tiles.cuh), its query rows, and where their columns are.
//
// Products are transposed, S^T = K q^T and O^T = V^T P^T, so that the 8 columns of operand B are the rows of the tile.
// In S^T lane 4g + t has rows 2t and 2t + 1 of keys g and g + 8. In O^T it has them of two columns of each 16: of 16
// bits columns g and g + 8; of 8 bits, which ldmatrix transposes in pairs, 2g and 2g + 1.
#pragma once

#include <cstdint>

#include "element.cuh"
#include "fp8.cuh"
#include "output_rows.cuh"
#include "params/attention.cuh"
#include "ptx.cuh"
#include "query_rows.cuh"
#include "shared_rows.cuh"
#include "warp_tile_ptx.cuh"

namespace xa {

/// Of q, K and V of 16-bit type `T`. K and V are blocks of 16 rows.
template <typename T, int kColumns>
struct WarpTileProducts {
  static constexpr int kSteps = kColumns / 16;
  using Rows = SwizzledRows<kColumns* static_cast<int>(sizeof(T))>;
  using Output = float[kSteps][4];
  uint32_t query[kSteps][2];

  /// Starts to load row g of q, which is at `head` of token `token`: columns 16i + 2t, 16i + 2t + 1, 16i + 2t + 8 and
  /// 16i + 2t + 9. Without `live` it has zeros.
  __device__ __forceinline__ void load(const AttentionParams& params, int32_t token, int32_t head, uint32_t lane,
                                       bool live) {
    const T* const from =
        static_cast<const T*>(params.q) + token * params.q_token_stride + head * params.q_head_stride + lane % 4 * 2;
#pragma unroll
    for (int step = 0; step < kSteps; ++step) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        query[step][half] = live ? __ldg(reinterpret_cast<const uint32_t*>(from + 16 * step + 8 * half)) : 0;
      }
    }
  }
  /// Makes the loaded rows operand B.
  __device__ __forceinline__ void convert(const AttentionParams&, uint32_t, float) {}

  /// scores = K q^T of the block at shared address `block`, in units of `log2_unit`.
  __device__ __forceinline__ void multiply(float (&scores)[4], uint32_t block, uint32_t lane,
                                           const AttentionParams&) const {
    // ldmatrix_x4 gives the first and last 8 keys of 8 columns, then of 8 more.
    const uint32_t keys = block + Rows::offset(lane % 16, lane / 16);
    // Two sums, so that half as many products wait for each other.
    float sums[2][4] = {};
#pragma unroll
    for (int step = 0; step < kSteps; ++step) {
      uint32_t k[4];
      ptx::ldmatrix_x4(k, Rows::moved(keys, 0, 2 * step));
      Element<T>::mma(sums[step % 2], k, query[step][0], query[step][1]);
    }
#pragma unroll
    for (int i = 0; i < 4; ++i) scores[i] = sums[0][i] + sums[1][i];
  }
  static __device__ __forceinline__ float log2_unit(const AttentionParams& params) { return params.softmax_scale_log2; }

  /// output += V^T P^T. `p` has the first and the last 8 keys.
  static __device__ __forceinline__ void accumulate(Output& output, const uint32_t (&p)[2], uint32_t block,
                                                    uint32_t lane, const AttentionParams&) {
    // ldmatrix_x4_trans gives 8 columns and 8 more of the first 8 keys, then of the last 8.
    const uint32_t values = block + Rows::offset(lane % 8 + lane / 16 * 8, lane / 8 % 2);
#pragma unroll
    for (int step = 0; step < kSteps; ++step) {
      uint32_t v[4];
      ptx::ldmatrix_x4_trans(v, Rows::moved(values, 0, 2 * step));
      Element<T>::mma(output[step], v, p[0], p[1]);
    }
  }

  /// Stores the output of the tile, times the factors of rows 2t and 2t + 1.
  template <typename Writer>
  static __device__ __forceinline__ void store(const Writer& writer, const Output& output, const float (&factors)[2],
                                               uint32_t lane, const AttentionParams& params) {
    const int32_t g = lane / 4, t = lane % 4;
    if (params.widens_out == 0) {
      T* const to = writer.out(g) + 2 * t;
#pragma unroll
      for (int chunk = 0; chunk < 2 * kSteps; ++chunk) {
        const float* const columns = output[chunk / 2] + chunk % 2 * 2;
        const uint32_t pair = ptx::transpose_8x8(Element<T>::pack(columns[0] * factors[0], columns[1] * factors[1]));
        if (writer.writes(g)) *reinterpret_cast<uint32_t*>(to + 8 * chunk) = pair;
      }
      return;
    }
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      if (!writer.writes(2 * t + i)) continue;
      float* const to = writer.wide_out(2 * t + i) + g;
#pragma unroll
      for (int chunk = 0; chunk < 2 * kSteps; ++chunk) {
        to[8 * chunk] = output[chunk / 2][chunk % 2 * 2 + i] * factors[i];
      }
    }
  }
};

/// The same of 8-bit K and V of type `Stored`, converted to f16.
template <typename Stored, int kColumns>
struct WarpTile8BitProducts {
  static constexpr int kSteps = kColumns / 16;
  using Rows = SwizzledRows<kColumns>;
  using Output = float[kSteps][4];
  uint32_t query[kSteps][2];
  float factors[2];  // of the scores of rows 2t and 2t + 1

  /// Columns 16i + 4t to 16i + 4t + 3, which are the bytes of K in a register.
  __device__ __forceinline__ void load(const AttentionParams& params, int32_t token, int32_t head, uint32_t lane,
                                       bool live) {
    const int64_t first = token * params.q_token_stride + head * params.q_head_stride + lane % 4 * 4;
    const bool is_fp8 = params.q_type == QueryType::Fp8;
#pragma unroll
    for (int step = 0; step < kSteps; ++step) {
      query[step][0] = query[step][1] = 0;
      if (live && is_fp8) {
        query[step][0] =
            __ldg(reinterpret_cast<const uint32_t*>(static_cast<const uint8_t*>(params.q) + first) + 4 * step);
      } else if (live) {
        const uint2 columns =
            __ldg(reinterpret_cast<const uint2*>(static_cast<const uint16_t*>(params.q) + first) + 4 * step);
        query[step][0] = columns.x, query[step][1] = columns.y;
      }
    }
  }
  /// `factor` is that of the scores of all rows.
  __device__ __forceinline__ void convert(const AttentionParams& params, uint32_t lane, float factor) {
    float inverse = 1.0f;
    if (params.q_type == QueryType::Fp8) {
#pragma unroll
      for (uint32_t (&columns)[2] : query) {
        const TwoPairs pairs = decode_neighbours<Stored, false>(columns[0]);
        columns[0] = pairs.first, columns[1] = pairs.second;
      }
    } else if (params.q_type == QueryType::Bf16) {
      uint32_t largest = 0;
#pragma unroll
      for (const uint32_t (&columns)[2] : query) {
#pragma unroll
        for (const uint32_t pair : columns) largest = largest_magnitude(largest, pair);
      }
#pragma unroll
      for (int distance = 1; distance < 4; distance *= 2) {
        largest = max(largest, __shfl_xor_sync(~0u, largest, distance));
      }
      const QueryScale scale(static_cast<int32_t>(largest));
#pragma unroll
      for (uint32_t (&columns)[2] : query) {
#pragma unroll
        for (uint32_t& pair : columns) pair = scale.apply(pair);
      }
      inverse = scale.inverse;
    }
#pragma unroll
    for (int i = 0; i < 2; ++i) factors[i] = factor * __shfl_sync(~0u, inverse, lane % 4 * 8 + 4 * i);
  }

  __device__ __forceinline__ void multiply(float (&scores)[4], uint32_t block, uint32_t lane,
                                           const AttentionParams& params) const {
    if (params.kv_is_e5m2 != 0) {
      multiply_by<true>(scores, block, lane);
    } else {
      multiply_by<false>(scores, block, lane);
    }
#pragma unroll
    for (int i = 0; i < 4; ++i) scores[i] *= factors[i % 2];
  }
  static __device__ __forceinline__ float log2_unit(const AttentionParams&) { return 1.0f; }

  static __device__ __forceinline__ void accumulate(Output& output, const uint32_t (&p)[2], uint32_t block,
                                                    uint32_t lane, const AttentionParams& params) {
    if (params.kv_is_e5m2 != 0) {
      accumulate_by<true>(output, p, block, lane);
    } else {
      accumulate_by<false>(output, p, block, lane);
    }
  }

  template <typename Writer>
  static __device__ __forceinline__ void store(const Writer& writer, const Output& output, const float (&factors)[2],
                                               uint32_t lane, const AttentionParams&) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int32_t row = lane % 4 * 2 + i;
      if (!writer.writes(row)) continue;
#pragma unroll
      for (int step = 0; step < kSteps; ++step) {
        const float2 columns = make_float2(output[step][i], output[step][2 + i]);
        writer.store_out(row, 16 * step + static_cast<int32_t>(lane / 4) * 2, scaled(columns, factors[i]));
      }
    }
  }

 private:
  template <bool kIsE5m2>
  __device__ __forceinline__ void multiply_by(float (&scores)[4], uint32_t block, uint32_t lane) const {
    // ldmatrix_x4 gives the first and last 8 keys of 16 columns, then of 16 more.
    const uint32_t keys = block + Rows::offset(lane % 16, lane / 16);
    float sums[2][4] = {};
#pragma unroll
    for (int step = 0; step < kSteps; step += 2) {
      uint32_t k[4];
      ptx::ldmatrix_x4(k, Rows::moved(keys, 0, step));
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const TwoPairs first = decode_neighbours<Stored, kIsE5m2>(k[2 * i]),
                       last = decode_neighbours<Stored, kIsE5m2>(k[2 * i + 1]);
        const uint32_t operand[4] = {first.first, last.first, first.second, last.second};
        Element<F16>::mma(sums[i], operand, query[step + i][0], query[step + i][1]);
      }
    }
#pragma unroll
    for (int i = 0; i < 4; ++i) scores[i] = sums[0][i] + sums[1][i];
  }
  template <bool kIsE5m2>
  static __device__ __forceinline__ void accumulate_by(Output& output, const uint32_t (&p)[2], uint32_t block,
                                                       uint32_t lane) {
    // ldmatrix_x4_trans gives 16 columns of the first and of the last 8 keys, then 16 more.
    const uint32_t values = block + Rows::offset(lane % 16, lane / 16);
#pragma unroll
    for (int step = 0; step < kSteps; step += 2) {
      uint32_t v[4];
      ptx::ldmatrix_x4_trans(v, Rows::moved(values, 0, step));
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const TwoPairs first = decode_even_and_odd<Stored, kIsE5m2>(v[2 * i]),
                       last = decode_even_and_odd<Stored, kIsE5m2>(v[2 * i + 1]);
        const uint32_t operand[4] = {first.first, first.second, last.first, last.second};
        Element<F16>::mma(output[step + i], operand, p[0], p[1]);
      }
    }
  }
};

}  // namespace xa
