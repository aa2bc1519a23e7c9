//! The kernels for Hopper: which calls they take, their place in the workspace and their argument.
//!
//! Three launches: a plan and what is known of each query row; dK, dV and the sums of dQ; dQ out of its sums. Everything
//! here follows from static sizes, strides and options.

use super::{Launch, Parameter, sinks};
use crate::cuda::attention::tiles::modifies_scores;
use crate::cuda::device::Device;
use crate::cuda::launch::Shape;
use crate::cuda::params::attention_bwd::BackwardParams;
use crate::cuda::params::hopper_bwd::{BackwardPlan, HopperBackwardParams, SequencePlan};
use crate::cuda::tensor_map::{Axis, TensorMap, can_copy};
use crate::cuda::variants;
use crate::error::Result;
use crate::ops::KvView;
use crate::ops::attention::Attention;
use crate::ops::flash_attn_varlen_bwd::FlashAttnVarlenBwd;
use crate::tensor::Tensor;
use std::cell::LazyCell;
use std::rc::Rc;

/// What the kernels of a bucket of D and Dv work on at a time: `BackwardShape` of `kernels/include/hopper_bwd/shape.cuh`.
#[derive(Debug)]
struct Tile {
    head_dim: usize,
    /// The value of the axis `head_dim`.
    head_dim_value: &'static str,
    /// Queries of a step.
    queries: i64,
    shared_memory: u32,
}

static TILES: [Tile; 2] = [
    Tile { head_dim: 64, head_dim_value: "64", queries: 128, shared_memory: 215_936 },
    Tile { head_dim: 128, head_dim_value: "128", queries: 64, shared_memory: 214_656 },
];

/// Keys of a tile, and those of them that a warpgroup has.
const KEYS: i64 = 128;
const WARPGROUP_KEYS: i64 = 64;

/// Columns of a box: a panel in shared memory.
const PANEL: i64 = 64;

/// Threads of a CTA of the main kernel, and of those before and after it.
const THREADS: u32 = 384;
const SIDE_THREADS: u32 = 256;

/// Rows of a CTA of `hopper_bwd_prepare`.
const PREPARED_ROWS: usize = 64;

/// Groups and heads of a CTA of `hopper_bwd_finish`.
const FINISHED_GROUPS: usize = 8;
const FINISHED_HEADS: usize = 4;

/// Rows of a group of sums of dQ, and bytes of one of a panel's columns.
const GROUP: usize = 16;
const GROUP_BYTES: usize = 4 * GROUP * PANEL as usize;

/// To what places in the workspace are aligned.
const ALIGNMENT: usize = 128;

/// How the kernels take a problem that they can take.
struct Hopper {
    tile: &'static Tile,
    layout: Layout,
}

/// Where what lies in the workspace.
#[derive(Clone, Copy)]
struct Layout {
    delta: *mut u8,
    lse_log2: *mut u8,
    turns: *mut u8,
    plan: *mut u8,
    sequences: *mut u8,
    by_row: *mut u8,
    dq_sums: *mut u8,
    num_turns: usize,
    num_groups: usize,
    /// Bytes, from the workspace's first one.
    bytes: usize,
}

impl Layout {
    /// From `start` on. Each sequence begins at a group and at a block of queries of its own.
    fn new(start: *mut u8, tile: &Tile, [rows, seqs, heads]: [usize; 3]) -> Self {
        let queries = tile.queries as usize;
        let num_turns = (rows + (queries - 1) * seqs) / queries + 1;
        let num_groups = (rows + (GROUP - 1) * seqs).div_ceil(GROUP);
        let mut bytes = start.align_offset(ALIGNMENT);
        let mut place = |wanted: usize| {
            let place = start.wrapping_add(bytes);
            bytes += wanted.next_multiple_of(ALIGNMENT);
            place
        };
        let of_rows = size_of::<f32>() * heads * rows;
        let panels = tile.head_dim / PANEL as usize;
        Self {
            delta: place(of_rows),
            lse_log2: place(of_rows),
            turns: place(size_of::<i32>() * heads * num_turns),
            plan: place(size_of::<BackwardPlan>()),
            sequences: place(size_of::<SequencePlan>() * seqs),
            by_row: place(size_of::<SequencePlan>() * seqs),
            dq_sums: place(GROUP_BYTES * panels * heads * num_groups),
            num_turns,
            num_groups,
            bytes,
        }
    }
}

