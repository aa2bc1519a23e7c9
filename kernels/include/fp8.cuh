// Conversion of fp8 to pairs of f16. Kernels for fp8 K and V compute in f16, which represents every number of both
// formats.
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

#include "element.cuh"
#include "params/attention.cuh"
#include "ptx.cuh"

namespace xa {

/// An fp8 element; AttentionParams::kv_is_e5m2 tells its format. `kShifts`: e4m3fn is converted by shifts, for GPUs
/// without the instruction.
template <bool kShifts_>
struct Fp8 {
  static constexpr bool kShifts = kShifts_;
  uint8_t bits;
};

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

/// `first` is bytes 0 and 2 as f16, `second` bytes 1 and 3. `Stored` is an Fp8.
template <typename Stored, bool kIsE5m2>
__device__ __forceinline__ TwoPairs decode_even_and_odd(uint32_t bytes) {
  TwoPairs pairs;
  if constexpr (kIsE5m2) {
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
  if constexpr (kIsE5m2) {
    pairs = {__byte_perm(bytes, 0, 0x1404), __byte_perm(bytes, 0, 0x3424)};
  } else if constexpr (Stored::kShifts) {
    pairs = {shift_e4m3(__byte_perm(bytes, 0, 0x1404)), shift_e4m3(__byte_perm(bytes, 0, 0x3424))};
  } else {
    ptx::e4m3_to_f16(pairs.first, pairs.second, bytes);
  }
  return pairs;
}

}  // namespace xa
