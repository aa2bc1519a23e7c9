//! A kernel launch as a value: an operator chooses all of its launches before it enqueues the first one.

use super::enqueue::{self, LaunchAttributes, LaunchConfig};
use super::params::KernelParams;
use super::params::clear_tile_counter::{CLEAR_THREADS, ClearTileCounterParams};
use super::{module, variants};
use crate::error::Result;
use crate::log;
use crate::stream::Stream;
use cudarc::driver::sys::CUfunction;
use std::ffi::c_void;
use std::ptr::null_mut;

/// Size of one of a launch's [`Counters`].
pub(super) const COUNTER_BYTES: usize = size_of::<u64>();

/// Counters of a launch in device memory, of [`COUNTER_BYTES`] each, which are cleared before it. The first one is the dynamic
/// scheduler's tile counter.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Counters {
    pub(super) next_tile: *mut u8,
    pub(super) count: usize,
}

impl Counters {
    /// The tile counter alone, none if it is null.
    pub(super) fn only(next_tile: *mut u8) -> Self {
        Self { next_tile, count: usize::from(!next_tile.is_null()) }
    }
}

/// The kernel that clears them; its module is loaded if necessary.
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
    /// A kernel clears them. A launch that has some starts early, and accesses them when that one is complete.
    pub(super) counters: Counters,
}

impl<P: Parameter> Launch<P> {
    /// A launch without attributes or a dynamic scheduler.
    pub(super) fn new(kernel: &'static str, variant: usize, config: LaunchConfig, parameter: P) -> Self {
        let counters = Counters::only(null_mut());
        Self { kernel, variant, config, parameter, attributes: LaunchAttributes::NONE, counters }
    }

    /// Loads the kernel without launching it.
    pub(super) fn load(&self) -> Result {
        if self.counters.count > 0 {
            clear_function()?;
        }
        module::function(self.variant).map(|_| ())
    }

    /// # Safety
    /// The counters are writable device memory of the current context.
    unsafe fn clear_counters(&self, stream: Stream) -> Result {
        let Counters { next_tile, count } = self.counters;
        if count == 0 {
            return Ok(());
        }
        let function = clear_function()?;
        let config =
            LaunchConfig { grid: [1, 1, 1], threads: count.min(CLEAR_THREADS as usize) as u32, shared_memory: 0 };
        let params = ClearTileCounterParams { next_tile: next_tile.cast(), count: count as i32, reserved: 0 };
        // SAFETY: the parameter is the kernel's; the memory is writable by this function's contract.
        params.pass(|params| unsafe { enqueue::launch(function, config, LaunchAttributes::NONE, stream, params) })
    }

    /// Enqueues the launch on `stream`.
    ///
    /// # Safety
    /// `parameter` computes the parameter of this kernel. All memory that it points to, and the counters, is device memory of
    /// the current context that outlives the kernel's execution and is writable where the kernel writes.
    pub(super) unsafe fn enqueue(&self, stream: Stream) -> Result {
        let Self { kernel, variant, config, .. } = *self;
        let starts_early = self.attributes.starts_early || self.counters.count > 0;
        let attributes = LaunchAttributes { starts_early, ..self.attributes };
        log::call(kernel, (variant, config), || format!("{} with {config:?}", variants::VARIANTS[variant].name));
        let function = module::function(variant)?;
        self.parameter.pass(|parameter| {
            // SAFETY: the caller guarantees the parameter, the memory it points to and the counters.
            unsafe {
                self.clear_counters(stream)?;
                enqueue::launch(function, config, attributes, stream, parameter)
            }
        })
    }
}
