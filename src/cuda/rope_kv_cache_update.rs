//! Rotating queries and keys into the cache on CUDA: bring the old cache over where the result is another buffer, then
//! one launch for queries, keys and values.

use super::cache_rows::{self, bring_over};
use super::chunk::{self, CHUNK, aligned_to};
use super::kernel::Launch;
use super::params::cache_rows::{HeadSharing, NewRows, RowSharing};
use super::params::rope_kv_cache_update::{self as params, QueryRows, ROPE_HEADS, RopeParams};
use super::params::slots::SlotMapping;
use crate::error::Result;
use crate::problem::rope_kv_cache_update::{RopeKvCacheUpdate, Rotation};
use crate::stream::Stream;
use crate::tensor::{DType, Tensor};

const KERNEL: &str = "rope_kv_cache_update";
const KERNEL_SM80: &str = "rope_kv_cache_update_sm80";

fn queries(problem: &RopeKvCacheUpdate) -> QueryRows {
    let (rows, out) = (&problem.query, &problem.query_out);
    let size = rows.dtype.size() as i64;
    // Heads have a multiple of 8 elements, so that chunks fill them.
    let places = [rows.data as i64, rows.stride(0) * size, rows.stride(1) * size, out.data as i64];
    let aligned = may_take_chunks(&problem.rotation, rows.dtype) && aligned_to(CHUNK, &places);
    QueryRows {
        rows: rows.data.cast(),
        row_token_stride: rows.stride(0),
        row_head_stride: rows.stride(1),
        out: out.data.cast(),
        num_heads: rows.dims[1] as i32,
        head_dim: rows.dims[2] as i32,
        aligned: i64::from(aligned),
        sharing: sharing(rows, &problem.rotation, aligned, ROPE_HEADS as u32),
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

fn rotation(rotation: &Rotation) -> params::Rotation {
    params::Rotation {
        positions: rotation.positions,
        cos_sin: rotation.cos_sin,
        row_stride: rotation.row_stride,
        max_positions: rotation.max_pos as i32,
        half: (rotated(rotation) / 2) as i32,
        interleaved: i64::from(rotation.interleaved),
    }
}

/// `None` where there is no row.
fn plan(problem: &RopeKvCacheUpdate) -> Result<Option<Launch<RopeParams>>> {
    let (update, dtype) = (&problem.update, problem.query.dtype);
    let num_rows = update.slot_mapping.len();
    if num_rows == 0 {
        return Ok(None);
    }
    let variant = cache_rows::variant([KERNEL, KERNEL_SM80], dtype)?;
    let query = queries(problem);
    let may = may_take_chunks(&problem.rotation, dtype);
    let key = NewRows::in_pieces(&update.key, update.cache_dtype, may, |chunks| {
        sharing(&update.key.rows, &problem.rotation, chunks, 1)
    });
    let value = NewRows::new(&update.value, update.cache_dtype, ROPE_HEADS as u32);
    let (sharing, shape) = RowSharing::new(num_rows, &[&query.sharing, &key.sharing, &value.sharing])?;
    let slot_mapping = SlotMapping::new(update);
    let params = RopeParams { key, value, slot_mapping, sharing, query, rotation: rotation(&problem.rotation) };
    Ok(Some(Launch::new(KERNEL, variant, shape, params)))
}

/// Load the kernel that [`launch`] takes.
pub(crate) fn prepare(problem: &RopeKvCacheUpdate) -> Result {
    plan(problem)?.iter().try_for_each(Launch::load)
}

/// # Safety
/// The problem's views are device memory of the current context that outlives the kernel's run, the results writable.
pub(crate) unsafe fn launch(problem: &RopeKvCacheUpdate, stream: Stream) -> Result {
    let plan = plan(problem)?;
    // SAFETY: this function's contract.
    unsafe { bring_over(&problem.update, stream) }?;
    // SAFETY: `RopeParams` is the kernel's parameter; the caller vouches for the memory.
    plan.iter().try_for_each(|launch| unsafe { launch.enqueue(stream) })
}
