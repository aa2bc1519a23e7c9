// gather_kv_cache.cu for a cache of int8 or e4m3fn with a scale per token and KV head: elements are multiplied by the
// scale of their row in f32 and rounded.
//
// The first launch is that of gather_kv_cache.cu that writes cu_seqlens. A warp copies a row of the results, K and V of
// all heads.
//
// Compiled for each XA_DTYPE of the results: f16, bf16, f32.
// Launch: kGatherThreads threads.

#include <cstdint>

#include "chunk.cuh"
#include "element.cuh"
#include "fp8.cuh"
#include "params/gather_token_scales.cuh"

namespace xa {

constexpr int kWarp = 32, kWarps = kGatherThreads / kWarp;
/// Elements of a vector: 8 bytes of the cache.
constexpr int kVector = 8;

/// The place of a token in the cache.
struct Token {
  int32_t page;
  int32_t offset;
};

/// The last sequence that begins at row `row` or before it. Empty sequences with the same start come before it.
__device__ __forceinline__ int32_t sequence_of(const GatherParams& params, int32_t row) {
  int32_t first = 0, count = params.num_seqs;  // the sequence is in [first, first + count)
  while (count > 1) {
    const int32_t half = count / 2;
    const bool is_later = params.cu_seqlens[first + half] <= row;
    first += is_later ? half : 0;
    count = is_later ? count - half : half;
  }
  return first;
}

__device__ __forceinline__ Token token_of(const GatherParams& params, int32_t row) {
  const int32_t sequence = sequence_of(params, row);
  const uint32_t token = row - params.cu_seqlens[sequence], entry = token / params.page_size.divisor;
  const int32_t page = __ldg(params.table + sequence * params.table_stride + entry);
  return {max(0, min(page, params.num_pages - 1)), static_cast<int32_t>(token - entry * params.page_size.divisor)};
}

/// The numbers of up to kVector codes.
__device__ __forceinline__ void decode(float (&numbers)[kVector], const uint2& codes, bool is_i8) {
  const auto number = [](uint32_t bits) { return Element<F16>::to_f32(F16{static_cast<uint16_t>(bits)}); };
  // Decoding e4m3fn by shifts gives numbers that are too small by this factor.
  const float factor = is_i8 ? 1.0f : 256.0f;
#pragma unroll
  for (int i = 0; i < kVector; i += 4) {
    const uint32_t word = i == 0 ? codes.x : codes.y;
    const TwoPairs pairs =
        is_i8 ? decode_neighbours<ScaledI8, false>(word) : decode_neighbours<ScaledE4m3<true>, false>(word);
    numbers[i] = factor * number(pairs.first);
    numbers[i + 1] = factor * number(pairs.first >> 16);
    numbers[i + 2] = factor * number(pairs.second);
    numbers[i + 3] = factor * number(pairs.second >> 16);
  }
}

/// Copies a row of K or V. Without a token it is cleared.
template <typename T>
__device__ __forceinline__ void copy_row(const GatherTokenScaleParams& params, const ScaledSource& side, int32_t row,
                                         const Token* token) {
  const int32_t lane = threadIdx.x % kWarp, head_vectors = params.head_dim / kVector;
  T* const to = static_cast<T*>(side.rows) + int64_t{row} * params.num_heads * params.head_dim;
  const int64_t codes_at = token != nullptr ? token->page * side.page_stride + token->offset * side.token_stride : 0;
  const int64_t scales_at =
      token != nullptr ? token->page * side.scale_page_stride + token->offset * side.scale_token_stride : 0;
#pragma unroll 4
  for (int32_t vector = lane; vector < params.num_heads * head_vectors; vector += kWarp) {
    const int32_t head = vector / head_vectors, element = (vector - head * head_vectors) * kVector;
    float numbers[kVector] = {};
    if (token != nullptr) {
      const uint8_t* const from = side.cache + codes_at + head * side.head_stride + element;
      uint2 codes = make_uint2(0, 0);
      if (params.aligned != 0) {
        codes = __ldg(reinterpret_cast<const uint2*>(from));
      } else {
#pragma unroll
        for (int i = 0; i < kVector; ++i) {
          (i < 4 ? codes.x : codes.y) |= static_cast<uint32_t>(__ldg(from + i)) << i % 4 * 8;
        }
      }
      const float scale = __ldg(side.scales + scales_at + head * side.scale_head_stride);
      decode(numbers, codes, params.is_i8 != 0);
#pragma unroll
      for (float& number : numbers) number = __fmul_rn(number, scale);
    }
    const auto chunk = rounded<T>(numbers);
    if (params.aligned != 0) {
      constexpr int kStored = 16 / sizeof(T);
#pragma unroll
      for (int i = 0; i < kVector; i += kStored) {
        store_chunk(to + vector * kVector + i, reinterpret_cast<const Chunk<T, kStored>&>(chunk.elements[i]));
      }
    } else {
#pragma unroll
      for (int i = 0; i < kVector; ++i) to[vector * kVector + i] = chunk.elements[i];
    }
  }
}

}  // namespace xa

extern "C" __global__ void __launch_bounds__(xa::kGatherThreads)
    XA_ENTRY(const __grid_constant__ xa::GatherTokenScaleParams params) {
  using T = xa::XA_PASTE(dtype_, XA_DTYPE);
  const xa::GatherParams& gather = params.gather;
  const int64_t row = int64_t{blockIdx.x} * xa::kWarps + threadIdx.x / xa::kWarp;
  if (row >= gather.capacity) return;
  const int32_t own = static_cast<int32_t>(row);
  const bool has_token = own < gather.cu_seqlens[gather.num_seqs];
  const xa::Token token = has_token ? xa::token_of(gather, own) : xa::Token{};
  xa::copy_row<T>(params, params.keys, own, has_token ? &token : nullptr);
  xa::copy_row<T>(params, params.values, own, has_token ? &token : nullptr);
}
