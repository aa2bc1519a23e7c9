//! Few queries per sequence over many keys, on every GPU: where prefill would leave most SMs idle, because a tile's keys are one
//! CTA's, all sequences take a kernel whose keys are divided between CTAs (split-KV).

use super::hopper_split_kv::{self, has_many_keys, keys_per_slot};
use super::split_times::{Times, parts, tiles};
use super::{Call, Launches, MAX_SHORT_ROWS, decode, row_masks};
use crate::error::Result;
use crate::problem::attention::Attention;

/// Strategy: one launch for all sequences, of any length, of a call that a kernel with split keys computes in less time than prefill.
pub(super) fn launches<'c>(call: &Call<'c>) -> Result<Option<Launches<'c>>> {
    let problem = call.problem;
    if problem.batch_invariant || !has_many_keys(problem) {
        return Ok(None);
    }
    let hopper = call.hopper_prefill();
    if hopper.is_some() && hopper_split_kv::is_built_for(call) {
        return Ok(None);
    }
    let Times { decode, row_masks, most } = Times::of(call, hopper)?;
    if row_masks.is_some_and(|row_masks| row_masks < decode.min(most))
        && let Some(launches) = row_masks::launches_with_split_keys(call)?
    {
        return Ok(Some(launches));
    }
    if decode <= most { decode::launches_with_split_keys(call) } else { Ok(None) }
}

/// Tiles of decode per query from which on few sequences are faster by Hopper's split keys than by clusters: 1 x 2k keys take 13.8 us
/// instead of 17.9 with 48/1 heads, and 13.4 instead of 12.4 with 32/1 (H200).
const LARGE_GROUP_TILES: i64 = 3;

/// Tiles of all sequences from which on two per query are, too, and keys per sequence of either, at least. Fewer keys are only where
/// their tiles of decode are slowest ([`least_keys`]).
const SEVERAL_TILES: i64 = 8;
const LARGE_GROUP_KEYS: i64 = 2048;
const LEAST_KEYS: i64 = 512;

/// Keys per sequence from which on larger tiles are faster than two of decode per query (H200): 1.1 to 1.5 times over 8 bits and at D 64
/// and 256 in 16 bits, 1.0 to 1.16 at D 128. Over caches with scales they are so only in some calls.
fn least_keys(problem: &Attention) -> Option<i64> {
    let is_fast = problem.kv_dtype.size() == 2 && (65..=128).contains(&problem.head_dim.max(problem.value_dim));
    problem.scale_cache.is_none().then_some(if is_fast { LARGE_GROUP_KEYS } else { LEAST_KEYS })
}

/// Strategy: calls of short sequences in which one query has the rows of several tiles of decode, because a KV head has more than 16
/// query heads. Each tile would read the keys; larger tiles read them once.
pub(super) fn launches_of_large_groups<'c>(call: &Call<'c>) -> Result<Option<Launches<'c>>> {
    let Call { problem, device, .. } = call;
    if call.group() <= MAX_SHORT_ROWS || !decode::are_short(call) || problem.batch_invariant {
        return Ok(None);
    }
    let (tiles, keys) = (tiles(call, call.decode.rows(), call.group()), keys_per_slot(problem));
    let are_many = tiles > i64::from(device.sms);
    let are_large = parts(call.group(), call.decode.rows()) >= LARGE_GROUP_TILES && keys >= LARGE_GROUP_KEYS;
    let are_several = tiles >= SEVERAL_TILES && least_keys(problem).is_some_and(|least| keys >= least);
    if (are_many || are_large || are_several)
        && let Some(launches) = hopper_split_kv::launches(call)?
    {
        return Ok(Some(launches));
    }
    if !are_many {
        return Ok(None);
    }
    let times = Times::of(call, call.hopper_prefill())?;
    let has_faster_tiles = times.row_masks.is_some_and(|row_masks| row_masks < times.decode);
    if has_faster_tiles { row_masks::launches_with_split_keys(call) } else { Ok(None) }
}

#[cfg(test)]
mod tests {
    use super::super::hopper_split_kv::tests::few_queries;
    use super::super::tests::{device, named_on};
    use super::*;
    use crate::cuda::device::Device;
    use crate::problem::KvScaleCache;
    use crate::problem::attention::{KeyStorage, Keys, PageTable, Queries, Score};
    use crate::tensor::{DType, Tensor};

    const ALL: (i32, i32) = (1, i32::MAX);

    /// The launch for all sequences, or that for the long ones.
    fn first(problem: &Attention, device: &Device) -> (&'static str, (i32, i32)) {
        let (name, min, max) = named_on(problem, device)[0];
        (name, (min, max))
    }

    fn older() -> Device {
        Device { capability: 80, ..device(false) }
    }

