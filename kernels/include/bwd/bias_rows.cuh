// The bias of scores in the gradients: it is read where it is, an element per score.
#pragma once

#include <cstdint>

#include "element.cuh"
#include "params/bias.cuh"
#include "score_bias.cuh"

namespace xa {

/// No bias.
struct NoBias {
  static constexpr bool kExists = false;
};

/// The bias of the query rows of a warp's scores: `Find` gives the element of the row with an index among them.
template <typename T, typename Find>
struct RowBias {
  static constexpr bool kExists = true;

  const BiasSource& source;
  Find find;

  __device__ __forceinline__ int64_t row(int32_t index) const { return find(index); }
  /// The bias of a key of a row. Not a branch around code for all scores: there are several copies of that already.
  __device__ __forceinline__ float at(int64_t row, int32_t key) const {
    if constexpr (Element<T>::kIs16Bit) {
      if (source.is_wide != 0) return bias_at<float>(source, row, key);
    }
    return bias_at<T>(source, row, key);
  }
};

template <typename T, typename Find>
__device__ __forceinline__ RowBias<T, Find> row_bias(const BiasSource& source, const Find& find) {
  return {source, find};
}

}  // namespace xa
