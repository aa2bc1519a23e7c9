//! Runs one task of the plan: lays out the queries of a work tile, steps through its keys block by block, merges the
//! states of KV splits and stores the output.

use super::block_rows::{BLOCK, BlockRows, KvTensors};
use super::block_step::{BlockBuffers, BlockKernel, BlockStep};
use super::epilogue::Epilogue;
use super::gemm::GemmKernel;
use super::gemv::GemvKernel;
use super::key_scales::SCALES;
use super::kv_loader::{AsF32, Bf16Pairs, Fp8AsBf16Pairs, Fp8AsF32};
use super::lanes::FwdLanes;
use super::plan::{Combine, FwdPlan, FwdTask, QueryLayout, WorkTile};
use super::prefetcher::Prefetcher;
use super::score::LogitsTransform;
use super::sequences::Window;
use super::softmax_state::{RowElements, SoftmaxState};
use crate::cpu::aligned::AlignedBuffer;
use crate::cpu::element_rows::{narrow_row, widen_row};
use crate::cpu::simd::{MAX_LANES, Simd, SimdKernel, prefetch_row};
use crate::error::Result;
use crate::problem::MAX_LATENT_DIM;
use crate::problem::attention::Attention;
use crate::tensor::DType;
use half::{bf16, f16};

/// Memory of one thread for the whole call, sized for the largest work tile.
pub(super) struct FwdScratch {
    /// Packed queries of all heads, two softmax states, then [`BlockBuffers`].
    floats: AlignedBuffer,
    q_len: usize,
    state_len: usize,
    lanes: FwdLanes,
}

impl FwdScratch {
    /// # Errors
    /// `RESOURCE_EXHAUSTED`.
    pub(super) fn new(plan: &FwdPlan, problem: &Attention) -> Result<Self> {
        let largest = |f: fn(&WorkTile) -> usize| plan.tiles.iter().map(f).max().unwrap_or(0);
        let q_len = largest(|tile| tile.heads.len() * tile.q_len);
        let state_len = largest(WorkTile::state_len);
        let packed = problem.head_dim + problem.value_dim.next_multiple_of(MAX_LANES);
        let buffers = BLOCK * (MAX_PANEL_LANES + packed) + if problem.scale_cache.is_some() { 2 * SCALES } else { 0 };
        let floats = AlignedBuffer::zeros(q_len + 2 * state_len + buffers)?;
        Ok(Self { floats, q_len, state_len, lanes: FwdLanes::default() })
    }

    fn buffers(&mut self, d: usize, dv: usize) -> BlockBuffers {
        let scores = self.floats.as_mut_ptr().wrapping_add(self.q_len + 2 * self.state_len);
        let k = scores.wrapping_add(BLOCK * MAX_PANEL_LANES);
        let v = k.wrapping_add(BLOCK * d);
        BlockBuffers { scores, k, v, scales: v.wrapping_add(BLOCK * dv.next_multiple_of(MAX_LANES)) }
    }
}

/// Query rows that are prefetched before they are packed.
const PREFETCHED_QUERIES: usize = 8;
/// Maximum lanes of a micro-panel.
const MAX_PANEL_LANES: usize = 32;

/// One index of the parallel loops, for [`crate::cpu::simd::Isa::dispatch`].
///
/// # Safety
/// The problem's views are valid host memory, and nothing else accesses its results. Plan and scratch were made for the
/// problem, and for the lanes of the instruction set that runs this. `partials` has [`FwdPlan::partials_len`] elements.
/// Each task runs once, and a combine after the tasks of its tile.
pub(super) struct RunFwdJob<'a> {
    problem: &'a Attention<'a>,
    kv: KvTensors,
    plan: &'a FwdPlan,
    scratch: &'a mut FwdScratch,
    partials: *mut f32,
    job: FwdJob<'a>,
}

/// What a [`RunFwdJob`] does.
#[derive(Clone, Copy)]
pub(super) enum FwdJob<'a> {
    Task(&'a FwdTask),
    Combine(Combine),
}

