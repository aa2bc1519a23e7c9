// Stores the K and V rows of new tokens in their slots of a paged cache of int8 or e4m3fn, in place, each row quantized
// with a scale of its own: the largest magnitude of the row becomes the largest code.
//
// Slots and rows that are not stored are those of kv_cache_update.cu. A row with a NaN or an infinity gets the scale
// NaN, and one whose numbers are all below kSmallestScaledRow the scale 0; both are stored as zeros. Every operation is
// IEEE arithmetic in f32, so that the CPU computes the same bits.
//
// Compiled once for each XA_DTYPE of the rows: f16, bf16, f32.
// Launch: kRowThreads threads at most; a group of up to 32 threads has a head of K or V of a token.

#include <cstdint>

#include "chunk.cuh"
#include "element.cuh"
#include "fp8_rounding.cuh"
#include "params/token_scale_update.cuh"
#include "slots.cuh"

namespace xa {

constexpr int kElements = kTokenScaleElements;
/// Groups of eight elements of a thread, at most: 512 columns of 32 threads.
constexpr int kMaxSteps = 2;

/// A group of elements as f32; zeros if `is_inside` is false.
template <typename T>
__device__ __forceinline__ void load_numbers(float (&numbers)[kElements], const T* from, bool aligned, bool is_inside) {
#pragma unroll
  for (float& number : numbers) number = 0.0f;
  if (!is_inside) return;
  if (aligned) {
    constexpr int kVector = 16 / sizeof(T);
#pragma unroll
    for (int first = 0; first < kElements; first += kVector) {
      const auto chunk = load_chunk<T, kVector>(from + first);
#pragma unroll
      for (int i = 0; i < kVector; ++i) numbers[first + i] = Element<T>::to_f32(chunk.elements[i]);
    }
  } else {
#pragma unroll
    for (int i = 0; i < kElements; ++i) numbers[i] = Element<T>::to_f32(from[i]);
  }
}

/// Scale and inverse of a row whose largest magnitude has the bits `largest`.
struct RowScale {
  float scale;
  float inverse;

  __device__ __forceinline__ RowScale(uint32_t largest, float largest_code) {
    const float magnitude = __uint_as_float(largest);
    if (largest >= 0x7f800000u) {
      scale = __uint_as_float(0x7fc00000u);
      inverse = 0.0f;
    } else if (magnitude < kSmallestScaledRow) {
      scale = inverse = 0.0f;
    } else {
      scale = __fdiv_rn(magnitude, largest_code);
      inverse = __fdiv_rn(largest_code, magnitude);
    }
  }
};

/// The codes of four numbers, the first in the lowest byte.
__device__ __forceinline__ uint32_t encode(const float* numbers, float inverse, bool is_i8) {
  float x[4];
#pragma unroll
  for (int i = 0; i < 4; ++i) x[i] = inverse == 0.0f ? 0.0f : __fmul_rn(numbers[i], inverse);
  if (!is_i8) return F8E4M3Fn::encode(x[0], x[1], x[2], x[3]);
  uint32_t codes = 0;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const int32_t code = max(-127, min(__float2int_rn(x[i]), 127));
    codes |= (static_cast<uint32_t>(code) & 0xff) << 8 * i;
  }
  return codes;
}

template <typename T>
__device__ __forceinline__ void update(const TokenScaleUpdateParams& params) {
  const RowPartition& partition = params.partition;
  const uint32_t index = blockIdx.y * blockDim.x + threadIdx.x, row_threads = partition.threads.divisor;
  const int32_t row_in_cta = partition.cta_rows == 1 ? 0 : divided(index, partition.threads);
  const uint32_t thread = index - row_in_cta * row_threads;
  const int64_t row = int64_t{blockIdx.x} * partition.cta_rows + row_in_cta;
  // All threads of a warp take part in the exchange of the largest magnitudes.
  const bool has_row = row_in_cta < partition.cta_rows && row < partition.num_rows && thread < row_threads;
  const int64_t slot = has_row ? load_slot(params.slot_mapping, row) : -1;
  const bool is_stored = is_in_cache(params.slot_mapping, slot);

  const int32_t lanes = 1 << params.group_shift, lane = thread & (lanes - 1), group = thread >> params.group_shift;
  const bool is_value = group >= params.num_heads;
  const QuantizedRows& side = is_value ? params.value : params.key;
  const int32_t head = group - (is_value ? params.num_heads : 0);
  const T* const from = static_cast<const T*>(side.rows) + row * side.row_token_stride + head * side.row_head_stride;

  float numbers[kMaxSteps][kElements];
  uint32_t largest = 0;
#pragma unroll
  for (int step = 0; step < kMaxSteps; ++step) {
    const int32_t element = (lane + step * lanes) * kElements;
    load_numbers<T>(numbers[step], from + element, side.aligned != 0, is_stored && element < params.head_dim);
#pragma unroll
    for (const float number : numbers[step]) largest = max(largest, __float_as_uint(number) & 0x7fffffffu);
  }
#pragma unroll 1
  for (int32_t distance = 1; distance < lanes; distance *= 2) {
    largest = max(largest, __shfl_xor_sync(~0u, largest, distance));
  }
  if (!is_stored) return;

  const bool is_i8 = params.is_i8 != 0;
  const RowScale scale(largest, is_i8 ? 127.0f : 448.0f);
  const int64_t page = page_of(params.slot_mapping, slot), offset = slot - page * params.slot_mapping.page_size;
  uint8_t* const to = side.cache + page * side.page_stride + offset * side.token_stride + head * side.head_stride;
#pragma unroll
  for (int step = 0; step < kMaxSteps; ++step) {
    const int32_t element = (lane + step * lanes) * kElements;
    if (element >= params.head_dim) continue;
    const uint2 codes =
        make_uint2(encode(numbers[step], scale.inverse, is_i8), encode(numbers[step] + 4, scale.inverse, is_i8));
    if (side.aligned != 0) {
      *reinterpret_cast<uint2*>(to + element) = codes;
    } else {
#pragma unroll
      for (int i = 0; i < kElements; ++i) to[element + i] = (i < 4 ? codes.x : codes.y) >> i % 4 * 8;
    }
  }
  if (lane == 0) {
    side.scales[page * side.scale_page_stride + offset * side.scale_token_stride + head * side.scale_head_stride] =
        scale.scale;
  }
}

}  // namespace xa

extern "C" __global__ void __launch_bounds__(xa::kRowThreads)
    XA_ENTRY(const __grid_constant__ xa::TokenScaleUpdateParams params) {
  xa::update<xa::XA_PASTE(dtype_, XA_DTYPE)>(params);
}
