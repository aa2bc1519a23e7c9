// Replaces kernels/include/dtype.cuh on the host: 16-bit floats that compute in f32, without CUDA's headers.
#pragma once
#include <cstdint>

#include "ptx.cuh"

namespace xa {
template <typename Format>
struct Float16 {
  Float16() = default;
  Float16(float x) : bits(static_cast<uint16_t>(ptx::host::pack<Format>(x, 0.0f))) {}
  operator float() const { return Format::to_f32(bits); }

  uint16_t bits;
};

using f16 = Float16<ptx::host::F16>;
using bf16 = Float16<ptx::host::Bf16>;
using f32 = float;
using f64 = double;
using i8 = int8_t;
using u8 = uint8_t;
using i32 = int32_t;
using i64 = int64_t;
}  // namespace xa
