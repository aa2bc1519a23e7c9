//! The kernels for Hopper past 128 columns: which calls they take and their argument.
//!
//! Four launches: a plan and what is known of each query row; dK and dV; dQ; zeros where no sequence is. Each element of
//! the gradients is the sum of one CTA, so the workspace has no sums.

use super::hopper::{Boxes, Layout, THREADS, in_order, lazy, logits_transform, most_tiles};
use super::{Launch, Parameter};
use crate::cuda::device::Device;
use crate::cuda::launch::Shape;
use crate::cuda::params::hopper_bwd::HopperWideBackwardParams;
use crate::cuda::tiles::{HOPPER_BWD_WIDE, HopperBwdWideTile as Tile};
use crate::cuda::variants;
use crate::error::Result;
use crate::problem::flash_attn_varlen_bwd::FlashAttnVarlenBwd;

const MAIN: &str = "hopper_bwd_wide";

/// Columns up to which these kernels would mostly multiply zeros.
const NARROW: usize = 128;

/// Rows and columns of a box, of whichever tensor; also the keys of a tile, and of a step.
const BOX: [i64; 2] = [64, 64];

/// Queries of a tile of dQ, and those of a step of dK and dV.
const QUERIES: u32 = 128;
const STEP_QUERIES: u32 = 64;

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
            && layout.serves(problem, device, STEP_QUERIES, &boxes(problem))
            && layout.serves(problem, device, STEP_QUERIES, &[dq_boxes(problem)]);
        fits.then_some(wide)
    }

    /// The launches, in order.
    fn launches<'p>(self, problem: &'p FlashAttnVarlenBwd, device: Device) -> Result<Vec<Launch<'p>>> {
        let dtype = variants::dtype_value(problem.forward.q.dtype);
        let [prepare, finish] = self.layout.sides(problem);
        let main = |tile: &Tile, ctas: i64| {
            let grid = [ctas.clamp(1, i64::from(device.sms)) as u32, 1, 1];
            Shape { grid, threads: THREADS, shared_memory: tile.shared_bytes }
        };
        let of_main = self.tiles.map(|tile| [dtype, tile.gradient, tile.head_dim, tile.logits]);
        let [keys, queries] = self.tiles;
        let blocks = self.layout.num_turns * problem.forward.num_q_heads;
        // What comes after knows nothing of columns where there are no sums.
        let plan = if keys.dim > 192 { "256" } else { "192" };
        let steps = [
            ("hopper_bwd_prepare", prepare, &[dtype, plan][..]),
            (MAIN, main(keys, most_tiles(problem, BOX[0])), &of_main[0]),
            (MAIN, main(queries, blocks as i64), &of_main[1]),
            ("hopper_bwd_finish", finish, &[dtype, "64"]),
        ];
        let params = lazy(move || {
            Ok(HopperWideBackwardParams {
                common: self.layout.params(problem, &device, &boxes(problem))?,
                dq: dq_boxes(problem).map(problem)?,
            })
        });
        in_order(problem, &steps, &Parameter::Wide(params))
    }
}

fn boxes(problem: &FlashAttnVarlenBwd) -> [Boxes; 6] {
    Boxes::of_problem(problem, [BOX[0]; 3], BOX[1])
}

fn dq_boxes(problem: &FlashAttnVarlenBwd) -> Boxes {
    Boxes::of_tensor(&problem.dq, BOX)
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
        assert!(Wide::of(&capped, &device(true)).is_none());
        assert!(Wide::of(&gradients(128), &device(true)).is_none());
        let mut none = gradients(192);
        none.workspace = None;
        assert!(Wide::of(&none, &device(true)).is_none());
    }
}
