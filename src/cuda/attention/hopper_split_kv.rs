//! Few queries per sequence over many keys on Hopper: prefill whose keys are divided between CTAs (split-KV), as in decode.

use super::decode;
use super::hopper::{HopperPrefill, LARGEST_PACK, PrefillParameter, padded_group};
use super::split::{KvSplit, WorkUnit, longest_tile};
use super::{Call, Launch, Launches, MAX_SHORT_ROWS, Parameter, UNLIMITED, longest_or_mean_queries};
use crate::cuda::enqueue::LaunchConfig;
use crate::cuda::params::attention::AttentionParams;
use crate::cuda::tensor_map::supports_tma;
use crate::cuda::tiles::{HOPPER_PREFILL, HopperPrefillTile};
use crate::error::Result;
use crate::problem::attention::{Attention, KeyStorage};
use std::ptr::null_mut;

const KERNEL: &str = "hopper_split_kv";
const EIGHT_BIT_KERNEL: &str = "hopper_split_kv_8bit";
const TOKEN_SCALES_KERNEL: &str = "hopper_split_kv_token_scales";
const ROW_MASKS_KERNEL: &str = "hopper_row_masks";

/// Tenths of a wave of CTAs. With tiles for more, prefill is faster without splitting keys.
const WAVE_TENTHS: i64 = 17;

/// Keys per query of a sequence, at least: for fewer, the causal mask leaves CTAs of a static partition idle.
const KEYS_PER_QUERY: i64 = 8;

/// Strategy: one launch for all sequences, of any length.
pub(super) fn launches<'c>(call: &Call<'c>) -> Result<Option<Launches<'c>>> {
    let prefill = kernel_for(call).filter(|prefill| is_faster(prefill, call));
    prefill.map_or(Ok(None), |prefill| launches_of(call, prefill))
}

/// Keys and packed rows of sequences whose tiles, if there are more of them than SMs, the portable kernel computes in less time: of a
/// general tile most rows are empty. 108 x 12 over up to 67 keys, 32/32 heads of 64, take 140 us here and 79 there (H200).
const FEW_MASKED_KEYS: i64 = 256;
const FEW_MASKED_ROWS: i64 = 64;

/// Strategy: rows with masks of their own over pages, in one launch with sequences that have none. Where there are trees, most sequences
/// have no more queries than those.
pub(super) fn launches_of_row_masks<'c>(call: &Call<'c>) -> Result<Option<Launches<'c>>> {
    let (problem, queries) = (call.problem, &call.problem.queries);
    if !call.has_row_masks()
        || queries.tree.is_some_and(|tree| longest_or_mean_queries(problem) > tree.max_queries as i64)
    {
        return Ok(None);
    }
    let are_many = call.seqs().saturating_mul(problem.num_kv_heads as i64) > i64::from(call.device.sms);
    let are_small = longest_tile(problem, 1) <= FEW_MASKED_KEYS && call.packed_rows() <= FEW_MASKED_ROWS;
    // The kernel derives queries' positions from the lengths.
    let has_usual_positions = queries.offset.is_none() && !problem.score.top_left;
    let takes = has_usual_positions && !(are_many && are_small);
    let prefill = kernel_for(call).filter(|prefill| takes && !prefill.clips_pages(problem));
    prefill.map_or(Ok(None), |prefill| launches_of(call, prefill))
}

