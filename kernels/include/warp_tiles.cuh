// Decode of many short sequences: each warp computes tiles alone.
//
// A tile of a few dozen keys takes a CTA of decode several microseconds, most of which are no loads of keys: barriers,
// the merging of warps, and loads that start when the tile before is done. Here a warp has its own tiles, and its loads
// go on from one tile to the next, so nothing waits for another warp, and a tile begins with its keys in shared memory.
// A launch is computed this way if every sequence has one query and few keys (WorkPartitioner); the warps of all CTAs
// of a KV head divide the sequences between them.
//
// Shared memory of a warp: kStages blocks of 16 rows of K and as many of V, then the tiles whose loads have begun.
#pragma once

#include <cmath>
#include <cstdint>
#include <type_traits>

#include "column_warps.cuh"
#include "element.cuh"
#include "new_tokens.cuh"
#include "output_rows.cuh"
#include "paged_rows.cuh"
#include "params/attention.cuh"
#include "ptx.cuh"
#include "sequence_work.cuh"
#include "softmax.cuh"
#include "warp_tile_products.cuh"
#include "work_range.cuh"
#include "work_tile.cuh"

namespace xa {

/// The softmax state of 8 rows, transposed. Lane 4g + t has rows 2t and 2t + 1: their maxima, the sums over the keys of
/// the lane, and their output in two columns of each 16 (warp_tile_products.cuh).
template <int kProducts>
struct TransposedState {
  float max[2] = {-INFINITY, -INFINITY};
  float sum[2] = {};
  float output[kProducts][4] = {};

  /// Updates maxima, sums and output by the scores of a block of 16 keys, which become probabilities.
  __device__ __forceinline__ void update(float (&scores)[4], float log2_unit) {
    float rescale[2], shift[2];
#pragma unroll
    for (int row = 0; row < 2; ++row) {
      const float largest = fmaxf(max[row], over_keys(fmaxf(scores[row], scores[row + 2]), fmaxf));
      rescale[row] = rescale_factor(max[row], largest, log2_unit);
      shift[row] = is_large_maximum(largest, log2_unit) ? largest : 0.0f;
      max[row] = largest;
    }
    if (__any_sync(~0u, rescale[0] != 1.0f || rescale[1] != 1.0f || shift[0] != 0.0f || shift[1] != 0.0f)) {
#pragma unroll
      for (int product = 0; product < kProducts; ++product) {
#pragma unroll
        for (int i = 0; i < 4; ++i) output[product][i] *= rescale[i % 2];
      }
#pragma unroll
      for (int i = 0; i < 4; ++i) scores[i] -= shift[i % 2];
    }
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      scores[i] = ptx::exp2_approx(scores[i] * log2_unit - exponent_base(max[i % 2], log2_unit));
    }
#pragma unroll
    for (int row = 0; row < 2; ++row) sum[row] = sum[row] * rescale[row] + (scores[row] + scores[row + 2]);
  }

  /// Adds up the sums of a row's lanes. Call it once, after the last block.
  __device__ __forceinline__ void finish() {
#pragma unroll
    for (float& of_row : sum) of_row = over_keys(of_row, [](float a, float b) { return a + b; });
  }

 private:
  /// Combines the values of lanes that have other keys of the same rows.
  template <typename Combine>
  static __device__ __forceinline__ float over_keys(float x, const Combine& combine) {
#pragma unroll
    for (int distance = 4; distance < 32; distance *= 2) x = combine(x, __shfl_xor_sync(~0u, x, distance));
    return x;
  }
};

/// Computes tiles of up to 8 rows, all of one query, without a soft cap and ALiBi. `T` is the type that products take,
/// `Stored` that of K and V.
template <typename Shape, typename T, typename Stored, typename LogitsTransform>
class WarpTiles {
  using Unit = WorkUnit<Shape::kRows, Shape::kKeyWarps * Shape::kKeys>;
  static constexpr bool kIs8Bit = sizeof(Stored) == 1;
  static constexpr int kElements = 16 / sizeof(Stored), kChunks = Shape::kHeadDim / kElements;
  using Products =
      std::conditional_t<kIs8Bit, WarpTile8BitProducts<Stored, Shape::kHeadDim>, WarpTileProducts<T, Shape::kHeadDim>>;
  using Rows = typename Products::Rows;
  using State = TransposedState<Products::kSteps>;
  static constexpr int kKeys = kTokensPerLoad;  // of a block, which lie in one page
  static constexpr int kBlockBytes = kKeys * Rows::kPitch;
  static constexpr int kWarpBytes = Shape::kWorkTileOffset / Shape::kWarps / 128 * 128;
  /// A tile whose loads have begun; `first_token` is negative past the last one.
  struct Tile {
    int32_t first_token;
    int32_t begin;  // of the visible keys
    int32_t end;
    int32_t reserved;
  };
  static constexpr int kTileBytes = sizeof(Tile);
  static constexpr int kStages = (kWarpBytes - 2 * kTileBytes) / (2 * kBlockBytes + kTileBytes);
  /// Every stage may have another tile; then there is the one in work, and the end of all tiles.
  static constexpr int kTiles = kStages + 2;
  static_assert(kKeys == 16 && kStages > 0 && kChunks <= 32);

