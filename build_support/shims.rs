//! Compiles the cxx bridge and the C++ handlers into one static library.

use crate::headers::{HEADERS, Set};
use anyhow::{Context, Result};
use sha2::{Digest, Sha256};
use std::path::{Path, PathBuf};
use std::{env, fs};

const LIBRARY: &str = "xla_attention_ffi";

/// Compiles the bridge once, and `ffi/*.cc` and the generated bindings for each set of headers, the sets at the same time. If
/// nothing has changed since the last build it only repeats the link lines.
pub(crate) fn build(sets: &[Set], bindings: &[PathBuf], out: &Path) -> Result<()> {
    let is_source = |path: &PathBuf| path.extension().is_some_and(|e| e == "cc" || e == "h");
    let mut sources: Vec<PathBuf> =
        fs::read_dir("ffi")?.map(|entry| Ok(entry?.path())).collect::<Result<_>>().context("ffi")?;
    sources.retain(is_source);
    sources.sort();
    sources.extend_from_slice(bindings);
    let key = key(sets, &sources)?;
    let key_file = out.join("shims.key");
    if fs::read_to_string(&key_file).is_ok_and(|old| old == key) && out.join(format!("lib{LIBRARY}.a")).exists() {
        println!("cargo:rustc-link-search=native={}", out.display());
        println!("cargo:rustc-link-lib=static={LIBRARY}");
        return Ok(());
    }
    // One translation unit per set: XLA's headers take seconds each time that they are parsed.
    let folder = env::current_dir()?;
    let units = sources.iter().filter(|path| path.extension().is_some_and(|e| e == "cc"));
    let text: Vec<_> = units.map(|path| format!("#include \"{}\"\n", folder.join(path).display())).collect();
    let unit = &out.join("handlers.cc");
    fs::write(unit, text.concat())?;
    let mut bridge = cxx_build::bridge("src/bridge.rs");
    common(&mut bridge);
    // cxx_build has written the bridge's header and cxx's there.
    let include = &out.join("cxxbridge/include");
    let objects: Vec<_> = std::thread::scope(|scope| {
        let compile = |set| scope.spawn(move || handlers(set, unit, include, out));
        let threads: Vec<_> = sets.iter().map(compile).collect();
        threads.into_iter().map(|t| t.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))).collect()
    });
    for set in objects {
        bridge.objects(set?);
    }
    bridge.try_compile(LIBRARY)?;
    fs::write(key_file, key)?;
    Ok(())
}

/// Compiles the handlers of a set and returns the objects.
fn handlers(set: &Set, unit: &Path, include: &Path, out: &Path) -> Result<Vec<PathBuf>> {
    let folder = out.join(set.name);
    fs::create_dir_all(&folder)?;
    let mut build = cc::Build::new();
    common(&mut build);
    let objects = build
        .cpp(true)
        .out_dir(&folder)
        .file(unit)
        .include(include)
        .define("XA_SET", set.name)
        // As system headers, because XLA's headers have warnings under -Wextra.
        .flag("-isystem")
        .flag(set.include.to_str().context("the path of XLA's headers is not UTF-8")?)
        .try_compile_intermediates()
        .context("the C++ shims need a C++17 compiler: install g++, or set CXX")?;
    Ok(objects)
}

/// Compiler options of the bridge and of every set of handlers.
fn common(build: &mut cc::Build) {
    build
        .include("ffi")
        .std("c++17")
        .flag("-fvisibility=hidden")
        .warnings(true)
        .extra_warnings(true)
        .warnings_into_errors(true);
    if env::var("PROFILE").as_deref() == Ok("release") {
        build.define("NDEBUG", None);
    } else {
        // Line numbers alone, and few optimisations: the shims only pass arguments on.
        build.debug(false).flag("-g1").opt_level(1);
    }
    if env::var_os("CARGO_FEATURE_FAILPOINTS").is_some() {
        build.define("XA_FAILPOINTS", None);
    }
}

fn key(sets: &[Set], sources: &[PathBuf]) -> Result<String> {
    let mut hash = Sha256::new();
    for variable in ["PROFILE", "TARGET", "OPT_LEVEL", "DEBUG", "CXX", "CXXFLAGS", "AR", "CARGO_FEATURE_FAILPOINTS"] {
        hash.update(format!("{variable}={:?};", env::var_os(variable)));
    }
    let fixed = ["src/bridge.rs", "build_support/shims.rs", "Cargo.lock"].map(PathBuf::from);
    let headers = sets.iter().flat_map(|set| HEADERS.map(|header| set.include.join(header)));
    for file in sources.iter().cloned().chain(fixed).chain(headers) {
        hash.update(fs::read(&file).with_context(|| file.display().to_string())?);
    }
    Ok(format!("{:x}", hash.finalize()))
}
