//! Buffers of f32 that are aligned to cache lines and shared by the tasks of a call.

use crate::error::{Result, with_room};
use crate::pool::{Pool, parallel_for};
use std::sync::OnceLock;

/// One cache line, and one vector of the widest instruction set.
#[derive(Clone, Copy)]
#[repr(C, align(64))]
struct Line([f32; 16]);

/// f32 in a line.
const LINE: usize = 16;

/// A zeroed buffer that begins on a cache line.
pub(super) struct AlignedBuffer(Vec<Line>);

impl AlignedBuffer {
    /// At least `len` zeros.
    ///
    /// # Errors
    /// `RESOURCE_EXHAUSTED`.
    pub(super) fn zeros(len: usize) -> Result<Self> {
        let count = len.div_ceil(LINE);
        let mut lines = with_room(count)?;
        lines.resize(count, Line([0.0; LINE]));
        Ok(Self(lines))
    }

    /// The first element.
    pub(super) fn as_mut_ptr(&mut self) -> *mut f32 {
        self.0.as_mut_ptr().cast()
    }
}

/// The address of a buffer that the tasks of a call write, each its own elements.
pub(super) struct SharedBuffer(*mut f32);

// SAFETY: sharing an address is harmless. Each access through it is `unsafe` and states which elements belong to its
// task.
unsafe impl Sync for SharedBuffer {}

impl SharedBuffer {
    /// The buffer `memory`, which must outlive all accesses.
    pub(super) fn new(memory: &mut AlignedBuffer) -> Self {
        Self(memory.as_mut_ptr())
    }

    /// The first element.
    pub(super) fn as_mut_ptr(&self) -> *mut f32 {
        self.0
    }
}

/// [`parallel_for`] with a `scratch` that may fail. The call then returns that error, with its results incomplete.
///
/// # Errors
/// The errors of `scratch`, and `INTERNAL` if a task panicked.
pub(super) fn try_parallel_for<S>(
    pool: &dyn Pool,
    count: usize,
    scratch: impl Fn() -> Result<S> + Sync,
    body: impl Fn(&mut S, usize) + Sync,
) -> Result {
    let failure = OnceLock::new();
    // If several threads fail, one error is returned.
    let scratch = || scratch().map_err(|e| failure.set(e)).ok();
    parallel_for(pool, count, scratch, |scratch, index| {
        if let Some(scratch) = scratch {
            body(scratch, index);
        }
    })?;
    failure.into_inner().map_or(Ok(()), Err)
}
