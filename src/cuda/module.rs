//! The function of a variant in the current context: loaded once per context, then found without a lock.

use super::device::{Device, current_context};
use super::driver::{self, check};
use super::module_image::{self, ImageKind, ModuleImage};
use super::variants::{VARIANTS, Variant};
use crate::error::{Code, Error, Result};
use crate::failpoint::{self, Failpoint};
use crate::panic_boundary::catch_panic;
use cudarc::driver::sys::{self, CUcontext, CUfunction};
use std::ffi::c_void;
use std::sync::atomic::{AtomicPtr, Ordering};
use std::sync::{Mutex, PoisonError};

/// The functions of one context. Modules are never unloaded, and a `ContextFunctions` is never freed, because another thread
/// may be reading it. So a context that is reset or destroyed leaks 8 bytes per variant.
struct ContextFunctions {
    /// [`driver::context_id`] of the context.
    id: u64,
    address: CUcontext,
    /// The function of each variant; null if it is not loaded.
    functions: [AtomicPtr<c_void>; VARIANTS.len()],
    /// The next element of the list that begins at [`CONTEXTS`].
    next: AtomicPtr<ContextFunctions>,
}

/// A linked list of the contexts that functions were loaded in, the newest first. Only [`load`] changes it, under its lock.
static CONTEXTS: AtomicPtr<ContextFunctions> = AtomicPtr::new(std::ptr::null_mut());

/// The element that a link of the list points to.
fn follow(link: &AtomicPtr<ContextFunctions>) -> Option<&'static ContextFunctions> {
    // SAFETY: a link is null or points to a `ContextFunctions` that `add` has leaked, which stays valid forever.
    unsafe { link.load(Ordering::Acquire).as_ref() }
}

/// The entry of the context with this id.
fn find_context(id: u64) -> Option<&'static ContextFunctions> {
    std::iter::successors(follow(&CONTEXTS), |entry| follow(&entry.next)).find(|entry| entry.id == id)
}

/// The function of a variant in the current context; its module is loaded if necessary.
///
/// # Errors
/// Those of [`current_context`]; `FAILED_PRECONDITION` if the driver refuses the module.
pub(crate) fn function(variant: usize) -> Result<CUfunction> {
    let context = current_context()?;
    let id = driver::context_id(context)?;
    let function =
        find_context(id).map_or(std::ptr::null_mut(), |entry| entry.functions[variant].load(Ordering::Acquire));
    if function.is_null() { load(variant, context, id) } else { Ok(function.cast()) }
}

#[cold]
fn load(variant: usize, context: CUcontext, id: u64) -> Result<CUfunction> {
    static LOADING: Mutex<()> = Mutex::new(());
    let _lock = LOADING.lock().unwrap_or_else(PoisonError::into_inner);
    let entry = find_context(id).unwrap_or_else(|| add(context, id));
    let loaded = entry.functions[variant].load(Ordering::Acquire);
    if !loaded.is_null() {
        return Ok(loaded.cast());
    }
    let function = outside_capture(|| load_module(&VARIANTS[variant]))?;
    entry.functions[variant].store(function.cast(), Ordering::Release);
    Ok(function)
}

/// Adds a context to the list; [`load`] holds the lock. An older context at the same address no longer exists and is removed.
fn add(address: CUcontext, id: u64) -> &'static ContextFunctions {
    let mut link = &CONTEXTS;
    while let Some(other) = follow(link) {
        if other.address == address {
            link.store(other.next.load(Ordering::Relaxed), Ordering::Release);
        } else {
            link = &other.next;
        }
    }
    let functions = [const { AtomicPtr::new(std::ptr::null_mut()) }; VARIANTS.len()];
    let next = AtomicPtr::new(CONTEXTS.load(Ordering::Relaxed));
    let entry: &'static ContextFunctions = Box::leak(Box::new(ContextFunctions { id, address, functions, next }));
    CONTEXTS.store(std::ptr::from_ref(entry).cast_mut(), Ordering::Release);
    entry
}

/// Runs `load` in relaxed capture mode, in which loading a module does not invalidate a capture of this thread.
fn outside_capture<T>(load: impl FnOnce() -> Result<T>) -> Result<T> {
    let mut mode = sys::CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_RELAXED;
    // SAFETY: exchanges the thread's mode and `mode`, a valid mode; it is exchanged back below.
    check(unsafe { sys::cuThreadExchangeStreamCaptureMode(&raw mut mode) }, "cuThreadExchangeStreamCaptureMode")?;
    let result = catch_panic(load).unwrap_or_else(|text| Err(Error::internal(format!("panic: {text}"))));
    // SAFETY: `mode` is the thread's former mode.
    check(unsafe { sys::cuThreadExchangeStreamCaptureMode(&raw mut mode) }, "cuThreadExchangeStreamCaptureMode")?;
    result
}

