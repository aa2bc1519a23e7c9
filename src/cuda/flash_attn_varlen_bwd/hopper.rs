//! The strategy for Hopper up to 128 columns: which calls it takes, its workspace layout and its launches; and what the
//! strategy past 128 columns shares with it.
//!
//! Two launches: the plan and the row statistics (`hopper_bwd_prepare`), and the gradients (`hopper_bwd`). A third one
//! (`hopper_bwd_combine`) adds up dK and dV where query heads of a KV head are split, and one between the two
//! (`hopper_bwd_plan_ranges`) is for bounds of the keys of each row. The gradient of a bias may take another one, before or after
//! them. All decisions follow from static sizes, strides and options.

use super::deferred::defer_params;
use super::head_splits::{self, PartialGradients};
use super::key_ranges::KeyRangeLayout;
use super::tensor_maps::TensorMapConfig;
use super::{Launch, Parameter, hopper_bias, sinks, widens_gradients};
use crate::cuda::device::Device;
use crate::cuda::enqueue::{LaunchAttributes, LaunchConfig};
use crate::cuda::padded_bias::PaddedBias;
use crate::cuda::params::attention_bwd::BackwardParams;
use crate::cuda::params::hopper_bwd::{BackwardPlan, HopperBackwardParams, SequencePlan, SequenceStart};
use crate::cuda::tensor_map::{TensorMap, supports_tma};
use crate::cuda::tiles::{HOPPER_BWD, HopperBwdTile};
use crate::cuda::variants;
use crate::error::Result;
use crate::problem::attention::{Attention, Score};
use crate::problem::flash_attn_varlen_bwd::FlashAttnVarlenBwd;
use crate::tensor::DType;
use std::ptr::null_mut;

/// Keys of a work tile and of one warpgroup, as `kernels/include/hopper_bwd/shape.cuh` has them.
const KEYS: i64 = 128;
const WARPGROUP_KEYS: i64 = 64;

/// Threads per CTA of the main kernels and of `hopper_bwd_prepare`, and compute warps of a main kernel.
pub(super) const THREADS: u32 = 384;
const PREPARE_THREADS: u32 = 256;
const COMPUTE_WARPS: usize = 8;

/// Query rows per CTA of `hopper_bwd_prepare`.
const PREPARE_ROWS: usize = 64;

/// Heads of a row tile of dQ, and rows to clear, that a compute warp finishes at a time: see
/// `kernels/include/hopper_bwd/finish.cuh`.
const FINISH_ITEM_HEADS: usize = 4;
const FINISH_ITEM_ROWS: usize = 32;

/// Rows of a row tile of `dq_accum`.
const ROW_TILE_ROWS: usize = 16;

/// Alignment of the buffers in the workspace.
const ALIGNMENT: usize = 128;

/// The kernel configuration of a call that this strategy takes.
struct HopperBackward {
    tile: &'static HopperBwdTile,
    layout: WorkspaceLayout,
    bias: Option<PaddedBias>,
}

/// Addresses of the buffers in the workspace.
#[derive(Clone, Copy)]
pub(super) struct WorkspaceLayout {
    delta: *mut u8,
    lse_log2: *mut u8,
    dq_semaphore: *mut u8,
    plan: *mut u8,
    sequences_by_tile: *mut u8,
    sequences_by_row: *mut u8,
    dq_accum: *mut u8,
    partial_dk: *mut u8,
    partial_dv: *mut u8,
    head_splits: usize,
    sequence_starts: *mut u8,
    copied_bias: *mut u8,
    key_ranges: Option<KeyRangeLayout>,
    /// Queries per query block.
    queries: u32,
    pub(super) num_query_blocks: usize,
    num_row_tiles: usize,
    /// Bytes from the start of the workspace to the end of the last buffer.
    bytes: usize,
}

/// What a call has that takes lists of its own in the workspace.
#[derive(Clone, Copy, Default)]
pub(super) struct LayoutOptions {
    /// The rows of K if query rows have bounds of their keys.
    range_keys: Option<usize>,
    /// Bytes of the copy of a bias, 0 if TMA loads it where it is.
    bias_bytes: Option<usize>,
}