impl<'a> RunFwdJob<'a> {
    pub(super) fn new(
        problem: &'a Attention<'a>,
        plan: &'a FwdPlan,
        scratch: &'a mut FwdScratch,
        partials: *mut f32,
        job: FwdJob<'a>,
    ) -> Self {
        Self { problem, kv: KvTensors::new(problem), plan, scratch, partials, job }
    }
}

impl SimdKernel for RunFwdJob<'_> {
    type Output = ();

    /// Compute the states of the job's KV splits (a task) or take them from the partials (a combine), merge them in
    /// order, and store the output, unless the task is a single split.
    #[inline(always)]
    unsafe fn run<S: Simd>(mut self, simd: S) {
        let (tile, only_split) = match self.job {
            FwdJob::Task(FwdTask::Clear(rows)) => {
                // SAFETY: the results are writable, and no tile has these rows, which belong to no sequence.
                return unsafe { Epilogue::new(self.problem).store_zeros(rows.clone()) };
            }
            FwdJob::Task(&FwdTask::Tile { tile }) => (tile, None),
            FwdJob::Task(&FwdTask::Split { tile, split, .. }) => (tile, Some(split)),
            FwdJob::Combine(combine) => (combine.tile, None),
        };
        let tile = &self.plan.tiles[tile];
        let splits = only_split.map_or(0..tile.num_splits(), |split| split..split + 1);
        let own = self.scratch.floats.as_mut_ptr().wrapping_add(self.scratch.q_len);
        let total = match self.job {
            FwdJob::Task(&FwdTask::Split { offset, .. }) | FwdJob::Combine(Combine { offset, .. }) => {
                self.partials.wrapping_add(offset)
            }
            FwdJob::Task(_) => own,
        };
        let is_task = matches!(self.job, FwdJob::Task(_));
        // SAFETY: the tile is the plan's. Each state is one of the two in the scratch, or one of the tile's in the
        // partials, which no other task accesses: a split has its own, and a combine runs after all splits. `total` is
        // the state of all keys when it is stored, since then the splits are all of the tile's.
        unsafe {
            if is_task {
                self.pack_queries(simd, tile);
            }
            if splits.is_empty() {
                reset(tile, total);
            }
            for split in splits.clone() {
                let state = match split - splits.start {
                    0 => total,
                    _ if is_task => own.wrapping_add(self.scratch.state_len),
                    index => total.wrapping_add(index * tile.state_len()),
                };
                if is_task {
                    reset(tile, state);
                    self.attend_split(simd, tile, split, state);
                }
                if split > splits.start {
                    self.merge(simd, tile, total, state);
                }
            }
            if !matches!(self.job, FwdJob::Task(FwdTask::Split { .. })) {
                Epilogue::new(self.problem).store(simd, self.plan, tile, total);
            }
        }
    }
}

