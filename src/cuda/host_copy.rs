//! Copies device memory to the host for debug check mode (`XLA_ATTENTION_CHECK=1`). Only this module waits for the GPU.

use super::driver::{self, check};
use crate::error::{Error, Result};
use crate::stream::Stream;
use cudarc::driver::sys::{self, CUstreamCaptureStatus};

/// Checks that the stream is not being captured, so that the host may wait for it.
///
/// # Errors
/// `FAILED_PRECONDITION` under capture, `UNAVAILABLE` without a driver.
pub(crate) fn can_wait(stream: Stream) -> Result {
    driver::present()?;
    let mut status = CUstreamCaptureStatus::CU_STREAM_CAPTURE_STATUS_NONE;
    // SAFETY: `stream` is a valid stream of the caller; the call writes one number.
    check(unsafe { sys::cuStreamIsCapturing(stream.0 as sys::CUstream, &raw mut status) }, "cuStreamIsCapturing")?;
    if status == CUstreamCaptureStatus::CU_STREAM_CAPTURE_STATUS_NONE {
        return Ok(());
    }
    Err(Error::precondition("a call in a graph's capture cannot be checked; capture without XLA_ATTENTION_CHECK=1"))
}

/// Waits for the stream and copies device memory to the host.
///
/// # Errors
/// `INTERNAL`, also for an error of earlier work on the stream, which is reported here.
///
/// # Safety
/// `from` is `bytes` bytes of device memory of the current context, `to` has room for them.
pub(crate) unsafe fn to_host(to: *mut u8, from: *const u8, bytes: usize, stream: Stream) -> Result {
    let (from, stream) = (from as sys::CUdeviceptr, stream.0 as sys::CUstream);
    // SAFETY: the caller guarantees both ranges, and the copy has completed before this function returns.
    unsafe {
        check(sys::cuMemcpyDtoHAsync_v2(to.cast(), from, bytes, stream), "cuMemcpyDtoHAsync")?;
        check(sys::cuStreamSynchronize(stream), "cuStreamSynchronize")
    }
}
