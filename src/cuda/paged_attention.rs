//! Paged attention on CUDA: which work shapes a call needs, how large their grids are, and the kernels' one argument.
//!
//! Lengths are known on the device alone, so a grid holds every tile that the static sizes allow; the kernels find their
//! tiles themselves and those without one leave. `docs/kernels.md` explains the work shapes.

use super::launch::{Shape, launch as launch_kernel};
use super::{module, variants};
use crate::error::{Error, Result, ensure};
use crate::log;
use crate::ops::KvView;
use crate::ops::paged_attention::PagedAttention;
use crate::stream::Stream;
use crate::tensor::Tensor;
use std::f32::consts::LOG2_E;
use std::mem::offset_of;
use std::sync::LazyLock;

const KERNEL: &str = "paged_attention";

/// The kernels take 16 bytes at a time.
const ALIGNMENT: i64 = 16;

/// Positions of keys are 32-bit numbers to which a block's size can be added.
const LONGEST_CONTEXT: usize = i32::MAX as usize - 256;

/// With this much shared memory a CTA shares an SM of 228 KB with one other at most. Decode is bound by memory, which two
/// CTAs keep busy; more would only make the last wave of CTAs, in which SMs run empty, longer.
const AT_MOST_TWO_CTAS: u32 = 228 * 1024 / 3 - 1024 + 128;

/// `KvSource` of `kernels/include/attention_params.cuh`.
#[derive(Clone, Copy)]
#[repr(C)]
struct KvSource {
    base: *const u8,
    page_stride: i64,
    token_stride: i64,
    head_stride: i64,
}

/// `AttentionParams` of `kernels/include/attention_params.cuh`, which says what each is.
#[derive(Clone, Copy)]
#[repr(C)]
struct Params {
    query: *const u8,
    query_token_stride: i64,
    query_head_stride: i64,
    out: *mut u8,
    out_token_stride: i64,
    out_head_stride: i64,
    lse: *mut f32,
    key: KvSource,
    value: KvSource,
    block_tables: *const i32,
    block_table_stride: i64,
    context_lens: *const i32,
    query_start_loc: *const i32,
    num_seqs: *const i32,
    softmax_scale_log2: f32,
    softcap_log2: f32,
    softcap_into: f32,
    num_tokens: i32,
    max_seqs: i32,
    num_pages: i32,
    page_size: i32,
    capacity: i32,
    num_kv_heads: i32,
    group: i32,
    group_reciprocal: f32,
    head_dim: i32,
    window_left: i32,
    window_right: i32,
    min_queries: i32,
    max_queries: i32,
    clears_unowned_rows: i32,
    reserved: i32,
}

// The header asserts the same numbers.
const _: () = assert!(size_of::<KvSource>() == 32 && size_of::<Params>() == 232);
const _: () = assert!(offset_of!(Params, key) == 56 && offset_of!(Params, softmax_scale_log2) == 160);
const _: () = assert!(offset_of!(Params, num_tokens) == 172 && offset_of!(Params, clears_unowned_rows) == 224);

/// What the kernels of one work shape, element size and head dimension are built for.
#[derive(Debug)]
struct Tile {
    /// Value of the axis `shape`: `prefill` or `decode`.
    shape: &'static str,
    element_bytes: usize,
    /// The head dimension up to which it serves, as a number and as the value of the axis `head_dim`.
    head_dim: usize,
    head_dim_value: &'static str,
    /// Packed query rows of a CTA.
    rows: i64,
    threads: u32,
    /// Dynamic shared memory, in bytes.
    shared_memory: u32,
}

/// The table in the kernels' own header.
static TILES: LazyLock<Vec<Tile>> =
    LazyLock::new(|| include_str!("../../kernels/include/tile_shape.cuh").lines().filter_map(tile).collect());

/// A line of the table: `ROW(shape, bytes, D, row warps, key warps, 16-row tiles, keys, stages, CTAs, shared bytes)`.
fn tile(line: &'static str) -> Option<Tile> {
    let fields = line.trim_start().strip_prefix("ROW(")?.split_once(')')?.0;
    let mut fields = fields.split(',').map(str::trim);
    let (shape, element_bytes, head_dim_value) = (fields.next()?, fields.next()?.parse().ok()?, fields.next()?);
    let numbers: Vec<u32> = fields.map_while(|field| field.parse().ok()).collect();
    let &[row_warps, key_warps, row_tiles, _keys, _stages, _ctas, shared_bytes] = &numbers[..] else { return None };
    Some(Tile {
        shape,
        element_bytes,
        head_dim: head_dim_value.parse().ok()?,
        head_dim_value,
        rows: i64::from(16 * row_tiles * row_warps),
        threads: 32 * row_warps * key_warps,
        shared_memory: shared_bytes,
    })
}

