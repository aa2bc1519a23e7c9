// The epilogue of the prefill kernel: normalises a warp's 16 rows and stores them.
#pragma once

#include <cstdint>

#include "element.cuh"
#include "hopper/online_softmax.cuh"
#include "hopper/ptx.cuh"
#include "hopper/shape.cuh"
#include "hopper/swizzle_atom.cuh"
#include "log2_units.cuh"
#include "output_rows.cuh"
#include "params/hopper_prefill.cuh"
#include "work_tile.cuh"

namespace xa::hopper {

/// Transposes 4x4 pairs within a quad of lanes: each lane has a pair of columns of four adjacent accumulators before,
/// and all eight columns of one accumulator after, that of its index in the quad.
__device__ __forceinline__ uint4 transpose_in_quad(uint32_t (&pairs)[4]) {
  const int32_t lane = threadIdx.x;
#pragma unroll
  for (int distance = 1; distance <= 2; distance *= 2) {
    const bool upper = (lane & distance) != 0;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      if ((i & distance) != 0) continue;
      uint32_t& low = pairs[i];
      uint32_t& high = pairs[i + distance];
      const uint32_t other = __shfl_xor_sync(~0u, upper ? low : high, distance);
      (upper ? low : high) = other;
    }
  }
  return make_uint4(pairs[0], pairs[1], pairs[2], pairs[3]);
}

/// Stores a warp's 16 rows from `first_row` on. `finalize` computes output factors and lse, which do not need O and so
/// overlap with the last P V; `store` then stores O.
template <typename Shape, typename T>
class Epilogue {
  using State = OnlineSoftmax<Shape::kOutputColumns / 8>;
  using Atom = typename Shape::Atom;

 public:
  /// `by_tma`: all 16 rows belong to the tile and are a box of `out`.
  __device__ __forceinline__ Epilogue(const HopperPrefillParams& prefill, const PrefillTile& tile, int32_t first_row,
                                      bool by_tma)
      : prefill_(prefill), work_(tile.work), first_row_(first_row), by_tma_(by_tma) {
    factor_[0] = factor_[1] = tile.value_factor;
  }

