// The compute warpgroups of multi-head latent attention over 8-bit caches on Hopper. The products are transposed: keys,
// and then value columns, are the 64 rows of wgmma, and packed rows are the columns.
//
//   S^T [64 keys, rows] = K Q^T,  O^T [512 columns, rows] += V^T P^T
//
// So the operand that has to be converted is the one that wgmma reads from registers, whether a tile has 16 rows or 64,
// and each warp converts what it multiplies: of K the columns of 16 keys, of V^T the keys of 16 columns of each 64.
// Both come from the same latent rows in shared memory. Q^T and P^T are read from there by wgmma. Conversions run
// beside the products of the fragments before them.
//
// A lane has four adjacent bytes of a latent row per matrix that ldmatrix loads, so of 16 columns the products take
// first the even pairs, then the odd ones, and load_query permutes Q alike. Of V^T a lane has two adjacent columns, of
// two keys: the even one is row g of wgmma's tile and the odd one row g + 8 (lane 4g + t).
#pragma once

#include <cfloat>
#include <cmath>
#include <cstdint>

#include "element.cuh"
#include "fp8.cuh"
#include "hopper/ptx.cuh"
#include "hopper/swizzle_atom.cuh"
#include "hopper/wgmma.cuh"
#include "hopper_mla_fp8/load.cuh"
#include "hopper_mla_fp8/ptx.cuh"
#include "hopper_mla_fp8/shape.cuh"
#include "mla/result.cuh"
#include "output_rows.cuh"
#include "params/attention.cuh"
#include "partial_rows.cuh"
#include "ptx.cuh"
#include "work_range.cuh"
#include "work_tile.cuh"

namespace xa::hopper_mla_fp8 {

/// What a warpgroup has of the state of a work tile. A lane has packed rows 8j + 2t and 8j + 2t + 1 for each row tile
/// j, of scores those of keys g and g + 8 of the warp's 16 (lane 4g + t).
template <typename Shape, typename LogitsTransform>
class TransposedTile {
  using Atom = typename Shape::Atom;
  using StoredRows = typename Shape::StoredRows;
  using Stored = Fp8<false>;
  using T = F16;
  static constexpr int kRows = Shape::kRows, kRowTiles = kRows / 8, kColumnTiles = Shape::kColumns / 64;
  /// Steps of 16 columns of Q K^T, or keys of P V, that are a wgmma group, and groups whose fragments are in registers.
  /// A warp cannot convert while it waits for room to issue wgmma, so groups are small.
  static constexpr int kGroupSteps = 2, kGroups = 3;
  /// Groups that are loaded ahead of their conversion.
  static constexpr int kAhead = 2;
  /// P is at most 2^kRise.
  static constexpr float kRise = 8.0f;
  using Scores = float[kRowTiles][4];
  /// Elements of a group of steps as they are stored, and converted.
  using Codes = uint32_t[kAhead][4];
  using Fragments = uint32_t[kGroupSteps][4];

 public:
  /// `group` is the warpgroup.
  __device__ __forceinline__ TransposedTile(const AttentionParams& params, const Buffers<Shape>& buffers, int group)
      : params_(params),
        buffers_(buffers),
        work_(buffers.work_tile()),
        transform_(params),
        group_(group),
        state_(buffers.state(Shape::kDividesKeys ? group : 0)),
        query_(descriptor_low(buffers.query())) {
    const int32_t lane = threadIdx.x % 32;
    keys_ = StoredRows::offset(16 * warp() + lane / 8 % 2 * 8 + lane % 8, lane / 16);
    values_ = StoredRows::offset(lane, warp()) + (Shape::kDividesKeys ? 0 : group * Shape::kColumns);
#pragma unroll
    for (int j = 0; j < kRowTiles; ++j) {
      sum_[j][0] = sum_[j][1] = 0.0f;
    }
    // All threads that share them write the same.
    for (int32_t row = threadIdx.x % 128; row < kRows; row += 128) maxima()[row] = -INFINITY;
    sync_sharers();
  }

