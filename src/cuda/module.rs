//! From a variant to a function of the current context: loaded once, found without a lock ever after.

use super::device::{Device, current_context};
use super::driver::{self, check};
use super::image::{self, Chosen};
use super::variants::{VARIANTS, Variant};
use crate::error::{Code, Error, Result};
use crate::fault::{self, Fault};
use crate::guard::guarded;
use cudarc::driver::sys::{self, CUcontext, CUfunction};
use std::ffi::c_void;
use std::sync::atomic::{AtomicPtr, Ordering};
use std::sync::{Mutex, PoisonError};

/// Contexts that can hold our modules at the same time; a process has one a device.
const CONTEXTS: usize = 64;

/// The functions of one context. A context is written after its first function, so a reader that sees the context can
/// trust every non-null entry. Modules are never unloaded.
struct Slot {
    context: AtomicPtr<c_void>,
    functions: [AtomicPtr<c_void>; VARIANTS.len()],
}

static SLOTS: [Slot; CONTEXTS] = [const {
    Slot {
        context: AtomicPtr::new(std::ptr::null_mut()),
        functions: [const { AtomicPtr::new(std::ptr::null_mut()) }; VARIANTS.len()],
    }
}; CONTEXTS];

/// The function of a variant on the current context, loaded if it is not there yet.
///
/// # Errors
/// Those of [`current_context`]; `FAILED_PRECONDITION` where the driver refuses the module.
pub(crate) fn function(variant: usize) -> Result<CUfunction> {
    let context = current_context()?;
    for slot in &SLOTS {
        let found = slot.context.load(Ordering::Acquire);
        if found.is_null() {
            break;
        }
        if found == context.cast() {
            let function = slot.functions[variant].load(Ordering::Acquire);
            if !function.is_null() {
                return Ok(function.cast());
            }
            break;
        }
    }
    load(variant, context)
}

#[cold]
fn load(variant: usize, context: CUcontext) -> Result<CUfunction> {
    static LOADING: Mutex<()> = Mutex::new(());
    let _one_at_a_time = LOADING.lock().unwrap_or_else(PoisonError::into_inner);
    let slot = SLOTS
        .iter()
        .find(|slot| {
            let found = slot.context.load(Ordering::Relaxed);
            found.is_null() || found == context.cast()
        })
        .ok_or_else(|| Error::precondition(format!("more than {CONTEXTS} CUDA contexts use this library")))?;
    let known = slot.functions[variant].load(Ordering::Relaxed);
    if !known.is_null() {
        return Ok(known.cast());
    }
    let function = outside_capture(|| load_module(&VARIANTS[variant]))?;
    slot.functions[variant].store(function.cast(), Ordering::Release);
    slot.context.store(context.cast(), Ordering::Release);
    Ok(function)
}

/// Run `load` in the capture mode in which a load does not disturb a capture that this thread may be in.
fn outside_capture<T>(load: impl FnOnce() -> Result<T>) -> Result<T> {
    let mut mode = sys::CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_RELAXED;
    // SAFETY: swaps the thread's mode with `mode`; swapped back below.
    check(unsafe { sys::cuThreadExchangeStreamCaptureMode(&raw mut mode) }, "cuThreadExchangeStreamCaptureMode")?;
    let result = guarded(load).unwrap_or_else(|text| Err(Error::internal(format!("panic: {text}"))));
    // SAFETY: `mode` holds what the thread had.
    check(unsafe { sys::cuThreadExchangeStreamCaptureMode(&raw mut mode) }, "cuThreadExchangeStreamCaptureMode")?;
    result
}

fn load_module(variant: &Variant) -> Result<CUfunction> {
    fault::strike(Fault::CudaLoad);
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
