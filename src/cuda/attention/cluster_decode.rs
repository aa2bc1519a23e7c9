//! Decode of few sequences in one launch on Hopper: clusters divide the keys of a KV head and merge split tiles through
//! distributed shared memory, without a workspace and without a combine launch.

use super::decode::{ROWS_PER_WARP, are_short};
use super::split::longest_tile;
use super::tiles::{kv_dtype_value, logits_value, transforms_logits};
use super::{Call, Launch, Launches, UNLIMITED, longest_or_mean_queries};
use crate::cuda::enqueue::{LaunchAttributes, LaunchConfig};
use crate::cuda::params::attention::{AttentionParams, KvSource, TOKENS_PER_LOAD};
use crate::cuda::params::cluster_decode::{CLUSTER_DECODE_SLOTS, LARGEST_CLUSTER};
use crate::cuda::tiles::{CLUSTER_DECODE, ClusterDecodeTile};
use crate::cuda::variants;
use crate::error::Result;

/// Maximum sequence slots.
const MAX_SLOTS: i64 = CLUSTER_DECODE_SLOTS as i64;

/// The most keys of all sequences and KV heads together, by the capacity of each sequence. Past this, the clusters' SMs, some of
/// which stay idle, are slower at reading from DRAM. Over 8 KV heads 1 x 128k takes 130.7 us instead of 134.0, 8 x 16k 130.4 instead of
/// 131.6, 2 x 128k 253.7 instead of 252.2 (H200).
const MOST_KEYS: i64 = 1 << 20;

/// `MOST_KEYS` of calls that the variant `plain` is not compiled for, of few rows per sequence and of more. Over 8 KV heads and 1 x 128k,
/// 12 and 16 packed rows take 147 and 162 us, 20 with split-KV 133 (H200; H100 184, 186 and 192); over 1 x 32k they take 46, and 45 (H100
/// 51, and 58); 12 rows 4 x 16k 79 instead of 72, 8 x 4k 41.8 instead of 42.6 (H200).
const MOST_KEYS_OF_ANY: [i64; 2] = [1 << 19, 1 << 18];

/// `MOST_KEYS` over 8-bit K and V: converting them takes longer than reading, and split-KV has all SMs. Over 8 KV heads 1 x 2k takes 6.8
/// us instead of 10.5, 4 x 3000 14.4 instead of 16.9 and 4 x 8k 28.7 instead of 29.8 (int8 with scales 33.3 instead of 32.7), but 4 x 8k at
/// D 64 23.2 instead of 17.6. In pages of one token 1 x 2k takes 7.8 us instead of 11.6, 1 x 8k 16.2 instead of 14.9 (e4m3fn, H200).
fn most_keys_of_8_bits(call: &Call, tile: &ClusterDecodeTile) -> i64 {
    let AttentionParams { block_table, page_size, has_narrow_rows, .. } = call.params;
    // `UsualLoader::takes` of `kernels/include/cluster_8bit_loop.cuh`, but for K and V of other strides.
    let is_usual = !block_table.is_null() && page_size % TOKENS_PER_LOAD == 0 && has_narrow_rows == 0;
    match (is_usual, tile.head_dim) {
        (false, _) => 1 << 16,
        (true, 128) => 1 << 18,
        (true, _) => 1 << 17,
    }
}

/// A CTA that has parts of several tiles merges its warps several times, which pays only for tiles of this many keys: 12 x 2k takes
/// 32.3 us instead of 39.8 over 8 KV heads and 16 x 2k 40.0 instead of 41.6, but 16 x 512 15.6 instead of 11.8.
const LONG_TILE_KEYS: i64 = 2048;

/// `MOST_KEYS` of sequences that are more than a cluster's CTAs, of few rows and of more: 16 x 8k takes 133.8 us instead of 129.6, with 12
/// rows 16 x 2k 45.8 instead of 40.4. Over 8 bits it is three quarters of theirs: 12 x 2k takes 25.5 us instead of 28.6.
const MOST_KEYS_OF_MANY: [i64; 2] = [1 << 18, 1 << 17];

