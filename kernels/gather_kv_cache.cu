// Copies the K and V rows of sequences out of a paged cache into packed rows, in the order of the tokens.
//
// Where sequences begin is a prefix sum of their lengths. Up to kSeqs sequences, every CTA computes it itself, which
// takes less time than waiting for another launch. With more of them a first launch, the kernel without an XA_DTYPE,
// writes cu_seqlens, in which the CTAs that copy find their rows. Lengths and pages are clamped, and tokens past the
// last row are left out, so valid and invalid metadata cost the same.
//
// Compiled for each XA_DTYPE of the results: f16, bf16, f32, and u8 for rows that are copied bit by bit.
// Launch: kThreads threads; the CTAs (i, 0), (i, 1) and so on divide the vectors of the same rows.

#include <cstdint>
#include <type_traits>

#include "chunk.cuh"
#include "element.cuh"
#include "fp8.cuh"
#include "params/gather_kv_cache.cuh"

namespace xa {

constexpr int kThreads = kGatherThreads;
/// Sequences whose starts fit into shared memory, and of these per thread.
constexpr int kSeqs = kGatherSeqs, kThreadSeqs = kSeqs / kThreads;
constexpr int kWarp = 32;
/// Threads and sequences per CTA of the first launch.
constexpr int kStartsThreads = kGatherStartsThreads, kStartsSeqs = kGatherStartsSeqs;

// The element type of rows that are copied bit by bit; the other types are in element.cuh.
using dtype_u8 = uint8_t;

/// Marks a row of the results without a token.
constexpr int64_t kNoToken = INT64_MIN;

struct Shared {
  int32_t starts[kSeqs + 1];
  uint32_t sums[kThreads / kWarp];
  int64_t keys[kThreads];  // byte offset in the K cache of the token that each row of the batch gets
  int64_t values[kThreads];
};

/// The type of a vector of kBytes bytes, which one instruction loads or stores.
template <int kBytes>
struct VectorOf;
template <>
struct VectorOf<16> {
  using Type = uint4;
};
template <>
struct VectorOf<8> {
  using Type = uint2;
};
template <>
struct VectorOf<4> {
  using Type = uint32_t;
};
template <>
struct VectorOf<2> {
  using Type = uint16_t;
};
template <>
struct VectorOf<1> {
  using Type = uint8_t;
};

/// n / by.divisor. A branch for some divisors, or a division, would come before the loads of small calls.
__device__ __forceinline__ uint32_t divided(uint32_t n, const ExactDivisor& by) {
  const uint64_t product = uint64_t{n} * by.inverse_high + __umulhi(n, by.inverse_low);
  return by.divisor == 1 ? n : static_cast<uint32_t>(product >> 32);
}

/// The sum of two numbers of rows, at most N. Both are at most N, which is below 2^31, so the sum does not overflow.
__device__ __forceinline__ uint32_t add_rows(uint32_t a, uint32_t b, uint32_t capacity) { return min(a + b, capacity); }

/// The rows of a sequence of this length: 0 to the capacity of a row of the block table, at most N.
__device__ __forceinline__ uint32_t rows_of(const GatherParams& params, int32_t len) {
  return min(static_cast<uint32_t>(max(0, min(len, params.longest))), static_cast<uint32_t>(params.capacity));
}

/// The sum over this lane and the lanes before it.
__device__ __forceinline__ uint32_t prefix_sum(uint32_t rows, uint32_t capacity) {
  uint32_t sum = rows;
#pragma unroll
  for (int step = 1; step < kWarp; step *= 2) {
    const uint32_t before = __shfl_up_sync(~0u, sum, step);
    if (threadIdx.x % kWarp >= step) sum = add_rows(sum, before, capacity);
  }
  return sum;
}

/// Writes the starts of up to kSeqs sequences to shared memory, the end of the last one behind them.
__device__ __forceinline__ void compute_starts(const GatherParams& params, Shared& shared) {
  const int32_t own = threadIdx.x * kThreadSeqs;
  uint32_t rows[kThreadSeqs], sum = 0;
#pragma unroll
  for (int i = 0; i < kThreadSeqs; ++i) {
    rows[i] = own + i < params.num_seqs ? rows_of(params, __ldg(params.context_lens + own + i)) : 0;
    sum = add_rows(sum, rows[i], params.capacity);
  }
  const uint32_t warp = threadIdx.x / kWarp, lane = threadIdx.x % kWarp;
  const uint32_t through = prefix_sum(sum, params.capacity), before_lane = __shfl_up_sync(~0u, through, 1);
  if (lane == kWarp - 1) shared.sums[warp] = through;
  uint32_t start = lane == 0 ? 0 : before_lane;
  __syncthreads();
#pragma unroll
  for (int i = 0; i < kThreads / kWarp; ++i) {
    if (i < warp) start = add_rows(start, shared.sums[i], params.capacity);
  }
#pragma unroll
  for (int i = 0; i < kThreadSeqs; ++i) {
    shared.starts[own + i] = start;
    start = add_rows(start, rows[i], params.capacity);
  }
  if (threadIdx.x == kThreads - 1) shared.starts[kSeqs] = start;
  __syncthreads();
}

/// The sum of the first `count` lengths, of which a thread of the CTA adds up its own part.
__device__ __forceinline__ uint32_t own_part_of_sum(const GatherParams& params, uint32_t count) {
  const int32_t* const lens = params.context_lens;
  const uint32_t thread = threadIdx.x;
  // The lengths before the first aligned address.
  const uint32_t head = min(count, static_cast<uint32_t>(-(reinterpret_cast<uintptr_t>(lens) / 4) % 4));
  const uint32_t vectors = (count - head) / 4, tail = head + 4 * vectors;
  uint64_t sum = thread < head ? rows_of(params, __ldg(lens + thread)) : 0;
  if (tail + thread < count) sum += rows_of(params, __ldg(lens + tail + thread));
#pragma unroll 4
  for (uint32_t i = thread; i < vectors; i += kStartsThreads) {
    const Chunk<int32_t, 4> four = load_chunk<int32_t, 4>(lens + head + 4 * i);
#pragma unroll
    for (int j = 0; j < 4; ++j) sum += rows_of(params, four.elements[j]);
  }
  return min(sum, static_cast<uint64_t>(params.capacity));
}

/// Writes the starts of the kStartsSeqs sequences from blockIdx.x * kStartsSeqs on, and after the last sequence its
/// end.
__device__ __forceinline__ void write_starts(const GatherParams& params) {
  __shared__ uint32_t sums[kWarp], sums_before[kWarp];
  static_assert(kStartsThreads == kWarp * kWarp && kStartsSeqs == kThreadSeqs * kStartsThreads);
  const uint32_t capacity = params.capacity, warp = threadIdx.x / kWarp, lane = threadIdx.x % kWarp;
  const int64_t first = int64_t{blockIdx.x} * kStartsSeqs, own = first + threadIdx.x * kThreadSeqs;
  uint32_t rows[kThreadSeqs], sum = 0;
#pragma unroll
  for (int i = 0; i < kThreadSeqs; ++i) {
    rows[i] = own + i < params.num_seqs ? rows_of(params, __ldg(params.context_lens + own + i)) : 0;
    sum = add_rows(sum, rows[i], capacity);
  }
  const uint32_t through = prefix_sum(sum, capacity);
  const uint32_t through_before = prefix_sum(own_part_of_sum(params, first), capacity);
  if (lane == kWarp - 1) {
    sums[warp] = through;
    sums_before[warp] = through_before;
  }
  const uint32_t before_lane = __shfl_up_sync(~0u, through, 1);
  __syncthreads();
  // Each warp adds up the sums of all warps.
  const uint32_t through_warps = prefix_sum(sums[lane], capacity);
  const uint32_t before_warp = __shfl_sync(~0u, through_warps, (warp + kWarp - 1) % kWarp);
  uint32_t start = __shfl_sync(~0u, prefix_sum(sums_before[lane], capacity), kWarp - 1);
  if (warp > 0) start = add_rows(start, before_warp, capacity);
  if (lane > 0) start = add_rows(start, before_lane, capacity);
#pragma unroll
  for (int i = 0; i < kThreadSeqs; ++i) {
    if (own + i <= params.num_seqs) params.cu_seqlens[own + i] = start;
    start = add_rows(start, rows[i], capacity);
  }
  if (first + kStartsSeqs == params.num_seqs && threadIdx.x == kStartsThreads - 1) {
    params.cu_seqlens[params.num_seqs] = start;
  }
}

/// Loads starts out of cu_seqlens into shared memory, from a sequence on that begins at row `row` or before it, so that
/// the row's sequence is among them. Returns the first one.
__device__ __forceinline__ int32_t load_starts(const GatherParams& params, Shared& shared, int32_t row) {
  uint32_t first = 0, count = params.num_seqs;  // the row's sequence is in [first, first + count)
  while (count > kSeqs) {
    const uint32_t stride = (count + kThreads - 1) / kThreads, probe = threadIdx.x * stride;
    // Starts ascend, and the first one of these is at most `row`.
    const uint32_t found = __syncthreads_count(probe < count && params.cu_seqlens[first + probe] <= row);
    const uint32_t skipped = (found - 1) * stride;
    first += skipped;
    count = min(stride, count - skipped);
  }
  for (int i = threadIdx.x; i <= kSeqs; i += kThreads) {
    shared.starts[i] = params.cu_seqlens[min(int64_t{first} + i, int64_t{params.num_seqs})];
  }
  __syncthreads();
  return first;
}

/// The place of a token: its page, as the block table names it, and its number in the page.
struct Token {
  int32_t page;
  uint32_t offset;
};

/// The place of token `token` of sequence `sequence`.
__device__ __forceinline__ Token token_of(const GatherParams& params, uint32_t sequence, uint32_t token) {
  const uint32_t entry = divided(token, params.page_size), offset = token - entry * params.page_size.divisor;
  return {__ldg(params.table + sequence * params.table_stride + entry), offset};
}

/// Byte offset of a token in the K cache or in the V cache.
__device__ __forceinline__ int64_t offset_of(const GatherParams& params, const GatheredRows& side, const Token& token) {
  const uint32_t page = max(0, min(token.page, params.num_pages - 1));
  return page * side.page_stride + token.offset * side.token_stride;
}

/// Writes the place of the token of row `row`, which is row `index` of the batch, to shared memory. The token belongs
/// to one of the sequences from `first` on, whose starts are in shared memory.
__device__ __forceinline__ void locate_token(const GatherParams& params, Shared& shared, int32_t first, int32_t row,
                                             int32_t index) {
  // The last sequence that begins at the row or before it. Empty sequences with the same start come before it.
  int32_t sequence = 0;
#pragma unroll
  for (int step = kSeqs / 2; step > 0; step /= 2) {
    if (shared.starts[sequence + step] <= row) sequence += step;
  }
  const Token token = token_of(params, first + sequence, row - shared.starts[sequence]);
  shared.keys[index] = offset_of(params, params.keys, token);
  shared.values[index] = offset_of(params, params.values, token);
}

/// Decodes 8-bit floats to f32.
template <Fp8Encoding kEncoding, int kCount>
__device__ __forceinline__ void decode(const Chunk<uint8_t, kCount>& codes, float (&numbers)[kCount]) {
  constexpr bool kIsE5M2 = kEncoding == Fp8Encoding::F8E5M2;
  // Decoding e4m3fn by shifts gives numbers that are too small by this factor.
  constexpr float kFactor = kIsE5M2 ? 1.0f : 256.0f;
  const auto number = [](uint32_t bits) { return kFactor * Element<F16>::to_f32(F16{static_cast<uint16_t>(bits)}); };
  if constexpr (kCount == 1) {
    numbers[0] = number(decode_neighbours<Fp8<true>, kIsE5M2>(codes.elements[0]).first);
  } else {
    const auto& words = reinterpret_cast<const Chunk<uint32_t, kCount / 4>&>(codes);
#pragma unroll
    for (int i = 0; i < kCount; i += 4) {
      const TwoPairs pairs = decode_neighbours<Fp8<true>, kIsE5M2>(words.elements[i / 4]);
      numbers[i] = number(pairs.first);
      numbers[i + 1] = number(pairs.first >> 16);
      numbers[i + 2] = number(pairs.second);
      numbers[i + 3] = number(pairs.second >> 16);
    }
  }
}

/// A vector of a head, decoded, multiplied by the scale and rounded to T.
template <typename T, Fp8Encoding kEncoding, int kCount, typename Stored>
__device__ __forceinline__ Chunk<T, kCount> converted(const Chunk<Stored, kCount>& chunk, bool has_scale, float scale) {
  float numbers[kCount];
  if constexpr (kEncoding == Fp8Encoding::None) {
#pragma unroll
    for (int i = 0; i < kCount; ++i) numbers[i] = Element<T>::to_f32(chunk.elements[i]);
  } else {
    decode<kEncoding>(chunk, numbers);
  }
  if (has_scale) {
#pragma unroll
    for (int i = 0; i < kCount; ++i) numbers[i] *= scale;
  }
  return rounded<T>(numbers);
}

/// The tokens of a batch of rows, which are in shared memory.
struct BatchTokens {
  const Shared& shared;