  /// Attends to the tile's blocks, or with kDividesKeys to the warpgroup's. The first one has number `number` among
  /// those of the CTA.
  template <bool kIsE5m2>
  __device__ __forceinline__ void attend(int32_t first, int32_t end, int32_t number) {
    const int32_t begin = first + (Shape::kDividesKeys ? (number ^ group_) & 1 : 0);
    if (begin >= end) clear_output();
#pragma unroll 1
    for (int32_t block = begin; block < end; block += 2) {
      attend_blocks<kIsE5m2>(block, end, number + block - first, block > begin);
    }
  }

  /// Stores the result of the work tile. Both warpgroups call this.
  __device__ __forceinline__ void store_result(const WorkRange& range) {
    // All warps must have read the last blocks, and Q.
    sync_compute_threads();
    store_output();
    store_sums();
    sync_compute_threads();
    mla::store_rows<Shape::kComputeThreads, RowWriter<T, true>>(
        params_, work_, range.partial_row, transform_.log2_unit(), threadIdx.x, [&](int32_t row, int32_t column) {
          PartialState part = part_of(0, row, column);
          if (Shape::kStates > 1) merge(part, part_of(1, row, column), transform_.log2_unit());
          return part;
        });
  }

  static __device__ __forceinline__ void sync_compute_threads() {
    hopper::ptx::named_barrier_sync(1, Shape::kComputeThreads);
  }

 private:
  static __device__ __forceinline__ int32_t warp() { return static_cast<int32_t>(threadIdx.x / 32 % 4); }
  /// The warp among those that share maxima.
  static __device__ __forceinline__ int32_t sharer_warp() {
    return static_cast<int32_t>(threadIdx.x / 32) % Shape::kSharerWarps;
  }
  static __device__ __forceinline__ int32_t lane_key() { return static_cast<int32_t>(threadIdx.x % 32 / 4); }
  static __device__ __forceinline__ int32_t lane_row() { return static_cast<int32_t>(threadIdx.x % 4 * 2); }
  /// The halves of the matrix descriptor of rows in atoms at a shared address.
  static constexpr uint32_t kDescriptorHigh = Atom::kBytes >> 4 | static_cast<uint32_t>(Atom::kSwizzle) << 30;
  static __device__ __forceinline__ uint32_t descriptor_low(uint32_t address) { return address >> 4 & 0x3fff; }
  /// The barrier of the warpgroups that share maxima.
  __device__ __forceinline__ int barrier_id() const { return Shape::kDividesKeys ? 3 + group_ : 3; }
  __device__ __forceinline__ void sync_sharers() const {
    hopper::ptx::named_barrier_sync(barrier_id(), 128 * Shape::kSharers);
  }
  /// The maxima so far, and the factors of outputs and sums when some have risen.
  __device__ __forceinline__ float* maxima() const { return state_ + Shape::kSharerWarps * kRows; }
  __device__ __forceinline__ float* factors() const { return state_ + (Shape::kSharerWarps + 1) * kRows; }