/// The kernels' parameter, which the first launch makes for all.
pub(super) type LazyParams<'p> =
    LazyCell<Result<HopperBackwardParams>, Box<dyn FnOnce() -> Result<HopperBackwardParams> + 'p>>;

/// Takes what the kernels are built for.
pub(super) fn launches<'p>(problem: &'p FlashAttnVarlenBwd, device: Device) -> Result<Option<Vec<Launch<'p>>>> {
    Hopper::of(problem, &device).map(|hopper| hopper.launches(problem, device)).transpose()
}

impl Hopper {
    /// `None` where the portable kernels have to do it.
    fn of(problem: &FlashAttnVarlenBwd, device: &Device) -> Option<Self> {
        let forward = &problem.forward;
        let dim = forward.head_dim.max(forward.value_dim);
        let tile = TILES.iter().find(|tile| tile.head_dim >= dim)?;
        let workspace = problem.workspace.as_ref()?;
        let sizes = [forward.num_rows, forward.max_seqs, forward.num_q_heads];
        let layout = Layout::new(workspace.data, tile, sizes);
        let there = workspace.dims.first().map_or(0, |bytes| *bytes as usize);
        let hopper = Self { tile, layout };
        let can_copy_all =
            || hopper.boxes(problem).iter().all(|boxes| can_copy(forward.q.dtype, boxes.data, &boxes.axes));
        let fits = device.has_tensor_maps
            && fills_steps(forward, tile)
            && forward.q.dtype.size() == 2
            && !modifies_scores(forward)
            && layout.bytes <= there
            && counts_fit(problem)
            && can_copy_all();
        fits.then_some(hopper)
    }

    /// The launches, in order.
    fn launches<'p>(self, problem: &'p FlashAttnVarlenBwd, device: Device) -> Result<Vec<Launch<'p>>> {
        let forward = &problem.forward;
        let prepare = 1 + forward.num_rows.div_ceil(PREPARED_ROWS) * forward.num_q_heads;
        let of_sums = self.layout.num_groups.div_ceil(FINISHED_GROUPS) * forward.num_q_heads.div_ceil(FINISHED_HEADS);
        let of_rows = [forward.num_rows, problem.num_keys].map(|rows| rows.div_ceil(SIDE_THREADS as usize));
        let finish = of_sums + of_rows[0] + of_rows[1];
        let main = most_tiles(problem).clamp(1, i64::from(device.sms));
        let side = |ctas| Shape { grid: [ctas as u32, 1, 1], threads: SIDE_THREADS, shared_memory: 0 };
        let shared_memory = self.tile.shared_memory;
        let main = Shape { grid: [main as u32, 1, 1], threads: THREADS, shared_memory };
        let dtype = variants::dtype_value(forward.q.dtype);
        let head_dim = self.tile.head_dim_value;
        let params: LazyParams = LazyCell::new(Box::new(move || self.params(problem, &device)));
        let parameter = Parameter::Hopper(Rc::new(params));
        [("hopper_bwd_prepare", side(prepare)), ("hopper_bwd", main), ("hopper_bwd_finish", side(finish))]
            .into_iter()
            .map(|(kernel, shape)| {
                let variant = variants::find(kernel, &[dtype, head_dim])?;
                Ok(Launch::new(kernel, variant, shape, parameter.clone()))
            })
            .chain(sinks(problem, parameter.clone()).transpose())
            .collect()
    }

    /// The kernels' parameter.
    fn params(&self, problem: &FlashAttnVarlenBwd, device: &Device) -> Result<HopperBackwardParams> {
        let Layout { lse_log2, turns, plan, sequences, by_row, dq_sums, num_turns, num_groups, .. } = self.layout;
        let map = |boxes: &Boxes| TensorMap::new(problem.forward.q.dtype, boxes.data, &boxes.axes);
        let [q, k, v, dout, dk, dv] = self.boxes(problem);
        Ok(HopperBackwardParams {
            base: BackwardParams::new(problem, device, self.layout.delta.cast())?,
            q: map(&q)?,
            k: map(&k)?,
            v: map(&v)?,
            dout: map(&dout)?,
            dk: map(&dk)?,
            dv: map(&dv)?,
            lse_log2: lse_log2.cast(),
            dq_sums: dq_sums.cast(),
            turns: turns.cast(),
            sequences: sequences.cast(),
            by_row: by_row.cast(),
            plan: plan.cast(),
            num_groups: num_groups as i32,
            num_turns: num_turns as i32,
        })
    }

    /// Those of q, k, v, dout, dk, dv.
    fn boxes(&self, problem: &FlashAttnVarlenBwd) -> [Boxes; 6] {
        let forward = &problem.forward;
        let of_tensor = |tensor: &Tensor, rows| {
            let [_, heads, dim] = [0, 1, 2].map(|axis| tensor.dims[axis]);
            Boxes::new(tensor.data, [tensor.stride(0), tensor.stride(1)], [tensor.dims[0], heads, dim], rows)
        };
        let of_view = |view: &KvView, dim: usize| {
            let sizes = [problem.num_keys as i64, forward.num_kv_heads as i64, dim as i64];
            Boxes::new(view.data, [view.token_stride, view.head_stride], sizes, KEYS)
        };
        [
            of_tensor(&forward.q, self.tile.queries),
            of_view(&forward.k, forward.head_dim),
            of_view(&forward.v, forward.value_dim),
            of_tensor(&problem.dout, self.tile.queries),
            of_tensor(&problem.dk, WARPGROUP_KEYS),
            of_tensor(&problem.dv, WARPGROUP_KEYS),
        ]
    }
}

