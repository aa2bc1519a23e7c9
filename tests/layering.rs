//! Dependencies point one way (`docs/architecture.md`): who may use whom, held against the sources.

#![allow(clippy::unwrap_used, reason = "a failed step is a failed test")]

use std::fs;
use std::path::{Path, PathBuf};

/// Which modules of `src` a module may use; it may always use its own parts.
const MAY_USE: &[(&str, &[&str])] = &[
    ("environment", &[]),
    ("error", &[]),
    ("fault", &[]),
    ("guard", &[]),
    ("handlers", &[]),
    ("stream", &[]),
    ("log", &[]),
    ("tensor", &["error"]),
    ("pool", &["error", "fault", "guard"]),
    ("ops", &["error", "fault", "tensor"]),
    ("cpu", &["error", "tensor", "pool", "ops", "log"]),
    ("cuda", &["environment", "error", "fault", "guard", "tensor", "ops", "stream", "log"]),
    ("check", &["environment", "error", "tensor", "pool", "ops"]),
    ("call", &["error", "fault", "guard", "tensor", "pool", "ops", "stream", "log", "cpu", "cuda", "check"]),
    ("functions", &["error", "tensor", "pool", "ops", "stream", "call"]),
    ("bridge", &["error", "fault", "tensor", "pool", "ops", "stream", "call", "check"]),
    // `xa_info` lists the kernel variants of the build.
    (
        "c_api",
        &[
            "error",
            "fault",
            "guard",
            "handlers",
            "tensor",
            "pool",
            "ops",
            "stream",
            "log",
            "call",
            "check",
            "cuda::variants",
            "pjrt_plugin",
        ],
    ),
    ("pjrt_plugin", &["error"]),
];

fn root() -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR"))
}

/// Every file under `folder`, with its text.
fn files(folder: &Path) -> Vec<(PathBuf, String)> {
    let mut found = Vec::new();
    for entry in fs::read_dir(folder).unwrap() {
        let path = entry.unwrap().path();
        if path.is_dir() {
            found.extend(files(&path));
        } else if let Ok(text) = fs::read_to_string(&path) {
            found.push((path, text));
        }
    }
    found
}

/// Source without its line comments, which may name anything.
fn code(text: &str) -> String {
    text.lines().map(|line| line.split("//").next().unwrap()).collect::<Vec<_>>().join("\n")
}

/// The paths after `crate::` in some code, groups expanded one level deep: `crate::{a::b, c}` gives `a::b` and `c`.
fn crate_paths(code: &str) -> Vec<String> {
    let is_path = |c: char| c.is_alphanumeric() || c == '_' || c == ':';
    let mut paths = Vec::new();
    for (at, _) in code.match_indices("crate::") {
        let rest = &code[at + "crate::".len()..];
        if let Some(group) = rest.strip_prefix('{') {
            let mut depth = 0;
            let mut item = String::new();
            for c in group.chars() {
                match c {
                    '}' if depth == 0 => break,
                    '{' => depth += 1,
                    '}' => depth -= 1,
                    ',' if depth == 0 => paths.push(std::mem::take(&mut item)),
                    c if depth == 0 => item.push(c),
                    _ => (),
                }
            }
            paths.push(item);
        } else {
            paths.push(rest.chars().take_while(|&c| is_path(c)).collect());
        }
    }
    paths.iter().map(|p| p.trim().trim_end_matches("::").to_owned()).filter(|p| !p.is_empty()).collect()
}

/// What `module` uses without being allowed to.
fn forbidden(module: &str, code: &str) -> Vec<String> {
    let (_, allowed) = MAY_USE.iter().find(|(name, _)| *name == module).unwrap_or_else(|| {
        panic!("src/{module} has no row in this test: say which modules it may use");
    });
    let within = |path: &str, of: &str| path == of || path.starts_with(&format!("{of}::"));
    let permitted = |path: &String| within(path, module) || allowed.iter().any(|of| within(path, of));
    crate_paths(code).into_iter().filter(|path| !permitted(path)).collect()
}

#[test]
fn modules_use_only_what_lies_below_them() {
    let src = root().join("src");
    for (path, text) in files(&src) {
        let module = path.strip_prefix(&src).unwrap().iter().next().unwrap().to_str().unwrap();
        let module = module.trim_end_matches(".rs");
        if module != "lib" {
            let found = forbidden(module, &code(&text));
            assert!(found.is_empty(), "{} must not use {found:?}", path.display());
        }
    }
}

#[test]
fn the_scan_sees_every_way_to_name_a_module() {
    let paths =
        crate_paths("use crate::error::Result; crate::cuda::launch(x); use crate::{pool::{Pool, Task}, call}; ");
    assert_eq!(paths, ["error::Result", "cuda::launch", "pool", "call"]);
    assert_eq!(forbidden("ops", "use crate::cpu::run;"), ["cpu::run"]);
    assert_eq!(forbidden("c_api", "crate::cuda::variants::X, crate::cuda::launch"), ["cuda::launch"]);
    assert!(forbidden("cuda", &code("// crate::bridge is above")).is_empty());
}

/// The `#include`s of the sources in a folder: (file, what is included).
fn includes(folder: &str) -> Vec<(String, String)> {
    let mut found = Vec::new();
    for (path, text) in files(&root().join(folder)) {
        let includes = text.lines().filter_map(|line| line.trim().strip_prefix("#include"));
        let name = |line: &str| line.trim().trim_matches(['"', '<', '>']).to_owned();
        found.extend(includes.map(|line| (path.display().to_string(), name(line))));
    }
    assert!(!found.is_empty(), "{folder} includes nothing");
    found
}

#[test]
fn shims_know_xla_and_the_bridge_but_neither_cuda_nor_kernels() {
    for (file, name) in includes("ffi") {
        assert!(!name.contains("cuda") && !name.contains("kernels"), "{file} includes {name}");
    }
}

#[test]
fn kernels_know_cuda_but_neither_xla_nor_the_bridge() {
    for (file, name) in includes("kernels") {
        let foreign = ["xla", "rust/", "torch", "cxx"].iter().any(|word| name.contains(word));
        assert!(!foreign, "{file} includes {name}");
    }
}

#[test]
fn only_the_cuda_backend_names_cudarc_and_only_the_bridge_names_cxx() {
    let src = root().join("src");
    for (path, text) in files(&src) {
        let file = path.strip_prefix(&src).unwrap().to_str().unwrap().to_owned();
        let code = code(&text);
        assert!(!code.contains("cudarc") || file.starts_with("cuda"), "{file} names cudarc");
        assert!(!code.contains("cxx") || file == "bridge.rs", "{file} names cxx");
    }
}
