//! Paths, links and generated parts of the documents are valid.

use crate::layering::{files, root};
use std::fs;
use std::path::{Path, PathBuf};

/// The words in backticks that are paths of this repository: their first part is a folder or a file of the root.
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

/// Whether a path exists. The last part of a path may contain one `*`.
fn exists(path: &str) -> bool {
    let Some((before, after)) = path.split_once('*') else { return root().join(path).exists() };
    let (folder, prefix) = before.rsplit_once('/').unwrap_or((".", before));
    let Ok(entries) = fs::read_dir(root().join(folder)) else { return false };
    entries.map(|e| e.unwrap().file_name().into_string().unwrap()).any(|n| n.starts_with(prefix) && n.ends_with(after))
}

fn documents() -> Vec<PathBuf> {
    let folders = ["docs", "docs/dev", "docs/dev/kernels", "docs/reference"]
        .map(|folder| fs::read_dir(root().join(folder)).unwrap());
    let docs = folders.into_iter().flatten().map(|e| e.unwrap().path());
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

/// The targets of links, `[text](target)`.
fn links(text: &str) -> Vec<&str> {
    text.split("](").skip(1).filter_map(|rest| Some(rest.split_once(')')?.0)).collect()
}

/// References of the form `docs/NAME.md#ANCHOR`, which comments contain.
fn citations(text: &str) -> Vec<&str> {
    let words = text.split(|c: char| !c.is_alphanumeric() && !"_-./#".contains(c));
    let words = words.map(|word| word.trim_end_matches('.'));
    words.filter(|word| word.starts_with("docs/") && word.contains(".md#")).collect()
}

/// The anchors of a document: its headings in lower case, without punctuation, with hyphens for spaces.
fn anchors(text: &str) -> Vec<String> {
    let outside_of_code = text.split("```").step_by(2).flat_map(str::lines);
    let headings = outside_of_code.filter(|line| line.starts_with('#'));
    let headings = headings.filter_map(|line| line.trim_start_matches('#').strip_prefix(' '));
    let written = |c: char| match c {
        ' ' => Some('-'),
        _ => (c.is_alphanumeric() || "-_".contains(c)).then_some(c.to_ascii_lowercase()),
    };
    headings.map(|heading| heading.chars().filter_map(written).collect()).collect()
}

/// Whether a link from a file in `folder` is valid: the file exists and has the anchor.
fn is_valid_link(folder: &Path, target: &str) -> bool {
    match target.split_once('#') {
        None => folder.join(target).exists(),
        Some((file, anchor)) => {
            fs::read_to_string(folder.join(file)).is_ok_and(|text| anchors(&text).iter().any(|known| known == anchor))
        }
    }
}

#[test]
fn every_link_and_citation_is_valid() {
    let folders = ["benches", "build_support", "docs", "examples", "ffi", "kernels", "python", "src", "tests"];
    let pages = ["CHANGELOG.md", "CONTRIBUTING.md", "README.md", "SECURITY.md"].map(|name| root().join(name));
    let pages = pages.map(|path| (path.clone(), fs::read_to_string(path).unwrap()));
    let all = folders.iter().flat_map(|folder| files(&root().join(folder))).chain(pages);
    let (mut followed, mut cited) = (0, 0);
    // This file contains examples of broken links.
    for (path, text) in all.filter(|(path, _)| path != &root().join(file!())) {
        let is_document = path.extension().is_some_and(|e| e == "md");
        let links = if is_document { links(&text) } else { vec![] };
        for link in links.into_iter().filter(|link| !link.contains("://")) {
            let own = path.file_name().unwrap().to_str().unwrap();
            let target = if link.starts_with('#') { format!("{own}{link}") } else { link.to_owned() };
            assert!(is_valid_link(path.parent().unwrap(), &target), "{} links to {link}", path.display());
            followed += 1;
        }
        for target in citations(&text) {
            assert!(is_valid_link(&root(), target), "{} cites {target}", path.display());
            cited += 1;
        }
    }
    assert!(followed > 40 && cited > 20, "{followed} links, {cited} citations: the scan misses them");
}

#[test]
fn a_broken_link_is_detected() {
    let docs = root().join("docs");
    for target in ["semantics.md", "semantics.md#kv-caches", "../README.md#what-is-promised", "prefill.svg", "dev"] {
        assert!(is_valid_link(&docs, target), "{target}");
    }
    for target in ["semantic.md", "semantics.md#kv-cache", "semantics.md#Masks", "dev#masks"] {
        assert!(!is_valid_link(&docs, target), "{target}");
    }
    assert_eq!(links("[a](b.md), [c](#d) and f(x)"), ["b.md", "#d"]);
    assert_eq!(citations("as `docs/a.md#b-c` and (docs/d.md#e_f). docs/g.md"), ["docs/a.md#b-c", "docs/d.md#e_f"]);
    assert_eq!(anchors("# A b\n```\n# c\n```\n### `d_e`, F8\n#g"), ["a-b", "d_e-f8"]);
}

#[test]
fn every_source_folder_is_in_the_architecture() {
    let text = fs::read_to_string(root().join("docs/dev/architecture.md")).unwrap();
    for folder in ["src/api", "src/problem", "src/cpu", "src/cuda", "ffi", "kernels", "python", "tests"] {
        assert!(Path::new(&root().join(folder)).is_dir() && text.contains(folder), "{folder}");
    }
}

/// Operators that no text mentions together unless it lists all operators.
const UNRELATED: [&str; 3] = ["simple_add", "merge_attention_states", "gather_kv_cache"];

#[test]
fn the_guide_names_every_file_that_lists_operators() {
    let folders = ["benches", "build_support", "docs", "examples", "ffi", "kernels", "python", "src", "xla_headers"];
    let readme = (root().join("README.md"), fs::read_to_string(root().join("README.md")).unwrap());
    let all = folders.iter().flat_map(|folder| files(&root().join(folder))).chain([readme]);
    let lists = all.filter(|(_, text)| UNRELATED.iter().all(|operator| text.contains(operator)));
    let mut listed: Vec<String> =
        lists.map(|(path, _)| path.strip_prefix(root()).unwrap().to_str().unwrap().to_owned()).collect();
    // Generated, and the guide itself.
    listed.retain(|path| !(path.starts_with("docs/reference/") || path == "docs/dev/adding_an_operator.md"));
    listed.sort();
    assert_eq!(
        listed,
        [
            "docs/operators.md",
            "docs/semantics.md",
            "ffi/operators.toml",
            "kernels/variants.toml",
            "python/xla_attention/jax/__init__.py",
            "python/xla_attention/torch/__init__.py",
            "src/cuda/params/mod.rs",
        ]
    );
    let guide = fs::read_to_string(root().join("docs/dev/adding_an_operator.md")).unwrap();
    assert!(listed.iter().all(|path| guide.contains(&format!("`{path}`"))));
}

#[test]
fn the_scan_knows_a_path_from_other_code() {
    let text = "`src/problem` and `x / y`, `ffi/binding.h`, `Cargo.toml`, `cargo test`, `tests`, `and/or`, `src/*.rs`";
    assert_eq!(paths(text), ["src/problem", "ffi/binding.h", "Cargo.toml", "src/*.rs"]);
    assert!(exists("src/l*.rs") && !exists("src/no_such_*.rs"));
}

/// The folder of the build script's output.
const GENERATED: &str = env!("OUT_DIR");

/// `XLA_ATTENTION_WRITE_REFERENCE=1` writes the files (`make reference`).
#[test]
fn the_generated_files_in_the_repository_are_up_to_date() {
    for (name, of) in [
        ("docs/reference/custom_calls.md", "ffi/operators.toml"),
        ("docs/reference/options.md", "ffi/operators.toml"),
        ("python/xla_attention/include/xla_attention.h", "src/c_api.rs"),
    ] {
        let file = root().join(name);
        let generated = fs::read_to_string(Path::new(GENERATED).join(file.file_name().unwrap())).unwrap();
        if std::env::var_os("XLA_ATTENTION_WRITE_REFERENCE").is_some() {
            fs::write(&file, &generated).unwrap();
        }
        assert!(fs::read_to_string(&file).unwrap() == generated, "{of} is not that of {name}: run `make reference`");
    }
}

/// `ffi/README.md` shows a declaration and the binding that is generated from it.
#[test]
fn the_binding_in_the_readme_is_the_generated_one() {
    let text = fs::read_to_string(root().join("ffi/README.md")).unwrap();
    let block = |language: &str| {
        let (_, after) = text.split_once(&format!("```{language}\n")).unwrap();
        after.split_once("```").unwrap().0.to_owned()
    };
    let declared = fs::read_to_string(root().join("ffi/operators.toml")).unwrap();
    for part in block("toml").split("\n\n") {
        assert!(declared.contains(part.trim_end()), "not in ffi/operators.toml: {part}");
    }
    let binding = Path::new(GENERATED).join("bindings/kv_cache_update.cc");
    assert_eq!(block("cpp"), fs::read_to_string(binding).unwrap());
}
