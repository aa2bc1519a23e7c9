//! A PJRT plugin that wraps another one, so that `torch_xla` 2.9 can use JAX's CUDA plugin.
//!
//! `torch_xla` loads any plugin, but fails with JAX's for two reasons: it aborts if the client's platform name is "cuda",
//! and it passes shorter execute options than the plugin was built with, which the plugin refuses. This library therefore
//! exports `GetPjrtApi` and returns a copy of the inner plugin's function table, in which two functions are replaced. All
//! other functions are the inner plugin's.
//!
//! The offsets are those of `xla/pjrt/c/pjrt_c_api.h`, whose structs only grow at their ends.

use crate::error::{Error, Result};
use libloading::Library;
use std::ffi::{CStr, c_char, c_void};
use std::path::Path;
use std::ptr::{null, null_mut};
use std::sync::OnceLock;

/// Minor versions of the PJRT API (0.x) that have been tested.
const TRIED: std::ops::RangeInclusive<i32> = 75..=116;

/// Offsets in `PJRT_Api` in units of 8 bytes.
mod api {
    /// `PJRT_Client_PlatformName`
    pub(super) const CLIENT_PLATFORM_NAME: usize = 17;
    /// `PJRT_LoadedExecutable_Execute`
    pub(super) const LOADED_EXECUTABLE_EXECUTE: usize = 60;
    /// Minimum length of a table that has both functions.
    pub(super) const WORDS: usize = LOADED_EXECUTABLE_EXECUTE + 1;
}

/// The first fields of `PJRT_Api`.
#[repr(C)]
struct ApiHead {
    struct_size: usize,
    extension_start: *mut c_void,
    version_size: usize,
    version_extension: *mut c_void,
    major: i32,
    minor: i32,
}

/// `PJRT_Client_PlatformName_Args`
#[repr(C)]
struct PlatformNameArgs {
    struct_size: usize,
    extension_start: *mut c_void,
    client: *mut c_void,
    platform_name: *const c_char,
    platform_name_size: usize,
}

/// The first fields of `PJRT_LoadedExecutable_Execute_Args`.
#[repr(C)]
struct ExecuteArgs {
    struct_size: usize,
    extension_start: *mut c_void,
    executable: *mut c_void,
    options: *mut PaddedOptions,
}

/// `PJRT_ExecuteOptions` of any version: its size, then its fields. Fields that the caller's version lacks are 0.
#[repr(C)]
#[derive(Clone, Copy)]
struct PaddedOptions {
    struct_size: usize,
    fields: [usize; 31],
}

type Execute = unsafe extern "C" fn(*mut ExecuteArgs) -> *mut c_void;

/// The wrapped plugin.
struct InnerPlugin {
    /// Stays loaded for the life of the process, because the plugin has threads.
    _library: Library,
    path: String,
    /// The copy of its function table, with the two replaced functions.
    table: Vec<usize>,
    execute: Execute,
}

static INNER: OnceLock<InnerPlugin> = OnceLock::new();

/// Wrap the plugin at `path`: [`table`] returns its function table from now on.
///
/// # Errors
/// `UNAVAILABLE` if the plugin cannot be loaded, `FAILED_PRECONDITION` if its API version is not among the tested ones
/// or another plugin is already wrapped.
pub(crate) fn wrap(path: &str) -> Result {
    if INNER.get().is_none() {
        let inner = InnerPlugin::load(path)?;
        // If another thread was faster, its plugin is kept, and the comparison of paths below decides.
        drop(INNER.set(inner));
    }
    match INNER.get() {
        Some(inner) if inner.path == path => Ok(()),
        Some(inner) => Err(Error::precondition(format!("the plugin {} is in use already", inner.path))),
        None => Err(Error::internal("the plugin was not kept")),
    }
}

