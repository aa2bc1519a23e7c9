//! Multi-head latent attention: one KV head whose keys and values are the same rows, read once (`kernels/mla.cu`,
//! and `kernels/hopper_mla.cu` for 16-bit caches on Hopper).
//!
//! One launch serves sequences of any length. As in decode, the keys of all tiles are divided between CTAs, and the combine
//! kernel merges the partials of tiles that several CTAs computed. With `batch_invariant` no tile is split, so that the bits of
//! a row depend on its own sequence alone.

use super::split::{KvSplit, WorkUnit};
use super::tiles::transforms_logits;
use super::{Launch, Launches, Parameter, UNLIMITED, decode, max_tiles};
use crate::cuda::device::Device;
use crate::cuda::enqueue::LaunchConfig;
use crate::cuda::params::attention::AttentionParams;
use crate::cuda::tiles::{MLA, MlaTile};
use crate::cuda::variants;
use crate::error::{Error, Result};
use crate::problem::attention::Attention;
use crate::tensor::DType;
use std::f32::consts::LOG2_E;

impl MlaTile {
    /// The tile for the problem's types: Hopper's if the device is one, otherwise a large one if it has the shared memory.
    fn of(problem: &Attention, device: &Device) -> Result<&'static Self> {
        let operands = operands(problem);
        let fits = |tile: &&Self| tile.operands == operands && tile.shared_bytes <= device.shared_memory;
        let runs = |tile: &&Self| !tile.is_hopper() || device.capability == 90;
        let tiles = MLA.iter().filter(|tile| fits(tile) && runs(tile));
        tiles.max_by_key(|tile| (tile.rows, tile.is_hopper())).ok_or_else(|| {
            Error::unimplemented(format!(
                "no kernel for {operands} fits {} bytes of shared memory",
                device.shared_memory
            ))
        })
    }

    /// Whether this is the tile of `hopper_mla.cu`, whose code runs on sm_90 only.
    fn is_hopper(&self) -> bool {
        self.shape == "hopper"
    }

    /// The kernel of this tile: its name and its index in the table of variants.
    fn variant(&self, problem: &Attention) -> Result<(&'static str, usize)> {
        let logits = if has_logits_transform(problem) { "scaled" } else { "none" };
        let kernel = match (self.operands, self.shape) {
            (_, "hopper") => return Ok(("hopper_mla", variants::find("hopper_mla", &[self.operands, logits])?)),
            ("f32", _) => "mla_f32",
            (_, "large") => "mla",
            _ => "mla_small",
        };
        Ok((kernel, variants::find(kernel, &[self.operands, self.shape, logits])?))
    }
}

/// The value of the axis `operands`.
fn operands(problem: &Attention) -> &'static str {
    match (problem.q.dtype, problem.kv_dtype.size() == 1) {
        (DType::F32, _) => "f32",
        (DType::F16, false) => "f16",
        (DType::F16, true) => "f16_fp8",
        (_, false) => "bf16",
        (_, true) => "bf16_fp8",
    }
}

/// Whether the call takes the kernel with a logits transform, the only one of f32.
fn has_logits_transform(problem: &Attention) -> bool {
    problem.q.dtype == DType::F32 || transforms_logits(problem)
}

/// The launches of a call; none if there is no row.
pub(super) fn launches<'c>(problem: &Attention, device: &Device) -> Result<Launches<'c>> {
    if problem.num_rows == 0 {
        return Ok(Launches::default());
    }
    let tile = MlaTile::of(problem, device)?;
    let log2_unit = if has_logits_transform(problem) { 1.0 } else { problem.score.softmax_scale * LOG2_E };
    let unit = WorkUnit { rows: i64::from(tile.rows), chunk_keys: i64::from(tile.keys), log2_unit };
    let (rows, seqs) = (problem.num_rows as i64, problem.max_seqs as i64);
    let tiles = max_tiles(rows * problem.num_q_heads as i64, unit.rows, rows.min(seqs));
    let workspace = problem.workspace.filter(|_| !problem.batch_invariant);
    let splittable = Attention { workspace, batch_invariant: false, ..*problem };
    let split = KvSplit::of_units(&splittable, unit, tiles, UNLIMITED, i64::from(device.sms), 0);
    // These kernels convert e4m3fn as those for sm_80 do, on every device.
    let converting = Device { capability: 80, ..*device };
    let plain = AttentionParams::new(problem, &converting)?;
    let params = AttentionParams { clears_padding_rows: 1, partial: split.partial, ..plain };
    let (kernel, variant) = tile.variant(problem)?;
    let grid = [1, split.ranges as u32, 1];
    let config = LaunchConfig { grid, threads: 32 * tile.warps, shared_memory: tile.shared_bytes };
    let attend = Launch::new(kernel, variant, config, Parameter::Attention(params));
    let combine = decode::combine(problem, device, &split, &params, unit.rows)?;
    Ok(Launches { list: [Some(attend), combine].into_iter().flatten().collect(), store_new_tokens: false })
}

