//! Every pair of options that SPEC allows, against the reference.

use crate::support::case::{Case, Target};
use crate::support::check::check_named;
use crate::support::option_pairs::Options;
use crate::support::pairwise::{cover, holds, pairs};
use crate::support::steps::Step;
use std::collections::BTreeSet;

#[test]
fn every_pair_of_options_agrees_with_the_reference() {
    for (index, (target, shape, storage, _)) in Options::ATTENTION.calls().into_iter().enumerate() {
        let batch = shape.batch();
        check_named(&format!("pairwise {index}"), Case::store(target, &batch, &storage));
        if target == Target::PagedAttention {
            Step::new(&batch, &storage).check();
        }
    }
}

#[test]
fn the_set_holds_every_pair_of_options() {
    let ((mut pairs, rows), sizes) = (Options::ATTENTION.covered(), Options::ATTENTION.sizes());
    for pair in &pairs {
        assert!(rows.iter().any(|row| holds(row, *pair)), "{pair:?}");
    }
    // Counted by hand: the factors with a choice have 3301 pairs of values. SPEC rules out 18 values beside paged attention,
    // and so beside an lse that is not wanted, which nothing else allows either (37); contiguous keys with a page size or
    // pages without one (9); two widths in one buffer (6).
    pairs.retain(|(a, b)| sizes[a.0] > 1 && sizes[b.0] > 1);
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
