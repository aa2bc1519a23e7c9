//! Rotating queries and keys into the cache on CUDA: bring the old cache over where the result is another buffer, then
//! one launch for queries, keys and values.

use super::cache_rows::{RowParams, SlotParams, bring_over};
use super::chunk::{CHUNK, aligned_to};
use super::launch::{Shape, launch as launch_kernel};
use super::{module, variants};
use crate::error::Result;
use crate::log;
use crate::ops::rope_kv_cache_update::{RopeKvCacheUpdate, Rotation};
use crate::stream::Stream;
use crate::tensor::DType;

const KERNEL: &str = "rope_kv_cache_update";
const THREADS: u32 = 128;

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
}

/// `Rotation` of `kernels/rope_kv_cache_update.cu`.
#[repr(C)]
struct RotationParams {
    positions: *const i32,
    cos_sin: *const f32,
    row_stride: i64,
    max_positions: i32,
    half: i32,
    interleaved: i32,
    aligned: i32,
}

/// `RopeParams` of `kernels/rope_kv_cache_update.cu`.
#[repr(C)]
struct Params {
    key: RowParams,
    value: RowParams,
    slot_mapping: SlotParams,
    query: QueryParams,
    rotation: RotationParams,
}

// The kernel asserts the same numbers.
const _: () =
    assert!(size_of::<QueryParams>() == 48 && size_of::<RotationParams>() == 40 && size_of::<Params>() == 296);

fn queries(problem: &RopeKvCacheUpdate) -> QueryParams {
    let (rows, out) = (&problem.query, &problem.query_out);
    let size = rows.dtype.size() as i64;
    // Heads have a multiple of 8 elements, so that chunks fill them.
    let places = [rows.data as i64, rows.stride(0) * size, rows.stride(1) * size, out.data as i64];
    QueryParams {
        rows: rows.data,
        row_token_stride: rows.stride(0),
        row_head_stride: rows.stride(1),
        out: out.data,
        num_heads: rows.dims[1] as i32,
        head_dim: rows.dims[2] as i32,
        aligned: i64::from(aligned_to(CHUNK, &places)),
    }
}

fn rotation(rotation: &Rotation, dtype: DType) -> RotationParams {
    let chunk = CHUNK / dtype.size();
    // Neighbours turn within a chunk; else a chunk of first elements turns with one of second elements.
    let whole = rotation.rotated.is_multiple_of(if rotation.interleaved { chunk } else { 2 * chunk });
    let table = [rotation.cos_sin as i64, rotation.row_stride * size_of::<f32>() as i64];
    RotationParams {
        positions: rotation.positions,
        cos_sin: rotation.cos_sin,
        row_stride: rotation.row_stride,
        max_positions: rotation.max_pos as i32,
        half: (rotation.rotated / 2) as i32,
        interleaved: i32::from(rotation.interleaved),
        aligned: i32::from(whole && aligned_to(CHUNK, &table)),
    }
}

fn variant(problem: &RopeKvCacheUpdate) -> Result<usize> {
    variants::find(KERNEL, &[variants::dtype_value(problem.query.dtype)])
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
    // One row a CTA, its queries, keys and values apart.
    let shape = Shape { grid: [num_rows as u32, 3, 1], threads: THREADS, shared_memory: 0 };
    log::call(KERNEL, (variant, update.cache_dtype, shape), || {
        format!("{} into {} with {shape:?}", variants::VARIANTS[variant].name, update.cache_dtype)
    });
    let params = Params {
        key: RowParams::new(&update.key, update.cache_dtype),
        value: RowParams::new(&update.value, update.cache_dtype),
        slot_mapping: SlotParams::new(update),
        query: queries(problem),
        rotation: rotation(&problem.rotation, dtype),
    };
    // SAFETY: `Params` is the kernel's parameter; the caller vouches for the memory.
    unsafe { launch_kernel(module::function(variant)?, shape, stream, &params) }
}
