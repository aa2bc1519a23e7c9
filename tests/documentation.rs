//! What the documents name is there.

#![allow(clippy::unwrap_used, reason = "a failed step is a failed test")]

use std::fs;
use std::path::{Path, PathBuf};
use xla_attention::{Op, ops::AttributeKind};

fn root() -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR"))
}

/// The words in backticks that look like a path of this repository: a known folder or file name comes first.
fn paths(text: &str) -> Vec<String> {
    let folders: Vec<String> =
        fs::read_dir(root()).unwrap().map(|e| e.unwrap().file_name().into_string().unwrap()).collect();
    let in_backticks = text.split('`').skip(1).step_by(2);
    let is_path = |word: &str| {
        let mut parts = word.splitn(2, '/');
        let first = parts.next().unwrap();
        let plain = word.chars().all(|c| c.is_alphanumeric() || "_-./*".contains(c));
        plain && folders.iter().any(|f| f == first) && (parts.next().is_some() || first.contains('.'))
    };
    in_backticks.flat_map(str::split_whitespace).filter(|word| is_path(word)).map(ToOwned::to_owned).collect()
}

/// A path, or a pattern whose last part holds one `*`.
fn exists(path: &str) -> bool {
    let Some((before, after)) = path.split_once('*') else { return root().join(path).exists() };
    let (folder, prefix) = before.rsplit_once('/').unwrap_or((".", before));
    let Ok(entries) = fs::read_dir(root().join(folder)) else { return false };
    entries.map(|e| e.unwrap().file_name().into_string().unwrap()).any(|n| n.starts_with(prefix) && n.ends_with(after))
}

fn documents() -> Vec<PathBuf> {
    let docs = fs::read_dir(root().join("docs")).unwrap().map(|e| e.unwrap().path());
    let mut all: Vec<PathBuf> = docs.filter(|p| p.extension().is_some_and(|e| e == "md")).collect();
    all.push(root().join("README.md"));
    all
}

#[test]
fn every_path_that_a_document_names_exists() {
    let mut named = 0;
    for document in documents() {
        for path in paths(&fs::read_to_string(&document).unwrap()) {
            named += 1;
            assert!(exists(&path), "{} names {path}, which is not there", document.display());
        }
    }
    assert!(named > 10, "the documents name {named} paths: the scan misses them");
}

#[test]
fn every_source_folder_is_in_the_architecture() {
    let text = fs::read_to_string(root().join("docs/architecture.md")).unwrap();
    for folder in ["src/functions", "src/ops", "src/cpu", "src/cuda", "ffi", "kernels", "python", "tests"] {
        assert!(Path::new(&root().join(folder)).is_dir() && text.contains(folder), "{folder}");
    }
}

#[test]
fn the_scan_knows_a_path_from_other_code() {
    let text = "`src/ops` and `x / y`, `ffi/binding.h`, `Cargo.toml`, `cargo test`, `tests`, `and/or`, `src/*.rs`";
    assert_eq!(paths(text), ["src/ops", "ffi/binding.h", "Cargo.toml", "src/*.rs"]);
    assert!(exists("src/l*.rs") && !exists("src/no_such_*.rs"));
}

/// What a section of `docs/ffi.md` says of one target, in the words of its first column.
fn rows_of(section: &str) -> Vec<String> {
    let first_columns = section.lines().filter_map(|line| line.strip_prefix("| ")?.split(" |").next());
    first_columns.filter(|column| column.ends_with('`')).map(|column| column.replace('`', "")).collect()
}

#[test]
fn the_custom_calls_are_described_as_the_code_has_them() {
    let text = fs::read_to_string(root().join("docs/ffi.md")).unwrap();
    let sections: Vec<(&str, &str)> = text.split("\n## ").skip(2).map(|s| s.split_once('\n').unwrap()).collect();
    assert_eq!(sections.len(), Op::ALL.len());
    for op in Op::ALL {
        let signature = op.signature();
        let heading = format!("`{}`", signature.target);
        let (_, section) = sections.iter().find(|(title, _)| *title == heading).expect(signature.target);
        let optional = |index: usize, required: usize| if index < required { "" } else { "optional " };
        let operands = signature.operands.iter().enumerate();
        let operands = operands.map(|(i, name)| format!("{}operand {name}", optional(i, signature.required_operands)));
        let results = signature.results.iter().enumerate();
        let results = results.map(|(i, name)| format!("{}result {name}", optional(i, signature.required_results)));
        let attributes = signature.attributes.iter().map(|(name, _)| format!("attribute {name}"));
        assert_eq!(rows_of(section), operands.chain(results).chain(attributes).collect::<Vec<_>>(), "{heading}");
        for (name, kind) in signature.attributes {
            let kind = match kind {
                AttributeKind::Bool => "i1",
                AttributeKind::I64 => "i64",
                AttributeKind::F32 => "f32",
            };
            let row = section.lines().find(|line| line.starts_with(&format!("| attribute `{name}` | {kind}")));
            assert!(row.is_some(), "{heading}: {name} is {kind}");
        }
    }
}
