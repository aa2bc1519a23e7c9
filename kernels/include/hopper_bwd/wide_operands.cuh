// Products of the kernels past 128 columns. Operands in shared memory are atom columns, resident for a whole tile
// ("held") or streamed through a ring; accumulators are gradients of 64 rows.
#pragma once

#include <cstdint>

#include "element.cuh"
#include "hopper/epilogue.cuh"
#include "hopper/swizzle_atom.cuh"
#include "hopper_bwd/products.cuh"
#include "hopper_bwd/ptx.cuh"
#include "hopper_bwd/wide_shape.cuh"

namespace xa::hopper {

/// The matrix descriptor of an atom column.
template <typename Shape>
__device__ __forceinline__ uint64_t atom_column_descriptor(uint32_t address) {
  using Atom = typename Shape::Atom;
  return matrix_descriptor<Atom>(address, 0, Atom::kBytes);
}

/// Waits for the atom columns of the block at `state`.
template <int kAtomColumns, typename State, typename FullOf>
__device__ __forceinline__ void wait_for_atom_columns(State state, const FullOf& full_of) {
#pragma unroll
  for (int atom_column = 0; atom_column < kAtomColumns; ++atom_column, state.advance()) full_of(state).wait();
}

/// Releases the atom columns of the block at `state` and advances it to the next block.
template <int kAtomColumns, typename State, typename EmptyOf>
__device__ __forceinline__ void release_atom_columns(State& state, const EmptyOf& empty_of) {
#pragma unroll
  for (int atom_column = 0; atom_column < kAtomColumns; ++atom_column, state.advance()) {
    if (threadIdx.x % 32 == 0) empty_of(state).arrive();
  }
}

/// Releases a block that this warp does not read. A stage can be released once it is full: before that, the release
/// would count for its previous block.
template <int kAtomColumns, typename State, typename FullOf, typename EmptyOf>
__device__ __forceinline__ void release_unread(State& state, const FullOf& full_of, const EmptyOf& empty_of) {
  wait_for_atom_columns<kAtomColumns>(state, full_of);
  // A lane that is still waiting could miss the phase.
  __syncwarp();
  release_atom_columns<kAtomColumns>(state, empty_of);
}

/// The 64 held rows of a warpgroup as operand A of wgmma. The first kSteps steps of 16 columns are in registers, as
/// many as there is room for: a wgmma of 64 columns with both operands in shared memory uses all of its bandwidth, and
/// other accesses wait.
template <typename Shape, int kAtomColumns_>
struct HeldRows {
  static constexpr int kAtomColumns = kAtomColumns_, kSteps = Shape::kHeldSteps;
  uint32_t rows;  // in shared memory
  uint32_t fragments[kSteps == 0 ? 1 : kSteps][4];

  __device__ __forceinline__ void load(uint32_t from) {
    using Atom = typename Shape::Atom;
    constexpr int kAtomColumnBytes = Shape::kStreamsHeld ? Shape::kAtomColumnBytes : Shape::kHeldAtomColumnBytes;
    rows = from;
    const int32_t row = threadIdx.x % 128 / 32 * 16 + threadIdx.x % 16, half = threadIdx.x % 32 / 16;
    const uint32_t own = from + Atom::offset(row, half);
#pragma unroll
    for (int k = 0; k < kSteps; ++k) {
      xa::ptx::ldmatrix_x4(fragments[k], (own + k / 4 * kAtomColumnBytes) ^ (k % 4 << 5));
    }
  }
  /// Loads them from the block of the ring at `state`, which advances to the next block. It may be released when the
  /// first product that reads them is complete.
  template <typename State, typename FullOf, typename AtomColumnOf>
  __device__ __forceinline__ void load_streamed(State& state, const FullOf& full_of,
                                                const AtomColumnOf& atom_column_of) {
    wait_for_atom_columns<kAtomColumns>(state, full_of);
    load(atom_column_of(state));
#pragma unroll
    for (int atom_column = 0; atom_column < kAtomColumns; ++atom_column) state.advance();
  }
};

/// Starts d = a b^T: a is the held rows, b the block of 8 kTiles streamed rows at `state`, which advances to the next
/// block.
template <typename T, typename Shape, int kAtomColumns, int kTiles, typename State, typename AtomColumnOf>
__device__ __forceinline__ void start_s_or_dp(float (&d)[kTiles][4], const HeldRows<Shape, kAtomColumns>& held,
                                              State& state, const AtomColumnOf& atom_column_of) {
  using Product = BackwardWgmma<T, 8 * kTiles>;
  constexpr uint64_t kColumnStep = 2;
  ptx::wgmma_fence();
#pragma unroll
  for (int atom_column = 0; atom_column < kAtomColumns; ++atom_column, state.advance()) {
    const uint64_t a = atom_column_descriptor<Shape>(held.rows + atom_column * Shape::kHeldAtomColumnBytes);
    const uint64_t b = atom_column_descriptor<Shape>(atom_column_of(state));
#pragma unroll
    for (int k = 0; k < 4; ++k) {
      const int step = 4 * atom_column + k;
      if (step < Shape::kHeldSteps) {
        if (step == 0) {
          Product::template rs_k_major<false>(d, held.fragments[step], b);
        } else {
          Product::template rs_k_major<true>(d, held.fragments[step], b + k * kColumnStep);
        }
      } else if (step == 0) {
        Product::template ss<false>(d, a, b);
      } else {
        Product::template ss<true>(d, a + k * kColumnStep, b + k * kColumnStep);
      }
    }
  }
  ptx::wgmma_commit_group();
}

/// A gradient of 64 rows: accumulators of `kAtomColumns` atom columns, of which one wgmma takes kAtomColumnsPerWgmma.
/// The number of ring stages is a multiple of that, so these atom columns are adjacent in shared memory.
template <int kAtomColumns_>
struct WideGradient {
  static constexpr int kAtomColumns = kAtomColumns_, kAtomColumnsPerWgmma = kAtomColumns % 3 == 0 ? 3 : 2;
  float accumulators[kAtomColumns / kAtomColumnsPerWgmma][8 * kAtomColumnsPerWgmma][4];

