// dQ from dS of a block of few packed query rows, as the last one of a sequence may be: all threads of the CTA divide
// the keys of a row, which they read from global memory, one row after the other.
#pragma once

#include <cstdint>
#include <type_traits>

#include "bwd/gradient_type.cuh"
#include "bwd/row_sums.cuh"
#include "bwd/rows.cuh"
#include "bwd/score_gradients.cuh"
#include "bwd/sequence_segment.cuh"
#include "chunk.cuh"
#include "element.cuh"
#include "params/bias.cuh"

namespace xa {

template <typename Shape, typename T>
class FewRowGradients {
  using Ds = typename Shape::DsStage::Ds;
  static constexpr int kElements = 8;
  /// Adjacent lanes divide the columns of a key. The keys that all threads have at a time, and how often a thread loads
  /// one before it computes.
  static constexpr int kLanes = Shape::kHeadDim / kElements, kKeys = Shape::kThreads / kLanes, kBatch = 8;

 public:
  /// For `columns` columns from column `first_column` on.
  __device__ __forceinline__ FewRowGradients(const BiasBackwardParams& params, const SequenceSegment& segment,
                                             uint8_t* memory, int32_t first_column, int32_t columns)
      : params_(params), segment_(segment), sums_(memory), first_column_(first_column), columns_(columns) {}

  /// Stores dQ of row `row` of `block`, of which `of` describes dS. All threads of the CTA call it.
  __device__ __forceinline__ void store(const QueryBlock& block, int32_t row, const ScoreGradientRow& of) const {
    float terms[kElements] = {};
    add_up(of, terms);
    sums_.put(0, lane() * kElements, terms);
    __syncthreads();
    const BackwardParams& backward = params_.backward;
    const AttentionParams& forward = backward.forward;
    const int64_t place =
        static_cast<int64_t>(block.token(row)) * (forward.num_kv_heads * forward.group) + block.head(row);
    with_gradient_type<T>(backward, backward.dq, [&](auto* to) {
      for (int32_t column = threadIdx.x; column < columns_; column += Shape::kThreads) {
        const float sum = sums_.sum(0, column) * backward.softmax_scale;
        to[place * forward.head_dim + first_column_ + column] = rounded<std::remove_reference_t<decltype(*to)>>(sum);
      }
    });
    __syncthreads();
  }

 private:
  static __device__ __forceinline__ int32_t lane() { return threadIdx.x % kLanes; }

  /// Adds up dS K over the thread's keys.
  __device__ __forceinline__ void add_up(const ScoreGradientRow& of, float (&sums)[kElements]) const {
    const AttentionParams& forward = params_.backward.forward;
    const int32_t column = lane() * kElements;
    const int32_t key_0 = column_of_key_0(params_, segment_.tile.start_k);
    const T* const k =
        static_cast<const T*>(forward.k.base) + segment_.kv_head * forward.k.head_stride + first_column_ + column;
    const Ds* const ds = static_cast<const Ds*>(params_.ds.data) + of.element;
#pragma unroll 1
    for (int32_t first = of.begin + static_cast<int32_t>(threadIdx.x) / kLanes; first < of.end;
         first += kBatch * kKeys) {
      Chunk<T, kElements> keys[kBatch];
      Ds factors[kBatch];
#pragma unroll
      for (int i = 0; i < kBatch; ++i) {
        const int32_t at = first + i * kKeys;
        const bool exists = at < of.end && column < columns_;
        const int64_t token = segment_.tile.start_k + at - key_0;
        keys[i] = exists ? load_chunk<T, kElements>(k + token * forward.k.token_stride) : Chunk<T, kElements>{};
        factors[i] = exists ? ds[at] : Ds{};
      }
#pragma unroll
      for (int i = 0; i < kBatch; ++i) {
#pragma unroll
        for (int j = 0; j < kElements; ++j) {
          sums[j] = __fmaf_rn(Element<Ds>::to_f32(factors[i]), Element<T>::to_f32(keys[i].elements[j]), sums[j]);
        }
      }
    }
  }

  const BiasBackwardParams& params_;
  const SequenceSegment& segment_;
  const RowSums<Shape, kLanes, 1> sums_;
  const int32_t first_column_, columns_;
};

}  // namespace xa
