//! Device memory on the host, for `XLA_ATTENTION_CHECK=1`: the one place that waits.

use super::driver::{self, check};
use crate::error::{Error, Result};
use crate::stream::Stream;
use cudarc::driver::sys::{self, CUstreamCaptureStatus};

/// The stream is not being captured, so that it can be waited for.
///
/// # Errors
/// `FAILED_PRECONDITION` under capture, `UNAVAILABLE` without a driver.
pub(crate) fn can_wait(stream: Stream) -> Result {
    driver::present()?;
    let mut status = CUstreamCaptureStatus::CU_STREAM_CAPTURE_STATUS_NONE;
    // SAFETY: a stream of the caller; the call writes one number.
    check(unsafe { sys::cuStreamIsCapturing(stream.0 as sys::CUstream, &raw mut status) }, "cuStreamIsCapturing")?;
    if status == CUstreamCaptureStatus::CU_STREAM_CAPTURE_STATUS_NONE {
        return Ok(());
    }
    Err(Error::precondition("a call in a graph's capture cannot be checked; capture without XLA_ATTENTION_CHECK=1"))
}

/// Copy to the host what stands in device memory when the stream's work is done.
///
/// # Errors
/// `INTERNAL`: also of work before, whose faults are seen here.
///
/// # Safety
/// `from` is `bytes` bytes of device memory of the current context, `to` has room for them.
pub(crate) unsafe fn to_host(to: *mut u8, from: *const u8, bytes: usize, stream: Stream) -> Result {
    let (from, stream) = (from as sys::CUdeviceptr, stream.0 as sys::CUstream);
    // SAFETY: this function's contract; waited for before it returns.
    unsafe {
        check(sys::cuMemcpyDtoHAsync_v2(to.cast(), from, bytes, stream), "cuMemcpyDtoHAsync")?;
        check(sys::cuStreamSynchronize(stream), "cuStreamSynchronize")
    }
}
