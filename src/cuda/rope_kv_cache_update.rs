//! Rotating queries and keys into the cache on CUDA: bring the old cache over where the result is another buffer, then
//! one launch for queries, keys and values.

use super::cache_rows::{self, HeadSharing, RowParams, RowSharing, SlotParams, bring_over};
use super::chunk::{self, CHUNK, aligned_to};
use super::launch::launch as launch_kernel;
use super::{module, variants};
use crate::error::Result;
use crate::log;
use crate::ops::rope_kv_cache_update::{RopeKvCacheUpdate, Rotation};
use crate::stream::Stream;
use crate::tensor::{DType, Tensor};

const KERNEL: &str = "rope_kv_cache_update";
const KERNEL_SM80: &str = "rope_kv_cache_update_sm80";

/// Heads of values in a share of a row, and of queries whose pairs are neighbours: `kHeads` of the kernel.
const HEADS: u32 = 2;

/// `QueryRows` of `kernels/rope_kv_cache_update.cu`.
#[repr(C)]
struct QueryParams {
    rows: *const u8,
    row_token_stride: i64,
    row_head_stride: i64,
    out: *mut u8,
    num_heads: i32,
    head_dim: i32,
    aligned: i64,
    sharing: HeadSharing,
}

/// `Rotation` of `kernels/rope_kv_cache_update.cu`.
#[repr(C)]
struct RotationParams {
    positions: *const i32,
    cos_sin: *const f32,
    row_stride: i64,
    max_positions: i32,
    half: i32,
    interleaved: i64,
}

/// `RopeParams` of `kernels/rope_kv_cache_update.cu`.
#[repr(C)]
struct Params {
    key: RowParams,
    value: RowParams,
    slot_mapping: SlotParams,
    sharing: RowSharing,
    query: QueryParams,
    rotation: RotationParams,
}

// The kernel asserts the same numbers.
const _: () =
    assert!(size_of::<QueryParams>() == 64 && size_of::<RotationParams>() == 40 && size_of::<Params>() == 360);

fn queries(problem: &RopeKvCacheUpdate) -> QueryParams {
    let (rows, out) = (&problem.query, &problem.query_out);
    let size = rows.dtype.size() as i64;
    // Heads have a multiple of 8 elements, so that chunks fill them.
    let places = [rows.data as i64, rows.stride(0) * size, rows.stride(1) * size, out.data as i64];
    let aligned = may_take_chunks(&problem.rotation, rows.dtype) && aligned_to(CHUNK, &places);
    QueryParams {
        rows: rows.data,
        row_token_stride: rows.stride(0),
        row_head_stride: rows.stride(1),
        out: out.data,
        num_heads: rows.dims[1] as i32,
        head_dim: rows.dims[2] as i32,
        aligned: i64::from(aligned),
        sharing: sharing(rows, &problem.rotation, aligned, HEADS),
    }
}

/// Elements that are rotated: none without a table.
fn rotated(rotation: &Rotation) -> usize {
    if rotation.max_pos == 0 { 0 } else { rotation.rotated }
}

/// The table is aligned, and chunks hold whole pairs, or halves of them.
fn may_take_chunks(rotation: &Rotation, dtype: DType) -> bool {
    let chunk = CHUNK / dtype.size();
    let table = [rotation.cos_sin as i64, rotation.row_stride * size_of::<f32>() as i64];
    // Neighbours turn within a chunk; else a chunk of first elements turns with one of second elements.
    rotated(rotation).is_multiple_of(if rotation.interleaved { chunk } else { 2 * chunk })
        && (rotated(rotation) == 0 || aligned_to(CHUNK, &table))
}

/// How heads of `rows` are shared out. Where chunks do not hold whole pairs, a piece is a chunk of first elements with one
/// of second elements, of one head; where they do, a piece is a chunk of as many as `heads`.
fn sharing(rows: &Tensor, rotation: &Rotation, chunks: bool, heads: u32) -> HeadSharing {
    let (num_heads, head_dim, rotated) = (rows.dims[1] as u32, rows.dims[2] as u32, rotated(rotation) as u32);
    let elements = chunk::elements(rows.dtype, chunks);
    let (turned, heads) =
        if rotation.interleaved && chunks { (rotated / elements, heads) } else { (rotated / 2 / elements, 1) };
    HeadSharing::new(turned + (head_dim - rotated) / elements, turned, num_heads, heads)
}

fn rotation(rotation: &Rotation) -> RotationParams {
    RotationParams {
        positions: rotation.positions,
        cos_sin: rotation.cos_sin,
        row_stride: rotation.row_stride,
        max_positions: rotation.max_pos as i32,
        half: (rotated(rotation) / 2) as i32,
        interleaved: i64::from(rotation.interleaved),
    }
}

fn variant(problem: &RopeKvCacheUpdate) -> Result<usize> {
    cache_rows::variant([KERNEL, KERNEL_SM80], problem.query.dtype)
}

/// Load the kernel that [`launch`] takes.
pub(crate) fn prepare(problem: &RopeKvCacheUpdate) -> Result {
    module::function(variant(problem)?).map(|_| ())
}

/// # Safety
/// The problem's views are device memory of the current context that outlives the kernel's run, the results writable.
pub(crate) unsafe fn launch(problem: &RopeKvCacheUpdate, stream: Stream) -> Result {
    let (update, dtype) = (&problem.update, problem.query.dtype);
    // SAFETY: this function's contract.
    unsafe { bring_over(update, stream) }?;
    let num_rows = update.slot_mapping.len();
    if num_rows == 0 {
        return Ok(());
    }
    let variant = variant(problem)?;
    let query = queries(problem);
    let may = may_take_chunks(&problem.rotation, dtype);
    let key = RowParams::in_pieces(&update.key, update.cache_dtype, may, |chunks| {
        sharing(&update.key.rows, &problem.rotation, chunks, 1)
    });
    let value = RowParams::new(&update.value, update.cache_dtype, HEADS);
    let (sharing, shape) = RowSharing::new(num_rows, &[&query.sharing, &key.sharing, &value.sharing])?;
    log::call(KERNEL, (variant, update.cache_dtype, shape), || {
        format!("{} into {} with {shape:?}", variants::VARIANTS[variant].name, update.cache_dtype)
    });
    let slot_mapping = SlotParams::new(update);
    let params = Params { key, value, slot_mapping, sharing, query, rotation: rotation(&problem.rotation) };
    // SAFETY: `Params` is the kernel's parameter; the caller vouches for the memory.
    unsafe { launch_kernel(module::function(variant)?, shape, stream, &params) }
}