 public:
  /// `shared` is that of the CTA.
  __device__ __forceinline__ WarpTiles(const AttentionParams& params, int32_t kv_head, uint8_t* shared)
      : params_(params),
        kv_head_(kv_head),
        lane_(threadIdx.x % 32),
        memory_(shared + threadIdx.x / 32 * kWarpBytes),
        blocks_(ptx::shared_address(memory_)),
        score_factor_(LogitsTransform::factor(params, kv_head)) {}

  /// Computes the tiles of the warp.
  __device__ __forceinline__ void attend(const WorkRangeIndex& index) {
    sequence_ = index.index * Shape::kWarps + static_cast<int32_t>(threadIdx.x / 32);
    step_ = index.count * Shape::kWarps;
    fetch_.tile = {0, 0, 0, 0};
    fetch_.key = fetch_.number = 0;
    // One loop over the blocks of all tiles, in which the first kStages steps do nothing but start loads: fetching
    // instructions takes longer than executing them, so each part is instantiated once.
    int32_t stage = 0, number = 0, key = 0;
    Tile tile = {0, 0, 0, 0};
    State state;
#pragma unroll 1
    for (int32_t fill = kStages; true;) {
      const bool is_filled = fill == 0, is_last = is_filled ? key + kKeys >= tile.end : fill == 1;
      float scores[4];
      if (is_filled) {
        wait();
        products_.multiply(scores, block(stage), lane_, params_);
        __syncwarp();
      }
      fetch_keys(stage);
      Tile next;
      if (is_last) {
        next = this->tile(number);
        const int32_t row = lane_ / 4;
        products_.load(params_, next.first_token, kv_head_ * params_.group + row, lane_,
                       row < params_.group && next.first_token >= 0);
      }
      if (is_filled) {
        mask(scores, tile, key);
        state.update(scores, Products::log2_unit(params_));
        const uint32_t p[2] = {ptx::transpose_8x8(Element<T>::pack(scores[0], scores[1])),
                               ptx::transpose_8x8(Element<T>::pack(scores[2], scores[3]))};
        wait();
        Products::accumulate(state.output, p, block(stage) + kBlockBytes, lane_, params_);
        __syncwarp();
      }
      fetch_values(stage);
      stage = next_of<kStages>(stage);
      if (!is_last) {
        key += is_filled ? kKeys : 0;
        fill -= is_filled ? 0 : 1;
        continue;
      }
      if (is_filled) {
        state.finish();
        store(state, tile);
      }
      if (next.first_token < 0) break;
      fill = 0;
      tile = next;
      key = first_key(tile.begin);
      number = next_of<kTiles>(number);
      state = State();
      products_.convert(params_, lane_, score_factor_);
    }
  }

 private:
  static __device__ __forceinline__ Interval visible_keys_of(const Tile& tile) {
    return {tile.begin, tile.end - tile.begin};
  }
  static __device__ __forceinline__ int32_t first_key(int32_t begin) { return begin / kKeys * kKeys; }
  __device__ __forceinline__ Tile& tile(int32_t number) const {
    return *reinterpret_cast<Tile*>(memory_ + kStages * 2 * kBlockBytes + number * kTileBytes);
  }

  template <int kCount>
  static __device__ __forceinline__ int32_t next_of(int32_t i) {
    return i + 1 == kCount ? 0 : i + 1;
  }

  /// Goes on to loads of the next sequence that has a tile.
  __device__ __forceinline__ void begin_tile() {
    const int32_t num_seqs = live_sequences(params_);
    Tile tile = {-1, 0, 0, 0};
#pragma unroll 1
    for (; sequence_ < num_seqs; sequence_ += step_) {
      SequenceWork<Unit> sequence[1];
      int32_t live = num_seqs;
      load_sequences(params_, sequence_, live, sequence, [](const auto&) {});
      if (sequence[0].num_tiles == 0) continue;
      QoTile rows = sequence[0].tile_at(params_, 0);
      rows.first_row = 0;
      const KeyRange keys = visible_keys(params_, rows);
      tile = {rows.first_token, keys.begin, keys.end, 0};
      fetch_.first_new = Shape::kAppendsKv && has_new_tokens(params_) ? first_new_key(rows) : INT32_MAX;
      look_up(rows, keys);
      break;
    }
    sequence_ += step_;
    fetch_.tile = tile;
    fetch_.key = first_key(tile.begin);
    fetch_.block = 0;
    if (lane_ == 0) this->tile(fetch_.number) = tile;
    fetch_.number = next_of<kTiles>(fetch_.number);
    __syncwarp();
  }

  /// Looks up the page of the lane's block of keys; there are up to 32 blocks.
  __device__ __forceinline__ void look_up(const QoTile& rows, const KeyRange& keys) {
    const int32_t first = first_key(keys.begin), after = lane_ * kKeys;
    fetch_.slot = after < keys.end - first ? slot_of(params_, rows, first + after) : TokenSlot{0, 0};
    fetch_.slot.page = clamp(fetch_.slot.page, 0, params_.num_pages - 1);
  }

