// The warpgroups of a prefill CTA that compute: each has 64 rows of the tile. While the tensor cores make the scores of
// the next block and the output of this one, the warpgroup turns scores into weights; and while one warpgroup does
// that, the tensor cores are another's.
#pragma once

#include <cmath>
#include <cstdint>
#include <type_traits>

#include "element.cuh"
#include "hopper/panel.cuh"
#include "hopper/pipeline.cuh"
#include "hopper/row_state.cuh"
#include "hopper/shape.cuh"
#include "hopper/wgmma.cuh"
#include "output_rows.cuh"
#include "params/hopper_prefill.cuh"
#include "score_form.cuh"
#include "tile_plan.cuh"

namespace xa::hopper {

/// Four neighbouring accumulators, a pair of columns a lane each, become 16 bytes of one of them: that of this lane's
/// number in its quad.
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

/// What becomes of a warp's rows, `first_row` the first: their factors and lse, which need no output, then the output.
template <typename Shape, typename T>
class RowStore {
  using State = RowState<Shape::kValueDim / 8>;
  using Panel = typename Shape::Panel;

 public:
  /// `boxed` where the tile owns all rows of the warp, and they are a box of `out`.
  __device__ __forceinline__ RowStore(const PrefillParams& prefill, const TilePlan& plan, int32_t first_row, bool boxed)
      : prefill_(prefill), plan_(plan.plan), first_row_(first_row), boxed_(boxed) {
    factor_[0] = factor_[1] = plan.value_factor;
  }

  /// As finish_row (softmax.cuh) for both rows at once, without a branch and with the fast functions: nothing else is
  /// left to do until it is over.
  __device__ __forceinline__ void finish(const State& state) {
    constexpr float kLog2E = 1.44269504088896341f, kLn2 = 0.693147180559945309f;
    const AttentionParams& params = prefill_.attention;
    const int32_t packed = plan_.tile.first_row + first_row_ + threadIdx.x % 32 / 4;
    int32_t head[2];
    float sink[2] = {-INFINITY, -INFINITY}, lse[2];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      head[half] = plan_.kv_head * params.group + ((packed + 8 * half) & (params.group - 1));
      if (params.sinks != nullptr) sink[half] = __ldg(params.sinks + head[half]);
    }
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const float sink_log2 = sink[half] * kLog2E, largest = fmaxf(state.max[half], sink_log2);
      const float base = largest == -INFINITY ? 0.0f : largest;
      // Exactly 1 and the sum without a sink.
      const float weight = xa::ptx::exp2_approx(state.max[half] - base);
      const float total = __fmaf_rn(state.sum[half], weight, xa::ptx::exp2_approx(sink_log2 - base));
      const bool sees = state.sum[half] != 0.0f;
      factor_[half] = sees ? factor_[half] * weight * xa::ptx::reciprocal_approx(total) : 0.0f;
      lse[half] = sees ? (base + xa::ptx::log2_approx(total)) * kLn2 : sink[half];
    }
    if (params.lse == nullptr || threadIdx.x % 4 != 0) return;
    const auto to = writer();
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      if (!boxed_ && !to.writes(row(half))) continue;
      const int32_t token = plan_.tile.first_token + ((packed + 8 * half) >> prefill_.group_shift);
      params.lse[static_cast<int64_t>(head[half]) * params.num_tokens + token] = lse[half];
    }
  }
  __device__ __forceinline__ void store(const State& state, uint32_t staging) const {
    if (boxed_) {
      store_box(state, staging);
    } else {
      store_rows(state);
    }
  }

 private:
  __device__ __forceinline__ RowWriter<T, false> writer() const {
    return RowWriter<T, false>(prefill_.attention, plan_.tile, plan_.kv_head);
  }
  /// As T, or as what AttentionParams::out_is_bf16 says.
  __device__ __forceinline__ uint32_t pack(float low, float high) const {
    if constexpr (Shape::kChoosesOutput) {
      return prefill_.attention.out_is_bf16 != 0 ? Element<Bf16>::pack(low, high) : Element<F16>::pack(low, high);
    } else {
      return Element<T>::pack(low, high);
    }
  }
  /// Of this lane.
  __device__ __forceinline__ int32_t row(int half) const {
    return first_row_ + 8 * half + static_cast<int32_t>(threadIdx.x % 32 / 4);
  }

  __device__ __forceinline__ void store_rows(const State& state) const {
    const auto to = writer();
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const bool writes = to.writes(row(half));
      T* const chunks = to.out(writes ? row(half) : 0) + threadIdx.x % 4 * 8;
#pragma unroll
      for (int column = 0; column < Shape::kValueDim / 8; column += 4) {
        uint32_t pairs[4];
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const float* const x = &state.output[column + i][2 * half];
          pairs[i] = pack(x[0] * factor_[half], x[1] * factor_[half]);
        }
        const uint4 chunk = transpose_in_quad(pairs);
        if (writes) *reinterpret_cast<uint4*>(chunks + column * 8) = chunk;
      }
    }
  }

  /// As one box that goes through `staging`.
  __device__ __forceinline__ void store_box(const State& state, uint32_t staging) const {
    const int32_t lane = threadIdx.x % 32, group = prefill_.attention.group;
    if (lane == 0) ptx::stores_read();
    __syncwarp();
    // Matrices: rows 0-7 and 8-15 of one chunk, then of the next one.
    const int32_t row = lane % 16;
#pragma unroll
    for (int column = 0; column < Shape::kValueDim / 8; column += 2) {
      uint32_t matrices[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const float* const x = &state.output[column + i / 2][i % 2 * 2];
        matrices[i] = pack(x[0] * factor_[i % 2], x[1] * factor_[i % 2]);
      }
      const int32_t panel = column / Panel::kChunks, chunk = column % Panel::kChunks + lane / 16;
      ptx::stmatrix_x4(staging + panel * 16 * Panel::kRowBytes + Panel::offset(row, chunk), matrices);
    }
    ptx::fence_stores_for_async();
    __syncwarp();
    if (lane != 0) return;
    const int32_t packed = plan_.tile.first_row + first_row_;
    ptx::store_box(staging, prefill_.out, 0, plan_.kv_head * group + (packed & (group - 1)),
                   plan_.tile.first_token + (packed >> prefill_.group_shift), 0);
  }

  const PrefillParams& prefill_;
  const Plan& plan_;
  const int32_t first_row_;
  const bool boxed_;
  float factor_[2];
};

