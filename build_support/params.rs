//! Generates a CUDA header for each file of `src/cuda/params`, which declare the kernels' parameters, with cbindgen.

use anyhow::{Context, Result};
use std::fs;
use std::path::Path;

const SOURCES: &str = "src/cuda/params";

/// Writes `params/<file>.cuh` below `headers` for every file.
pub(crate) fn build(headers: &Path) -> Result<()> {
    for entry in fs::read_dir(SOURCES)? {
        let source = entry?.path();
        if source.file_stem().is_some_and(|stem| stem != "mod") {
            let text = header(&source).with_context(|| source.display().to_string())?;
            let name = Path::new("params").join(source.file_name().unwrap_or_default()).with_extension("cuh");
            crate::process::write(&headers.join(name), &text)?;
        }
    }
    Ok(())
}

fn header(source: &Path) -> Result<String> {
    let text = fs::read_to_string(source)?;
    let words = |start: &'static str| {
        let rest = text.lines().filter_map(move |line| line.strip_prefix(start));
        rest.map(|rest| rest.split([' ', ':', '<']).next().unwrap_or_default().to_owned())
    };
    let mut config = cbindgen::Config {
        language: cbindgen::Language::Cxx,
        header: Some(format!("// Generated from {}.\n#pragma once", source.display())),
        namespace: Some("xa".into()),
        no_includes: true,
        sys_includes: vec!["cstdint".into()],
        includes: words("use super::").map(|file| format!("params/{file}.cuh")).collect(),
        line_length: 120,
        tab_width: 2,
        ..cbindgen::Config::default()
    };
    config.layout.aligned_n = Some("alignas".into());
    config.constant.allow_static_const = false;
    // Only this file's declarations; those of other files come from the headers that it includes.
    let types = words("pub struct ").chain(words("pub enum "));
    config.export.include = types.chain(words("pub const ")).collect();
    for constant in words("pub const ") {
        let name: String = constant.split('_').map(|word| word[..1].to_owned() + &word[1..].to_lowercase()).collect();
        config.export.rename.insert(constant, format!("k{name}"));
    }
    let mut bytes = vec![];
    cbindgen::Builder::new().with_config(config).with_src(source).generate()?.write(&mut bytes);
    Ok(String::from_utf8(bytes)?)
}
