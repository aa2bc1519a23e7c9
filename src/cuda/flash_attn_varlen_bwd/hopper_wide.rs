//! The strategy for Hopper past 128 columns: which calls it takes and its launches.
//!
//! Two launches: the plan and the row statistics, and the gradients; and one that adds up dK and dV where query heads of a KV head
//! are split. One CTA computes all of an element of dQ, so the workspace has no `dq_accum`.

use super::deferred::defer_params;
use super::head_splits::PartialGradients;
use super::hopper::{WorkspaceLayout, build_launches, logits_transform};
use super::tensor_maps::TensorMapConfig;
use super::{Launch, Parameter};
use crate::cuda::device::Device;
use crate::cuda::params::hopper_bwd::HopperWideBackwardParams;
use crate::cuda::tiles::{HOPPER_BWD_WIDE, HopperBwdWideTile};
use crate::cuda::variants;
use crate::error::Result;
use crate::problem::flash_attn_varlen_bwd::FlashAttnVarlenBwd;
use crate::problem::workspace::MAX_NARROW_COLUMNS;

/// Keys of a work tile of dK and dV, and queries of a work tile of dQ.
const KEYS: i64 = 64;
const QUERIES: u32 = 128;

/// Columns of a tensor map's box, and rows of the boxes of held operands.
const BOX_COLUMNS: i64 = 64;
const HELD_ROWS: i64 = 64;

/// The kernel configuration of a call that this strategy takes.
struct HopperWideBackward {
    /// The shapes of dK and dV, and of dQ.
    tiles: [&'static HopperBwdWideTile; 2],
    layout: WorkspaceLayout,
}

/// The launches of a call that these kernels support.
pub(super) fn launches<'p>(problem: &'p FlashAttnVarlenBwd, device: Device) -> Result<Option<Vec<Launch<'p>>>> {
    HopperWideBackward::of(problem, &device).map(|config| config.launches(problem, device)).transpose()
}

impl HopperWideBackward {
    /// `None` if these kernels do not support the call.
    fn of(problem: &FlashAttnVarlenBwd, device: &Device) -> Option<Self> {
        let forward = &problem.forward;
        // They would mostly multiply zeros.
        if forward.head_dim.max(forward.value_dim) as i64 <= MAX_NARROW_COLUMNS {
            return None;
        }
        let logits = logits_transform(forward)?;
        let tile_of = |gradient| {
            HOPPER_BWD_WIDE.iter().find(|tile| {
                let fits = tile.dim as usize >= forward.head_dim && tile.value_dim as usize >= forward.value_dim;
                tile.gradient == gradient && tile.logits == logits && fits
            })
        };
        let tiles = [tile_of("dkdv")?, tile_of("dq")?];
        let step_rows = tiles[0].step_rows;
        let config_with = |partial| {
            let layout = WorkspaceLayout::of(problem, QUERIES, 0, partial)?;
            let config = Self { tiles, layout };
            let blocks = layout.num_query_blocks.saturating_mul(forward.num_q_heads) as i64;
            let fits = blocks < i64::from(i32::MAX - 0xffff)
                && layout.supports(problem, device, step_rows, &config.dkdv_tensor_maps(problem))
                && layout.supports(problem, device, step_rows, &config.dq_tensor_maps(problem));
            fits.then_some(config)
        };
        PartialGradients::candidates(problem, device, [KEYS as usize, step_rows as usize]).find_map(config_with)
    }

    /// The launches, in order.
    fn launches<'p>(self, problem: &'p FlashAttnVarlenBwd, device: Device) -> Result<Vec<Launch<'p>>> {
        let dtype = variants::dtype_value(problem.forward.q.dtype);
        let layout = self.layout;
        let [keys, queries] = self.tiles;
        let blocks = layout.num_query_blocks * problem.forward.num_q_heads;
        let tiles = layout.max_tiles(problem, KEYS).max(blocks as i64);
        let shared_memory = keys.shared_bytes.max(queries.shared_bytes);
        let plan = if keys.dim > 192 { "256" } else { "192" };
        let prepare_values = [dtype, plan];
        let prepare = ("hopper_bwd_prepare", WorkspaceLayout::prepare_config(problem), &prepare_values[..]);
        let main_values = [dtype, keys.head_dim, keys.logits];
        let config = layout.main_config(problem, &device, tiles, shared_memory);
        let main = ("hopper_bwd_wide", config, &main_values[..]);
        let params = defer_params(move || {
            let [q, k, v, dout] = self.dq_tensor_maps(problem);
            Ok(HopperWideBackwardParams {
                common: layout.params(problem, &device, &self.dkdv_tensor_maps(problem))?,
                q: q.encode(problem)?,
                k: k.encode(problem)?,
                v: v.encode(problem)?,
                dout: dout.encode(problem)?,
            })
        });
        build_launches(problem, &layout, &[prepare], main, &Parameter::HopperWide(params))
    }

    /// Tensor maps of q, k, v, dout, dk, dv for the kernel of dK and dV, which streams q and dout.
    fn dkdv_tensor_maps(&self, problem: &FlashAttnVarlenBwd) -> [TensorMapConfig; 6] {
        TensorMapConfig::all(problem, [i64::from(self.tiles[0].step_rows), HELD_ROWS, HELD_ROWS], BOX_COLUMNS)
    }

    /// Tensor maps of q, k, v, dout for the kernel of dQ, which streams k and v.
    fn dq_tensor_maps(&self, problem: &FlashAttnVarlenBwd) -> [TensorMapConfig; 4] {
        let rows = [HELD_ROWS, i64::from(self.tiles[1].step_rows), HELD_ROWS];
        let [q, k, v, dout, ..] = TensorMapConfig::all(problem, rows, BOX_COLUMNS);
        [q, k, v, dout]
    }
}

#[cfg(test)]
mod tests {
    use super::super::hopper::tests::gradients;
    use super::*;
    use crate::cuda::attention::tests::device;

    #[test]
    fn the_kernels_take_what_they_are_built_for() {
        for head_dim in (136..=256).step_by(8) {
            assert!(HopperWideBackward::of(&gradients(head_dim), &device(true)).is_some(), "{head_dim}");
        }
        assert!(HopperWideBackward::of(&gradients(256), &device(false)).is_none());
        let mut capped = gradients(256);
        capped.forward.score.softcap = 1.0;
        assert!(HopperWideBackward::of(&capped, &device(true)).is_some());
        assert!(HopperWideBackward::of(&gradients(128), &device(true)).is_none());
        let mut no_workspace = gradients(192);
        no_workspace.workspace = None;
        assert!(HopperWideBackward::of(&no_workspace, &device(true)).is_none());
    }
}
