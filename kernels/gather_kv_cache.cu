// Copies the K and V rows of sequences out of a paged cache into packed rows, those of a sequence in order.
//
// Where sequences begin, every CTA finds out for itself: it adds up the lengths, kSeqs sequences at a time, as far as
// its own rows reach. A launch of one kernel is shorter than one of two that wait for each other. Lengths and pages are
// clamped, and what starts past the last row is left out, so that right and wrong metadata cost the same.
//
// Compiled once for each XA_DTYPE of the results: f16, bf16, f32, and u8 for what is copied bit by bit.
// Launch: kThreads threads; the CTAs (i, 0), (i, 1) and so on share the rows of i.

#include <cstdint>
#include <type_traits>

#include "chunk.cuh"
#include "element.cuh"
#include "fp8.cuh"
#include "params/gather_kv_cache.cuh"

namespace xa {

constexpr int kThreads = kGatherThreads;
/// CTAs that an SM is to hold: 64 registers a thread.
constexpr int kCtas = 4;
/// Sequences of a tile, and of a thread in it.
constexpr int kSeqs = kGatherSeqs, kThreadSeqs = kSeqs / kThreads;

// Bytes that are copied; the other types are in element.cuh.
using dtype_u8 = uint8_t;

/// Stands for the place of a row that no token takes.
constexpr int64_t kNoToken = INT64_MIN;

struct Shared {
  int32_t starts[kSeqs + 1];
  uint32_t sums[kThreads / 32];
  int64_t keys[kThreads];  // bytes from the beginning of the cache to the token of a row
  int64_t values[kThreads];
};

/// So many bytes, which a thread moves at once.
template <int kBytes>
struct Words;
template <>
struct Words<16> {
  using Type = uint4;
};
template <>
struct Words<8> {
  using Type = uint2;
};
template <>
struct Words<4> {
  using Type = uint32_t;
};
template <>
struct Words<2> {
  using Type = uint16_t;
};
template <>
struct Words<1> {
  using Type = uint8_t;
};

/// The sum as far as there are rows; both are at most N, below 2^31.
__device__ __forceinline__ uint32_t add_rows(uint32_t a, uint32_t b, uint32_t capacity) { return min(a + b, capacity); }

/// Lengths of a tile that are a thread's.
using Lens = Chunk<int32_t, kThreadSeqs>;

/// Those of the tile from sequence `first` on; 0 past the last sequence.
__device__ __forceinline__ Lens load_lens(const GatherParams& params, int64_t first) {
  Lens lens;
#pragma unroll
  for (int i = 0; i < kThreadSeqs; ++i) {
    const int64_t sequence = first + threadIdx.x * kThreadSeqs + i;
    lens.elements[i] = sequence < params.num_seqs ? __ldg(params.context_lens + sequence) : 0;
  }
  return lens;
}

/// Writes the starts of a tile's sequences, the first of which begins at row `begin`, and their end behind them.
__device__ __forceinline__ void find_starts(const GatherParams& params, Shared& shared, const Lens& given,
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
  // Of this thread's first sequence within the warp.
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

/// Writes where the token is that the batch's row `index` takes, which one of the sequences from `first` on has; their
/// starts are known.
__device__ __forceinline__ void find_token(const GatherParams& params, Shared& shared, int32_t first, int32_t row,
                                           int32_t index) {
  // The last sequence that begins at the row or before it: those without a token come before the one that has it.
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

/// Codes as numbers.
template <Codes kCodes, int kCount>
__device__ __forceinline__ void decode(const Chunk<uint8_t, kCount>& codes, float (&numbers)[kCount]) {
  constexpr bool kIsE5M2 = kCodes == Codes::F8E5M2;
  // What decoding by shifts has divided by.
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

/// What becomes of a piece of a head that is decoded or multiplied.
template <typename T, Codes kCodes, int kCount, typename Stored>
__device__ __forceinline__ Chunk<T, kCount> converted(const Chunk<Stored, kCount>& chunk, bool has_scale, float scale) {
  float numbers[kCount];
  if constexpr (kCodes == Codes::None) {
#pragma unroll
    for (int i = 0; i < kCount; ++i) numbers[i] = Element<T>::to_f32(chunk.elements[i]);
  } else {
    decode<kCodes>(chunk, numbers);
  }
  if (has_scale) {
#pragma unroll
    for (int i = 0; i < kCount; ++i) numbers[i] *= scale;
  }
  return rounded<T>(numbers);
}

/// Copies the rows from `first` on, whose tokens are known, kCount elements at a time. A thread has the same piece of
/// every row, or of every n-th, so that where it lies in a row is found once.
template <typename T, Codes kCodes, int kCount>
__device__ __forceinline__ void copy_rows(const GatherParams& params, const Shared& shared, int32_t first,
                                          uint32_t rows) {
  using Stored = std::conditional_t<kCodes == Codes::None, T, uint8_t>;
  using Loaded = typename Words<kCount * sizeof(Stored)>::Type;
  constexpr int kBytes = kCount * sizeof(T);
  // Pieces that a thread has on their way from memory; with eight more of them registers spill.
  constexpr int kLoads = kCodes != Codes::None && sizeof(T) == 2 ? 8 : 4;
  const uint32_t row_pieces = params.keys.row_pieces + params.values.row_pieces;
  const uint32_t width = min(row_pieces, uint32_t{kThreads}), at_once = kThreads / width, own_row = threadIdx.x / width;
  if (own_row >= at_once) return;
  for (uint32_t column = blockIdx.y * width + threadIdx.x % width; column < row_pieces; column += gridDim.y * width) {
    // Pieces are in the order in which they lie in memory, so that a warp reads whole lines.
    const uint32_t group_pieces = params.keys.group_pieces + params.values.group_pieces;
    const uint32_t group = column / group_pieces, in_group = column - group * group_pieces;
    const bool is_key = in_group < params.keys.group_pieces;
    const GatheredRows& side = is_key ? params.keys : params.values;
    const int64_t* const tokens = is_key ? shared.keys : shared.values;
    const uint32_t piece = group * side.group_pieces + in_group - (is_key ? 0 : params.keys.group_pieces);
    const uint32_t head = piece / side.head_pieces, in_head = piece - head * side.head_pieces;
    const uint8_t* const from = side.cache + head * side.head_stride + int64_t{in_head} * sizeof(Loaded);
    const int64_t row_bytes = int64_t{side.row_pieces} * kBytes;
    uint8_t* const to = side.rows + first * row_bytes + int64_t{piece} * kBytes;
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
        uint8_t* const place = to + (row + i * at_once) * row_bytes;
        if constexpr (sizeof(T) > 1) {
          // A row of no token stays 0, which a scale could make -0 or NaN.
          if ((kCodes != Codes::None || has_scale) && tokens[row + i * at_once] != kNoToken) {
            const auto& chunk = reinterpret_cast<const Chunk<Stored, kCount>&>(loaded[i]);
            store_chunk(reinterpret_cast<T*>(place), converted<T, kCodes, kCount>(chunk, has_scale, scale));
            continue;
          }
        }
        if constexpr (kCodes == Codes::None) {
          *reinterpret_cast<Loaded*>(place) = loaded[i];
        } else {
          store_chunk(reinterpret_cast<T*>(place), Chunk<T, kCount>{});
        }
      }
    }
  }
}

template <typename T, Codes kCodes>
__device__ __forceinline__ void gather(const GatherParams& params, Shared& shared) {
  const auto copy = [&](int32_t first, int32_t rows) {
    if (params.piece == 1) return copy_rows<T, kCodes, 1>(params, shared, first, rows);
    if constexpr (sizeof(T) == 1) {
      if (params.piece == 16) return copy_rows<T, kCodes, 16>(params, shared, first, rows);
    }
    // Of bytes 8, which fill every head.
    constexpr int kPiece = sizeof(T) == 1 ? 8 : 16 / sizeof(T);
    copy_rows<T, kCodes, kPiece>(params, shared, first, rows);
  };
  /// Rows up to `end`, a batch at a time.
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
  int32_t found = 0;  // rows of the sequences so far
  Lens next = load_lens(params, 0);
  // A CTA that writes the starts has to see all lengths, also where the rows are full.
  for (int64_t first = 0; first < params.num_seqs && (row < end || writes_starts); first += kSeqs) {
    const Lens lens = next;
    next = load_lens(params, first + kSeqs);  // which arrive while the starts are found
    find_starts(params, shared, lens, found);
    found = shared.starts[kSeqs];
    if (writes_starts) {
      for (int i = threadIdx.x; i < min(int64_t{kSeqs}, params.num_seqs - first); i += kThreads) {
        params.cu_seqlens[first + i] = shared.starts[i];
      }
    }
    copy_up_to(row, min(end, found),
               [&](int32_t row, int32_t index) { find_token(params, shared, first, row, index); });
    // The starts of the next tile are written where these are read.
    __syncthreads();
  }
  if (writes_starts && threadIdx.x == 0) params.cu_seqlens[params.num_seqs] = found;
  copy_up_to(row, end, [&](int32_t, int32_t index) { shared.keys[index] = shared.values[index] = kNoToken; });
}

}  // namespace xa

extern "C" __global__ void __launch_bounds__(xa::kThreads, xa::kCtas)
    XA_ENTRY(const __grid_constant__ xa::GatherParams params) {
  using T = xa::XA_PASTE(dtype_, XA_DTYPE);
  __shared__ xa::Shared shared;
  if constexpr (sizeof(T) > 1) {
    if (params.codes == xa::Codes::F8E4M3Fn) return xa::gather<T, xa::Codes::F8E4M3Fn>(params, shared);
    if (params.codes == xa::Codes::F8E5M2) return xa::gather<T, xa::Codes::F8E5M2>(params, shared);
  }
  xa::gather<T, xa::Codes::None>(params, shared);
}
