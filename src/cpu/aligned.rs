//! Memory of f32 on cache-line borders.

use crate::error::{Result, with_room};
use crate::pool::{Pool, parallel_for};
use std::sync::OnceLock;

/// One cache line, and one vector of the widest instruction set.
#[derive(Clone, Copy)]
#[repr(C, align(64))]
struct Line([f32; 16]);

/// f32 in a line.
pub(super) const LINE: usize = 16;

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

/// Memory of which every task writes a part of its own.
pub(super) struct SharedBuffer(*mut f32);

// SAFETY: an address alone; each task that writes there says which elements are its own.
unsafe impl Sync for SharedBuffer {}

impl SharedBuffer {
    /// What `memory` holds, for as long as it lives.
    pub(super) fn new(memory: &mut AlignedBuffer) -> Self {
        Self(memory.as_mut_ptr())
    }

    /// The first element.
    pub(super) fn as_mut_ptr(&self) -> *mut f32 {
        self.0
    }
}

/// [`parallel_for`] where a thread may find no memory for its scratch; the call fails then, its results half done.
///
/// # Errors
/// Those of making a scratch, and `INTERNAL` if a task panicked.
pub(super) fn try_parallel_for<S>(
    pool: &dyn Pool,
    count: usize,
    scratch: impl Fn() -> Result<S> + Sync,
    body: impl Fn(&mut S, usize) + Sync,
) -> Result {
    let failure = OnceLock::new();
    // One failure of several is enough to tell.
    let scratch = || scratch().map_err(|e| failure.set(e)).ok();
    parallel_for(pool, count, scratch, |scratch, index| {
        if let Some(scratch) = scratch {
            body(scratch, index);
        }
    })?;
    failure.into_inner().map_or(Ok(()), Err)
}
