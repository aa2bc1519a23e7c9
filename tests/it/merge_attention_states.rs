//! `xla_gpu_merge_attention_states` through its XLA FFI handlers.

use crate::support::array::{ATTENTION_DTYPES, BF16, F16, F32};
use crate::support::guard::{Side, for_both_sides};
use crate::support::pools::for_each_pool;
use crate::support::random::Random;
use crate::support::states::{ANY_LSE, State};

/// `a` and `b` merge to what they have to.
fn check(a: &State, b: &State) {
    for_both_sides(|side| State::of(&a.merge(b).results(side)).assert_merged_from(a, b));
}

#[test]
fn two_parts_are_weighted_by_their_sums() {
    for dtype in ATTENTION_DTYPES {
        for d in [1, 2, 3, 4, 7, 8, 20, 64, 128, 200, 256, 576, 1031] {
            let part = |seed| State::random(dtype, (5, 3, d), &[0.0, 1.0, 5.0, 60.0, 1000.0], seed);
            check(&part(1), &part(2));
        }
    }
}

#[test]
fn a_part_without_keys_is_not_looked_at() {
    let kinds = [0.5, f64::NEG_INFINITY, f64::INFINITY, f64::NAN];
    let (n, h, d) = (kinds.len(), kinds.len(), 24);
    let across: Vec<f64> = (0..n * h).map(|i| kinds[i % n]).collect();
    let down: Vec<f64> = (0..n * h).map(|i| kinds[i / n]).collect();
    let garbage = |lse: &[f64], seed| {
        let mut random = Random::new(seed);
        // out [n, h, d], lse [h, n]
        let out = (0..n * h * d).map(|i| match lse[i / d % h * n + i / d / h] {
            0.5 => random.normal(),
            _ => random.one_of(&[f64::NAN, f64::INFINITY, f64::NEG_INFINITY]),
        });
        out.collect::<Vec<_>>()
    };
    for dtype in ATTENTION_DTYPES {
        let a = State::new(dtype, (n, h, d), &garbage(&across, 3), &across);
        let b = State::new(dtype, (n, h, d), &garbage(&down, 4), &down);
        check(&a, &b);
    }
}

#[test]
fn the_largest_sums_neither_overflow_nor_lose_the_smaller_part() {
    let sums = [f64::from(f32::MAX), f64::from(f32::MIN), 1e5, 1e5 + 0.5, -1e5, -1e5 - 3.0, 89.0, -104.0, 1e-40];
    let (n, d) = (sums.len(), 8);
    let lse_a: Vec<f64> = (0..n * n).map(|i| sums[i % n]).collect();
    let lse_b: Vec<f64> = (0..n * n).map(|i| sums[i / n]).collect();
    for dtype in ATTENTION_DTYPES {
        let out = |size: f64| vec![if dtype == F16 { size * 6e4 } else { size * 3e38 }; n * n * d];
        for (of_a, of_b) in [(1.0, 1.0), (1.0, -1.0), (1.0, 1e-3)] {
            let a = State::new(dtype, (n, n, d), &out(of_a), &lse_a);
            let b = State::new(dtype, (n, n, d), &out(of_b), &lse_b);
            check(&a, &b);
        }
    }
}

/// Softmax attention of one query over scores and values `[m][d]`, as somebody would write it.
fn attend(scores: &[f64], values: &[Vec<f64>], d: usize) -> (Vec<f64>, f64) {
    let sum: f64 = scores.iter().map(|s| s.exp()).sum();
    let column = |i: usize| scores.iter().zip(values).map(|(s, v)| s.exp() * v[i]).sum::<f64>();
    ((0..d).map(|i| if sum > 0.0 { column(i) / sum } else { f64::NAN }).collect(), sum.ln())
}

#[test]
fn keys_that_are_split_anywhere_and_merged_are_the_keys() {
    let (rows, keys, d) = (6, 13, 16);
    let mut random = Random::new(5);
    let scores: Vec<Vec<f64>> = (0..rows).map(|_| (0..keys).map(|_| 4.0 * random.normal()).collect()).collect();
    let values: Vec<Vec<f64>> = (0..keys).map(|_| (0..d).map(|_| random.normal()).collect()).collect();
    let state = |range: std::ops::Range<usize>| {
        let each = scores.iter().map(|scores| attend(&scores[range.clone()], &values[range.clone()], d));
        let (out, lse): (Vec<Vec<f64>>, Vec<f64>) = each.unzip();
        State::new(F32, (rows, 1, d), &out.concat(), &lse)
    };
    let whole = state(0..keys);
    let assert_whole = |found: &State| {
        let close = |a: &[f64], b: &[f64]| a.iter().zip(b).all(|(a, b)| (a - b).abs() <= 2e-6 * b.abs().max(1.0));
        assert!(close(&found.out.values(), &whole.out.values()) && close(&found.lse.values(), &whole.lse.values()));
    };
    let merged = |a: &State, b: &State| State::of(&a.merge(b).results(Side::EndsAtGuard));
    for first in 0..=keys {
        for second in first..=keys {
            let [a, b, c] = [state(0..first), state(first..second), state(second..keys)];
            assert_whole(&merged(&merged(&a, &b), &c));
            assert_whole(&merged(&a, &merged(&b, &c)));
            assert_whole(&merged(&merged(&c, &a), &b));
        }
    }
}

#[test]
fn every_pool_merges_the_same() {
    let [a, b] = [1, 2].map(|seed| State::random(BF16, (300, 8, 128), &ANY_LSE, seed));
    let expected = a.merge(&b).results(Side::EndsAtGuard);
    for_each_pool(|pool| assert!(a.merge(&b).run(Side::BeginsAtGuard, pool).unwrap() == expected));
}