/// The most KV chunks of a KV head: the kernel divides them in f32.
const MOST_CHUNKS: i64 = 1 << 20;

/// The most keys per KV head of a plain call whose clusters leave most SMs idle: over 4 KV heads 1 x 12k takes 17.2 us instead of 18.8,
/// 1 x 16k 21.1 instead of 20.0, 4 x 4k 21.2 instead of 19.7.
const FEW_KEYS: i64 = 12288;

/// The same of all calls: wider rows take longer, and so do more of them. With 16 query heads per KV head 1 x 4k takes 11.6 us instead
/// of 12.8 over one KV head of 128 columns, 1 x 8k 14.9 instead of 12.4, over four of 256 4 x 1k 18.2 instead of 17.8 and 1 x 8k 26.8
/// instead of 20.6, over one of 64 2 x 4k 12.6 instead of 11.3 (H200). Sequences of different lengths take longer still: five of 95 to 887
/// keys over one KV head of 128 columns 16.3 instead of 12.3. Calls of few rows that are not plain, and those over 8-bit K and V, are in
/// between: over two KV heads 3 x 4095 keys, as many as a window leaves, 21.0 instead of 14.4.
fn few_keys(call: &Call, tile: &ClusterDecodeTile) -> i64 {
    let (columns, heads) = (i64::from(tile.head_dim), call.problem.num_kv_heads as i64);
    let (of_plain, of_heads) = (FEW_KEYS * 128 / columns.max(128), FEW_KEYS.min((1 + heads) << 11));
    match tile.bytes {
        1 => of_heads,
        _ if is_plain(call, tile) => of_plain,
        _ if has_few_rows(call) => of_plain.min(of_heads),
        _ => ((2 + heads) << 17) / columns.max(96),
    }
}

/// The most keys of a sequence with a cluster of its own. Over 8 KV heads a sequence of 1024 keys beside 15 short ones takes 9.6 us
/// instead of 18.3 with split-KV (H100).
const MOST_KEYS_OF_A_CLUSTER: i64 = 1024;

/// CTAs of a cluster with a single sequence, at most.
const LARGEST_OF_A_SEQUENCE: i64 = 4;

/// The most packed rows of all sequences: the kernel divides their numbers by the group in f32.
const MOST_ROWS: i64 = 1 << 20;

/// Packed rows of a tile of plain calls, and over 8-bit K and V.
const FEW_ROWS: i64 = 8;

/// Packed rows of other tiles.
const ROWS: i64 = 16;

/// Takes calls of few sequences that are all short, without `batch_invariant`: how a tile is split depends on the batch.
pub(super) fn launches<'c>(call: &Call<'c>) -> Result<Option<Launches<'c>>> {
    let Some((tile, clusters)) = tile_and_clusters(call) else { return Ok(None) };
    let problem = call.problem;
    let Clusters { size, per_head } = clusters;
    let warps = per_head * size * i64::from(tile.key_warps);
    let new_tokens = call.new_tokens.filter(|_| tile.bytes > 1 && call.rows() <= ROWS_PER_WARP * warps);
    let mut params = call.params_for(1, UNLIMITED);
    params.clears_padding_rows = 1;
    params.new_tokens = new_tokens.unwrap_or(params.new_tokens);
    let kind = match (per_head, is_plain(call, tile)) {
        (1, true) => "plain",
        (1, false) => "any",
        (_, true) => "per_sequence",
        (_, false) => "any_per_sequence",
    };
    // With token scales there are no axes of logits and calls.
    let (kernel, axes) = match problem.scale_cache {
        Some(_) => ("cluster_decode_token_scales", 2),
        None if tile.bytes == 1 => ("cluster_decode_fp8", 4),
        None => ("cluster_decode", 4),
    };
    let values = [kv_dtype_value(problem, &call.device), tile.head_dim_value, logits_value(problem), kind];
    let variant = variants::find(kernel, &values[..axes])?;
    let grid = [problem.num_kv_heads as u32, size as u32, per_head as u32];
    let config = LaunchConfig { grid, threads: 32 * tile.key_warps, shared_memory: tile.shared_bytes };
    let attend = Launch::new(kernel, variant, config, call.parameter(&params));
    let attributes = LaunchAttributes { cluster: size as u32, ..LaunchAttributes::NONE };
    let list = vec![Launch { attributes, ..attend }];
    Ok(Some(Launches { list, store_new_tokens: new_tokens.is_some() }))
}

