//! Failpoints: places, one per layer, where a test can make the next call fail. `tests/subprocess/failpoints.rs` shows
//! which error a user then sees.
//!
//! Only builds with the feature `failpoints`, which are for tests, can arm one; in other builds these functions do
//! nothing. A failpoint is armed for the calling thread, so tests that run in parallel do not affect each other.

/// Where a call can be made to fail. `ffi/binding.h` knows the numbers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(i32)]
#[cfg_attr(not(feature = "failpoints"), expect(dead_code, unreachable_pub, reason = "tests arm them"))]
pub enum Failpoint {
    /// A C++ shim throws a `std::exception`.
    ShimException = 0,
    /// A C++ shim throws something that is not a `std::exception`.
    ShimThrow = 1,
    /// A panic between a shim and the dispatch.
    Bridge = 2,
    /// A panic in a function of the C interface.
    CApi = 3,
    /// A panic while a call is validated against its signature.
    Problem = 4,
    /// A panic in a task of the CPU backend, on the calling thread.
    CpuCaller = 5,
    /// A panic in a task of the CPU backend, on a thread of the pool other than the caller.
    CpuWorker = 6,
    /// A panic while a module is loaded.
    CudaLoad = 7,
    /// A panic right before a kernel is enqueued.
    CudaLaunch = 8,
    /// One wrong number in a result of a call in debug check mode.
    WrongResult = 9,
}

#[cfg(feature = "failpoints")]
mod armed {
    use super::Failpoint;
    use std::cell::Cell;

    thread_local! {
        static ARMED: Cell<Option<Failpoint>> = const { Cell::new(None) };
    }

    /// Arm a failpoint on the calling thread, in place of any that is armed there.
    pub fn arm(failpoint: Failpoint) {
        ARMED.set(Some(failpoint));
    }

    /// Whether this failpoint is armed on the calling thread. If it is, it is disarmed.
    pub(crate) fn take(failpoint: Failpoint) -> bool {
        let is_armed = ARMED.get() == Some(failpoint);
        if is_armed {
            ARMED.set(None);
        }
        is_armed
    }

    /// [`take`] for the shims.
    #[unsafe(no_mangle)]
    extern "C" fn xa_take_failpoint(number: i32) -> bool {
        let of_shims = [Failpoint::ShimException, Failpoint::ShimThrow];
        of_shims.into_iter().any(|failpoint| failpoint as i32 == number && take(failpoint))
    }

    /// Panic with the failpoint's name.
    pub(crate) fn panic(failpoint: Failpoint) -> ! {
        panic!("failpoint: {failpoint:?}");
    }
}

#[cfg(feature = "failpoints")]
pub use armed::arm;
#[cfg(feature = "failpoints")]
pub(crate) use armed::{panic, take};

#[cfg(not(feature = "failpoints"))]
pub(crate) fn take(_: Failpoint) -> bool {
    false
}

#[cfg(not(feature = "failpoints"))]
pub(crate) fn panic(_: Failpoint) {}

/// Panic if this failpoint is armed on the calling thread.
pub(crate) fn trigger(failpoint: Failpoint) {
    if take(failpoint) {
        panic(failpoint);
    }
}
