//! Covering arrays of strength two: rows that choose one value per factor, such that every pair of values of two
//! factors occurs in a row.
//!
//! Most mistakes that depend on several options depend on two of them (Kuhn, Wallace, Gallo 2004). The number of rows
//! grows with the product of the two largest factors only.

use super::Random;
use std::collections::BTreeSet;

/// (factor, value). The value is below the factor's size.
pub type Choice = (usize, usize);

/// Two choices; that of the earlier factor comes first.
pub type Pair = (Choice, Choice);

/// Number of random rows from which the next one is chosen.
const CANDIDATES: usize = 40;

/// Rows that cover every pair of choices except those that `excluded` rules out. Every other pair must be part of a row
/// without an excluded pair.
pub fn cover(sizes: &[usize], excluded: &dyn Fn(Choice, Choice) -> bool, seed: u64) -> Vec<Vec<usize>> {
    let mut random = Random::new(seed);
    let mut open: BTreeSet<Pair> = pairs(sizes, excluded).into_iter().collect();
    let mut rows = Vec::new();
    while !open.is_empty() {
        let new_pairs = |row: &Vec<usize>| open.iter().filter(|pair| holds(row, **pair)).count();
        let candidates: Vec<Vec<usize>> =
            (0..CANDIDATES).filter_map(|_| complete(sizes, excluded, &open, &mut random)).collect();
        let best = candidates.into_iter().max_by_key(new_pairs);
        let best = best.unwrap_or_else(|| panic!("none of {open:?} can be completed: the exclusions are not closed"));
        open.retain(|pair| !holds(&best, *pair));
        rows.push(best);
    }
    rows
}

/// All pairs of choices of different factors, except the excluded ones.
pub fn pairs(sizes: &[usize], excluded: &dyn Fn(Choice, Choice) -> bool) -> Vec<Pair> {
    let choices: Vec<Choice> = (0..sizes.len()).flat_map(|f| (0..sizes[f]).map(move |v| (f, v))).collect();
    let later = |a: Choice| choices.iter().filter(move |b| a.0 < b.0).map(move |b| (a, *b));
    choices.iter().flat_map(|a| later(*a)).filter(|(a, b)| !excluded(*a, *b)).collect()
}

pub fn holds(row: &[usize], (a, b): Pair) -> bool {
    row[a.0] == a.1 && row[b.0] == b.1
}

/// A row that contains an open pair. Its other values are chosen greedily to cover most further pairs. `None` if the
/// exclusions leave no value for a factor.
fn complete(
    sizes: &[usize],
    excluded: &dyn Fn(Choice, Choice) -> bool,
    open: &BTreeSet<Pair>,
    random: &mut Random,
) -> Option<Vec<usize>> {
    let (a, b) = *open.iter().nth(random.below(open.len()))?;
    let mut chosen = vec![a, b];
    let mut rest: Vec<usize> = (0..sizes.len()).filter(|f| ![a.0, b.0].contains(f)).collect();
    random.shuffle(&mut rest);
    for factor in rest {
        let mut values: Vec<Choice> = (0..sizes[factor]).map(|value| (factor, value)).collect();
        values.retain(|choice| chosen.iter().all(|c| !excluded(*c, *choice) && !excluded(*choice, *c)));
        random.shuffle(&mut values);
        let covers = |choice: &Choice| {
            let with = |c: &Choice| open.contains(&if c.0 < factor { (*c, *choice) } else { (*choice, *c) });
            chosen.iter().filter(|c| with(c)).count()
        };
        let best = values.into_iter().max_by_key(covers)?;
        chosen.push(best);
    }
    let mut row = vec![0; sizes.len()];
    for (factor, value) in chosen {
        row[factor] = value;
    }
    Some(row)
}
