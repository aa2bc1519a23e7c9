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

/// Launch `function` with one parameter, a struct passed by value.
///
/// # Safety
/// `parameter` is a readable struct, laid out as the kernel's parameter; what it points to outlives the kernel's run.
pub(super) unsafe fn launch(
    function: CUfunction,
    config: LaunchConfig,
    stream: Stream,
    parameter: *const c_void,
) -> Result {
    failpoint::trigger(Failpoint::CudaLaunch);
    let mut parameters = [parameter.cast_mut()];
    let [x, y, z] = config.grid;
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
    check(result, "cuLaunchKernel")
}

/// Launch `function` in clusters of `cluster` CTAs along y, which divides the grid. Drivers older than CUDA 11.8 lack
/// `cuLaunchKernelEx`, and the GPUs that they support have no clusters.
///
/// # Safety
/// As for [`launch`].
pub(super) unsafe fn launch_clusters(
    function: CUfunction,
    config: LaunchConfig,
    cluster: u32,
    stream: Stream,
    parameter: *const c_void,
) -> Result {
    failpoint::trigger(Failpoint::CudaLaunch);
    let mut parameters = [parameter.cast_mut()];
    let [x, y, z] = config.grid;
    // SAFETY: all zeros are a valid attribute, whose value is a union of plain numbers and pointers.
    let mut attribute: sys::CUlaunchAttribute = unsafe { std::mem::zeroed() };
    attribute.id = sys::CUlaunchAttributeID::CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION;
    attribute.value.clusterDim = sys::CUlaunchAttributeValue_union__bindgen_ty_1 { x: 1, y: cluster, z: 1 };
    let launch = sys::CUlaunchConfig {
        gridDimX: x,
        gridDimY: y,
        gridDimZ: z,
        blockDimX: config.threads,
        blockDimY: 1,
        blockDimZ: 1,
        sharedMemBytes: config.shared_memory,
        hStream: stream.0 as sys::CUstream,
        attrs: &raw mut attribute,
        numAttrs: 1,
    };
    // SAFETY: `launch` and its attribute outlive the call; otherwise as in `launch`.
    let result =
        unsafe { sys::cuLaunchKernelEx(&raw const launch, function, parameters.as_mut_ptr(), std::ptr::null_mut()) };
    check(result, "cuLaunchKernelEx")
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
pub(crate) unsafe fn fill(to: *mut u8, byte: u8, bytes: usize, stream: Stream) -> Result {
    let (to, stream) = (to as sys::CUdeviceptr, stream.0 as sys::CUstream);
    // SAFETY: this function's contract.
    check(unsafe { sys::cuMemsetD8Async(to, byte, bytes, stream) }, "cuMemsetD8Async")
}
