// kernels/include/hopper/wgmma.cuh on the host: a wgmma completes when it is issued, 16 rows of one warp at a time.
#pragma once
#include <type_traits>

#include "element.cuh"
#include "hopper/ptx.cuh"

namespace xa::hopper {

/// The e4m3fn operand type.
struct E4m3 {
  uint8_t bits;
};

namespace ptx {

inline void wgmma_fence() {}
inline void wgmma_commit_group() {}
template <int kPending>
void wgmma_wait_group() {}

}  // namespace ptx

namespace host {

template <typename T>
float to_f32(T x) {
  return Element<T>::to_f32(x);
}
inline float to_f32(E4m3 x) { return ptx::host::e4m3_to_f32(x.bits); }

/// A decoded matrix descriptor.
struct MatrixDescriptor {
  uint32_t address, leading_byte_offset, stride_byte_offset;
  int row_bytes;

  explicit MatrixDescriptor(uint64_t descriptor)
      : address((descriptor & 0x3fff) << 4),
        leading_byte_offset((descriptor >> 16 & 0x3fff) << 4),
        stride_byte_offset((descriptor >> 32 & 0x3fff) << 4),
        row_bytes(descriptor >> 62 == 1 ? 128 : 64) {}

  /// K-major: the columns of `row` that one wgmma multiplies, which are in one atom column.
  template <typename T, int kDepth>
  void k_major(int row, float (&to)[kDepth]) const {
    const uint32_t from = address + row / 8 * stride_byte_offset + row % 8 * row_bytes;
    for (int byte = 0; byte < 32; byte += kChunkBytes) chunk<T>(from + byte, to + byte / sizeof(T));
  }
  /// MN-major: columns of `row`, which runs over all atom columns, from column `first` on, a multiple of 8.
  template <typename T, int kColumns>
  void mn_major(int row, int first, float (&to)[kColumns]) const {
    const uint32_t from = address + row / 8 * stride_byte_offset + row % 8 * row_bytes;
    for (int column = 0; column < kColumns; column += kChunkBytes / sizeof(T)) {
      const uint32_t byte = (first + column) * sizeof(T);
      chunk<T>(from + byte / row_bytes * leading_byte_offset + byte % row_bytes, to + column);
    }
  }

 private:
  static constexpr int kChunkBytes = 16;  // which the swizzle does not divide

  template <typename T>
  void chunk(uint32_t from, float* to) const {
    T elements[kChunkBytes / sizeof(T)];
    std::memcpy(elements, ::shared + ptx::host::swizzled(from, row_bytes), kChunkBytes);
    for (const T& element : elements) *to++ = to_f32(element);
  }
};

struct WgmmaLane {
  float* d;
  uint64_t a_descriptor;
  const uint32_t* a_registers;
  uint64_t b_descriptor;
};

/// d += a b for one warp: `a` is its 16 rows, `b` is shared by all warps.
template <int kColumns, int kDepth>
void multiply(void* const* lanes, const float (&a)[16][kDepth], const float (&b)[kDepth][kColumns]) {
  using xa::ptx::host::Row;
  constexpr int kRows = 8;  // whose sums of 8 columns are in registers
  for (int tile = 0; tile < kColumns / 8; ++tile) {
    for (int first = 0; first < 16; first += kRows) {
      Row sums[kRows] = {};
      for (int k = 0; k < kDepth; ++k) {
        Row columns;
        std::memcpy(&columns, &b[k][8 * tile], sizeof(columns));
#pragma GCC unroll 8
        for (int row = 0; row < kRows; ++row) sums[row] += a[first + row][k] * columns;
      }
      for (int i = 0; i < emulator::kWarp; ++i) {
        float* const d = static_cast<WgmmaLane*>(lanes[i])->d + 4 * tile + first / 4;
        for (int e = 0; e < 2; ++e) d[e] += sums[i / 4][2 * (i % 4) + e];
      }
    }
  }
}

}  // namespace host

template <typename T, int kColumns>
struct Wgmma {
  static constexpr int kDepth = 32 / sizeof(T);

  template <bool kAccumulate>
  static void ss(float (&d)[kColumns / 8][4], uint64_t x, uint64_t y) {
    if (!kAccumulate) clear(d);
    host::WgmmaLane lane{&d[0][0], x, nullptr, y};
    emulator::warp_collective(
        [](void* const* lanes) {
          const auto& first = *static_cast<host::WgmmaLane*>(lanes[0]);
          const host::MatrixDescriptor from_a(first.a_descriptor), from_b(first.b_descriptor);
          const int first_row = static_cast<int>(threadIdx.x) % 128 / 32 * 16;
          float a[16][kDepth];
          static float b[kDepth][kColumns];
          for (int row = 0; row < 16; ++row) from_a.template k_major<T>(first_row + row, a[row]);
          transposed(from_b, b);
          host::multiply<kColumns, kDepth>(lanes, a, b);
        },
        &lane);
  }

  /// `kTransposesB`: whether b is MN-major, [depth, columns] in shared memory; 8-bit operands are K-major only.
  template <bool kTransposesB = sizeof(T) != 1>
  static void rs(float (&d)[kColumns / 8][4], const uint32_t (&x)[4], uint64_t y, int32_t accumulates = 1) {
    if (accumulates == 0) clear(d);
    host::WgmmaLane lane{&d[0][0], 0, x, y};
    emulator::warp_collective(
        [](void* const* lanes) {
          float a[16][kDepth];
          static float b[kDepth][kColumns];
          constexpr int kPerRegister = 4 / sizeof(T);
          for (int i = 0; i < emulator::kWarp; ++i) {
            const uint32_t* const registers = static_cast<host::WgmmaLane*>(lanes[i])->a_registers;
            for (int r = 0; r < 4; ++r) {
              T elements[kPerRegister];
              std::memcpy(elements, registers + r, 4);
              for (int e = 0; e < kPerRegister; ++e) {
                a[i / 4 + r % 2 * 8][r / 2 * kDepth / 2 + kPerRegister * (i % 4) + e] = host::to_f32(elements[e]);
              }
            }
          }
          const host::MatrixDescriptor from(static_cast<host::WgmmaLane*>(lanes[0])->b_descriptor);
          if (kTransposesB) {
            for (int k = 0; k < kDepth; ++k) from.template mn_major<T>(k, 0, b[k]);
          } else {
            transposed(from, b);
          }
          host::multiply<kColumns, kDepth>(lanes, a, b);
        },
        &lane);
  }

 private:
  /// Reads b, K-major in shared memory.
  static void transposed(const host::MatrixDescriptor& from, float (&b)[kDepth][kColumns]) {
    for (int column = 0; column < kColumns; ++column) {
      float row[kDepth];
      from.k_major<T>(column, row);
      for (int k = 0; k < kDepth; ++k) b[k][column] = row[k];
    }
  }
  static void clear(float (&d)[kColumns / 8][4]) {
    for (auto& tile : d) {
      for (float& number : tile) number = 0.0f;
    }
  }
};

}  // namespace xa::hopper
