// From 8-bit floats to pairs of f16. Kernels for fp8 K and V compute in f16, which holds every number of both formats.
//
// e5m2 is the upper byte of a half. For e4m3fn there are instructions from sm_89 on. Elsewhere a code in the upper byte
// of a half has its sign in place already; the seven bits below it, moved to where the half has its exponent and
// mantissa, are the number divided by 2^8, subnormal ones included. What numbers have been divided by, the host knows
// and has in the factors of AttentionParams.
#pragma once

#include <cstdint>

#include "element.cuh"
#include "params/attention.cuh"
#include "ptx.cuh"

namespace xa {

/// An 8-bit float; of which format is the call's (AttentionParams::kv_is_e5m2). `kShifts`: without the instructions.
template <bool kShifts_>
struct Fp8 {
  static constexpr bool kShifts = kShifts_;
  uint8_t bits;
};

/// What an attention kernel computes in, and what K and V are. XA_DTYPE of its variants names one of these.
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

/// The e4m3fn codes in the upper bytes of two halves, divided by 2^8. NaN, all ones, carries into the exponent's
/// highest bit, which no number reaches.
__device__ __forceinline__ uint32_t shift_e4m3(uint32_t codes) {
  const uint32_t x = (codes & 0x80008000u) | ((codes & 0x7f007f00u) >> 1);
  return x | ((x + 0x00800080u) & 0x40004000u);
}

/// Pairs of f16 out of four bytes.
struct TwoPairs {
  uint32_t first;
  uint32_t second;
};

/// Of bytes 0 and 2, and of bytes 1 and 3. `Stored` is an Fp8.
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

/// Of bytes 0 and 1, and of bytes 2 and 3.
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
