//! Cache updates on CUDA: bring the old cache over where the result is another buffer, then write the new rows.

use super::launch::{Shape, copy, launch as launch_kernel};
use super::{module, variants};
use crate::error::Result;
use crate::log;
use crate::ops::kv_cache_update::{KvCacheUpdate, NewRows};
use crate::stream::Stream;
use crate::tensor::DType;

const KERNEL: &str = "kv_cache_update";
const THREADS: u32 = 128;

/// `NewRows` of `kernels/kv_cache_update.cu`.
#[repr(C)]
struct RowParams {
    rows: *const u8,
    row_token_stride: i64,
    row_head_stride: i64,
    cache: *mut u8,
    page_stride: i64,
    token_stride: i64,
    head_stride: i64,
    scale: *const f32,
    scale_stride: i64,
    head_dim: i32,
    aligned: i32,
}

/// `CacheUpdateParams` of `kernels/kv_cache_update.cu`.
#[repr(C)]
struct Params {
    key: RowParams,
    value: RowParams,
    slot_mapping: *const u8,
    num_slots: i64,
    page_size: i64,
    slots_are_64_bit: i32,
    num_heads: i32,
}

// The kernel asserts the same numbers.
const _: () = assert!(size_of::<RowParams>() == 80 && size_of::<Params>() == 192);

/// What the kernel gets of K or V.
fn rows(new: &NewRows) -> RowParams {
    let bytes = new.rows.dtype.size() as i64;
    let strides =
        [new.rows.stride(0), new.rows.stride(1), new.cache.page_stride, new.cache.token_stride, new.cache.head_stride];
    let addresses = [new.rows.data as i64, new.cache.data as i64];
    // Heads have a multiple of 8 elements, so that chunks fill them.
    let aligned = addresses.into_iter().chain(strides.map(|stride| stride * bytes)).all(|x| x % 16 == 0);
    RowParams {
        rows: new.rows.data,
        row_token_stride: strides[0],
        row_head_stride: strides[1],
        cache: new.cache.data,
        page_stride: strides[2],
        token_stride: strides[3],
        head_stride: strides[4],
        scale: new.scale.map_or(std::ptr::null(), |scale| scale.data.cast_const().cast()),
        scale_stride: new.scale.map_or(0, |scale| i64::from(scale.len() > 1)),
        head_dim: new.rows.dims[2] as i32,
        aligned: i32::from(aligned),
    }
}

fn variant(problem: &KvCacheUpdate) -> Result<usize> {
    variants::find(KERNEL, &[variants::dtype_value(problem.key.rows.dtype)])
}

/// Load the kernel that [`launch`] takes.
pub(crate) fn prepare(problem: &KvCacheUpdate) -> Result {
    module::function(variant(problem)?).map(|_| ())
}

/// # Safety
/// The problem's views are device memory of the current context that outlives the kernel's run, the caches writable.
pub(crate) unsafe fn launch(problem: &KvCacheUpdate, stream: Stream) -> Result {
    for copied in problem.copies.iter().flatten().filter(|c| c.is_needed()) {
        // SAFETY: operand and result are different buffers of the same size; the caller vouches for the memory.
        unsafe { copy(copied.to.data, copied.from.data, copied.from.bytes(), stream) }?;
    }
    let num_slots = problem.num_pages as i64 * problem.page_size as i64;
    let num_rows = problem.slot_mapping.len();
    if num_rows == 0 || num_slots == 0 {
        return Ok(());
    }
    let variant = variant(problem)?;
    // One row a CTA, its keys and its values apart.
    let shape = Shape { grid: [num_rows as u32, 2, 1], threads: THREADS, shared_memory: 0 };
    log::call(KERNEL, (variant, shape), || format!("{} with {shape:?}", variants::VARIANTS[variant].name));
    let params = Params {
        key: rows(&problem.key),
        value: rows(&problem.value),
        slot_mapping: problem.slot_mapping.data,
        num_slots,
        page_size: problem.page_size as i64,
        slots_are_64_bit: i32::from(problem.slot_mapping.dtype == DType::I64),
        num_heads: problem.key.rows.dims[1] as i32,
    };
    // SAFETY: `Params` is the kernel's parameter; the caller vouches for the memory.
    unsafe { launch_kernel(module::function(variant)?, shape, stream, &params) }
}
