//! `xla_gpu_merge_attention_states` through its XLA FFI handlers.

use crate::support::{ANY_LSE, ATTENTION_DTYPES, BF16, F16, Random, Side, State, for_each_pool, for_each_side};

/// Asserts that `a` and `b` merge to the expected state.
fn check(a: &State, b: &State) {
    for_each_side(|side| State::of(&a.merge(b).results(side)).assert_merged_from(a, b));
}

#[test]
fn two_states_are_weighted_by_their_sums() {
    for dtype in ATTENTION_DTYPES {
        for d in [1, 2, 3, 4, 7, 8, 20, 64, 128, 200, 256, 576, 1031] {
            let part = |seed| State::random(dtype, (5, 3, d), &[0.0, 1.0, 5.0, 60.0, 1000.0], seed);
            check(&part(1), &part(2));
        }
    }
}

#[test]
fn a_state_without_keys_is_ignored() {
    let kinds = [0.5, f64::NEG_INFINITY, f64::INFINITY, f64::NAN];
    let (n, h, d) = (kinds.len(), kinds.len(), 24);
    let across: Vec<f64> = (0..n * h).map(|i| kinds[i % n]).collect();
    let down: Vec<f64> = (0..n * h).map(|i| kinds[i / n]).collect();
    let garbage = |lse: &[f64], seed| {
        let mut random = Random::new(seed);
        // out is [n, h, d], lse is [h, n].
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
fn the_largest_sums_neither_overflow_nor_lose_the_smaller_state() {
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

#[test]
fn every_pool_gives_the_same_state() {
    let [a, b] = [1, 2].map(|seed| State::random(BF16, (300, 8, 128), &ANY_LSE, seed));
    let expected = a.merge(&b).results(Side::EndsAtGuard);
    for_each_pool(|pool| assert!(a.merge(&b).run(Side::BeginsAtGuard, pool).unwrap() == expected));
}