impl InnerPlugin {
    fn load(path: &str) -> Result<Self> {
        // SAFETY: the caller names a PJRT plugin, whose initializers are meant to run in any process that loads it.
        let library = unsafe { Library::new(Path::new(path)) }
            .map_err(|error| Error::unavailable(format!("the PJRT plugin {path} cannot be loaded: {error}")))?;
        // SAFETY: every PJRT plugin exports this function.
        let table = unsafe {
            let entry = library.get::<unsafe extern "C" fn() -> *const ApiHead>(c"GetPjrtApi");
            entry.map_err(|error| Error::unavailable(format!("{path} is no PJRT plugin: {error}")))?()
        };
        // SAFETY: a plugin returns null or a table that lives as long as the plugin.
        let Some(head) = (unsafe { table.as_ref() }) else {
            return Err(Error::unavailable(format!("the PJRT plugin {path} gives no API")));
        };
        let words = head.struct_size / size_of::<usize>();
        if words < api::WORDS || head.major != 0 || !TRIED.contains(&head.minor) {
            return Err(Error::precondition(format!(
                "the PJRT plugin {path} has API {}.{}, tried are 0.{} to 0.{}; jax-cuda13-pjrt 0.7.2 to 0.12 have these",
                head.major,
                head.minor,
                TRIED.start(),
                TRIED.end(),
            )));
        }
        // SAFETY: the table has `struct_size` bytes, of which every 8 are initialized or readable padding.
        let mut copy = unsafe { std::slice::from_raw_parts(table.cast::<usize>(), words) }.to_vec();
        // SAFETY: in every version of the API this entry of the table is this function.
        let execute = unsafe { std::mem::transmute::<usize, Execute>(copy[api::LOADED_EXECUTABLE_EXECUTE]) };
        copy[api::CLIENT_PLATFORM_NAME] = platform_name as *const () as usize;
        copy[api::LOADED_EXECUTABLE_EXECUTE] = execute_padded as *const () as usize;
        Ok(Self { _library: library, path: path.to_owned(), table: copy, execute })
    }
}

/// Replaces `PJRT_Client_PlatformName`, because `torch_xla` aborts at the name "cuda".
unsafe extern "C" fn platform_name(args: *mut PlatformNameArgs) -> *mut c_void {
    const NAME: &CStr = c"gpu";
    // SAFETY: the caller passes a valid struct, which has these fields in every version of the API.
    unsafe {
        (*args).platform_name = NAME.as_ptr();
        (*args).platform_name_size = NAME.count_bytes();
    }
    null_mut()
}

/// Replaces `PJRT_LoadedExecutable_Execute`: pads the options to at least the inner plugin's size.
unsafe extern "C" fn execute_padded(args: *mut ExecuteArgs) -> *mut c_void {
    let Some(inner) = INNER.get() else { return null_mut() };
    // SAFETY: the caller's structs are as long as their `struct_size`, and `padded` outlives the call that reads it.
    unsafe {
        let given = (*args).options;
        if given.is_null() || (*given).struct_size >= size_of::<PaddedOptions>() {
            return (inner.execute)(args);
        }
        let size = (*given).struct_size;
        let mut padded = PaddedOptions { struct_size: 0, fields: [0; 31] };
        std::ptr::copy_nonoverlapping(given.cast::<u8>(), (&raw mut padded).cast::<u8>(), size);
        padded.struct_size = size_of::<PaddedOptions>();
        (*args).options = &raw mut padded;
        let error = (inner.execute)(args);
        (*args).options = given;
        error
    }
}

/// The function table of the wrapped plugin; null before [`wrap`].
pub(crate) fn table() -> *const c_void {
    INNER.get().map_or(null(), |inner| inner.table.as_ptr().cast())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_library_that_is_not_a_plugin_is_refused() {
        let missing = wrap("/nowhere/plugin.so").expect_err("there is no such file");
        assert!(missing.message.contains("/nowhere/plugin.so cannot be loaded"), "{missing:?}");
        let wrong = wrap("libc.so.6").expect_err("libc is not a plugin");
        assert!(wrong.message.contains("is no PJRT plugin"), "{wrong:?}");
        assert!(table().is_null());
    }

    #[test]
    fn the_platform_name_is_not_cuda() {
        let mut args = PlatformNameArgs {
            struct_size: size_of::<PlatformNameArgs>(),
            extension_start: null_mut(),
            client: null_mut(),
            platform_name: null(),
            platform_name_size: 0,
        };
        // SAFETY: `args` is a valid struct.
        assert!(unsafe { platform_name(&raw mut args) }.is_null());
        // SAFETY: the function above has set the name to a terminated constant.
        assert_eq!(unsafe { CStr::from_ptr(args.platform_name) }, c"gpu");
        assert_eq!(args.platform_name_size, 3);
    }
}
