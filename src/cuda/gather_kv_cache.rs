//! Copying rows out of a paged cache on CUDA: a thread takes 16 bytes of the results at a time.

use super::chunk::{CHUNK, aligned_to};
use super::device::Device;
use super::kernel::Launch;
use super::launch::Shape;
use super::params::gather_kv_cache::{Codes, GATHER_SEQS, GATHER_THREADS, GatherParams, GatheredRows};
use super::variants;
use crate::error::Result;
use crate::problem::gather_kv_cache::{self, GatherKvCache};
use crate::problem::kv_cache_update::FP8_DTYPES;
use crate::stream::Stream;
use crate::tensor::DType;

const KERNEL: &str = "gather_kv_cache";
/// Bytes of the results that a CTA writes where there are enough of them, and how many CTAs per SM are enough.
const CTA_BYTES: usize = 1 << 16;
const ENOUGH_CTAS: usize = 4;
/// CTAs that may share a row: the limit of the grid's second dimension.
const MOST_SHARES: usize = 65535;

/// The variant copies codes as bytes.
fn variant(problem: &GatherKvCache) -> Result<usize> {
    let dtype = problem.keys.rows.dtype;
    let dtype = if FP8_DTYPES.contains(&dtype) { DType::U8 } else { dtype };
    variants::find(KERNEL, &[variants::dtype_value(dtype)])
}

/// Elements that a thread copies at once: 16 bytes of the results, or 8 codes, which fill every head; 1 where something is
/// not aligned.
fn piece(problem: &GatherKvCache) -> usize {
    let (stored, written) = (problem.cache_dtype.size(), problem.keys.rows.dtype.size());
    let pieces = if written == 1 { &[16, 8][..] } else { &[CHUNK / written] };
    let fits = |of: &gather_kv_cache::GatheredRows, piece: usize| {
        let strides = [of.cache.page_stride, of.cache.token_stride, of.cache.head_stride].map(|n| n * stored as i64);
        aligned_to(piece, &[of.rows.dims[2]])
            && aligned_to(piece * stored, &[of.cache.data as i64])
            && aligned_to(piece * stored, &strides)
            && aligned_to(piece * written, &[of.rows.data as i64])
    };
    let both = |piece: &&usize| [&problem.keys, &problem.values].into_iter().all(|of| fits(of, **piece));
    pieces.iter().find(both).copied().unwrap_or(1)
}

fn rows(of: &gather_kv_cache::GatheredRows, cache_dtype: DType, piece: usize) -> GatheredRows {
    let bytes = |stride: i64| stride * cache_dtype.size() as i64;
    let head_pieces = of.rows.dims[2] as u32 / piece as u32;
    GatheredRows {
        cache: of.cache.data,
        page_stride: bytes(of.cache.page_stride),
        token_stride: bytes(of.cache.token_stride),
        head_stride: bytes(of.cache.head_stride),
        rows: of.rows.data,
        scale: of.scale.map_or(std::ptr::null(), |scale| scale.values),
        scale_stride: of.scale.map_or(0, |scale| i64::from(scale.per_head)),
        head_pieces,
        row_pieces: of.rows.dims[1] as u32 * head_pieces,
    }
}

fn plan(problem: &GatherKvCache) -> Result<Launch<GatherParams>> {
    let variant = variant(problem)?;
    let piece = piece(problem);
    let [keys, values] = [&problem.keys, &problem.values].map(|of| rows(of, problem.cache_dtype, piece));
    let row_pieces = (keys.row_pieces + values.row_pieces) as usize;
    let enough = ENOUGH_CTAS * Device::current()?.sms as usize;
    let work = Work::new(problem, row_pieces, enough);
    let shape = Shape { grid: [work.ctas as u32, work.shares as u32, 1], threads: GATHER_THREADS, shared_memory: 0 };
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
        piece: piece as i32,
    };
    Ok(Launch::new(KERNEL, variant, shape, params))
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
    fn new(problem: &GatherKvCache, row_pieces: usize, enough: usize) -> Self {
        let bytes =
            |of: &gather_kv_cache::GatheredRows| (of.rows.dims[1] * of.rows.dims[2]) as usize * of.rows.dtype.size();
        let row_bytes = bytes(&problem.keys) + bytes(&problem.values);
        let even = problem.capacity.div_ceil(enough).max(1);
        // Finding the starts of many sequences takes long: then each CTA does it once.
        let most = if problem.num_seqs > GATHER_SEQS as usize { even } else { (CTA_BYTES / row_bytes).max(1) };
        let cta_rows = even.min(most);
        let ctas = problem.capacity.div_ceil(cta_rows).max(1);
        let shares = (row_bytes / CTA_BYTES).max(enough / ctas);
        Self { cta_rows, ctas, shares: shares.clamp(1, row_pieces.div_ceil(GATHER_THREADS as usize).min(MOST_SHARES)) }
    }
}
