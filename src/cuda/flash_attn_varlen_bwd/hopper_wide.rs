//! The kernels for Hopper past 128 columns: which calls they take and their argument.
//!
//! Four launches: a plan and what is known of each query row; dK and dV; dQ; zeros where no sequence is. Each element of
//! the gradients is the sum of one CTA, so the workspace has no sums.

use super::hopper::{Boxes, Layout, THREADS, in_order, lazy, logits_transform, most_tiles};
use super::{Launch, Parameter};
use crate::cuda::device::Device;
use crate::cuda::enqueue::LaunchConfig;
use crate::cuda::params::hopper_bwd::HopperWideBackwardParams;
use crate::cuda::tiles::{HOPPER_BWD_WIDE, HopperBwdWideTile as Tile};
use crate::cuda::variants;
use crate::error::Result;
use crate::problem::flash_attn_varlen_bwd::FlashAttnVarlenBwd;

const MAIN: &str = "hopper_bwd_wide";

/// Columns up to which these kernels would mostly multiply zeros.
const NARROW: usize = 128;

/// Keys of a tile of dK and dV, and queries of a tile of dQ.
const KEYS: i64 = 64;
const QUERIES: u32 = 128;

/// Columns of a box of a tensor map, and rows of the boxes of what a CTA holds.
const BOX_COLUMNS: i64 = 64;
const HELD_ROWS: i64 = 64;

/// How the kernels take a problem that they can take.
struct Wide {
    /// Of dK and dV, and of dQ.
    tiles: [&'static Tile; 2],
    layout: Layout,
}

/// Takes what the kernels are built for.
pub(super) fn launches<'p>(problem: &'p FlashAttnVarlenBwd, device: Device) -> Result<Option<Vec<Launch<'p>>>> {
    Wide::of(problem, &device).map(|wide| wide.launches(problem, device)).transpose()
}

impl Wide {
    /// `None` where the portable kernels have to do it.
    fn of(problem: &FlashAttnVarlenBwd, device: &Device) -> Option<Self> {
        let forward = &problem.forward;
        if forward.head_dim.max(forward.value_dim) <= NARROW {
            return None;
        }
        let logits = logits_transform(forward)?;
        let tile_of = |gradient| {
            HOPPER_BWD_WIDE.iter().find(|tile| {
                let fits = tile.dim as usize >= forward.head_dim && tile.value_dim as usize >= forward.value_dim;
                tile.gradient == gradient && tile.logits == logits && fits
            })
        };
        let layout = Layout::of(problem, QUERIES, 0)?;
        let wide = Self { tiles: [tile_of("dkdv")?, tile_of("dq")?], layout };
        let blocks = layout.num_turns.saturating_mul(forward.num_q_heads) as i64;
        let fits = blocks < i64::from(i32::MAX - 0xffff)
            && layout.serves(problem, device, wide.tiles[0].step_rows, &wide.boxes_of_dkdv(problem))
            && layout.serves(problem, device, wide.tiles[0].step_rows, &wide.boxes_of_dq(problem));
        fits.then_some(wide)
    }

    /// The launches, in order.
    fn launches<'p>(self, problem: &'p FlashAttnVarlenBwd, device: Device) -> Result<Vec<Launch<'p>>> {
        let dtype = variants::dtype_value(problem.forward.q.dtype);
        let [prepare, finish] = self.layout.sides(problem);
        let main = |tile: &Tile, ctas: i64| {
            let grid = [ctas.clamp(1, i64::from(device.sms)) as u32, 1, 1];
            LaunchConfig { grid, threads: THREADS, shared_memory: tile.shared_bytes }
        };
        let of_main = self.tiles.map(|tile| [dtype, tile.gradient, tile.head_dim, tile.logits]);
        let [keys, queries] = self.tiles;
        let blocks = self.layout.num_turns * problem.forward.num_q_heads;
        // What comes after knows nothing of columns where there are no sums.
        let plan = if keys.dim > 192 { "256" } else { "192" };
        let steps = [
            ("hopper_bwd_prepare", prepare, &[dtype, plan][..]),
            (MAIN, main(keys, most_tiles(problem, KEYS)), &of_main[0]),
            (MAIN, main(queries, blocks as i64), &of_main[1]),
            ("hopper_bwd_finish", finish, &[dtype, "64"]),
        ];
        let params = lazy(move || {
            let [q, k, v, dout] = self.boxes_of_dq(problem);
            Ok(HopperWideBackwardParams {
                common: self.layout.params(problem, &device, &self.boxes_of_dkdv(problem))?,
                q: q.map(problem)?,
                k: k.map(problem)?,
                v: v.map(problem)?,
                dout: dout.map(problem)?,
            })
        });
        in_order(problem, &steps, &Parameter::Wide(params))
    }

    /// Boxes of q, k, v, dout, dk, dv as the kernel of dK and dV copies them: q and dout by steps.
    fn boxes_of_dkdv(&self, problem: &FlashAttnVarlenBwd) -> [Boxes; 6] {
        Boxes::of_problem(problem, [i64::from(self.tiles[0].step_rows), HELD_ROWS, HELD_ROWS], BOX_COLUMNS)
    }

    /// Boxes of q, k, v, dout as the kernel of dQ copies them: k and v by steps.
    fn boxes_of_dq(&self, problem: &FlashAttnVarlenBwd) -> [Boxes; 4] {
        let rows = [HELD_ROWS, i64::from(self.tiles[1].step_rows), HELD_ROWS];
        let [q, k, v, dout, ..] = Boxes::of_problem(problem, rows, BOX_COLUMNS);
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
            assert!(Wide::of(&gradients(head_dim), &device(true)).is_some(), "{head_dim}");
        }
        assert!(Wide::of(&gradients(256), &device(false)).is_none());
        let mut capped = gradients(256);
        capped.forward.score.softcap = 1.0;
        assert!(Wide::of(&capped, &device(true)).is_some());
        assert!(Wide::of(&gradients(128), &device(true)).is_none());
        let mut none = gradients(192);
        none.workspace = None;
        assert!(Wide::of(&none, &device(true)).is_none());
    }
}