  /// As finish_row (softmax.cuh), for both rows of a lane at once, branch-free and with approximate functions: its
  /// latency is exposed.
  __device__ __forceinline__ void finalize(const State& state) {
    const AttentionParams& params = prefill_.attention;
    const int32_t packed = work_.tile.first_row + first_row_ + threadIdx.x % 32 / 4;
    int32_t head[2];
    float sink[2] = {-INFINITY, -INFINITY}, lse[2];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int32_t in_pack = head_in_pack(packed + 8 * half);
      head[half] = work_.kv_head * prefill_.group_heads + in_pack;
      if (params.sinks != nullptr && in_pack < prefill_.group_heads) sink[half] = __ldg(params.sinks + head[half]);
    }
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const float sink_log2 = sink[half] * kLog2E, largest = fmaxf(state.max[half], sink_log2);
      const float base = largest == -INFINITY ? 0.0f : largest;
      // Without a sink `weight` is exactly 1 and `total` is the sum.
      const float weight = xa::ptx::exp2_approx(state.max[half] - base);
      const float total = __fmaf_rn(state.sum[half], weight, xa::ptx::exp2_approx(sink_log2 - base));
      const bool has_keys = state.sum[half] != 0.0f;
      factor_[half] = has_keys ? factor_[half] * weight * xa::ptx::reciprocal_approx(total) : 0.0f;
      lse[half] = has_keys ? (base + xa::ptx::log2_approx(total)) * kLn2 : sink[half];
    }
    if (params.lse == nullptr || threadIdx.x % 4 != 0 || first_output_column<Shape>() != 0) return;
    const auto to = writer();
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      if (!by_tma_ && !to.writes(row(half))) continue;
      if (is_padding(half)) continue;
      const int32_t token = work_.tile.first_token + query_of_row(prefill_, packed + 8 * half);
      params.lse[static_cast<int64_t>(head[half]) * params.num_tokens + token] = lse[half];
    }
  }
  /// Stores O; `staging` is this warp's part of the staging area.
  __device__ __forceinline__ void store(const State& state, uint32_t staging) const {
    if constexpr (!Element<T>::kIs16Bit) {
      store_f32(state);
    } else if (Shape::kMayWidenOutput && prefill_.attention.widens_out != 0) {
      store_f32(state);
    } else if (by_tma_) {
      if constexpr (Shape::kOutputPasses > 1) {
        store_atom_columns_by_tma(state, staging);
      } else if constexpr (Shape::kColumnWarpgroups == 1) {
        store_by_tma(state, staging);
      }
    } else {
      store_by_row(state);
    }
  }

 private:
  __device__ __forceinline__ RowWriter<T, false> writer() const {
    return RowWriter<T, false>(prefill_.attention, work_.tile, work_.kv_head, prefill_.group_heads);
  }
  /// Packs as T, or as the type that AttentionParams::out_is_bf16 selects.
  __device__ __forceinline__ uint32_t pack(float low, float high) const {
    if constexpr (Shape::kOutputTypeAtRunTime) {
      return prefill_.attention.out_is_bf16 != 0 ? Element<Bf16>::pack(low, high) : Element<F16>::pack(low, high);
    } else {
      return Element<T>::pack(low, high);
    }
  }
  /// The head of a row of the tile, among those of its pack.
  __device__ __forceinline__ int32_t head_in_pack(int32_t row) const {
    return row - query_of_row(prefill_, row) * prefill_.attention.group;
  }
  /// Row of the tile that this lane holds in `half` of the accumulators.
  __device__ __forceinline__ int32_t row(int half) const {
    return first_row_ + 8 * half + static_cast<int32_t>(threadIdx.x % 32 / 4);
  }
  /// Whether that row has a padding head, one of the last ones of a pack.
  __device__ __forceinline__ bool is_padding(int half) const {
    if (!Shape::kHasPaddingHeads || prefill_.group_heads == prefill_.attention.group) return false;
    // Kept since the start of the tile, the row would be spilled past D 128; found again, D 128 is 1 to 2 % slower.
    const uint32_t thread = Shape::kHeadDim > 128 ? xa::ptx::opaque(threadIdx.x) : threadIdx.x;
    const int32_t row = first_row_ + 8 * half + static_cast<int32_t>(thread % 32 / 4);
    return head_in_pack(work_.tile.first_row + row) >= prefill_.group_heads;
  }
  /// The token of the warp's first row. If the rows leave by TMA, that row has the first head of the pack, which has at
  /// most 16.
  __device__ __forceinline__ int32_t first_token() const {
    return work_.tile.first_token + query_of_row(prefill_, work_.tile.first_row + first_row_);
  }

  /// Stores row by row, 16 bytes per lane.
  __device__ __forceinline__ void store_by_row(const State& state) const {
    const auto to = writer();
    const int32_t first_column = first_output_column<Shape>();
    const int32_t chunks_left =
        prefill_.attention.value_dim / 8 - first_column / 8 - static_cast<int32_t>(threadIdx.x % 4);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const bool is_live = to.writes(row(half)) && !is_padding(half);
      T* const chunks = to.out(is_live ? row(half) : 0) + first_column + threadIdx.x % 4 * 8;
#pragma unroll
      for (int column = 0; column < Shape::kOutputColumns / 8; column += 4) {
        uint32_t pairs[4];
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const float* const x = &state.output[column + i][2 * half];
          pairs[i] = pack(x[0] * factor_[half], x[1] * factor_[half]);
        }
        const uint4 chunk = transpose_in_quad(pairs);
        if (is_live && column < chunks_left) *reinterpret_cast<uint4*>(chunks + column * 8) = chunk;
      }
    }
  }

  /// Stores the rows as f32. Each quad of lanes stores 32 bytes.
  __device__ __forceinline__ void store_f32(const State& state) const {
    const auto to = writer();
    const int32_t first_column = first_output_column<Shape>();
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      if (!to.writes(row(half)) || is_padding(half)) continue;
#pragma unroll
      for (int column = 0; column < Shape::kOutputColumns / 8; ++column) {
        if (first_column + 8 * column >= prefill_.attention.value_dim) break;
        const float* const x = &state.output[column][2 * half];
        to.store_out(row(half), first_column + 8 * column + threadIdx.x % 4 * 2,
                     make_float2(x[0] * factor_[half], x[1] * factor_[half]));
      }
    }
  }

  /// Stores the 16 rows as one TMA box by way of `staging`.
  __device__ __forceinline__ void store_by_tma(const State& state, uint32_t staging) const {
    const int32_t lane = threadIdx.x % 32;
    if (lane == 0) ptx::bulk_wait_group_read();
    __syncwarp();
    // stmatrix stores rows 0-7 and 8-15 of one 16-byte chunk, then of the next.
    const int32_t row = lane % 16;
#pragma unroll
    for (int column = 0; column < Shape::kValueDim / 8; column += 2) {
      uint32_t matrices[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const float* const x = &state.output[column + i / 2][i % 2 * 2];
        matrices[i] = pack(x[0] * factor_[i % 2], x[1] * factor_[i % 2]);
      }
      const int32_t atom_column = column / Atom::kChunks, chunk = column % Atom::kChunks + lane / 16;
      ptx::stmatrix_x4(staging + atom_column * 16 * Atom::kRowBytes + Atom::offset(row, chunk), matrices);
    }
    ptx::fence_proxy_async_shared();
    __syncwarp();
    if (lane != 0) return;
    const int32_t boxes = prefill_.clips_columns != 0 ? Shape::ValueBlock::kAtomColumns : 1;
#pragma unroll 1
    for (int32_t box = 0; box < boxes; ++box) {
      ptx::tma_store(staging + box * 16 * Atom::kRowBytes, prefill_.out, box * Atom::kColumns, 0, work_.kv_head,
                     first_token(), 0);
    }
    ptx::bulk_commit_group();
  }

  /// The same, one TMA box for each atom column, where `staging` has room for two of them: while one is written, the
  /// one before leaves.
  __device__ __forceinline__ void store_atom_columns_by_tma(const State& state, uint32_t staging) const {
    const int32_t lane = threadIdx.x % 32;
    const int32_t row = lane % 16;
#pragma unroll
    for (int atom_column = 0; atom_column < Shape::kOutputPasses; ++atom_column) {
      const uint32_t to = staging + atom_column % 2 * 16 * Atom::kRowBytes;
      if (lane == 0) ptx::bulk_wait_group_read<1>();
      __syncwarp();
#pragma unroll
      for (int chunk = 0; chunk < Atom::kChunks; chunk += 2) {
        uint32_t matrices[4];
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const float* const x = &state.output[atom_column * Atom::kChunks + chunk + i / 2][i % 2 * 2];
          matrices[i] = pack(x[0] * factor_[i % 2], x[1] * factor_[i % 2]);
        }
        ptx::stmatrix_x4(to + Atom::offset(row, chunk + lane / 16), matrices);
      }
      ptx::fence_proxy_async_shared();
      __syncwarp();
      if (lane != 0) continue;
      ptx::tma_store(to, prefill_.out, 0, 0, work_.kv_head, first_token(), atom_column);
      ptx::bulk_commit_group();
    }
  }

  const HopperPrefillParams& prefill_;
  const WorkTile& work_;
  const int32_t first_row_;
  const bool by_tma_;
  float factor_[2];
};

}  // namespace xa::hopper
