//! `gather_kv_cache` on CUDA: a thread copies vectors of 16 bytes of the results.

use super::chunk::{CHUNK, aligned_to};
use super::device::Device;
use super::enqueue::LaunchConfig;
use super::kernel_launch::Launch;
use super::params::gather_kv_cache::{Fp8Encoding, GATHER_SEQS, GATHER_THREADS, GatherParams, GatheredRows};
use super::variants;
use crate::error::Result;
use crate::problem::gather_kv_cache::{self, GatherKvCache};
use crate::stream::Stream;
use crate::tensor::DType;

const KERNEL: &str = "gather_kv_cache";
/// Bytes of the results per CTA if the GPU has more than one wave of them.
const CTA_BYTES: usize = 1 << 16;
/// The same for rows that are copied bit by bit.
const COPY_CTA_BYTES: usize = 1 << 15;
/// CTAs per SM of a full wave.
const CTAS_PER_SM: usize = 4;
/// Maximum CTAs per row: the limit of the grid's second dimension.
const MAX_CTAS_PER_ROW: usize = 65535;
/// Maximum bytes per head, a cache line, for which a warp reads K and V of interleaved heads together.
const INTERLEAVED_HEAD_BYTES: i64 = 128;

/// The vectors in which a thread copies the results.
#[derive(Clone, Copy)]
struct VectorMove {
    /// The variant's dtype: u8 for rows that are copied bit by bit.
    dtype: DType,
    /// Elements of the dtype per vector: 16 bytes of the results; 8 bytes for u8 if 16 do not divide a head; 1 element if
    /// addresses or strides are not aligned.
    vector_elements: usize,
}

impl VectorMove {
    fn of(problem: &GatherKvCache) -> Self {
        let (stored, written) = (problem.cache_dtype.size(), problem.keys.rows.dtype.size());
        // Whether vectors of `bytes` bytes of the results are aligned in the cache and in the results.
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
            (false, Some(vector_elements)) => Self { dtype: DType::U8, vector_elements },
            (true, Some(CHUNK)) => Self { dtype, vector_elements: CHUNK / written },
            _ => Self { dtype: if written == 1 { DType::U8 } else { dtype }, vector_elements: 1 },
        }
    }
}

fn rows(
    of: &gather_kv_cache::GatheredRows,
    cache_dtype: DType,
    moves: VectorMove,
    interleaves_heads: bool,
) -> GatheredRows {
    let bytes = |stride: i64| stride * cache_dtype.size() as i64;
    let head_vectors =
        (of.rows.dims[2] as usize * of.rows.dtype.size() / (moves.vector_elements * moves.dtype.size())) as u32;
    let row_vectors = of.rows.dims[1] as u32 * head_vectors;
    GatheredRows {
        cache: of.cache.data,
        page_stride: bytes(of.cache.page_stride),
        token_stride: bytes(of.cache.token_stride),
        head_stride: bytes(of.cache.head_stride),
        rows: of.rows.data,
        scale: of.scale.map_or(std::ptr::null(), |scale| scale.values),
        scale_stride: of.scale.map_or(0, |scale| i64::from(scale.per_head)),
        head_vectors,
        row_vectors,
        group_vectors: if interleaves_heads { head_vectors } else { row_vectors },
    }
}

fn plan(problem: &GatherKvCache) -> Result<Launch<GatherParams>> {
    let moves = VectorMove::of(problem);
    let variant = variants::find(KERNEL, &[variants::dtype_value(moves.dtype)])?;
    let sides = [&problem.keys, &problem.values];
    let interleaves_heads = sides.into_iter().all(|of| {
        let head = of.rows.dims[2];
        of.cache.head_stride == 2 * head && head * problem.cache_dtype.size() as i64 <= INTERLEAVED_HEAD_BYTES
    });
    let [keys, values] = sides.map(|of| rows(of, problem.cache_dtype, moves, interleaves_heads));
    let row_vectors = (keys.row_vectors + values.row_vectors) as usize;
    let wave = CTAS_PER_SM * Device::current()?.sms as usize;
    let partition = RowPartition::new(problem, moves.dtype == DType::U8, row_vectors, wave);
    let config = LaunchConfig {
        grid: [partition.ctas as u32, partition.row_ctas as u32, 1],
        threads: GATHER_THREADS,
        shared_memory: 0,
    };
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
        cta_rows: partition.cta_rows as i32,
        encoding: match problem.cache_dtype {
            _ if !converts => Fp8Encoding::None,
            DType::F8E4M3FN => Fp8Encoding::F8E4M3Fn,
            _ => Fp8Encoding::F8E5M2,
        },
        vector_elements: moves.vector_elements as i32,
    };
    Ok(Launch::new(KERNEL, variant, config, params))
}

/// Loads the kernel that [`launch`] enqueues.
pub(crate) fn prepare(problem: &GatherKvCache) -> Result {
    plan(problem)?.load()
}

/// Enqueues the kernel.
///
/// # Safety
/// The problem's views are device memory of the current context that stays valid until the kernel has run, and the results
/// are writable.
pub(crate) unsafe fn launch(problem: &GatherKvCache, stream: Stream) -> Result {
    // SAFETY: `GatherParams` is the kernel's parameter struct, and the caller guarantees the memory.
    unsafe { plan(problem)?.enqueue(stream) }
}

/// How rows are divided between CTAs.
struct RowPartition {
    /// Rows per CTA.
    cta_rows: usize,
    /// Number of ranges of rows.
    ctas: usize,
    /// CTAs per range, which divide the vectors of its rows.
    row_ctas: usize,
}

impl RowPartition {
    /// `wave` is the number of CTAs that run at once.
    fn new(problem: &GatherKvCache, copies: bool, row_vectors: usize, wave: usize) -> Self {
        let bytes =
            |of: &gather_kv_cache::GatheredRows| (of.rows.dims[1] * of.rows.dims[2]) as usize * of.rows.dtype.size();
        let row_bytes = bytes(&problem.keys) + bytes(&problem.values);
        let even = problem.capacity.div_ceil(wave).max(1);
        // Each CTA adds up the lengths before its rows. With many sequences that takes long, so there is only one wave.
        let one_wave = problem.num_seqs > GATHER_SEQS as usize || even * row_bytes <= CTA_BYTES;
        let cta_bytes = if copies { COPY_CTA_BYTES } else { CTA_BYTES };
        let cta_rows = if one_wave { even } else { even.min((cta_bytes / row_bytes).max(1)) };
        let ctas = problem.capacity.div_ceil(cta_rows).max(1);
        let row_ctas = (row_bytes / CTA_BYTES).max(wave / ctas);
        Self {
            cta_rows,
            ctas,
            row_ctas: row_ctas.clamp(1, row_vectors.div_ceil(GATHER_THREADS as usize).min(MAX_CTAS_PER_ROW)),
        }
    }
}
