// The CUtensorMap that the stand-in for the driver makes and the stand-in for TMA reads.
#pragma once
#include <cstdint>

namespace emulator {

constexpr int kMostAxes = 5;

/// In the 128 bytes of a CUtensorMap; axis 0 is the innermost.
struct TensorMap {
  uint8_t* data;
  uint32_t lens[kMostAxes];  // less one
  uint16_t in_box[kMostAxes];
  uint8_t axes;
  uint8_t element_bytes;
  uint64_t strides[kMostAxes];  // bytes
  uint8_t row_bytes;            // of a swizzled row: 64 or 128
};
static_assert(sizeof(TensorMap) <= 128);

}  // namespace emulator
