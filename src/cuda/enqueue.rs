//! Enqueues kernels, copies and fills on a stream. No other module does.

use super::driver::{self, check};
use crate::error::Result;
use crate::failpoint::{self, Failpoint};
use crate::stream::Stream;
use cudarc::driver::sys::{self, CUfunction};
use std::ffi::c_void;

/// Launch configuration of a kernel.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct LaunchConfig {
    /// CTAs along x, y and z.
    pub grid: [u32; 3],
    /// Threads per CTA.
    pub threads: u32,
    /// Dynamic shared memory per CTA, in bytes.
    pub shared_memory: u32,
}

/// What a launch asks of the driver beside its configuration.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct LaunchAttributes {
    /// CTAs of a cluster, adjacent along the grid's y, which it divides; 1 is a kernel without clusters.
    pub(super) cluster: u32,
    /// Programmatic dependent launch: the kernel may start while the kernel before it in the stream still runs. It executes
    /// `griddepcontrol.wait` before it reads what that kernel writes, before it writes what that kernel reads or writes, and before it ends.
    pub(super) starts_early: bool,
}

impl LaunchAttributes {
    /// An ordinary launch.
    pub(super) const NONE: Self = Self { cluster: 1, starts_early: false };
}

/// Launch `function` with one parameter, a struct passed by value.
///
/// # Safety
/// `parameter` is a readable struct, laid out as the kernel's parameter; what it points to outlives the kernel's run. A kernel
/// with `starts_early` keeps the rule of that attribute.
pub(super) unsafe fn launch(
    function: CUfunction,
    config: LaunchConfig,
    attributes: LaunchAttributes,
    stream: Stream,
    parameter: *const c_void,
) -> Result {
    failpoint::trigger(Failpoint::CudaLaunch);
    let mut parameters = [parameter.cast_mut()];
    let [x, y, z] = config.grid;
    let LaunchAttributes { cluster, starts_early } = attributes;
    let mut list = vec![];
    if cluster > 1 {
        list.push(launch_attribute(sys::CUlaunchAttributeID::CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION, |value| {
            value.clusterDim = sys::CUlaunchAttributeValue_union__bindgen_ty_1 { x: 1, y: cluster, z: 1 };
        }));
    }
    if starts_early && supports_early_starts()? {
        let id = sys::CUlaunchAttributeID::CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION;
        list.push(launch_attribute(id, |value| value.programmaticStreamSerializationAllowed = 1));
    }
    if list.is_empty() {
        // SAFETY: `parameters` holds the kernel's only parameter, which the driver copies before it returns. The caller
        // guarantees its layout and the lifetime of the memory it points to.
        let result = unsafe {
            sys::cuLaunchKernel(
                function,
                x,
                y,
                z,
                config.threads,
                1,
                1,
                config.shared_memory,
                stream.0 as sys::CUstream,
                parameters.as_mut_ptr(),
                std::ptr::null_mut(),
            )
        };
        return check(result, "cuLaunchKernel");
    }
    let launch = sys::CUlaunchConfig {
        gridDimX: x,
        gridDimY: y,
        gridDimZ: z,
        blockDimX: config.threads,
        blockDimY: 1,
        blockDimZ: 1,
        sharedMemBytes: config.shared_memory,
        hStream: stream.0 as sys::CUstream,
        attrs: list.as_mut_ptr(),
        numAttrs: list.len() as u32,
    };
    // SAFETY: `launch` and its attributes outlive the call; otherwise as above. Drivers older than CUDA 11.8 lack this
    // function, and the GPUs that they support have neither attribute.
    let result =
        unsafe { sys::cuLaunchKernelEx(&raw const launch, function, parameters.as_mut_ptr(), std::ptr::null_mut()) };
    check(result, "cuLaunchKernelEx")
}

/// The launch attribute `id`, whose value `set` writes.
fn launch_attribute(
    id: sys::CUlaunchAttributeID,
    set: impl FnOnce(&mut sys::CUlaunchAttributeValue),
) -> sys::CUlaunchAttribute {
    // SAFETY: all zeros are a valid attribute, whose value is a union of plain numbers and pointers.
    let mut attribute: sys::CUlaunchAttribute = unsafe { std::mem::zeroed() };
    attribute.id = id;
    set(&mut attribute.value);
    attribute
}

/// Whether the driver takes launches that start early, also while a stream is captured.
fn supports_early_starts() -> Result<bool> {
    /// CUDA 12.3, the first version whose graphs have programmatic edges.
    const OLDEST: i32 = 12030;
    Ok(driver::version()? >= OLDEST)
}

/// Copy `bytes` bytes of device memory in stream order.
///
/// # Safety
/// Both ranges are device memory of the current context and do not overlap.
pub(crate) unsafe fn copy(to: *mut u8, from: *const u8, bytes: usize, stream: Stream) -> Result {
    driver::present()?;
    let (to, from) = (to as sys::CUdeviceptr, from as sys::CUdeviceptr);
    // SAFETY: this function's contract.
    check(unsafe { sys::cuMemcpyDtoDAsync_v2(to, from, bytes, stream.0 as sys::CUstream) }, "cuMemcpyDtoDAsync")
}

/// Set device memory to a byte, in stream order.
///
/// # Safety
/// `to` is `bytes` writable bytes of device memory of the current context.
#[cfg(feature = "failpoints")]
pub(crate) unsafe fn fill(to: *mut u8, byte: u8, bytes: usize, stream: Stream) -> Result {
    let (to, stream) = (to as sys::CUdeviceptr, stream.0 as sys::CUstream);
    // SAFETY: this function's contract.
    check(unsafe { sys::cuMemsetD8Async(to, byte, bytes, stream) }, "cuMemsetD8Async")
}
