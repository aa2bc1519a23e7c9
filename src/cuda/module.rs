//! From a variant to a function of the current context: loaded once, found without a lock ever after.

use super::device::{Device, current_context};
use super::driver::{self, check};
use super::image::{self, Chosen};
use super::variants::{VARIANTS, Variant};
use crate::error::{Code, Error, Result};
use crate::failpoint::{self, Failpoint};
use crate::panic_boundary::catch_panic;
use cudarc::driver::sys::{self, CUcontext, CUfunction};
use std::ffi::c_void;
use std::sync::atomic::{AtomicPtr, Ordering};
use std::sync::{Mutex, PoisonError};

/// The functions of one context. Modules are never unloaded, and a `Known` is never freed, because another thread may be
/// reading it: a context that is reset or destroyed leaves its own behind, 8 bytes a variant.
struct Known {
    id: u64,
    address: CUcontext,
    functions: [AtomicPtr<c_void>; VARIANTS.len()],
    /// The next of the list that begins at [`NEWEST`].
    next: AtomicPtr<Known>,
}

/// The contexts that are known, the newest first. Only [`load`] changes the list, one thread at a time.
static NEWEST: AtomicPtr<Known> = AtomicPtr::new(std::ptr::null_mut());

/// What a link of the list points to.
fn follow(link: &AtomicPtr<Known>) -> Option<&'static Known> {
    // SAFETY: null, or a `Known` that `load` has leaked.
    unsafe { link.load(Ordering::Acquire).as_ref() }
}

fn known(id: u64) -> Option<&'static Known> {
    std::iter::successors(follow(&NEWEST), |known| follow(&known.next)).find(|known| known.id == id)
}

/// The function of a variant on the current context, loaded if it is not there yet.
///
/// # Errors
/// Those of [`current_context`]; `FAILED_PRECONDITION` where the driver refuses the module.
pub(crate) fn function(variant: usize) -> Result<CUfunction> {
    let context = current_context()?;
    let id = driver::context_id(context)?;
    let function = known(id).map_or(std::ptr::null_mut(), |known| known.functions[variant].load(Ordering::Acquire));
    if function.is_null() { load(variant, context, id) } else { Ok(function.cast()) }
}

#[cold]
fn load(variant: usize, context: CUcontext, id: u64) -> Result<CUfunction> {
    static LOADING: Mutex<()> = Mutex::new(());
    let _one_at_a_time = LOADING.lock().unwrap_or_else(PoisonError::into_inner);
    let known = known(id).unwrap_or_else(|| add(context, id));
    let there = known.functions[variant].load(Ordering::Acquire);
    if !there.is_null() {
        return Ok(there.cast());
    }
    let function = outside_capture(|| load_module(&VARIANTS[variant]))?;
    known.functions[variant].store(function.cast(), Ordering::Release);
    Ok(function)
}

/// Put a context into the list, under the lock of [`load`]. Another one at its address is gone, and leaves the list.
fn add(address: CUcontext, id: u64) -> &'static Known {
    let mut link = &NEWEST;
    while let Some(other) = follow(link) {
        if other.address == address {
            link.store(other.next.load(Ordering::Relaxed), Ordering::Release);
        } else {
            link = &other.next;
        }
    }
    let functions = [const { AtomicPtr::new(std::ptr::null_mut()) }; VARIANTS.len()];
    let next = AtomicPtr::new(NEWEST.load(Ordering::Relaxed));
    let known: &'static Known = Box::leak(Box::new(Known { id, address, functions, next }));
    NEWEST.store(std::ptr::from_ref(known).cast_mut(), Ordering::Release);
    known
}

/// Run `load` in the capture mode in which a load does not disturb a capture that this thread may be in.
fn outside_capture<T>(load: impl FnOnce() -> Result<T>) -> Result<T> {
    let mut mode = sys::CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_RELAXED;
    // SAFETY: swaps the thread's mode with `mode`; swapped back below.
    check(unsafe { sys::cuThreadExchangeStreamCaptureMode(&raw mut mode) }, "cuThreadExchangeStreamCaptureMode")?;
    let result = catch_panic(load).unwrap_or_else(|text| Err(Error::internal(format!("panic: {text}"))));
    // SAFETY: `mode` holds what the thread had.
    check(unsafe { sys::cuThreadExchangeStreamCaptureMode(&raw mut mode) }, "cuThreadExchangeStreamCaptureMode")?;
    result
}

fn load_module(variant: &Variant) -> Result<CUfunction> {
    failpoint::trigger(Failpoint::CudaLoad);
    let device = Device::current()?;
    let chosen = image::choose(variant, &device)?;
    let mut log = vec![0u8; 4096];
    let mut options =
        [sys::CUjit_option::CU_JIT_ERROR_LOG_BUFFER, sys::CUjit_option::CU_JIT_ERROR_LOG_BUFFER_SIZE_BYTES];
    let mut values: [*mut c_void; 2] = [log.as_mut_ptr().cast(), log.len() as *mut c_void];
    let mut module = std::ptr::null_mut();
    // SAFETY: the image is a whole module (PTX ends in a zero), the option arrays have two entries each.
    let result = unsafe {
        let image = chosen.words.as_ptr().cast();
        sys::cuModuleLoadDataEx(&raw mut module, image, 2, options.as_mut_ptr(), values.as_mut_ptr())
    };
    check(result, "cuModuleLoadDataEx").map_err(|error| refused(variant, &chosen, &device, &error, &log))?;
    let mut function = std::ptr::null_mut();
    // SAFETY: the module was just loaded, the name is terminated.
    let result = unsafe { sys::cuModuleGetFunction(&raw mut function, module, variant.entry.as_ptr()) };
    check(result, "cuModuleGetFunction").map_err(|Error { code, message }| Error {
        code,
        message: format!("the kernel {} is not in its module, {}: {message}", variant.name, chosen.origin),
    })?;
    let largest = sys::CUfunction_attribute::CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES;
    let mut fixed = 0;
    let of_fixed = sys::CUfunction_attribute::CU_FUNC_ATTRIBUTE_SHARED_SIZE_BYTES;
    // SAFETY: the function was just found; both calls only read or set one of its attributes.
    unsafe {
        check(sys::cuFuncGetAttribute(&raw mut fixed, of_fixed, function), "cuFuncGetAttribute")?;
        let dynamic = device.shared_memory as i32 - fixed;
        check(sys::cuFuncSetAttribute(function, largest, dynamic), "cuFuncSetAttribute")?;
    }
    tracing::debug!("loaded {} for sm_{} from {}", variant.name, device.capability, chosen.origin);
    Ok(function)
}

/// Why a module was refused and what would take it.
fn refused(variant: &Variant, chosen: &Chosen, device: &Device, error: &Error, log: &[u8]) -> Error {
    let driver = driver::version()
        .map_or_else(|_| "unknown".into(), |version| format!("CUDA {}.{}", version / 1000, version % 1000 / 10));
    let log = String::from_utf8_lossy(log);
    let log = log.trim_matches(['\0', '\n', ' ']);
    let (what, remedy) = if chosen.is_file {
        (format!(", {},", chosen.origin), format!("without {} it is the built-in one", image::FOLDER))
    } else {
        (String::new(), format!("it needs a driver that takes PTX {} for sm_{}", variant.ptx_version, variant.target))
    };
    Error {
        code: Code::FailedPrecondition,
        message: format!(
            "the driver ({driver}) refuses the kernel {}{what} on sm_{}: {error} {log}; {remedy}",
            variant.name, device.capability,
        ),
    }
}
