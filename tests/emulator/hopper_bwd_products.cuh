// kernels/include/hopper_bwd/products.cuh on the host.
#pragma once
#include "hopper/wgmma.cuh"

namespace xa::hopper {

template <typename T, int kColumns>
struct BackwardWgmma {
  template <bool kAccumulate>
  static void ss(float (&d)[kColumns / 8][4], uint64_t x, uint64_t y) {
    Wgmma<T, kColumns>::template ss<kAccumulate>(d, x, y);
  }
  static void ss_subtract(float (&d)[kColumns / 8][4], uint64_t x, uint64_t y) {
    const auto negate = [&] {
      for (auto& tile : d) {
        for (float& element : tile) element = -element;
      }
    };
    negate();
    ss<true>(d, x, y);
    negate();
  }
  template <bool kAccumulate>
  static void rs_k_major(float (&d)[kColumns / 8][4], const uint32_t (&x)[4], uint64_t y) {
    if (!kAccumulate) std::memset(d, 0, sizeof(d));
    Wgmma<T, kColumns>::template rs<false>(d, x, y);
  }
  static void rs(float (&d)[kColumns / 8][4], const uint32_t (&x)[4], uint64_t y) { Wgmma<T, kColumns>::rs(d, x, y); }
  template <bool kAccumulate>
  static void ss_mn_major(float (&d)[kColumns / 8][4], uint64_t x, uint64_t y) {
    if (!kAccumulate) std::memset(d, 0, sizeof(d));
    host::WgmmaLane lane{&d[0][0], x, nullptr, y};
    emulator::warp_collective(
        [](void* const* lanes) {
          const auto& first = *static_cast<host::WgmmaLane*>(lanes[0]);
          const host::MatrixDescriptor from_a(first.a_descriptor), from_b(first.b_descriptor);
          const int first_row = static_cast<int>(threadIdx.x) % 128 / 32 * 16;
          float a[16][16];
          static float b[16][kColumns];
          for (int k = 0; k < 16; ++k) {
            float column[16];
            from_a.mn_major<T>(k, first_row, column);
            for (int row = 0; row < 16; ++row) a[row][k] = column[row];
            from_b.mn_major<T>(k, 0, b[k]);
          }
          host::multiply<kColumns, 16>(lanes, a, b);
        },
        &lane);
  }
};

}  // namespace xa::hopper
