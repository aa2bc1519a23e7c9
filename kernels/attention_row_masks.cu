// Attention of few query rows per sequence that have masks of their own, bounds of their keys (`k_start`, `k_end`) or a
// tree among their newest keys (`tree_mask`), over paged or contiguous K and V, on every GPU: the loop of
// attention_key_ranges.cu over keys that are divided between CTAs as in decode (include/work_partition.cuh).
//
// Compiled once for each combination of
//   XA_DTYPE     f16, bf16, f32: of q, K, V and out; fp8, fp8_shifted: fp8 K and V, converted to f16 (include/fp8.cuh)
//   XA_HEAD_DIM  the bucket: serves head dimensions up to it, which are padded with zeros in shared memory
// Launch: Shape::kThreads threads, a grid of Hkv by any number of work ranges, Shape::kSharedBytes of dynamic shared
// memory, plus Shape::kKeptStatesBytes with fixed-size splits.

#include <climits>

#include "column_warps.cuh"
#include "element.cuh"
#include "fixed_splits.cuh"
#include "fp8.cuh"
#include "key_range_loop.cuh"
#include "key_ranges.cuh"
#include "logits_transform.cuh"
#include "padding_rows.cuh"
#include "params/attention.cuh"
#include "params/tree_mask.cuh"
#include "query_rows.cuh"
#include "row_mask_result.cuh"
#include "row_mask_shape.cuh"
#include "softmax.cuh"
#include "tree_mask.cuh"
#include "work_partition.cuh"
#include "work_range.cuh"
#include "work_tile.cuh"

namespace xa {

/// Stores the rows' ranges in the current split to `rows`, and sets the keys of `work` accordingly. All threads of the
/// CTA call this.
template <typename Shape>
__device__ __forceinline__ void find_ranges(const RowMaskParams& params, WorkTile& work, const WorkRange& range,
                                            RowRange* rows) {
  // Warps may still be at the split before.
  __syncthreads();
  const TreeMask tree(params.tree, work.tile);
  Visibility visibility(params.attention, work.tile);
  if (tree.exists()) visibility.window_right = -1;
  const PackedRows packed(params.attention, work.tile.first_row);
  const int32_t begin = range.fixed_split_begin, end = current_split_end(range);
  const int32_t first_key = begin > 0 ? (range.first_chunk + begin) * Shape::kKeys : 0;
  const int32_t end_key = end < range.tile_chunks ? (range.first_chunk + end) * Shape::kKeys : INT_MAX;
  for (int32_t row = threadIdx.x; row < Shape::kRows; row += Shape::kThreads) {
    RowRange keys = {0, 0};
    if (row < work.tile.num_rows) keys = row_range(params.ranges, visibility, work.tile, packed.query(row));
    keys = {max(keys.begin, first_key), min(keys.end, end_key)};
    rows[row] = keys.begin < keys.end ? keys : RowRange{0, 0};
  }
  __syncthreads();
  KeyRange keys = RowRanges<Shape::kRows>(rows).key_range(0, work.tile.num_rows);
  if (tree.exists()) keys.common_end = min(keys.common_end, tree.first_key());
  if (threadIdx.x == 0) work.keys = keys;
  __syncthreads();
}

/// Computes the current split of the work tile, from loading the query rows to storing the result.
template <typename Shape, typename T, typename Stored, typename LogitsTransform>
__device__ __forceinline__ void attend_split(const RowMaskParams& params, WorkTile& work, const WorkRange& range,
                                             uint8_t* shared) {
  auto* const rows = reinterpret_cast<RowRange*>(shared + Shape::kRangesOffset);
  const AttentionParams& attention = params.attention;
  const uint32_t query_rows = ptx::shared_address(shared);
  float* const row_factors = Shape::kIsFp8 ? reinterpret_cast<float*>(shared + Shape::kFactorsOffset) : nullptr;
  find_ranges<Shape>(params, work, range, rows);
  SoftmaxState<1, Shape::kWarpColumns / 8> state;
  const LogitsTransform transform(attention, row_factors);
  fetch_query<Shape, T, Stored>(attention, work, shared, row_factors);
  const int32_t warp_row = first_warp_row<Shape>();
  const RowMasks<Shape::kRows> masks(params, work.tile, rows);
  attend_with_ranges<Shape, T, Stored, true>(state, attention, work, masks, shared + Shape::kRingsOffset, warp_row,
                                             query_rows, transform);
  store_split<Shape, T>(attention, work, range, state, shared, transform.log2_unit());
}

}  // namespace xa

namespace {
using Types = xa::XA_PASTE(operands_, XA_DTYPE);
using Compute = Types::Compute;
using Stored = Types::Stored;
using LogitsTransform = xa::logits_softcap_alibi;
using Shape = xa::RowMaskShape<Compute, Stored, XA_HEAD_DIM>;
}  // namespace

extern "C" __global__ void __launch_bounds__(Shape::kThreads, Shape::kCtasPerSm)
    XA_ENTRY(const __grid_constant__ xa::RowMaskParams params) {
  extern __shared__ __align__(128) uint8_t shared[];
  using Unit = xa::WorkUnit<Shape::kRows, Shape::kKeys>;
  const xa::AttentionParams& attention = params.attention;
  auto& work = *reinterpret_cast<xa::WorkTile*>(shared + Shape::kWorkTileOffset);
  auto& range = *reinterpret_cast<xa::WorkRange*>(shared + Shape::kWorkRangeOffset);
  const xa::WorkRangeIndex index = {static_cast<int32_t>(blockIdx.y), static_cast<int32_t>(gridDim.y)};
  xa::init_work_tile<LogitsTransform>(attention, work, blockIdx.x);
  xa::for_work_tiles<Shape::kThreads, Unit, Shape::kHasFixedSplits>(attention, work, range, index, [&] {
    do {
      xa::attend_split<Shape, Compute, Stored, LogitsTransform>(params, work, range, shared);
    } while (Shape::kHasFixedSplits && xa::next_fixed_split(range));
  });
  xa::store_split_record<Shape::kRows>(attention, work, range, index.index);
  xa::clear_padding_rows<Compute, Shape::kThreads>(attention, work, range);
}
