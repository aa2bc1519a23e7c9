//! The library contains two sets of handlers, and neither uses a definition of the other set's headers
//! (`ffi/xla_headers.h`).

use std::collections::BTreeSet;
use std::fs;
use std::path::Path;
use std::process::Command;

/// The symbols that the objects of a set define, weak ones included.
fn definitions(set: &str) -> BTreeSet<String> {
    let folder = Path::new(env!("OUT_DIR")).join(set);
    let objects = fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path());
    let objects: Vec<_> = objects.filter(|path| path.extension().is_some_and(|e| e == "o")).collect();
    assert_eq!(objects.len(), 1, "{objects:?}");
    let listed = Command::new("nm").args(["--format=posix", "--defined-only", "--extern-only"]).args(objects).output();
    let listed = listed.unwrap();
    assert!(listed.status.success(), "{}", String::from_utf8_lossy(&listed.stderr));
    let lines = String::from_utf8(listed.stdout).unwrap();
    lines.lines().filter_map(|line| Some(line.split_once(' ')?.0.to_owned())).collect()
}

#[test]
fn the_sets_share_no_definition_of_their_headers() {
    for set in ["oldest", "newest"] {
        let names = definitions(set);
        assert!(names.contains(&format!("xa_paged_attention_cuda_execute_{set}")), "{names:?}");
        // Mangled names contain a namespace after its length, and a C type by its name.
        let of_xla: Vec<_> = names.iter().filter(|name| name.contains("3xla") || name.contains("XLA_FFI")).collect();
        assert!(of_xla.is_empty(), "{set}: {of_xla:?}");
    }
    let (oldest, newest) = (definitions("oldest"), definitions("newest"));
    let common: Vec<_> = oldest.intersection(&newest).filter(|name| !is_in_both(name)).collect();
    assert!(common.is_empty(), "{common:?}");
}

/// Whether a symbol is of the C++ standard library or the bridge, which are the same for both sets.
fn is_in_both(name: &str) -> bool {
    let prefixes = "_ZNSt _ZNKSt _ZSt _ZZNSt _ZNS _ZNKS _ZTI _ZTS _ZTV DW.ref. _ZN4rust _ZNK4rust _ZN2xa";
    prefixes.split(' ').any(|prefix| name.starts_with(prefix))
}