/// Whether 32 bits are enough for the kernels' numbers: of tiles and CTAs, and sums of a row, a key and a window.
fn counts_fit(problem: &FlashAttnVarlenBwd) -> bool {
    const MOST: i64 = 1 << 29;
    let Attention { num_rows, num_q_heads, score, .. } = &problem.forward;
    let blocks = (num_rows.div_ceil(PREPARED_ROWS) as i64).saturating_mul(*num_q_heads as i64);
    // A window that wide and no window are the same to `AttentionParams`.
    let is_counted = |window: i64| window < MOST || window >= i64::from(i32::MAX);
    [*num_rows, problem.num_keys].iter().all(|rows| (1..MOST).contains(&(*rows as i64)))
        && [score.window_left, score.window_right].into_iter().all(is_counted)
        && blocks.max(most_tiles(problem)) < i64::from(i32::MAX)
}

/// More tiles than any batch of these sizes has.
fn most_tiles(problem: &FlashAttnVarlenBwd) -> i64 {
    let forward = &problem.forward;
    let blocks = problem.num_keys as i64 / KEYS + forward.max_seqs as i64;
    blocks.saturating_mul(forward.num_kv_heads as i64)
}

/// Whether the queries of an average sequence fill a fair part of the steps that they take. A step is of one head, where
/// the portable kernels pack the rows of a group's heads: 16 queries, D 64 and groups of 4 took 1.4 times as long here,
/// 64 queries 0.7 times; without groups 16 queries 0.67 times.
fn fills_steps(forward: &Attention, tile: &Tile) -> bool {
    const SMALL_GROUP: usize = 3;
    let is_small = forward.num_q_heads <= SMALL_GROUP * forward.num_kv_heads;
    is_small || SMALL_GROUP * forward.num_rows >= tile.queries as usize * forward.max_seqs
}

/// What a tensor map is made of.
struct Boxes {
    data: *const u8,
    axes: [Axis; 5],
}

