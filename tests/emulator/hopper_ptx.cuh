// kernels/include/hopper/ptx.cuh on the host. TMA and wgmma (hopper_wgmma.cuh) complete at once. So the emulator checks
// what a kernel computes and finds deadlocks, but not missing waits.
#pragma once
#include "device.h"
#include "params/tensor_map.cuh"
#include "tensor_map.h"

namespace xa::hopper {

namespace ptx {

namespace host {

/// Physical address of a byte of swizzled shared memory, in atoms of 8 rows of `row_bytes` bytes.
inline uint32_t swizzled(uint32_t address, int row_bytes) {
  return row_bytes == 128 ? address ^ (address >> 7 & 7) << 4 : address ^ (address >> 7 & 3) << 4;
}

/// Calls `visit` with each row of a box: its index in the box and its address, null for a row outside the tensor.
template <typename Visit>
void each_row(const emulator::TensorMap& map, const int32_t (&at)[emulator::kMaxAxes], const Visit& visit) {
  uint32_t rows = 1;
  for (int axis = 1; axis < map.axes; ++axis) rows *= map.in_box[axis];
  for (uint32_t row = 0; row < rows; ++row) {
    // Strides may wrap around the address space.
    uint64_t from = reinterpret_cast<uint64_t>(map.data) + at[0] * map.element_bytes;
    bool is_inside = true;
    uint32_t rest = row;
    for (int axis = 1; axis < map.axes; ++axis) {
      const int64_t index = int64_t{at[axis]} + rest % map.in_box[axis];
      rest /= map.in_box[axis];
      is_inside &= index >= 0 && index <= map.lens[axis];
      from += static_cast<uint64_t>(index) * map.strides[axis];
    }
    visit(row, is_inside ? reinterpret_cast<uint8_t*>(from) : nullptr);
  }
}

/// Number of bytes of a box's row, which starts at column `first`, that are inside the tensor.
inline int bytes_left(const emulator::TensorMap& map, int32_t first) {
  const int64_t left = (int64_t{map.lens[0]} + 1 - first) * map.element_bytes;
  if (first < 0) emulator::fail("a box that begins before its rows");
  // On an H100 the instruction is an illegal one then.
  if (first * map.element_bytes % 16 != 0) emulator::fail("a box that begins at no multiple of 16 bytes of its rows");
  return static_cast<int>(std::min<int64_t>(std::max<int64_t>(left, 0), map.row_bytes));
}

/// Loads a box to address `to` of a block's shared memory; returns its bytes.
inline uint32_t load_box(uint8_t* memory, uint32_t to, const TensorMap& opaque_map,
                         const int32_t (&at)[emulator::kMaxAxes]) {
  const auto& map = reinterpret_cast<const emulator::TensorMap&>(opaque_map);
  if (to % 128 != 0) emulator::fail("a box at an address that is no multiple of 128");
  const int row_end = bytes_left(map, at[0]);
  uint32_t bytes = 0;
  each_row(map, at, [&](uint32_t row, const uint8_t* from) {
    for (int chunk = 0; chunk < map.row_bytes; chunk += 16) {
      uint8_t* const chunk_to = memory + swizzled(to + row * map.row_bytes + chunk, map.row_bytes);
      const int inside = from == nullptr ? 0 : std::clamp(row_end - chunk, 0, 16);
      std::memset(chunk_to, 0, 16);
      if (inside > 0) std::memcpy(chunk_to, from + chunk, inside);
    }
    bytes += map.row_bytes;
  });
  return bytes;
}

inline void tma_load(uint32_t to, const TensorMap& map, uint32_t barrier, const int32_t (&at)[emulator::kMaxAxes]) {
  emulator::mbarrier_complete_tx(barrier, load_box(::shared, to, map, at));
}

inline void tma_store(uint32_t from, const TensorMap& opaque_map, const int32_t (&at)[emulator::kMaxAxes]) {
  const auto& map = reinterpret_cast<const emulator::TensorMap&>(opaque_map);
  if (from % 128 != 0) emulator::fail("a box at an address that is no multiple of 128");
  emulator::bulk_store([from, &map, at] {
    const int row_end = bytes_left(map, at[0]);
    each_row(map, at, [&](uint32_t row, uint8_t* to) {
      if (to == nullptr) return;
      for (int chunk = 0; chunk < row_end; chunk += 16) {
        const uint8_t* const chunk_from = ::shared + swizzled(from + row * map.row_bytes + chunk, map.row_bytes);
        std::memcpy(to + chunk, chunk_from, std::min(row_end - chunk, 16));
      }
    });
  });
}

/// Decodes e4m3fn, which is f16's format with four bits of exponent, whose bias is 8 less, and without infinities.
inline float e4m3_to_f32(uint8_t code) {
  if ((code & 0x7f) == 0x7f) return NAN;
  const uint16_t bits = (code & 0x80) << 8 | (code & 0x7f) << 7;
  return static_cast<float>(emulator::bits_as<_Float16>(bits)) * 256.0f;
}
struct StmatrixLane {
  uint32_t address;
  const uint32_t* matrices;
};

/// Row `row` of matrix m goes to the address of lane 8m + row. A lane holds columns 2 (lane % 4) and 2 (lane % 4) + 1
/// of row lane / 4 of each matrix, or the transpose.
template <bool kTransposed>
void stmatrix(void* const* lanes) {
  for (int m = 0; m < 4; ++m) {
    for (int i = 0; i < emulator::kWarp; ++i) {
      for (int e = 0; e < 2; ++e) {
        const int row = kTransposed ? 2 * (i % 4) + e : i / 4, column = kTransposed ? i / 4 : 2 * (i % 4) + e;
        const uint32_t to = static_cast<StmatrixLane*>(lanes[8 * m + row])->address + 2 * column;
        const auto element = static_cast<uint16_t>(static_cast<StmatrixLane*>(lanes[i])->matrices[m] >> 16 * e);
        std::memcpy(::shared + to, &element, 2);
      }
    }
  }
}

}  // namespace host

inline void mbarrier_init(uint32_t barrier, uint32_t arrivals) { emulator::mbarrier_init(barrier, arrivals); }
inline void mbarrier_inval(uint32_t barrier) { emulator::mbarrier_inval(barrier); }
inline void fence_mbarrier_init() {}
inline void mbarrier_arrive(uint32_t barrier) { emulator::mbarrier_arrive(barrier, 0); }
inline void mbarrier_arrive_at_rank(uint32_t barrier, uint32_t rank) {
  emulator::mbarrier_arrive_at_rank(barrier, rank);
}
inline void mbarrier_arrive_expect_tx(uint32_t barrier, uint32_t bytes) { emulator::mbarrier_arrive(barrier, bytes); }
inline void mbarrier_wait(uint32_t barrier, uint32_t parity) { emulator::mbarrier_wait(barrier, parity); }

inline void tma_load(uint32_t to, const TensorMap& map, uint32_t barrier, int32_t x0, int32_t x1, int32_t x2,
                     int32_t x3, int32_t x4) {
  host::tma_load(to, map, barrier, {x0, x1, x2, x3, x4});
}
inline void tma_load(uint32_t to, const TensorMap& map, uint32_t barrier, int32_t x0, int32_t x1, int32_t x2,
                     int32_t x3, int32_t x4, uint64_t) {
  host::tma_load(to, map, barrier, {x0, x1, x2, x3, x4});
}
inline void tma_load_pair(uint32_t to, const TensorMap& map, uint32_t barrier, int32_t x0, int32_t x1, int32_t x2,
                          int32_t x3, int32_t x4) {
  for (uint32_t rank = 0; rank < 2; ++rank) {
    const uint32_t bytes = host::load_box(emulator::shared_of_rank(rank), to, map, {x0, x1, x2, x3, x4});
    emulator::mbarrier_complete_tx_at_rank(barrier, rank, bytes);
  }
}
/// Each box is a bulk group of its own.
inline void tma_store(uint32_t from, const TensorMap& map, int32_t x0, int32_t x1, int32_t x2, int32_t x3, int32_t x4) {
  host::tma_store(from, map, {x0, x1, x2, x3, x4});
}
inline void tma_store(uint32_t from, const TensorMap& map, int32_t x0, int32_t x1, int32_t x2, int32_t x3, int32_t x4,
                      uint64_t) {
  host::tma_store(from, map, {x0, x1, x2, x3, x4});
}
inline void bulk_commit_group() {}
template <int kPending = 0>
inline void bulk_wait_group_read() {
  emulator::bulk_wait_group(kPending);
}
inline void bulk_wait_group() { emulator::bulk_wait_group(); }
inline void stmatrix_x4(uint32_t address, const uint32_t (&matrices)[4]) {
  host::StmatrixLane lane{address, matrices};
  emulator::warp_collective(host::stmatrix<false>, &lane);
}
inline void stmatrix_x4_trans(uint32_t address, const uint32_t (&matrices)[4]) {
  host::StmatrixLane lane{address, matrices};
  emulator::warp_collective(host::stmatrix<true>, &lane);
}
inline void store_shared_8(uint32_t address, uint32_t low, uint32_t high) {
  std::memcpy(::shared + address, &low, 4);
  std::memcpy(::shared + address + 4, &high, 4);
}
inline float4 load_shared_f32x4(uint32_t address) {
  float4 x;
  std::memcpy(&x, ::shared + address, 16);
  return x;
}
inline int32_t max3_as_int(int32_t x, float y, float z) {
  return std::max(x, std::max(__float_as_int(y), __float_as_int(z)));
}
inline uint32_t mov_volatile(uint32_t x) { return x; }
inline void cp_async_arrive(uint32_t barrier) {
  emulator::cp_async_commit();
  emulator::cp_async_wait(0);
  emulator::mbarrier_arrive(barrier, 0);
}
inline void prefetch_tensormap(const TensorMap&) {}
inline bool elect_one() { return threadIdx.x % 32 == 0; }
inline void launch_dependents() {}
inline void wait_for_previous_kernel() {}
inline void fence_proxy_async_shared() {}
inline void named_barrier_sync(int id, int threads) { emulator::barrier(id, threads); }
inline float opaque(float x) { return x; }
template <int kCount>
void warpgroup_reg_dealloc() {}
template <int kCount>
void warpgroup_reg_alloc() {}

inline uint32_t this_lane() { return 1u << threadIdx.x % 32; }
inline uint32_t lower_lanes() { return this_lane() - 1; }
inline int32_t num_ctas() { return static_cast<int32_t>(gridDim.x); }

}  // namespace ptx

inline int32_t uniform(int32_t x) { return __shfl_sync(~0u, x, 0); }

}  // namespace xa::hopper