  static constexpr int kMaxLoads = 8;
  using Found = uint32_t;
  __device__ __forceinline__ void prepare() {}
  __device__ __forceinline__ Found find(uint32_t row) const { return row; }
  __device__ __forceinline__ int64_t offset(Found row, const GatheredRows&, bool is_key) const {
    return (is_key ? shared.keys : shared.values)[row];
  }
  __device__ __forceinline__ bool has_token(uint32_t row) const { return shared.keys[row] != kNoToken; }
};

/// Finds the tokens of the rows from row `first` on by warp. Each lane has a sequence, and all lanes take the same row.
struct WarpTokens {
  const GatherParams& params;
  int32_t first;
  int32_t len;  // of the lane's sequence
  int32_t start, num_rows;

  static constexpr int kMaxLoads = 4;  // the tokens of eight rows spill
  using Found = Token;
  __device__ __forceinline__ void prepare() {
    const uint32_t through = prefix_sum(rows_of(params, len), params.capacity);
    const int32_t before = __shfl_up_sync(~0u, through, 1);
    start = threadIdx.x % kWarp == 0 ? 0 : before;
    num_rows = __shfl_sync(~0u, through, kWarp - 1);
  }
  __device__ __forceinline__ Found find(uint32_t row) const {
    const int32_t at = first + static_cast<int32_t>(row);
    // The last sequence that begins at the row or before it. Lanes without a sequence have num_rows as their start.
    const int32_t sequence = kWarp - 1 - __clz(__ballot_sync(~0u, start <= at));
    const int32_t begin = __shfl_sync(~0u, start, sequence);
    return at < num_rows ? token_of(params, sequence, at - begin) : Token{-1, ~0u};
  }
  __device__ __forceinline__ int64_t offset(const Found& token, const GatheredRows& side, bool) const {
    return token.offset == ~0u ? kNoToken : offset_of(params, side, token);
  }
  __device__ __forceinline__ bool has_token(uint32_t row) const { return first + static_cast<int32_t>(row) < num_rows; }
};

/// Copies `rows` rows from row `first` on in vectors of kCount elements. `tokens` finds their tokens. A thread copies
/// the same vector of every row, or of every n-th row, so it computes the vector's head only once.
template <typename T, Fp8Encoding kEncoding, int kCount, typename Tokens>
__device__ __forceinline__ void copy_rows(const GatherParams& params, int32_t first, uint32_t rows, Tokens& tokens) {
  using Stored = std::conditional_t<kEncoding == Fp8Encoding::None, T, uint8_t>;
  using Loaded = typename VectorOf<kCount * sizeof(Stored)>::Type;
  constexpr int kBytes = kCount * sizeof(T);
  // Loads in flight per thread. Eight keep memory busy when a load is half as large as its store; elsewhere they spill.
  constexpr int kLoads = kEncoding != Fp8Encoding::None && sizeof(T) == 2 ? Tokens::kMaxLoads : 4;
  const uint32_t row_vectors = params.keys.row_vectors + params.values.row_vectors;
  const uint32_t width = params.width.divisor, at_once = params.rows_at_once,
                 own_row = divided(threadIdx.x, params.width);
  if (own_row >= at_once) return;
  for (uint32_t column = blockIdx.y * width + threadIdx.x - own_row * width; column < row_vectors;
       column += gridDim.y * width) {
    // Adjacent threads take vectors that are adjacent in the cache, so that a warp reads whole cache lines. In an
    // interleaved cache the vectors of K and V alternate by head.
    const uint32_t group = divided(column, params.group_vectors),
                   in_group = column - group * params.group_vectors.divisor;
    const bool is_key = in_group < params.keys.group_vectors;
    const GatheredRows& side = is_key ? params.keys : params.values;
    const uint32_t vector = group * side.group_vectors + in_group - (is_key ? 0 : params.keys.group_vectors);
    const uint32_t head = divided(vector, side.head_vectors), in_head = vector - head * side.head_vectors.divisor;
    const uint8_t* const from = side.cache + head * side.head_stride + int64_t{in_head} * sizeof(Loaded);
    const int64_t row_bytes = int64_t{side.row_vectors} * kBytes;
    uint8_t* const to = side.rows + first * row_bytes + int64_t{vector} * kBytes;
    const bool has_scale = side.scale != nullptr;
    const float scale = has_scale ? __ldg(side.scale + head * side.scale_stride) : 1.0f;
    tokens.prepare();
    for (uint32_t row = own_row; row < rows; row += kLoads * at_once) {
      typename Tokens::Found found[kLoads];
#pragma unroll
      for (int i = 0; i < kLoads; ++i) found[i] = tokens.find(row + i * at_once);
      Loaded loaded[kLoads] = {};
#pragma unroll
      for (int i = 0; i < kLoads; ++i) {
        const int64_t token = row + i * at_once < rows ? tokens.offset(found[i], side, is_key) : kNoToken;
        if (token != kNoToken) loaded[i] = __ldg(reinterpret_cast<const Loaded*>(from + token));
      }
#pragma unroll
      for (int i = 0; i < kLoads; ++i) {
        if (row + i * at_once >= rows) break;
        uint8_t* const to_row = to + (row + i * at_once) * row_bytes;
        if constexpr (sizeof(T) > 1) {
          // A row without a token stays 0: multiplied by a scale it could become -0 or NaN.
          if ((kEncoding != Fp8Encoding::None || has_scale) && tokens.has_token(row + i * at_once)) {
            const auto& chunk = reinterpret_cast<const Chunk<Stored, kCount>&>(loaded[i]);
            store_chunk(reinterpret_cast<T*>(to_row), converted<T, kEncoding, kCount>(chunk, has_scale, scale));
            continue;
          }
        }
        if constexpr (kEncoding == Fp8Encoding::None) {
          *reinterpret_cast<Loaded*>(to_row) = loaded[i];
        } else {
          store_chunk(reinterpret_cast<T*>(to_row), Chunk<T, kCount>{});
        }
      }
    }
  }
}

/// As copy_rows, in the vectors of the call.
template <typename T, Fp8Encoding kEncoding, typename Tokens>
__device__ __forceinline__ void copy(const GatherParams& params, int32_t first, uint32_t rows, Tokens tokens) {
  if (params.vector_elements == 1) return copy_rows<T, kEncoding, 1>(params, first, rows, tokens);
  if constexpr (sizeof(T) == 1) {
    if (params.vector_elements == 16) return copy_rows<T, kEncoding, 16>(params, first, rows, tokens);
  }
  // 8 bytes divide every head, because head dimensions are multiples of 8.
  constexpr int kVector = sizeof(T) == 1 ? 8 : 16 / sizeof(T);
  copy_rows<T, kEncoding, kVector>(params, first, rows, tokens);
}

/// Gathers few rows of at most a sequence per lane. Warps do not wait for each other, but each one finds all of the
/// rows' tokens, one after the other.
template <typename T, Fp8Encoding kEncoding>
__device__ __forceinline__ void gather_few(const GatherParams& params, int32_t row, int32_t end) {
  const int32_t lane = threadIdx.x % kWarp;
  const int32_t len = lane < params.num_seqs ? __ldg(params.context_lens + lane) : 0;
  WarpTokens tokens{params, row, len, 0, 0};
  if (blockIdx.x == gridDim.x - 1 && blockIdx.y == 0 && threadIdx.x < kWarp) {
    tokens.prepare();
    if (lane < params.num_seqs) params.cu_seqlens[lane] = tokens.start;
    if (lane == 0) params.cu_seqlens[params.num_seqs] = tokens.num_rows;
  }
  copy<T, kEncoding>(params, row, end - row, tokens);
}

template <typename T, Fp8Encoding kEncoding>
__device__ __forceinline__ void gather(const GatherParams& params, Shared& shared) {
  int32_t row = min(int64_t{blockIdx.x} * params.cta_rows, int64_t{params.capacity});
  const int32_t end = min(int64_t{row} + params.cta_rows, int64_t{params.capacity});
  if (params.warps_find_tokens) return gather_few<T, kEncoding>(params, row, end);
  // Copies the rows up to `end` in batches of kThreads; `find` writes the offsets of a row's token.
  const auto copy_up_to = [&](int32_t end, const auto& find) {
    const int32_t thread = threadIdx.x;
    while (row < end) {
      const int32_t rows = min(kThreads, end - row);
      if (thread < rows) find(row + thread, thread);
      __syncthreads();
      copy<T, kEncoding>(params, row, rows, BatchTokens{shared});
      __syncthreads();
      row += rows;
    }
  };
  const bool are_written = params.num_seqs > kSeqs;  // the starts, by the first launch
  int32_t num_rows;
  if (are_written) {
    num_rows = params.cu_seqlens[params.num_seqs];
  } else {
    compute_starts(params, shared);
    num_rows = shared.starts[kSeqs];
    if (blockIdx.x == gridDim.x - 1 && blockIdx.y == 0) {
      for (int i = threadIdx.x; i <= params.num_seqs; i += kThreads) params.cu_seqlens[i] = shared.starts[i];
    }
  }
  while (row < min(end, num_rows)) {
    const int32_t first = are_written ? load_starts(params, shared, row) : 0;
    copy_up_to(min(end, shared.starts[kSeqs]),
               [&](int32_t row, int32_t index) { locate_token(params, shared, first, row, index); });
  }
  copy_up_to(end, [&](int32_t, int32_t index) { shared.keys[index] = shared.values[index] = kNoToken; });
}

}  // namespace xa

