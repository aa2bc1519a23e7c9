// The gradient of a bias that sequences or heads share, on Hopper up to 128 columns.
//
// A CTA has a tile of kRows rows and kKeys keys of a matrix of the bias. It visits the sequences and heads that share
// it in order, the *items*, and sums their dS in registers. A warp loads Q and K, then dO and V of each item into a
// ring (load_dbias_items); two warpgroups of 64 rows compute S and dP from them (DbiasSum). The bias of the tile is
// loaded once. Where tiles are few, a cluster of n CTAs has a tile: each takes every n-th item, and at the end adds up
// the sums of all CTAs for some of the rows (dbias_store.cuh). Shared memory, with all tiles in swizzle atoms
// (hopper/swizzle_atom.cuh):
//
//   rows and keys [kStages] | bias | DbiasItem [kItems] | mbarriers
#pragma once

#include <cmath>
#include <cstdint>
#include <type_traits>

#include "bwd/sequence_at.cuh"
#include "element.cuh"
#include "hopper/pipeline.cuh"
#include "hopper/ptx.cuh"
#include "hopper/swizzle_atom.cuh"
#include "hopper/wgmma.cuh"
#include "hopper_bwd/ptx.cuh"
#include "hopper_bwd/ragged_rows.cuh"
#include "log2_units.cuh"
#include "params/hopper_bwd.cuh"
#include "tiles/hopper_bwd_dbias.cuh"
#include "work_tile.cuh"

namespace xa::hopper {

/// A sequence and head that share the tile; `head` is -1 past the last one.
struct DbiasItem {
  QoTile sequence;
  int32_t head;
  int32_t is_whole;  // whether all rows of the tile attend to all of its keys
};

/// `kHeadDim_` is the bucket of D and Dv, `Bias` the type of the bias; tiles::HopperBwdDbias is a table of
/// kernels/variants.toml.
template <int kHeadDim_, typename Bias>
struct DbiasShape : tiles::HopperBwdDbias<kHeadDim_, Bias> {
  using Config = tiles::HopperBwdDbias<kHeadDim_, Bias>;
  static constexpr bool kHasF32Bias = std::is_same_v<Bias, tiles::bias_f32>;
  static constexpr int kHeadDim = kHeadDim_, kRows = 128, kKeys = 128;
  /// Of the ring, each with rows and keys: Q and K, or dO and V.
  static constexpr int kStages = Config::kStages;
  /// Loads of later items begin up to kStages before this one's end.
  static constexpr int kItems = 4;
  static_assert(kStages < 2 * kItems - 2);
  static constexpr int kComputeWarps = 8;
  static_assert(Config::kThreads == 128 + 32 * kComputeWarps);
  using Atom = SwizzleAtom<64>;
  static constexpr int kAtomColumns = kHeadDim / Atom::kColumns;
  /// Of Q, dO, K or V: atom columns one after the other.
  static constexpr int kAtomColumnBytes = kRows * Atom::kRowBytes, kOperandBytes = kAtomColumns * kAtomColumnBytes;
  static_assert(kRows == kKeys);
  static constexpr int kStageBytes = 2 * kOperandBytes;
  /// The bias of the tile: boxes of 128 bytes of each row's keys, one after the other.
  static constexpr int kBiasOffset = kStages * kStageBytes, kBiasBoxBytes = kRows * 128;
  static constexpr int kBiasBoxKeys = kHasF32Bias ? 32 : 64, kBiasBoxes = kKeys / kBiasBoxKeys;
  static constexpr int kBiasBytes = kBiasBoxes * kBiasBoxBytes;
  /// Bytes from row to row of the sums of f32 in the ring, of a cluster of up to eight CTAs.
  static constexpr int kSumsPitch = kKeys * sizeof(float) + 16;
  static_assert((kRows + 8 + 4) * kSumsPitch <= kBiasOffset);
  static constexpr int kItemsOffset = kBiasOffset + kBiasBytes, kItemBytes = 64;
  static_assert(sizeof(DbiasItem) <= kItemBytes);
  static constexpr int kBarriersOffset = kItemsOffset + kItems * kItemBytes;
  static constexpr int kBarriers = 2 * kStages + 1;
  static constexpr int kAlignment = 1024;
  static_assert(Config::kSharedBytes == kBarriersOffset + 8 * kBarriers + kAlignment);
};

/// The CTA's tile.
struct DbiasTile {
  int32_t matrix, first_row, first_key;
};

template <typename Shape>
class DbiasPipeline {
 public:
  __device__ __forceinline__ explicit DbiasPipeline(uint8_t* shared) {
    const uint32_t address = xa::ptx::shared_address(shared), unaligned = -address % Shape::kAlignment;
    shared_ = shared + unaligned;
    address_ = address + unaligned;
  }
  /// Called by one thread; __syncthreads must follow.
  __device__ __forceinline__ void init() const {
    for (int i = 0; i < Shape::kStages; ++i) {
      ptx::mbarrier_init(full(i).address, 1);
      ptx::mbarrier_init(empty(i).address, Shape::kComputeWarps);
    }
    ptx::mbarrier_init(bias_full().address, 1);
    ptx::fence_mbarrier_init();
    ptx::fence_proxy_async_shared();
  }
  /// Of load number `n`.
  __device__ __forceinline__ Barrier full(int32_t n) const { return barrier(n % Shape::kStages, n); }
  __device__ __forceinline__ Barrier empty(int32_t n) const { return barrier(Shape::kStages + n % Shape::kStages, n); }
  __device__ __forceinline__ Barrier bias_full() const { return barrier(2 * Shape::kStages, 0); }
  __device__ __forceinline__ uint32_t rows(int32_t n) const {
    return address_ + n % Shape::kStages * Shape::kStageBytes;
  }
  __device__ __forceinline__ uint32_t keys(int32_t n) const { return rows(n) + Shape::kOperandBytes; }
  __device__ __forceinline__ uint32_t bias() const { return address_ + Shape::kBiasOffset; }
  __device__ __forceinline__ uint8_t* bias_data() const { return shared_ + Shape::kBiasOffset; }
  /// Where the sums of a cluster's CTAs are after the last item, in the ring.
  __device__ __forceinline__ const uint8_t* sums() const { return shared_; }
  /// The item whose Q and K are load `n`.
  __device__ __forceinline__ DbiasItem& item(int32_t n) const {
    return *reinterpret_cast<DbiasItem*>(shared_ + Shape::kItemsOffset + n / 2 % Shape::kItems * Shape::kItemBytes);
  }