/// Hides from each row the keys that it does not see, in a block from `first_key` on. Few blocks have an end of what
/// some row sees in them, and hardly one has both ends.
template <int kKeyTiles>
__device__ __forceinline__ void hide_unseen(float (&scores)[kKeyTiles][4], const PrefillParams& prefill,
                                            const Plan& plan, int32_t first_row, int32_t first_key) {
  const Visibility visibility(prefill.attention, plan.tile);
  const int32_t first_column = first_key + 2 * (threadIdx.x % 4);
  const auto query = [&](int half) {
    return (plan.tile.first_row + first_row + 8 * half + static_cast<int32_t>(threadIdx.x % 32 / 4)) >>
           prefill.group_shift;
  };
  const auto hide = [&](int half, auto is_hidden) {
#pragma unroll
    for (int block = 0; block < kKeyTiles; ++block) {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        if (is_hidden(8 * block + i)) scores[block][2 * half + i] = -INFINITY;
      }
    }
  };
  if (first_key + 8 * kKeyTiles > plan.keys.common_end) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int32_t end = visibility.end(query(half)) - first_column;
      hide(half, [&](int32_t column) { return column >= end; });
    }
  }
  if (first_key < plan.keys.common_begin) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int32_t begin = visibility.begin(query(half)) - first_column;
      hide(half, [&](int32_t column) { return column < begin; });
    }
  }
}

