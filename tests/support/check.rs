//! Runs a case and holds it against its answers.

use super::answers::{IfWrong, answers, assert_allowed, members};
use super::array::Array;
use super::case::Case;
use super::guard::for_both_sides;

/// `out`, and `softmax_lse` where it was asked for: what a call computes, without its workspace.
pub fn computed<'a>(case: &Case, results: &'a [Array]) -> &'a [Array] {
    &results[..if case.lse { 2 } else { 1 }]
}

/// Run against both guards; the results are what `answers` allow. Gives the results of both.
pub fn check_against(case: &Case, if_wrong: IfWrong) -> [Vec<Array>; 2] {
    let answers = answers(case, if_wrong);
    let call = case.invocation();
    let mut found = Vec::new();
    for_both_sides(|side| {
        let results = call.results(side);
        let results = computed(case, &results);
        assert_allowed(case, &answers, &results[0], results.get(1));
        found.push(results.to_vec());
    });
    found.try_into().unwrap()
}

/// The same for a case whose metadata is right throughout: two runs have the same bits. Gives `[out, softmax_lse]`, or
/// `[out]` if that is all that was asked for.
pub fn check(case: &Case) -> Vec<Array> {
    assert!(members(case).iter().all(|m| m.specified || m.len_q == 0), "{}: not everything is checked", case.name);
    let [first, second] = check_against(case, IfWrong::Unspecified);
    assert!(first == second, "{}: two runs differ", case.name);
    first
}

/// [`check`] of a case that has a name of its own, to be found by when it fails.
pub fn check_named(name: &str, mut case: Case) {
    case.name = format!("{name}: {}", case.name);
    check(&case);
}
