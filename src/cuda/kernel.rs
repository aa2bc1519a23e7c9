//! A kernel launch as data: what an operator chooses before anything is enqueued.

use super::launch::{self, Shape};
use super::{module, variants};
use crate::error::Result;
use crate::log;
use crate::stream::Stream;
use std::any::Any;
use std::ptr::null_mut;
use std::rc::Rc;

/// Bytes of the dynamic scheduler's tile index.
pub(super) const NEXT_TILE_BYTES: usize = size_of::<u64>();

/// One kernel launch.
#[derive(Clone)]
pub(super) struct Launch {
    /// The kernel's name without its variant.
    pub(super) kernel: &'static str,
    /// Its index in the table of variants.
    pub(super) variant: usize,
    pub(super) shape: Shape,
    /// The kernel's parameter: a struct of [`params`](super::params). Launches may share it.
    pub(super) parameter: Rc<dyn Any>,
    /// The tile index of the dynamic scheduler, [`NEXT_TILE_BYTES`] that are cleared before the launch; or null.
    pub(super) next_tile: *mut u8,
}

impl Launch {
    /// Without a dynamic scheduler.
    pub(super) fn new(kernel: &'static str, variant: usize, shape: Shape, parameter: Rc<dyn Any>) -> Self {
        Self { kernel, variant, shape, parameter, next_tile: null_mut() }
    }

    /// Load the kernel.
    pub(super) fn load(&self) -> Result {
        module::function(self.variant).map(|_| ())
    }

    /// # Safety
    /// `parameter` is the parameter of the kernel; what it names, and `next_tile`, is device memory of the current context
    /// that outlives the kernel's run, what the kernel writes of it writable.
    pub(super) unsafe fn enqueue(&self, stream: Stream) -> Result {
        let Self { kernel, variant, shape, .. } = *self;
        log::call(kernel, (variant, shape), || format!("{} with {shape:?}", variants::VARIANTS[variant].name));
        let function = module::function(variant)?;
        // SAFETY: this function's contract.
        unsafe {
            if !self.next_tile.is_null() {
                launch::fill(self.next_tile, 0, NEXT_TILE_BYTES, stream)?;
            }
            launch::launch(function, shape, stream, &*self.parameter)
        }
    }
}
