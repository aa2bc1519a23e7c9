//! Damaged calls: each case of the conformance tables, changed at random in up to three places.
//!
//! The tables are the corpus: what is found here becomes a case there. A run tries the same calls every time;
//! `PROPTEST_CASES=5000000 cargo test --test fuzz` goes on to others. `tests/coverage_fuzz` makes the same changes, guided by
//! the coverage that they give.

use crate::attempt::{Outcome, try_call};
use crate::mutation::{Mutation, Plan, Side};
use crate::support::array::{BF16, Dtype, F8E4M3FN, F16, F32, F64, I32, I64, PRED, U8};
use crate::support::conformance::{Case, cases};
use crate::support::invocation::Attr;
use crate::support::strategies::for_all;
use proptest::collection::vec;
use proptest::prelude::*;
use proptest::sample::{Index, select};
use std::cell::Cell;

/// What kernels, pages and heads come in, what lies beside it, and what overflows.
fn sizes() -> impl Strategy<Value = i64> {
    prop_oneof![
        6 => 0..10i64,
        3 => select(&[15i64, 16, 17, 31, 32, 33, 64, 127, 128, 129, 192, 255, 256, 257]),
        1 => select(&[-1, i64::MIN, i64::MAX, 1 << 31, 1 << 32, (1 << 32) + 1, 1 << 40, i64::MAX / 2, i64::MAX / 4 + 1]),
    ]
}

fn dtypes() -> impl Strategy<Value = Dtype> {
    let known = select(&[PRED, U8, I32, I64, F16, BF16, F32, F64, F8E4M3FN]);
    prop_oneof![8 => known, 1 => any::<u8>().prop_map(|code| Dtype(code.into()))]
}

fn attributes() -> impl Strategy<Value = Attr> {
    let integers = prop_oneof![Just(-1), 0..10i64, select(&[i64::MIN, i64::MAX, 1 << 31, 1 << 32])];
    let floats = prop_oneof![
        select(&[0.0, -0.0, 1.0, f32::NAN, f32::INFINITY, f32::NEG_INFINITY, f32::MAX, f32::MIN_POSITIVE, 1e-45]),
        any::<f32>(),
    ];
    prop_oneof![
        4 => integers.prop_map(Attr::I64),
        4 => floats.prop_map(Attr::F32),
        2 => any::<bool>().prop_map(Attr::Bool),
        1 => any::<i32>().prop_map(Attr::I32),
        1 => any::<f64>().prop_map(Attr::F64),
        1 => Just(Attr::I64s(vec![1, 2])),
        1 => Just(Attr::Text("a".to_owned())),
    ]
}

fn mutations() -> impl Strategy<Value = Mutation> {
    let side = || select(&[Side::Operands, Side::Results]);
    let index = any::<usize>;
    prop_oneof![
        3 => (side(), index(), index(), sizes()).prop_map(|(s, b, a, d)| Mutation::Size(s, b, a, d)),
        16 => (index(), index(), sizes()).prop_map(|(b, a, d)| Mutation::Resize(b, a, d)),
        1 => (side(), index(), index(), sizes()).prop_map(|(s, b, a, d)| Mutation::Stride(s, b, a, d)),
        1 => (side(), index(), index(), sizes()).prop_map(|(s, b, a, d)| Mutation::Insert(s, b, a, d)),
        1 => (side(), index(), index()).prop_map(|(s, b, a)| Mutation::Remove(s, b, a)),
        1 => (side(), index(), dtypes()).prop_map(|(s, b, d)| Mutation::Dtype(s, b, d)),
        3 => (index(), dtypes()).prop_map(|(b, d)| Mutation::Retype(b, d)),
        2 => (side(), index()).prop_map(|(s, b)| Mutation::LeaveOut(s, b)),
        1 => (side(), index()).prop_map(|(s, b)| Mutation::Truncate(s, b)),
        1 => (side(), index()).prop_map(|(s, b)| Mutation::Append(s, b)),
        1 => (side(), index(), index()).prop_map(|(s, a, b)| Mutation::Swap(s, a, b)),
        4 => (index(), attributes()).prop_map(|(a, v)| Mutation::Attribute(a, v)),
        1 => index().prop_map(Mutation::Forget),
        1 => (index(), select(&["aardvark", "scale", "softmax_scale", "zebra"])).prop_map(|(a, n)| Mutation::Rename(a, n)),
    ]
}

#[test]
fn damaged_calls_are_refused_alike_or_run_within_their_memory() {
    let seeds: Vec<&'static Case> = cases().filter(|c| c.memory.is_none()).collect();
    let right: Vec<&'static Case> = seeds.iter().copied().filter(|c| c.refusal.is_none()).collect();
    let (decoding, refused, not_run, ran) = (Cell::new(0), Cell::new(0), Cell::new(0), Cell::new(0));
    let damaged = (any::<(Index, bool)>(), vec(mutations(), 0..4), any::<u64>());
    for_all(20_000, damaged, |((seed, of_all), changes, contents)| {
        let case = *seed.get(if of_all { &seeds } else { &right });
        let mut plan = Plan::new(case);
        for change in changes {
            change.damage(&mut plan);
        }
        let count = match try_call(&plan, &case.aliases, contents) {
            Outcome::NotDecoded => &decoding,
            Outcome::Refused => &refused,
            Outcome::NotRun => &not_run,
            Outcome::Ran => &ran,
        };
        count.set(count.get() + 1);
    });
    let (decoding, refused, not_run, ran) = (decoding.get(), refused.get(), not_run.get(), ran.get());
    println!("{decoding} not decoded, {refused} refused, {not_run} accepted but not run, {ran} ran");
    let all = decoding + refused + not_run + ran;
    assert!([decoding, refused, ran].into_iter().all(|n| n > all / 20), "one kind of call is hardly tried");
}
