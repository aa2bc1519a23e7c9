//! The table of compiled kernels, generated from `kernels/variants.toml`.

use crate::error::{Error, Result};
use crate::tensor::DType;
use std::ffi::CStr;

pub(crate) use generated::{ARCHITECTURES, KERNELS, VARIANTS};

mod generated {
    #![allow(clippy::unreadable_literal, reason = "written by build_support/kernel_table.rs")]
    #[cfg_attr(not(every_architecture), allow(unused_imports, reason = "there may be no kernel"))]
    use super::{Axis, CompressedImage, Kernel, Resources, Variant};

    include!(concat!(env!("OUT_DIR"), "/variants.rs"));
}

/// A kernel: a name and the axes whose values select a variant.
pub(crate) struct Kernel {
    pub name: &'static str,
    pub axes: &'static [Axis],
    /// For each combination of axis values, the last axis fastest: its index in [`VARIANTS`], or `None` if it is not built.
    pub slots: &'static [Option<usize>],
}

/// A compile-time option and its values.
pub(crate) struct Axis {
    pub name: &'static str,
    pub values: &'static [&'static str],
}

/// One compiled kernel.
pub(crate) struct Variant {
    /// The kernel's name and the axis values, `attention_bf16_128_prefill_none`; logs and benches use it.
    pub name: &'static str,
    /// Name of the function in the module.
    pub entry: &'static CStr,
    /// Architecture of the PTX.
    pub target: &'static str,
    /// The lowest PTX version that ptxas accepts for it.
    pub ptx_version: &'static str,
    /// PTX text with a terminating zero, for GPUs and drivers that take none of the cubins.
    pub ptx: Option<CompressedImage>,
    /// (architecture, cubin)
    pub cubins: &'static [(&'static str, CompressedImage)],
    /// (architecture, resources that ptxas reports)
    pub resources: &'static [(&'static str, Resources)],
}

impl Variant {
    /// Whether the library contains its images.
    pub(crate) fn is_built(&self) -> bool {
        !self.cubins.is_empty()
    }
}

/// A module image in a group of images that are compressed together.
pub(crate) struct CompressedImage {
    /// The group, compressed with zstd.
    pub group: &'static [u8],
    /// The image's first byte in the decompressed group.
    pub offset: usize,
    /// Size of the image, in bytes.
    pub len: usize,
}

/// The resources of a kernel as ptxas reports them.
#[derive(Debug)]
pub(crate) struct Resources {
    pub registers: u32,
    pub spill_bytes: u32,
    pub smem_bytes: u32,
}

/// The value of the axis `dtype` for a dtype.
pub(crate) fn dtype_value(dtype: DType) -> &'static str {
    match dtype {
        DType::F16 => "f16",
        DType::BF16 => "bf16",
        DType::F32 => "f32",
        DType::F64 => "f64",
        DType::I8 => "i8",
        DType::U8 => "u8",
        DType::I32 => "i32",
        DType::I64 => "i64",
        _ => "none",
    }
}

/// The variant of `kernel` with these axis values, in the table's order of axes.
///
/// # Errors
/// `UNIMPLEMENTED` for a combination that is not built.
pub(crate) fn find(kernel: &str, values: &[&str]) -> Result<usize> {
    lookup(kernel, values).ok_or_else(|| {
        let axes = KERNELS.iter().find(|k| k.name == kernel).map_or(&[][..], |k| k.axes);
        let described: Vec<String> =
            axes.iter().zip(values).map(|(axis, value)| format!("{} {value}", axis.name)).collect();
        Error::unimplemented(format!("no kernel {kernel} is built for {}", described.join(", ")))
    })
}

/// Whether the table has the variant of `kernel` with these axis values.
pub(crate) fn has(kernel: &str, values: &[&str]) -> bool {
    lookup(kernel, values).is_some()
}

fn lookup(kernel: &str, values: &[&str]) -> Option<usize> {
    let kernel = KERNELS.iter().find(|k| k.name == kernel)?;
    debug_assert_eq!(kernel.axes.len(), values.len());
    let mut slot = 0;
    for (axis, value) in kernel.axes.iter().zip(values) {
        slot = slot * axis.values.len() + axis.values.iter().position(|v| v == value)?;
    }
    kernel.slots[slot]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_variant_is_found_by_its_axes_and_only_once() {
        let mut found = vec![0; VARIANTS.len()];
        for kernel in KERNELS {
            assert_eq!(kernel.slots.len(), kernel.axes.iter().map(|a| a.values.len()).product::<usize>());
            for (slot, index) in kernel.slots.iter().enumerate() {
                let mut rest = slot;
                let mut values: Vec<&str> = vec![];
                for axis in kernel.axes.iter().rev() {
                    values.insert(0, axis.values[rest % axis.values.len()]);
                    rest /= axis.values.len();
                }
                assert_eq!(find(kernel.name, &values).ok(), *index);
                if let Some(index) = index {
                    assert_eq!(VARIANTS[*index].name, [&[kernel.name], &values[..]].concat().join("_"));
                    found[*index] += 1;
                }
            }
        }
        assert!(found.iter().all(|n| *n == 1));
    }

    #[test]
    #[cfg_attr(not(every_architecture), ignore = "XLA_ATTENTION_CUDA_ARCHS leaves kernels out")]
    fn no_kernel_spills_registers() {
        for variant in &VARIANTS {
            for (arch, resources) in variant.resources {
                assert!(resources.registers > 0, "{} sm_{arch}", variant.name);
                assert_eq!(resources.spill_bytes, 0, "{} sm_{arch}: {resources:?}", variant.name);
            }
        }
    }

    #[test]
    #[cfg_attr(not(every_architecture), ignore = "XLA_ATTENTION_CUDA_ARCHS leaves kernels out")]
    fn portable_kernels_ask_for_a_ptx_version_that_old_drivers_have() {
        // 7.8, the first with movmatrix, is CUDA 11.8, of 2022; 8.1, the first with fp8 on sm_89, CUDA 12.1, of 2023. XLA's typed
        // FFI is newer, and its CUDA plugins need a driver of CUDA 12.
        for (target, versions) in [("80", ["7.0", "7.4", "7.8"].as_slice()), ("89", &["7.8", "8.1"])] {
            for variant in VARIANTS.iter().filter(|v| v.target == target) {
                assert!(versions.contains(&variant.ptx_version), "{}: {}", variant.name, variant.ptx_version);
            }
        }
    }
}
