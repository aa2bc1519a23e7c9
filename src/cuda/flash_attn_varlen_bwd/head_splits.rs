//! Query heads of few KV heads, split into parts that have their own tiles, dK and dV, and the launch that adds these up
//! (`hopper_bwd_combine`).

use super::{Launch, Parameter, widens_gradients};
use crate::cuda::device::Device;
use crate::cuda::enqueue::LaunchConfig;
use crate::cuda::params::hopper_bwd::{COMBINE_GRADIENTS_THREADS, CombineGradientsParams};
use crate::cuda::variants;
use crate::error::Result;
use crate::problem::attention::Attention;
use crate::problem::flash_attn_varlen_bwd::FlashAttnVarlenBwd;
use crate::problem::workspace::{can_split, max_head_splits, most_splits};

/// Columns that a thread of `hopper_bwd_combine` adds up.
const COMBINE_COLUMNS: usize = 8;

/// dK and dV of parts of a KV head's query heads, in f32.
#[derive(Clone, Copy)]
pub(super) struct PartialGradients {
    /// Parts of a KV head, 1 where no heads are split.
    pub(super) head_splits: usize,
    pub(super) dk_bytes: usize,
    pub(super) dv_bytes: usize,
}

impl PartialGradients {
    /// No heads are split.
    pub(super) const NONE: Self = Self { head_splits: 1, dk_bytes: 0, dv_bytes: 0 };

    /// Those of the parts in which the call's query heads are best computed, then those of fewer parts, which need less memory, down to
    /// [`NONE`](Self::NONE). `tile` is its keys, and the queries of a head per step of its loop.
    pub(super) fn candidates(
        problem: &FlashAttnVarlenBwd,
        device: &Device,
        tile: [usize; 2],
    ) -> impl Iterator<Item = Self> {
        let best = num_splits(&problem.forward, problem.num_keys, device.sms as usize, tile);
        let heads = problem.forward.num_q_heads / problem.forward.num_kv_heads;
        std::iter::successors(Some(best), move |splits| (*splits > 1).then(|| most_splits(heads, *splits - 1)))
            .map(|splits| Self::of(problem, splits))
    }

    fn of(problem: &FlashAttnVarlenBwd, splits: usize) -> Self {
        if splits == 1 {
            return Self::NONE;
        }
        let forward = &problem.forward;
        let column_bytes = size_of::<f32>() * problem.num_keys * forward.num_kv_heads * splits;
        Self {
            head_splits: splits,
            dk_bytes: column_bytes * forward.head_dim,
            dv_bytes: column_bytes * forward.value_dim,
        }
    }
}

