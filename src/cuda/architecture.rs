//! Which cubin runs on which GPU. The build script uses this module too.

/// The newest of `archs`, which are in ascending order, whose cubins run on a GPU of this compute capability.
pub(crate) fn newest_of<'a>(archs: impl DoubleEndedIterator<Item = &'a str>, capability: u32) -> Option<&'a str> {
    archs.rev().find(|arch| runs_on(arch, capability))
}

/// A cubin runs on its architecture and on later minor versions of it; one with the suffix `a` on its architecture only.
fn runs_on(arch: &str, capability: u32) -> bool {
    match arch.strip_suffix('a') {
        Some(exact) => exact.parse() == Ok(capability),
        None => arch.parse::<u32>().is_ok_and(|a| a / 10 == capability / 10 && a <= capability),
    }
}

#[test]
fn a_cubin_runs_within_its_major_version() {
    assert!(runs_on("80", 80) && runs_on("80", 86) && runs_on("90a", 90));
    assert!(runs_on("100", 103) && runs_on("120", 121) && !runs_on("100", 110) && !runs_on("100", 120));
    assert!(!runs_on("89", 86) && !runs_on("80", 90) && !runs_on("90a", 100) && !runs_on("90", 120));
    assert_eq!(newest_of(["80", "89", "90"].into_iter(), 89), Some("89"));
    assert_eq!(newest_of(["80", "89", "90"].into_iter(), 86), Some("80"));
}