/// The launches with a tile of the kernel, if the workspace has room for them.
fn launches_of<'c>(call: &Call<'c>, prefill: HopperPrefill) -> Result<Option<Launches<'c>>> {
    let Call { problem, device, .. } = call;
    let tiles = prefill.max_tiles(call, call.seqs().min(call.rows()));
    let unit = WorkUnit { rows: prefill.tile.rows(), chunk_keys: i64::from(prefill.tile.keys), log2_unit: 1.0 };
    let split = KvSplit::of_units(problem, unit, tiles, UNLIMITED, i64::from(device.sms), 0);
    let queries = (call.rows() + call.seqs() - 1) / call.seqs().max(1);
    // Without the memory for its partials, this kernel leaves SMs idle as others do. There are none if no tile is long enough
    // to be split; it is then faster only for sequences of one tile.
    let needs_partials = split.may_split || queries > prefill.queries_per_tile();
    if needs_partials && i64::from(split.partial.num_ranges) < split.ranges {
        return Ok(None);
    }
    let params = AttentionParams { clears_padding_rows: 1, partial: split.partial, ..call.params_for(1, UNLIMITED) };
    let grid = [problem.num_kv_heads as u32, split.ranges as u32, 1];
    let config = LaunchConfig { grid, threads: prefill.tile.threads(), shared_memory: prefill.tile.shared_bytes };
    let of = PrefillParameter { prefill, problem, attention: params, next_tile: null_mut() };
    let (kernel, parameter) = match problem.scale_cache {
        Some(scales) => (TOKEN_SCALES_KERNEL, Parameter::PrefillTokenScales(of, scales)),
        _ if prefill.tile.takes_row_masks() => (ROW_MASKS_KERNEL, Parameter::PrefillRowMasks(of)),
        _ if prefill.tile.converts_kv() => (EIGHT_BIT_KERNEL, Parameter::Prefill(of)),
        _ => (KERNEL, Parameter::Prefill(of)),
    };
    let attend = Launch::new(kernel, prefill.variant(kernel, problem)?, config, parameter);
    let combine = decode::combine(problem, device, &split, &params, (queries * call.group()).min(prefill.tile.rows()))?;
    let list = [Some(attend), combine].into_iter().flatten().collect();
    Ok(Some(Launches { list, store_new_tokens: false }))
}

/// Columns, query heads per KV head and keys per sequence from which on this kernel decodes in less time than decode's: over 16 bits, 1.19
/// times with 8/1 heads of 256 and 1 x 32768 keys, 1.0 to 1.13 with 16/2 heads and 1 to 16 sequences of 4096 keys or more; with shorter
/// ones 0.8 to 1.4 (H200).
const WIDE_COLUMNS: usize = 193;
const WIDE_GROUP: i64 = 8;
const MIN_WIDE_CONTEXT: i64 = 4096;

/// Strategy: short sequences of wide heads, for which decode has the fewest CTAs.
pub(super) fn launches_of_wide_heads<'c>(call: &Call<'c>) -> Result<Option<Launches<'c>>> {
    let problem = call.problem;
    let are_wide = problem.head_dim.max(problem.value_dim) >= WIDE_COLUMNS && problem.kv_dtype.size() == 2;
    let takes = are_wide
        && call.group() >= WIDE_GROUP
        && keys_per_slot(problem) >= MIN_WIDE_CONTEXT
        && call.new_tokens.is_none()
        && decode::are_short(call);
    if takes { launches(call) } else { Ok(None) }
}

/// Whether a sequence slot has room for at least [`KEYS_PER_QUERY`].
pub(super) fn has_many_keys(problem: &Attention) -> bool {
    let (rows, seqs) = (problem.num_rows as i64, (problem.max_seqs as i64).max(1));
    keys_per_slot(problem) >= KEYS_PER_QUERY * ((rows + seqs - 1) / seqs)
}

/// Keys for which a sequence slot has room: packed ones on average.
pub(super) fn keys_per_slot(problem: &Attention) -> i64 {
    match problem.keys.storage {
        KeyStorage::Contiguous { total } => (total / problem.max_seqs.max(1)) as i64,
        KeyStorage::Paged(table) => table.capacity() as i64,
    }
}

/// The tiles for the call's types, sizes and options. A soft cap or ALiBi, which takes as long for rows that are empty, is left to decode's
/// smaller tiles where its rows suffice: 54 x 5 over 8440 keys, 9/3 heads of 64, take 77 us here and 56 there (H200).
fn tiles<'a>(call: &'a Call) -> impl Iterator<Item = &'static HopperPrefillTile> + use<'a> {
    let (has_few_rows, has_masks) = (call.packed_rows() <= MAX_SHORT_ROWS, call.has_row_masks());
    HOPPER_PREFILL.iter().filter(move |tile| {
        tile.splits_keys
            && tile.takes_row_masks() == has_masks
            && !(has_few_rows && tile.logits == "softcap_alibi")
            && tile.serves(call.problem)
    })
}

/// Whether there is a kernel for the call's types, sizes and options.
pub(super) fn is_built_for(call: &Call) -> bool {
    tiles(call).next().is_some()
}

/// The kernel's tile, with all query heads of a KV head, if it can compute the call.
fn kernel_for(call: &Call) -> Option<HopperPrefill> {
    let Call { problem, device, .. } = call;
    let tile = tiles(call).min_by_key(|tile| tile.columns())?;
    if problem.batch_invariant || call.group() > LARGEST_PACK || problem.num_kv_heads > device.sms as usize {
        return None;
    }
    let prefill = HopperPrefill { tile, pack_gqa: call.group(), packs_per_kv_head: 1 };
    let fits = device.has_tensor_maps
        && tile.shared_bytes <= device.shared_memory
        && supports_tma(problem.q.dtype, problem.q.data, &prefill.query_axes(problem))
        && prefill.loads_kv(problem);
    fits.then_some(prefill)
}