impl WorkspaceLayout {
    /// Lays the buffers out from `start` on. Each sequence begins at a new row tile and at a new block of `queries`. dQ is
    /// accumulated in `columns` columns, or not in memory if that is 0.
    fn new(
        start: *mut u8,
        queries: u32,
        columns: u32,
        [rows, seqs, heads]: [usize; 3],
        partial: PartialGradients,
        options: LayoutOptions,
    ) -> Self {
        let block = queries as usize;
        let num_query_blocks = (rows + (block - 1) * seqs) / block + 1;
        let num_row_tiles = if columns == 0 { 0 } else { (rows + (ROW_TILE_ROWS - 1) * seqs).div_ceil(ROW_TILE_ROWS) };
        let mut bytes = start.align_offset(ALIGNMENT);
        let mut place = |wanted: usize| {
            let place = start.wrapping_add(bytes);
            bytes += wanted.next_multiple_of(ALIGNMENT);
            place
        };
        let row_stat_bytes = size_of::<f32>() * heads * rows;
        let row_tile_bytes = size_of::<f32>() * ROW_TILE_ROWS * columns as usize;
        Self {
            delta: place(row_stat_bytes),
            lse_log2: place(row_stat_bytes),
            dq_semaphore: place(size_of::<i32>() * heads * num_query_blocks),
            plan: place(size_of::<BackwardPlan>()),
            sequences_by_tile: place(size_of::<SequencePlan>() * seqs),
            sequences_by_row: place(size_of::<SequencePlan>() * seqs),
            dq_accum: place(row_tile_bytes * heads * num_row_tiles),
            partial_dk: place(partial.dk_bytes),
            partial_dv: place(partial.dv_bytes),
            head_splits: partial.head_splits,
            sequence_starts: options.bias_bytes.map_or(null_mut(), |_| place(size_of::<SequenceStart>() * seqs)),
            copied_bias: options.bias_bytes.map_or(null_mut(), &mut place),
            key_ranges: options
                .range_keys
                .map(|keys| KeyRangeLayout::new([rows, seqs, keys], num_query_blocks, &mut place)),
            queries,
            num_query_blocks,
            num_row_tiles,
            bytes,
        }
    }

    /// The layout in the problem's workspace, if it has one.
    pub(super) fn of(
        problem: &FlashAttnVarlenBwd,
        queries: u32,
        columns: u32,
        partial: PartialGradients,
    ) -> Option<Self> {
        let Attention { num_rows, max_seqs, num_q_heads, score, .. } = problem.forward;
        let start = problem.workspace.as_ref()?.data;
        let options = LayoutOptions {
            range_keys: (!problem.forward.queries.key_ranges.is_none()).then_some(problem.num_keys),
            bias_bytes: score.bias.map(|bias| PaddedBias::copied_bytes(&bias, bias.dtype)),
        };
        Some(Self::new(start, queries, columns, [num_rows, max_seqs, num_q_heads], partial, options))
    }

    /// Whether query heads of a KV head are split.
    fn splits_heads(&self) -> bool {
        self.head_splits > 1
    }

    /// Whether the device has tensor maps, the workspace is large enough, row counts fit the kernels' 32-bit integers, and
    /// TMA supports all `tensor_maps`.
    pub(super) fn supports(
        &self,
        problem: &FlashAttnVarlenBwd,
        device: &Device,
        queries: u32,
        tensor_maps: &[TensorMapConfig],
    ) -> bool {
        let forward = &problem.forward;
        device.has_tensor_maps
            && (fills_query_blocks(forward, queries) || has_few_tiles(forward, device))
            && forward.q.dtype.size() == 2
            && self.bytes <= problem.workspace_bytes()
            && counts_fit(problem)
            && tensor_maps.iter().all(|config| supports_tma(forward.q.dtype, config.data, &config.axes))
    }

