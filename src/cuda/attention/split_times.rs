//! What calls take the kernels that divide the keys of a tile between CTAs (split-KV), beside prefill, which does not.

use super::hopper::HopperPrefill;
use super::hopper_split_kv::has_many_keys;
use super::tiles::{AttentionTile, RowMasksTile};
use super::{Call, longest_or_mean_queries};
use crate::error::Result;
use crate::problem::attention::Attention;

/// What a kernel takes per key of a tile, in nanoseconds on an H200 with 32/8 heads of 128, or of 512 (2026-11-30). Only ratios
/// count, and those of other head dimensions up to 256 are similar.
struct Costs {
    /// A tile of decode on one SM; and where a call has no more tiles than SMs, so that several CTAs share each: the tiles of a
    /// sequence are then split nearly alike, and their CTAs read the same keys at the same time.
    decode: [i64; 2],
    /// A tile of `attention_row_masks` on one SM, which is not built for caches with scales and a bias.
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
            (2, _) if problem.score.bias.is_some() => {
                Self { decode: [16, 11], row_masks: None, prefill: [55, 74], hopper: 16 }
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
pub(super) struct Times {
    pub(super) decode: i64,
    /// `None` where there is no kernel.
    pub(super) row_masks: Option<i64>,
    /// The most that is faster than prefill.
    pub(super) most: i64,
}

impl Times {
    pub(super) fn of(call: &Call, hopper: Option<HopperPrefill>) -> Result<Self> {
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
        let row_masks = RowMasksTile::of(call.problem).zip(costs.row_masks);
        Ok(Self {
            decode: decode_tiles.saturating_mul(costs.decode[usize::from(decode_tiles <= sms)]),
            row_masks: row_masks.map(|(tile, cost)| tiles(call, tile.rows(), call.group()).saturating_mul(cost)),
            most: prefill.saturating_mul(sms * MAX_PERCENT) / 100,
        })
    }
}

/// Whether `attention_row_masks` takes less time than prefill, for a call of rows with masks.
pub(super) fn divides_row_masks(call: &Call) -> Result<bool> {
    if !has_many_keys(call.problem) {
        return Ok(false);
    }
    let times = Times::of(call, call.hopper_prefill())?;
    Ok(times.row_masks.is_some_and(|row_masks| row_masks <= times.most))
}

/// `count / size`, rounded up.
pub(super) fn parts(count: i64, size: i64) -> i64 {
    count.saturating_add(size - 1) / size
}

/// The tiles of `rows` packed rows of all KV heads, with `pack_gqa` query heads per KV head.
pub(super) fn tiles(call: &Call, rows: i64, pack_gqa: i64) -> i64 {
    let packed = longest_or_mean_queries(call.problem).saturating_mul(pack_gqa);
    let sequences = call.seqs().min(call.rows()) * call.problem.num_kv_heads as i64;
    sequences.saturating_mul(parts(packed, rows))
}