/// The parts of each KV head's query heads. More parts fill the SMs better, and each tile has fewer steps for the time in
/// which it starts and stores its gradients.
fn num_splits(forward: &Attention, num_keys: usize, sms: usize, [tile_keys, step_queries]: [usize; 2]) -> usize {
    /// Tokens of a sequence, on average, up to which more parts than fill the SMs cost more than they save.
    const SHORT: usize = 2304;
    /// Twice the tiles per SM of a causal call that are enough for short sequences.
    const ENOUGH_TILES: usize = 7;
    /// Heads in a part of longer ones, and tiles per SM, times query heads per KV head, from which on no part has fewer.
    const HEADS: usize = 4;
    const ENOUGH_HEADS: usize = 23;
    /// Steps of a tile that are worth its start and end.
    const STEPS: usize = 24;
    /// Steps below which a tile takes about as long as an empty one.
    const FEW_STEPS: usize = 4;
    /// By how much the share of time in which SMs have a tile has to grow where all tiles have the same length: a constant, and what it
    /// takes to add up the parts of a sequence of one token.
    const GAIN: f64 = 1.02;
    const COMBINE: f64 = 48.0;
    let heads = forward.num_q_heads / forward.num_kv_heads;
    let tiles = num_keys.div_ceil(tile_keys).saturating_mul(forward.num_kv_heads);
    let [q_heads, kv_heads] = [forward.num_q_heads, forward.num_kv_heads].map(|heads| heads as i64);
    let columns = forward.head_dim.max(forward.value_dim) as i64;
    let most = max_head_splits(q_heads, kv_heads, columns, tiles as i64) as usize;
    if most == 1 {
        return 1;
    }
    let is_bounded = |window: i64| (0..i64::from(i32::MAX)).contains(&window);
    let is_triangular = is_bounded(forward.score.window_left) != is_bounded(forward.score.window_right);
    // Where all tiles have the same length, parts of unequal size let CTAs drift apart, which then read different queries.
    let is_equal = |splits: usize| heads.is_multiple_of(splits);
    let wants_equal = !is_triangular && (2..=most).any(is_equal);
    let is_candidate = |splits: &usize| if wants_equal { is_equal(*splits) } else { can_split(heads, *splits) };
    let largest_below = |end: usize| (1..end).rev().find(is_candidate).unwrap_or(1);
    let mut splits = largest_below(most + 1);
    let mean_length = (forward.num_rows / forward.max_seqs.max(1)).max(1);
    if is_triangular {
        // The longest tile takes twice the mean, and only several waves keep all SMs busy. From some length on, what large parts read does
        // not fit into L2.
        let is_enough = |splits: usize| {
            if mean_length <= SHORT {
                2 * tiles.saturating_mul(splits) >= ENOUGH_TILES * sms
            } else {
                heads.div_ceil(splits) <= HEADS && tiles.saturating_mul(heads) >= ENOUGH_HEADS * sms
            }
        };
        while splits > 1 && is_enough(largest_below(splits)) {
            splits = largest_below(splits);
        }
    } else {
        let busy_share = |splits: usize| {
            let tiles = tiles.saturating_mul(splits).max(1);
            let mean_part = heads as f64 / splits as f64 / heads.div_ceil(splits) as f64;
            mean_part * tiles as f64 / tiles.next_multiple_of(sms) as f64
        };
        let busier = |best, splits| if busy_share(splits) > busy_share(best) { splits } else { best };
        splits = (1..=splits).rev().filter(is_candidate).reduce(busier).unwrap_or(1);
        if busy_share(splits) < (GAIN + COMBINE / mean_length as f64) * busy_share(1) {
            splits = 1;
        }
    }
    let longest = if is_triangular { 2 } else { 1 };
    let mean_steps = |splits| heads * mean_length.div_ceil(step_queries) / (longest * splits);
    // A tenth of the SMs without a tile costs less than tiles that have too few steps, and fewer tiles than SMs less than a second wave of
    // tiles that hardly have any. Where the longest tile takes twice the mean, SMs need two tiles.
    while splits > 1
        && (mean_steps(splits) < STEPS && 10 * tiles * largest_below(splits) >= 9 * longest * sms
            || mean_steps(splits) < FEW_STEPS && tiles * splits > sms)
    {
        splits = largest_below(splits);
    }
    splits
}

/// The launch that adds up dK and dV of the parts, at these addresses; `None` if no heads are split.
pub(super) fn combine<'p>(
    problem: &FlashAttnVarlenBwd,
    head_splits: usize,
    [partial_dk, partial_dv]: [*mut u8; 2],
) -> Result<Option<Launch<'p>>> {
    const KERNEL: &str = "hopper_bwd_combine";
    if head_splits == 1 {
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
        head_splits: head_splits as i32,
        widens_gradients: i32::from(widens_gradients(problem)),
    };
    let ctas = (dk_chunks + dv_chunks).div_ceil(COMBINE_GRADIENTS_THREADS as usize);
    let config = LaunchConfig { grid: [ctas as u32, 1, 1], threads: COMBINE_GRADIENTS_THREADS, shared_memory: 0 };
    let variant = variants::find(KERNEL, &[variants::dtype_value(forward.q.dtype)])?;
    Ok(Some(Launch::new(KERNEL, variant, config, Parameter::CombineGradients(params))))
}