 private:
  __device__ __forceinline__ Barrier barrier(int index, int32_t n) const {
    return Barrier{address_ + Shape::kBarriersOffset + 8 * index, static_cast<uint32_t>(n / Shape::kStages) & 1};
  }
  uint8_t* shared_;
  uint32_t address_;
};

/// Loads the operands of all items of the tile. Executed by a warp.
template <typename Shape>
__device__ __forceinline__ void load_dbias_items(const HopperDbiasParams& params, const DbiasPipeline<Shape>& pipeline,
                                                 const DbiasTile& tile) {
  using Atom = typename Shape::Atom;
  const AttentionParams& forward = params.backward.forward;
  const bool is_leader = threadIdx.x % 32 == 0;
  if (is_leader) {
    pipeline.bias_full().arrive_expect_tx(Shape::kBiasBytes);
#pragma unroll
    for (int box = 0; box < Shape::kBiasBoxes; ++box) {
      ptx::tma_load(pipeline.bias() + box * Shape::kBiasBoxBytes, params.bias, pipeline.bias_full().address,
                    tile.first_key + box * Shape::kBiasBoxKeys, tile.first_row, tile.matrix, 0, 0);
    }
  }
  int32_t count = 0;  // of loads: two per item
  const auto load = [&](const TensorMap& row_map, const TensorMap& key_map, const QoTile& sequence, int32_t head) {
    const Barrier full = pipeline.full(count);
    full.arrive_expect_tx(Shape::kStageBytes);
    const RaggedRows rows(sequence.first_token, sequence.len_q), keys(sequence.start_k, sequence.len_k);
#pragma unroll 1
    for (int column = 0; column < Shape::kAtomColumns; ++column) {
      const uint32_t at = column * Shape::kAtomColumnBytes;
      ptx::tma_load(pipeline.rows(count) + at, row_map, full.address, column * Atom::kColumns, head,
                    rows.base + tile.first_row, rows.end, RaggedRows::kEnd);
      ptx::tma_load(pipeline.keys(count) + at, key_map, full.address, column * Atom::kColumns, head / forward.group,
                    keys.base + tile.first_key, keys.end, RaggedRows::kEnd);
    }
    ++count;
  };
  // The leader loads when all lanes have seen the free stage, which could become full and free again before they look.
  const auto wait_for_stage = [&] {
    pipeline.empty(count).producer_wait();
    __syncwarp();
  };
  const int32_t live = live_sequences(forward), of_sequence = tile.matrix / params.heads;
  const int32_t first = params.seqs == 1 ? 0 : of_sequence, end = min(params.seqs == 1 ? live : first + 1, live);
  const int32_t heads = forward.num_kv_heads * forward.group;
  const int32_t first_head = params.heads == 1 ? 0 : tile.matrix % params.heads;
  const int32_t end_head = params.heads == 1 ? heads : first_head + 1;
  StartMaxima maxima = {0, 0};
  const int32_t num_heads = end_head - first_head, ctas = gridDim.y;
  QoTile sequence = {};
  bool attends = false, is_whole = false;
  int32_t b = first, in_sequence = blockIdx.y, described = -1;
#pragma unroll 1
  for (;; in_sequence += ctas) {
    b += in_sequence / num_heads;
    in_sequence %= num_heads;
    if (b >= end) break;
    if (b != described) {
      sequence = sequence_at(forward, b, max(described, 0), maxima);
      described = b;
      const int32_t queries = min(sequence.len_q - tile.first_row, Shape::kRows),
                    end_key = tile.first_key + Shape::kKeys;
      attends = queries > 0;
      if (attends) {
        const Visibility visibility(forward, sequence);
        const KeyRange keys = visible_keys(visibility, tile.first_row, tile.first_row + queries - 1);
        attends = keys.begin < min(keys.end, end_key) && keys.end > tile.first_key;
        is_whole = queries == Shape::kRows && keys.common_begin <= tile.first_key && keys.common_end >= end_key;
      }
    }
    if (!attends) continue;
    const int32_t head = first_head + in_sequence;
    wait_for_stage();
    if (is_leader) {
      pipeline.item(count) = {sequence, head, is_whole};
      load(params.q, params.k, sequence, head);
    }
    count = __shfl_sync(~0u, count, 0);
    wait_for_stage();
    if (is_leader) load(params.dout, params.v, sequence, head);
    count = __shfl_sync(~0u, count, 0);
  }
  wait_for_stage();
  if (is_leader) {
    pipeline.item(count).head = -1;
    pipeline.full(count).arrive();
  }
  __syncwarp();
}

/// The first row of the tile of a lane of a compute warp; the other one is 8 further.
__device__ __forceinline__ int32_t lane_row() {
  const int32_t thread = xa::ptx::opaque(threadIdx.x) - 128;
  return thread / 32 * 16 + thread % 32 / 4;
}

/// The sum of dS of the items of a tile, 64 rows and all of its keys per warpgroup.
template <typename Shape, typename T>
class DbiasSum {
  using Atom = typename Shape::Atom;
  static constexpr int kTiles = Shape::kKeys / 8;

