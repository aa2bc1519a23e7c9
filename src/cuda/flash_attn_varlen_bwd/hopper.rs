//! The strategy for Hopper up to 128 columns: which calls it takes, its workspace layout and its launches; and what the
//! strategy past 128 columns shares with it.
//!
//! Two launches: the plan and the row statistics (`hopper_bwd_prepare`), and the gradients (`hopper_bwd`). A third one
//! (`hopper_bwd_combine`) adds up dK and dV where query heads of a KV head are split. All decisions follow from static
//! sizes, strides and options.

use super::head_splits::{self, PartialGradients};
use super::tensor_maps::TensorMapConfig;
use super::{Launch, Parameter, sinks, widens_gradients};
use crate::cuda::device::Device;
use crate::cuda::enqueue::{LaunchAttributes, LaunchConfig};
use crate::cuda::params::attention_bwd::BackwardParams;
use crate::cuda::params::hopper_bwd::{BackwardPlan, HopperBackwardParams, SequencePlan};
use crate::cuda::tensor_map::{TensorMap, supports_tma};
use crate::cuda::tiles::{HOPPER_BWD, HopperBwdTile};
use crate::cuda::variants;
use crate::error::Result;
use crate::problem::attention::{Attention, Score};
use crate::problem::flash_attn_varlen_bwd::FlashAttnVarlenBwd;
use std::cell::LazyCell;
use std::rc::Rc;

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
    log2_head_splits: u32,
    pub(super) num_query_blocks: usize,
    num_row_tiles: usize,
    /// Bytes from the start of the workspace to the end of the last buffer.
    bytes: usize,
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
    ) -> Self {
        let queries = queries as usize;
        let num_query_blocks = (rows + (queries - 1) * seqs) / queries + 1;
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
            log2_head_splits: partial.log2_head_splits,
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
        let Attention { num_rows, max_seqs, num_q_heads, .. } = problem.forward;
        let start = problem.workspace.as_ref()?.data;
        Some(Self::new(start, queries, columns, [num_rows, max_seqs, num_q_heads], partial))
    }

    /// Whether query heads of a KV head are split.
    fn splits_heads(&self) -> bool {
        self.log2_head_splits > 0
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
        let (forward, workspace) = (&problem.forward, problem.workspace.as_ref());
        let available = workspace.and_then(|workspace| workspace.dims.first()).map_or(0, |bytes| *bytes as usize);
        device.has_tensor_maps
            && fills_query_blocks(forward, queries)
            && forward.q.dtype.size() == 2
            && self.bytes <= available
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
            log2_head_splits,
            num_query_blocks,
            num_row_tiles,
            ..
        } = *self;
        let has_f32_key_gradients = widens_gradients(problem) || self.splits_heads();
        let num_kv_heads = problem.forward.num_kv_heads << log2_head_splits;
        let split = FlashAttnVarlenBwd { forward: Attention { num_kv_heads, ..problem.forward }, ..*problem };
        let mut base = BackwardParams::new(&split, device, self.delta.cast())?;
        if self.splits_heads() {
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
            num_row_tiles: num_row_tiles as i32,
            num_query_blocks: num_query_blocks as i32,
            num_sms: device.sms as i32,
            log2_head_splits: log2_head_splits as i32,
            widens_key_gradients: i32::from(has_f32_key_gradients),
        })
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

/// The launches of `prepare` and `main`, followed by that of the sinks' gradients if the call has any. The main kernel starts
/// while the last CTAs of `prepare` run, and waits for their end before it reads anything (`wait_for_previous_kernel`).
pub(super) fn build_launches<'p>(
    problem: &FlashAttnVarlenBwd,
    [prepare, main]: [KernelStep; 2],
    parameter: &Parameter<'p>,
) -> Result<Vec<Launch<'p>>> {
    let launch_of = |(kernel, config, values): KernelStep| {
        let variant = variants::find(kernel, values)?;
        Ok(Launch::new(kernel, variant, config, parameter.clone()))
    };
    let attributes = LaunchAttributes { starts_early: true, ..LaunchAttributes::NONE };
    let main = Launch { attributes, ..launch_of(main)? };
    Ok([launch_of(prepare)?, main].into_iter().chain(sinks(problem, parameter.clone())?).collect())
}

