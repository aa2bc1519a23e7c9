// Products of the kernels for more than 128 columns. Their operands are panels of 64 columns, in shared memory for a
// whole tile ("held") or in a ring; accumulators are gradients of 64 rows.
#pragma once

#include <cstdint>

#include "element.cuh"
#include "hopper/epilogue.cuh"
#include "hopper/swizzle_atom.cuh"
#include "hopper_bwd/products.cuh"
#include "hopper_bwd/ptx.cuh"
#include "hopper_bwd/wide_shape.cuh"

namespace xa::hopper {

/// A panel as an operand.
template <typename Shape>
__device__ __forceinline__ uint64_t panel_descriptor(uint32_t address) {
  using Panel = typename Shape::Panel;
  return matrix_descriptor<Panel>(address, 0, Panel::kBytes);
}

/// Waits for the panels of the block at `at`.
template <int kPanels, typename At, typename FullOf>
__device__ __forceinline__ void wait_for_panels(At at, const FullOf& full_of) {
#pragma unroll
  for (int panel = 0; panel < kPanels; ++panel, at.advance()) full_of(at).wait();
}

/// Releases the panels of the block at `at`, which goes on to the next block.
template <int kPanels, typename At, typename EmptyOf>
__device__ __forceinline__ void release_panels(At& at, const EmptyOf& empty_of) {
#pragma unroll
  for (int panel = 0; panel < kPanels; ++panel, at.advance()) {
    if (threadIdx.x % 32 == 0) empty_of(at).arrive();
  }
}

/// The 64 held rows of a warpgroup as operand a of wgmma. The first kSteps steps of 16 columns are in registers, as
/// many as there is room for: products with both operands in shared memory take all that it delivers at 64 columns, and
/// other accesses wait for them.
template <typename Shape, int kPanels_>
struct HeldRows {
  static constexpr int kPanels = kPanels_, kSteps = Shape::kHeldSteps;
  uint32_t rows;  // in shared memory
  uint32_t fragments[kSteps == 0 ? 1 : kSteps][4];

  __device__ __forceinline__ void load(uint32_t from) {
    using Panel = typename Shape::Panel;
    rows = from;
    const int32_t row = threadIdx.x % 128 / 32 * 16 + threadIdx.x % 16, half = threadIdx.x % 32 / 16;
    const uint32_t own = from + Panel::offset(row, half);
#pragma unroll
    for (int k = 0; k < kSteps; ++k) {
      xa::ptx::ldmatrix_x4(fragments[k], (own + k / 4 * Shape::kHeldPanelBytes) ^ (k % 4 << 5));
    }
  }
};

/// Starts d = a b^T: a is the held rows, b the block of 8 kTiles rows at `at` of a ring, where `at` goes on to the next
/// block.
template <typename T, typename Shape, int kPanels, int kTiles, typename At, typename PanelOf>
__device__ __forceinline__ void start_scores_of(float (&d)[kTiles][4], const HeldRows<Shape, kPanels>& held, At& at,
                                                const PanelOf& panel_of) {
  using Product = BackwardProduct<T, 8 * kTiles>;
  constexpr uint64_t kAlong = 2;
  ptx::wgmma_fence();
#pragma unroll
  for (int panel = 0; panel < kPanels; ++panel, at.advance()) {
    const uint64_t a = panel_descriptor<Shape>(held.rows + panel * Shape::kHeldPanelBytes);
    const uint64_t b = panel_descriptor<Shape>(panel_of(at));
#pragma unroll
    for (int k = 0; k < 4; ++k) {
      const int step = 4 * panel + k;
      if (step < Shape::kHeldSteps) {
        if (step == 0) {
          Product::template along_registers<false>(d, held.fragments[step], b);
        } else {
          Product::template along_registers<true>(d, held.fragments[step], b + k * kAlong);
        }
      } else if (step == 0) {
        Product::template along<false>(d, a, b);
      } else {
        Product::template along<true>(d, a + k * kAlong, b + k * kAlong);
      }
    }
  }
  ptx::wgmma_commit_group();
}

/// A gradient of 64 rows: accumulators of `kPanels` panels, of which one wgmma takes kAtOnce. Rings have a multiple of
/// kAtOnce stages, so that these panels are adjacent.
template <int kPanels_>
struct WideGradient {
  static constexpr int kPanels = kPanels_, kAtOnce = kPanels % 3 == 0 ? 3 : 2;
  float sums[kPanels / kAtOnce][8 * kAtOnce][4];

  __device__ __forceinline__ void clear() {
#pragma unroll
    for (auto& some : sums) {
#pragma unroll
      for (auto& column : some) {
#pragma unroll
        for (float& x : column) x = 0.0f;
      }
    }
  }
  /// The accumulators of eight columns.
  __device__ __forceinline__ const float (&of(int tile) const)[4] {
    return sums[tile / (8 * kAtOnce)][tile % (8 * kAtOnce)];
  }
};

/// Starts d += a b: a is [64, 16 kSteps] in registers, b the block at `at` of a ring.
template <typename T, typename Shape, int kPanels, int kSteps, typename At, typename PanelOf>
__device__ __forceinline__ void start_gradient(WideGradient<kPanels>& d, const uint32_t (&a)[kSteps][4], At at,
                                               const PanelOf& panel_of) {
  using Panel = typename Shape::Panel;
  constexpr uint64_t kDown = 2 * Panel::kBytes >> 4;
  constexpr int kAtOnce = WideGradient<kPanels>::kAtOnce;
  ptx::wgmma_fence();
#pragma unroll
  for (int some = 0; some < kPanels / kAtOnce; ++some) {
    const uint64_t b = matrix_descriptor<Panel>(panel_of(at), Shape::kPanelBytes, Panel::kBytes);
#pragma unroll
    for (int k = 0; k < kSteps; ++k) BackwardProduct<T, 64 * kAtOnce>::weigh(d.sums[some], a[k], b + k * kDown);
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) at.advance();
  }
  ptx::wgmma_commit_group();
}

/// Stores the first `num_rows` rows and `num_columns` columns of a gradient of 64 rows; `to` is the first of them, rows
/// are `row_stride` elements apart. Executed by a warpgroup. Stores go around shared memory, so that the operands that
/// a tile holds can be replaced by the next tile's before it ends.
template <typename T, int kPanels>
__device__ __forceinline__ void store_gradient(const WideGradient<kPanels>& d, float scale, T* to, int64_t row_stride,
                                               int32_t num_rows, int32_t num_columns) {
  const int32_t thread = threadIdx.x % 128, lane = thread % 32;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int32_t row = thread / 32 * 16 + lane / 4 + 8 * half;
    T* const columns = to + row * row_stride + lane % 4 * 8;
#pragma unroll
    for (int tile = 0; tile < 8 * kPanels; tile += 4) {
      uint32_t pairs[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const float (&x)[4] = d.of(tile + i);
        pairs[i] = Element<T>::pack(x[2 * half] * scale, x[2 * half + 1] * scale);
      }
      const uint4 eight_columns = transpose_in_quad(pairs);
      if (row < num_rows && 8 * (tile + lane % 4) < num_columns) {
        *reinterpret_cast<uint4*>(columns + 8 * tile) = eight_columns;
      }
    }
  }
}

}  // namespace xa::hopper
