//! The operators on NVIDIA GPUs: choose a variant, size the grid, launch on the caller's stream.
//!
//! The module uses the driver API on the current context. It sets no device, allocates no device memory and waits for
//! nothing, so every launch can be captured into a graph. Each operator has `prepare`, which loads every kernel that `launch`
//! could choose for the same problem, and `launch`, which loads a kernel itself if it is not loaded yet. Only `host_copy`
//! waits, in debug check mode.

use crate::problem::for_each_operator;

/// Every operator has a module of its name, with functions `prepare` and `launch`.
macro_rules! modules {
    ($($op:ident $name:ident,)*) => {
        $(pub(crate) mod $name;)*
    };
}
for_each_operator!(modules);

pub(crate) mod attention;

mod architecture;
mod cache_rows;
mod chunk;
pub(crate) mod device;
mod driver;
pub(crate) mod enqueue;
mod gather_token_scales;
pub(crate) mod host_copy;
mod image_validation;
mod kernel_launch;
mod module;
mod module_image;
mod padded_bias;
pub(crate) mod params;
#[cfg(test)]
mod sass;
mod tensor_map;
mod tiles;
mod token_scale_update;
pub(crate) mod variants;
