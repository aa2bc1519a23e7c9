//! Few queries per sequence over many keys, on every GPU: where prefill would leave most SMs idle, because a tile's keys are one
//! CTA's, all sequences take a kernel whose keys are divided between CTAs (split-KV).

use super::hopper::HopperPrefill;
use super::hopper_split_kv::{self, has_many_keys};
use super::tiles::AttentionTile;
use super::{Call, Launches, decode, longest_or_mean_queries, row_masks};
use crate::error::Result;
use crate::problem::attention::Attention;

/// What a kernel takes per key of a tile, in nanoseconds on an H200 with 32/8 heads of 128, or of 512 (2026-11-30). Only ratios
/// count, and those of other head dimensions up to 256 are similar.
struct Costs {
    /// A tile of decode on one SM; and where a call has no more tiles than SMs, so that several CTAs share each: the tiles of a
    /// sequence are then split nearly alike, and their CTAs read the same keys at the same time.
    decode: [i64; 2],
    /// A tile of `attention_row_masks` on one SM, which is not built for caches with scales.
    row_masks: Option<i64>,
    /// A wave of portable prefill: a CTA per SM, or two.
    prefill: [i64; 2],
    /// A wave of Hopper's prefill.
    hopper: i64,
}

impl Costs {
    fn of(problem: &Attention) -> Self {
        let is_wide = problem.head_dim.max(problem.value_dim) > 256;
        let has_8_bit_query = problem.q.dtype.size() == 1;
        match (problem.kv_dtype.size(), problem.scale_cache.is_some()) {
            (1 | 2, false) if is_wide => Self { decode: [70; 2], row_masks: Some(100), prefill: [70, 100], hopper: 70 },
            (1, true) if is_wide => Self { decode: [80; 2], row_masks: None, prefill: [95, 130], hopper: 95 },
            (1, true) => Self { decode: [12; 2], row_masks: None, prefill: [70, 90], hopper: 24 },
            (1, false) => {
                let hopper = if has_8_bit_query { 10 } else { 16 };
                Self { decode: [10; 2], row_masks: Some(33), prefill: [50, 70], hopper }
            }
            (2, _) => Self { decode: [16, 11], row_masks: Some(28), prefill: [40, 58], hopper: 14 },
            _ if is_wide => Self { decode: [165; 2], row_masks: Some(280), prefill: [220, 440], hopper: 220 },
            _ => Self { decode: [38; 2], row_masks: Some(330), prefill: [170, 340], hopper: 170 },
        }
    }
}

/// Percent of prefill's time that a kernel with split keys takes at most.
const MAX_PERCENT: i64 = 95;

/// What a call takes per key by [`Costs`], times the number of SMs, if its sequences have as many queries as the longest one, or as
/// the average one if the caller does not say.
struct Times {
    decode: i64,
    row_masks: Option<i64>,
    /// The most that is faster than prefill.
    most: i64,
}

impl Times {
    fn of(call: &Call, hopper: Option<HopperPrefill>) -> Result<Self> {
        let (costs, sms) = (Costs::of(call.problem), i64::from(call.device.sms));
        let prefill = match hopper {
            Some(prefill) => {
                let ctas = tiles(call, prefill.tile.rows(), prefill.pack_gqa).saturating_mul(prefill.packs_per_kv_head);
                parts(ctas, sms).saturating_mul(costs.hopper)
            }
            None => match tiles(call, AttentionTile::of(call.problem, "prefill")?.rows(), call.group()) {
                ctas if ctas <= sms => costs.prefill[0],
                ctas => parts(ctas, 2 * sms).saturating_mul(costs.prefill[1]),
            },
        };
        let decode_tiles = tiles(call, call.decode.rows(), call.group());
        let row_masks = |cost: i64| -> Result<i64> {
            Ok(tiles(call, row_masks::split_tile_rows(call)?, call.group()).saturating_mul(cost))
        };
        Ok(Self {
            decode: decode_tiles.saturating_mul(costs.decode[usize::from(decode_tiles <= sms)]),
            row_masks: costs.row_masks.map(row_masks).transpose()?,
            most: prefill.saturating_mul(sms * MAX_PERCENT) / 100,
        })
    }
}

/// Strategy: one launch for all sequences, of any length, of a call that a kernel with split keys computes in less time than prefill.
pub(super) fn launches<'c>(call: &Call<'c>) -> Result<Option<Launches<'c>>> {
    let Call { problem, device, .. } = call;
    let hopper = HopperPrefill::of(problem, device);
    let is_left_to_hopper = hopper.is_some() && hopper_split_kv::is_built_for(problem);
    if problem.batch_invariant || is_left_to_hopper || !has_many_keys(problem) {
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

/// Whether `attention_row_masks` takes less time than prefill, for a call of rows with masks.
pub(super) fn divides_row_masks(call: &Call) -> Result<bool> {
    let times = Times::of(call, HopperPrefill::of(call.problem, &call.device))?;
    Ok(has_many_keys(call.problem) && times.row_masks.is_some_and(|row_masks| row_masks <= times.most))
}

/// `count / size`, rounded up.
fn parts(count: i64, size: i64) -> i64 {
    count.saturating_add(size - 1) / size
}

/// The tiles of `rows` packed rows of all KV heads, with `pack_gqa` query heads per KV head.
fn tiles(call: &Call, rows: i64, pack_gqa: i64) -> i64 {
    let packed = longest_or_mean_queries(call.problem).saturating_mul(pack_gqa);
    let sequences = call.seqs().min(call.rows()) * call.problem.num_kv_heads as i64;
    sequences.saturating_mul(parts(packed, rows))
}

#[cfg(test)]
mod tests {
    use super::super::hopper_split_kv::tests::few_queries;
    use super::super::tests::{device, named_on};
    use super::*;
    use crate::cuda::device::Device;
    use crate::problem::KvScaleCache;
    use crate::problem::attention::{KeyStorage, Keys, PageTable, Queries};
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
        let mut capped = plain;
        capped.score.softcap = 30.0;
        assert_eq!(first(&capped, &hopper), ("attention_bf16_128_decode_8warps_softcap_alibi", ALL));
        let mut many = few_queries(4, 16, [32, 8]);
        many.score.softcap = 30.0;
        assert_eq!(first(&many, &hopper), ("attention_row_masks_bf16_128", ALL));
        // A wave of Hopper's prefill is faster.
        let mut long = few_queries(16, 32, [32, 8]);
        long.score.softcap = 30.0;
        assert!(first(&long, &hopper).0.starts_with("hopper_prefill"));
        let wide = Attention { head_dim: 512, value_dim: 512, ..plain };
        assert_eq!(first(&wide, &hopper), ("attention_row_masks_bf16_512", ALL));
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
