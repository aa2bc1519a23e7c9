//! The operators on NVIDIA GPUs: choose a variant, size the grid, launch on the caller's stream.
//!
//! Works through the driver API on whatever context is current: no device is set, no device memory allocated, nothing
//! waited for, so every launch may be captured into a graph. Each operator has `prepare`, which loads what `launch`
//! with the same problem could choose, and `launch`, which loads by itself what it finds missing. `host_copy` alone
//! waits, for calls that are checked.

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
pub(crate) mod host_copy;
mod image;
mod kernel;
mod kernel_file;
pub(crate) mod launch;
mod module;
pub(crate) mod params;
#[cfg(test)]
mod sass;
mod tensor_map;
mod tiles;
pub(crate) mod variants;
