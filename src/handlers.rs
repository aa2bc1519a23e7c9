//! The tables of custom-call targets for an XLA runtime.
//!
//! The C++ handlers (`ffi/`) are compiled against two versions of XLA's headers (`xla_headers/pin.toml`). A runtime does
//! not accept handlers of a later FFI version than its own, and may one day drop the oldest version. Each version is a
//! set of handlers for the same targets.

use crate::problem::for_each_target;
use std::ffi::{c_char, c_void};
use std::sync::OnceLock;

/// An XLA FFI handler: takes an `XLA_FFI_CallFrame*`, returns an `XLA_FFI_Error*` or null.
pub type Handler = Option<unsafe extern "C" fn(frame: *mut c_void) -> *mut c_void>;

/// A target to register: handlers of typed-FFI API version 4. A stage that is null does not exist.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct Target {
    /// The custom call's target name, terminated.
    pub name: *const c_char,
    /// `cpu` or `CUDA`, as JAX spells them, terminated.
    pub platform: *const c_char,
    /// Runs before every execution, also when a graph is replayed: loads modules. Null on the CPU.
    pub initialize: Handler,
    /// Computes (CPU) or enqueues (CUDA); works without `initialize` too.
    pub execute: Handler,
}

// SAFETY: the struct holds pointers to constants.
unsafe impl Sync for Target {}
// SAFETY: as for `Sync`.
unsafe impl Send for Target {}

/// A table of targets, as [`xa_targets`](crate::xa_targets) and [`xa_handler_set`](crate::xa_handler_set) give it out.
#[repr(C)]
#[derive(Debug)]
pub struct Targets {
    /// `sizeof` of this struct, which only grows at its end.
    pub struct_size: usize,
    /// XLA FFI API version of the handlers, to be compared with the runtime's before registering.
    pub api_major: i32,
    /// See `api_major`.
    pub api_minor: i32,
    /// Number of rows.
    pub count: usize,
    /// The rows.
    pub rows: *const Target,
}

// SAFETY: the struct holds a pointer to constants.
unsafe impl Sync for Targets {}
// SAFETY: as for `Sync`.
unsafe impl Send for Targets {}

/// The rows of one target: an operator's three handlers, which `XA_TARGET` in `ffi/binding.h` defines for the set `$set`.
macro_rules! rows {
    ($set:literal, $operator:literal, $target:literal) => {{
        unsafe extern "C" {
            #[link_name = concat!("xa_", $operator, "_cpu_", $set)]
            fn cpu(frame: *mut c_void) -> *mut c_void;
        }
        #[cfg(feature = "cuda")]
        unsafe extern "C" {
            #[link_name = concat!("xa_", $operator, "_cuda_initialize_", $set)]
            fn cuda_initialize(frame: *mut c_void) -> *mut c_void;
            #[link_name = concat!("xa_", $operator, "_cuda_execute_", $set)]
            fn cuda_execute(frame: *mut c_void) -> *mut c_void;
        }
        const NAME: *const c_char = concat!($target, "\0").as_ptr().cast();
        [
            Target { name: NAME, platform: c"cpu".as_ptr(), initialize: None, execute: Some(cpu) },
            #[cfg(feature = "cuda")]
            Target {
                name: NAME,
                platform: c"CUDA".as_ptr(),
                initialize: Some(cuda_initialize),
                execute: Some(cuda_execute),
            },
        ]
    }};
}

static OLDEST: &[Target] = for_each_target!(rows, "oldest").as_flattened();
#[cfg(newest_handlers)]
static NEWEST: &[Target] = for_each_target!(rows, "newest").as_flattened();

/// Every target of this build, for each platform, with the handlers of the oldest API.
#[must_use]
pub fn targets() -> &'static [Target] {
    OLDEST
}

/// The sets of handlers, from the oldest API to the newest.
pub(crate) fn sets() -> &'static [Targets] {
    unsafe extern "C" {
        fn xa_header_version_oldest(major: *mut i32, minor: *mut i32);
        #[cfg(newest_handlers)]
        fn xa_header_version_newest(major: *mut i32, minor: *mut i32);
    }
    type Version = unsafe extern "C" fn(*mut i32, *mut i32);
    static SETS: OnceLock<Vec<Targets>> = OnceLock::new();
    SETS.get_or_init(|| {
        let sets: &[(Version, &'static [Target])] = &[
            (xa_header_version_oldest, OLDEST),
            #[cfg(newest_handlers)]
            (xa_header_version_newest, NEWEST),
        ];
        let table = |&(version, rows): &(Version, &'static [Target])| {
            let (mut api_major, mut api_minor) = (0, 0);
            // SAFETY: the function of `ffi/header_version.cc` writes these two integers.
            unsafe { version(&raw mut api_major, &raw mut api_minor) };
            Targets { struct_size: size_of::<Targets>(), api_major, api_minor, count: rows.len(), rows: rows.as_ptr() }
        };
        sets.iter().map(table).collect()
    })
}
