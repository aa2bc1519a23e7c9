//! Memory of f32 on cache-line borders.

/// One cache line, and one vector of the widest instruction set.
#[derive(Clone, Copy)]
#[repr(C, align(64))]
struct Line([f32; 16]);

/// f32 in a line.
pub(super) const LINE: usize = 16;

/// A zeroed buffer that begins on a cache line.
pub(super) struct Aligned(Vec<Line>);

impl Aligned {
    /// At least `len` zeros.
    pub(super) fn zeros(len: usize) -> Self {
        Self(vec![Line([0.0; LINE]); len.div_ceil(LINE)])
    }

    /// The first element.
    pub(super) fn as_mut_ptr(&mut self) -> *mut f32 {
        self.0.as_mut_ptr().cast()
    }
}

/// Memory of which every task writes a part of its own.
pub(super) struct Shared(*mut f32);

// SAFETY: see the type.
unsafe impl Sync for Shared {}

impl Shared {
    /// What `memory` holds, for as long as it lives.
    pub(super) fn new(memory: &mut Aligned) -> Self {
        Self(memory.as_mut_ptr())
    }

    /// The first element.
    pub(super) fn address(&self) -> *mut f32 {
        self.0
    }
}
