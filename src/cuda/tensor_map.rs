//! Tensor maps: which boxes of a tensor TMA loads. Encoding one does not need a device.

use super::driver::{self, check};
pub(crate) use super::params::tensor_map::TensorMap;
use crate::error::Result;
use crate::tensor::DType;
use cudarc::driver::sys;
use std::ffi::c_void;

const _: () = assert!(size_of::<TensorMap>() == size_of::<sys::CUtensorMap_st>());
const _: () = assert!(align_of::<TensorMap>() == align_of::<sys::CUtensorMap_st>());

/// The most dimensions of a tensor map.
const MOST_AXES: usize = 5;

/// One dimension of a tensor as TMA sees it.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Axis {
    /// Its elements; a box may reach past them and gets zeros from there.
    pub len: i64,
    /// Elements from one to the next; the first axis has 1.
    pub stride: i64,
    /// Those of a box.
    pub in_box: i64,
}

/// Whether the engine can copy boxes of a tensor at `data`.
pub(crate) fn can_copy(dtype: DType, data: *const u8, axes: &[Axis]) -> bool {
    let bytes = dtype.size() as i64;
    (data as usize).is_multiple_of(16)
        && axes.iter().skip(1).all(|axis| axis.stride > 0 && axis.stride * bytes % 16 == 0 && axis.stride < 1 << 39)
        && axes.iter().all(|axis| (1..=1 << 32).contains(&axis.len) && (1..=256).contains(&axis.in_box))
}

impl TensorMap {
    /// For a kernel that does not look at it.
    pub(crate) const NONE: Self = Self { words: [0; 16] };

    /// Boxes of f16, bf16 or 8-bit numbers at `data`, the innermost axis first: elements of 128 or 64 bytes in all, which
    /// become rows with swizzled chunks of 16. [`can_copy`] says that it can be done.
    ///
    /// # Errors
    /// `INTERNAL` where the driver refuses it.
    pub(crate) fn new(dtype: DType, data: *const u8, axes: &[Axis]) -> Result<Self> {
        debug_assert!(axes.len() <= MOST_AXES && can_copy(dtype, data, axes), "{axes:?}");
        let bytes = dtype.size();
        let (mut lens, mut strides, mut in_box) = ([1; MOST_AXES], [0; MOST_AXES], [1; MOST_AXES]);
        for (i, axis) in axes.iter().enumerate() {
            (lens[i], strides[i], in_box[i]) = (axis.len as u64, bytes as u64 * axis.stride as u64, axis.in_box as u32);
        }
        let element = match dtype {
            _ if bytes == 1 => sys::CUtensorMapDataType::CU_TENSOR_MAP_DATA_TYPE_UINT8,
            DType::F16 => sys::CUtensorMapDataType::CU_TENSOR_MAP_DATA_TYPE_FLOAT16,
            _ => sys::CUtensorMapDataType::CU_TENSOR_MAP_DATA_TYPE_BFLOAT16,
        };
        let swizzle = match axes[0].in_box * bytes as i64 {
            64 => sys::CUtensorMapSwizzle::CU_TENSOR_MAP_SWIZZLE_64B,
            _ => sys::CUtensorMapSwizzle::CU_TENSOR_MAP_SWIZZLE_128B,
        };
        let mut map = Self::NONE;
        driver::present()?;
        // SAFETY: the map is 128 bytes at a multiple of 64, each array has an entry for every axis, and the strides are
        // those from the second axis on. The driver only records `data`.
        let result = unsafe {
            sys::cuTensorMapEncodeTiled(
                (&raw mut map).cast(),
                element,
                axes.len() as u32,
                data.cast_mut().cast::<c_void>(),
                lens.as_ptr(),
                strides[1..].as_ptr(),
                in_box.as_ptr(),
                [1; MOST_AXES].as_ptr(),
                sys::CUtensorMapInterleave::CU_TENSOR_MAP_INTERLEAVE_NONE,
                swizzle,
                sys::CUtensorMapL2promotion::CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
                sys::CUtensorMapFloatOOBfill::CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE,
            )
        };
        check(result, "cuTensorMapEncodeTiled")?;
        Ok(map)
    }
}
