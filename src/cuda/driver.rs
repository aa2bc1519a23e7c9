//! libcuda, which is loaded by the first CUDA call. Its absence is an error only then.

use crate::error::{Error, Result};
use cudarc::driver::sys::{self, CUcontext, CUresult};
use std::ffi::CStr;
use std::sync::OnceLock;

/// Loads libcuda if it is not loaded yet.
///
/// # Errors
/// `UNAVAILABLE` where no driver is installed.
pub(crate) fn present() -> Result {
    static PRESENT: OnceLock<bool> = OnceLock::new();
    // SAFETY: loads libcuda by its soname; the only code that runs is the driver's initialisers.
    if *PRESENT.get_or_init(|| unsafe { sys::is_culib_present() }) {
        Ok(())
    } else {
        Err(Error::unavailable(
            "no NVIDIA driver: libcuda.so.1 cannot be loaded; install the driver, or run on the platform cpu",
        ))
    }
}

/// The CUDA version that the driver supports: 12080 is 12.8.
pub(crate) fn version() -> Result<i32> {
    static VERSION: OnceLock<i32> = OnceLock::new();
    if let Some(version) = VERSION.get() {
        return Ok(*version);
    }
    let mut version = 0;
    // SAFETY: writes one integer.
    check(unsafe { sys::cuDriverGetVersion(&raw mut version) }, "cuDriverGetVersion")?;
    Ok(*VERSION.get_or_init(|| version))
}

/// An id that no other context of the process has or has had, also none at the same address before. Drivers before CUDA
/// 12.0 have no such id; the address is used there, and a context that was reset cannot be told from the one before.
#[inline]
pub(crate) fn context_id(context: CUcontext) -> Result<u64> {
    type ContextId = unsafe extern "C" fn(CUcontext, *mut u64) -> CUresult;
    static CONTEXT_ID: OnceLock<Option<ContextId>> = OnceLock::new();
    // SAFETY: libcuda is loaded, because `context` comes from it, and `ContextId` is the type of its function cuCtxGetId.
    let find = || unsafe { sys::culib().get::<ContextId>("cuCtxGetId".as_bytes()) }.ok().map(|symbol| *symbol);
    let Some(context_id) = *CONTEXT_ID.get_or_init(find) else { return Ok(context as u64) };
    let mut id = 0;
    // SAFETY: `context` is a context of the driver; the call writes one number.
    check(unsafe { context_id(context, &raw mut id) }, "cuCtxGetId")?;
    Ok(id)
}

/// The result of the driver function `function`, as an error with the driver's name and description of it.
pub(crate) fn check(result: CUresult, function: &str) -> Result {
    if result == CUresult::CUDA_SUCCESS {
        return Ok(());
    }
    let mut sentence = std::ptr::null();
    // SAFETY: writes a pointer to a static string, or leaves null for an unknown code.
    let known =
        unsafe { sys::cuGetErrorString(result, &raw mut sentence) } == CUresult::CUDA_SUCCESS && !sentence.is_null();
    // SAFETY: `sentence` is not null, and the driver's strings are static and terminated.
    let sentence = if known { unsafe { CStr::from_ptr(sentence) }.to_string_lossy() } else { "".into() };
    Err(Error::internal(format!("{function}: {result:?}: {sentence}")))
}
