//! Every pair of options that SPEC allows, against the reference.

use crate::support::case::Case;
use crate::support::check::check_named;
use crate::support::option_pairs::{calls, covered};
use crate::support::pairwise::{cover, holds, pairs};
use std::collections::BTreeSet;

#[test]
fn every_pair_of_options_agrees_with_the_reference() {
    for (index, (target, shape, storage)) in calls().into_iter().enumerate() {
        check_named(&format!("pairwise {index}"), Case::store(target, &shape.batch(), &storage));
    }
}

#[test]
fn the_set_holds_every_pair_of_options() {
    let (pairs, rows) = covered();
    for pair in &pairs {
        assert!(rows.iter().any(|row| holds(row, *pair)), "{pair:?}");
    }
    // Counted by hand: the factors have 3301 pairs of values. SPEC rules out 18 values beside paged attention, and so
    // beside an lse that is not wanted, which nothing else allows either (37); contiguous keys with a page size or
    // pages without one (9); two widths in one buffer (6).
    assert_eq!(pairs.len(), 3301 - 37 - 9 - 6);
    assert!(rows.len() < 115, "{} rows", rows.len());
}

#[test]
fn a_covering_set_leaves_out_what_is_excluded_and_nothing_else() {
    let sizes = [2, 3, 4, 2];
    let excluded = |a: (usize, usize), b: (usize, usize)| a == (0, 1) && b == (2, 3);
    let rows = cover(&sizes, &excluded, 1);
    let found: BTreeSet<_> = rows
        .iter()
        .flat_map(|row| (0..4).flat_map(move |i| (i + 1..4).map(move |j| ((i, row[i]), (j, row[j])))))
        .collect();
    assert_eq!(found, pairs(&sizes, &excluded).into_iter().collect());
    assert_eq!(found.len(), 2 * 3 + 2 * 4 + 2 * 2 + 3 * 4 + 3 * 2 + 4 * 2 - 1);
    assert!((12..20).contains(&rows.len()), "{} rows", rows.len());
}
