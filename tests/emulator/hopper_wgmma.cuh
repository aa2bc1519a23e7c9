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

  /// K-major: the element at byte `byte` of `row`. The k columns of one wgmma are in one atom column.
  template <typename T>
  float k_major(int row, int byte) const {
    return element<T>(address + row / 8 * stride_byte_offset + row % 8 * row_bytes + byte);
  }
  /// MN-major: the element at byte `byte` of `row`, which runs over all atom columns.
  template <typename T>
  float mn_major(int row, int byte) const {
    const uint32_t atom_column = address + byte / row_bytes * leading_byte_offset;
    return element<T>(atom_column + row / 8 * stride_byte_offset + row % 8 * row_bytes + byte % row_bytes);
  }

 private:
  template <typename T>
  static float element(uint32_t at, int row_bytes) {
    T x;
    std::memcpy(&x, ::shared + ptx::host::swizzled(at, row_bytes), sizeof(x));
    return to_f32(x);
  }
  template <typename T>
  float element(uint32_t at) const {
    return element<T>(at, row_bytes);
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
  float sums[16][kColumns] = {};
  for (int row = 0; row < 16; ++row) {
    for (int k = 0; k < kDepth; ++k) {
      for (int column = 0; column < kColumns; ++column) sums[row][column] += a[row][k] * b[k][column];
    }
  }
  for (int i = 0; i < emulator::kWarp; ++i) {
    float* const d = static_cast<WgmmaLane*>(lanes[i])->d;
    for (int j = 0; j < kColumns / 8; ++j) {
      for (int e = 0; e < 4; ++e) d[4 * j + e] += sums[i / 4 + e / 2 * 8][8 * j + 2 * (i % 4) + e % 2];
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
          for (int k = 0; k < kDepth; ++k) {
            const int byte = k * static_cast<int>(sizeof(T));
            for (int row = 0; row < 16; ++row) a[row][k] = from_a.template k_major<T>(first_row + row, byte);
            for (int column = 0; column < kColumns; ++column) b[k][column] = from_b.template k_major<T>(column, byte);
          }
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
          for (int k = 0; k < kDepth; ++k) {
            for (int column = 0; column < kColumns; ++column) {
              constexpr int kBytes = sizeof(T);
              b[k][column] = kTransposesB ? from.template mn_major<T>(k, column * kBytes)
                                          : from.template k_major<T>(column, k * kBytes);
            }
          }
          host::multiply<kColumns, kDepth>(lanes, a, b);
        },
        &lane);
  }

 private:
  static void clear(float (&d)[kColumns / 8][4]) {
    for (auto& tile : d) {
      for (float& number : tile) number = 0.0f;
    }
  }
};

}  // namespace xa::hopper