/// Whether the call is one of those that the variant `plain` is compiled for (`cluster_call.cuh`), and the rows of most
/// sequences fit its tiles.
fn is_plain(call: &Call, tile: &ClusterDecodeTile) -> bool {
    let AttentionParams { k, v, .. } = &call.params;
    let params = &call.params;
    let strides = |source: &KvSource| [source.page_stride, source.token_stride, source.head_stride];
    let is_small = |stride: &i64| (0..1 << 31).contains(stride);
    let has_plain_cache = !params.block_table.is_null()
        && !params.seqused_k.is_null()
        && (params.page_size & (params.page_size - 1)) == 0
        && i64::from(params.page_size) % i64::from(tile.keys) == 0
        && strides(k) == strides(v)
        && strides(k).iter().chain([&params.block_table_stride]).all(is_small);
    let has_plain_mask = (params.window_left, params.window_right, params.top_left) == (-1, 0, 0)
        && params.leftpad_k.is_null()
        && params.q_offset.is_null()
        && params.seqused_q.is_null();
    let has_plain_rows = (params.head_dim, params.value_dim) == (tile.head_dim as i32, tile.head_dim as i32)
        && params.sinks.is_null()
        && params.v_scale.values.is_null()
        && params.value_factor.to_bits() == 1.0_f32.to_bits()
        && params.widens_out == 0;
    tile.bytes > 1
        && has_plain_cache
        && has_plain_mask
        && has_plain_rows
        && !transforms_logits(call.problem)
        && has_few_rows(call)
        && chunks_of(call, tile, FEW_ROWS) + i64::from(LARGEST_CLUSTER) <= MOST_CHUNKS
}

/// Whether the rows of a sequence fit the tiles of plain calls.
fn has_few_rows(call: &Call) -> bool {
    call.packed_rows() <= FEW_ROWS
}

/// Packed rows of a tile of calls that are not plain.
const fn rows(tile: &ClusterDecodeTile) -> i64 {
    if tile.bytes == 1 { FEW_ROWS } else { ROWS }
}

/// The most KV chunks of a KV head if tiles have this many rows. The first and last chunk of a tile may have few keys.
fn chunks_of(call: &Call, tile: &ClusterDecodeTile, tile_rows: i64) -> i64 {
    chunks_over(call, tile, tile_rows, call.problem.keys.storage.capacity().1 as i64)
}

/// The same if sequences have up to `keys` keys.
fn chunks_over(call: &Call, tile: &ClusterDecodeTile, tile_rows: i64, keys: i64) -> i64 {
    let tiles = call.max_tiles(tile_rows, call.rows().min(call.seqs()));
    tiles * (keys / i64::from(tile.keys * tile.key_warps) + 2)
}

/// The clusters of a call.
struct Clusters {
    /// CTAs of a cluster.
    size: i64,
    /// Clusters of a KV head: one for all sequences, or one for each.
    per_head: i64,
}

/// The most keys that a sequence's rows attend to: what the block table, or all packed keys, and the window leave.
fn keys_of_a_sequence(call: &Call) -> i64 {
    longest_tile(call.problem, longest_or_mean_queries(call.problem))
}

