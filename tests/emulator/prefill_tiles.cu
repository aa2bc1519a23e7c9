// The tiles that the CTAs of the portable prefill compute, for tests/python/test_prefill_tiles.py.

#include <climits>

#include "params/attention.cuh"
#include "prefill_tiles.cuh"

/// Sequences over contiguous keys, and where the tile of each CTA is written to.
struct Batch {
  const int32_t* cu_seqlens_q;
  const int32_t* cu_seqlens_k;
  xa::QoTile* tiles;
  int32_t num_rows;
  int32_t num_keys;
  int32_t num_seqs;
  int32_t num_kv_heads;
  int32_t group;
  int32_t window_right;
};

extern "C" __global__ void XA_ENTRY(const __grid_constant__ Batch batch) {
  __shared__ xa::WorkTile work;
  xa::AttentionParams params = {};
  params.cu_seqlens_q = batch.cu_seqlens_q;
  params.cu_seqlens_k = batch.cu_seqlens_k;
  params.num_tokens = batch.num_rows;
  params.capacity = batch.num_keys;
  params.max_seqs = batch.num_seqs;
  params.num_kv_heads = batch.num_kv_heads;
  params.group = batch.group;
  params.group_reciprocal = 1.0f / static_cast<float>(batch.group);
  params.window_left = -1;
  params.window_right = batch.window_right;
  params.min_queries = 1;
  params.max_queries = INT_MAX;
  xa::find_tile<128, 128>(params, work);
  if (threadIdx.x == 0) batch.tiles[blockIdx.x] = work.tile;
}
