//! Modules of the crate import only modules below them (`docs/dev/architecture.md`).

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};

/// The modules that each module of `src` may use in addition to itself. (`xa_info`, in `c_api`, lists the kernel
/// variants of the build.)
const MAY_USE: &str = "
    environment:
    error:
    failpoint:
    panic_boundary:
    handlers: problem
    layouts:
    stream:
    log:
    tensor: error
    pool: error failpoint panic_boundary
    problem: error failpoint tensor
    cpu: error tensor pool problem log
    cuda: environment error failpoint panic_boundary tensor problem stream log
    debug_check: environment error tensor pool problem
    dispatch: error failpoint panic_boundary tensor pool problem stream log cpu cuda debug_check
    api: error tensor pool problem stream dispatch
    bridge: error failpoint tensor pool problem stream dispatch debug_check
    c_api: error failpoint panic_boundary handlers layouts tensor pool problem stream log dispatch debug_check cuda::variants pjrt_proxy
    pjrt_proxy: error
";

pub(crate) fn root() -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR"))
}

/// Every text file under `folder`.
pub(crate) fn files(folder: &Path) -> Vec<(PathBuf, String)> {
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

/// Source without line comments.
fn code(text: &str) -> String {
    text.lines().map(|line| line.split("//").next().unwrap()).collect::<Vec<_>>().join("\n")
}

/// The path of a module without `crate`: that of `src/cpu/mod.rs` is `["cpu"]`, that of the crate root is empty.
type Module = Vec<String>;

/// The modules and the paths in them.
struct Modules {
    /// The paths in the code of each module, as written.
    paths: BTreeMap<Module, Vec<String>>,
    /// The imports of each module: name and imported path.
    imports: BTreeMap<Module, BTreeMap<String, String>>,
}

impl Modules {
    /// The modules of `src`.
    fn of_the_crate() -> Self {
        let src = root().join("src");
        let mut code_of = BTreeMap::new();
        for (path, text) in files(&src) {
            let path = path.strip_prefix(&src).unwrap().with_extension("");
            let mut module: Module = path.iter().map(|part| part.to_str().unwrap().to_owned()).collect();
            if ["mod", "lib"].contains(&module.last().unwrap().as_str()) {
                module.pop();
            }
            split_modules(module, &code(&text), &mut code_of);
        }
        Self::of(&code_of)
    }

    fn of(code_of: &BTreeMap<Module, String>) -> Self {
        let (mut paths, mut imports) = (BTreeMap::new(), BTreeMap::new());
        for (module, code) in code_of {
            let used: Vec<String> = use_trees(code).flat_map(leaves).collect();
            let name_and_path = |leaf: &String| {
                let (path, alias) = leaf.split_once(" as ").unwrap_or((leaf, leaf));
                (alias.rsplit("::").next().unwrap().to_owned(), path.to_owned())
            };
            imports.insert(module.clone(), used.iter().map(name_and_path).collect::<BTreeMap<_, _>>());
            paths.insert(module.clone(), used.into_iter().chain(written_paths(code)).collect::<Vec<_>>());
        }
        Self { paths, imports }
    }

    /// The path from the crate root that `path` in the code of `module` stands for, following imports; `None` if
    /// another crate or the module itself defines it.
    fn resolve(&self, module: &[String], path: &str) -> Option<Vec<String>> {
        let mut at = module.to_vec();
        let mut parts = path.split("::").peekable();
        match *parts.peek()? {
            "crate" => {
                at.clear();
                parts.next();
            }
            "self" => drop(parts.next()),
            "super" => {
                while parts.next_if_eq(&"super").is_some() {
                    at.pop();
                }
            }
            part => {
                let own = [module, &[part.to_owned()]].concat();
                if !self.paths.contains_key(&own) {
                    return None;
                }
            }
        }
        for part in parts {
            let part = part.split_whitespace().next()?;
            let inner = [at.as_slice(), &[part.to_owned()]].concat();
            let imported = || self.resolve(&at, self.imports.get(&at)?.get(part)?);
            at = if self.paths.contains_key(&inner) { inner } else { imported().unwrap_or(inner) };
        }
        Some(at)
    }

    /// The paths in `module` that it may not use.
    fn forbidden(&self, module: &[String]) -> Vec<String> {
        let name = &module[0];
        let mut rows = MAY_USE.lines().filter_map(|row| row.trim().split_once(':'));
        let (_, allowed) = rows.find(|(row, _)| row == name).unwrap_or_else(|| {
            panic!("src/{name} has no row in this test: say which modules it may use");
        });
        let within = |path: &str, of: &str| path == of || path.starts_with(&format!("{of}::"));
        let permitted = |path: &String| within(path, name) || allowed.split_whitespace().any(|of| within(path, of));
        let used = self.paths[module].iter().filter_map(|path| self.resolve(module, path));
        used.map(|path| path.join("::")).filter(|path| !path.is_empty() && !permitted(path)).collect()
    }

    /// The uses between modules with a common parent that are part of an import cycle, except in tests. Submodules
    /// count as their module; a module and its parent may use each other.
    fn cycles(&self) -> BTreeMap<(Module, Module), String> {
        let mut uses = BTreeMap::new();
        for (module, paths) in self.paths.iter().filter(|(module, _)| !module.contains(&"tests".to_owned())) {
            for path in paths.iter().filter_map(|path| self.resolve(module, path)) {
                let depth = (0..=path.len()).rev().find(|&n| self.paths.contains_key(&path[..n])).unwrap();
                let used = &path[..depth];
                let common = module.iter().zip(used).take_while(|(a, b)| a == b).count();
                if common < module.len().min(used.len()) {
                    let siblings = (module[..=common].to_vec(), used[..=common].to_vec());
                    uses.insert(siblings, format!("{} uses {}", module.join("::"), path.join("::")));
                }
            }
        }
        let edges: Vec<_> = uses.keys().cloned().collect();
        let leads_to = |from: &Module, to: &Module| {
            let mut reached = vec![from];
            let mut next = 0;
            while let Some(&at) = reached.get(next) {
                let used = edges.iter().filter(|(module, _)| module == at).map(|(_, used)| used);
                reached.extend(used.filter(|used| !reached.contains(used)).collect::<Vec<_>>());
                next += 1;
            }
            reached.contains(&to)
        };
        uses.retain(|(module, used), _| leads_to(used, module));
        uses
    }
}

/// Adds the code of a module and of its inline modules to `code_of`. An inline module ends at a brace that is indented
/// like its beginning.
fn split_modules(module: Module, code: &str, code_of: &mut BTreeMap<Module, String>) {
    let (mut own, mut lines) = (String::new(), code.lines());
    while let Some(line) = lines.next() {
        let head = line.trim_start();
        if let Some((_, name)) = head.strip_suffix(" {").and_then(|head| head.rsplit_once("mod ")) {
            let end = format!("{}}}", &line[..line.len() - head.len()]);
            let inner: Vec<&str> = lines.by_ref().take_while(|line| *line != end).collect();
            split_modules([&module[..], &[name.to_owned()]].concat(), &inner.join("\n"), code_of);
        } else {
            own.extend([line, "\n"]);
        }
    }
    code_of.insert(module, own);
}

/// The text between each `use` and its semicolon.
fn use_trees(code: &str) -> impl Iterator<Item = &str> {
    let begins = |at: usize| !code[..at].ends_with(|c: char| c.is_alphanumeric() || c == '_');
    code.match_indices("use ").filter(move |(at, _)| begins(*at)).filter_map(|(at, word)| {
        let (tree, _) = code[at + word.len()..].split_once(';')?;
        Some(tree)
    })
}

/// The paths of a `use` tree: `a::{self, b::{c, d as e}}` has `a`, `a::b::c` and `a::b::d as e`.
fn leaves(tree: &str) -> Vec<String> {
    let Some((prefix, group)) = tree.split_once('{') else {
        let path = tree.trim();
        return Vec::from_iter((!path.is_empty()).then(|| path.trim_end_matches("::self").to_owned()));
    };
    let (mut depth, mut first, mut found) = (0, 0, Vec::new());
    for (at, c) in group.char_indices() {
        depth += i32::from(c == '{') - i32::from(c == '}');
        if depth < 0 || (depth == 0 && c == ',') {
            found.extend(leaves(&group[first..at]));
            first = at + 1;
        }
        if depth < 0 {
            break;
        }
    }
    found.iter().map(|leaf| format!("{}{leaf}", prefix.trim_start()).trim_end_matches("::self").to_owned()).collect()
}

/// Every path `a::b` in the code.
fn written_paths(code: &str) -> impl Iterator<Item = String> {
    let words = code.split(|c: char| !(c.is_alphanumeric() || c == '_' || c == ':'));
    words.filter(|word| word.contains("::")).map(|word| word.trim_matches(':').to_owned())
}

#[test]
fn modules_use_only_what_lies_below_them() {
    let modules = Modules::of_the_crate();
    for module in modules.paths.keys().filter(|module| !module.is_empty() && module[0] != "tests") {
        let found = modules.forbidden(module);
        assert!(found.is_empty(), "{} must not use {found:?}", module.join("::"));
    }
}

#[test]
fn no_modules_import_each_other_in_a_cycle() {
    let cycles = Modules::of_the_crate().cycles();
    assert!(cycles.is_empty(), "import cycles: {:#?}", cycles.values());
}

/// Modules with these sources.
fn modules(sources: &[(&str, &str)]) -> Modules {
    let path = |name: &str| name.split("::").filter(|part| !part.is_empty()).map(str::to_owned).collect();
    Modules::of(&sources.iter().map(|(name, text)| (path(name), code(text))).collect())
}

#[test]
fn the_scan_finds_every_form_of_a_module_path() {
    let text = "use crate::error::Result; use crate::{pool::{Pool, Task as T}, dispatch::{self}}; use super::tensor;
        fn f() { crate::cuda::launch(x); part::g(); half::f16::MAX; exposed::h(); } // crate::bridge";
    let root = "mod part; use tensor::Tensor as View; pub use stream::Stream;";
    let none =
        ["error", "pool", "dispatch", "cuda", "tensor", "stream", "bridge", "problem::part"].map(|name| (name, ""));
    let modules = modules(
        &[&[("", root), ("problem", text), ("problem::other", "use crate::{Stream, View};")][..], &none].concat(),
    );
    let found = |module: &str| modules.forbidden(&module.split("::").map(str::to_owned).collect::<Vec<_>>());
    assert_eq!(found("problem"), ["pool::Pool", "pool::Task", "dispatch", "cuda::launch"]);
    assert_eq!(found("problem::other"), ["stream::Stream"]);
}

#[test]
fn the_scan_finds_cycles() {
    let cycles = |sources: &[(&str, &str)]| {
        modules(sources)
            .cycles()
            .into_keys()
            .map(|(a, b)| format!("{} {}", a.join("::"), b.join("::")))
            .collect::<Vec<_>>()
    };
    let (a, b) = (("f::a", "use super::b::B;"), ("f::b", "struct B;"));
    assert!(cycles(&[("f", "mod a; mod b;"), a, b, ("f::c", "use crate::f::{a, b};")]).is_empty());
    // No cycle: a module and its parent, and tests.
    assert!(
        cycles(&[("f", "use a::A;"), a, b, ("f::a::c", "use super::A;"), ("f::b::tests", "use crate::f::a;")])
            .is_empty()
    );
    let found = ["f::a f::b", "f::b f::a"];
    assert_eq!(cycles(&[("f", ""), a, ("f::b", "fn g() { super::a::A }")]), found);
    // A cycle through a submodule, and through an import of the parent.
    assert_eq!(cycles(&[("f", ""), a, b, ("f::b::c", "use crate::f::{x, a::A as X};")]), found);
    assert_eq!(cycles(&[("f", "use a::{A, Z};"), a, ("f::b", "use super::{x::Y, A};")]), found);
    let three =
        [("a", "use crate::b::B;"), ("b", "use crate::c::C;"), ("c", "use crate::a::A; use crate::d::D;"), ("d", "")];
    assert_eq!(cycles(&three), ["a b", "b c", "c a"]);
}

/// The `#include`s of the sources in a folder: (file, included file).
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
