//! `rope_kv_cache_update` on CUDA: copies the old cache if the result is another buffer, then one launch rotates queries
//! and keys and stores keys and values.

use super::cache_rows::{self, copy_unaliased_caches};
use super::chunk::{self, CHUNK, aligned_to};
use super::kernel_launch::Launch;
use super::params::cache_rows::{HeadPartition, NewRows, RowPartition};
use super::params::rope_kv_cache_update::{self as params, QueryRows, ROPE_HEADS_PER_THREAD, RopeParams};
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
    // A head has a multiple of 8 elements, so 16-byte vectors leave no remainder.
    let places = [rows.data as i64, rows.stride(0) * size, rows.stride(1) * size, out.data as i64];
    let aligned = may_align(&problem.rotation, rows.dtype) && aligned_to(CHUNK, &places);
    QueryRows {
        rows: rows.data.cast(),
        row_token_stride: rows.stride(0),
        row_head_stride: rows.stride(1),
        out: out.data.cast(),
        num_heads: rows.dims[1] as i32,
        head_dim: rows.dims[2] as i32,
        aligned: i64::from(aligned),
        heads: partition(rows, &problem.rotation, aligned, ROPE_HEADS_PER_THREAD as u32),
    }
}

/// Rotated elements per head: 0 without a table.
fn rotated(rotation: &Rotation) -> usize {
    if rotation.max_pos == 0 { 0 } else { rotation.rotated }
}

/// Whether vectors may be 16 bytes: the table is aligned, and vectors hold whole pairs or whole halves of pairs.
fn may_align(rotation: &Rotation, dtype: DType) -> bool {
    let chunk = CHUNK / dtype.size();
    let table = [rotation.cos_sin as i64, rotation.row_stride * size_of::<f32>() as i64];
    // Interleaved pairs lie within a vector; else a vector of first elements goes with one of second elements.
    rotated(rotation).is_multiple_of(if rotation.interleaved { chunk } else { 2 * chunk })
        && (rotated(rotation) == 0 || aligned_to(CHUNK, &table))
}

/// How the vectors of `rows` are divided between threads. If a 16-byte vector holds whole pairs, a thread has one of up to
/// `heads_per_thread` heads; else it has a vector of first elements and one of second elements, of one head.
fn partition(rows: &Tensor, rotation: &Rotation, aligned: bool, heads_per_thread: u32) -> HeadPartition {
    let (num_heads, head_dim, rotated) = (rows.dims[1] as u32, rows.dims[2] as u32, rotated(rotation) as u32);
    let elements = chunk::elements(rows.dtype, aligned);
    let (rotated_vectors, heads) = if rotation.interleaved && aligned {
        (rotated / elements, heads_per_thread)
    } else {
        (rotated / 2 / elements, 1)
    };
    HeadPartition::new(rotated_vectors + (head_dim - rotated) / elements, rotated_vectors, num_heads, heads)
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

/// The launch; `None` if there is no row.
fn plan(problem: &RopeKvCacheUpdate) -> Result<Option<Launch<RopeParams>>> {
    let (update, dtype) = (&problem.update, problem.query.dtype);
    let num_rows = update.slot_mapping.len();
    if num_rows == 0 {
        return Ok(None);
    }
    let variant = cache_rows::variant([KERNEL, KERNEL_SM80], dtype)?;
    let query = queries(problem);
    let may = may_align(&problem.rotation, dtype);
    let key = NewRows::partitioned(&update.key, update.cache_dtype, may, |aligned| {
        partition(&update.key.rows, &problem.rotation, aligned, 1)
    });
    let value = NewRows::new(&update.value, update.cache_dtype, ROPE_HEADS_PER_THREAD as u32);
    let (partition, config) = RowPartition::new(num_rows, &[&query.heads, &key.heads, &value.heads])?;
    let slot_mapping = SlotMapping::new(update);
    let params = RopeParams { key, value, slot_mapping, partition, query, rotation: rotation(&problem.rotation) };
    Ok(Some(Launch::new(KERNEL, variant, config, params)))
}

/// Loads the kernel that [`launch`] enqueues.
pub(crate) fn prepare(problem: &RopeKvCacheUpdate) -> Result {
    plan(problem)?.iter().try_for_each(Launch::load)
}

/// # Safety
/// The problem's views are device memory of the current context that outlives the kernel's run, the results writable.
pub(crate) unsafe fn launch(problem: &RopeKvCacheUpdate, stream: Stream) -> Result {
    let plan = plan(problem)?;
    // SAFETY: this function has the same contract.
    unsafe { copy_unaliased_caches(&problem.update, stream) }?;
    // SAFETY: `RopeParams` is the kernel's parameter; the caller guarantees that its memory is valid.
    plan.iter().try_for_each(|launch| unsafe { launch.enqueue(stream) })
}
