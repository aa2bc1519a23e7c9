// The one argument of the attention kernels. src/cuda/attention holds the same struct.
#pragma once

#include <cstddef>
#include <cstdint>

#include "slots.cuh"

namespace xa {

/// K or V, any layout: element strides between neighbouring pages, tokens of a page, heads. The elements of a token's
/// head are neighbours. Contiguous keys are one page without an end.
struct KvSource {
  const void* base;
  int64_t page_stride;
  int64_t token_stride;
  int64_t head_stride;
};

/// Factors: one (stride 0) or one a KV head (stride 1); 1 where there are none.
struct ScaleSource {
  const float* values;
  int64_t head_stride;

  __device__ __forceinline__ float of(int32_t kv_head) const {
    return values == nullptr ? 1.0f : __ldg(values + kv_head * head_stride);
  }
};

/// Where decode launches leave what several CTAs computed of a tile (partial_rows.cuh), in the caller's workspace.
struct PartialResults {
  void* cuts;             // CutTile [groups - 1], those of the shares after the first
  void* states;           // float2 [Hkv, rows_per_head]: max and sum
  void* outputs;          // float [Hkv, rows_per_head, pitch]
  int32_t rows_per_head;  // below 2^24
  int32_t pitch;          // columns of an output: Dv
  int32_t groups;         // shares that have room for their parts; 0 where no tile may be cut
  int32_t max_spans;      // batch_invariant: spans of a tile at most; else 0
  float log2_unit;        // logits to base 2 are this times the scores that `max` is one of
  int32_t reserved;
};

/// Keys or values [Tq, Hkv, D] of the query rows. Strides are in elements.
struct NewRowSource {
  const void* base;
  int64_t token_stride;
  int64_t head_stride;
};

/// Tokens that the cache does not hold yet: the last len_q keys of each sequence. Decode of more than 8 bits takes them
/// from here and stores them in the cache (new_tokens.cuh); other kernels do not know of them.
struct NewTokens {
  NewRowSource key;  // without a base the cache holds all
  NewRowSource value;
  SlotMapping slots;  // of every row, whether it belongs to a sequence or not
};

/// What q is, where K and V are of 8 bits.
enum class QueryType : int32_t { kF16, kBf16, kFp8 };

/// Tq query rows, B sequence slots, Hq = group * Hkv query heads, P pages. Strides are in elements. What the caller
/// leaves out is null.
struct AttentionParams {
  const void* q;  // [Tq, Hq, D]
  int64_t q_token_stride;
  int64_t q_head_stride;
  void* out;  // [Tq, Hq, Dv]
  int64_t out_token_stride;
  int64_t out_head_stride;
  float* lse;  // [Hq, Tq]
  KvSource k;
  KvSource v;
  const int32_t* block_table;  // [B, max_pages]; without it the keys are contiguous
  int64_t block_table_stride;
  const int32_t* cu_seqlens_q;  // [B + 1]
  const int32_t* seqused_q;     // [B]
  const int32_t* cu_seqlens_k;  // [B + 1]; there where keys are contiguous, or seqused_k is not
  const int32_t* seqused_k;     // [B]
  const int32_t* leftpad_k;     // [B]
  const int32_t* num_seqs;      // one number; without it all B slots are in use
  const float* alibi_slopes;    // [Hq], or [B, Hq]
  int64_t alibi_stride;         // from a sequence's slopes to the next one's: 0 or Hq
  const float* sinks;           // [Hq]
  ScaleSource q_scale;
  ScaleSource k_scale;
  ScaleSource v_scale;
  float value_factor;        // of the output: what fp8 V's numbers have been divided by
  float softmax_scale_log2;  // softmax_scale * log2(e)
  float softcap_log2;        // softcap * log2(e); 0 is off
  float score_factor;        // of q . k: softmax_scale / softcap, or softmax_scale_log2 where there is no cap; times
                             // what fp8 numbers have been divided by
  int32_t num_tokens;        // Tq
  int32_t max_seqs;          // B
  int32_t num_pages;         // P; 1 where keys are contiguous
  int32_t page_size;         // where keys are contiguous, a multiple of every block's size
  int32_t capacity;  // paged: longest context that a row of block_table can name; contiguous: rows of K and V. Below
                     // 2^31 - 256
  int32_t num_kv_heads;
  int32_t group;
  float group_reciprocal;  // 1 / group
  int32_t head_dim;        // D: a multiple of 8 up to the variant's bucket
  int32_t value_dim;       // Dv: likewise
  int32_t window_left;     // keys before the query's own position that it sees; -1 is all
  int32_t window_right;    // keys after it; 0 is causal, -1 is all
  int32_t top_left;        // whether query 0 stands at key 0, else the last query stands at the last key
  int32_t min_queries;     // sequences with fewer or more queries than these are another launch's
  int32_t max_queries;
  int32_t clears_unowned_rows;  // whether this launch writes the rows that no sequence owns
  QueryType q_type;             // read, as the rest, by kernels for fp8 K and V only
  int32_t kv_is_e5m2;           // else e4m3fn
  int32_t out_is_bf16;          // else of the type that the kernel computes in
  int32_t has_narrow_rows;      // K and V are chunks of 8 bytes, aligned to 8, else of 16
  PartialResults partial;
  NewTokens new_tokens;
};

// src/cuda/attention asserts the same numbers.
static_assert(sizeof(KvSource) == 32 && sizeof(ScaleSource) == 16 && sizeof(PartialResults) == 48);
static_assert(sizeof(NewTokens) == 80 && offsetof(AttentionParams, new_tokens) == 400);
static_assert(offsetof(AttentionParams, partial) == 352 && sizeof(AttentionParams) == 480);
static_assert(offsetof(AttentionParams, k) == 56 && offsetof(AttentionParams, cu_seqlens_q) == 136);
static_assert(offsetof(AttentionParams, q_scale) == 208 && offsetof(AttentionParams, value_factor) == 256);
static_assert(offsetof(AttentionParams, num_tokens) == 272 && offsetof(AttentionParams, has_narrow_rows) == 348);

}  // namespace xa