    /// The kernels' parameter. The tensor maps are those of q, k, v, dout, dk, dv.
    pub(super) fn params(
        &self,
        problem: &FlashAttnVarlenBwd,
        device: &Device,
        [q, k, v, dout, dk, dv]: &[TensorMapConfig; 6],
    ) -> Result<HopperBackwardParams> {
        let Self {
            lse_log2,
            dq_semaphore,
            plan,
            sequences_by_tile,
            sequences_by_row,
            dq_accum,
            partial_dk,
            partial_dv,
            head_splits,
            sequence_starts,
            queries,
            num_query_blocks,
            num_row_tiles,
            ..
        } = *self;
        let has_f32_key_gradients = widens_gradients(problem) || self.splits_heads();
        let Attention { num_q_heads, num_kv_heads, .. } = problem.forward;
        let kv_group = num_q_heads / num_kv_heads;
        let mut base = BackwardParams::new(problem, device, self.delta.cast())?;
        if self.splits_heads() {
            let [part, parts] = [kv_group.div_ceil(head_splits), num_kv_heads * head_splits].map(|n| n as i64);
            base.forward = base.forward.with_packs(part, parts, 1);
            (base.dk, base.dv) = (partial_dk.cast(), partial_dv.cast());
        }
        let encode = |config: &TensorMapConfig| config.encode(problem);
        // TMA stores gradients of the operands' dtype only.
        let encode_result = |config| if has_f32_key_gradients { Ok(TensorMap::NONE) } else { encode(config) };
        Ok(HopperBackwardParams {
            base,
            q: encode(q)?,
            k: encode(k)?,
            v: encode(v)?,
            dout: encode(dout)?,
            dk: encode_result(dk)?,
            dv: encode_result(dv)?,
            lse_log2: lse_log2.cast(),
            dq_accum: dq_accum.cast(),
            dq_semaphore: dq_semaphore.cast(),
            sequences_by_tile: sequences_by_tile.cast(),
            sequences_by_row: sequences_by_row.cast(),
            plan: plan.cast(),
            sequence_starts: sequence_starts.cast(),
            num_row_tiles: num_row_tiles as i32,
            block_queries: queries as i32,
            num_query_blocks: num_query_blocks as i32,
            num_sms: device.sms as i32,
            head_splits: head_splits as i32,
            num_q_heads: num_q_heads as i32,
            kv_group: kv_group as i32,
            widens_key_gradients: i32::from(has_f32_key_gradients),
        })
    }

    /// Upper bound of the number of tiles of `keys` keys of all parts.
    pub(super) fn max_tiles(&self, problem: &FlashAttnVarlenBwd, keys: i64) -> i64 {
        max_tiles(problem, keys).saturating_mul(self.head_splits as i64)
    }

    /// The launch configuration of `hopper_bwd_prepare`.
    pub(super) fn prepare_config(problem: &FlashAttnVarlenBwd) -> LaunchConfig {
        let forward = &problem.forward;
        let ctas = 1 + forward.num_rows.div_ceil(PREPARE_ROWS) * forward.num_q_heads;
        LaunchConfig { grid: [ctas as u32, 1, 1], threads: PREPARE_THREADS, shared_memory: 0 }
    }

    /// The launch configuration of a main kernel: a CTA per tile, and enough of them for the work after the tiles.
    pub(super) fn main_config(
        &self,
        problem: &FlashAttnVarlenBwd,
        device: &Device,
        tiles: i64,
        shared_memory: u32,
    ) -> LaunchConfig {
        let row_tiles = self.num_row_tiles.saturating_mul(problem.forward.num_q_heads.div_ceil(FINISH_ITEM_HEADS));
        let rows = [problem.forward.num_rows, problem.num_keys].map(|rows| rows.div_ceil(FINISH_ITEM_ROWS));
        let finish_ctas = row_tiles.saturating_add(rows[0] + rows[1]).div_ceil(COMPUTE_WARPS);
        let ctas = tiles.max(finish_ctas as i64).clamp(1, i64::from(device.sms));
        LaunchConfig { grid: [ctas as u32, 1, 1], threads: THREADS, shared_memory }
    }
}

/// A kernel's name, launch configuration and axis values. Its parameter begins with a [`HopperBackwardParams`].
pub(super) type KernelStep<'a> = (&'static str, LaunchConfig, &'a [&'static str]);