/// The tile of `shape` whose head dimension is the next one that holds D.
fn tile_for(problem: &PagedAttention, shape: &str) -> Result<&'static Tile> {
    let element_bytes = problem.query.dtype.size();
    let serves = |t: &&Tile| t.shape == shape && t.element_bytes == element_bytes && t.head_dim >= problem.head_dim;
    TILES.iter().filter(serves).min_by_key(|t| t.head_dim).ok_or_else(|| {
        let (dtype, head_dim) = (problem.query.dtype, problem.head_dim);
        Error::unimplemented(format!("no {shape} kernel is built for {dtype} and head dimension {head_dim}"))
    })
}

/// One kernel launch: the tiles of the sequences that have `min_queries` to `max_queries` queries.
struct Launch {
    variant: usize,
    tile: &'static Tile,
    /// At least as many as one KV head can have.
    tiles: i64,
    min_queries: i32,
    max_queries: i32,
}

impl Launch {
    fn new(problem: &PagedAttention, tile: &'static Tile, tiles: i64, queries: (i64, i64)) -> Result<Self> {
        let score = if problem.soft_cap > 0.0 { "modified" } else { "plain" };
        let values = [variants::dtype_value(problem.query.dtype), tile.head_dim_value, tile.shape, score];
        Ok(Self {
            variant: variants::find(KERNEL, &values)?,
            tile,
            tiles,
            min_queries: queries.0 as i32,
            max_queries: queries.1 as i32,
        })
    }

    /// A CTA for each tile and KV head, fewer where the grid has no room for them: CTAs that find more tiles than there
    /// are CTAs take several.
    fn shape(&self, num_kv_heads: i64) -> Shape {
        let tiles = self.tiles.clamp(1, i64::from(i32::MAX) / num_kv_heads);
        let least = if self.tile.shape == "decode" { AT_MOST_TWO_CTAS } else { 0 };
        Shape {
            grid: [(tiles * num_kv_heads) as u32, 1, 1],
            threads: self.tile.threads,
            shared_memory: self.tile.shared_memory.max(least),
        }
    }
}

/// The launches of a call, in order; none where there is no row.
///
/// A sequence whose packed rows fill no more than one decode tile is decoded, a longer one prefilled, each in a launch
/// that skips the other's. Which one a sequence belongs to depends on its own length alone; this is what
/// `batch_invariant` asks for. Otherwise, where the sizes leave room for one query a sequence on average, decode takes all.
fn launches(problem: &PagedAttention) -> Result<[Option<Launch>; 2]> {
    let (rows, seqs) = (problem.num_rows as i64, problem.max_seqs as i64);
    let group = (problem.num_q_heads / problem.num_kv_heads) as i64;
    let unlimited = i64::from(i32::MAX);
    if rows == 0 {
        return Ok([None, None]);
    }
    let decode = tile_for(problem, "decode")?;
    // The sum over sequences that have a row of ceil(packed rows / tile) is at most this.
    let bound = |tile: &Tile, sequences: i64| (rows * group + sequences * (tile.rows - 1)) / tile.rows;
    if rows <= seqs && !problem.batch_invariant {
        let tiles = bound(decode, rows.min(seqs));
        return Ok([Some(Launch::new(problem, decode, tiles, (1, unlimited))?), None]);
    }
    let few = (decode.rows / group).max(1);
    let decode_tiles = rows.min(seqs) * ((few * group + decode.rows - 1) / decode.rows);
    let decoded = Launch::new(problem, decode, decode_tiles, (1, few))?;
    let long_sequences = seqs.min(rows / (few + 1));
    if long_sequences == 0 {
        return Ok([Some(decoded), None]);
    }
    let prefill = tile_for(problem, "prefill")?;
    let prefilled = Launch::new(problem, prefill, bound(prefill, long_sequences), (few + 1, unlimited))?;
    Ok([Some(prefilled), Some(decoded)])
}

