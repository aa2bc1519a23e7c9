//! Small paged attention calls as odd as the operator allows, for proptest.

use super::array::ATTENTION_DTYPES;
use super::cases::{Shape, Storage};
use proptest::collection::vec;
use proptest::prelude::*;
use proptest::sample::select;
use proptest::test_runner::{Config, RngAlgorithm, TestError, TestRng, TestRunner};

/// `(len_q, len_k)` of up to five sequences: decode, prefill, chunks, more queries than keys, no query at all.
fn lengths() -> impl Strategy<Value = Vec<(usize, usize)>> {
    let chunk = (1..40usize, 0..60usize).prop_map(|(len_q, past)| (len_q, len_q + past));
    vec(
        prop_oneof![2 => (Just(1), 1..120usize), 2 => chunk, 1 => (1..30usize, 0..20usize), 1 => (Just(0), 0..20usize)],
        0..6,
    )
}

prop_compose! {
    pub fn shapes()(
        dtype in select(&ATTENTION_DTYPES),
        heads in select(&[(1, 1), (2, 2), (4, 1), (9, 3), (8, 2), (6, 3), (16, 2)]),
        eighths in 1..=32usize,
        lengths in lengths(),
        window in prop_oneof![2 => Just(None), 1 => (1..50i64).prop_map(Some)],
        soft_cap in select(&[0.0f32, 0.0, 5.0, 50.0]),
        sharpness in select(&[1.0, 1.0, 4.0]),
        batch_invariant in any::<bool>(),
        seed in 0..1000u64,
    ) -> Shape {
        // Wide heads in small numbers: the reference is slow.
        let head_dim = 8 * if heads.0 > 4 { eighths.div_ceil(3) } else { eighths };
        Shape { dtype, heads, head_dim, lengths, window, soft_cap, sharpness, batch_invariant, seed }
    }
}

prop_compose! {
    pub fn storages()(
        page_size in select(&[1usize, 2, 5, 7, 16, 32, 64]),
        rows_around in (0..4usize, 0..4usize),
        spare_seqs in 0..3usize,
        spare_entries in 0..3usize,
        spare_pages in 0..3usize,
        seed in 0..1000u64,
    ) -> Storage {
        Storage { page_size, rows_around, spare_seqs, spare_entries, spare_pages, seed }
    }
}

/// Check `count` values (or `PROPTEST_CASES`) of a strategy, always the same ones; a failure is shrunk.
pub fn for_all<S: Strategy>(count: u32, strategy: S, check: impl Fn(S::Value)) {
    let cases = std::env::var("PROPTEST_CASES").map_or(count, |n| n.parse().unwrap());
    let config = Config { cases, failure_persistence: None, max_shrink_iters: 200, ..Config::default() };
    let mut runner = TestRunner::new_with_rng(config, TestRng::deterministic_rng(RngAlgorithm::ChaCha));
    let outcome = runner.run(&strategy, |value| {
        check(value);
        Ok(())
    });
    match outcome {
        Ok(()) => (),
        Err(TestError::Fail(reason, value)) => panic!("{reason}\nfor {value:?}"),
        Err(TestError::Abort(reason)) => panic!("{reason}"),
    }
}
