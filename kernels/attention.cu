// Attention of ragged query rows over paged or contiguous K and V, on mma.sync and cp.async: every GPU from sm_80 on.
//
// A CTA works on one tile (include/tile_plan.cuh) of one KV head at a time and streams the keys that the tile sees
// through shared memory; in decode, on its share of the keys of all tiles (include/work_list.cuh). docs/kernels.md
// explains the design.
//
// Compiled once for each combination of
//   XA_DTYPE     f16, bf16, f32: of q, K, V and out; f16_fp8, bf16_fp8: of what computes on 8-bit K and V (and q)
//   XA_HEAD_DIM  the bucket: head dimensions up to it run, padded with zeros in shared memory
//   XA_SHAPE     prefill, decode (include/tile_shape.cuh)
//   XA_SCORE     plain, modified (include/score_form.cuh)
// Launch: kThreads threads, Hkv * n CTAs for any n >= 1, in decode as a grid of Hkv by n; Shape::kSharedBytes of
// dynamic shared memory, in decode with batch_invariant Shape::kFoldBytes more.

#include "attention_params.cuh"
#include "element.cuh"
#include "fp8.cuh"
#include "output_rows.cuh"
#include "paged_rows.cuh"
#include "score_form.cuh"
#include "softmax.cuh"
#include "tile_math.cuh"
#include "tile_plan.cuh"
#include "tile_result.cuh"
#include "tile_shape.cuh"
#include "work_list.cuh"

namespace xa {

/// Fetches the tile's query rows; rows past the last one and columns past head_dim become zeros.
template <typename Shape, typename T>
__device__ __forceinline__ void copy_query(const AttentionParams& params, const RowMap& map, uint32_t destination) {
  using Grid = LaneGrid<Shape::kQueryRowBytes>;
  constexpr int kElements = 16 / sizeof(T);
  const int32_t warp = threadIdx.x / 32;
  const Grid grid;
#pragma unroll 4
  for (int32_t row = warp * Grid::kRowsPerStep + grid.row; row < Shape::kRows;
       row += Shape::kWarps * Grid::kRowsPerStep) {
    const bool live = row < map.num_rows;
    const int32_t source_row = live ? row : 0;
    const T* const from = static_cast<const T*>(params.q) + map.token(source_row) * params.q_token_stride +
                          map.head(source_row) * params.q_head_stride;
#pragma unroll
    for (int step = 0; step < Grid::kStepsPerRow; ++step) {
      const int32_t chunk = grid.chunk + 32 * step;
      const bool inside = chunk * kElements < params.head_dim;
      if (!grid.has_chunk(step)) continue;
      ptx::cp_async_16(destination + row * Shape::kQueryPitch + chunk * 16, from + (inside ? chunk * kElements : 0),
                       live && inside);
    }
  }
}

/// Eight neighbouring columns of a query row, as pairs of the columns 0 2 4 6 | 1 3 5 7.
template <typename T>
__device__ __forceinline__ uint4 query_pairs(const AttentionParams& params, int64_t first) {
  if (params.q_is_fp8 != 0) {
    const uint2 x = __ldg(reinterpret_cast<const uint2*>(static_cast<const uint8_t*>(params.q) + first));
    const PairsOfFour low = decode_fp8<T>(params.fp8, x.x), high = decode_fp8<T>(params.fp8, x.y);
    return make_uint4(low.even, high.even, low.odd, high.odd);
  }
  constexpr uint32_t kLowHalves = 0x5410, kHighHalves = 0x7632;
  const uint4 x = __ldg(reinterpret_cast<const uint4*>(static_cast<const T*>(params.q) + first));
  return make_uint4(__byte_perm(x.x, x.y, kLowHalves), __byte_perm(x.z, x.w, kLowHalves),
                    __byte_perm(x.x, x.y, kHighHalves), __byte_perm(x.z, x.w, kHighHalves));
}

/// As `copy_query`, in the order of columns that fp8 K asks for (tile_math.cuh), and also out of fp8.
template <typename Shape, typename T>
__device__ __forceinline__ void convert_query(const AttentionParams& params, const RowMap& map, uint8_t* destination) {
  constexpr int kChunks = Shape::kHeadDim / 8;
  for (int32_t item = threadIdx.x; item < Shape::kRows * kChunks; item += Shape::kThreads) {
    const int32_t row = item / kChunks, chunk = item % kChunks;
    uint4 pairs = make_uint4(0, 0, 0, 0);
    if (row < map.num_rows && chunk * 8 < params.head_dim) {
      pairs = query_pairs<T>(params,
                             map.token(row) * params.q_token_stride + map.head(row) * params.q_head_stride + chunk * 8);
    }
    // 16 columns are 32 bytes: the even pairs of both chunks, then the odd ones.
    uint8_t* const to = destination + row * Shape::kQueryPitch + chunk / 2 * 32 + chunk % 2 * 8;
    *reinterpret_cast<uint2*>(to) = make_uint2(pairs.x, pairs.y);
    *reinterpret_cast<uint2*>(to + 16) = make_uint2(pairs.z, pairs.w);
  }
}

/// Keys from one block of a warp to its next one.
template <typename Shape>
constexpr int32_t kBlockStep = Shape::kKeys * Shape::kKeyWarps;

/// First key of the warp's first block. Blocks start at multiples of kKeys of the sequence, whatever the tile sees of
/// them; where warps share the keys, block b is that of warp b % kKeyWarps.
template <typename Shape>
__device__ __forceinline__ int32_t first_block(const KeyRange& keys) {
  const int32_t block = keys.begin / Shape::kKeys;
  const int32_t warp = Shape::kSplitsKeys ? threadIdx.x / 32 : 0;
  const int32_t ahead = (warp - block % Shape::kKeyWarps + Shape::kKeyWarps) % Shape::kKeyWarps;
  return (block + ahead) * Shape::kKeys;
}

/// The ring of K and V blocks of one warp (decode) or of the CTA (prefill), and what keeps its readers and writers
/// apart.
template <typename Shape>
struct Ring {
  uint32_t address;