/// Clears the rows of a block of V of which no row of the sequence sees the key: 0 times what lies there could be NaN.
/// Each warpgroup does so by itself before it uses the block.
template <typename Shape>
__device__ __forceinline__ void clear_unseen(uint8_t* values, const TilePlan& plan, int32_t first_key) {
  using Panel = typename Shape::Panel;
  using Block = typename Shape::ValueBlock;
  constexpr int kChunks = Block::kPanels * Panel::kChunks;
  for (int32_t item = threadIdx.x % 128; item < Shape::kKeys * kChunks; item += 128) {
    const int32_t row = item / kChunks, chunk = item % kChunks, key = first_key + row;
    if (key >= plan.seen_begin && key < plan.seen_end) continue;
    uint8_t* const to = values + row / 8 * Block::kGroupDistance + chunk / Panel::kChunks * Block::kPanelDistance +
                        row % 8 * Panel::kRowBytes + chunk % Panel::kChunks * 16;
    *reinterpret_cast<uint4*>(to) = make_uint4(0, 0, 0, 0);
  }
  ptx::fence_stores_for_async();
}

/// Computes all tiles of the CTA. The work of a warpgroup.
template <typename Shape, typename T, typename Score>
__device__ __forceinline__ void compute_tiles(const PrefillParams& prefill, const Pipeline<Shape>& pipeline) {
  constexpr int kKeys = Shape::kKeys;
  using Keys = Turn<Shape::kStages>;
  // The modified form's scores are logits to base 2 as they are.
  constexpr bool kRounds = std::is_same_v<Score, score_plain>;
  using Panel = typename Shape::Panel;
  using KeyBlock = typename Shape::KeyBlock;
  using ValueBlock = typename Shape::ValueBlock;
  const AttentionParams& params = prefill.attention;
  const int32_t warp = uniform(threadIdx.x / 32), warpgroup = warp / 4, warp_row = 16 * warp;
  const bool leads = threadIdx.x % 32 == 0;
  const auto sync_own = [&] { ptx::sync(1 + warpgroup, 128); };
  const auto release = [&](const Barrier& barrier) {
    if (leads) barrier.arrive();
  };

  const Score score(params);
  const float unit = kRounds ? ptx::opaque(score.log2_unit()) : 1.0f;
  const uint64_t query =
      tile_descriptor<Panel>(pipeline.query() + warpgroup * 8 * Panel::kGroupBytes, 0, Panel::kGroupBytes);
  const uint64_t keys = tile_descriptor<Panel>(pipeline.keys(0), 0, KeyBlock::kGroupDistance);
  const uint64_t values =
      tile_descriptor<Panel>(pipeline.values(0), ValueBlock::kPanelDistance, ValueBlock::kGroupDistance);

  float scores[kKeys / 8][4];
  uint32_t weights[kKeys / 16][4];
  RowState<Shape::kValueDim / 8> state;

  const auto start_scores = [&](const Keys& turn) {
    constexpr int kSteps = Panel::kColumns / 16;  // of a panel
    const uint64_t block = keys + turn.slot * (KeyBlock::kBytes >> 4);
    ptx::products_fence();
#pragma unroll
    for (int step = 0; step < Shape::kHeadDim / 16; ++step) {
      const uint64_t a = query + (step / kSteps * (Shape::kQueryPanelBytes >> 4) + step % kSteps * 2);
      const uint64_t b = block + (step / kSteps * (KeyBlock::kPanelDistance >> 4) + step % kSteps * 2);
      if (step == 0) {
        Product<T, kKeys>::template scores<false>(scores, a, b);
      } else {
        Product<T, kKeys>::template scores<true>(scores, a, b);
      }
    }
    ptx::products_commit();
  };
  const auto start_output = [&](const Keys& turn) {
    const uint64_t block = values + turn.slot * (ValueBlock::kBytes >> 4);
    ptx::products_fence();
#pragma unroll
    for (int step = 0; step < kKeys / 16; ++step) {
      Product<T, Shape::kValueDim>::values(state.output, weights[step],
                                           block + step * (2 * ValueBlock::kGroupDistance >> 4));
    }
    ptx::products_commit();
  };
  const auto pack_weights = [&] {
#pragma unroll
    for (int step = 0; step < kKeys / 16; ++step) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const float* const pair = &scores[2 * step + i / 2][i % 2 * 2];
        weights[step][i] = Element<T>::pack(pair[0], pair[1]);
      }
    }
  };

  int32_t turn = 0;
  int32_t rows = 1;