  /// Starts to copy the next block of K to a stage. If there is none, it commits an empty group, so that the number of
  /// pending groups stays the same.
  __device__ __forceinline__ void fetch_keys(int32_t stage) {
    if (fetch_.tile.first_token >= 0 && fetch_.key >= fetch_.tile.end) begin_tile();
    if (fetch_.tile.first_token >= 0) fetch(params_.k, params_.new_tokens.key, block(stage));
    ptx::cp_async_commit();
  }
  /// The same of V, after which the block is done.
  __device__ __forceinline__ void fetch_values(int32_t stage) {
    if (fetch_.tile.first_token >= 0) {
      fetch(params_.v, params_.new_tokens.value, block(stage) + kBlockBytes);
      fetch_.key += kKeys;
      ++fetch_.block;
    }
    ptx::cp_async_commit();
  }
  __device__ __forceinline__ void fetch(const KvSource& source, const NewRowSource& added, uint32_t destination) const {
    constexpr int kRows = 32 / kChunks;  // that an instruction copies
    const int64_t page = __shfl_sync(~0u, fetch_.slot.page, fetch_.block),
                  offset = __shfl_sync(~0u, fetch_.slot.offset, fetch_.block);
    const int32_t row = lane_ / kChunks, column = lane_ % kChunks * kElements, key = fetch_.key;
    // Opaque: with the address of the head in registers throughout the loop, 8 bits spill.
    const Stored* from = static_cast<const Stored*>(source.base) + opaque_if<kIs8Bit>(kv_head_) * source.head_stride +
                         page * source.page_stride + (offset + row) * source.token_stride + column;
    destination += Rows::offset(row, lane_ % kChunks);
    if (key >= fetch_.tile.begin && key + kKeys <= min(fetch_.tile.end, fetch_.first_new)) {
      const uint64_t policy = ptx::evict_first_policy();
#pragma unroll
      for (int r = 0; r < kKeys; r += kRows) {
        ptx::cp_async_16(Rows::stepped(destination, r), from, true, policy);
        from += kRows * source.token_stride;
      }
      return;
    }
    // Keys outside of the visible ones become zeros without being read.
    const Interval visible = visible_keys_of(fetch_.tile);
#pragma unroll 2
    for (int r = 0; r < kKeys; r += kRows) {
      const int32_t own = key + row + r;
      const Stored* const added_row = static_cast<const Stored*>(added.base) +
                                      fetch_.tile.first_token * added.token_stride + kv_head_ * added.head_stride +
                                      column;
      ptx::cp_async_16(Rows::stepped(destination, r), own == fetch_.first_new ? added_row : from, visible.holds(own));
      from += kRows * source.token_stride;
    }
  }

  /// Shared address of a stage's block of K; the block of V follows it.
  __device__ __forceinline__ uint32_t block(int32_t stage) const { return blocks_ + stage * 2 * kBlockBytes; }

  /// Hides the keys of the block from `key` on that are not visible.
  __device__ __forceinline__ void mask(float (&scores)[4], const Tile& tile, int32_t key) const {
    if (key >= tile.begin && key + kKeys <= tile.end) return;
    const Interval visible = visible_keys_of(tile);
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      if (!visible.holds(key + static_cast<int32_t>(lane_ / 4) + i / 2 * 8)) scores[i] = -INFINITY;
    }
  }

  /// Waits for the next block of K or V. Groups alternate between both.
  static __device__ __forceinline__ void wait() {
    ptx::cp_async_wait<2 * kStages - 1>();
    __syncwarp();
  }

  __device__ __forceinline__ void store(const State& state, const Tile& tile) const {
    QoTile rows = {};
    rows.first_token = tile.first_token;
    rows.num_rows = params_.group;
    const RowWriter<T, kIs8Bit> writer(params_, rows, kv_head_);
    float factors[2];
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int32_t row = lane_ % 4 * 2 + i;
      const RowResult result =
          writer.finish(row < params_.group ? row : 0, state.max[i], state.sum[i], Products::log2_unit(params_));
      factors[i] = result.factor;
      if (lane_ < 4) writer.write_lse(row, result.lse);
    }
    Products::store(writer, state.output, factors, lane_, params_);
  }

  /// Where the loads are.
  struct Fetch {
    Tile tile;
    int32_t number;     // of the next tile in shared memory
    int32_t key;        // of the next block
    int32_t block;      // its number in the tile
    int32_t first_new;  // the first key that the cache does not have
    TokenSlot slot;     // of the first key of the lane's block
  };

  const AttentionParams& params_;
  const int32_t kv_head_;
  const uint32_t lane_;
  uint8_t* const memory_;
  const uint32_t blocks_;
  const float score_factor_;
  int32_t sequence_;  // the next one whose tile is looked for
  int32_t step_;
  Fetch fetch_;
  Products products_;
};

}  // namespace xa