  __device__ __forceinline__ explicit Ring(uint32_t rings)
      : address(rings + (Shape::kSplitsKeys ? threadIdx.x / 32 : 0) * Shape::kRingBytes) {}
  __device__ __forceinline__ uint32_t keys(int stage) const { return address + stage * Shape::kBlockBytes; }
  __device__ __forceinline__ uint32_t values(int stage) const { return keys(Shape::kStages + stage); }
  /// Where this warp's share of a block begins: all of it, or as many rows as each warp fetches.
  static __device__ __forceinline__ int32_t share() {
    return Shape::kSplitsKeys ? 0 : threadIdx.x / 32 * Shape::kKeysPerLoad;
  }
  /// All who read this ring have come here.
  static __device__ __forceinline__ void sync() {
    if constexpr (Shape::kSplitsKeys) {
      __syncwarp();
    } else {
      __syncthreads();
    }
  }
};

/// Streams the keys of `blocks` through the ring and takes them up into `state`. The warp's rows are those from row
/// `warp_row` of the tile; the tile's are on their way to `query_rows`, as the first group of copies.
template <typename Shape, typename T, typename Stored, typename Score, typename State, typename Loader>
__device__ __forceinline__ void attend(State& state, const AttentionParams& params, const Plan& plan,
                                       const Loader& loader, const Ring<Shape>& ring, int32_t warp_row,
                                       uint32_t query_rows, const Score& score) {
  using Math = TileMath<T, Stored, Shape::kRowTiles, Shape::kKeys, Shape::kHeadDim>;
  constexpr int kStages = Shape::kStages;
  constexpr bool kHoldsQuery = Shape::kRowTiles == 1 && Shape::kQueryRowBytes <= 256;
  // Each block is two groups of copies, K's and V's. Those that may be under way while the oldest is waited for: a warp
  // with a ring of its own refills V's block before it waits for the next K, the others once they have all come there.
  constexpr int kPending = 2 * kStages - (Shape::kSplitsKeys ? 1 : 2);
  // The sooner K is fetched again the better, but a refill beside the scores takes registers.
  constexpr int kAccumulators = Shape::kRowTiles * 4 * (Shape::kKeys + Shape::kHeadDim) / 8;
  constexpr bool kRefillsEarly = kAccumulators <= (Element<T>::kIs16Bit ? 144 : 72);
  const int32_t share = Ring<Shape>::share();
  const uint32_t share_bytes = share * Shape::kPitch;
  int32_t first_key = first_block<Shape>(plan.keys);

  TokenSlot slots[kStages];
#pragma unroll
  for (int i = 0; i < kStages; ++i) slots[i] = loader.find(first_key + i * kBlockStep<Shape> + share);
#pragma unroll
  for (int i = 0; i < kStages; ++i) {
    const int32_t token = first_key + i * kBlockStep<Shape>;
    if (token < plan.keys.end) loader.load_keys(ring.keys(i) + share_bytes, token + share, slots[i]);
    ptx::cp_async_commit();
    if (token < plan.keys.end) loader.load_values(ring.values(i) + share_bytes, token + share, slots[i]);
    ptx::cp_async_commit();
  }
  TokenSlot ahead = loader.find(first_key + kStages * kBlockStep<Shape> + share);

  ptx::cp_async_wait<2 * kStages - 1>();
  __syncthreads();
  QueryFragments<Shape::kRowTiles, Shape::kHeadDim, sizeof(T), kHoldsQuery> query(query_rows +
                                                                                  warp_row * Shape::kQueryPitch);
  query.fill();

  int stage = 0;
#pragma unroll 1
  while (first_key < plan.keys.end) {
    const int32_t next = ptx::opaque(first_key) + kStages * kBlockStep<Shape>;
    float scores[Shape::kRowTiles][Shape::kKeys / 8][4];
    Math::scores(scores, query, ring.keys(stage), params);

    // K's block is free again once all have read it.
    const auto refill_keys = [&] {
      if (next < plan.keys.end) loader.load_keys(ring.keys(stage) + share_bytes, next + share, ahead);
      ptx::cp_async_commit();
    };
    if constexpr (!Shape::kSplitsKeys) ptx::cp_async_wait<kPending>();
    ring.sync();
    if constexpr (kRefillsEarly) refill_keys();

    const bool masked = first_key < plan.keys.common_begin || first_key + Shape::kKeys > plan.keys.common_end;
#pragma unroll
    for (int tile = 0; tile < Shape::kRowTiles; ++tile) {
      score.template apply<T>(scores[tile], plan, warp_row + 16 * tile, first_key);
      if (masked) apply_mask(scores[tile], params, plan.tile, warp_row + 16 * tile, first_key);
      state.absorb(tile, scores[tile], score.log2_unit());
    }
    if constexpr (!kRefillsEarly) refill_keys();
    if constexpr (Shape::kSplitsKeys) {
      ptx::cp_async_wait<kPending>();
      ring.sync();
    }
    Math::accumulate(state.output, scores, ring.values(stage), params);

    // V's block is free again once all have read it, and the next K has to be there.
    if constexpr (!Shape::kSplitsKeys) ptx::cp_async_wait<kPending>();
    ring.sync();
    if (next < plan.keys.end) loader.load_values(ring.values(stage) + share_bytes, next + share, ahead);
    ptx::cp_async_commit();
    if constexpr (Shape::kSplitsKeys) {
      ptx::cp_async_wait<kPending>();
      ring.sync();
    }
    ahead = loader.find(next + kBlockStep<Shape> + share);
    first_key += kBlockStep<Shape>;
    stage = stage + 1 == kStages ? 0 : stage + 1;
  }
  state.finish();
}

/// The planned tile of one KV head.
template <typename Shape, typename T, typename Stored, typename Score>
__device__ __forceinline__ void attend_tile(const AttentionParams& params, const Plan& plan, uint8_t* shared) {
  using State = SoftmaxState<Shape::kRowTiles, Shape::kHeadDim / 8>;
  using Loader = RowLoader<Stored, Shape::kHeadDim, Shape::kKeysPerLoad, Shape::kSplitsKeys>;
  const uint32_t query_rows = ptx::shared_address(shared);
  const RowMap map(params, plan.tile, plan.kv_head);
  if constexpr (Shape::kIsFp8) {
    convert_query<Shape, T>(params, map, shared);
  } else {
    copy_query<Shape, T>(params, map, query_rows);
  }
  ptx::cp_async_commit();

  const int32_t warp_row = Shape::kSplitsKeys ? 0 : threadIdx.x / 32 * 16 * Shape::kRowTiles;
  State state;
  const Score score(params);
  attend<Shape, T, Stored>(state, params, plan, Loader(params, plan), Ring<Shape>(query_rows + Shape::kQueryBytes),
                           warp_row, query_rows, score);

  const RowWriter<T, Shape::kIsFp8> writer(params, plan.tile, plan.kv_head, plan.overlap);
  if constexpr (Shape::kSplitsKeys) {
    __syncthreads();
    deliver<Shape>(params, plan, writer, state, shared, score.log2_unit());
  } else {
    write_warp_rows<Shape, T>(params, writer, state, warp_row, shared + warp_row * Shape::kQueryPitch,
                              score.log2_unit());
  }
}

}  // namespace xa