/// Whether prefill would take longer.
fn is_faster(prefill: &HopperPrefill, call: &Call) -> bool {
    let (problem, rows, group) = (call.problem, call.rows(), call.group());
    // Measured with padding heads, without which there are fewer tiles.
    let tiles = (rows * padded_group(group) / prefill.tile.rows()).saturating_mul(problem.num_kv_heads as i64);
    let is_unbalanced_otherwise = 10 * tiles <= WAVE_TENTHS * i64::from(call.device.sms);
    let longest = longest_or_mean_queries(problem);
    // Prefill packs a power of two of the heads, or all as this kernel does but leaves the keys of a tile whole.
    let saves_tiles = padded_group(group) != group && longest <= prefill.queries_per_tile();
    // Prefill computes the empty half of a tile too. The average does not count: 60 x 1 and 4 x 230 queries over 4096 keys take
    // 538 us here, 416 in the fused kernel (32/8 heads, H100).
    let has_half_tiles = problem.queries.longest > 0 && 2 * longest <= prefill.queries_per_tile();
    (is_unbalanced_otherwise || saves_tiles || has_half_tiles) && has_many_keys(problem)
}

#[cfg(test)]
pub(super) mod tests {
    use super::super::LaunchPlan;
    use super::super::hopper::tests::{paged, ragged};
    use super::super::tests::{device, named_on};
    use crate::problem::KvScaleCache;
    use crate::problem::attention::{Attention, KeyStorage, Keys, PageTable, Queries};
    use crate::tensor::{DType, Tensor};

    const ROOM: [i64; 1] = [40_000_000];

