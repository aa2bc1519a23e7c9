// Element types of simple_add.cu, under the names of the axis `dtype` of variants.toml.
#pragma once
#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>

namespace xa {
using f16 = __half;
using bf16 = __nv_bfloat16;
using f32 = float;
using f64 = double;
using i8 = int8_t;
using u8 = uint8_t;
using i32 = int32_t;
using i64 = int64_t;
}  // namespace xa
