// Copies the K and V rows of sequences out of a paged cache into packed rows, in the order of the tokens.
//
// Every CTA computes the starts of the sequences itself: it adds up the lengths, kSeqs sequences at a time, up to its
// own rows. One kernel takes less time than a second one that waits for a first one's starts. Lengths and pages are
// clamped, and tokens past the last row are left out, so valid and invalid metadata cost the same.
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
/// CTAs per SM, which leaves 64 registers per thread.
constexpr int kCtas = 4;
/// Sequences per tile, and of these per thread.
constexpr int kSeqs = kGatherSeqs, kThreadSeqs = kSeqs / kThreads;

// The element type of rows that are copied bit by bit; the other types are in element.cuh.
using dtype_u8 = uint8_t;

/// Marks a row of the results without a token.
constexpr int64_t kNoToken = INT64_MIN;

struct Shared {
  int32_t starts[kSeqs + 1];
  uint32_t sums[kThreads / 32];
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

/// The sum of two numbers of rows, at most N. Both are at most N, which is below 2^31, so the sum does not overflow.
__device__ __forceinline__ uint32_t add_rows(uint32_t a, uint32_t b, uint32_t capacity) { return min(a + b, capacity); }

/// A thread's lengths of a tile.
using Lens = Chunk<int32_t, kThreadSeqs>;

/// Loads a thread's lengths of the tile that begins at sequence `first`; 0 past the last sequence.
__device__ __forceinline__ Lens load_lens(const GatherParams& params, int64_t first) {
  Lens lens;
#pragma unroll
  for (int i = 0; i < kThreadSeqs; ++i) {
    const int64_t sequence = first + threadIdx.x * kThreadSeqs + i;
    lens.elements[i] = sequence < params.num_seqs ? __ldg(params.context_lens + sequence) : 0;
  }
  return lens;
}

/// Writes the starts of a tile's sequences and the end of the last one to shared memory. The first begins at row
/// `begin`.
__device__ __forceinline__ void compute_starts(const GatherParams& params, Shared& shared, const Lens& given,
                                               uint32_t begin) {
  const uint32_t capacity = params.capacity;
  const int32_t thread = threadIdx.x, own = thread * kThreadSeqs;
  uint32_t lens[kThreadSeqs], sum = 0;
#pragma unroll
  for (int i = 0; i < kThreadSeqs; ++i) {
    lens[i] = min(static_cast<uint32_t>(max(0, min(given.elements[i], params.longest))), capacity);
    sum = add_rows(sum, lens[i], capacity);
  }
  uint32_t through = sum;
#pragma unroll
  for (int step = 1; step < 32; step *= 2) {
    const uint32_t before = __shfl_up_sync(~0u, through, step);
    if (thread % 32 >= step) through = add_rows(through, before, capacity);
  }
  if (thread % 32 == 31) shared.sums[thread / 32] = through;
  // The exclusive prefix sum: the start of this thread's first sequence, relative to the warp's first.
  uint32_t start = __shfl_up_sync(~0u, through, 1);
  start = add_rows(thread % 32 == 0 ? 0 : start, begin, capacity);
  __syncthreads();
#pragma unroll
  for (int warp = 0; warp < kThreads / 32; ++warp) {
    if (warp < thread / 32) start = add_rows(start, shared.sums[warp], capacity);
  }
#pragma unroll
  for (int i = 0; i < kThreadSeqs; ++i) {
    shared.starts[own + i] = start;
    start = add_rows(start, lens[i], capacity);
  }
  if (thread == kThreads - 1) shared.starts[kSeqs] = start;
  __syncthreads();
}

/// Writes the cache offsets of the token of row `row`, which is row `index` of the batch, to shared memory. The token
/// belongs to a sequence of the tile that begins at sequence `first`, whose starts are in shared memory.
__device__ __forceinline__ void locate_token(const GatherParams& params, Shared& shared, int32_t first, int32_t row,
                                             int32_t index) {
  // The last sequence that begins at the row or before it. Empty sequences with the same start come before it.
  int32_t sequence = 0;
#pragma unroll
  for (int step = kSeqs / 2; step > 0; step /= 2) {
    if (shared.starts[sequence + step] <= row) sequence += step;
  }
  const uint32_t token = row - shared.starts[sequence], page_size = params.page_size;
  const uint32_t entry = token / page_size, offset = token - entry * page_size;
  const int32_t listed = __ldg(params.table + (int64_t{first} + sequence) * params.table_stride + entry);
  const int64_t page = max(0, min(listed, params.num_pages - 1));
  shared.keys[index] = page * params.keys.page_stride + offset * params.keys.token_stride;
  shared.values[index] = page * params.values.page_stride + offset * params.values.token_stride;
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

/// Copies a batch of rows from row `first` on, whose tokens are in shared memory, in vectors of kCount elements. A
/// thread copies the same vector of every row, or of every n-th row, so it computes the vector's head only once.
template <typename T, Fp8Encoding kEncoding, int kCount>
__device__ __forceinline__ void copy_rows(const GatherParams& params, const Shared& shared, int32_t first,
                                          uint32_t rows) {
  using Stored = std::conditional_t<kEncoding == Fp8Encoding::None, T, uint8_t>;
  using Loaded = typename VectorOf<kCount * sizeof(Stored)>::Type;
  constexpr int kBytes = kCount * sizeof(T);
  // Loads in flight per thread. Eight keep memory busy when a load is half as large as its store; elsewhere they spill.
  constexpr int kLoads = kEncoding != Fp8Encoding::None && sizeof(T) == 2 ? 8 : 4;
  const uint32_t row_vectors = params.keys.row_vectors + params.values.row_vectors;
  const uint32_t width = min(row_vectors, uint32_t{kThreads}), at_once = kThreads / width,
                 own_row = threadIdx.x / width;
  if (own_row >= at_once) return;
  for (uint32_t column = blockIdx.y * width + threadIdx.x % width; column < row_vectors; column += gridDim.y * width) {
    // Adjacent threads take vectors that are adjacent in the cache, so that a warp reads whole cache lines. In an
    // interleaved cache the vectors of K and V alternate by head.
    const uint32_t group_vectors = params.keys.group_vectors + params.values.group_vectors;
    const uint32_t group = column / group_vectors, in_group = column - group * group_vectors;
    const bool is_key = in_group < params.keys.group_vectors;
    const GatheredRows& side = is_key ? params.keys : params.values;
    const int64_t* const tokens = is_key ? shared.keys : shared.values;
    const uint32_t vector = group * side.group_vectors + in_group - (is_key ? 0 : params.keys.group_vectors);
    const uint32_t head = vector / side.head_vectors, in_head = vector - head * side.head_vectors;
    const uint8_t* const from = side.cache + head * side.head_stride + int64_t{in_head} * sizeof(Loaded);
    const int64_t row_bytes = int64_t{side.row_vectors} * kBytes;
    uint8_t* const to = side.rows + first * row_bytes + int64_t{vector} * kBytes;
    const bool has_scale = side.scale != nullptr;
    const float scale = has_scale ? __ldg(side.scale + head * side.scale_stride) : 1.0f;
    for (uint32_t row = own_row; row < rows; row += kLoads * at_once) {
      Loaded loaded[kLoads] = {};
#pragma unroll
      for (int i = 0; i < kLoads; ++i) {
        const int64_t token = row + i * at_once < rows ? tokens[row + i * at_once] : kNoToken;
        if (token != kNoToken) loaded[i] = __ldg(reinterpret_cast<const Loaded*>(from + token));
      }
#pragma unroll
      for (int i = 0; i < kLoads; ++i) {
        if (row + i * at_once >= rows) break;
        uint8_t* const to_row = to + (row + i * at_once) * row_bytes;
        if constexpr (sizeof(T) > 1) {
          // A row without a token stays 0: multiplied by a scale it could become -0 or NaN.
          if ((kEncoding != Fp8Encoding::None || has_scale) && tokens[row + i * at_once] != kNoToken) {
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

template <typename T, Fp8Encoding kEncoding>
__device__ __forceinline__ void gather(const GatherParams& params, Shared& shared) {
  const auto copy = [&](int32_t first, int32_t rows) {
    if (params.vector_elements == 1) return copy_rows<T, kEncoding, 1>(params, shared, first, rows);
    if constexpr (sizeof(T) == 1) {
      if (params.vector_elements == 16) return copy_rows<T, kEncoding, 16>(params, shared, first, rows);
    }
    // 8 bytes divide every head, because head dimensions are multiples of 8.
    constexpr int kVector = sizeof(T) == 1 ? 8 : 16 / sizeof(T);
    copy_rows<T, kEncoding, kVector>(params, shared, first, rows);
  };
  // Copies the rows up to `end` in batches of kThreads; `find` writes the offsets of a row's token.
  const auto copy_up_to = [&](int32_t& row, int32_t end, const auto& find) {
    const int32_t thread = threadIdx.x;
    while (row < end) {
      const int32_t rows = min(kThreads, end - row);
      if (thread < rows) find(row + thread, thread);
      __syncthreads();
      copy(row, rows);
      __syncthreads();
      row += rows;
    }
  };
  const bool writes_starts = blockIdx.x == gridDim.x - 1 && blockIdx.y == 0;
  int32_t row = min(int64_t{blockIdx.x} * params.cta_rows, int64_t{params.capacity});
  const int32_t end = min(int64_t{row} + params.cta_rows, int64_t{params.capacity});
  int32_t num_rows = 0;  // rows of the sequences so far
  Lens next = load_lens(params, 0);
  // The CTA that writes the starts must read all lengths, even if all rows have a token already.
  for (int64_t first = 0; first < params.num_seqs && (row < end || writes_starts); first += kSeqs) {
    const Lens lens = next;
    next = load_lens(params, first + kSeqs);  // overlaps with the prefix sum of this tile
    compute_starts(params, shared, lens, num_rows);
    num_rows = shared.starts[kSeqs];
    if (writes_starts) {
      for (int i = threadIdx.x; i < min(int64_t{kSeqs}, params.num_seqs - first); i += kThreads) {
        params.cu_seqlens[first + i] = shared.starts[i];
      }
    }
    copy_up_to(row, min(end, num_rows),
               [&](int32_t row, int32_t index) { locate_token(params, shared, first, row, index); });
    // The next tile's starts overwrite these in shared memory.
    __syncthreads();
  }
  if (writes_starts && threadIdx.x == 0) params.cu_seqlens[params.num_seqs] = num_rows;
  copy_up_to(row, end, [&](int32_t, int32_t index) { shared.keys[index] = shared.values[index] = kNoToken; });
}

}  // namespace xa

extern "C" __global__ void __launch_bounds__(xa::kThreads, xa::kCtas)
    XA_ENTRY(const __grid_constant__ xa::GatherParams params) {
  using T = xa::XA_PASTE(dtype_, XA_DTYPE);
  __shared__ xa::Shared shared;
  if constexpr (sizeof(T) > 1) {
    if (params.encoding == xa::Fp8Encoding::F8E4M3Fn) return xa::gather<T, xa::Fp8Encoding::F8E4M3Fn>(params, shared);
    if (params.encoding == xa::Fp8Encoding::F8E5M2) return xa::gather<T, xa::Fp8Encoding::F8E5M2>(params, shared);
  }
  xa::gather<T, xa::Fp8Encoding::None>(params, shared);
}