/// A parameter that is made once, by the first launch that needs it, and shared by the others.
pub(super) type DeferredParams<'p, P> = LazyCell<Result<P>, Box<dyn FnOnce() -> Result<P> + 'p>>;

/// Defers making the parameter until a launch is enqueued: `prepare` loads the kernels without it.
pub(super) fn defer_params<'p, P>(make: impl FnOnce() -> Result<P> + 'p) -> Rc<DeferredParams<'p, P>> {
    Rc::new(LazyCell::new(Box::new(make)))
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
            let config = Self { tile, layout };
            layout.supports(problem, device, tile.queries, &config.tensor_maps(problem)).then_some(config)
        };
        // Programs that were exported before heads were split, and calls with more keys than queries, may have too little
        // memory for the parts.
        config_with(PartialGradients::of(problem, device, [KEYS as usize, tile.queries as usize]))
            .or_else(|| config_with(PartialGradients::NONE))
    }

    /// The launches, in order.
    fn launches<'p>(self, problem: &'p FlashAttnVarlenBwd, device: Device) -> Result<Vec<Launch<'p>>> {
        let layout = self.layout;
        let prepare = WorkspaceLayout::prepare_config(problem);
        let tiles = max_tiles(problem, KEYS) << layout.log2_head_splits;
        let main = layout.main_config(problem, &device, tiles, self.tile.shared_bytes);
        let dtype = variants::dtype_value(problem.forward.q.dtype);
        let values = [dtype, self.tile.head_dim_value, self.tile.logits];
        let steps = [("hopper_bwd_prepare", prepare, &values[..2]), ("hopper_bwd", main, &values[..])];
        let params = defer_params(move || layout.params(problem, &device, &self.tensor_maps(problem)));
        let mut launches = build_launches(problem, steps, &Parameter::Hopper(params))?;
        launches.extend(head_splits::combine(
            problem,
            layout.log2_head_splits,
            [layout.partial_dk, layout.partial_dv],
        )?);
        Ok(launches)
    }

    fn tensor_maps(&self, problem: &FlashAttnVarlenBwd) -> [TensorMapConfig; 6] {
        let queries = i64::from(self.tile.queries);
        TensorMapConfig::all(problem, [queries, KEYS, WARPGROUP_KEYS], i64::from(self.tile.swizzle_columns))
    }
}

