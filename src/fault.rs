//! Faults planted on purpose, one in each layer: `tests/subprocess/planted_faults.rs` shows what a user sees of them.
//!
//! Only test builds, those with the feature `planted_faults`, can plant one; in others nothing here does anything. A
//! fault is planted on a thread for the next call from there that comes by, so tests that run side by side do not see
//! each other's.

/// Where a fault can be planted. The numbers are known to `ffi/binding.h`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(i32)]
#[cfg_attr(not(feature = "planted_faults"), expect(dead_code, unreachable_pub, reason = "tests plant them"))]
pub enum Fault {
    /// A `std::exception` in a C++ shim.
    ShimException = 0,
    /// Something else that C++ throws in a shim.
    ShimThrow = 1,
    /// A panic between a shim and the entry.
    Bridge = 2,
    /// A panic in a function of the C interface.
    Door = 3,
    /// A panic while a call is held against its signature.
    Problem = 4,
    /// A panic in a task of the CPU backend, on the calling thread.
    CpuCaller = 5,
    /// The same on a thread of the pool, which has to have another than the caller's.
    CpuWorker = 6,
    /// A panic while a module is loaded.
    CudaLoad = 7,
    /// A panic right before a kernel is enqueued.
    CudaLaunch = 8,
    /// A wrong number in a result of a call that is checked.
    WrongResult = 9,
}

#[cfg(feature = "planted_faults")]
mod planted {
    use super::Fault;
    use std::cell::Cell;

    thread_local! {
        static PLANTED: Cell<Option<Fault>> = const { Cell::new(None) };
    }

    /// Plant a fault on the calling thread, in place of any that is still there.
    pub fn plant(fault: Fault) {
        PLANTED.set(Some(fault));
    }

    /// Whether this fault was planted on the calling thread; if so, it is gone now.
    pub(crate) fn takes(fault: Fault) -> bool {
        let found = PLANTED.get() == Some(fault);
        if found {
            PLANTED.set(None);
        }
        found
    }

    /// [`takes`] for the shims.
    #[unsafe(no_mangle)]
    extern "C" fn xa_takes_fault(number: i32) -> bool {
        [Fault::ShimException, Fault::ShimThrow].into_iter().any(|fault| fault as i32 == number && takes(fault))
    }

    /// Go off.
    pub(crate) fn panic(fault: Fault) -> ! {
        panic!("planted fault: {fault:?}");
    }
}

#[cfg(feature = "planted_faults")]
pub use planted::plant;
#[cfg(feature = "planted_faults")]
pub(crate) use planted::{panic, takes};

#[cfg(not(feature = "planted_faults"))]
pub(crate) fn takes(_: Fault) -> bool {
    false
}

#[cfg(not(feature = "planted_faults"))]
pub(crate) fn panic(_: Fault) {}

/// Panic if this fault was planted on the calling thread.
pub(crate) fn strike(fault: Fault) {
    if takes(fault) {
        panic(fault);
    }
}