#[cfg(test)]
mod tests {
    use super::super::tests::{device, problem};
    use super::*;
    use crate::problem::attention::{KeyStorage, Keys};
    use crate::problem::workspace::AttentionSizes;
    use crate::tensor::Tensor;

    /// Decode of `seqs` sequences with `q_heads` query heads, in these types.
    fn latent(seqs: usize, q_heads: usize, q: DType, kv_dtype: DType) -> Attention<'static> {
        let plain = problem(seqs, seqs, q_heads, 576);
        let storage = KeyStorage::Contiguous { total: 1 << 16 };
        Attention {
            q: Tensor { dtype: q, ..plain.q },
            out: Tensor { dtype: q, ..plain.out },
            kv_dtype,
            keys: Keys { storage, ..plain.keys },
            num_kv_heads: 1,
            value_dim: 512,
            ..plain
        }
    }

    #[test]
    fn every_combination_of_types_finds_a_kernel_on_every_gpu() {
        for (q, kv, on_hopper, on_large, on_small) in [
            (DType::F16, DType::F16, "hopper_mla_f16_none", "mla_f16_large_none", "mla_small_f16_small_none"),
            (DType::BF16, DType::BF16, "hopper_mla_bf16_none", "mla_bf16_large_none", "mla_small_bf16_small_none"),
            (
                DType::BF16,
                DType::F8E4M3FN,
                "mla_bf16_fp8_large_scaled",
                "mla_bf16_fp8_large_scaled",
                "mla_small_bf16_fp8_small_scaled",
            ),
            (
                DType::F16,
                DType::F8E5M2,
                "mla_f16_fp8_large_scaled",
                "mla_f16_fp8_large_scaled",
                "mla_small_f16_fp8_small_scaled",
            ),
            (
                DType::F32,
                DType::F32,
                "mla_f32_f32_small_scaled",
                "mla_f32_f32_small_scaled",
                "mla_f32_f32_small_scaled",
            ),
        ] {
            let problem = latent(4, 128, q, kv);
            let devices = [(90, 227, on_hopper), (100, 227, on_large), (80, 163, on_large), (120, 99, on_small)];
            for (capability, kilobytes, expected) in devices {
                let device = Device { capability, shared_memory: kilobytes * 1024, ..device(false) };
                let launches = launches(&problem, &device).expect("the sizes are allowed");
                assert_eq!(variants::VARIANTS[launches.list[0].variant].name, expected);
                assert!(launches.list[0].config.shared_memory <= device.shared_memory);
            }
        }
    }

    #[test]
    fn the_wanted_workspace_has_room_for_every_work_range_and_batch_invariance_takes_none() {
        let plain = latent(2, 128, DType::BF16, DType::BF16);
        let sizes = AttentionSizes {
            num_q_heads: 128,
            num_kv_heads: 1,
            head_dim: 576,
            value_dim: 512,
            dtype: DType::BF16,
            batch_invariant: false,
        };
        let bytes = [sizes.latent_workspace().fixed];
        for start in [1 << 20, (1 << 20) + 1] {
            let workspace = Some(Tensor::dense(DType::U8, std::ptr::without_provenance_mut(start), &bytes));
            let problem = Attention { workspace, ..plain };
            let split = launches(&problem, &device(false)).expect("the sizes are allowed");
            let Parameter::Attention(params) = &split.list[0].parameter else { panic!("of attention") };
            assert_eq!((split.list.len(), params.partial.num_ranges), (2, 132));
            let invariant = Attention { batch_invariant: true, ..problem };
            let whole = launches(&invariant, &device(false)).expect("the sizes are allowed");
            let Parameter::Attention(params) = &whole.list[0].parameter else { panic!("of attention") };
            assert_eq!((whole.list.len(), params.partial.num_ranges), (1, 0));
        }
        assert_eq!(AttentionSizes { batch_invariant: true, ..sizes }.latent_workspace().fixed, 0);
    }

    #[test]
    #[expect(clippy::float_cmp, reason = "powers of two")]
    fn fp8_is_divided_by_what_the_kernel_does_not_multiply() {
        let factor = |kv| {
            let launches = launches(&latent(1, 16, DType::BF16, kv), &device(false)).expect("the sizes are allowed");
            let Parameter::Attention(params) = &launches.list[0].parameter else { panic!("of attention") };
            params.value_factor
        };
        assert_eq!([DType::BF16, DType::F8E4M3FN, DType::F8E5M2].map(factor), [1.0, 256.0, 1.0]);
    }
}
