// Replaces kernels/include/ptx.cuh on the host: the same functions without PTX.
#pragma once
#include "device.h"

namespace xa::ptx {

namespace host {

/// A 16-bit float as f32, by the format's name.
struct Bf16 {
  static float to_f32(uint16_t bits) { return __uint_as_float(static_cast<uint32_t>(bits) << 16); }
  static uint16_t from_f32(float x) {
    const uint32_t bits = __float_as_uint(x);
    if (x != x) return 0x7fff;
    return static_cast<uint16_t>((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
  }
};
struct F16 {
  static float to_f32(uint16_t bits) { return emulator::bits_as<_Float16>(bits); }
  static uint16_t from_f32(float x) { return x != x ? 0x7fff : emulator::bits_as<uint16_t>(static_cast<_Float16>(x)); }
};

template <typename Half>
uint32_t pack(float low, float high) {
  return Half::from_f32(low) | static_cast<uint32_t>(Half::from_f32(high)) << 16;
}

/// Operands of one lane of a matrix product.
struct MmaLane {
  float* c;
  const uint32_t* a;
  uint32_t b[2];
};

/// 8 columns of a product.
using Row = float __attribute__((vector_size(32)));

/// c[16, 8] += a[16, K] b[K, 8] from the fragments of a warp, in the lane layout of mma.sync.
template <int K>
void multiply(void* const* lanes, const float (&a)[16][K], const float (&b)[K][8]) {
  Row columns[K];
  std::memcpy(columns, b, sizeof(columns));
  for (int row = 0; row < 16; ++row) {
    const auto of_lane = [&](int t) { return static_cast<MmaLane*>(lanes[row % 8 * 4 + t])->c + row / 8 * 2; };
    Row sums;
    for (int column = 0; column < 8; ++column) sums[column] = of_lane(column / 2)[column % 2];
    for (int k = 0; k < K; ++k) sums += a[row][k] * columns[k];
    for (int column = 0; column < 8; ++column) of_lane(column / 2)[column % 2] = sums[column];
  }
}

template <typename Half>
void mma_16_bit(void* const* lanes) {
  float a[16][16], b[16][8];
  for (int i = 0; i < emulator::kWarp; ++i) {
    const MmaLane& lane = *static_cast<MmaLane*>(lanes[i]);
    const int g = i / 4, t = i % 4;
    for (int e = 0; e < 2; ++e) {
      for (int r = 0; r < 4; ++r) {
        a[g + r % 2 * 8][r / 2 * 8 + 2 * t + e] = Half::to_f32(static_cast<uint16_t>(lane.a[r] >> 16 * e));
      }
      for (int r = 0; r < 2; ++r) b[8 * r + 2 * t + e][g] = Half::to_f32(static_cast<uint16_t>(lane.b[r] >> 16 * e));
    }
  }
  multiply<16>(lanes, a, b);
}

inline void mma_tf32(void* const* lanes) {
  float a[16][8], b[8][8];
  for (int i = 0; i < emulator::kWarp; ++i) {
    const MmaLane& lane = *static_cast<MmaLane*>(lanes[i]);
    const int g = i / 4, t = i % 4;
    for (int r = 0; r < 4; ++r) a[g + r % 2 * 8][r / 2 * 4 + t] = __uint_as_float(lane.a[r]);
    for (int r = 0; r < 2; ++r) b[4 * r + t][g] = __uint_as_float(lane.b[r]);
  }
  multiply<8>(lanes, a, b);
}

/// Operands of one lane of ldmatrix.
struct LdmatrixLane {
  uint32_t address;
  uint32_t* fragment;
};

/// Row `row` of matrix m lies at the address of lane 8m + row.
template <bool kTransposed, int kMatrices = 4>
void ldmatrix(void* const* lanes) {
  for (int m = 0; m < kMatrices; ++m) {
    for (int i = 0; i < emulator::kWarp; ++i) {
      uint16_t pair[2];
      for (int e = 0; e < 2; ++e) {
        const int row = kTransposed ? 2 * (i % 4) + e : i / 4, column = kTransposed ? i / 4 : 2 * (i % 4) + e;
        const uint32_t address = static_cast<LdmatrixLane*>(lanes[8 * m + row])->address;
        std::memcpy(&pair[e], ::shared + address + 2 * column, 2);
      }
      std::memcpy(static_cast<LdmatrixLane*>(lanes[i])->fragment + m, pair, 4);
    }
  }
}

}  // namespace host

inline int32_t opaque(int32_t x) { return x; }

inline uint32_t shared_address(const void* pointer) {
  return static_cast<uint32_t>(static_cast<const uint8_t*>(pointer) - ::shared);
}

inline void cp_async_16(uint32_t destination, const void* source, bool predicate) {
  emulator::cp_async(destination, source, 16, predicate ? 16 : 0);
}
inline void cp_async_16(uint32_t destination, const void* source, bool predicate, uint64_t) {
  emulator::cp_async(destination, source, 16, predicate ? 16 : 0);
}
inline void cp_async_8(uint32_t destination, const void* source, bool predicate) {
  emulator::cp_async(destination, source, 8, predicate ? 8 : 0);
}
inline void cp_async_commit() { emulator::cp_async_commit(); }
template <int kPending>
void cp_async_wait() {
  emulator::cp_async_wait(kPending);
}
inline uint64_t evict_first_policy() { return 0; }

inline void ldmatrix_x4(uint32_t (&fragment)[4], uint32_t address) {
  host::LdmatrixLane lane{address, fragment};
  emulator::warp_collective(host::ldmatrix<false>, &lane);
}
inline void ldmatrix_x4_trans(uint32_t (&fragment)[4], uint32_t address) {
  host::LdmatrixLane lane{address, fragment};
  emulator::warp_collective(host::ldmatrix<true>, &lane);
}
inline void ldmatrix_x2_trans(uint32_t (&fragment)[2], uint32_t address) {
  host::LdmatrixLane lane{address, fragment};
  emulator::warp_collective(host::ldmatrix<true, 2>, &lane);
}
inline void store_shared_2(uint32_t address, uint16_t x) { std::memcpy(::shared + address, &x, 2); }
inline void clear_shared_16(uint32_t address) { std::memset(::shared + address, 0, 16); }
inline uint4 load_shared_16(uint32_t address) {
  if (address % 16 != 0) emulator::fail("a misaligned load");
  uint4 x;
  std::memcpy(&x, ::shared + address, sizeof(x));
  return x;
}
inline void store_shared_16(uint32_t address, const uint4& x) { std::memcpy(::shared + address, &x, 16); }
inline float load_shared_f32(uint32_t address) {
  float value;
  std::memcpy(&value, ::shared + address, 4);
  return value;
}
inline float4 load_shared_f32x4(uint32_t address) {
  float4 x;
  std::memcpy(&x, ::shared + address, 16);
  return x;
}
template <int kThreads>
void barrier_sync(int32_t number) {
  emulator::barrier(number, kThreads);
}

inline void mma_bf16(float (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  host::MmaLane lane{c, a, {b0, b1}};
  emulator::warp_collective(host::mma_16_bit<host::Bf16>, &lane);
}
inline void mma_f16(float (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  host::MmaLane lane{c, a, {b0, b1}};
  emulator::warp_collective(host::mma_16_bit<host::F16>, &lane);
}
inline void mma_tf32(float (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  host::MmaLane lane{c, a, {b0, b1}};
  emulator::warp_collective(host::mma_tf32, &lane);
}

inline uint32_t round_to_tf32(float value) {
  const uint32_t bits = __float_as_uint(value);
  return std::isfinite(value) ? (bits + 0x1000) & ~0x1fffu : bits;
}
inline uint32_t pack_bf16(float low, float high) { return host::pack<host::Bf16>(low, high); }
inline uint32_t pack_f16(float low, float high) { return host::pack<host::F16>(low, high); }
inline void e4m3_to_f16(uint32_t& first, uint32_t& second, uint32_t codes) {
  const auto number = [=](int shift) {
    const uint32_t code = codes >> shift & 0xff, exponent = code >> 3 & 15, fraction = code & 7;
    if ((code & 0x7f) == 0x7f) return std::nanf("");
    const float significand = static_cast<float>(exponent == 0 ? fraction : 8 + fraction);
    const float x = std::ldexp(significand, std::max(static_cast<int>(exponent), 1) - 10);
    return (code & 0x80) != 0 ? -x : x;
  };
  first = host::pack<host::F16>(number(0), number(8));
  second = host::pack<host::F16>(number(16), number(24));
}
inline float f16_to_f32(uint16_t bits) { return host::F16::to_f32(bits); }
inline float exp2_approx(float x) { return std::exp2(x); }
inline float log2_approx(float x) { return std::log2(x); }
inline float reciprocal_approx(float x) { return 1 / x; }
/// The error is about the largest that the instruction may have.
inline float tanh_approx(float x) { return std::tanh(x) * (1 + 1.0f / 4096); }

}  // namespace xa::ptx
