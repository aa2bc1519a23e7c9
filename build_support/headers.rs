//! XLA's FFI headers: the folder of an environment variable, or the pinned ones (`xla_headers/pin.toml`).

use crate::process::{python, run};
use anyhow::{Result, ensure};
use std::env;
use std::path::{Path, PathBuf};
use std::process::Command;

/// The three headers that the shims include, below the include folder.
pub(crate) const HEADERS: [&str; 3] = ["xla/ffi/api/c_api.h", "xla/ffi/api/api.h", "xla/ffi/api/ffi.h"];

/// The include folder that holds them.
pub(crate) fn materialise() -> Result<PathBuf> {
    if let Some(folder) = env::var_os("XLA_FFI_INCLUDE_DIR").map(PathBuf::from) {
        for header in HEADERS {
            ensure!(folder.join(header).is_file(), "XLA_FFI_INCLUDE_DIR={}: {header} is not there", folder.display());
        }
        return Ok(folder);
    }
    run(Command::new(python()).arg("xla_headers/materialise.py"))?;
    Ok(Path::new("xla_headers").join("include"))
}