  /// Attends to block `block` if each warpgroup has a state of its own, otherwise also to the next one, if it is before
  /// `end`. `number` counts the CTA's blocks. With `has_output` they are added to the output.
  template <bool kIsE5m2>
  __device__ __forceinline__ void attend_blocks(int32_t block, int32_t end, int32_t number, bool has_output) {
    const int32_t own = Shape::kDividesKeys ? 0 : group_;
    const bool has_second = !Shape::kDividesKeys && block + 1 < end;
    Scores scores;
    if (own == 0 || has_second) {
      buffers_.full(number + own).wait();
      compute_scores<kIsE5m2>(scores, buffers_.stage(number + own));
    } else {
      // A block that does not exist: all of its keys will be masked.
#pragma unroll
      for (float (&tile)[4] : scores) tile[0] = tile[1] = tile[2] = tile[3] = 0.0f;
    }
    Codes values;
    // So that they are there when P is. Beside 64 rows there are no registers for them.
    if (Shape::kDividesKeys) load_first_values(values, buffers_.stage(number));
    finish_scores(scores, (block + own) * Shape::kKeys + 16 * warp());
    const uint32_t p = buffers_.p(group_, number / 2);
    // P refers to the maxima so far. If a score is too far above them, which it is at first, they rise, and P is
    // computed again.
    float added[kRowTiles][2];
    const bool rises = store_weights(p, added, scores);
    hopper::ptx::fence_proxy_async_shared();
    if (ptx::barrier_or(barrier_id(), 128 * Shape::kSharers, rises)) {
      raise(scores);
      store_weights(p, added, scores);
      hopper::ptx::fence_proxy_async_shared();
      sync_sharers();
    }
#pragma unroll
    for (int j = 0; j < kRowTiles; ++j) {
      sum_[j][0] += added[j][0];
      sum_[j][1] += added[j][1];
    }
    if constexpr (Shape::kDividesKeys) {
      add_values<kIsE5m2>(values, buffers_.stage(number), p, number, has_output);
    } else {
      const int32_t count = has_second ? 2 : 1;
#pragma unroll 1
      for (int32_t i = 0; i < count; ++i) {
        const uint32_t rows = buffers_.stage(number + i);
        buffers_.full(number + i).wait();
        load_first_values(values, rows);
        add_values<kIsE5m2>(values, rows, buffers_.p(i, number / 2), number + i, has_output || i > 0);
      }
    }
  }

  /// Orders the fragments of a group before its wgmma. Without the empty instructions the compiler converts some of
  /// them behind the fence, and adds fences of its own.
  static __device__ __forceinline__ void start(Fragments& fragments) {
#pragma unroll
    for (uint32_t (&fragment)[4] : fragments) {
      asm volatile("" : "+r"(fragment[0]), "+r"(fragment[1]), "+r"(fragment[2]), "+r"(fragment[3]));
    }
    hopper::ptx::wgmma_fence();
  }
  /// S^T = K Q^T of a block.
  template <bool kIsE5m2>
  __device__ __forceinline__ void compute_scores(Scores& scores, uint32_t rows) const {
    constexpr int kCount = kLatentDim / 16 / kGroupSteps, kStepsPerAtom = Atom::kColumns / 16;
    Codes codes;
    Fragments fragments[kGroups];
#pragma unroll
    for (int group = 0; group < kAhead; ++group) load_keys(codes[group], rows, group);
#pragma unroll
    for (int group = 0; group < kCount; ++group) {
      Fragments& keys = fragments[group % kGroups];
#pragma unroll
      for (int matrix = 0; matrix < 4; ++matrix) {
        const auto [even, odd] = decode_neighbours<Stored, kIsE5m2>(codes[group % kAhead][matrix]);
        keys[matrix / 2][matrix % 2] = even;
        keys[matrix / 2][matrix % 2 + 2] = odd;
      }
      if (group + kAhead < kCount) load_keys(codes[group % kAhead], rows, group + kAhead);
      start(keys);
#pragma unroll
      for (int i = 0; i < kGroupSteps; ++i) {
        const int step = group * kGroupSteps + i;
        const int offset = step / kStepsPerAtom * (Shape::kQueryAtomColumnBytes >> 4) + step % kStepsPerAtom * 2;
        ptx::multiply<kDescriptorHigh>(scores, keys[i], query_ + offset, step > 0);
      }
      hopper::ptx::wgmma_commit_group();
      if (group + 1 < kCount) hopper::ptx::wgmma_wait_group<kGroups - 1>();
    }
    hopper::ptx::wgmma_wait_group<0>();
  }
  /// Loads what becomes the operand of a group of steps: keys 0 to 7 and 8 to 15 of the warp, of 16 columns and then of
  /// the next 16.
  __device__ __forceinline__ void load_keys(uint32_t (&codes)[4], uint32_t rows, int group) const {
    xa::ptx::ldmatrix_x4(codes, StoredRows::moved(rows + keys_, 0, 2 * group));
  }