/// The launches of `before` and `main`, followed by that of the sinks' gradients if the call has any, and that which adds up dK and
/// dV of the parts of split query heads. The main kernel starts while the last CTAs of the one before it run, and waits for their
/// end before it reads anything (`wait_for_previous_kernel`).
pub(super) fn build_launches<'p>(
    problem: &FlashAttnVarlenBwd,
    layout: &WorkspaceLayout,
    before: &[KernelStep],
    main: KernelStep,
    parameter: &Parameter<'p>,
) -> Result<Vec<Launch<'p>>> {
    let launch_of = |&(kernel, config, values): &KernelStep| {
        let variant = variants::find(kernel, values)?;
        Ok(Launch::new(kernel, variant, config, parameter.clone()))
    };
    let attributes = LaunchAttributes { starts_early: true, ..LaunchAttributes::NONE };
    let main = Launch { attributes, ..launch_of(&main)? };
    let mut launches = before.iter().map(launch_of).collect::<Result<Vec<_>>>()?;
    launches.push(main);
    launches.extend(sinks(problem, parameter.clone())?);
    let partial_gradients = [layout.partial_dk, layout.partial_dv];
    launches.extend(head_splits::combine(problem, layout.head_splits, partial_gradients)?);
    Ok(launches)
}

/// The launches of a call that these kernels support.
pub(super) fn launches<'p>(problem: &'p FlashAttnVarlenBwd, device: Device) -> Result<Option<Vec<Launch<'p>>>> {
    HopperBackward::of(problem, &device).map(|config| config.launches(problem, device)).transpose()
}

impl HopperBackward {
    /// `None` if these kernels do not support the call.
    fn of(problem: &FlashAttnVarlenBwd, device: &Device) -> Option<Self> {
        let forward = &problem.forward;
        let dim = forward.head_dim.max(forward.value_dim);
        let logits = logits_transform(forward)?;
        let tile = HOPPER_BWD.iter().find(|tile| tile.head_dim as usize >= dim && tile.logits == logits)?;
        let config_with = |partial| {
            let layout = WorkspaceLayout::of(problem, tile.queries, tile.head_dim, partial)?;
            let bias = match &forward.score.bias {
                Some(bias) => Some(hopper_bias::of(problem, bias, device, layout.copied_bias)?),
                None => None,
            };
            let config = Self { tile, layout, bias };
            layout.supports(problem, device, tile.queries, &config.tensor_maps(problem)).then_some(config)
        };
        // Programs that were exported before heads were split, and calls with more keys than queries, may have too little
        // memory for the parts.
        PartialGradients::candidates(problem, device, [KEYS as usize, tile.queries as usize]).find_map(config_with)
    }

    /// The launches, in order.
    fn launches<'p>(self, problem: &'p FlashAttnVarlenBwd, device: Device) -> Result<Vec<Launch<'p>>> {
        let (layout, loaded_bias) = (self.layout, self.bias);
        let prepare = WorkspaceLayout::prepare_config(problem);
        let tiles = layout.max_tiles(problem, KEYS);
        let main = layout.main_config(problem, &device, tiles, self.tile.shared_bytes);
        let dtype = variants::dtype_value(problem.forward.q.dtype);
        let values = [dtype, self.tile.head_dim_value, self.tile.logits];
        let mut before = vec![("hopper_bwd_prepare", prepare, &values[..2])];
        let plan_ranges = |ranges: KeyRangeLayout| ("hopper_bwd_plan_ranges", ranges.plan_config(), &values[1..2]);
        before.extend(layout.key_ranges.map(plan_ranges));
        let queries = self.tile.queries;
        let params = move || layout.params(problem, &device, &self.tensor_maps(problem));
        let parameter = match (layout.key_ranges, loaded_bias) {
            (Some(ranges), _) => {
                Parameter::HopperKeyRanges(defer_params(move || Ok(ranges.params(problem, &params()?))))
            }
            (_, Some(bias)) => {
                let make = move || hopper_bias::params(problem, &bias, queries, &params()?);
                Parameter::HopperBias(defer_params(make))
            }
            _ => Parameter::Hopper(defer_params(params)),
        };
        let row_stats = [layout.delta, layout.lse_log2].map(<*mut u8>::cast);
        let of_bias = loaded_bias.map(|bias| hopper_bias::launches(problem, &bias, device, row_stats));
        let [copying, after] = of_bias.transpose()?.unwrap_or_default();
        let mut launches = Vec::from_iter(copying);
        launches.extend(build_launches(problem, &layout, &before, ("hopper_bwd", main, &values[..]), &parameter)?);
        launches.extend(after);
        Ok(launches)
    }

    fn tensor_maps(&self, problem: &FlashAttnVarlenBwd) -> [TensorMapConfig; 6] {
        let queries = i64::from(self.tile.queries);
        TensorMapConfig::all(problem, [queries, KEYS, WARPGROUP_KEYS], i64::from(self.tile.swizzle_columns))
    }
}

