//! Tensor maps, the descriptors of TMA. Encoding one does not need a device.

use super::driver::{self, check};
pub(crate) use super::params::tensor_map::TensorMap;
use crate::error::Result;
use crate::tensor::DType;
use cudarc::driver::sys;
use std::ffi::c_void;

const _: () = assert!(size_of::<TensorMap>() == size_of::<sys::CUtensorMap_st>());
const _: () = assert!(align_of::<TensorMap>() == align_of::<sys::CUtensorMap_st>());

/// The maximum rank of a tensor map.
const MAX_RANK: usize = 5;

/// How much L2 loads around what a box misses.
#[derive(Clone, Copy, Debug)]
pub(crate) enum L2Promotion {
    None,
    Bytes128,
    Bytes256,
}

/// One dimension of a tensor map.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Axis {
    /// Number of entries. Boxes may reach past the end; TMA fills those elements with zeros.
    pub len: i64,
    /// Stride in elements; 1 for the first axis.
    pub stride: i64,
    /// Number of entries of a box.
    pub box_len: i64,
}

/// Whether TMA supports the tensor at `data`: alignment, strides and box sizes.
pub(crate) fn supports_tma(dtype: DType, data: *const u8, axes: &[Axis]) -> bool {
    let bytes = dtype.size() as i64;
    (data as usize).is_multiple_of(16)
        && axes.iter().skip(1).all(|axis| axis.stride > 0 && axis.stride * bytes % 16 == 0 && axis.stride < 1 << 39)
        && axes.iter().all(|axis| (1..=1 << 32).contains(&axis.len) && (1..=256).contains(&axis.box_len))
}

impl TensorMap {
    /// A placeholder for a map that the kernel does not use.
    pub(crate) const NONE: Self = Self { words: [0; 16] };

    /// A tensor map of 16-bit or 8-bit elements at `data`, the innermost axis first. A box has 128 or 64 bytes along the
    /// first axis, which also selects the swizzle. [`supports_tma`] must hold.
    ///
    /// # Errors
    /// `INTERNAL` if the driver refuses it.
    pub(crate) fn new(dtype: DType, data: *const u8, axes: &[Axis], promotion: L2Promotion) -> Result<Self> {
        debug_assert!(axes.len() <= MAX_RANK && supports_tma(dtype, data, axes), "{axes:?}");
        let bytes = dtype.size();
        let (mut lens, mut strides, mut box_lens) = ([1; MAX_RANK], [0; MAX_RANK], [1; MAX_RANK]);
        for (i, axis) in axes.iter().enumerate() {
            (lens[i], strides[i], box_lens[i]) =
                (axis.len as u64, bytes as u64 * axis.stride as u64, axis.box_len as u32);
        }
        let element = match dtype {
            _ if bytes == 1 => sys::CUtensorMapDataType::CU_TENSOR_MAP_DATA_TYPE_UINT8,
            DType::F16 => sys::CUtensorMapDataType::CU_TENSOR_MAP_DATA_TYPE_FLOAT16,
            DType::F32 => sys::CUtensorMapDataType::CU_TENSOR_MAP_DATA_TYPE_FLOAT32,
            _ => sys::CUtensorMapDataType::CU_TENSOR_MAP_DATA_TYPE_BFLOAT16,
        };
        let swizzle = match axes[0].box_len * bytes as i64 {
            64 => sys::CUtensorMapSwizzle::CU_TENSOR_MAP_SWIZZLE_64B,
            _ => sys::CUtensorMapSwizzle::CU_TENSOR_MAP_SWIZZLE_128B,
        };
        let promotion = match promotion {
            L2Promotion::None => sys::CUtensorMapL2promotion::CU_TENSOR_MAP_L2_PROMOTION_NONE,
            L2Promotion::Bytes128 => sys::CUtensorMapL2promotion::CU_TENSOR_MAP_L2_PROMOTION_L2_128B,
            L2Promotion::Bytes256 => sys::CUtensorMapL2promotion::CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
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
                box_lens.as_ptr(),
                [1; MAX_RANK].as_ptr(),
                sys::CUtensorMapInterleave::CU_TENSOR_MAP_INTERLEAVE_NONE,
                swizzle,
                promotion,
                sys::CUtensorMapFloatOOBfill::CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE,
            )
        };
        check(result, "cuTensorMapEncodeTiled")?;
        Ok(map)
    }
}