#pragma unroll 1
  for (int32_t count = 0, tile = 0; rows > 0; ++count) {
    const Turn<2> plan_turn(count);
    pipeline.plan_full(plan_turn).wait();
    const TilePlan& plan = pipeline.plan(plan_turn);
    rows = uniform(plan.plan.tile.num_rows);
    if (rows > 0) {
      const int32_t first = uniform(plan.first_block), end = uniform(plan.end_block);
      const bool boxed = Shape::kStagesOutput && prefill.stores_boxes != 0 && warp_row + 16 <= rows;
      RowStore<Shape, T> store(prefill, plan, warp_row, boxed);
      const auto finish_rows = [&] {
        state.finish();
        store.finish(state);
      };
      state.clear();
      if (first < end) {
        // Blocks [common_begin, common_end) are seen whole by every row.
        const int32_t common_begin = uniform((plan.plan.keys.common_begin + kKeys - 1) / kKeys);
        const int32_t common_end = uniform(plan.plan.keys.common_end / kKeys);
        int32_t block = end - 1;
        const auto weigh = [&](bool masked) {
          score.template apply<T>(scores, plan.plan, warp_row, block * kKeys);
          if (masked) hide_unseen(scores, prefill, plan.plan, warp_row, block * kKeys);
          state.absorb(scores, unit);
        };
        // Of a block that has been taken up and not yet multiplied.
        const auto clean_values = [&] {
          const int32_t first_key = block * kKeys;
          if (first_key >= plan.seen_begin && first_key + kKeys <= plan.seen_end) return;
          const Keys now(turn);
          pipeline.values_full(now).wait();
          clear_unseen<Shape>(pipeline.value_bytes(now.slot), plan, first_key);
          sync_own();
        };
        const auto step = [&](bool masked) {
          const Keys now(turn), next(turn + 1);
          pipeline.keys_full(next).wait();
          start_scores(next);
          pipeline.values_full(now).wait();
          start_output(now);
          ptx::products_wait<1>();
          release(pipeline.keys_empty(next));
          if (block == first) release(pipeline.query_empty(tile));
          weigh(masked);
          ptx::products_wait<0>();
          pack_weights();
          release(pipeline.values_empty(now));
          if (state.has_risen()) {
            state.rescale_output();
            if constexpr (kRounds) state.template round_largest<T>(scores);
          }
          ++turn;
          if (masked) clean_values();
        };

        pipeline.query_full(tile).wait();
        const Keys now(turn);
        pipeline.keys_full(now).wait();
        start_scores(now);
        ptx::products_wait<0>();
        release(pipeline.keys_empty(now));
        if (block == first) release(pipeline.query_empty(tile));
        if (block < common_begin || block >= common_end) {
          weigh(true);
        } else {
          weigh(false);
        }
        if constexpr (kRounds) state.template round_largest<T>(scores);
        pack_weights();
        clean_values();
        --block;
#pragma unroll 1
        for (; block >= max(first, common_end); --block) step(true);
#pragma unroll 1
        for (; block >= max(first, common_begin); --block) step(false);
#pragma unroll 1
        for (; block >= first; --block) step(true);
        const Keys last(turn);
        pipeline.values_full(last).wait();
        start_output(last);
        // What needs no output is done before it is there.
        finish_rows();
        ptx::products_wait<0>();
        release(pipeline.values_empty(last));
        ++turn;
        ++tile;
      } else {
        finish_rows();
      }
      store.store(state, pipeline.output(warp));
    }
    __syncwarp();
    release(pipeline.plan_empty(plan_turn));
  }
  ptx::stores_done();
  if (params.clears_unowned_rows != 0) {
    pipeline.order_known().wait();
    const bool ascend = pipeline.starts_ascend() != 0;
    clear_unowned_rows<T, Shape::kComputeThreads>(params, ascend, owned_rows(params, ascend), blockIdx.x, gridDim.x);
  }
}

}  // namespace xa::hopper
