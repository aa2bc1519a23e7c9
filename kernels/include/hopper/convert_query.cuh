// Rows of Q of a prefill tile, converted from bf16 to f16 in shared memory, for kernels that compute in f16.
#pragma once

#include <cstdint>

#include "hopper/packed_ptx.cuh"
#include "hopper/pipeline.cuh"
#include "hopper/ptx.cuh"
#include "ptx.cuh"
#include "query_rows.cuh"

namespace xa::hopper {

/// Converts a compute warp's 16 rows of Q from bf16 to f16, in place, and leaves the factors of their scores in
/// `row_factors`. A power of two brings a row's largest number near the end of f16's range. The warpgroup must be
/// synchronised afterwards.
template <typename Shape>
__device__ __forceinline__ void convert_query(const Pipeline<Shape>& pipeline, int32_t warp_row) {
  using Atom = typename Shape::Atom;
  // Two lanes share a row. Eight lanes have eight rows, so they load chunks from different banks.
  constexpr int kChunks = Shape::kHeadDim / 16;  // of half a row
  const int32_t lane = threadIdx.x % 32, row = lane % 16, first = lane / 16 * kChunks;
  const uint32_t rows = pipeline.query() + (warp_row + row) / 8 * Atom::kBytes;
  const auto address = [&](int i) {
    const int32_t chunk = first + i;
    return rows + chunk / Atom::kChunks * Shape::kQueryAtomColumnBytes + Atom::offset(row % 8, chunk % Atom::kChunks);
  };
  uint4 chunks[kChunks];
  uint32_t largest = 0;
#pragma unroll
  for (int i = 0; i < kChunks; ++i) {
    chunks[i] = xa::ptx::load_shared_16(address(i));
    // The magnitudes of both numbers of a pair at once.
    for (const uint32_t pair : {chunks[i].x, chunks[i].y, chunks[i].z, chunks[i].w}) {
      largest = ptx::max_u16x2(largest, pair & 0x7fff7fffu);
    }
  }
  largest = max(largest & 0xffff, largest >> 16);
  const QueryScale scale(max(largest, __shfl_xor_sync(~0u, largest, 16)));
  // A power of two has no more bits in f32 than in bf16.
  const uint32_t factor = __byte_perm(__float_as_uint(scale.factor), 0, 0x3232);
  const auto convert = [&](uint32_t pair) {
    const uint32_t scaled = ptx::multiply_bf16x2(pair, factor);
    return xa::ptx::pack_f16(__uint_as_float(scaled << 16), __uint_as_float(scaled & 0xffff0000u));
  };
#pragma unroll
  for (int i = 0; i < kChunks; ++i) {
    const uint4& x = chunks[i];
    xa::ptx::store_shared_16(address(i), make_uint4(convert(x.x), convert(x.y), convert(x.z), convert(x.w)));
  }
  if (lane < 16) pipeline.row_factors()[warp_row + row] = scale.inverse;
  ptx::fence_proxy_async_shared();
}

}  // namespace xa::hopper