  /// O^T = V^T P^T (+ O^T with `has_output`) of a block, and releases the block. `codes` has its first values.
  template <bool kIsE5m2>
  __device__ __forceinline__ void add_values(Codes& codes, uint32_t rows, uint32_t p, int32_t number, bool has_output) {
    constexpr int kPerColumn = Shape::kKeys / 16 / kGroupSteps, kCount = kColumnTiles * kPerColumn;
    const uint32_t weights = descriptor_low(p);
    Fragments fragments[kGroups];
#pragma unroll
    for (int group = 0; group < kCount; ++group) {
      Fragments& values = fragments[group % kGroups];
#pragma unroll
      for (int matrix = 0; matrix < 4; ++matrix) {
        const auto [even, odd] = decode_even_and_odd<Stored, kIsE5m2>(codes[group % kAhead][matrix]);
        values[matrix / 2][matrix % 2 * 2] = even;
        values[matrix / 2][matrix % 2 * 2 + 1] = odd;
      }
      if (group + kAhead < kCount) load_values(codes[group % kAhead], rows, group + kAhead);
      start(values);
#pragma unroll
      for (int i = 0; i < kGroupSteps; ++i) {
        const int step = group % kPerColumn * kGroupSteps + i;
        ptx::multiply<kDescriptorHigh>(output_[group / kPerColumn], values[i], weights + 2 * step,
                                       step > 0 || has_output);
      }
      hopper::ptx::wgmma_commit_group();
      if (group + 1 < kCount) hopper::ptx::wgmma_wait_group<kGroups - 1>();
    }
    // The warp has all of the block in registers.
    __syncwarp();
    if (threadIdx.x % 32 == 0) buffers_.empty(number).arrive();
    hopper::ptx::wgmma_wait_group<0>();
  }
  /// Loads what becomes the operand of a group of steps of a block's values.
  __device__ __forceinline__ void load_first_values(Codes& codes, uint32_t rows) const {
#pragma unroll
    for (int group = 0; group < kAhead; ++group) load_values(codes[group], rows, group);
  }
  /// Of the warp's 16 columns of each 64, four matrices of 8 keys.
  __device__ __forceinline__ void load_values(uint32_t (&codes)[4], uint32_t rows, int group) const {
    constexpr int kPerColumn = Shape::kKeys / 16 / kGroupSteps;
    xa::ptx::ldmatrix_x4_trans(codes,
                               StoredRows::moved(rows + values_, group % kPerColumn * 32, group / kPerColumn * 4));
  }