/// A cluster for each sequence, in calls of more than [`LARGEST_CLUSTER`] sequences that have room for it. None of the
/// sequences can be so long that the others' clusters wait for its own. Fewer sequences share clusters: 8 x 512 takes as long
/// either way, and one of 1024 keys beside 7 short ones 6.8 us instead of 9.5 (H100).
fn clusters_of_sequences(call: &Call) -> Option<Clusters> {
    let (clusters, sms) = (call.problem.num_kv_heads as i64 * call.seqs(), i64::from(call.device.sms));
    let takes = call.seqs() > i64::from(LARGEST_CLUSTER)
        && clusters <= sms
        && keys_of_a_sequence(call) <= MOST_KEYS_OF_A_CLUSTER
        && call.problem.scale_cache.is_none();
    let size = (sms * 3 / 4 / clusters).clamp(1, LARGEST_OF_A_SEQUENCE);
    takes.then_some(Clusters { size, per_head: call.seqs() })
}

/// The kernel's tile and its clusters, if the kernel takes the call.
fn tile_and_clusters(call: &Call) -> Option<(&'static ClusterDecodeTile, Clusters)> {
    let Call { problem, device, .. } = call;
    let is_built = device.capability == 90;
    let is_small = (1..=MAX_SLOTS).contains(&call.seqs()) && call.rows() * call.group() < MOST_ROWS;
    if !are_short(call) || !is_built || problem.batch_invariant || !is_small {
        return None;
    }
    let dim = problem.head_dim.max(problem.value_dim);
    let serves = |tile: &&ClusterDecodeTile| {
        tile.bytes as usize == problem.kv_dtype.size()
            && tile.head_dim as usize >= dim
            && tile.shared_bytes <= device.shared_memory
    };
    let tile = CLUSTER_DECODE.iter().filter(serves).min_by_key(|tile| tile.head_dim)?;
    let chunks = chunks_of(call, tile, rows(tile));
    let largest_cluster = i64::from(LARGEST_CLUSTER);
    if let Some(clusters) = clusters_of_sequences(call).filter(|_| chunks + largest_cluster <= MOST_CHUNKS) {
        return Some((tile, clusters));
    }
    let (heads, sms) = (problem.num_kv_heads as i64, i64::from(device.sms));
    // Clusters of up to eight CTAs, one per SM, fit on three quarters of the SMs: a GPC's last SMs are too few for one.
    let largest = (sms * 3 / 4 / heads).min(largest_cluster);
    let keys = keys_of_a_sequence(call);
    let seqs = call.rows().min(call.seqs());
    // Every tile over 8-bit K and V converts its keys.
    let tiles = if tile.bytes == 1 { call.packed_rows().saturating_add(FEW_ROWS - 1) / FEW_ROWS } else { 1 };
    let all_keys = seqs.saturating_mul(keys).saturating_mul(tiles);
    let size = largest.min(chunks_over(call, tile, rows(tile), keys));
    let of_rows = |[few, more]: [i64; 2]| if has_few_rows(call) { few } else { more };
    // By sequences per CTA.
    let most_keys = if seqs <= size {
        match tile.bytes {
            1 => most_keys_of_8_bits(call, tile),
            _ if is_plain(call, tile) => MOST_KEYS,
            _ => of_rows(MOST_KEYS_OF_ANY),
        }
    } else if seqs <= 2 * size && keys >= LONG_TILE_KEYS {
        if tile.bytes == 1 { most_keys_of_8_bits(call, tile) / 4 * 3 } else { of_rows(MOST_KEYS_OF_MANY) }
    } else {
        0
    };
    let fits = largest > 1 && chunks + largest <= MOST_CHUNKS && heads.saturating_mul(all_keys) <= most_keys;
    (fits && (all_keys <= few_keys(call, tile) || 5 * heads * size >= 2 * sms))
        .then_some((tile, Clusters { size, per_head: 1 }))
}

#[cfg(test)]
mod tests {
    use super::super::tests::{device, named_on, problem};
    use super::super::{Device, LaunchPlan};
    use crate::problem::attention::{Attention, KeyStorage, Keys, PageTable, Queries, Score};
    use crate::problem::{KvScaleCache, KvView};
    use crate::tensor::{DType, Tensor};