/// Loads the module of a variant into the current context and returns its function.
fn load_module(variant: &Variant) -> Result<CUfunction> {
    failpoint::trigger(Failpoint::CudaLoad);
    let device = Device::current()?;
    let image = module_image::select(variant, &device)?;
    let (module, image) = match load_image(&image) {
        Ok(module) => (module, image),
        Err((result, error, log)) => {
            // A driver of an older major version than the compiler's refuses the compiler's cubins, and takes PTX.
            let may_take_ptx = image.kind == ImageKind::Cubin && NOT_FOR_THIS_DRIVER.contains(&result);
            let Some(ptx) = variant.ptx.as_ref().filter(|_| may_take_ptx) else {
                return Err(refused(variant, &image, &device, &error, &log));
            };
            tracing::info!("the driver refuses the {} of {} and compiles its PTX", image.origin, variant.name);
            let ptx = module_image::unpack_ptx(variant, ptx)?;
            let module = load_image(&ptx).map_err(|(_, error, log)| refused(variant, &ptx, &device, &error, &log))?;
            (module, ptx)
        }
    };
    let mut function = std::ptr::null_mut();
    // SAFETY: the module has just been loaded, and the name is terminated.
    let result = unsafe { sys::cuModuleGetFunction(&raw mut function, module, variant.entry.as_ptr()) };
    check(result, "cuModuleGetFunction").map_err(|Error { code, message }| Error {
        code,
        message: format!("the kernel {} is not in its module, {}: {message}", variant.name, image.origin),
    })?;
    let max_dynamic_size = sys::CUfunction_attribute::CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES;
    let mut fixed = 0;
    let fixed_size = sys::CUfunction_attribute::CU_FUNC_ATTRIBUTE_SHARED_SIZE_BYTES;
    // SAFETY: the function is valid; the calls read and set one of its attributes.
    unsafe {
        check(sys::cuFuncGetAttribute(&raw mut fixed, fixed_size, function), "cuFuncGetAttribute")?;
        let dynamic = device.shared_memory as i32 - fixed;
        check(sys::cuFuncSetAttribute(function, max_dynamic_size, dynamic), "cuFuncSetAttribute")?;
    }
    tracing::debug!("loaded {} for sm_{} from {}", variant.name, device.capability, image.origin);
    Ok(function)
}

/// What drivers say of a cubin that they are too old for.
const NOT_FOR_THIS_DRIVER: [sys::CUresult; 3] = [
    sys::CUresult::CUDA_ERROR_INVALID_IMAGE,
    sys::CUresult::CUDA_ERROR_NO_BINARY_FOR_GPU,
    sys::CUresult::CUDA_ERROR_UNSUPPORTED_PTX_VERSION,
];

/// Loads an image as a module. If the driver refuses it: its result, that as an error, and its log.
fn load_image(image: &ModuleImage) -> std::result::Result<sys::CUmodule, (sys::CUresult, Error, Vec<u8>)> {
    let mut log = vec![0u8; 4096];
    let mut options =
        [sys::CUjit_option::CU_JIT_ERROR_LOG_BUFFER, sys::CUjit_option::CU_JIT_ERROR_LOG_BUFFER_SIZE_BYTES];
    let mut values: [*mut c_void; 2] = [log.as_mut_ptr().cast(), log.len() as *mut c_void];
    let mut module = std::ptr::null_mut();
    // SAFETY: the image is a complete cubin or zero-terminated PTX (`select` validates files), and both option arrays have
    // two entries.
    let result = unsafe {
        let image = image.storage.as_ptr().cast();
        sys::cuModuleLoadDataEx(&raw mut module, image, 2, options.as_mut_ptr(), values.as_mut_ptr())
    };
    check(result, "cuModuleLoadDataEx").map(|()| module).map_err(|error| (result, error, log))
}

/// The error for a module that the driver refuses, with what would help.
fn refused(variant: &Variant, image: &ModuleImage, device: &Device, error: &Error, log: &[u8]) -> Error {
    let driver = driver::version()
        .map_or_else(|_| "unknown".into(), |version| format!("CUDA {}.{}", version / 1000, version % 1000 / 10));
    let log = String::from_utf8_lossy(log);
    // The driver's log has several lines, an error message has one.
    let log: Vec<&str> = log.split(['\0', '\n']).map(str::trim).filter(|line| !line.is_empty()).collect();
    let log = log.join("; ");
    let (file, remedy) = match image.kind {
        ImageKind::File => {
            (format!(", {},", image.origin), format!("without {} it is the built-in one", module_image::FOLDER))
        }
        ImageKind::Ptx => (
            String::new(),
            format!("it needs a driver that takes PTX {} for sm_{}", variant.ptx_version, variant.target),
        ),
        ImageKind::Cubin => (String::new(), "it needs a driver of CUDA 12.0 or newer".into()),
    };
    Error {
        code: Code::FailedPrecondition,
        message: format!(
            "the driver ({driver}) refuses the kernel {}{file} on sm_{}: {error} {log}; {remedy}",
            variant.name, device.capability,
        ),
    }
}
