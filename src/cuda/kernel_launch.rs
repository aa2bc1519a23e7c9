//! A kernel launch as a value: an operator chooses all of its launches before it enqueues the first one.

use super::enqueue::{self, LaunchConfig};
use super::params::KernelParams;
use super::{module, variants};
use crate::error::Result;
use crate::log;
use crate::stream::Stream;
use std::ffi::c_void;
use std::ptr::null_mut;

/// Size of the dynamic scheduler's tile counter.
pub(super) const NEXT_TILE_BYTES: usize = size_of::<u64>();

/// The source of a kernel's parameter.
pub(super) trait Parameter {
    /// Computes the parameter, one of [`KernelParams`], and passes it to `enqueue`, which reads it before it returns.
    fn pass(&self, enqueue: impl FnOnce(*const c_void) -> Result) -> Result;
}

/// Such a struct is passed unchanged.
impl<P: KernelParams> Parameter for P {
    fn pass(&self, enqueue: impl FnOnce(*const c_void) -> Result) -> Result {
        enqueue(std::ptr::from_ref(self).cast())
    }
}

/// One kernel launch.
#[derive(Clone)]
pub(super) struct Launch<P> {
    /// The kernel's name in `kernels/variants.toml`.
    pub(super) kernel: &'static str,
    /// Index in [`variants::VARIANTS`].
    pub(super) variant: usize,
    pub(super) config: LaunchConfig,
    pub(super) parameter: P,
    /// CTAs of a cluster, adjacent along the grid's y; 1 is a kernel without clusters.
    pub(super) cluster: u32,
    /// The dynamic scheduler's tile counter, [`NEXT_TILE_BYTES`] of device memory that are cleared before the launch; or null.
    pub(super) next_tile: *mut u8,
}

impl<P: Parameter> Launch<P> {
    /// A launch without clusters or a dynamic scheduler.
    pub(super) fn new(kernel: &'static str, variant: usize, config: LaunchConfig, parameter: P) -> Self {
        Self { kernel, variant, config, parameter, cluster: 1, next_tile: null_mut() }
    }

    /// Loads the kernel without launching it.
    pub(super) fn load(&self) -> Result {
        module::function(self.variant).map(|_| ())
    }

    /// Enqueues the launch on `stream`.
    ///
    /// # Safety
    /// `parameter` computes the parameter of this kernel. All memory that it points to, and `next_tile`, is device memory of
    /// the current context that outlives the kernel's execution and is writable where the kernel writes.
    pub(super) unsafe fn enqueue(&self, stream: Stream) -> Result {
        let Self { kernel, variant, config, cluster, .. } = *self;
        log::call(kernel, (variant, config), || format!("{} with {config:?}", variants::VARIANTS[variant].name));
        let function = module::function(variant)?;
        self.parameter.pass(|parameter| {
            // SAFETY: the caller guarantees the parameter, the memory it points to and `next_tile`.
            unsafe {
                if !self.next_tile.is_null() {
                    enqueue::fill(self.next_tile, 0, NEXT_TILE_BYTES, stream)?;
                }
                if cluster > 1 {
                    enqueue::launch_clusters(function, config, cluster, stream, parameter)
                } else {
                    enqueue::launch(function, config, stream, parameter)
                }
            }
        })
    }
}