/// The value of the axis `logits` for the call: its logits transform, or what else its scores or rows have; `None` if no
/// kernel is built for it.
pub(super) fn logits_transform(forward: &Attention) -> Option<&'static str> {
    let Score { softcap, alibi, q_scale, k_scale, bias, .. } = &forward.score;
    if q_scale.is_some() || k_scale.is_some() {
        return None;
    }
    match (*softcap > 0.0, alibi.is_some(), !forward.queries.key_ranges.is_none(), bias.is_some()) {
        (false, false, false, false) => Some("none"),
        (true, false, false, false) => Some("softcap"),
        (false, true, false, false) => Some("alibi"),
        (false, false, true, false) => Some("key_ranges"),
        (false, false, false, true) if bias.is_some_and(|bias| bias.dtype == DType::F32) => Some("bias_f32"),
        (false, false, false, true) => Some("bias"),
        _ => None,
    }
}

/// Whether the kernels' 32-bit integers suffice for tile and CTA counts and for sums of a row, a key and a window.
fn counts_fit(problem: &FlashAttnVarlenBwd) -> bool {
    const LIMIT: i64 = 1 << 29;
    let Attention { num_rows, num_q_heads, score, .. } = &problem.forward;
    let blocks = (num_rows.div_ceil(PREPARE_ROWS) as i64).saturating_mul(*num_q_heads as i64);
    // `AttentionParams` treats a window this wide as no window.
    let is_counted = |window: i64| window < LIMIT || window >= i64::from(i32::MAX);
    [*num_rows, problem.num_keys].iter().all(|rows| (1..LIMIT).contains(&(*rows as i64)))
        && [score.window_left, score.window_right].into_iter().all(is_counted)
        && blocks.max(max_tiles(problem, WARPGROUP_KEYS)) < i64::from(i32::MAX)
}

/// Upper bound of the number of tiles of `keys` keys in any batch of these sizes.
fn max_tiles(problem: &FlashAttnVarlenBwd, keys: i64) -> i64 {
    let forward = &problem.forward;
    let blocks = problem.num_keys as i64 / keys + forward.max_seqs as i64;
    blocks.saturating_mul(forward.num_kv_heads as i64)
}

/// Whether the queries of an average sequence fill at least a third of their query blocks. A block has queries of one head,
/// whereas the portable kernels pack the heads of a KV head: with 16 queries per sequence, D 64 and groups of 4 heads these
/// kernels took 1.4 times as long as the portable ones, with 64 queries 0.7 times; without groups, with 16 queries, 0.67
/// times.
fn fills_query_blocks(forward: &Attention, queries: u32) -> bool {
    const SMALL_GROUP: usize = 3;
    let is_small = forward.num_q_heads <= SMALL_GROUP * forward.num_kv_heads;
    is_small || SMALL_GROUP * forward.num_rows >= queries as usize * forward.max_seqs
}

/// Whether each sequence and KV head has an SM of its own. Then the portable kernels have so few tiles that all heads of a KV head in one
/// take longer: 17 sequences of 8 to 103 tokens with 14/2 heads of 64 took 97 us, FlashAttention-3 38.
fn has_few_tiles(forward: &Attention, device: &Device) -> bool {
    forward.max_seqs.saturating_mul(forward.num_kv_heads) <= device.sms as usize
}

#[cfg(test)]
pub(super) mod tests;
