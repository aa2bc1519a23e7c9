//! `gather_kv_cache` on CUDA: a thread copies vectors of 16 bytes of the results.

use super::chunk::{CHUNK, aligned_to};
use super::device::Device;
use super::enqueue::LaunchConfig;
use super::gather_token_scales;
use super::kernel_launch::{Launch, Parameter};
use super::params::gather_kv_cache::{
    ExactDivisor, Fp8Encoding, GATHER_SEQS, GATHER_STARTS_SEQS, GATHER_STARTS_THREADS, GATHER_THREADS, GatherParams,
    GatheredRows,
};
use super::params::gather_token_scales::GatherTokenScaleParams;
use super::variants;
use crate::error::Result;
use crate::problem::KvScaleCache;
use crate::problem::gather_kv_cache::{self, GatherKvCache};
use crate::stream::Stream;
use crate::tensor::DType;

const KERNEL: &str = "gather_kv_cache";
const STARTS_KERNEL: &str = "gather_kv_cache_starts";
/// Threads per warp.
const WARP: u32 = 32;
/// Bytes of the results per CTA if the GPU has more than one wave of them.
const CTA_BYTES: usize = 1 << 16;
/// The same for rows that are copied bit by bit.
const COPY_CTA_BYTES: usize = 1 << 15;
/// The least bytes of the results per CTA: two vectors per thread.
const MIN_CTA_BYTES: usize = 1 << 13;
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
        head_vectors: ExactDivisor::new(head_vectors),
        row_vectors,
        group_vectors: if interleaves_heads { head_vectors } else { row_vectors },
    }
}

/// The kernels' parameter, and the launch configuration of the kernel that copies rows in these vectors.
fn parameter(problem: &GatherKvCache, moves: VectorMove) -> Result<(GatherParams, LaunchConfig)> {
    let sides = [&problem.keys, &problem.values];
    let interleaves_heads = sides.into_iter().all(|of| {
        let head = of.rows.dims[2];
        of.cache.head_stride == 2 * head && head * problem.cache_dtype.size() as i64 <= INTERLEAVED_HEAD_BYTES
    });
    let [keys, values] = sides.map(|of| rows(of, problem.cache_dtype, moves, interleaves_heads));
    let row_vectors = keys.row_vectors + values.row_vectors;
    let wave = CTAS_PER_SM * Device::current()?.sms as usize;
    let partition = RowPartition::new(problem, moves.dtype == DType::U8, row_vectors as usize, wave);
    let config = LaunchConfig {
        grid: [partition.ctas as u32, partition.row_ctas as u32, 1],
        threads: GATHER_THREADS,
        shared_memory: 0,
    };
    let converts = problem.cache_dtype != problem.keys.rows.dtype;
    let table = &problem.table;
    let width = row_vectors.min(GATHER_THREADS);
    let rows_at_once = GATHER_THREADS / width;
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
        page_size: ExactDivisor::new(table.page_size as u32),
        num_pages: table.num_pages as i32,
        cta_rows: partition.cta_rows as i32,
        encoding: match problem.cache_dtype {
            _ if !converts => Fp8Encoding::None,
            DType::F8E4M3FN => Fp8Encoding::F8E4M3Fn,
            _ => Fp8Encoding::F8E5M2,
        },
        vector_elements: moves.vector_elements as i32,
        width: ExactDivisor::new(width),
        rows_at_once,
        group_vectors: ExactDivisor::new(keys.group_vectors + values.group_vectors),
        warps_find_tokens: i32::from(
            partition.is_small && problem.num_seqs <= WARP as usize && row_vectors.is_multiple_of(WARP),
        ),
    };
    Ok((params, config))
}

/// The launches, in their order.
fn plan(problem: &GatherKvCache) -> Result<Vec<Launch<GatherParams>>> {
    let moves = VectorMove::of(problem);
    let variant = variants::find(KERNEL, &[variants::dtype_value(moves.dtype)])?;
    let (params, config) = parameter(problem, moves)?;
    let mut launches = vec![];
    if problem.num_seqs > GATHER_SEQS as usize {
        launches.push(starts_launch(problem, params)?);
    }
    launches.push(Launch::new(KERNEL, variant, config, params));
    Ok(launches)
}

/// The launches for a cache with a scale per token and KV head.
fn plan_with_scales(problem: &GatherKvCache, scales: &KvScaleCache) -> Result<Vec<Launch<GatherTokenScaleParams>>> {
    let (params, _) = parameter(problem, VectorMove::of(problem))?;
    let params = GatherTokenScaleParams::new(problem, scales, &params);
    let launches = [Some(starts_launch(problem, params)?), gather_token_scales::launch(problem, &params)?];
    Ok(launches.into_iter().flatten().collect())
}