/// The kernels' argument, but for what differs between launches.
fn params(problem: &PagedAttention) -> Result<Params> {
    let group = (problem.num_q_heads / problem.num_kv_heads) as i32;
    let packed_rows = problem.num_rows as i64 * i64::from(group);
    ensure_fits("T * Hq / Hkv", packed_rows, i64::from(i32::MAX) - 256)?;
    let capacity = if problem.num_pages == 0 { 0 } else { problem.max_pages * problem.page_size };
    ensure_fits("max_pages * page_size", capacity as i64, LONGEST_CONTEXT as i64)?;
    check_rows("query", &problem.query)?;
    check_rows("out", &problem.out)?;
    let bytes = problem.query.dtype.size() as i64;
    check_view("K", &problem.k, bytes)?;
    check_view("V", &problem.v, bytes)?;
    let source = |view: &KvView| KvSource {
        base: view.data,
        page_stride: view.page_stride,
        token_stride: view.token_stride,
        head_stride: view.head_stride,
    };
    Ok(Params {
        query: problem.query.data,
        query_token_stride: problem.query.stride(0),
        query_head_stride: problem.query.stride(1),
        out: problem.out.data,
        out_token_stride: problem.out.stride(0),
        out_head_stride: problem.out.stride(1),
        lse: problem.lse.unwrap_or(std::ptr::null_mut()),
        key: source(&problem.k),
        value: source(&problem.v),
        block_tables: problem.block_tables,
        block_table_stride: problem.block_table_stride,
        context_lens: problem.context_lens,
        query_start_loc: problem.query_start_loc,
        num_seqs: problem.num_seqs,
        softmax_scale_log2: problem.scale * LOG2_E,
        softcap_log2: problem.soft_cap * LOG2_E,
        softcap_into: if problem.soft_cap > 0.0 { problem.scale / problem.soft_cap } else { 0.0 },
        num_tokens: problem.num_rows as i32,
        max_seqs: problem.max_seqs as i32,
        num_pages: problem.num_pages as i32,
        page_size: problem.page_size.clamp(1, i32::MAX as usize) as i32,
        capacity: capacity as i32,
        num_kv_heads: problem.num_kv_heads as i32,
        group,
        group_reciprocal: 1.0 / group as f32,
        head_dim: problem.head_dim as i32,
        // No key is further away than the context is long.
        window_left: if problem.window_left >= LONGEST_CONTEXT as i64 { -1 } else { problem.window_left as i32 },
        window_right: 0,
        min_queries: 1,
        max_queries: i32::MAX,
        clears_unowned_rows: 0,
        reserved: 0,
    })
}

fn ensure_fits(name: &str, size: i64, limit: i64) -> Result {
    if size < limit {
        return Ok(());
    }
    Err(Error::unimplemented(format!("{name} is {size}; the CUDA kernels count to {limit}")))
}

/// Rows `[T, H, D]` whose heads begin at multiples of 16 bytes.
fn check_rows(name: &str, tensor: &Tensor) -> Result {
    let bytes = tensor.dtype.size() as i64;
    check_alignment(name, tensor.data, &[tensor.stride(0) * bytes, tensor.stride(1) * bytes])
}

fn check_view(name: &str, view: &KvView, bytes: i64) -> Result {
    let strides = [view.page_stride, view.token_stride, view.head_stride];
    check_alignment(name, view.data, &strides.map(|stride| stride * bytes))
}

fn check_alignment(name: &str, data: *const u8, byte_strides: &[i64]) -> Result {
    ensure((data as i64) % ALIGNMENT == 0 && byte_strides.iter().all(|stride| stride % ALIGNMENT == 0), || {
        format!(
            "{name} lies at {data:p} with steps of {byte_strides:?} bytes, expected multiples of {ALIGNMENT} for both"
        )
    })
}

/// Load the kernels that [`launch`] takes.
pub(crate) fn prepare(problem: &PagedAttention) -> Result {
    params(problem)?;
    launches(problem)?.iter().flatten().try_for_each(|launch| module::function(launch.variant).map(|_| ()))
}