    /// The CTAs of a cluster; `None` if another strategy takes the call.
    fn size_on(problem: &Attention, device: &Device) -> Option<u32> {
        let plan = LaunchPlan::on(problem, None, *device).expect("the sizes are allowed");
        let launch = &plan.0.list[0];
        let [heads, size, _] = launch.config.grid;
        let is_ours = launch.kernel.starts_with("cluster_decode");
        assert!(
            !is_ours || (plan.0.list.len(), heads, size) == (1, problem.num_kv_heads as u32, launch.attributes.cluster)
        );
        assert!(is_ours || launch.attributes.cluster == 1);
        is_ours.then_some(size)
    }
    fn size(problem: &Attention) -> Option<u32> {
        size_on(problem, &device(true))
    }

    /// A call over this many keys per sequence.
    fn over(keys: usize, heads: usize, problem: &Attention<'static>) -> Attention<'static> {
        let storage = KeyStorage::Contiguous { total: keys };
        let num_q_heads = 4 * heads;
        Attention { num_kv_heads: heads, num_q_heads, keys: Keys { storage, ..problem.keys }, ..*problem }
    }

    #[test]
    fn clusters_are_as_large_as_fits_the_gpu() {
        for (heads, expected) in [(7, 8), (8, 8), (12, 8), (16, 6), (32, 3)] {
            assert_eq!(size(&over(1 << 13, heads, &problem(2, 2, 32, 128))), Some(expected), "{heads} heads");
        }
        // Clusters of one CTA; many keys.
        assert_eq!(size(&over(1 << 15, 64, &problem(1, 1, 32, 128))), None);
        assert_eq!(size(&over(1 << 15, 8, &problem(2, 2, 32, 128))), Some(8));
        assert_eq!(size(&over((1 << 15) + 1, 8, &problem(2, 2, 32, 128))), None);
        assert_eq!(size(&over(1 << 15, 16, &problem(2, 2, 32, 128))), None);
        // Twice as many in plain calls, here of 16384 keys.
        let plain = |heads| Attention { num_kv_heads: heads, num_q_heads: 4 * heads, ..paged(256, 2, 1) };
        assert_eq!(size(&plain(32)), Some(3));
        assert_eq!(size(&plain(33)), None);
        // More sequences than CTAs: neither few nor many keys, and no more than twice as many.
        for (seqs, keys, expected) in
            [(9, 2047, None), (9, 2048, Some(8)), (16, 2048, Some(8)), (16, 2049, None), (17, 2048, None)]
        {
            assert_eq!(
                size(&over(keys, 8, &problem(seqs, seqs, 32, 128))),
                expected,
                "{seqs} sequences of {keys} keys"
            );
        }
        let few_sms = Device { sms: 8, ..device(true) };
        assert_eq!(size_on(&over(1 << 15, 2, &problem(1, 1, 32, 128)), &few_sms), Some(3));
        // Most SMs would be idle.
        for (dim, few_rows, more) in [(64, 10240, 8192), (128, 10240, 6144), (256, 6144, 3072)] {
            for (num_q_heads, keys) in [(16, few_rows), (64, more)] {
                let of_keys = |keys| Attention { num_q_heads, ..over(keys, 4, &problem(1, 1, 32, dim)) };
                assert_eq!(
                    [keys, keys + 1].map(|keys| size(&of_keys(keys))),
                    [Some(8), None],
                    "{num_q_heads} heads of {dim}"
                );
            }
        }
        // Sequences of more rows; more sequences than CTAs.
        let of_16_rows = |keys, seqs| Attention { num_q_heads: 128, ..over(keys, 8, &problem(seqs, seqs, 32, 128)) };
        assert_eq!([1 << 15, (1 << 15) + 1].map(|keys| size(&of_16_rows(keys, 1))), [Some(8), None]);
        assert_eq!(size(&of_16_rows(2048, 9)), None);
        // No more CTAs than chunks.
        assert_eq!(size(&over(128, 8, &problem(1, 1, 32, 128))), Some(3));
    }

    #[test]
    fn other_calls_are_left_to_other_strategies() {
        let plain = over(4096, 8, &problem(8, 8, 32, 128));
        assert_eq!(size(&plain), Some(8));
        assert_eq!(size(&Attention { batch_invariant: true, ..plain }), None);
        let dtype = DType::F32;
        assert_eq!(size(&Attention { q: Tensor { dtype, ..plain.q }, kv_dtype: dtype, ..plain }), None);
        for capability in [80, 89, 100, 120] {
            assert_eq!(size_on(&plain, &Device { capability, ..device(true) }), None);
        }
        // A sequence may be long, unless the caller says that none is.
        let longer = over(4096, 8, &problem(64, 8, 32, 128));
        assert_eq!(size(&longer), None);
        assert_eq!(size(&Attention { queries: Queries { longest: 4, ..longer.queries }, ..longer }), Some(8));
        assert_eq!(size(&over(4096, 8, &problem(4, 1, 32, 128))), Some(8));
    }

    #[test]
    fn the_next_head_dimension_serves_those_between() {
        for (dim, bucket) in [(8, 64), (64, 64), (72, 128), (128, 128), (136, 256), (256, 256)] {
            let name = named_on(&over(4096, 8, &problem(4, 4, 32, dim)), &device(true))[0].0;
            assert_eq!(name, format!("cluster_decode_bf16_{bucket}_none_any"));
        }
    }

    #[test]
    fn eight_bit_caches_have_variants_for_few_and_many_rows() {
        let view = KvView { data: std::ptr::null_mut(), page_stride: 0, token_stride: 0, head_stride: 0 };
        let scales = Some(KvScaleCache { k: view, v: view });
        for (kv_dtype, scale_cache, stem) in [
            (DType::F8E4M3FN, None, "fp8_fp8_128_softcap_alibi_any"),
            (DType::F8E5M2, None, "fp8_fp8_128_softcap_alibi_any"),
            (DType::F8E4M3FN, scales, "token_scales_fp8_128"),
            (DType::I8, scales, "token_scales_i8_128"),
        ] {
            // Groups of 4 query heads.
            for longest in [2, 3] {
                let plain = paged(16, 2, longest);
                let queries = Queries { longest, ..plain.queries };
                let problem = Attention { kv_dtype, queries, scale_cache, ..plain };
                let name = named_on(&problem, &device(true))[0].0;
                assert_eq!(name, format!("cluster_decode_{stem}"));
            }
        }
    }

    #[test]
    fn fewer_keys_of_8_bits_are_computed_by_clusters() {
        // Up to 64 pages over 8 KV heads.
        let of = |page_size, seqs, group: usize, dim| {
            let plain = paged(page_size, seqs, 1);
            let sizes = Attention { num_q_heads: 8 * group, head_dim: dim, value_dim: dim, ..plain };
            size(&Attention { kv_dtype: DType::F8E4M3FN, ..sizes })
        };
        assert_eq!([512, 528].map(|page_size| of(page_size, 1, 4, 128)), [Some(8), None]);
        assert_eq!([256, 272].map(|page_size| of(page_size, 1, 4, 64)), [Some(8), None]);
        assert_eq!([120, 136].map(|page_size| of(page_size, 1, 4, 128)), [Some(8), None]);
        assert_eq!([12, 13].map(|seqs| of(32, seqs, 4, 128)), [Some(8), None]);
        // Groups of 16 query heads have two tiles per sequence.
        assert_eq!([256, 272].map(|page_size| of(page_size, 1, 16, 128)), [Some(8), None]);
    }

    /// A plain call of `seqs` sequences of `queries` queries over up to 64 pages of `page_size` tokens.
    fn paged(page_size: usize, seqs: usize, queries: usize) -> Attention<'static> {
        let pointer = std::ptr::without_provenance(4);
        let table = PageTable { entries: pointer, stride: 64, max_pages: 64, num_pages: 512, page_size };
        let base = over(4096, 8, &problem(seqs * queries, seqs, 32, 128));
        let keys = Keys { storage: KeyStorage::Paged(table), used: Some(pointer), ..base.keys };
        Attention { keys, score: Score { window_right: 0, ..base.score }, ..base }
    }