#ifdef XA_DTYPE

/// CTAs per SM, which leaves 64 registers per thread.
constexpr int kCtas = 4;

extern "C" __global__ void __launch_bounds__(xa::kThreads, kCtas)
    XA_ENTRY(const __grid_constant__ xa::GatherParams params) {
  using T = xa::XA_PASTE(dtype_, XA_DTYPE);
  __shared__ xa::Shared shared;
  if constexpr (sizeof(T) > 1) {
    if (params.encoding == xa::Fp8Encoding::F8E4M3Fn) return xa::gather<T, xa::Fp8Encoding::F8E4M3Fn>(params, shared);
    if (params.encoding == xa::Fp8Encoding::F8E5M2) return xa::gather<T, xa::Fp8Encoding::F8E5M2>(params, shared);
  }
  xa::gather<T, xa::Fp8Encoding::None>(params, shared);
}

#else

// Writes cu_seqlens. A CTA adds up the lengths before its own. With 65536 of them this takes an SM three microseconds,
// about as long as one more launch would.
//
// Launch: kStartsThreads threads, a CTA per kStartsSeqs sequences.
extern "C" __global__ void __launch_bounds__(xa::kStartsThreads)
    XA_ENTRY(const __grid_constant__ xa::GatherParams params) {
  xa::write_starts(params);
}

#endif