    /// `seqs` sequences of `queries` queries with `heads` over pages of 16 tokens, up to 8192 keys each, with a workspace.
    pub(in super::super) fn few_queries(
        seqs: usize,
        queries: usize,
        [q_heads, kv_heads]: [usize; 2],
    ) -> Attention<'static> {
        let plain = paged(16);
        let KeyStorage::Paged(table) = plain.keys.storage else { unreachable!() };
        let storage = KeyStorage::Paged(PageTable { max_pages: 512, ..table });
        Attention {
            keys: Keys { storage, ..plain.keys },
            workspace: Some(Tensor::dense(DType::U8, std::ptr::without_provenance_mut(1 << 20), &ROOM)),
            num_rows: seqs * queries,
            max_seqs: seqs,
            num_q_heads: q_heads,
            num_kv_heads: kv_heads,
            ..plain
        }
    }

    fn first_kernel(problem: &Attention) -> &'static str {
        named_on(problem, &device(true))[0].0
    }

    #[test]
    fn few_queries_over_many_keys_take_the_kernel() {
        let split = "hopper_split_kv_bf16_128_split_kv_paged_none";
        let average = few_queries(128, 16, [32, 8]);
        assert_ne!(first_kernel(&average), split);
        let half_empty = Attention { queries: Queries { longest: 16, ..average.queries }, ..average };
        for problem in [
            few_queries(16, 5, [28, 4]),
            few_queries(64, 4, [28, 4]),
            few_queries(1, 5, [32, 8]),
            few_queries(4, 32, [32, 8]),
            few_queries(16, 32, [32, 8]),
            // Many tiles, but prefill would have seven times as many, or leave the keys of as many whole.
            few_queries(64, 16, [28, 4]),
            few_queries(64, 8, [48, 4]),
            // Prefill's tiles would be half empty.
            half_empty,
        ] {
            assert_eq!(first_kernel(&problem), split);
            let odd = Attention { head_dim: 72, value_dim: 104, ..problem };
            assert_eq!(first_kernel(&odd), split.replace("paged", "contiguous"));
        }
        let contiguous = Attention { keys: ragged().keys, k: ragged().k, v: ragged().v, ..few_queries(2, 5, [12, 2]) };
        assert_eq!(first_kernel(&contiguous), "hopper_split_kv_bf16_128_split_kv_contiguous_none");
    }

    #[test]
    fn eight_bit_pages_take_a_kernel_of_their_own() {
        let codes = Attention { kv_dtype: DType::F8E4M3FN, ..few_queries(16, 5, [28, 4]) };
        assert_eq!(first_kernel(&codes), "hopper_split_kv_8bit_128_8bit_split_kv");
        let scaled =
            Attention { scale_cache: Some(KvScaleCache { k: codes.k, v: codes.v }), kv_dtype: DType::I8, ..codes };
        assert_eq!(first_kernel(&scaled), "hopper_split_kv_token_scales_128_token_scales_split_kv");
        let mut capped = codes;
        capped.score.softcap = 30.0;
        let odd = Attention { head_dim: 72, value_dim: 72, ..codes };
        for problem in [capped, odd] {
            assert!(!first_kernel(&problem).starts_with("hopper_split_kv"));
        }
    }

    /// The grids of a call's launches.
    fn grids(problem: &Attention) -> Vec<[u32; 3]> {
        let plan = LaunchPlan::on(problem, None, device(true)).expect("the sizes are allowed");
        plan.0.list.iter().map(|launch| launch.config.grid).collect()
    }

    #[test]
    fn as_many_ctas_combine_as_run_at_a_time() {
        // A CTA has 8 rows of 128 columns at a time: 35 and 128 rows find room for three CTAs per split record.
        assert_eq!(grids(&few_queries(16, 5, [28, 4])), [[4, 33, 1], [4, 32, 3]]);
        assert_eq!(grids(&few_queries(4, 32, [32, 8])), [[8, 16, 1], [8, 15, 3]]);
    }

    #[test]
    fn tiles_with_many_partials_have_a_cta_per_row() {
        // 20 rows, for which the 15 records of the only tile have two CTAs each.
        let one_sequence = few_queries(1, 5, [32, 8]);
        assert_eq!(grids(&one_sequence), [[8, 16, 1], [8, 15, 2]]);
        let second_kernel = |problem: &Attention| {
            LaunchPlan::on(problem, None, device(true)).expect("the sizes are allowed").0.list[1].kernel
        };
        assert_eq!(second_kernel(&one_sequence), "combine_many");
        assert_eq!(second_kernel(&few_queries(2, 5, [32, 8])), "combine");
    }

    #[test]
    fn keys_that_are_too_few_to_split_need_no_workspace() {
        let plain = few_queries(8, 3, [32, 8]);
        let KeyStorage::Paged(table) = plain.keys.storage else { unreachable!() };
        let keys = |max_pages| Keys { storage: KeyStorage::Paged(PageTable { max_pages, ..table }), ..plain.keys };
        // With 128 columns they have tiny tiles.
        let (head_dim, value_dim) = (120, 120);
        let few = Attention { workspace: None, keys: keys(32), head_dim, value_dim, ..plain };
        assert_eq!(
            first_kernel(&Attention { head_dim: 128, value_dim: 128, ..few }),
            "hopper_prefill_bf16_128_tiny_paged_none"
        );
        assert!(first_kernel(&few).starts_with("hopper_split_kv_bf16_128_split_kv_"));
        assert_eq!(grids(&few), [[8, 8, 1]]);
        assert!(!first_kernel(&Attention { keys: keys(64), ..few }).starts_with("hopper_split_kv"));
        let several_tiles = Attention { workspace: None, keys: keys(32), ..few_queries(8, 64, [32, 8]) };
        assert!(!first_kernel(&several_tiles).starts_with("hopper_split_kv"));
    }

    #[test]
    fn other_calls_are_left_to_other_strategies() {
        let plain = few_queries(16, 5, [28, 4]);
        let long = few_queries(64, 16, [28, 4]);
        let mut capped = few_queries(16, 2, [28, 4]);
        capped.score.softcap = 30.0;
        for problem in [
            // Decode, many queries, few keys per query.
            few_queries(64, 1, [32, 8]),
            few_queries(16, 64, [32, 8]),
            few_queries(16, 300, [32, 8]),
            few_queries(16, 128, [28, 4]),
            few_queries(64, 32, [28, 4]),
            Attention { queries: Queries { longest: 500, ..long.queries }, ..long },
            Attention { queries: Queries { longest: i64::MAX as usize, ..long.queries }, ..long },
            few_queries(1, 2000, [4, 1]),
            few_queries(16, 5, [128, 1]),
            Attention { workspace: None, ..plain },
            Attention { batch_invariant: true, ..plain },
            capped,
        ] {
            assert!(!first_kernel(&problem).starts_with("hopper_split_kv"));
        }
        assert!(!named_on(&plain, &device(false))[0].0.starts_with("hopper_split_kv"));
    }
}
