// From 8-bit floats to pairs of 16-bit ones, for every GPU: the conversion instructions begin with sm_89.
//
// A code in the upper byte of a half has its sign in place already; the seven bits below it, moved to where the wider
// format has its exponent and mantissa, are the number divided by a power of two, subnormal ones included.
#pragma once

#include <cstdint>

#include "attention_params.cuh"
#include "element.cuh"
#include "ptx.cuh"

namespace xa {

/// An 8-bit float; of which format is the call's (AttentionParams::fp8).
struct Fp8 {
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
using operands_f16_fp8 = OperandTypes<F16, Fp8>;
using operands_bf16_fp8 = OperandTypes<Bf16, Fp8>;

/// Two pairs out of four bytes: of bytes 0 and 2, and of bytes 1 and 3, the first of each in the lower half.
struct PairsOfFour {
  uint32_t even;
  uint32_t odd;
};

/// The codes in the upper bytes of two halves, moved by `shift`.
__device__ __forceinline__ uint32_t place_fp8(uint32_t codes, uint32_t shift) {
  return (codes & 0x80008000u) | ((codes & 0x7f007f00u) >> shift);
}

/// Numbers of type T, exact but for a factor that Fp8Format tells.
template <typename T>
__device__ __forceinline__ uint32_t decode_fp8_pair(const Fp8Format& format, uint32_t codes);

/// f16: e5m2 is its upper byte. e4m3fn comes out divided by 2^8; its NaN, all ones, carries into the exponent's highest
/// bit, which no number of it reaches. No number of e5m2 carries.
template <>
__device__ __forceinline__ uint32_t decode_fp8_pair<F16>(const Fp8Format& format, uint32_t codes) {
  const uint32_t x = place_fp8(codes, format.shift);
  return x | ((x + 0x00800080u) & 0x40004000u);
}

/// bf16: codes that are not finite carry into the bit of `special`, which is then spread over the exponent; the
/// multiplication makes up for the different biases.
template <>
__device__ __forceinline__ uint32_t decode_fp8_pair<Bf16>(const Fp8Format& format, uint32_t codes) {
  const uint32_t x = place_fp8(codes, format.shift);
  const uint32_t special = (x + format.carry) & format.special;
  return ptx::multiply_bf16x2(special * format.spread + x, format.scale);
}

template <typename T>
__device__ __forceinline__ PairsOfFour decode_fp8(const Fp8Format& format, uint32_t bytes) {
  return PairsOfFour{decode_fp8_pair<T>(format, bytes << 8), decode_fp8_pair<T>(format, bytes)};
}

}  // namespace xa
