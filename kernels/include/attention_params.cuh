// The one argument of the attention kernels. src/cuda/paged_attention.rs holds the same struct.
#pragma once

#include <cstddef>
#include <cstdint>

namespace xa {

/// K or V of a paged cache, any layout: element strides between neighbouring pages, tokens of a page, heads.
/// The D elements of a token's head are contiguous and start at a multiple of 16 bytes.
struct KvSource {
  const void* base;
  int64_t page_stride;
  int64_t token_stride;
  int64_t head_stride;
};

/// T token rows, S sequence slots, Hq = group * Hkv query heads, P pages. Strides are in elements.
struct AttentionParams {
  const void* query;  // [T, Hq, D]
  int64_t query_token_stride;
  int64_t query_head_stride;
  void* out;  // [T, Hq, D]
  int64_t out_token_stride;
  int64_t out_head_stride;
  float* lse;  // [Hq, T], or null if not wanted
  KvSource key;
  KvSource value;
  const int32_t* block_tables;  // [S, max_pages]
  int64_t block_table_stride;
  const int32_t* context_lens;     // [S]
  const int32_t* query_start_loc;  // [S + 1]
  const int32_t* num_seqs;         // one number
  float softmax_scale_log2;        // softmax_scale * log2(e)
  float softcap_log2;              // softcap * log2(e); 0 is off
  float softcap_into;              // softmax_scale / softcap, where that is on
  int32_t num_tokens;
  int32_t max_seqs;
  int32_t num_pages;
  int32_t page_size;
  int32_t capacity;  // longest context that a row of block_tables can name; 0 without pages; below 2^31 - 256
  int32_t num_kv_heads;
  int32_t group;
  float group_reciprocal;  // 1 / group
  int32_t head_dim;        // D: a multiple of 8 up to the variant's bucket
  int32_t window_left;     // keys before the query's own position that it sees; -1 is all
  int32_t window_right;    // keys after it; 0 is causal, -1 is all
  int32_t min_queries;     // sequences with fewer or more queries than these are another launch's
  int32_t max_queries;
  int32_t clears_unowned_rows;  // whether this launch writes the rows that no sequence owns
  int32_t reserved;
};

// src/cuda/paged_attention.rs asserts the same numbers.
static_assert(sizeof(KvSource) == 32 && sizeof(AttentionParams) == 232);
static_assert(offsetof(AttentionParams, key) == 56 && offsetof(AttentionParams, softmax_scale_log2) == 160);
static_assert(offsetof(AttentionParams, num_tokens) == 172 && offsetof(AttentionParams, clears_unowned_rows) == 224);

}  // namespace xa