    #[test]
    fn sequences_that_all_fit_the_gpu_have_clusters_of_their_own() {
        let grid = |problem: &Attention| {
            let plan = LaunchPlan::on(problem, None, device(true)).expect("the sizes are allowed");
            let launch = &plan.0.list[0];
            launch.kernel.starts_with("cluster_decode").then_some((launch.config.grid, launch.attributes.cluster))
        };
        for (seqs, heads, size) in [(9, 8, 1), (16, 8, 1), (9, 4, 2), (16, 2, 3), (9, 2, 4)] {
            let call = Attention { num_kv_heads: heads, num_q_heads: 4 * heads, ..paged(16, seqs, 1) };
            assert_eq!(grid(&call), Some(([heads as u32, size, seqs as u32], size)), "{seqs} sequences, {heads} heads");
            assert!(named_on(&call, &device(true))[0].0.ends_with("_per_sequence"));
        }
        // More rows than those of plain calls; a window within more than 1024 keys; 8 bits.
        let of_window = Score { window_left: 1023, ..paged(32, 9, 1).score };
        for call in [
            Attention { num_q_heads: 128, ..paged(16, 9, 1) },
            Attention { score: of_window, ..paged(32, 9, 1) },
            Attention { kv_dtype: DType::F8E4M3FN, ..paged(16, 9, 1) },
        ] {
            assert_eq!(grid(&call), Some(([8, 1, 9], 1)));
            assert!(named_on(&call, &device(true))[0].0.ends_with("_any_per_sequence"));
        }
        // As many sequences as CTAs of a cluster; more than 1024 keys; more clusters than SMs; scales of rows.
        assert_eq!(grid(&paged(16, 8, 1)), Some(([8, 8, 1], 8)));
        assert_eq!(grid(&paged(32, 16, 1)), Some(([8, 8, 1], 8)));
        assert_eq!(grid(&Attention { score: Score { window_left: 1024, ..of_window }, ..paged(32, 9, 1) }), None);
        assert_eq!(grid(&paged(16, 17, 1)), None);
        let view = KvView { data: std::ptr::null_mut(), page_stride: 0, token_stride: 0, head_stride: 0 };
        let scale_cache = Some(KvScaleCache { k: view, v: view });
        assert_eq!(grid(&Attention { kv_dtype: DType::I8, scale_cache, ..paged(16, 9, 1) }), None);
    }

