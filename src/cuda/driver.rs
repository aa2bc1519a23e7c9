//! libcuda, loaded when the first CUDA call needs it; its absence is an error only then.

use crate::error::{Error, Result};
use cudarc::driver::sys::{self, CUcontext, CUresult};
use std::ffi::CStr;
use std::sync::OnceLock;

/// libcuda can be called.
///
/// # Errors
/// `UNAVAILABLE` where no driver is installed.
pub(crate) fn present() -> Result {
    static PRESENT: OnceLock<bool> = OnceLock::new();
    // SAFETY: loads libcuda by its soname, which runs only the driver's own initialisers.
    if *PRESENT.get_or_init(|| unsafe { sys::is_culib_present() }) {
        Ok(())
    } else {
        Err(Error::unavailable(
            "no NVIDIA driver: libcuda.so.1 cannot be loaded; install the driver, or run on the platform cpu",
        ))
    }
}

/// The CUDA version that the driver speaks: 12080 is 12.8.
pub(crate) fn version() -> Result<i32> {
    let mut version = 0;
    // SAFETY: writes one integer.
    check(unsafe { sys::cuDriverGetVersion(&raw mut version) }, "cuDriverGetVersion")?;
    Ok(version)
}

/// What tells a context from every other one of the process, also from one that has been at its address before: the
/// driver gives no id twice. Before CUDA 12.0 it gives none; there the address has to do, and a context that is reset
/// cannot be told from what it was.
#[inline]
pub(crate) fn context_id(context: CUcontext) -> Result<u64> {
    type ContextId = unsafe extern "C" fn(CUcontext, *mut u64) -> CUresult;
    static CONTEXT_ID: OnceLock<Option<ContextId>> = OnceLock::new();
    // SAFETY: libcuda is there (`context` came out of it), and this is the type of its function of this name.
    let find = || unsafe { sys::culib().get::<ContextId>("cuCtxGetId".as_bytes()) }.ok().map(|symbol| *symbol);
    let Some(context_id) = *CONTEXT_ID.get_or_init(find) else { return Ok(context as u64) };
    let mut id = 0;
    // SAFETY: a context of the driver's; the call writes one number.
    check(unsafe { context_id(context, &raw mut id) }, "cuCtxGetId")?;
    Ok(id)
}

/// A driver call's result as ours, with the driver's name for it and its sentence.
pub(crate) fn check(result: CUresult, what: &str) -> Result {
    if result == CUresult::CUDA_SUCCESS {
        return Ok(());
    }
    let mut sentence = std::ptr::null();
    // SAFETY: writes a pointer to a static string, or leaves null for an unknown code.
    let known =
        unsafe { sys::cuGetErrorString(result, &raw mut sentence) } == CUresult::CUDA_SUCCESS && !sentence.is_null();
    // SAFETY: checked for null; the driver's strings are static and terminated.
    let sentence = if known { unsafe { CStr::from_ptr(sentence) }.to_string_lossy() } else { "".into() };
    Err(Error::internal(format!("{what}: {result:?}: {sentence}")))
}
