//! Restricts the exports of the shared library to `xa_*` and `GetPjrtApi`.
//!
//! rustc exports every function with a C name, including those of the crate cxx and of the bridge. Another library in the same
//! process that contains cxx could then interpose its functions, which expect other layouts. The linker takes only one version
//! script, rustc's; but a symbol has the most restrictive visibility of all objects that mention it. So this module links an
//! object that mentions these symbols as hidden. `tests/python/test_exports.py` reports symbols that are missing here.

use anyhow::Result;
use std::collections::BTreeSet;
use std::fmt::Write as _;
use std::path::Path;
use std::{env, fs};

/// Functions of cxx other than those of `rust::Vec`.
const OTHERS: [&str; 22] = [
    "exception",
    "slice$len",
    "slice$new",
    "slice$ptr",
    "str$from",
    "str$len",
    "str$new",
    "str$ptr",
    "str$ref",
    "string$capacity",
    "string$clone",
    "string$drop",
    "string$from_utf16",
    "string$from_utf16_lossy",
    "string$from_utf8",
    "string$from_utf8_lossy",
    "string$len",
    "string$new",
    "string$ptr_const",
    "string$ptr_mut",
    "string$reserve_additional",
    "string$reserve_total",
];

const ELEMENTS: [&str; 16] = [
    "bool", "char", "f32", "f64", "i16", "i32", "i64", "i8", "isize", "str", "string", "u16", "u32", "u64", "u8",
    "usize",
];

const OF_A_VEC: [&str; 9] =
    ["capacity", "data_const", "data_mut", "drop", "len", "new", "reserve_total", "set_len", "truncate"];

/// Links the object, and binds calls within the library to the library itself (`-Bsymbolic`). The bridge has to be generated
/// before.
pub(crate) fn build(out: &Path) -> Result<()> {
    if env::var("CARGO_CFG_TARGET_OS")? != "linux" {
        return Ok(());
    }
    let mut hidden: BTreeSet<String> = OTHERS.iter().map(|name| format!("cxxbridge1${name}")).collect();
    for element in ELEMENTS {
        hidden.extend(OF_A_VEC.iter().map(|function| format!("cxxbridge1$rust_vec${element}${function}")));
    }
    let bridge = fs::read_to_string(out.join("cxxbridge/sources/xla-attention/src/bridge.rs.cc"))?;
    let of_a_name = |c: char| c.is_ascii_alphanumeric() || c == '_' || c == '$';
    hidden.extend(bridge.split(|c| !of_a_name(c)).filter(|word| word.starts_with("xa$cxxbridge1$")).map(str::to_owned));

    // The assembler drops symbols without a reference, so the section holds one to each. It is excluded from linking.
    let mut text = String::from(".section .hidden_names,\"e\",%progbits\n");
    for name in hidden {
        // Weak, so that a symbol without a definition is no error.
        let _ = write!(text, ".weak \"{name}\"\n.hidden \"{name}\"\n.quad \"{name}\"\n");
    }
    // Without this section the linker would make the stack executable.
    text += ".section .note.GNU-stack,\"\",%progbits\n";
    let source = out.join("hidden.S");
    fs::write(&source, text)?;
    for object in cc::Build::new().file(&source).try_compile_intermediates()? {
        println!("cargo:rustc-cdylib-link-arg={}", object.display());
    }
    println!("cargo:rustc-cdylib-link-arg=-Wl,-Bsymbolic");
    Ok(())
}
