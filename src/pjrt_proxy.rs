//! A PJRT plugin in front of another one, for `torch_xla` 2.9 over JAX's CUDA plugin.
//!
//! `torch_xla` loads any plugin, with two faults for this one: it aborts when the client calls itself "cuda", and its
//! execute options are shorter than those the plugin was built with, which the plugin refuses. So this library exports
//! `GetPjrtApi` itself and answers with a copy of the other plugin's table, in which two functions are ours. Everything
//! else goes to the other plugin directly.
//!
//! Offsets are those of `xla/pjrt/c/pjrt_c_api.h`, whose structs only grow at their ends.

use crate::error::{Error, Result};
use libloading::Library;
use std::ffi::{CStr, c_char, c_void};
use std::path::Path;
use std::ptr::{null, null_mut};
use std::sync::OnceLock;

/// Minor versions of the API, 0.x, of the plugins that this was tried with.
const TRIED: std::ops::RangeInclusive<i32> = 75..=116;

/// Offsets in `PJRT_Api`, in words of 8 bytes.
mod api {
    /// `PJRT_Client_PlatformName`
    pub(super) const CLIENT_PLATFORM_NAME: usize = 17;
    /// `PJRT_LoadedExecutable_Execute`
    pub(super) const LOADED_EXECUTABLE_EXECUTE: usize = 60;
    /// What has to be there.
    pub(super) const WORDS: usize = LOADED_EXECUTABLE_EXECUTE + 1;
}

/// The beginning of `PJRT_Api`.
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

/// The beginning of `PJRT_LoadedExecutable_Execute_Args`.
#[repr(C)]
struct ExecuteArgs {
    struct_size: usize,
    extension_start: *mut c_void,
    executable: *mut c_void,
    options: *mut PaddedOptions,
}

/// `PJRT_ExecuteOptions` of any version: its size, then its fields; what a caller does not know of is 0.
#[repr(C)]
#[derive(Clone, Copy)]
struct PaddedOptions {
    struct_size: usize,
    fields: [usize; 31],
}

type Execute = unsafe extern "C" fn(*mut ExecuteArgs) -> *mut c_void;

/// The plugin behind this one.
struct Behind {
    /// Never unloaded: it has threads.
    _library: Library,
    path: String,
    /// Our copy of its table.
    table: Vec<usize>,
    execute: Execute,
}

static BEHIND: OnceLock<Behind> = OnceLock::new();

/// Put this library in front of the plugin at `path`, from now on.
///
/// # Errors
/// `UNAVAILABLE` if it is no plugin that can be loaded, `FAILED_PRECONDITION` if its API is outside of the tried range
/// or another plugin has been chosen before.
pub(crate) fn stand_before(path: &str) -> Result {
    if BEHIND.get().is_none() {
        let behind = Behind::load(path)?;
        // Somebody faster has chosen: below it is seen whether the same.
        drop(BEHIND.set(behind));
    }
    match BEHIND.get() {
        Some(behind) if behind.path == path => Ok(()),
        Some(behind) => Err(Error::precondition(format!("the plugin {} is in use already", behind.path))),
        None => Err(Error::internal("the plugin was not kept")),
    }
}

impl Behind {
    fn load(path: &str) -> Result<Self> {
        // SAFETY: the caller names a PJRT plugin; loading it runs its initialisers, as its own framework would.
        let library = unsafe { Library::new(Path::new(path)) }
            .map_err(|error| Error::unavailable(format!("the PJRT plugin {path} cannot be loaded: {error}")))?;
        // SAFETY: every PJRT plugin exports this function.
        let table = unsafe {
            let entry = library.get::<unsafe extern "C" fn() -> *const ApiHead>(c"GetPjrtApi");
            entry.map_err(|error| Error::unavailable(format!("{path} is no PJRT plugin: {error}")))?()
        };
        // SAFETY: null or a table that lives as long as the plugin.
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
        // SAFETY: the struct says its size; all its fields are words but for the version, whose padding is readable.
        let mut copy = unsafe { std::slice::from_raw_parts(table.cast::<usize>(), words) }.to_vec();
        // SAFETY: this entry is this function, in every version of the API.
        let execute = unsafe { std::mem::transmute::<usize, Execute>(copy[api::LOADED_EXECUTABLE_EXECUTE]) };
        copy[api::CLIENT_PLATFORM_NAME] = platform_name as *const () as usize;
        copy[api::LOADED_EXECUTABLE_EXECUTE] = execute_padded as *const () as usize;
        Ok(Self { _library: library, path: path.to_owned(), table: copy, execute })
    }
}

/// `PJRT_Client_PlatformName`: not "cuda", at which `torch_xla` aborts.
unsafe extern "C" fn platform_name(args: *mut PlatformNameArgs) -> *mut c_void {
    const NAME: &CStr = c"gpu";
    // SAFETY: the caller's struct, of which the fields exist in every version.
    unsafe {
        (*args).platform_name = NAME.as_ptr();
        (*args).platform_name_size = NAME.count_bytes();
    }
    null_mut()
}

/// `PJRT_LoadedExecutable_Execute` with options of at least the plugin's size.
unsafe extern "C" fn execute_padded(args: *mut ExecuteArgs) -> *mut c_void {
    let Some(behind) = BEHIND.get() else { return null_mut() };
    // SAFETY: the caller's structs, each as long as it says; ours outlives the call that reads it.
    unsafe {
        let given = (*args).options;
        if given.is_null() || (*given).struct_size >= size_of::<PaddedOptions>() {
            return (behind.execute)(args);
        }
        let size = (*given).struct_size;
        let mut padded = PaddedOptions { struct_size: 0, fields: [0; 31] };
        std::ptr::copy_nonoverlapping(given.cast::<u8>(), (&raw mut padded).cast::<u8>(), size);
        padded.struct_size = size_of::<PaddedOptions>();
        (*args).options = &raw mut padded;
        let error = (behind.execute)(args);
        (*args).options = given;
        error
    }
}

/// The table, once [`stand_before`] has chosen a plugin; null before.
pub(crate) fn table() -> *const c_void {
    BEHIND.get().map_or(null(), |behind| behind.table.as_ptr().cast())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_no_plugin_is_refused() {
        let missing = stand_before("/nowhere/plugin.so").expect_err("there is no such file");
        assert!(missing.message.contains("/nowhere/plugin.so cannot be loaded"), "{missing:?}");
        let wrong = stand_before("libc.so.6").expect_err("libc is no plugin");
        assert!(wrong.message.contains("is no PJRT plugin"), "{wrong:?}");
        assert!(table().is_null());
    }

    #[test]
    fn the_platform_is_a_name_that_torch_xla_takes() {
        let mut args = PlatformNameArgs {
            struct_size: size_of::<PlatformNameArgs>(),
            extension_start: null_mut(),
            client: null_mut(),
            platform_name: null(),
            platform_name_size: 0,
        };
        // SAFETY: the struct is above.
        assert!(unsafe { platform_name(&raw mut args) }.is_null());
        // SAFETY: a constant.
        assert_eq!(unsafe { CStr::from_ptr(args.platform_name) }, c"gpu");
        assert_eq!(args.platform_name_size, 3);
    }
}
