//! Small attention calls as odd as the operators allow, for proptest.

use super::batch::{Alibi, Dtypes, Scaled, Shape};
use super::oracle::Mask;
use super::storage::{Hints, Layout, Storage};
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

fn dtypes() -> impl Strategy<Value = Dtypes> {
    select(&Dtypes::ALL)
}

fn alibi() -> impl Strategy<Value = Alibi> {
    select(&[Alibi::Off, Alibi::Off, Alibi::PerHead, Alibi::PerSequence])
}

fn scaled() -> impl Strategy<Value = Scaled> {
    select(&[Scaled::No, Scaled::No, Scaled::AsAWhole, Scaled::PerHead])
}

fn sliding() -> impl Strategy<Value = Mask> {
    prop_oneof![2 => Just(Mask::CAUSAL), 1 => (1..50i64).prop_map(Mask::sliding)]
}

fn window() -> impl Strategy<Value = i64> {
    prop_oneof![2 => Just(-1), 3 => 0..50i64, 1 => select(&[i64::MAX, 1 << 31, 1 << 32])]
}

fn mask() -> impl Strategy<Value = Mask> {
    let any = (any::<bool>(), window(), window(), any::<bool>())
        .prop_map(|(causal, window_left, window_right, top_left)| Mask { causal, window_left, window_right, top_left });
    prop_oneof![1 => Just(Mask::FULL), 1 => Just(Mask::CAUSAL), 3 => any]
}

prop_compose! {
    /// What both operators can be asked for, but for the mask.
    fn shapes()(
        dtypes in dtypes(),
        heads in select(&[(1, 1), (2, 2), (4, 1), (9, 3), (8, 2), (6, 3), (16, 2)]),
        eighths in 1..=32usize,
        lengths in lengths(),
        softcap in select(&[0.0f32, 0.0, 5.0, 50.0]),
        alibi in alibi(),
        sinks in any::<bool>(),
        scales in [scaled(), scaled(), scaled()],
        sharpness in select(&[1.0, 1.0, 4.0]),
        batch_invariant in any::<bool>(),
        seed in 0..1000u64,
    ) -> Shape {
        // Wide heads in small numbers: the reference is slow.
        let head_dim = 8 * if heads.0 > 4 { eighths.div_ceil(3) } else { eighths };
        Shape {
            dtypes, heads, head_dim, lengths, softcap, alibi, sinks, scales, sharpness, batch_invariant, seed,
            ..Shape::default()
        }
    }
}

prop_compose! {
    pub fn paged_calls()(shape in shapes(), mask in sliding(), storage in paged_storages()) -> (Shape, Storage) {
        (Shape { mask, ..shape }, storage)
    }
}

prop_compose! {
    fn paged_storages()(
        page_size in select(&[1usize, 2, 5, 7, 16, 32, 64]),
        rows_around in (0..4usize, 0..4usize),
        spare_seqs in 0..3usize,
        spare_entries in 0..3usize,
        spare_pages in 0..3usize,
        workspace in select(&[None, Some(0), Some(1000), Some(300_000)]),
        seed in 0..1000u64,
    ) -> Storage {
        Storage {
            page_size, rows_around, spare_seqs, spare_entries, spare_pages, workspace, seed,
            ..Storage::default()
        }
    }
}

prop_compose! {
    /// Everything that `flash_attn_varlen` can be asked for; a value width of its own only where values have a buffer.
    pub fn flash_calls()(
        shape in shapes(),
        mask in mask(),
        leftpad in any::<bool>(),
        value_eighths in 1..=32usize,
        storage in paged_storages(),
        layout in select(&[Layout::Contiguous, Layout::Contiguous, Layout::Split, Layout::Interleaved, Layout::Stacked,
            Layout::PerPage]),
        (seqused_q, seqused_k) in any::<(bool, bool)>(),
        hints in select(&[Hints::Unknown, Hints::RoundedUp, Hints::TooSmall, Hints::Huge]),
    ) -> (Shape, Storage) {
        let value_dim = layout.has_two_buffers().then_some(8 * value_eighths.div_ceil(shape.heads.0.div_ceil(4)));
        (Shape { value_dim, leftpad, mask, ..shape }, Storage { layout, seqused_q, seqused_k, hints, ..storage })
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