    /// `few_queries` over pages that TMA does not load, of another type, with scales of rows.
    fn scaled(seqs: usize, queries: usize, head_dim: usize) -> Attention<'static> {
        let plain = few_queries(seqs, queries, [32, 8]);
        let KeyStorage::Paged(table) = plain.keys.storage else { unreachable!() };
        let storage = KeyStorage::Paged(PageTable { page_size: 20, ..table });
        let scale_cache = Some(KvScaleCache { k: plain.k, v: plain.v });
        Attention {
            keys: Keys { storage, ..plain.keys },
            kv_dtype: DType::I8,
            scale_cache,
            head_dim,
            value_dim: head_dim,
            ..plain
        }
    }

    #[test]
    fn the_number_of_tiles_chooses_the_kernel() {
        let (decode, row_masks) = ("attention_bf16_128_decode_8warps_none", "attention_row_masks_bf16_128");
        for (seqs, queries, heads, expected) in [
            (1, 5, [32, 8], decode),
            (8, 5, [32, 8], decode),
            // Several tiles of decode per sequence would read its keys as often.
            (16, 5, [28, 4], row_masks),
            (64, 4, [28, 4], row_masks),
            (4, 32, [32, 8], row_masks),
            (1, 256, [32, 8], row_masks),
        ] {
            assert_eq!(first(&few_queries(seqs, queries, heads), &older()), (expected, ALL), "{seqs} {queries}");
        }
        // Tiles of prefill keep all SMs busy.
        for (seqs, queries) in [(4, 128), (64, 32)] {
            let (name, _) = first(&few_queries(seqs, queries, [32, 8]), &older());
            assert_eq!(name, "attention_bf16_128_prefill_none", "{seqs} {queries}");
        }
    }

    #[test]
    fn every_type_and_head_dimension_is_split() {
        let plain = few_queries(4, 8, [32, 8]);
        for (dtype, kv_dtype) in [
            (DType::F32, DType::F32),
            (DType::F16, DType::F16),
            (DType::F16, DType::F8E5M2),
            (DType::F8E4M3FN, DType::F8E4M3FN),
        ] {
            for dim in [8, 64, 96, 192, 256, 512] {
                let q = Tensor { dtype, ..plain.q };
                let problem = Attention { q, kv_dtype, head_dim: dim, value_dim: dim, ..plain };
                let (name, queries) = first(&problem, &older());
                assert!(queries == ALL && (name.contains("decode") || name.contains("masks")), "{name}");
            }
        }
        for dim in [64, 96, 256, 512] {
            let (name, queries) = first(&scaled(4, 8, dim), &device(true));
            assert!(queries == ALL && name.ends_with("decode"), "{name}");
        }
    }

    #[test]
    fn on_hopper_it_takes_what_no_kernel_of_its_own_does() {
        let hopper = device(true);
        let plain = few_queries(4, 8, [32, 8]);
        assert_eq!(first(&plain, &hopper).0, "hopper_split_kv_bf16_128_split_kv_paged_none");
        let capped = |seqs, queries| {
            let plain = few_queries(seqs, queries, [32, 8]);
            Attention { score: Score { softcap: 30.0, ..plain.score }, ..plain }
        };
        assert_eq!(first(&capped(4, 8), &hopper).0, "hopper_split_kv_bf16_128_split_kv_paged_softcap_alibi");
        // Half-empty tiles whose scores are transformed.
        assert_eq!(first(&capped(4, 4), &hopper), ("attention_bf16_128_decode_8warps_softcap_alibi", ALL));
        // A wave of Hopper's prefill is faster.
        assert!(first(&capped(16, 64), &hopper).0.starts_with("hopper_prefill"));
        let wide = Attention { head_dim: 512, value_dim: 512, ..plain };
        assert_eq!(first(&wide, &hopper), ("attention_row_masks_bf16_512", ALL));
    }

    #[test]
    fn groups_of_more_heads_than_decode_has_rows_take_larger_tiles() {
        let (split, row_masks) = ("hopper_split_kv_bf16_128_split_kv_paged_none", "attention_row_masks_bf16_128");
        let of = |seqs, heads| few_queries(seqs, 1, heads);
        for (problem, on_hopper, elsewhere) in [
            (of(64, [48, 1]), split, row_masks),
            (of(1, [48, 1]), split, "attention_bf16_128_decode_8warps_none"),
            (of(4, [32, 1]), split, "attention_bf16_128_decode_8warps_none"),
            (of(8, [64, 2]), split, "attention_bf16_128_decode_8warps_none"),
            (of(128, [32, 1]), split, row_masks),
            (of(64, [128, 2]), split, row_masks),
            // Hopper's prefill would have as many tiles.
            (of(256, [128, 2]), row_masks, row_masks),
            (of(64, [96, 1]), row_masks, row_masks),
        ] {
            assert_eq!(first(&problem, &device(true)), (on_hopper, ALL), "{}", problem.num_q_heads);
            assert_eq!(first(&problem, &older()), (elsewhere, ALL), "{}", problem.num_q_heads);
        }
        for problem in [
            of(1, [32, 1]),
            of(64, [16, 1]),
            Attention { q: Tensor { dtype: DType::F32, ..of(1, [8, 1]).q }, kv_dtype: DType::F32, ..of(64, [48, 1]) },
        ] {
            let (name, _) = first(&problem, &device(true));
            assert!(name.contains("decode"), "{name}");
        }
        let invariant = Attention { batch_invariant: true, ..of(64, [48, 1]) };
        assert!(named_on(&invariant, &device(true)).iter().all(|(name, ..)| ![split, row_masks].contains(name)));
    }

    #[test]
    fn other_calls_are_left_to_other_strategies() {
        let plain = few_queries(4, 32, [32, 8]);
        let KeyStorage::Paged(table) = plain.keys.storage else { unreachable!() };
        let few_keys = Keys { storage: KeyStorage::Paged(PageTable { max_pages: 15, ..table }), ..plain.keys };
        for problem in [
            Attention { workspace: None, ..plain },
            Attention { batch_invariant: true, ..plain },
            Attention { keys: few_keys, ..plain },
            Attention { queries: Queries { longest: i64::MAX as usize, ..plain.queries }, num_rows: 20_000, ..plain },
        ] {
            assert_eq!(first(&problem, &older()), ("attention_bf16_128_prefill_none", (5, i32::MAX)));
        }
    }
}
