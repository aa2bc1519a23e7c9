//! The device of the current context.

use super::driver;
use crate::error::{Error, Result};
use cudarc::driver::sys::{self, CUcontext, CUdevice, CUdevice_attribute as Attribute};
use std::sync::OnceLock;

/// Number of devices whose properties are cached.
const DEVICES: usize = 64;

/// The properties of a device that the choice of a variant and the size of a grid depend on.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Device {
    /// Compute capability times ten: 80, 90, 103, 120.
    pub capability: u32,
    /// Largest dynamic shared memory of a CTA, in bytes.
    pub shared_memory: u32,
    /// Shared memory of an SM, in bytes.
    pub shared_memory_per_sm: u32,
    /// Shared memory that the driver reserves per CTA, in bytes.
    pub reserved_per_block: u32,
    /// Number of SMs.
    pub sms: u32,
    /// Whether kernels for sm_90a run on the device and the driver can encode tensor maps for them.
    pub has_tensor_maps: bool,
}

impl Device {
    /// The device of the context that is current on this thread.
    ///
    /// # Errors
    /// `UNAVAILABLE` without a driver, `FAILED_PRECONDITION` without a context or on a GPU older than sm_80.
    pub(crate) fn current() -> Result<Self> {
        static KNOWN: [OnceLock<Device>; DEVICES] = [const { OnceLock::new() }; DEVICES];
        current_context()?;
        let mut ordinal = 0;
        // SAFETY: a context is current.
        driver::check(unsafe { sys::cuCtxGetDevice(&raw mut ordinal) }, "cuCtxGetDevice")?;
        let known = usize::try_from(ordinal).ok().and_then(|index| KNOWN.get(index));
        if let Some(device) = known.and_then(OnceLock::get) {
            return Ok(*device);
        }
        let device = Self::ask(ordinal)?;
        Ok(known.map_or(device, |known| *known.get_or_init(|| device)))
    }

    #[cold]
    fn ask(device: CUdevice) -> Result<Self> {
        let attribute = |which| {
            let mut value = 0;
            // SAFETY: `device` is a device; the call writes one integer.
            driver::check(unsafe { sys::cuDeviceGetAttribute(&raw mut value, which, device) }, "cuDeviceGetAttribute")?;
            Ok(value as u32)
        };
        let major = attribute(Attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR)?;
        let minor = attribute(Attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR)?;
        let capability = major * 10 + minor;
        if capability < 80 {
            return Err(Error::precondition(format!("the GPU is sm_{capability}; the kernels need sm_80 or newer")));
        }
        Ok(Self {
            capability,
            shared_memory: attribute(Attribute::CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN)?,
            shared_memory_per_sm: attribute(Attribute::CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_MULTIPROCESSOR)?,
            reserved_per_block: attribute(Attribute::CU_DEVICE_ATTRIBUTE_RESERVED_SHARED_MEMORY_PER_BLOCK)?,
            sms: attribute(Attribute::CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT)?,
            has_tensor_maps: capability == 90 && driver::version()? >= 12000,
        })
    }

    /// CTAs that are resident at a time if each takes `shared_memory` bytes and registers allow `blocks_per_sm` of them per SM.
    pub(crate) fn resident_blocks(&self, shared_memory: u32, blocks_per_sm: u32) -> u32 {
        let fit = self.shared_memory_per_sm / (shared_memory + self.reserved_per_block);
        self.sms * fit.clamp(1, blocks_per_sm)
    }
}

/// The current context of this thread. XLA and torch make theirs current before they call the library.
///
/// # Errors
/// `UNAVAILABLE` without a driver, `FAILED_PRECONDITION` where no context is current.
#[inline]
pub(crate) fn current_context() -> Result<CUcontext> {
    driver::present()?;
    let mut context = std::ptr::null_mut();
    // SAFETY: writes one pointer.
    driver::check(unsafe { sys::cuCtxGetCurrent(&raw mut context) }, "cuCtxGetCurrent")?;
    if context.is_null() {
        return Err(Error::precondition("no CUDA context is current on the calling thread"));
    }
    Ok(context)
}