/// # Safety
/// The problem's views are device memory of the current context that outlives the kernels' run, `out` and `lse` writable.
pub(crate) unsafe fn launch(problem: &PagedAttention, stream: Stream) -> Result {
    let mut params = params(problem)?;
    let launches = launches(problem)?;
    // The first launch also writes the rows that no sequence owns.
    params.clears_unowned_rows = 1;
    for launch in launches.iter().flatten() {
        (params.min_queries, params.max_queries) = (launch.min_queries, launch.max_queries);
        let shape = launch.shape(problem.num_kv_heads as i64);
        log::call(KERNEL, (launch.variant, shape), || {
            format!("{} with {shape:?}", variants::VARIANTS[launch.variant].name)
        });
        // SAFETY: `Params` is the kernel's parameter; the caller vouches for the memory.
        unsafe { launch_kernel(module::function(launch.variant)?, shape, stream, &params) }?;
        params.clears_unowned_rows = 0;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tensor::DType;

    #[test]
    fn every_variant_has_its_tile_and_every_tile_its_variants() {
        let kernel = variants::KERNELS.iter().find(|k| k.name == KERNEL).expect("the table names it");
        let axes: Vec<&str> = kernel.axes.iter().map(|axis| axis.name).collect();
        assert_eq!(axes, ["dtype", "head_dim", "shape", "score"]);
        for dtype in kernel.axes[0].values {
            let bytes = if *dtype == "f32" { 4 } else { 2 };
            for head_dim in kernel.axes[1].values {
                for shape in kernel.axes[2].values {
                    let found = TILES
                        .iter()
                        .filter(|t| t.shape == *shape && t.element_bytes == bytes && t.head_dim_value == *head_dim);
                    assert_eq!(found.count(), 1, "{dtype} {head_dim} {shape}");
                }
            }
        }
        assert_eq!(TILES.len(), 2 * kernel.axes[1].values.len() * kernel.axes[2].values.len());
    }

    #[test]
    fn every_tile_fits_the_smallest_shared_memory() {
        for tile in TILES.iter() {
            assert!(tile.shared_memory.max(AT_MOST_TWO_CTAS) <= 99 * 1024, "{tile:?}");
        }
    }

    /// A call of these sizes; no memory.
    fn problem(rows: usize, seqs: usize, q_heads: usize, head_dim: usize) -> PagedAttention<'static> {
        let view = KvView { data: std::ptr::null_mut(), page_stride: 0, token_stride: 0, head_stride: 0 };
        let empty = Tensor::dense(DType::BF16, std::ptr::null_mut(), &[0, 8, 8]);
        PagedAttention {
            query: empty,
            k: view,
            v: view,
            context_lens: std::ptr::null(),
            block_tables: std::ptr::null(),
            block_table_stride: 0,
            query_start_loc: std::ptr::null(),
            num_seqs: std::ptr::null(),
            out: empty,
            lse: None,
            num_rows: rows,
            num_q_heads: q_heads,
            num_kv_heads: 2,
            head_dim,
            num_pages: 1,
            page_size: 16,
            max_seqs: seqs,
            max_pages: 1,
            scale: 1.0,
            window_left: -1,
            soft_cap: 0.0,
            batch_invariant: false,
        }
    }

    fn named(problem: &PagedAttention) -> Vec<(&'static str, i32, i32)> {
        let launches = launches(problem).expect("the sizes are allowed");
        let describe = |l: &Launch| (variants::VARIANTS[l.variant].name, l.min_queries, l.max_queries);
        launches.iter().flatten().map(describe).collect()
    }

    #[test]
    fn lengths_are_shared_out_between_the_shapes_without_gap_or_overlap() {
        let decode = "paged_attention_bf16_128_decode_plain";
        let prefill = "paged_attention_bf16_128_prefill_plain";
        assert_eq!(named(&problem(64, 64, 8, 80)), [(decode, 1, i32::MAX)]);
        assert_eq!(named(&problem(65, 64, 8, 80)), [(prefill, 5, i32::MAX), (decode, 1, 4)]);
        // Nobody can have more than 4 queries.
        assert_eq!(named(&problem(4, 1, 8, 80)), [(decode, 1, 4)]);
        let invariant = PagedAttention { batch_invariant: true, ..problem(64, 64, 8, 80) };
        assert_eq!(named(&invariant), [(prefill, 5, i32::MAX), (decode, 1, 4)]);
        assert!(named(&problem(0, 64, 8, 80)).is_empty());
    }

    #[test]
    fn the_grid_holds_every_tile_of_every_batch() {
        for (rows, seqs, q_heads) in [(64, 64, 8), (1000, 7, 2), (1000, 999, 6), (300, 40, 48), (5, 0, 8)] {
            let problem = problem(rows, seqs, q_heads, 128);
            let group = q_heads as i64 / 2;
            // The most tiles come from as many sequences as possible, each just past a multiple of the tile.
            for launch in launches(&problem).expect("the sizes are allowed").iter().flatten() {
                let (mut left, mut tiles) = (rows as i64, 0);
                let smallest = i64::from(launch.min_queries);
                for rest in (1..=seqs as i64).rev() {
                    let spare = (left - rest * smallest).max(0);
                    let queries = (smallest + spare).min(i64::from(launch.max_queries)).min(left);
                    if queries < smallest {
                        break;
                    }
                    tiles += (queries * group + launch.tile.rows - 1) / launch.tile.rows;
                    left -= queries;
                }
                assert!(tiles <= launch.tiles, "{rows} rows, {seqs} sequences, group {group}: {tiles} tiles");
                let shape = launch.shape(2);
                assert!(i64::from(shape.grid[0]) >= 2 * tiles.max(1) && shape.grid[0].is_multiple_of(2));
            }
        }
    }

    #[test]
    fn sizes_past_the_kernels_counters_are_refused_not_wrapped() {
        let long = PagedAttention { max_pages: 1 << 27, ..problem(1, 1, 2, 64) };
        assert!(params(&long).is_err_and(|e| e.message.contains("max_pages * page_size")));
        let wide = PagedAttention { window_left: i64::MAX, ..problem(1, 1, 2, 64) };
        assert_eq!(params(&wide).map(|p| p.window_left), Ok(-1));
    }
}
