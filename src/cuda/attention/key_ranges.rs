//! Query rows with bounds of their keys (`k_start`, `k_end`), on every GPU. No other kernel knows of bounds.

use super::tiles::{AttentionTile, converts_fp8};
use super::{Call, Launch, Launches, Parameter, UNLIMITED, max_tiles};
use crate::cuda::device::Device;
use crate::cuda::enqueue::LaunchConfig;
use crate::cuda::params::attention::AttentionParams;
use crate::cuda::params::key_ranges::{KeyRangeParams, KeyRangeSource};
use crate::cuda::variants;
use crate::error::{Error, Result};
use crate::problem::attention::{Attention, KeyRanges};
use std::ptr::null;

impl KeyRangeSource {
    pub(in crate::cuda) fn new(ranges: &KeyRanges) -> Self {
        Self { start: ranges.start.unwrap_or(null()), end: ranges.end.unwrap_or(null()) }
    }
}

/// Takes every call with bounds: one launch for the sequences of all lengths, a CTA per tile and KV head.
pub(super) fn launches<'c>(call: &Call<'c>) -> Result<Option<Launches<'c>>> {
    let Call { problem, device, .. } = call;
    if problem.queries.key_ranges.is_none() {
        return Ok(None);
    }
    let (kernel, variant, tile) = kernel_for(problem, device)?;
    let tiles = max_tiles(call.rows() * call.group(), tile.rows(), call.seqs().min(call.rows())).max(1);
    let ctas = tiles.saturating_mul(problem.num_kv_heads as i64);
    if ctas > i64::from(i32::MAX) {
        return Err(Error::unimplemented(format!("the call takes up to {ctas} blocks; a grid has up to 2^31 - 1")));
    }
    let config = LaunchConfig { grid: [ctas as u32, 1, 1], threads: tile.threads(), shared_memory: tile.shared_bytes };
    let attention = AttentionParams { clears_padding_rows: 1, ..call.params_for(1, UNLIMITED) };
    let params = KeyRangeParams { attention, ranges: KeyRangeSource::new(&problem.queries.key_ranges) };
    let list = vec![Launch::new(kernel, variant, config, Parameter::KeyRanges(Box::new(params)))];
    Ok(Some(Launches { list, store_new_tokens: false }))
}

/// The kernel's name, the variant of the smallest sufficient head dimension, and its tile.
fn kernel_for(problem: &Attention, device: &Device) -> Result<(&'static str, usize, &'static AttentionTile)> {
    let (kernel, dtype) = match (problem.kv_dtype.size() == 1, converts_fp8(device)) {
        (false, _) => ("attention_key_ranges", variants::dtype_value(problem.kv_dtype)),
        (true, true) => ("attention_key_ranges_fp8", "fp8"),
        (true, false) => ("attention_key_ranges_fp8_sm80", "fp8_shifted"),
    };
    let built = AttentionTile::serving(problem, "prefill").filter_map(|tile| {
        let variant = variants::find(kernel, &[dtype, tile.head_dim_value]).ok()?;
        Some((kernel, variant, tile))
    });
    built.min_by_key(|(_, _, tile)| tile.head_dim).ok_or_else(|| {
        let head_dim = problem.head_dim.max(problem.value_dim);
        Error::unimplemented(format!("no kernel {kernel} is built for K of {dtype} and head dimension {head_dim}"))
    })
}

#[cfg(test)]
mod tests {
    use super::super::tests::{device, named_on, problem};
    use super::*;
    use crate::problem::attention::Queries;
    use crate::tensor::{DType, Tensor};

    /// The problem with a bound of each row.
    fn bounded(problem: &Attention<'static>) -> Attention<'static> {
        let key_ranges = KeyRanges { start: None, end: Some(std::ptr::dangling()) };
        Attention { queries: Queries { key_ranges, ..problem.queries }, ..*problem }
    }

    #[test]
    fn one_launch_takes_all_sequences_of_a_call_with_bounds() {
        for (rows, seqs) in [(1, 1), (64, 64), (5000, 7)] {
            let call = bounded(&problem(rows, seqs, 8, 96));
            for capability in [80, 90, 120] {
                let device = Device { capability, ..device(true) };
                assert_eq!(named_on(&call, &device), [("attention_key_ranges_bf16_128", 1, i32::MAX)]);
            }
        }
        assert!(named_on(&problem(64, 64, 8, 96), &device(true)).iter().all(|(name, ..)| !name.contains("ranges")));
    }

    #[test]
    fn every_dtype_and_head_dimension_finds_a_kernel() {
        let plain = problem(64, 1, 8, 64);
        for (q, kv_dtype) in [
            (DType::F32, DType::F32),
            (DType::F16, DType::F16),
            (DType::BF16, DType::BF16),
            (DType::BF16, DType::F8E5M2),
            (DType::F8E4M3FN, DType::F8E4M3FN),
        ] {
            for dim in (8..=256).step_by(8) {
                for capability in [80, 86, 89, 90] {
                    let device = Device { capability, ..device(true) };
                    let q = Tensor { dtype: q, ..plain.q };
                    let problem = Attention { q, kv_dtype, head_dim: 8, value_dim: dim, ..plain };
                    let (_, variant, tile) = kernel_for(&problem, &device).expect("there is a kernel");
                    let target = variants::VARIANTS[variant].target.parse::<u32>().expect("a number");
                    assert!(tile.head_dim as usize >= dim && target <= capability, "{tile:?}");
                    // The ranges of a tile's rows are in shared memory too.
                    assert!(tile.shared_bytes + 8 * tile.rows() as u32 <= 99 * 1024, "{tile:?}");
                }
            }
        }
    }
}