/// The launch that writes `cu_seqlens`, with a parameter that begins with [`GatherParams`].
fn starts_launch<P: Parameter>(problem: &GatherKvCache, params: P) -> Result<Launch<P>> {
    let ctas = problem.num_seqs.div_ceil(GATHER_STARTS_SEQS as usize).max(1);
    let config = LaunchConfig { grid: [ctas as u32, 1, 1], threads: GATHER_STARTS_THREADS, shared_memory: 0 };
    Ok(Launch::new(STARTS_KERNEL, variants::find(STARTS_KERNEL, &[])?, config, params))
}

/// Loads the kernels that [`launch`] enqueues.
pub(crate) fn prepare(problem: &GatherKvCache) -> Result {
    match &problem.scale_cache {
        None => plan(problem)?.iter().try_for_each(Launch::load),
        Some(scales) => plan_with_scales(problem, scales)?.iter().try_for_each(Launch::load),
    }
}

/// Enqueues the kernels.
///
/// # Safety
/// The problem's views are device memory of the current context that stays valid until the kernels have run, and the results
/// are writable.
pub(crate) unsafe fn launch(problem: &GatherKvCache, stream: Stream) -> Result {
    match &problem.scale_cache {
        // SAFETY: `GatherParams` is the parameter struct of both kernels, and the caller guarantees the memory.
        None => plan(problem)?.iter().try_for_each(|launch| unsafe { launch.enqueue(stream) }),
        Some(scales) => {
            // SAFETY: `GatherTokenScaleParams` is the parameter struct, or begins with it; the caller guarantees the memory.
            plan_with_scales(problem, scales)?.iter().try_for_each(|launch| unsafe { launch.enqueue(stream) })
        }
    }
}

/// How rows are divided between CTAs.
struct RowPartition {
    /// Rows per CTA.
    cta_rows: usize,
    /// Number of ranges of rows.
    ctas: usize,
    /// CTAs per range, which divide the vectors of its rows.
    row_ctas: usize,
    /// Whether the call needs half a wave at most.
    is_small: bool,
}

impl RowPartition {
    /// `wave` is the number of CTAs that run at once.
    fn new(problem: &GatherKvCache, copies: bool, row_vectors: usize, wave: usize) -> Self {
        let bytes =
            |of: &gather_kv_cache::GatheredRows| (of.rows.dims[1] * of.rows.dims[2]) as usize * of.rows.dtype.size();
        let row_bytes = bytes(&problem.keys) + bytes(&problem.values);
        // A small call takes half a wave: fewer CTAs start in less time.
        let half_wave = problem.capacity.div_ceil(wave / 2).max(MIN_CTA_BYTES / row_bytes).max(1);
        let is_small = half_wave * row_bytes <= COPY_CTA_BYTES;
        let even = if is_small { half_wave } else { problem.capacity.div_ceil(wave).max(1) };
        let one_wave = even * row_bytes <= CTA_BYTES;
        let cta_bytes = if copies { COPY_CTA_BYTES } else { CTA_BYTES };
        let cta_rows = if one_wave { even } else { even.min((cta_bytes / row_bytes).max(1)) };
        let ctas = problem.capacity.div_ceil(cta_rows).max(1);
        let row_ctas = (row_bytes / CTA_BYTES).max(wave / ctas);
        Self {
            cta_rows,
            ctas,
            row_ctas: row_ctas.clamp(1, row_vectors.div_ceil(GATHER_THREADS as usize).min(MAX_CTAS_PER_ROW)),
            is_small,
        }
    }
}

impl ExactDivisor {
    fn new(divisor: u32) -> Self {
        // The inverse is rounded up, by less than 1 in units of 2^-64. The error of a quotient is then less than dividend /
        // 2^64, which is below 1 / divisor, the least distance of a quotient to the next integer above it.
        let inverse = u64::MAX / u64::from(divisor) + u64::from(divisor > 1);
        Self { divisor, inverse_high: (inverse >> 32) as u32, inverse_low: inverse as u32 }
    }
}

#[test]
fn an_exact_inverse_divides_every_dividend() {
    for divisor in (2..300).chain([1 << 12, 4097, 65535, 65536, 65537, 1 << 31, u32::MAX - 1, u32::MAX]) {
        let by = ExactDivisor::new(divisor);
        let divided = |n: u64| (n * u64::from(by.inverse_high) + ((n * u64::from(by.inverse_low)) >> 32)) >> 32;
        let last = u64::from(u32::MAX);
        let multiples =
            (1..=500).map(|n| n * u64::from(divisor)).chain([last / u64::from(divisor) * u64::from(divisor)]);
        for n in multiples.flat_map(|n| [n - 1, n]).chain(last - 500..=last).filter(|n| *n <= last) {
            assert_eq!(divided(n), n / u64::from(divisor), "{n} / {divisor}");
        }
    }
}
