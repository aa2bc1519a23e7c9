// The one argument of the prefill kernel of sm_90a. src/cuda/attention/hopper/params.rs holds the same struct.
#pragma once

#include <cstddef>
#include <cstdint>

#include "attention_params.cuh"
#include "hopper/ptx.cuh"

namespace xa::hopper {

/// Queries of `attention.group` heads are packed as in the portable kernels; the group is a power of two here. Where
/// the heads of a KV head are not, they are several packs, and `attention.num_kv_heads` counts packs.
struct PrefillParams {
  AttentionParams attention;
  // Columns are those of a panel.
  TensorMap q;    // [panel, token, head, column]: boxes of a tile's rows
  TensorMap k;    // contiguous [1, head, panel, token, column]: boxes of a block of keys;
  TensorMap v;    // paged [page, its octet, panel of all heads, token of the octet, column]: `box_octets` octets a box
  TensorMap out;  // [panel, token, head, column]: boxes of a warp's rows
  uint64_t* next_tile;  // 0 before the launch; without it tiles are dealt out in turn
  int32_t grows;        // whether later rows of a sequence see more keys
  int32_t packs_per_kv_head;
  int32_t box_octets;    // paged: a power of two that divides page and block; 0: rows are copied one by one
  int32_t key_panels;    // paged: panels from a KV head of K to the next one
  int32_t value_panels;  // of V
  int32_t group_shift;   // log2 of `attention.group`
  int32_t stores_boxes;  // whether a warp's rows are a box of `out`
  // Where rows are copied one by one: key / page_size is (key * page_reciprocal >> 31) >> page_shift.
  uint32_t page_reciprocal;
  int32_t page_shift;
};

// src/cuda/attention/hopper/params.rs asserts the same numbers.
static_assert(offsetof(PrefillParams, q) == 512 && offsetof(PrefillParams, next_tile) == 1024);
static_assert(sizeof(PrefillParams) == 1088 && alignof(PrefillParams) == 64);

}  // namespace xa::hopper
