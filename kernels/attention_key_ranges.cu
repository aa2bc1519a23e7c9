// Attention of query rows with bounds of their keys (`k_start`, `k_end`) over paged or contiguous K and V, on every
// GPU: the prefill of attention.cu for sequences of any length, over the blocks of keys that some row of a tile attends
// to.
//
// Compiled once for each combination of
//   XA_DTYPE     f16, bf16, f32: of q, K, V and out; fp8, fp8_shifted: fp8 K and V, converted to f16 (include/fp8.cuh)
//   XA_HEAD_DIM  the bucket: serves head dimensions up to it, which are padded with zeros in shared memory
// Launch: Shape::kThreads threads, a grid of Hkv * n, n at least the number of tiles per KV head, Shape::kSharedBytes
// of dynamic shared memory.

#include "column_warps.cuh"
#include "element.cuh"
#include "fp8.cuh"
#include "key_range_loop.cuh"
#include "key_ranges.cuh"
#include "logits_transform.cuh"
#include "output_rows.cuh"
#include "params/attention.cuh"
#include "params/key_ranges.cuh"
#include "prefill_tiles.cuh"
#include "query_rows.cuh"
#include "softmax.cuh"
#include "tile_shape.cuh"
#include "work_tile.cuh"

namespace xa {

/// Stores the ranges of the tile's rows to `rows`, and sets the keys of `work` accordingly. All threads of the CTA call
/// this.
template <typename Shape>
__device__ __forceinline__ void find_ranges(const AttentionParams& params, const KeyRangeSource& ranges, WorkTile& work,
                                            RowRange* rows) {
  const Visibility visibility(params, work.tile);
  const PackedRows packed(params, work.tile.first_row);
  for (int32_t row = threadIdx.x; row < Shape::kRows; row += Shape::kThreads) {
    rows[row] = row < work.tile.num_rows ? row_range(ranges, visibility, work.tile, packed.query(row)) : RowRange{0, 0};
  }
  __syncthreads();
  const KeyRange keys = RowRanges<Shape::kRows>(rows).key_range(0, work.tile.num_rows);
  if (threadIdx.x == 0) work.keys = keys;
  __syncthreads();
}

/// Computes the work tile.
template <typename Shape, typename T, typename Stored, typename LogitsTransform>
__device__ __forceinline__ void attend_tile(const AttentionParams& params, const WorkTile& work, const RowRange* rows,
                                            uint8_t* shared) {
  const uint32_t query_rows = ptx::shared_address(shared);
  float* const row_factors = Shape::kIsFp8 ? reinterpret_cast<float*>(shared + Shape::kFactorsOffset) : nullptr;
  SoftmaxState<Shape::kRowTiles, Shape::kWarpColumns / 8> state;
  const LogitsTransform transform(params, row_factors);
  fetch_query<Shape, T, Stored>(params, work, shared, row_factors);
  const int32_t warp_row = first_warp_row<Shape>();
  attend_with_ranges<Shape, T, Stored, false>(state, params, work, RowRanges<Shape::kRows>(rows),
                                              shared + Shape::kRingsOffset, warp_row, query_rows, transform);
  const RowWriter<T, Shape::kIsFp8> writer(params, work.tile, work.kv_head);
  write_warp_rows<Shape, T>(params, writer, state, warp_row, first_warp_column<Shape>(),
                            shared + warp_row * Shape::kQueryPitch, transform.log2_unit());
}

}  // namespace xa

namespace {
using Types = xa::XA_PASTE(operands_, XA_DTYPE);
using Compute = Types::Compute;
using Stored = Types::Stored;
using LogitsTransform = xa::logits_softcap_alibi;
using Shape = xa::TileShape<xa::tiles::shape_prefill, Compute, Stored, XA_HEAD_DIM>;
}  // namespace

extern "C" __global__ void __launch_bounds__(Shape::kThreads, Shape::kCtasPerSm)
    XA_ENTRY(const __grid_constant__ xa::KeyRangeParams params) {
  extern __shared__ __align__(128) uint8_t shared[];
  __shared__ xa::RowRange rows[Shape::kRows];
  const xa::AttentionParams& attention = params.attention;
  auto& work = *reinterpret_cast<xa::WorkTile*>(shared + Shape::kWorkTileOffset);
  xa::init_work_tile<LogitsTransform>(attention, work, blockIdx.x % attention.num_kv_heads);
  xa::find_tile<Shape::kThreads, Shape::kRows>(attention, work);
  if (work.tile.num_rows > 0) {
    xa::find_ranges<Shape>(attention, params.ranges, work, rows);
    xa::attend_tile<Shape, Compute, Stored, LogitsTransform>(attention, work, rows, shared);
  }
  __syncthreads();
  const bool ascends = xa::starts_ascend(work.maxima);
  xa::clear_padding_rows<Compute, Shape::kThreads>(attention, ascends, xa::live_rows(attention, ascends), blockIdx.x,
                                                   gridDim.x);
}
