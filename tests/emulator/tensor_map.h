// The CUtensorMap that the fake libcuda encodes and the emulated TMA reads.
#pragma once
#include <cstdint>

namespace emulator {

constexpr int kMaxAxes = 5;

/// Lies in the 128 bytes of a CUtensorMap; axis 0 is the innermost.
struct TensorMap {
  uint8_t* data;
  uint32_t lens[kMaxAxes];    // size of each axis minus one
  uint16_t in_box[kMaxAxes];  // box size along each axis
  uint8_t axes;
  uint8_t element_bytes;
  uint64_t strides[kMaxAxes];  // bytes
  uint8_t row_bytes;           // of a swizzled row: 64 or 128
};
static_assert(sizeof(TensorMap) <= 128);

}  // namespace emulator
