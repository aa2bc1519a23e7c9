// The compute warpgroups of an f32 prefill CTA, each with 64 rows of the work tile. A product takes six products of
// bf16 parts (f32_parts.cuh), so the tensor cores are busy for most of a step. Meanwhile the warps that have issued the
// products split what is needed next: V of this block beneath Q K^T, K of the next one beneath P V.
#pragma once

#include <cstdint>

#include "element.cuh"
#include "hopper/f32_parts.cuh"
#include "hopper/f32_shape.cuh"
#include "hopper/mask.cuh"
#include "hopper/online_softmax.cuh"
#include "hopper/pipeline.cuh"
#include "hopper/swizzle_atom.cuh"
#include "hopper/tile_loop.cuh"
#include "hopper/wgmma.cuh"
#include "logits_transform.cuh"
#include "params/hopper_prefill.cuh"
#include "work_tile.cuh"

namespace xa::hopper {

/// Splits four adjacent columns of a row and stores their parts in the tile at `to`.
template <typename Atom, typename Block>
__device__ __forceinline__ void store_parts(uint32_t to, int32_t row, int32_t column, const float4& x) {
  uint32_t low[kParts], high[kParts];
  split(x.x, x.y, low);
  split(x.z, x.w, high);
  to += column / Atom::kColumns * Block::kAtomColumnBytes + Atom::offset(row, column % Atom::kColumns / 8) +
        column % 8 * 2;
#pragma unroll
  for (int part = 0; part < kParts; ++part) ptx::store_shared_8(to + part * Block::kPartBytes, low[part], high[part]);
}

/// A compute warpgroup loads and splits its 64 query rows of a tile. Rows and columns that are not there become zeros.
template <typename Shape>
__device__ __forceinline__ void load_query_parts(const HopperPrefillParams& prefill, const PrefillTile& tile,
                                                 uint32_t to) {
  constexpr int kThreadsPerRow = Shape::kHeadDim / 4, kRowsAtOnce = 128 / kThreadsPerRow, kBatch = 8;
  const AttentionParams& params = prefill.attention;
  // Computed again for each tile, which saves a register.
  const int32_t warpgroup = xa::ptx::opaque(static_cast<int32_t>(threadIdx.x)) / 128;
  const int32_t thread = threadIdx.x % 128, column = thread % kThreadsPerRow * 4;
  const int32_t first_row = 64 * warpgroup + thread / kThreadsPerRow, num_rows = tile.work.tile.num_rows;
  const int32_t first_token = tile.work.tile.first_token;
  const float* const base =
      static_cast<const float*>(params.q) + int64_t{tile.work.kv_head} * params.group * params.q_head_stride + column;
#pragma unroll 1
  for (int32_t batch = 0; batch < 64; batch += kBatch * kRowsAtOnce) {
    float4 x[kBatch];
#pragma unroll
    for (int i = 0; i < kBatch; ++i) {
      const int32_t row = first_row + batch + i * kRowsAtOnce, query = query_of_row(prefill, row);
      const int64_t token = first_token + query, head = row - query * params.group;
      x[i] = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
      if (row < num_rows && column < params.head_dim) {
        x[i] =
            __ldg(reinterpret_cast<const float4*>(base + token * params.q_token_stride + head * params.q_head_stride));
      }
    }
#pragma unroll
    for (int i = 0; i < kBatch; ++i) {
      store_parts<typename Shape::Atom, typename Shape::QueryBlock>(to, first_row + batch + i * kRowsAtOnce, column,
                                                                    x[i]);
    }
  }
  ptx::fence_proxy_async_shared();
  ptx::named_barrier_sync(1 + warpgroup, 128);
}

/// A compute warpgroup: computes its rows of all tiles of the CTA.
template <typename Shape, typename LogitsTransform>
__device__ __forceinline__ void compute_f32_tiles(const HopperPrefillParams& prefill, const Pipeline<Shape>& pipeline) {
  constexpr int kKeys = Shape::kKeys;
  using Atom = typename Shape::Atom;
  using QueryBlock = typename Shape::QueryBlock;
  using KeyParts = typename Shape::KeyParts;
  using ValueParts = typename Shape::ValueParts;
  const int32_t warp = uniform(threadIdx.x / 32), warpgroup = warp / 4, warp_row = 16 * warp;
  const auto sync_warpgroups = [] {
    ptx::named_barrier_sync(1 + Shape::kComputeThreads / 128, Shape::kComputeThreads);
  };

  const LogitsTransform transform(prefill.attention);
  const float unit = transform.log2_unit();
  const uint64_t query =
      matrix_descriptor<Atom>(pipeline.query_parts() + warpgroup * 8 * Atom::kBytes, 0, Atom::kBytes);
  const uint64_t keys = matrix_descriptor<Atom>(pipeline.key_parts(), 0, Atom::kBytes);
  const uint64_t values = matrix_descriptor<Atom>(pipeline.value_parts(), ValueParts::kAtomColumnBytes, Atom::kBytes);

  float scores[kKeys / 8][4];
  uint32_t weights[kParts][kKeys / 16][4];
  OnlineSoftmax<Shape::kValueDim / 8> state;

  int32_t block_count = 0;  // of K and of V
  // Splits the next block that is loaded, of K or V, into the tile at `to`. All compute warps take part.
  const auto split_block = [&](uint32_t to) {
    constexpr int kThreadsPerRow = Shape::kHeadDim / 4, kRowsAtOnce = Shape::kComputeThreads / kThreadsPerRow;
    // Addresses are computed again for each block, which saves registers.
    const int32_t thread = xa::ptx::opaque(static_cast<int32_t>(threadIdx.x)), column = thread % kThreadsPerRow * 4,
                  first_row = thread / kThreadsPerRow;
    const PipelineState<Shape::kStages> state(block_count++);
    pipeline.keys_full(state).wait();
    // Several rows at a time: the instructions of one would mostly wait for each other.
    constexpr int kBatch = 4;
#pragma unroll
    for (int32_t batch = 0; batch < kKeys / kRowsAtOnce; batch += kBatch) {
      float4 x[kBatch];
#pragma unroll
      for (int i = 0; i < kBatch; ++i) {
        const int32_t chunk = (batch + i) * Shape::kComputeThreads + thread;
        x[i] = ptx::load_shared_f32x4(pipeline.keys(state.stage) + chunk * 16);
      }
#pragma unroll
      for (int i = 0; i < kBatch; ++i) {
        store_parts<Atom, KeyParts>(to, first_row + (batch + i) * kRowsAtOnce, column, x[i]);
      }
    }
    ptx::fence_proxy_async_shared();
    __syncwarp();
    if (thread % 32 == 0) pipeline.keys_empty(state).arrive();
  };
  // Issues S = Q K^T.
  const auto issue_qk = [&] {
    constexpr int kSteps = Atom::kColumns / 16;  // per atom column
    ptx::wgmma_fence();
#pragma unroll
    for (int i = 0; i < kPartProducts; ++i) {
      const PartProduct product(i);
#pragma unroll
      for (int step = 0; step < Shape::kHeadDim / 16; ++step) {
        const int column = step / kSteps, in_column = step % kSteps * 2;
        const uint64_t a = query + ((product.a * QueryBlock::kPartBytes + column * QueryBlock::kAtomColumnBytes) >> 4);
        const uint64_t b = keys + ((product.b * KeyParts::kPartBytes + column * KeyParts::kAtomColumnBytes) >> 4);
        if (i == 0 && step == 0) {
          Wgmma<Bf16, kKeys>::template ss<false>(scores, a + in_column, b + in_column);
        } else {
          Wgmma<Bf16, kKeys>::template ss<true>(scores, a + in_column, b + in_column);
        }
      }
    }
    ptx::wgmma_commit_group();
  };
  // O = O rescale + P V, an atom column of V at a time; calls `meanwhile` beneath the first. The sum of a block is
  // rounded to O's precision once: the tensor cores truncate where they add, which would show in thousands of additions
  // to O itself.
  const auto multiply_pv = [&](const auto& meanwhile) {
    constexpr int kColumns = Atom::kColumns;
#pragma unroll
    for (int column = 0; column < Shape::kValueDim / kColumns; ++column) {
      const uint64_t block = values + (column * ValueParts::kAtomColumnBytes >> 4);
      float sums[kColumns / 8][4] = {};
      ptx::wgmma_fence();
#pragma unroll
      for (int i = 0; i < kPartProducts; ++i) {
        const PartProduct product(i);
#pragma unroll
        for (int step = 0; step < kKeys / 16; ++step) {
          const uint64_t b = block + ((product.b * ValueParts::kPartBytes + step * 2 * Atom::kBytes) >> 4);
          Wgmma<Bf16, kColumns>::rs(sums, weights[product.a][step], b);
        }
      }
      ptx::wgmma_commit_group();
      if (column == 0) meanwhile();
      ptx::wgmma_wait_group<0>();
#pragma unroll
      for (int i = 0; i < kColumns / 8; ++i) {
#pragma unroll
        for (int j = 0; j < 4; ++j) {
          float& o = state.output[column * kColumns / 8 + i][j];
          o = __fmaf_rn(o, state.rescale[j / 2], sums[i][j]);
        }
      }
    }
  };
  // Splits P in `scores` into the A operands `weights`.
  const auto split_weights = [&] {
#pragma unroll
    for (int step = 0; step < kKeys / 16; ++step) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const float* const pair = &scores[2 * step + i / 2][i % 2 * 2];
        uint32_t parts[kParts];
        split(pair[0], pair[1], parts);
#pragma unroll
        for (int part = 0; part < kParts; ++part) weights[part][step][i] = parts[part];
      }
    }
  };

  const auto attend = [&](const PrefillTile& tile, int32_t, int32_t end, int32_t, const auto& finalize_rows) {
    const auto transformed_rows = transform.rows(tile.work, warp_row, FindRow{prefill, tile});
    load_query_parts<Shape>(prefill, tile, pipeline.query_parts());
    split_block(pipeline.key_parts());
    sync_warpgroups();
#pragma unroll 1
    for (int32_t block = end - 1; block >= tile.first_block; --block) {
      issue_qk();
      split_block(pipeline.value_parts());
      ptx::wgmma_wait_group<0>();
      transform.template apply<F32>(scores, transformed_rows, block * kKeys);
      // Every row attends to the keys [common_begin, common_end).
      const KeyRange& range = tile.work.keys;
      if (block * kKeys < range.common_begin || (block + 1) * kKeys > range.common_end) {
        mask_scores(scores, prefill, tile, warp_row, block * kKeys);
      }
      state.update(scores, unit);
      split_weights();
      // V is split, and K may be replaced.
      sync_warpgroups();
      multiply_pv([&] {
        if (block > tile.first_block) split_block(pipeline.key_parts());
      });
      // K is split, and V may be replaced.
      sync_warpgroups();
    }
    finalize_rows();
  };
  for_each_tile<Shape, F32>(prefill, pipeline, warp, state, block_count, attend);
}

}  // namespace xa::hopper
