//! The cxx bridge and the C++ handlers, compiled into one static library.

use crate::headers::HEADERS;
use anyhow::{Context, Result};
use sha2::{Digest, Sha256};
use std::path::{Path, PathBuf};
use std::{env, fs};

const LIBRARY: &str = "xla_attention_ffi";

/// Compile `ffi/*.cc`, or repeat the link lines of the last time if nothing that goes into them has changed.
pub(crate) fn build(include: &Path, out: &Path) -> Result<()> {
    let mut sources: Vec<PathBuf> =
        fs::read_dir("ffi")?.map(|entry| Ok(entry?.path())).collect::<Result<_>>().context("ffi")?;
    sources.sort();
    let key = key(include, &sources)?;
    let key_file = out.join("shims.key");
    if fs::read_to_string(&key_file).is_ok_and(|old| old == key) && out.join(format!("lib{LIBRARY}.a")).exists() {
        println!("cargo:rustc-link-search=native={}", out.display());
        println!("cargo:rustc-link-lib=static={LIBRARY}");
        return Ok(());
    }
    let root = env::current_dir()?;
    let mut build = cxx_build::bridge("src/bridge.rs");
    build
        .files(sources.iter().filter(|path| path.extension().is_some_and(|e| e == "cc")))
        .include("ffi")
        // XLA's own headers warn under -Wextra; ours are held to it.
        .flag("-isystem")
        .flag(root.join(include).to_str().context("the path of the checkout is not UTF-8")?)
        .std("c++17")
        .flag("-fvisibility=hidden")
        .warnings(true)
        .extra_warnings(true)
        .warnings_into_errors(true);
    if env::var("PROFILE").as_deref() == Ok("release") {
        build.define("NDEBUG", None);
    }
    if env::var_os("CARGO_FEATURE_PLANTED_FAULTS").is_some() {
        build.define("XA_PLANTED_FAULTS", None);
    }
    build.try_compile(LIBRARY)?;
    fs::write(key_file, key)?;
    Ok(())
}

fn key(include: &Path, sources: &[PathBuf]) -> Result<String> {
    let mut hash = Sha256::new();
    for variable in ["PROFILE", "TARGET", "OPT_LEVEL", "DEBUG", "CXX", "CXXFLAGS", "AR", "CARGO_FEATURE_PLANTED_FAULTS"]
    {
        hash.update(format!("{variable}={:?};", env::var_os(variable)));
    }
    let fixed = ["src/bridge.rs", "build_support/shims.rs", "Cargo.lock"].map(PathBuf::from);
    let headers = HEADERS.map(|header| include.join(header));
    for file in sources.iter().chain(&fixed).chain(&headers) {
        hash.update(fs::read(file).with_context(|| file.display().to_string())?);
    }
    Ok(format!("{:x}", hash.finalize()))
}
