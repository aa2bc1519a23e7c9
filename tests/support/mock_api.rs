//! The host's side of the FFI: the API table that handlers call. It implements errors, the thread pool and the stream.
//! Any other entry aborts the process with its name.

use super::c_structs::{Api, ApiVersion, Entry, Extension};
use super::{HostPool, INVALID_ARGUMENT, Task, UNIMPLEMENTED};
use std::cell::Cell;
use std::ffi::{CStr, CString, c_char, c_void};
use std::mem::{offset_of, size_of};
use std::ptr::{null, null_mut};

/// Argument structures of the entries. All of them begin with the same two members.
macro_rules! arguments {
    ($($(#[$doc:meta])* struct $name:ident { $($field:ident: $type:ty),* })*) => {
        $(#[repr(C)]
        $(#[$doc])*
        struct $name {
            struct_size: usize,
            extension_start: *mut Extension,
            $($field: $type),*
        })*
    };
}

arguments! {
    struct ErrorCreateArgs { message: *const c_char, code: i32 }

    /// `XLA_FFI_Error_GetMessage_Args`. In a later version of the API this is `XLA_FFI_Error_GetDetails_Args`, which
    /// ends with the code.
    struct ErrorGetMessageArgs { error: *mut MockError, message: *const c_char, code: i32 }

    struct ErrorDestroyArgs { error: *mut MockError }

    struct StreamGetArgs { context: *const Context<'static>, stream: *mut c_void }

    struct ScheduleArgs {
        context: *const Context<'static>,
        task: unsafe extern "C" fn(*mut c_void),
        data: *mut c_void
    }

    struct NumThreadsArgs { context: *const Context<'static>, num_threads: *mut i64 }
}

/// The type behind `XLA_FFI_Error`.
pub struct MockError {
    pub code: i32,
    pub text: CString,
}

/// The type behind `XLA_FFI_ExecutionContext`.
pub struct Context<'a> {
    pub pool: &'a dyn HostPool,
    pub stream: Option<usize>,
}

thread_local! {
    /// Errors that this thread has created and not destroyed.
    static LIVE_ERRORS: Cell<isize> = const { Cell::new(0) };
}

/// Number of errors that this thread has created and not destroyed.
pub fn live_errors() -> isize {
    LIVE_ERRORS.get()
}

fn new_error(code: i32, text: &CStr) -> *mut c_void {
    LIVE_ERRORS.set(LIVE_ERRORS.get() + 1);
    Box::into_raw(Box::new(MockError { code, text: text.to_owned() })).cast()
}

/// Takes ownership of an error that a handler has returned.
pub fn take_error(error: *mut MockError) -> MockError {
    LIVE_ERRORS.set(LIVE_ERRORS.get() - 1);
    // SAFETY: `new_error` has made the pointer, and the caller does not use it again.
    *unsafe { Box::from_raw(error) }
}

unsafe extern "C" fn error_create(args: *mut c_void) -> *mut c_void {
    // SAFETY: a handler passes each entry the argument structure of that entry.
    let args = unsafe { &*args.cast::<ErrorCreateArgs>() };
    assert_eq!(args.struct_size, 28, "XLA_FFI_Error_Create_Args_STRUCT_SIZE");
    // SAFETY: the message is a C string.
    new_error(args.code, unsafe { CStr::from_ptr(args.message) })
}

unsafe extern "C" fn error_get_message(args: *mut c_void) -> *mut c_void {
    // SAFETY: as in `error_create`; the error lives until it is destroyed.
    unsafe {
        let args = args.cast::<ErrorGetMessageArgs>();
        (*args).message = (*(*args).error).text.as_ptr();
        // The structure of an older handler ends before `code`.
        if (*args).struct_size > offset_of!(ErrorGetMessageArgs, code) {
            (*args).code = (*(*args).error).code;
        }
    }
    null_mut()
}

unsafe extern "C" fn error_destroy(args: *mut c_void) -> *mut c_void {
    // SAFETY: as in `error_create`.
    drop(take_error(unsafe { (*args.cast::<ErrorDestroyArgs>()).error }));
    null_mut()
}

unsafe extern "C" fn stream_get(args: *mut c_void) -> *mut c_void {
    // SAFETY: as in `error_create`.
    let args = unsafe { &mut *args.cast::<StreamGetArgs>() };
    // SAFETY: the context outlives the call.
    match unsafe { (*args.context).stream } {
        Some(stream) => {
            args.stream = stream as *mut c_void;
            null_mut()
        }
        None => new_error(INVALID_ARGUMENT, c"XLA FFI GPU context is not available"),
    }
}

unsafe extern "C" fn pool_schedule(args: *mut c_void) -> *mut c_void {
    // SAFETY: as in `error_create`.
    let args = unsafe { &*args.cast::<ScheduleArgs>() };
    // SAFETY: the context outlives the call.
    match unsafe { (*args.context).pool }.schedule(Task::new(args.task, args.data)) {
        Ok(()) => null_mut(),
        Err(_) => new_error(UNIMPLEMENTED, c"no thread pool"),
    }
}

unsafe extern "C" fn pool_num_threads(args: *mut c_void) -> *mut c_void {
    // SAFETY: as in `error_create`.
    let args = unsafe { &*args.cast::<NumThreadsArgs>() };
    // SAFETY: the context outlives the call.
    match unsafe { (*args.context).pool }.num_threads() {
        Some(count) => {
            // SAFETY: `num_threads` points to an i64 of the handler.
            unsafe { *args.num_threads = count };
            null_mut()
        }
        None => new_error(UNIMPLEMENTED, c"no thread pool"),
    }
}

/// Names of the entries, in the order of the table.
const ENTRY_NAMES: &str = "Error_Create Error_GetMessage Error_Destroy Handler_Register Stream_Get TypeId_Register \
    ExecutionContext_Get State_Set State_Get DeviceMemory_Allocate DeviceMemory_Free ThreadPool_Schedule \
    ThreadPool_NumThreads Future_Create Future_SetAvailable Future_SetError RunId_Get DeviceOrdinal_Get";

unsafe extern "C" fn unexpected<const INDEX: usize>(_: *mut c_void) -> *mut c_void {
    let name = ENTRY_NAMES.split(' ').nth(INDEX).unwrap();
    eprintln!("the handler called XLA_FFI_{name}, which no handler of this library should need");
    std::process::abort()
}

/// Entries that abort the process.
macro_rules! entries {
    ($($index:literal)*) => {
        [$(unexpected::<$index> as Entry),*]
    };
}

/// The API table of every frame.
pub static API: Api = Api {
    struct_size: size_of::<Api>(),
    extension_start: null_mut(),
    version: ApiVersion { struct_size: 24, extension_start: null_mut(), major: 0, minor: 1 },
    internal: null(),
    entries: {
        let mut entries = entries![0 1 2 3 4 5 6 7 8 9 10 11 12 13 14 15 16 17];
        (entries[0], entries[1], entries[2]) = (error_create, error_get_message, error_destroy);
        (entries[4], entries[11], entries[12]) = (stream_get, pool_schedule, pool_num_threads);
        entries
    },
};
