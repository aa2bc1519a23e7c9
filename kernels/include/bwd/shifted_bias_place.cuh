// Where a row of the bias lies whose elements do not begin with chunks of 16 bytes (shifted_bias.cuh).
#pragma once

#include <cstdint>

namespace xa {

/// The chunks of a row in which the keys that a CTA holds lie. A default one has none.
struct alignas(16) ShiftedBiasPlace {
  const void* chunks;  // the first of them, which has the first key
  uint32_t exist;      // bit i is set if chunk i lies in the bias
  uint16_t shift;      // which element of its chunk the first key is
  uint8_t partial;     // the chunk that lies in the bias in part,
  uint8_t rest;        // and how many of its elements; 0 if there is none
};

}  // namespace xa
