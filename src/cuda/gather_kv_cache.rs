//! Copying rows out of a paged cache on CUDA: a thread takes 16 bytes of the results at a time.

use super::chunk::{CHUNK, aligned_to};
use super::device::Device;
use super::enqueue::LaunchConfig;
use super::kernel_launch::Launch;
use super::params::gather_kv_cache::{Codes, GATHER_SEQS, GATHER_THREADS, GatherParams, GatheredRows};
use super::variants;
use crate::error::Result;
use crate::problem::gather_kv_cache::{self, GatherKvCache};
use crate::stream::Stream;
use crate::tensor::DType;

const KERNEL: &str = "gather_kv_cache";
/// Bytes of the results that a CTA writes where there are enough of them, and how many CTAs per SM are enough.
const CTA_BYTES: usize = 1 << 16;
const ENOUGH_CTAS: usize = 4;
/// The same where rows are copied bit by bit and more CTAs follow the first.
const COPYING_CTA_BYTES: usize = 1 << 15;
/// CTAs that may share a row: the limit of the grid's second dimension.
const MOST_SHARES: usize = 65535;
/// Bytes of a head in the cache, a line, up to which a warp reads K and V of interleaved heads together.
const SMALL_HEAD: i64 = 128;

/// How a thread moves the results' elements.
#[derive(Clone, Copy)]
struct Moves {
    /// Of the variant: of bytes for what is copied bit by bit.
    dtype: DType,
    /// Elements of the dtype at once: 16 bytes of the results, also 8 of bytes, which fill every head; 1 where something is
    /// not aligned.
    piece: usize,
}

impl Moves {
    fn of(problem: &GatherKvCache) -> Self {
        let (stored, written) = (problem.cache_dtype.size(), problem.keys.rows.dtype.size());
        // Of so many bytes of the results.
        let fits = |of: &gather_kv_cache::GatheredRows, bytes: usize| {
            let read = bytes / written * stored;
            let strides =
                [of.cache.page_stride, of.cache.token_stride, of.cache.head_stride].map(|n| n * stored as i64);
            aligned_to(bytes, &[of.rows.dims[2] * written as i64, of.rows.data as i64])
                && aligned_to(read, &[of.cache.data as i64])
                && aligned_to(read, &strides)
        };
        let fits = |bytes: &usize| [&problem.keys, &problem.values].into_iter().all(|of| fits(of, *bytes));
        let dtype = problem.keys.rows.dtype;
        let converts = problem.cache_dtype != dtype || problem.keys.scale.is_some() || problem.values.scale.is_some();
        match (converts, [CHUNK, 8].into_iter().find(fits)) {
            (false, Some(piece)) => Self { dtype: DType::U8, piece },
            (true, Some(CHUNK)) => Self { dtype, piece: CHUNK / written },
            _ => Self { dtype: if written == 1 { DType::U8 } else { dtype }, piece: 1 },
        }
    }
}

fn rows(of: &gather_kv_cache::GatheredRows, cache_dtype: DType, moves: Moves, take_turns: bool) -> GatheredRows {
    let bytes = |stride: i64| stride * cache_dtype.size() as i64;
    let head_pieces = (of.rows.dims[2] as usize * of.rows.dtype.size() / (moves.piece * moves.dtype.size())) as u32;
    let row_pieces = of.rows.dims[1] as u32 * head_pieces;
    GatheredRows {
        cache: of.cache.data,
        page_stride: bytes(of.cache.page_stride),
        token_stride: bytes(of.cache.token_stride),
        head_stride: bytes(of.cache.head_stride),
        rows: of.rows.data,
        scale: of.scale.map_or(std::ptr::null(), |scale| scale.values),
        scale_stride: of.scale.map_or(0, |scale| i64::from(scale.per_head)),
        head_pieces,
        row_pieces,
        group_pieces: if take_turns { head_pieces } else { row_pieces },
    }
}

fn plan(problem: &GatherKvCache) -> Result<Launch<GatherParams>> {
    let moves = Moves::of(problem);
    let variant = variants::find(KERNEL, &[variants::dtype_value(moves.dtype)])?;
    let sides = [&problem.keys, &problem.values];
    let take_turns = sides.into_iter().all(|of| {
        let head = of.rows.dims[2];
        of.cache.head_stride == 2 * head && head * problem.cache_dtype.size() as i64 <= SMALL_HEAD
    });
    let [keys, values] = sides.map(|of| rows(of, problem.cache_dtype, moves, take_turns));
    let row_pieces = (keys.row_pieces + values.row_pieces) as usize;
    let enough = ENOUGH_CTAS * Device::current()?.sms as usize;
    let work = Work::new(problem, moves.dtype == DType::U8, row_pieces, enough);
    let config =
        LaunchConfig { grid: [work.ctas as u32, work.shares as u32, 1], threads: GATHER_THREADS, shared_memory: 0 };
    let converts = problem.cache_dtype != problem.keys.rows.dtype;
    let table = &problem.table;
    let params = GatherParams {
        keys,
        values,
        table: table.entries,
        table_stride: table.stride,
        context_lens: problem.context_lens,
        cu_seqlens: problem.cu_seqlens,
        num_seqs: problem.num_seqs as i32,
        capacity: problem.capacity as i32,
        longest: table.capacity() as i32,
        page_size: table.page_size as i32,
        num_pages: table.num_pages as i32,
        cta_rows: work.cta_rows as i32,
        codes: match problem.cache_dtype {
            _ if !converts => Codes::None,
            DType::F8E4M3FN => Codes::F8E4M3Fn,
            _ => Codes::F8E5M2,
        },
        piece: moves.piece as i32,
    };
    Ok(Launch::new(KERNEL, variant, config, params))
}

/// Load the kernel that [`launch`] takes.
pub(crate) fn prepare(problem: &GatherKvCache) -> Result {
    plan(problem)?.load()
}

/// # Safety
/// The problem's views are device memory of the current context that outlives the kernel's run, the results writable.
pub(crate) unsafe fn launch(problem: &GatherKvCache, stream: Stream) -> Result {
    // SAFETY: `GatherParams` is the kernel's parameter; the caller vouches for the memory.
    unsafe { plan(problem)?.enqueue(stream) }
}

/// How rows are divided among CTAs.
struct Work {
    cta_rows: usize,
    ctas: usize,
    /// CTAs of the same rows.
    shares: usize,
}

impl Work {
    /// `enough` CTAs fill the GPU.
    fn new(problem: &GatherKvCache, copies: bool, row_pieces: usize, enough: usize) -> Self {
        let bytes =
            |of: &gather_kv_cache::GatheredRows| (of.rows.dims[1] * of.rows.dims[2]) as usize * of.rows.dtype.size();
        let row_bytes = bytes(&problem.keys) + bytes(&problem.values);
        let even = problem.capacity.div_ceil(enough).max(1);
        // Finding the starts of many sequences takes long: then each CTA does it once.
        let one_wave = problem.num_seqs > GATHER_SEQS as usize || even * row_bytes <= CTA_BYTES;
        let cta_bytes = if copies { COPYING_CTA_BYTES } else { CTA_BYTES };
        let cta_rows = if one_wave { even } else { even.min((cta_bytes / row_bytes).max(1)) };
        let ctas = problem.capacity.div_ceil(cta_rows).max(1);
        let shares = (row_bytes / CTA_BYTES).max(enough / ctas);
        Self { cta_rows, ctas, shares: shares.clamp(1, row_pieces.div_ceil(GATHER_THREADS as usize).min(MOST_SHARES)) }
    }
}