  /// Turns products into masked scores. The warp's keys begin at `key`.
  __device__ __forceinline__ void finish_scores(Scores& scores, int32_t key) const {
    const float* const factors = buffers_.row_factors() + lane_row();
#pragma unroll
    for (int j = 0; j < kRowTiles; ++j) {
      const float2 of_rows = *reinterpret_cast<const float2*>(factors + 8 * j);
      scores[j][0] *= of_rows.x;
      scores[j][1] *= of_rows.y;
      scores[j][2] *= of_rows.x;
      scores[j][3] *= of_rows.y;
    }
    transform_.template apply<T>(scores, {1.0f}, key);
    if (key >= work_.keys.common_begin && key + 16 <= work_.keys.common_end) return;
    const Visibility visibility(params_, work_.tile);
    const PackedRows rows(params_, work_.tile.first_row);
#pragma unroll
    for (int j = 0; j < kRowTiles; ++j) {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const int32_t query = rows.query(8 * j + lane_row() + i);
        const int32_t begin = visibility.begin(query), end = visibility.end(query);
        const uint32_t length = max(end - begin, 0);
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          const uint32_t from_begin = key + 8 * half + lane_key() - begin;
          if (from_begin >= length) scores[j][2 * half + i] = -INFINITY;
        }
      }
    }
  }

  /// The exponent of a score, which is a logit in base 2, in a row with maximum `max`. Without a maximum every score is
  /// above it.
  static __device__ __forceinline__ float exponent(float score, float max) {
    return score - (max == -INFINITY ? -FLT_MAX : max);
  }
  /// Stores P of the lane's scores relative to the maxima so far, rounded to T, as [row][key]. Returns whether some
  /// maximum has to rise; P means nothing then. `sums` are those of the lane's keys.
  __device__ __forceinline__ bool store_weights(uint32_t p, float (&sums)[kRowTiles][2], const Scores& scores) const {
    const int32_t lane = threadIdx.x % 32;
    const uint32_t to = p + lane / 16 * Atom::kBytes + Atom::offset(lane % 8, 2 * warp() + lane / 8 % 2);
    const float* const max = maxima() + lane_row();
    bool rises = false;
#pragma unroll
    for (int j = 0; j < kRowTiles; j += 2) {
      uint32_t matrices[4];
#pragma unroll
      for (int tile = 0; tile < 2; ++tile) {
        const float2 of_rows = *reinterpret_cast<const float2*>(max + 8 * (j + tile));
        float weights[4];
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const float x = exponent(scores[j + tile][i], i % 2 == 0 ? of_rows.x : of_rows.y);
          rises = rises || x > kRise;
          weights[i] = xa::ptx::exp2_approx(x);
        }
        sums[j + tile][0] = weights[0] + weights[2];
        sums[j + tile][1] = weights[1] + weights[3];
        matrices[2 * tile] = Element<T>::pack(weights[0], weights[1]);
        matrices[2 * tile + 1] = Element<T>::pack(weights[2], weights[3]);
      }
      hopper::ptx::stmatrix_x4_trans(to + j * Atom::kBytes, matrices);
    }
    return rises;
  }

  /// Raises the maxima of rows that have a score of more than kRise above them to the largest score, and rescales
  /// their outputs and sums. Those of other rows stay bitwise unchanged.
  __device__ __forceinline__ void raise(const Scores& scores) {
    float* const of_warp = state_ + sharer_warp() * kRows + lane_row();
#pragma unroll
    for (int j = 0; j < kRowTiles; ++j) {
      float largest[2];
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        largest[i] = fmaxf(scores[j][i], scores[j][i + 2]);
#pragma unroll
        for (int lanes = 4; lanes < 32; lanes *= 2) {
          largest[i] = fmaxf(largest[i], __shfl_xor_sync(~0u, largest[i], lanes));
        }
      }
      if (threadIdx.x % 32 < 4) *reinterpret_cast<float2*>(of_warp + 8 * j) = make_float2(largest[0], largest[1]);
    }
    sync_sharers();
    const int32_t row = threadIdx.x % (128 * Shape::kSharers);
    bool had_maximum = false;
    if (row < kRows) {
      float largest = state_[row];
#pragma unroll
      for (int other = 1; other < Shape::kSharerWarps; ++other) {
        largest = fmaxf(largest, state_[other * kRows + row]);
      }
      const float max = maxima()[row], next = exponent(largest, max) > kRise ? largest : max;
      maxima()[row] = next;
      factors()[row] = merge_weight(max, next, transform_.log2_unit());
      had_maximum = max != -INFINITY;
    }
    // Without a maximum, output and sum are still 0, or not set.
    if (!ptx::barrier_or(barrier_id(), 128 * Shape::kSharers, had_maximum)) return;