namespace {
using Types = xa::XA_PASTE(operands_, XA_DTYPE);
using Compute = Types::Compute;
using Stored = Types::Stored;
using Score = xa::XA_PASTE(score_, XA_SCORE);
using Shape = xa::TileShape<xa::XA_PASTE(shape_, XA_SHAPE), Compute, Stored, XA_HEAD_DIM>;
}  // namespace

extern "C" __global__ void __launch_bounds__(Shape::kThreads, Shape::kCtasPerSm)
    XA_ENTRY(const __grid_constant__ xa::AttentionParams params) {
  extern __shared__ __align__(16) uint8_t shared[];
  auto& plan = *reinterpret_cast<xa::Plan*>(shared + Shape::kPlanOffset);
  xa::start_plan<Score>(params, plan);
  if constexpr (Shape::kSplitsKeys) {
    auto& share = *reinterpret_cast<xa::Share*>(shared + Shape::kShareOffset);
    constexpr int kUnitKeys = Shape::kKeyWarps * Shape::kKeys;
    xa::share_out_work<Shape::kThreads, Shape::kRows, kUnitKeys>(params, plan, share);
    for (;;) {
      xa::next_piece<Shape::kRows, kUnitKeys>(params, plan, share);
      if (plan.tile.num_rows == 0) break;
      xa::attend_tile<Shape, Compute, Stored, Score>(params, plan, shared);
    }
  } else {
    do {
      xa::find_tile<Shape::kThreads, Shape::kRows>(params, plan);
      if (plan.tile.num_rows > 0) xa::attend_tile<Shape, Compute, Stored, Score>(params, plan, shared);
      __syncthreads();
      if (threadIdx.x == 0) ++plan.round;
    } while (plan.overlap == xa::Overlap::kMoreTiles);
  }
  if (params.clears_unowned_rows != 0) {
    const int32_t cta = Shape::kSplitsKeys ? blockIdx.y * gridDim.x + blockIdx.x : blockIdx.x;
    const int32_t num_ctas = Shape::kSplitsKeys ? gridDim.x * gridDim.y : gridDim.x;
    xa::clear_unowned_rows<Compute, Shape::kThreads>(params, plan.overlap, cta, num_ctas);
  }
}