/// The logits transform of the call, a value of the axis `logits`; `None` if the kernels have no such transform.
pub(super) fn logits_transform(forward: &Attention) -> Option<&'static str> {
    let Score { softcap, alibi, q_scale, k_scale, .. } = &forward.score;
    match (*softcap > 0.0, alibi.is_some(), q_scale.is_some() || k_scale.is_some()) {
        (false, false, false) => Some("none"),
        (true, false, false) => Some("softcap"),
        (false, true, false) => Some("alibi"),
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
pub(super) fn max_tiles(problem: &FlashAttnVarlenBwd, keys: i64) -> i64 {
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

#[cfg(test)]
pub(super) mod tests {
    use super::*;
    use crate::cuda::attention::tests::{device, problem};
    use crate::problem::KvView;
    use crate::problem::attention::Alibi;
    use crate::problem::workspace::{AttentionSizes, head_splits};
    use crate::tensor::{DType, Tensor};
    use std::ptr::{null, null_mut};

    /// 1000 rows of 4 heads over 2 KV heads and as many keys, in 7 sequences, without memory.
    pub(in super::super) fn gradients(head_dim: usize) -> FlashAttnVarlenBwd<'static> {
        let leak = |heads: usize| -> &'static [i64] { Box::leak(Box::new([1000, heads as i64, head_dim as i64])) };
        let query_tensor = Tensor::dense(DType::BF16, null_mut(), leak(4));
        let key_tensor = Tensor::dense(DType::BF16, null_mut(), leak(2));
        let base = problem(1000, 7, 4, head_dim);
        let view = KvView { token_stride: 2 * head_dim as i64, head_stride: head_dim as i64, ..base.k };
        let forward = Attention { q: query_tensor, k: view, v: view, out: query_tensor, ..base };
        FlashAttnVarlenBwd {
            forward,
            dout: query_tensor,
            dlse: None,
            dq: query_tensor,
            dk: key_tensor,
            dv: key_tensor,
            dsinks: None,
            dbias: None,
            workspace: Some(Tensor::dense(DType::U8, null_mut(), &[4_000_000])),
            num_keys: 1000,
            deterministic: false,
        }
    }

    #[test]
    fn the_kernels_take_what_they_are_built_for() {
        let takes = |problem: &FlashAttnVarlenBwd| HopperBackward::of(problem, &device(true)).is_some();
        for head_dim in (8..=256).step_by(8) {
            assert_eq!(takes(&gradients(head_dim)), head_dim <= 128, "{head_dim}");
        }
        assert!(HopperBackward::of(&gradients(128), &device(false)).is_none());
        let with = |change: &dyn Fn(&mut Attention)| {
            let mut problem = gradients(128);
            change(&mut problem.forward);
            takes(&problem)
        };
        assert!(with(&|forward| forward.score = Score { window_left: 5, window_right: 0, ..forward.score }));
        assert!(with(&|forward| forward.score.window_left = i64::MAX));
        assert!(!with(&|forward| forward.score.window_left = 1 << 30));
        let alibi = Some(Alibi { slopes: null(), per_sequence: false });
        assert!(with(&|forward| forward.score.softcap = 1.0));
        assert!(with(&|forward| forward.score.alibi = alibi));
        assert!(!with(&|forward| forward.score = Score { softcap: 1.0, alibi, ..forward.score }));
        assert!(!with(&|forward| forward.q.dtype = DType::F32));
        assert!(!with(&|forward| forward.k.token_stride = 260));
        assert!(!with(&|forward| forward.v.token_stride = 0));
        let large_workspace = |bytes: &'static [i64; 1]| FlashAttnVarlenBwd {
            workspace: Some(Tensor::dense(DType::U8, null_mut(), bytes)),
            ..gradients(128)
        };
        assert!(takes(&large_workspace(&[4_000_000])) && !takes(&large_workspace(&[2_000_000])));
        assert!(!takes(&FlashAttnVarlenBwd { workspace: None, ..gradients(128) }));
        let wide = |tensor| Tensor { dtype: DType::F32, ..tensor };
        let FlashAttnVarlenBwd { dq, dk, dv, .. } = gradients(128);
        assert!(takes(&FlashAttnVarlenBwd { dq: wide(dq), dk: wide(dk), dv: wide(dv), ..gradients(128) }));
    }

    #[test]
    fn short_sequences_of_large_groups_are_left_to_the_portable_kernels() {
        let takes = |seqs, heads| {
            let mut problem = gradients(128);
            problem.workspace = Some(Tensor::dense(DType::U8, null_mut(), &[90_000_000]));
            problem.forward = Attention { max_seqs: seqs, num_q_heads: heads, ..problem.forward };
            HopperBackward::of(&problem, &device(true)).is_some()
        };
        // A step has 64 queries: 21 rows per sequence are a third of it.
        assert!(takes(46, 8) && !takes(47, 8) && takes(500, 6));
    }

    #[test]
    fn query_heads_of_few_kv_heads_are_split() {
        const LARGE: &[i64; 1] = &[1 << 30];
        let splits_of = |heads: [usize; 2], [seqs, length]: [usize; 2], window_right, workspace: &'static [i64; 1]| {
            let mut problem = gradients(128);
            problem.num_keys = seqs * length;
            let forward = problem.forward;
            let score = Score { window_right, ..forward.score };
            let [num_q_heads, num_kv_heads] = heads;
            problem.forward =
                Attention { num_rows: seqs * length, max_seqs: seqs, num_q_heads, num_kv_heads, score, ..forward };
            problem.workspace = Some(Tensor::dense(DType::U8, null_mut(), workspace));
            let device = Device { sms: 132, ..device(true) };
            let config = HopperBackward::of(&problem, &device).expect("the kernels take the call");
            let layout = config.layout;
            let kernels = config.launches(&problem, device).expect("there are kernels").len();
            assert_eq!(kernels, 2 + usize::from(layout.splits_heads()));
            1 << layout.log2_head_splits
        };
        for (heads, expected) in [
            ([16, 1], 8),
            ([8, 1], 4),
            ([28, 1], 4),
            ([12, 1], 4),
            ([24, 2], 4),
            ([32, 4], 2),
            ([7, 1], 1),
            ([2, 2], 1),
            ([64, 8], 1),
        ] {
            assert_eq!(splits_of(heads, [1, 1000], 0, LARGE), expected, "{heads:?}");
        }
        // Without the parts' memory.
        assert_eq!(splits_of([16, 1], [1, 1000], 0, &[11_000_000]), 1);
        // With enough tiles, a part has eight heads, or its tiles at least 32 steps.
        let splits_of_16k_tokens = |seqs| {
            let calls = [[16, 1], [32, 1], [64, 1], [16, 4], [32, 4]];
            calls.map(|heads| splits_of(heads, [seqs, 16384 / seqs], 0, LARGE))
        };
        assert_eq!(splits_of_16k_tokens(4), [8, 4, 8, 2, 1]);
        assert_eq!(splits_of_16k_tokens(16), [4, 4, 8, 1, 1]);
        // 128 tiles of one length fill the 132 SMs, 32 or 150 do not.
        let equal_tiles = [32, 128, 150].map(|tiles| splits_of([16, 1], [1, tiles * KEYS as usize], -1, LARGE));
        assert_eq!(equal_tiles, [8, 1, 8]);
    }

    #[test]
    fn what_the_front_ends_allocate_is_enough() {
        let narrow = HOPPER_BWD.iter().filter(|tile| tile.logits == "none");
        // Past 128 columns there is no dq_accum.
        let wide = [(192, 128, 0), (256, 128, 0)];
        for (dim, queries, columns) in narrow.map(|tile| (tile.head_dim, tile.queries, tile.head_dim)).chain(wide) {
            // The call has one KV head, and as many keys as queries.
            let partial_gradients = |keys: usize, heads: usize| {
                let splits = head_splits(heads as i64, 1) as usize;
                let column_bytes = if splits == 1 { 0 } else { 4 * splits * keys };
                let dims = [dim as usize, dim as usize - 8];
                let [dk_bytes, dv_bytes] = dims.map(|columns| columns * column_bytes);
                PartialGradients { log2_head_splits: splits.ilog2(), dk_bytes, dv_bytes }
            };
            for (rows, seqs, heads) in
                [(1, 1, 1), (17, 5, 3), (4096, 1, 16), (16384, 4, 16), (100, 4000, 2), (77, 0, 8)]
            {
                for dtype in [DType::F16, DType::BF16] {
                    let dim = i64::from(dim);
                    let wanted = AttentionSizes {
                        num_q_heads: heads as i64,
                        num_kv_heads: 1,
                        head_dim: dim,
                        value_dim: dim - 8,
                        dtype,
                        batch_invariant: false,
                    }
                    .gradients_workspace();
                    let allocated = wanted.fixed + wanted.per_row * rows as i64 + wanted.per_sequence * seqs as i64;
                    for start in [0x1000, 0x1001, 0x107f] {
                        let partial =
                            if columns == 0 { PartialGradients::NONE } else { partial_gradients(rows, heads) };
                        let sizes = [rows, seqs, heads];
                        let layout = WorkspaceLayout::new(start as *mut u8, queries, columns, sizes, partial);
                        assert!(layout.bytes as i64 <= allocated, "{rows} rows, {seqs} sequences, {heads} heads");
                        // At most 2 % of the allocation is unused.
                        assert!(allocated <= layout.bytes as i64 * 51 / 50 + 10_000 * heads as i64);
                    }
                }
            }
        }
    }
}