impl Boxes {
    /// Boxes of `in_box` rows of one head of `[rows, heads, dim]`, clipped at the end of a sequence: `RaggedRows` of
    /// `kernels/include/hopper_bwd/ragged_rows.cuh`.
    fn new(data: *const u8, [row, head]: [i64; 2], [rows, heads, dim]: [i64; 3], in_box: i64) -> Self {
        /// Where the axis of a sequence's rows ends.
        const END: i64 = 1 << 30;
        /// Elements of 16 bits from one to the next on the last axis, on which END go around the whole address space, less
        /// a row.
        const AROUND: i64 = 1 << 33;
        // Strides of axes without a second element may be anything, and must be something.
        let row = if rows > 1 { row } else { PANEL };
        let head = if heads > 1 { head } else { PANEL };
        Self {
            data,
            axes: [
                Axis { len: dim, stride: 1, in_box: PANEL },
                Axis { len: heads, stride: head, in_box: 1 },
                Axis { len: END, stride: row, in_box },
                Axis { len: 2 * END, stride: row, in_box: 1 },
                Axis { len: 2 * END, stride: AROUND - row, in_box: 1 },
            ],
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cuda::attention::tests::{device, problem};
    use crate::ops::attention::{Alibi, Score};
    use crate::ops::workspace::AttentionSizes;
    use crate::tensor::DType;
    use std::ptr::{null, null_mut};

    /// 1000 rows of 4 heads over 2 KV heads of as many keys, in 7 sequences; no memory.
    fn gradients(head_dim: usize) -> FlashAttnVarlenBwd<'static> {
        let leak = |heads: usize| -> &'static [i64] { Box::leak(Box::new([1000, heads as i64, head_dim as i64])) };
        let of_queries = Tensor::dense(DType::BF16, null_mut(), leak(4));
        let of_keys = Tensor::dense(DType::BF16, null_mut(), leak(2));
        let plain = problem(1000, 7, 4, head_dim);
        let view = KvView { token_stride: 2 * head_dim as i64, head_stride: head_dim as i64, ..plain.k };
        let forward = Attention { q: of_queries, k: view, v: view, out: of_queries, ..plain };
        FlashAttnVarlenBwd {
            forward,
            dout: of_queries,
            dlse: None,
            dq: of_queries,
            dk: of_keys,
            dv: of_keys,
            dsinks: None,
            workspace: Some(Tensor::dense(DType::U8, null_mut(), &[4_000_000])),
            num_keys: 1000,
            deterministic: false,
        }
    }

    #[test]
    fn the_kernels_take_what_they_are_built_for() {
        let takes = |problem: &FlashAttnVarlenBwd| Hopper::of(problem, &device(true)).is_some();
        for head_dim in (8..=256).step_by(8) {
            assert_eq!(takes(&gradients(head_dim)), head_dim <= 128, "{head_dim}");
        }
        assert!(Hopper::of(&gradients(128), &device(false)).is_none());
        let with = |change: &dyn Fn(&mut Attention)| {
            let mut problem = gradients(128);
            change(&mut problem.forward);
            takes(&problem)
        };
        assert!(with(&|forward| forward.score = Score { window_left: 5, window_right: 0, ..forward.score }));
        assert!(with(&|forward| forward.score.window_left = i64::MAX));
        assert!(!with(&|forward| forward.score.window_left = 1 << 30));
        assert!(!with(&|forward| forward.score.softcap = 1.0));
        assert!(!with(&|forward| forward.score.alibi = Some(Alibi { slopes: null(), per_sequence: false })));
        assert!(!with(&|forward| forward.q.dtype = DType::F32));
        assert!(!with(&|forward| forward.k.token_stride = 260));
        assert!(!with(&|forward| forward.v.token_stride = 0));
        let roomy = |bytes: &'static [i64; 1]| FlashAttnVarlenBwd {
            workspace: Some(Tensor::dense(DType::U8, null_mut(), bytes)),
            ..gradients(128)
        };
        assert!(takes(&roomy(&[4_000_000])) && !takes(&roomy(&[2_000_000])));
        assert!(!takes(&FlashAttnVarlenBwd { workspace: None, ..gradients(128) }));
    }

    #[test]
    fn short_sequences_of_large_groups_are_left_to_the_portable_kernels() {
        let takes = |seqs, heads| {
            let mut problem = gradients(128);
            problem.workspace = Some(Tensor::dense(DType::U8, null_mut(), &[90_000_000]));
            problem.forward = Attention { max_seqs: seqs, num_q_heads: heads, ..problem.forward };
            Hopper::of(&problem, &device(true)).is_some()
        };
        // 64 queries a step: 21 rows a sequence are a third.
        assert!(takes(46, 8) && !takes(47, 8) && takes(500, 6));
    }

    #[test]
    fn what_the_front_ends_allocate_is_enough() {
        for tile in &TILES {
            for (rows, seqs, heads) in
                [(1, 1, 1), (17, 5, 3), (4096, 1, 16), (16384, 4, 16), (100, 4000, 2), (77, 0, 8)]
            {
                for dtype in [DType::F16, DType::BF16] {
                    let dim = tile.head_dim as i64;
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
                        let layout = Layout::new(start as *mut u8, tile, [rows, seqs, heads]);
                        assert!(layout.bytes as i64 <= allocated, "{rows} rows, {seqs} sequences, {heads} heads");
                        // Hardly any of it is for nothing.
                        assert!(allocated <= layout.bytes as i64 * 51 / 50 + 10_000 * heads as i64);
                    }
                }
            }
        }
    }
}