#pragma unroll
    for (int j = 0; j < kRowTiles; ++j) {
      const float2 of_rows = *reinterpret_cast<const float2*>(factors() + 8 * j + lane_row());
      sum_[j][0] *= of_rows.x;
      sum_[j][1] *= of_rows.y;
#pragma unroll
      for (int column = 0; column < kColumnTiles; ++column) {
        float (&o)[4] = output_[column][j];
        o[0] *= of_rows.x;
        o[1] *= of_rows.y;
        o[2] *= of_rows.x;
        o[3] *= of_rows.y;
      }
    }
  }

  /// The output of no block.
  __device__ __forceinline__ void clear_output() {
#pragma unroll
    for (float (&column)[kRowTiles][4] : output_) {
#pragma unroll
      for (float (&o)[4] : column) o[0] = o[1] = o[2] = o[3] = 0.0f;
    }
  }
  __device__ __forceinline__ void store_output() const {
    const int state = Shape::kDividesKeys ? group_ : 0, first = Shape::kDividesKeys ? 0 : group_ * Shape::kColumns;
#pragma unroll
    for (int j = 0; j < kRowTiles; ++j) {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        float* const row = buffers_.output(state, 8 * j + lane_row() + i) + first + 16 * warp() + 2 * lane_key();
#pragma unroll
        for (int column = 0; column < kColumnTiles; ++column) {
          const float (&o)[4] = output_[column][j];
          store_columns(row + 64 * column, make_float2(o[i], o[i + 2]));
        }
      }
    }
  }
  /// Stores the sums of the warp's keys.
  __device__ __forceinline__ void store_sums() const {
#pragma unroll
    for (int j = 0; j < kRowTiles; ++j) {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        float sum = sum_[j][i];
#pragma unroll
        for (int lanes = 4; lanes < 32; lanes *= 2) sum += __shfl_xor_sync(~0u, sum, lanes);
        const int32_t row = 8 * j + lane_row() + i;
        if (lane_key() == 0) state_[sharer_warp() * kRows + row] = sum;
      }
    }
  }
  /// What has been stored of a row of a state.
  __device__ __forceinline__ PartialState part_of(int index, int32_t row, int32_t column) const {
    const float* const state = buffers_.state(index) + row;
    float sum = 0.0f;
#pragma unroll
    for (int warp = 0; warp < Shape::kSharerWarps; ++warp) sum += state[warp * kRows];
    return PartialState{state[Shape::kSharerWarps * kRows], sum,
                        *reinterpret_cast<const float4*>(buffers_.output(index, row) + column)};
  }

  const AttentionParams& params_;
  const Buffers<Shape>& buffers_;
  const WorkTile& work_;
  const LogitsTransform transform_;
  const int group_;
  float* const state_;                        // f32 [kSharerWarps + 2, kRows] of the warpgroups that share maxima
  const uint32_t query_;                      // of the descriptor of Q
  uint32_t keys_, values_;                    // of the lane's first row of ldmatrix in a block, for K and for V^T
  float output_[kColumnTiles][kRowTiles][4];  // not set before the first block
  float sum_[kRowTiles][2];                   // of this lane's keys
};

/// Computes a work tile.
template <typename Shape, typename LogitsTransform>
__device__ __forceinline__ void compute_tile(const AttentionParams& params, const Buffers<Shape>& buffers,
                                             int32_t& number, int group) {
  const WorkTile& work = buffers.work_tile();
  const int32_t first = hopper::uniform(work.keys.begin / Shape::kKeys);
  const int32_t end = hopper::uniform((work.keys.end + Shape::kKeys - 1) / Shape::kKeys);
  using Tile = TransposedTile<Shape, LogitsTransform>;
  load_query(params, buffers);
  Tile::sync_compute_threads();
  Tile tile(params, buffers, group);
  if (params.kv_is_e5m2 != 0) {
    tile.template attend<true>(first, end, number);
  } else {
    tile.template attend<false>(first, end, number);
  }
  number += end - first;
  tile.store_result(buffers.work_range());
}

}  // namespace xa::hopper_mla_fp8
