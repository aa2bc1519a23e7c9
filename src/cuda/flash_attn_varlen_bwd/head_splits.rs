//! Query heads of few KV heads, split into parts that have their own tiles, dK and dV, and the launch that adds these up
//! (`hopper_bwd_combine`).

use super::{Launch, Parameter, widens_gradients};
use crate::cuda::device::Device;
use crate::cuda::enqueue::LaunchConfig;
use crate::cuda::params::hopper_bwd::{COMBINE_GRADIENTS_THREADS, CombineGradientsParams};
use crate::cuda::variants;
use crate::error::Result;
use crate::problem::flash_attn_varlen_bwd::FlashAttnVarlenBwd;
use crate::problem::workspace::head_splits;

/// Columns that a thread of `hopper_bwd_combine` adds up.
const COMBINE_COLUMNS: usize = 8;

/// dK and dV of parts of a KV head's query heads, in f32.
#[derive(Clone, Copy)]
pub(super) struct PartialGradients {
    pub(super) log2_head_splits: u32,
    pub(super) dk_bytes: usize,
    pub(super) dv_bytes: usize,
}

impl PartialGradients {
    /// No heads are split.
    pub(super) const NONE: Self = Self { log2_head_splits: 0, dk_bytes: 0, dv_bytes: 0 };

    /// Query heads are split where the tiles of all keys, `tile_keys` each, are too few for the SMs. Tiles under a causal
    /// mask have different lengths and only several waves of them keep all SMs busy. Others have about one length and are
    /// split where the last wave of the parts is fuller, by more than the parts cost: they are stored once and loaded
    /// once.
    pub(super) fn of(problem: &FlashAttnVarlenBwd, device: &Device, tile_keys: usize) -> Self {
        const WAVES: usize = 4;
        const COST: f64 = 1.02;
        let (forward, sms) = (&problem.forward, device.sms as usize);
        let tiles = problem.num_keys.div_ceil(tile_keys).saturating_mul(forward.num_kv_heads);
        let splits = head_splits(forward.num_q_heads as i64, forward.num_kv_heads as i64) as usize;
        if splits == 1 || tiles >= WAVES * sms {
            return Self::NONE;
        }
        let is_bounded = |window: i64| (0..i64::from(i32::MAX)).contains(&window);
        let is_triangular = is_bounded(forward.score.window_left) != is_bounded(forward.score.window_right);
        let busy_share = |tiles: usize| tiles as f64 / (tiles.div_ceil(sms) * sms) as f64;
        if !is_triangular && busy_share(tiles * splits) < COST * busy_share(tiles) {
            return Self::NONE;
        }
        let column_bytes = size_of::<f32>() * problem.num_keys * forward.num_kv_heads * splits;
        Self {
            log2_head_splits: splits.ilog2(),
            dk_bytes: column_bytes * forward.head_dim,
            dv_bytes: column_bytes * forward.value_dim,
        }
    }
}

/// The launch that adds up dK and dV of the parts, at these addresses; `None` if no heads are split.
pub(super) fn combine<'p>(
    problem: &FlashAttnVarlenBwd,
    log2_head_splits: u32,
    [partial_dk, partial_dv]: [*mut u8; 2],
) -> Result<Option<Launch<'p>>> {
    const KERNEL: &str = "hopper_bwd_combine";
    if log2_head_splits == 0 {
        return Ok(None);
    }
    let forward = &problem.forward;
    let head_chunks = [forward.head_dim, forward.value_dim].map(|columns| columns / COMBINE_COLUMNS);
    let [dk_chunks, dv_chunks] = head_chunks.map(|chunks| problem.num_keys * forward.num_kv_heads * chunks);
    let params = CombineGradientsParams {
        partial_dk: partial_dk.cast(),
        partial_dv: partial_dv.cast(),
        dk: problem.dk.data.cast(),
        dv: problem.dv.data.cast(),
        dk_chunks: dk_chunks as i64,
        dv_chunks: dv_chunks as i64,
        dk_head_chunks: head_chunks[0] as i32,
        dv_head_chunks: head_chunks[1] as i32,
        log2_head_splits: log2_head_splits as i32,
        widens_gradients: i32::from(widens_gradients(problem)),
    };
    let ctas = (dk_chunks + dv_chunks).div_ceil(COMBINE_GRADIENTS_THREADS as usize);
    let config = LaunchConfig { grid: [ctas as u32, 1, 1], threads: COMBINE_GRADIENTS_THREADS, shared_memory: 0 };
    let variant = variants::find(KERNEL, &[variants::dtype_value(forward.q.dtype)])?;
    Ok(Some(Launch::new(KERNEL, variant, config, Parameter::CombineGradients(params))))
}
