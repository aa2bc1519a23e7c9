//! A kernel launch as data: what an operator chooses before anything is enqueued.

use super::launch::{self, Shape};
use super::params::KernelParams;
use super::{module, variants};
use crate::error::Result;
use crate::log;
use crate::stream::Stream;
use std::ffi::c_void;
use std::ptr::null_mut;

/// Bytes of the dynamic scheduler's tile index.
pub(super) const NEXT_TILE_BYTES: usize = size_of::<u64>();

/// What a kernel's parameter is made of.
pub(super) trait Parameter {
    /// Makes the parameter, one of [`KernelParams`], and passes it to `enqueue`, which reads it before it
    /// returns.
    fn pass(&self, enqueue: impl FnOnce(*const c_void) -> Result) -> Result;
}

/// Is passed as it is.
impl<P: KernelParams> Parameter for P {
    fn pass(&self, enqueue: impl FnOnce(*const c_void) -> Result) -> Result {
        enqueue(std::ptr::from_ref(self).cast())
    }
}

/// One kernel launch.
#[derive(Clone)]
pub(super) struct Launch<P> {
    /// The kernel's name without its variant.
    pub(super) kernel: &'static str,
    /// Its index in the table of variants.
    pub(super) variant: usize,
    pub(super) shape: Shape,
    pub(super) parameter: P,
    /// The tile index of the dynamic scheduler, [`NEXT_TILE_BYTES`] that are cleared before the launch; or null.
    pub(super) next_tile: *mut u8,
}

impl<P: Parameter> Launch<P> {
    /// Without a dynamic scheduler.
    pub(super) fn new(kernel: &'static str, variant: usize, shape: Shape, parameter: P) -> Self {
        Self { kernel, variant, shape, parameter, next_tile: null_mut() }
    }

    /// Load the kernel.
    pub(super) fn load(&self) -> Result {
        module::function(self.variant).map(|_| ())
    }

    /// # Safety
    /// `parameter` makes the parameter of the kernel; what that names, and `next_tile`, is device memory of the current
    /// context that outlives the kernel's run, what the kernel writes of it writable.
    pub(super) unsafe fn enqueue(&self, stream: Stream) -> Result {
        let Self { kernel, variant, shape, .. } = *self;
        log::call(kernel, (variant, shape), || format!("{} with {shape:?}", variants::VARIANTS[variant].name));
        let function = module::function(variant)?;
        self.parameter.pass(|parameter| {
            // SAFETY: this function's contract.
            unsafe {
                if !self.next_tile.is_null() {
                    launch::fill(self.next_tile, 0, NEXT_TILE_BYTES, stream)?;
                }
                launch::launch(function, shape, stream, parameter)
            }
        })
    }
}