impl RunFwdJob<'_> {
    /// Pack the queries in the tile's layout, and set the lanes' mask and bias.
    ///
    /// # Safety
    /// As [`RunFwdJob`]; the tile is the plan's.
    #[inline(always)]
    unsafe fn pack_queries<S: Simd>(&mut self, simd: S, tile: &WorkTile) {
        let (problem, d) = (self.problem, self.problem.head_dim);
        let group = problem.num_q_heads / problem.num_kv_heads;
        // SAFETY: the slopes are a view of the problem, and the sequence is the tile's.
        unsafe { self.scratch.lanes.set::<S>(problem, tile, (tile.sequence, &self.plan.sequences[tile.sequence])) };
        let mut widened = [0.0f32; MAX_LATENT_DIM as usize];
        let mut pairs = [0.0f32; MAX_LATENT_DIM as usize / 2];
        let query = problem.q;
        let rows = tile.queries.len() * group;
        for (index, kv_head) in tile.heads.clone().enumerate() {
            let row_at = |row: usize| {
                let (t, h) = self.plan.query_of_row(tile, kv_head, row, group);
                let at = t as i64 * query.stride(0) + h as i64 * query.stride(1);
                query.data.wrapping_offset(at as isize * query.dtype.size() as isize)
            };
            // SAFETY: the scratch has q_len elements for each head of the tile, and the tile's rows are rows (t, h) of
            // `query`, of D elements each.
            unsafe {
                let q = self.scratch.floats.as_mut_ptr().add(index * tile.q_len);
                q.write_bytes(0, tile.q_len);
                for row in 0..rows {
                    // Rows of one head may be far apart in memory, and packing a row takes less time than fetching one.
                    let ahead = row_at((row + PREFETCHED_QUERIES).min(rows - 1));
                    prefetch_row(ahead, d * query.dtype.size());
                    let from = row_at(row);
                    widen_row(simd, query.dtype, from, widened.as_mut_ptr(), d);
                    if S::ELEMENTS_PER_LANE == 2 {
                        // Exact, see `may_multiply_bf16`.
                        narrow_row(simd, DType::BF16, widened.as_ptr(), pairs.as_mut_ptr().cast(), d);
                    }
                    let packed = if S::ELEMENTS_PER_LANE == 2 { pairs.as_ptr() } else { widened.as_ptr() };
                    let elements = RowElements::new::<S>(tile.layout, tile.lanes, d / S::ELEMENTS_PER_LANE, row);
                    elements.scatter(q, packed, d / S::ELEMENTS_PER_LANE);
                }
            }
        }
    }

    /// Update the states of all heads with the keys of one KV split. This is the only place that names the kernels:
    /// each is large, and a second call site would compile it twice or keep it from being inlined.
    ///
    /// # Safety
    /// As [`RunFwdJob`]; the tile is the plan's and has this split, its queries are packed, and `state` is a state of
    /// it.
    #[inline(always)]
    unsafe fn attend_split<S: Simd>(&mut self, simd: S, tile: &WorkTile, split: usize, state: *mut f32) {
        // SAFETY: the tile, the split, the packed queries and the state are the caller's, and each arm names the kernel
        // for its layout.
        unsafe {
            match tile.layout {
                QueryLayout::RowsInLanes => self.attend::<S, GemmKernel>(simd, tile, split, state),
                QueryLayout::HeadDimInLanes(1) => self.attend_gemv::<S, 1>(simd, tile, split, state),
                QueryLayout::HeadDimInLanes(2) => self.attend_gemv::<S, 2>(simd, tile, split, state),
                QueryLayout::HeadDimInLanes(4) => self.attend_gemv::<S, 4>(simd, tile, split, state),
                QueryLayout::HeadDimInLanes(_) => self.attend_gemv::<S, 8>(simd, tile, split, state),
            }
        }
    }

    /// # Safety
    /// As `attend_split`; the tile's layout is `HeadDimInLanes(ROWS)`.
    #[inline(always)]
    unsafe fn attend_gemv<S: Simd, const ROWS: usize>(
        &mut self,
        simd: S,
        tile: &WorkTile,
        split: usize,
        state: *mut f32,
    ) {
        // SAFETY: the tile, the split, the packed queries and the state are the caller's, and each arm names a loader
        // for the dtype of K and V.
        unsafe {
            match self.problem.kv_dtype {
                DType::BF16 if S::ELEMENTS_PER_LANE == 2 => {
                    self.attend::<S, GemvKernel<Bf16Pairs, ROWS>>(simd, tile, split, state);
                }
                DType::I8 if S::ELEMENTS_PER_LANE == 2 => {
                    self.attend::<S, GemvKernel<Fp8AsBf16Pairs<S, true>, ROWS>>(simd, tile, split, state);
                }
                _ if S::ELEMENTS_PER_LANE == 2 => {
                    self.attend::<S, GemvKernel<Fp8AsBf16Pairs<S, false>, ROWS>>(simd, tile, split, state);
                }
                DType::F16 => self.attend::<S, GemvKernel<AsF32<f16>, ROWS>>(simd, tile, split, state),
                DType::BF16 => self.attend::<S, GemvKernel<AsF32<bf16>, ROWS>>(simd, tile, split, state),
                DType::F32 => self.attend::<S, GemvKernel<AsF32<f32>, ROWS>>(simd, tile, split, state),
                DType::I8 => self.attend::<S, GemvKernel<AsF32<i8>, ROWS>>(simd, tile, split, state),
                _ => self.attend::<S, GemvKernel<Fp8AsF32, ROWS>>(simd, tile, split, state),
            }
        }
    }

    /// Step through the keys of a KV split block by block.
    ///
    /// # Safety
    /// As `attend_split`; the kernel is one for the tile's layout and the dtype of K and V.
    #[inline(always)]
    unsafe fn attend<S: Simd, K: BlockKernel<S>>(&mut self, simd: S, tile: &WorkTile, split: usize, state: *mut f32) {
        let (problem, kv) = (self.problem, &self.kv);
        let sequence = &self.plan.sequences[tile.sequence];
        let q = self.scratch.floats.as_mut_ptr();
        let buffers = self.scratch.buffers(problem.head_dim, problem.value_dim);
        let (keys, window) = (tile.split(split), Window::of(&problem.score));
        let mut blocks = [BlockRows::empty(), BlockRows::empty()];
        let [block, next] = &mut blocks;
        let (mut block, mut next) = (block, next);
        let block_keys = K::block_keys(tile.heads.len() * (kv.k.len + kv.v.len));
        // A thread that takes a whole tile goes on to the next split: its first block is prefetched during the last one of
        // this split.
        let whole_tile = matches!(self.job, FwdJob::Task(FwdTask::Tile { .. }));
        let block_at = |first: usize| {
            let end = if whole_tile && first >= keys.end { tile.keys.end } else { keys.end };
            first.min(end)..(first + block_keys).min(end)
        };
        // SAFETY: at most BLOCK keys of the sequence; their page ids are a view of the problem.
        unsafe { block.locate(kv, sequence, block_at(keys.start), K::PADDING) };
        while block.len > 0 && block.first < keys.end {
            // SAFETY: the next keys, at most BLOCK and also of the sequence.
            unsafe { next.locate(kv, sequence, block_at(block.first + block.len), K::PADDING) };
            if !block.hide_unattended(sequence, &tile.queries, window) {
                std::mem::swap(&mut block, &mut next);
                continue;
            }
            if tile.has_few_rows() {
                // SAFETY: page ids are clamped, so the row addresses lie in K and V.
                unsafe { block.load(kv, tile.heads.clone()) };
            }
            let mut prefetcher = Prefetcher::new(kv, next, tile.heads.clone());
            for (head, kv_head) in tile.heads.clone().enumerate() {
                // SAFETY: the row addresses lie in K and V; the scales are views of the problem; queries, state, lanes
                // and buffers are sized for the tile.
                unsafe {
                    let block_step = BlockStep {
                        rows: block.of_head(kv, kv_head),
                        scales: kv.scales.map(|scales| block.scales_of_head(&scales, kv_head)),
                        q: q.wrapping_add(head * tile.q_len),
                        state: SoftmaxState::of_head(tile, state, head),
                        lanes: &self.scratch.lanes,
                        head,
                        transform: LogitsTransform::of_head(problem, kv_head),
                        kv_dtype: problem.kv_dtype,
                        d: problem.head_dim,
                        dv: problem.value_dim,
                    };
                    K::attend(simd, block_step, &mut prefetcher, buffers);
                }
            }
            std::mem::swap(&mut block, &mut next);
        }
    }

    /// Merge the state `other` of a later KV split into `total`, for all heads.
    ///
    /// # Safety
    /// `total` and `other` are states of the tile.
    #[inline(always)]
    unsafe fn merge<S: Simd>(&self, simd: S, tile: &WorkTile, total: *mut f32, other: *mut f32) {
        for head in 0..tile.heads.len() {
            let (total, other) = (SoftmaxState::of_head(tile, total, head), SoftmaxState::of_head(tile, other, head));
            // SAFETY: both are states of this head of the tile.
            unsafe { total.merge(simd, other, tile.layout, self.problem.value_dim) };
        }
    }
}

/// Reset the states of all KV heads.
///
/// # Safety
/// `state` has [`WorkTile::state_len`] writable elements.
unsafe fn reset(tile: &WorkTile, state: *mut f32) {
    for head in 0..tile.heads.len() {
        // SAFETY: head < heads, so this is one of the states in `state`.
        unsafe { SoftmaxState::of_head(tile, state, head).reset(tile) };
    }
}