    #[test]
    fn plain_calls_have_a_variant() {
        let used = std::ptr::without_provenance(4);
        let paged = |page_size| paged(page_size, 8, 1);
        let kind = |problem: &Attention| named_on(problem, &device(true))[0].0.rsplit('_').next().map(str::to_owned);
        let plain = paged(16);
        for call in [plain, paged(64), Attention { num_q_heads: 64, ..plain }] {
            assert_eq!(kind(&call).as_deref(), Some("plain"));
        }
        let score = plain.score;
        for call in [
            paged(48),
            paged(8),
            Attention { num_q_heads: 128, ..plain },
            Attention { num_rows: 16, queries: Queries { longest: 3, ..plain.queries }, ..plain },
            Attention { head_dim: 120, value_dim: 120, ..plain },
            Attention { score: Score { window_left: 100, ..score }, ..plain },
            Attention { score: Score { window_right: -1, ..score }, ..plain },
            Attention { score: Score { sinks: Some(std::ptr::without_provenance(4)), ..score }, ..plain },
            Attention { keys: Keys { leftpad: Some(used), ..plain.keys }, ..plain },
            Attention { queries: Queries { used: Some(used), ..plain.queries }, ..plain },
        ] {
            assert_eq!(kind(&call).as_deref(), Some("any"));
        }
    }
}
