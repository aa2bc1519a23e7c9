// Conversion of fp8, and of int8, to pairs of f16. Kernels for 8-bit K and V compute in f16, which represents every
// number of these formats.
//
//     f16     s eeeee mm mmmmmmmm
//     e5m2    s eeeee mm            the upper byte of an f16
//     e4m3fn  s eeee mmm            shifted right by one below its sign: an f16 that is the number divided by 2^8,
//             s 0eeee mmm           also if it is subnormal
//
// e4m3fn has conversion instructions from sm_89 on; the shift serves older GPUs. The host compensates for
// the division by 2^8 in the factors of AttentionParams.
#pragma once

#include <cstdint>
#include <type_traits>

#include "element.cuh"
#include "params/attention.cuh"
#include "ptx.cuh"
#include "token_scales_ptx.cuh"

namespace xa {

/// An fp8 element; AttentionParams::kv_is_e5m2 tells its format. `kShifts`: e4m3fn is converted by shifts, for GPUs
/// without the instruction.
template <bool kShifts_>
struct Fp8 {
  static constexpr bool kShifts = kShifts_;
  uint8_t bits;
};

/// An e4m3fn element of a cache with a scale per token and KV head (token_scales.cuh).
template <bool kShifts>
struct ScaledE4m3 : Fp8<kShifts> {};
/// An int8 element of such a cache.
struct ScaledI8 {
  uint8_t bits;
};

/// Whether rows of K and V have scales of their own. Their format is then known at compile time, and q has 16 bits.
template <typename Stored>
constexpr bool kHasTokenScales = false;
template <bool kShifts>
constexpr bool kHasTokenScales<ScaledE4m3<kShifts>> = true;
template <>
constexpr bool kHasTokenScales<ScaledI8> = true;

/// The type that an attention kernel computes in and the type of K and V. The variant's XA_DTYPE names one of these.
template <typename Compute_, typename Stored_>
struct OperandTypes {
  using Compute = Compute_;
  using Stored = Stored_;
};
using operands_f16 = OperandTypes<F16, F16>;
using operands_bf16 = OperandTypes<Bf16, Bf16>;
using operands_f32 = OperandTypes<F32, F32>;
using operands_fp8 = OperandTypes<F16, Fp8<false>>;
using operands_fp8_shifted = OperandTypes<F16, Fp8<true>>;
using scaled_operands_i8 = OperandTypes<F16, ScaledI8>;
using scaled_operands_fp8 = OperandTypes<F16, ScaledE4m3<false>>;
using scaled_operands_fp8_shifted = OperandTypes<F16, ScaledE4m3<true>>;

/// Two f16 from e4m3fn codes in their upper bytes, divided by 2^8. Only a NaN (all ones) carries into the exponent's
/// highest bit, which makes it an f16 NaN.
__device__ __forceinline__ uint32_t shift_e4m3(uint32_t codes) {
  const uint32_t x = (codes & 0x80008000u) | ((codes & 0x7f007f00u) >> 1);
  return x | ((x + 0x00800080u) & 0x40004000u);
}

/// Four f16, two per register.
struct TwoPairs {
  uint32_t first;
  uint32_t second;
};

/// The bytes of `codes` that `kFirst` and `kSecond` select, as two f16. With its sign bit flipped, an int8 x is the
/// integer x + 128; in the lower byte of the f16 1024 it makes the f16 1152 + x.
template <int kFirst, int kSecond>
__device__ __forceinline__ uint32_t decode_i8(uint32_t codes) {
  constexpr uint32_t k1024 = 0x64646464u, k1152 = 0x64806480u;
  return ptx::subtract_f16x2(__byte_perm(codes ^ 0x80808080u, k1024, 0x4040 | kSecond << 8 | kFirst), k1152);
}

/// `first` is bytes 0 and 2 as f16, `second` bytes 1 and 3. `Stored` is an 8-bit type.
template <typename Stored, bool kIsE5m2>
__device__ __forceinline__ TwoPairs decode_even_and_odd(uint32_t bytes) {
  TwoPairs pairs;
  if constexpr (std::is_same_v<Stored, ScaledI8>) {
    pairs = {decode_i8<0, 2>(bytes), decode_i8<1, 3>(bytes)};
  } else if constexpr (kIsE5m2) {
    pairs = {__byte_perm(bytes, 0, 0x2404), __byte_perm(bytes, 0, 0x3414)};
  } else if constexpr (Stored::kShifts) {
    pairs = {shift_e4m3(bytes << 8), shift_e4m3(bytes)};
  } else {
    ptx::e4m3_to_f16(pairs.first, pairs.second, __byte_perm(bytes, 0, 0x3120));
  }
  return pairs;
}

/// `first` is bytes 0 and 1 as f16, `second` bytes 2 and 3.
template <typename Stored, bool kIsE5m2>
__device__ __forceinline__ TwoPairs decode_neighbours(uint32_t bytes) {
  TwoPairs pairs;
  if constexpr (std::is_same_v<Stored, ScaledI8>) {
    pairs = {decode_i8<0, 1>(bytes), decode_i8<2, 3>(bytes)};
  } else if constexpr (kIsE5m2) {
    pairs = {__byte_perm(bytes, 0, 0x1404), __byte_perm(bytes, 0, 0x3424)};
  } else if constexpr (Stored::kShifts) {
    pairs = {shift_e4m3(__byte_perm(bytes, 0, 0x1404)), shift_e4m3(__byte_perm(bytes, 0, 0x3424))};
  } else {
    ptx::e4m3_to_f16(pairs.first, pairs.second, bytes);
  }
  return pairs;
}

}  // namespace xa