 public:
  __device__ __forceinline__ DbiasSum(const HopperDbiasParams& params, const DbiasPipeline<Shape>& pipeline,
                                      const DbiasTile& tile)
      : params_(params), pipeline_(pipeline), tile_(tile) {
#pragma unroll
    for (auto& sums : sums_) {
#pragma unroll
      for (float& sum : sums) sum = 0.0f;
    }
  }

  /// Executed by each of the two warpgroups.
  __device__ __forceinline__ void add_items() {
    pipeline_.bias_full().wait();
#pragma unroll 1
    for (int32_t count = 0;; count += 2) {
      pipeline_.full(count).wait();
      const DbiasItem& item = pipeline_.item(count);
      const int32_t head = uniform(item.head);
      if (head < 0) return;
      add_item(item, head, count);
    }
  }

  /// `[key / 8]`, each in the layout of the accumulators of wgmma.
  __device__ __forceinline__ const float (&sums() const)[kTiles][4] { return sums_; }

 private:
  /// Starts `scores` = rows keys^T of load `count`, as one wgmma group.
  __device__ __forceinline__ void start_product(float (&scores)[kTiles][4], int32_t count) const {
    const int32_t warpgroup = uniform(threadIdx.x / 128) - 1;
    const uint64_t rows =
        matrix_descriptor<Atom>(pipeline_.rows(count) + warpgroup * 8 * Atom::kBytes, 0, Atom::kBytes);
    const uint64_t keys = matrix_descriptor<Atom>(pipeline_.keys(count), 0, Atom::kBytes);
    constexpr int kSteps = Atom::kColumns / 16;
    ptx::wgmma_fence();
#pragma unroll
    for (int step = 0; step < Shape::kHeadDim / 16; ++step) {
      const uint64_t at = step / kSteps * (Shape::kAtomColumnBytes >> 4) + step % kSteps * 2;
      if (step == 0) {
        Wgmma<T, Shape::kKeys>::template ss<false>(scores, rows + at, keys + at);
      } else {
        Wgmma<T, Shape::kKeys>::template ss<true>(scores, rows + at, keys + at);
      }
    }
    ptx::wgmma_commit_group();
  }

