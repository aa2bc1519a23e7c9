// Stores the gradient of a tile of a bias that sequences or heads share (dbias.cuh), after its last item.
#pragma once

#include <cstdint>
#include <type_traits>

#include "chunk.cuh"
#include "element.cuh"
#include "hopper/cluster_ptx.cuh"
#include "hopper_bwd/dbias.cuh"
#include "hopper_bwd/key_ranges.cuh"
#include "params/hopper_bwd.cuh"

namespace xa::hopper {

/// The chunks of kChunkKeys adjacent keys that a lane of a warp has, of four rows of kKeys keys.
template <typename E, int kChunkKeys, int kKeys>
struct RowChunks {
  static constexpr int kRows = 4, kPerRow = kKeys / kChunkKeys, kRowLanes = kPerRow < 32 ? kPerRow : 32,
                       kLaneRows = 32 / kRowLanes, kColumns = kPerRow / kRowLanes,
                       kCount = kRows / kLaneRows * kColumns;
  Chunk<E, kChunkKeys> of[kCount];

  /// The row and the key of chunk `i`, counted from the lane's first ones.
  static __device__ __forceinline__ constexpr int row(int i) { return i / kColumns * kLaneRows; }
  static __device__ __forceinline__ constexpr int key(int i) { return i % kColumns * (32 * kChunkKeys); }
};

/// The sums of dS of the CTAs of a tile.
template <typename Shape>
class DbiasStore {
  static constexpr int kTiles = Shape::kKeys / 8;

 public:
  __device__ __forceinline__ DbiasStore(const HopperDbiasParams& params, const DbiasPipeline<Shape>& pipeline,
                                        const DbiasTile& tile, const float (&sums)[kTiles][4])
      : params_(params), pipeline_(pipeline), tile_(tile), sums_(sums) {}

  /// Stores the sums of all CTAs of the tile as elements of type E.
  template <typename E>
  __device__ __forceinline__ void store() const {
    // The gradient begins at a multiple of 16 bytes.
    const uint32_t misaligned = static_cast<uint32_t>(params_.keys) * sizeof(E) % 16;
    if (gridDim.y > 1) exchange_sums();
    if (gridDim.y == 1 && sizeof(E) == sizeof(float) && misaligned % sizeof(float2) == 0) {
      store_pairs<E>();
    } else if (misaligned == 0) {
      store_chunks<E, 16 / sizeof(E)>();
    } else {
      store_chunks<E, 1>();
    }
  }

 private:
  /// Stores two elements at a time: of f32, four lanes then fill 32 bytes of a row.
  template <typename E>
  __device__ __forceinline__ void store_pairs() const {
    const int32_t lane = threadIdx.x % 32;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int32_t row = tile_.first_row + lane_row() + 8 * half;
      if (row >= params_.rows) continue;
      const int64_t index = static_cast<int64_t>(tile_.matrix) * params_.rows + row;
      E* const to = static_cast<E*>(params_.dbias) + index * params_.keys;
#pragma unroll
      for (int column = 0; column < kTiles; ++column) {
        const int32_t key = tile_.first_key + 8 * column + lane % 4 * 2;
        const float (&sums)[4] = sums_[column];
        if (key < params_.keys) store_columns(to + key, make_float2(sums[2 * half], sums[2 * half + 1]));
      }
    }
  }

  /// Stores the sums in chunks of kChunkKeys keys, of which rows have a whole number: adjacent lanes have adjacent
  /// chunks of a row, which may begin anywhere.
  template <typename E, int kChunkKeys>
  __device__ __forceinline__ void store_chunks() const {
    if (gridDim.y > 1) {
      store_rows_of_cluster<E, kChunkKeys>();
    } else {
      store_rows_of_warp<E, kChunkKeys>();
    }
  }

  /// Stores rows of the tile from row `begin` on, up to `count`, and of each kKeys keys from the tile's key `first_key`
  /// on. The chunks of four rows at a time are loaded by `load(chunks, row, key)`, with the lane's first key and its
  /// first row, counted from `begin`, before they are stored.
  template <typename E, int kChunkKeys, int kKeys, typename Load>
  __device__ __forceinline__ void store_rows(int32_t begin, int32_t count, int32_t first_key, const Load& load) const {
    using Chunks = RowChunks<E, kChunkKeys, kKeys>;
    const int32_t lane = threadIdx.x % 32;
    const int32_t own_row = lane / Chunks::kRowLanes, own_key = lane % Chunks::kRowLanes * kChunkKeys;
    const int32_t first_row = tile_.first_row + begin, rows = min(count, params_.rows - first_row);
    const int32_t key = tile_.first_key + first_key + own_key, keys = params_.keys - key;
    const int64_t first_index = static_cast<int64_t>(tile_.matrix) * params_.rows + first_row;
    E* const to = static_cast<E*>(params_.dbias) + first_index * params_.keys + key;
    const bool has_all_keys = tile_.first_key + first_key + kKeys <= params_.keys;
#pragma unroll 1
    for (int32_t row = 0; row < rows; row += Chunks::kRows) {
      Chunks chunks;
      load(chunks, row + own_row, own_key);
      const auto store = [&](auto are_inside) {
#pragma unroll
        for (int i = 0; i < Chunks::kCount; ++i) {
          const int32_t chunk_row = row + own_row + Chunks::row(i);
          E* const row_to = to + static_cast<int64_t>(chunk_row) * params_.keys;
          const bool is_inside = decltype(are_inside)::value || (chunk_row < rows && Chunks::key(i) < keys);
          if (is_inside) store_chunk(row_to + Chunks::key(i), chunks.of[i]);
        }
      };
      // The compiler moves each load to a branch around its store, where they do not overlap.
      if (has_all_keys && row + Chunks::kRows <= rows) {
        store(std::true_type{});
      } else {
        store(std::false_type{});
      }
    }
  }

