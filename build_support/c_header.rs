//! Generates `xla_attention.h`, the header of the C interface, from the Rust declarations.

use anyhow::{Context, Result};
use std::fs;
use std::path::Path;

/// The files that declare the C interface.
const SOURCES: [&str; 3] = ["src/c_api.rs", "src/handlers.rs", "src/layouts.rs"];

const HEAD: &str = "\
// The C interface of libxla_attention.so: handlers for XLA's typed FFI, and xa_call for programs without XLA.
//
// Generated from src/c_api.rs, src/handlers.rs and src/layouts.rs. docs/ffi.md says what holds for every operator.";

/// Writes the header to `OUT_DIR`. A test compares the checked-in header with it.
pub(crate) fn build(out: &Path) -> Result<()> {
    let mut config = cbindgen::Config {
        language: cbindgen::Language::C,
        cpp_compat: true,
        include_guard: Some("XLA_ATTENTION_H".into()),
        header: Some(HEAD.into()),
        documentation_style: cbindgen::DocumentationStyle::C99,
        line_length: 120,
        tab_width: 2,
        style: cbindgen::Style::Type,
        usize_is_size_t: true,
        no_includes: true,
        sys_includes: ["stdbool.h", "stddef.h", "stdint.h"].map(String::from).to_vec(),
        ..cbindgen::Config::default()
    };
    for (rust, c) in [("Handler", "XaHandler"), ("Target", "XaTarget"), ("Targets", "XaTargets")] {
        config.export.rename.insert(rust.into(), c.into());
    }
    let mut builder = cbindgen::Builder::new().with_config(config);
    for source in SOURCES {
        builder = builder.with_src(source);
    }
    let mut text = vec![];
    builder.generate().context("xla_attention.h")?.write(&mut text);
    fs::write(out.join("xla_attention.h"), without_links(&String::from_utf8(text)?))?;
    Ok(())
}

/// The text with rustdoc's links, `` [`name`] `` and `` [`name`](path) ``, replaced by their names.
fn without_links(text: &str) -> String {
    let mut parts = text.split("[`");
    let mut plain = parts.next().unwrap_or_default().to_owned();
    for part in parts {
        let (name, rest) = part.split_once("`]").unwrap_or((part, ""));
        let after = rest.strip_prefix("(crate::").and_then(|path| path.split_once(')'));
        for piece in ["`", name, "`", after.map_or(rest, |(_, after)| after)] {
            plain += piece;
        }
    }
    plain
}