  /// Calls `use(column, half, bias)` for the bias of each pair of this lane's scores: those of column tile `column` and
  /// of its first or second row.
  template <typename Use>
  __device__ __forceinline__ void for_bias_pairs(const Use& use) const {
    const int32_t lane = threadIdx.x % 32, first_row = (threadIdx.x / 32 - 4) * 16;
    if constexpr (Shape::kHasF32Bias) {
      const int32_t row = first_row + lane / 4;
      const uint32_t from = pipeline_.bias() + row * 128 + (lane % 4 / 2 ^ row % 8) * 16 + lane % 2 * 8;
#pragma unroll
      for (int i = 0; i < 2 * kTiles; ++i) {
        const int column = i / 2, half = i % 2;
        const uint32_t box = from + column / 4 * Shape::kBiasBoxBytes + half * 8 * 128;
        use(column, half, ptx::load_shared_f32x2(box ^ (column % 4 * 2 << 4)));
      }
    } else {
      // The row of which this lane passes the address to ldmatrix.
      const int32_t row = first_row + lane % 16;
      const uint32_t from = pipeline_.bias() + row * 128 + (lane / 16 ^ row % 8) * 16;
#pragma unroll
      for (int pair = 0; pair < kTiles / 2; ++pair) {
        uint32_t x[4];
        xa::ptx::ldmatrix_x4(x, (from + pair / 4 * Shape::kBiasBoxBytes) ^ (pair % 4 * 2 << 4));
#pragma unroll
        for (int i = 0; i < 4; ++i) use(2 * pair + i / 2, i % 2, unpack<T>(x[i]));
      }
    }
  }

  __device__ __forceinline__ void release(int32_t count) const {
    __syncwarp();
    if (threadIdx.x % 32 == 0) pipeline_.empty(count).arrive();
  }

  __device__ __forceinline__ void add_item(const DbiasItem& item, int32_t head, int32_t count) {
    const AttentionParams& forward = params_.backward.forward;
    float p[kTiles][4], dp[kTiles][4];
    start_product(p, count);
    // While the products run.
    float lse[2], delta[2];
    const int32_t len_q = item.sequence.len_q;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int32_t query = tile_.first_row + lane_row() + 8 * half;
      const int64_t index =
          static_cast<int64_t>(head) * forward.num_tokens + item.sequence.first_token + min(query, len_q - 1);
      lse[half] = __ldg(params_.lse_log2 + index);
      delta[half] = __ldg(params_.backward.delta + index);
    }
    pipeline_.full(count + 1).wait();
    start_product(dp, count + 1);
    ptx::wgmma_wait_group<1>();
    release(count);
    for_bias_pairs([&](int column, int half, const float2& b) {
      const float scale = forward.score_factor;
      float (&s)[4] = p[column];
      s[2 * half] = xa::ptx::exp2_approx(__fmaf_rn(s[2 * half], scale, __fmaf_rn(b.x, kLog2E, -lse[half])));
      s[2 * half + 1] = xa::ptx::exp2_approx(__fmaf_rn(s[2 * half + 1], scale, __fmaf_rn(b.y, kLog2E, -lse[half])));
    });
    ptx::wgmma_wait_group<0>();
    release(count + 1);
    if (uniform(item.is_whole) != 0) {
      add(p, dp, delta);
    } else {
      // Masked elements may be anything before, so the mask is last.
      const int32_t lane = threadIdx.x % 32;
      const Visibility visibility(forward, item.sequence);
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int32_t query = tile_.first_row + lane_row() + 8 * half;
        const int32_t first = tile_.first_key + lane % 4 * 2;
        const int32_t begin = visibility.begin(query) - first;
        const int32_t end = query < len_q ? visibility.end(query) - first : INT32_MIN;
#pragma unroll
        for (int column = 0; column < kTiles; ++column) {
#pragma unroll
          for (int i = 0; i < 2; ++i) {
            const int32_t key = 8 * column + i;
            const int e = 2 * half + i;
            const float ds = p[column][e] * (dp[column][e] - delta[half]);
            sums_[column][e] += key >= begin && key < end ? ds : 0.0f;
          }
        }
      }
    }
  }

  __device__ __forceinline__ void add(const float (&p)[kTiles][4], const float (&dp)[kTiles][4],
                                      const float (&delta)[2]) {
#pragma unroll
    for (int column = 0; column < kTiles; ++column) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        sums_[column][i] = __fmaf_rn(p[column][i], dp[column][i] - delta[i / 2], sums_[column][i]);
      }
    }
  }

  const HopperDbiasParams& params_;
  const DbiasPipeline<Shape>& pipeline_;
  const DbiasTile& tile_;
  float sums_[kTiles][4];
};

}  // namespace xa::hopper