  __device__ __forceinline__ void clear() {
#pragma unroll
    for (auto& part : accumulators) {
#pragma unroll
      for (auto& column : part) {
#pragma unroll
        for (float& x : column) x = 0.0f;
      }
    }
  }
  /// The accumulators of eight columns.
  __device__ __forceinline__ const float (&column_tile(int tile) const)[4] {
    return accumulators[tile / (8 * kAtomColumnsPerWgmma)][tile % (8 * kAtomColumnsPerWgmma)];
  }
};

/// Starts d += a b: a is [64, 16 kSteps] in registers, b the streamed block at `state`.
template <typename T, typename Shape, int kAtomColumns, int kSteps, typename State, typename AtomColumnOf>
__device__ __forceinline__ void start_gradient(WideGradient<kAtomColumns>& d, const uint32_t (&a)[kSteps][4],
                                               State state, const AtomColumnOf& atom_column_of) {
  using Atom = typename Shape::Atom;
  constexpr uint64_t kRowStep = 2 * Atom::kBytes >> 4;
  constexpr int kAtomColumnsPerWgmma = WideGradient<kAtomColumns>::kAtomColumnsPerWgmma;
  ptx::wgmma_fence();
#pragma unroll
  for (int part = 0; part < kAtomColumns / kAtomColumnsPerWgmma; ++part) {
    const uint64_t b = matrix_descriptor<Atom>(atom_column_of(state), Shape::kAtomColumnBytes, Atom::kBytes);
#pragma unroll
    for (int k = 0; k < kSteps; ++k)
      BackwardWgmma<T, 64 * kAtomColumnsPerWgmma>::rs(d.accumulators[part], a[k], b + k * kRowStep);
#pragma unroll
    for (int i = 0; i < kAtomColumnsPerWgmma; ++i) state.advance();
  }
  ptx::wgmma_commit_group();
}

/// Stores the first `num_rows` rows and `num_columns` columns of a gradient of 64 rows to `to`, of type T or f32; rows
/// are `row_stride` elements apart. Executed by a warpgroup. Stores bypass shared memory, so that the next tile's held
/// rows can be loaded before this tile ends.
template <typename T, int kAtomColumns>
__device__ __forceinline__ void store_gradient(const WideGradient<kAtomColumns>& d, float scale, T* to,
                                               int64_t row_stride, int32_t num_rows, int32_t num_columns) {
  const int32_t thread = threadIdx.x % 128, lane = thread % 32;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int32_t row = thread / 32 * 16 + lane / 4 + 8 * half;
    if constexpr (Element<T>::kIs16Bit) {
      T* const columns = to + row * row_stride + lane % 4 * 8;
#pragma unroll
      for (int tile = 0; tile < 8 * kAtomColumns; tile += 4) {
        uint32_t pairs[4];
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const float (&x)[4] = d.column_tile(tile + i);
          pairs[i] = Element<T>::pack(x[2 * half] * scale, x[2 * half + 1] * scale);
        }
        const uint4 eight_columns = transpose_in_quad(pairs);
        if (row < num_rows && 8 * (tile + lane % 4) < num_columns) {
          *reinterpret_cast<uint4*>(columns + 8 * tile) = eight_columns;
        }
      }
    } else {
      T* const columns = to + row * row_stride + lane % 4 * 2;
#pragma unroll
      for (int tile = 0; tile < 8 * kAtomColumns; ++tile) {
        if (row >= num_rows || 8 * tile >= num_columns) break;
        const float (&x)[4] = d.column_tile(tile);
        store_columns(columns + 8 * tile, make_float2(x[2 * half] * scale, x[2 * half + 1] * scale));
      }
    }
  }
}

}  // namespace xa::hopper
