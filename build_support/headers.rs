//! XLA's FFI headers: those in `XLA_FFI_INCLUDE_DIR`, or the pinned ones (`xla_headers/pin.toml`).

use crate::process::{python, run};
use anyhow::{Context, Result, ensure};
use std::env;
use std::path::{Path, PathBuf};
use std::process::Command;

/// The headers that the shims include, relative to the include folder.
pub(crate) const HEADERS: [&str; 3] = ["xla/ffi/api/c_api.h", "xla/ffi/api/api.h", "xla/ffi/api/ffi.h"];

/// A version of XLA's headers, for which one set of handlers is compiled.
pub(crate) struct Set {
    /// The suffix of the handlers' symbols, as in `src/c_api.rs`.
    pub(crate) name: &'static str,
    /// The include folder.
    pub(crate) include: PathBuf,
}

/// The headers to compile handlers for: one set per pin, in `<target>/xla_headers`, or the only set of
/// `XLA_FFI_INCLUDE_DIR`.
pub(crate) fn materialise(target: &Path) -> Result<Vec<Set>> {
    if let Some(folder) = env::var_os("XLA_FFI_INCLUDE_DIR").map(PathBuf::from) {
        for header in HEADERS {
            ensure!(folder.join(header).is_file(), "XLA_FFI_INCLUDE_DIR={}: {header} is not there", folder.display());
        }
        return Ok(vec![Set { name: "oldest", include: absolute(&folder)? }]);
    }
    let folder = absolute(&target.join("xla_headers"))?;
    run(Command::new(python()).arg("xla_headers/materialise.py").arg(&folder))?;
    println!("cargo:rustc-cfg=newest_handlers");
    Ok(["oldest", "newest"].into_iter().map(|name| Set { name, include: folder.join(name) }).collect())
}

fn absolute(folder: &Path) -> Result<PathBuf> {
    std::path::absolute(folder).with_context(|| folder.display().to_string())
}
