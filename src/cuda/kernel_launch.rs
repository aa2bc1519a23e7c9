//! A kernel launch as a value: an operator chooses all of its launches before it enqueues the first one.

use super::enqueue::{self, LaunchAttributes, LaunchConfig};
use super::params::KernelParams;
use super::params::clear_tile_counter::ClearTileCounterParams;
use super::{module, variants};
use crate::error::Result;
use crate::log;
use crate::stream::Stream;
use cudarc::driver::sys::CUfunction;
use std::ffi::c_void;
use std::ptr::null_mut;

/// Size of the dynamic scheduler's tile counter.
pub(super) const NEXT_TILE_BYTES: usize = size_of::<u64>();

/// The kernel that clears it; its module is loaded if necessary.
fn clear_function() -> Result<CUfunction> {
    module::function(variants::find("clear_tile_counter", &[])?)
}

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
    pub(super) attributes: LaunchAttributes,
    /// The dynamic scheduler's tile counter, [`NEXT_TILE_BYTES`] of device memory that are cleared before the launch; or null.
    /// A kernel that starts early reads it when the one that clears it is complete.
    pub(super) next_tile: *mut u8,
}

impl<P: Parameter> Launch<P> {
    /// A launch without attributes or a dynamic scheduler.
    pub(super) fn new(kernel: &'static str, variant: usize, config: LaunchConfig, parameter: P) -> Self {
        Self { kernel, variant, config, parameter, attributes: LaunchAttributes::NONE, next_tile: null_mut() }
    }

    /// Loads the kernel without launching it.
    pub(super) fn load(&self) -> Result {
        if self.is_after_clearing() {
            clear_function()?;
        }
        module::function(self.variant).map(|_| ())
    }

    /// Whether a kernel clears the tile counter, so that this one starts early. In front of another kernel that is memset's
    /// work.
    fn is_after_clearing(&self) -> bool {
        !self.next_tile.is_null() && self.attributes.starts_early
    }

    /// # Safety
    /// `next_tile` is null or writable device memory of the current context.
    unsafe fn clear_tile_counter(&self, stream: Stream) -> Result {
        if self.next_tile.is_null() {
            return Ok(());
        }
        if !self.is_after_clearing() {
            // SAFETY: this function's contract.
            return unsafe { enqueue::fill(self.next_tile, 0, NEXT_TILE_BYTES, stream) };
        }
        let function = clear_function()?;
        let config = LaunchConfig { grid: [1, 1, 1], threads: 1, shared_memory: 0 };
        let params = ClearTileCounterParams { next_tile: self.next_tile.cast() };
        // SAFETY: the parameter is the kernel's; the memory is writable by this function's contract.
        params.pass(|params| unsafe { enqueue::launch(function, config, LaunchAttributes::NONE, stream, params) })
    }

    /// Enqueues the launch on `stream`.
    ///
    /// # Safety
    /// `parameter` computes the parameter of this kernel. All memory that it points to, and `next_tile`, is device memory of
    /// the current context that outlives the kernel's execution and is writable where the kernel writes.
    pub(super) unsafe fn enqueue(&self, stream: Stream) -> Result {
        let Self { kernel, variant, config, attributes, .. } = *self;
        log::call(kernel, (variant, config), || format!("{} with {config:?}", variants::VARIANTS[variant].name));
        let function = module::function(variant)?;
        self.parameter.pass(|parameter| {
            // SAFETY: the caller guarantees the parameter, the memory it points to and `next_tile`.
            unsafe {
                self.clear_tile_counter(stream)?;
                enqueue::launch(function, config, attributes, stream, parameter)
            }
        })
    }
}
