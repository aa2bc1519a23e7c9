//! Builds the kernels, the operators' generated code, XLA's headers and the C++ shims, in that order. Each step skips what has
//! not changed.

#[cfg(feature = "cuda")]
#[path = "src/cuda/architecture.rs"]
mod architecture;
#[path = "build_support/c_header.rs"]
mod c_header;
#[path = "build_support/exports.rs"]
mod exports;
#[path = "build_support/headers.rs"]
mod headers;
#[cfg(feature = "cuda")]
#[path = "build_support/kernel_images.rs"]
mod kernel_images;
#[cfg(feature = "cuda")]
#[path = "build_support/kernel_table.rs"]
mod kernel_table;
#[cfg(feature = "cuda")]
#[path = "build_support/kernels.rs"]
mod kernels;
#[path = "build_support/operators.rs"]
mod operators;
#[cfg(feature = "cuda")]
#[path = "build_support/params.rs"]
mod params;
#[path = "build_support/process.rs"]
mod process;
#[path = "build_support/reference.rs"]
mod reference;
#[path = "build_support/shims.rs"]
mod shims;
#[cfg(feature = "cuda")]
#[path = "build_support/variants.rs"]
mod variants;

use anyhow::{Context, Result};
use std::env;
use std::path::PathBuf;

fn main() -> Result<()> {
    for path in [
        "build.rs",
        "build_support",
        "kernels",
        "ffi",
        "src/bridge.rs",
        "src/c_api.rs",
        "src/cuda/architecture.rs",
        "src/cuda/params",
        "src/handlers.rs",
        "xla_headers",
    ] {
        println!("cargo:rerun-if-changed={path}");
    }
    // PATH is not watched, because pip builds in a new environment each time; the compiler's version is part of the cache key.
    for variable in
        ["XLA_ATTENTION_NVCC", "XLA_ATTENTION_PTXAS", "XLA_ATTENTION_LINE_INFO", "XLA_FFI_INCLUDE_DIR", "PYTHON"]
    {
        println!("cargo:rerun-if-env-changed={variable}");
    }
    if env::var_os("XLA_ATTENTION_LINE_INFO").is_some_and(|value| !["", "0", "1"].iter().any(|known| value == *known)) {
        println!("cargo:warning=XLA_ATTENTION_LINE_INFO: expected 0 or 1; taken for 0");
    }
    let out = PathBuf::from(env::var_os("OUT_DIR").context("cargo sets OUT_DIR")?);
    // rustdoc links nothing, and docs.rs has neither a network for XLA's headers nor nvcc.
    println!("cargo:rerun-if-env-changed=DOCS_RS");
    let is_documentation = env::var_os("DOCS_RS").is_some();
    #[cfg(feature = "cuda")]
    build_kernels(&out, is_documentation)?;
    let (operators, bindings) = operators::build(&out)?;
    if is_documentation {
        return Ok(());
    }
    reference::build(&operators, &out)?;
    let sets = headers::materialise(process::target_folder(&out))?;
    shims::build(&sets, &bindings, &out)?;
    c_header::build(&out)?;
    exports::build(&out)
}

/// Generates the kernels' headers in `<target>/include`, where other tools find them too, and compiles the kernels, none for
/// documentation.
#[cfg(feature = "cuda")]
fn build_kernels(out: &std::path::Path, is_documentation: bool) -> Result<()> {
    use std::fs;

    let target = process::target_folder(out);
    // Two concurrent cargo processes, as in `make test`, would compile each kernel twice.
    let lock = fs::File::create(target.join("kernels.lock"))?;
    lock.lock()?;
    let headers = target.join("include");
    params::build(&headers)?;
    let path = "kernels/variants.toml";
    let table = variants::parse(&fs::read_to_string(path)?).context(path)?;
    for (name, text) in table.headers() {
        process::write(&headers.join("tiles").join(name).with_extension("cuh"), &text)?;
    }
    fs::write(out.join("tiles.rs"), table.tiles())?;
    kernel_table::build(table, is_documentation, &headers, out)
}