  /// Stores the rows of this warp, whose sums change places where the bias of these rows was, which no other warp
  /// reads.
  template <typename E, int kChunkKeys>
  __device__ __forceinline__ void store_rows_of_warp() const {
    constexpr int kBoxKeys = 128 / sizeof(E), kStagedKeys = Shape::kBiasBoxes * kBoxKeys;
    constexpr int kKeysAtOnce = kStagedKeys < Shape::kKeys ? kStagedKeys : Shape::kKeys;
    constexpr int kWarpRows = 16;
    const int32_t lane = threadIdx.x % 32, warp_row = (threadIdx.x / 32 - 4) * kWarpRows;
    uint8_t* const staged = pipeline_.bias_data() + warp_row * 128;
    const auto staged_at = [&](int32_t row, int32_t key) {
      const int32_t byte = key % kBoxKeys * sizeof(E), in_box = (byte / 16 ^ row % 8) * 16 + byte % 16;
      return reinterpret_cast<E*>(staged + key / kBoxKeys * Shape::kBiasBoxBytes + row * 128 + in_box);
    };
#pragma unroll
    for (int first_key = 0; first_key < Shape::kKeys; first_key += kKeysAtOnce) {
      __syncwarp();
#pragma unroll
      for (int i = 0; i < kKeysAtOnce / 4; ++i) {
        const int column = i / 2, half = i % 2;
        const float (&sums)[4] = sums_[first_key / 8 + column];
        store_columns(staged_at(lane / 4 + 8 * half, 8 * column + lane % 4 * 2),
                      make_float2(sums[2 * half], sums[2 * half + 1]));
      }
      __syncwarp();
      const auto load = [&](auto& chunks, int32_t row, int32_t key) {
#pragma unroll
        for (int i = 0; i < chunks.kCount; ++i) {
          chunks.of[i] = load_chunk<E, kChunkKeys>(staged_at(row + chunks.row(i), key + chunks.key(i)));
        }
      };
      store_rows<E, kChunkKeys, kKeysAtOnce>(warp_row, kWarpRows, first_key, load);
    }
  }

  /// The rows of the tile of which each CTA of the cluster adds up all sums.
  static __device__ __forceinline__ int32_t rows_per_cta() {
    return ceil_div(Shape::kRows, static_cast<int32_t>(gridDim.y));
  }

  /// Stores the sums of each row in the ring of the CTA that adds them up, `[CTA of the cluster, row, key]`.
  __device__ __forceinline__ void exchange_sums() const {
    // Every CTA has read what is in its ring.
    xa::ptx::cluster_arrive_relaxed();
    xa::ptx::cluster_wait();
    const int32_t lane = threadIdx.x % 32;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int32_t row = lane_row() + 8 * half, rank = row / rows_per_cta();
      const int32_t in_ring = static_cast<int32_t>(blockIdx.y) * rows_per_cta() + row - rank * rows_per_cta();
      const uint32_t to = pipeline_.rows(0) + in_ring * Shape::kSumsPitch + lane % 4 * sizeof(float2);
#pragma unroll
      for (int column = 0; column < kTiles; ++column) {
        xa::ptx::store_cluster_8(to + column * (8 * sizeof(float)), rank,
                                 make_float2(sums_[column][2 * half], sums_[column][2 * half + 1]));
      }
    }
    xa::ptx::cluster_arrive();
    xa::ptx::cluster_wait();
  }

  /// Adds up the sums of this warp's part of the CTA's rows, in the order of the CTAs, and stores them.
  template <typename E, int kChunkKeys>
  __device__ __forceinline__ void store_rows_of_cluster() const {
    // Keys per load.
    constexpr int kLoadKeys = kChunkKeys < 4 ? kChunkKeys : 4;
    const int32_t cta_rows = rows_per_cta(), first_cta_row = static_cast<int32_t>(blockIdx.y) * cta_rows;
    const int32_t warp_rows = ceil_div(cta_rows, Shape::kComputeWarps);
    const int32_t first = (threadIdx.x / 32 - 4) * warp_rows;  // row of the warp, of those of the CTA
    const int32_t count = min(min(cta_rows, Shape::kRows - first_cta_row) - first, warp_rows);
    const auto load = [&](auto& chunks, int32_t row, int32_t key) {
      float sums[chunks.kCount][kChunkKeys] = {};
#pragma unroll 1
      for (int32_t from = 0; from < static_cast<int32_t>(gridDim.y); ++from) {
        const uint8_t* const rows = pipeline_.sums() + (from * cta_rows + first + row) * Shape::kSumsPitch;
#pragma unroll
        for (int i = 0; i < chunks.kCount; ++i) {
          const auto* const from_key =
              reinterpret_cast<const float*>(rows + chunks.row(i) * Shape::kSumsPitch) + key + chunks.key(i);
#pragma unroll
          for (int j = 0; j < kChunkKeys; ++j) {
            sums[i][j] += load_chunk<float, kLoadKeys>(from_key + j / kLoadKeys * kLoadKeys).elements[j % kLoadKeys];
          }
        }
      }
#pragma unroll
      for (int i = 0; i < chunks.kCount; ++i) chunks.of[i] = rounded<E>(sums[i]);
    };
    store_rows<E, kChunkKeys, Shape::kKeys>(first_cta_row + first, count, 0, load);
  }

  const HopperDbiasParams& params_;
  const DbiasPipeline<Shape>& pipeline_;
  const DbiasTile& tile_;
  const float (&sums_)[kTiles][4];
};

}  // namespace xa::hopper
