//! XLA's FFI headers: the folder of an environment variable, or the pinned ones (`xla_headers/pin.toml`).

use crate::process::{python, run};
use anyhow::{Context, Result, ensure};
use std::env;
use std::path::{Path, PathBuf};
use std::process::Command;

/// The three headers that the shims include, below the include folder.
pub(crate) const HEADERS: [&str; 3] = ["xla/ffi/api/c_api.h", "xla/ffi/api/api.h", "xla/ffi/api/ffi.h"];

/// The headers of one set of handlers.
pub(crate) struct Set {
    /// What the symbols of its handlers end in, as `src/c_api.rs` spells it.
    pub(crate) name: &'static str,
    /// The include folder.
    pub(crate) include: PathBuf,
}

/// A set of handlers for each pin; the folder of `XLA_FFI_INCLUDE_DIR` instead is that of the only set.
pub(crate) fn materialise() -> Result<Vec<Set>> {
    println!("cargo:rustc-check-cfg=cfg(newest_handlers)");
    if let Some(folder) = env::var_os("XLA_FFI_INCLUDE_DIR").map(PathBuf::from) {
        for header in HEADERS {
            ensure!(folder.join(header).is_file(), "XLA_FFI_INCLUDE_DIR={}: {header} is not there", folder.display());
        }
        return Ok(vec![Set { name: "oldest", include: absolute(&folder)? }]);
    }
    run(Command::new(python()).arg("xla_headers/materialise.py"))?;
    println!("cargo:rustc-cfg=newest_handlers");
    ["oldest", "newest"]
        .into_iter()
        .map(|name| Ok(Set { name, include: absolute(&Path::new("xla_headers/include").join(name))? }))
        .collect()
}

fn absolute(folder: &Path) -> Result<PathBuf> {
    std::path::absolute(folder).with_context(|| folder.display().to_string())
}
