//! Small calls for gradients as odd as the operator allows.

use crate::support::array::{ATTENTION_DTYPES, F32};
use crate::support::batch::{Alibi, Dtypes, Scaled, Shape};
use crate::support::gradient_case::{GradientCase, Wanted};
use crate::support::oracle::Mask;
use crate::support::pairwise::{Choice, cover};
use crate::support::storage::{Hints, Layout, Storage};
use crate::support::strategies::flash_calls;
use proptest::prelude::*;

/// A call's shape, how it lies, and what is asked for.
pub(crate) type AnyCall = (Shape, Storage, Wanted);

/// Whatever `flash_attn_varlen` can be asked for that has gradients.
pub(crate) fn gradient_calls() -> impl Strategy<Value = AnyCall> {
    let wanted = any::<[bool; 3]>();
    (flash_calls(), 8..=256usize, 0..3usize, wanted).prop_map(|((shape, storage), dv, dtype, wanted)| {
        // Wide values in small numbers: the reference is slow.
        let value_dim = Some((dv / shape.heads.0.div_ceil(4)).next_multiple_of(8));
        let dtypes = ATTENTION_DTYPES[dtype].into();
        let shape = Shape { dtypes, value_dim, scales: [Scaled::No; 3], batch_invariant: false, ..shape };
        let [dlse, dsinks, deterministic] = wanted;
        let storage = Storage { layout: Layout::Contiguous, ..storage };
        (shape, storage, Wanted { dlse, dsinks, deterministic })
    })
}

/// The same in f32, so that the order of sums is all that may differ between two sides of a law.
pub(crate) fn f32_calls() -> impl Strategy<Value = (Shape, Storage)> {
    gradient_calls().prop_map(|(shape, storage, _)| (Shape { dtypes: F32.into(), sharpness: 1.0, ..shape }, storage))
}

/// A call over contiguous keys that asks for everything.
pub(crate) fn case(shape: &Shape, storage: &Storage) -> GradientCase {
    GradientCase::store(&shape.batch(), storage, Wanted::ALL)
}

const HEAD_DIMS: [usize; 8] = [8, 40, 64, 96, 128, 136, 192, 256];

/// Dv for a D.
const VALUE_DIMS: [fn(usize) -> usize; 3] = [|d| d, |d| (d / 2).next_multiple_of(8), |d| (d + 56).min(256)];

const HEADS: [(usize, usize); 6] = [(1, 1), (3, 3), (4, 2), (3, 1), (5, 1), (16, 1)];

const MASKS: [Mask; 6] = [
    Mask::FULL,
    Mask::CAUSAL,
    Mask::window(20, -1),
    Mask::window(-1, 9),
    Mask::window(7, 3),
    Mask { window_left: 24, ..Mask::CAUSAL },
];

const WORKSPACES: [Option<usize>; 5] = [None, Some(0), Some(41), Some(200_000), Some(9_000_001)];

/// Decode, prefill, both, more than one block of keys or of queries, and lengths that nobody expects.
const WORK: [&[(usize, usize)]; 5] = [
    &[(1, 37), (1, 64), (1, 5), (1, 90)],
    &[(40, 40), (23, 23)],
    &[(1, 70), (18, 50), (1, 3), (7, 7)],
    &[(3, 420), (140, 20)],
    &[(0, 9), (20, 6), (3, 0), (1, 1), (9, 33)],
];

/// The factors of the set, by their place in a row.
#[derive(Clone, Copy)]
enum Factor {
    Dtype,
    HeadDim,
    ValueDim,
    Heads,
    Mask,
    TopLeft,
    Softcap,
    Alibi,
    Sinks,
    Leftpad,
    SequsedQ,
    SequsedK,
    Work,
    Hints,
    Workspace,
    Dlse,
    Dsinks,
    Deterministic,
}

const ALIBI: [Alibi; 3] = [Alibi::Off, Alibi::PerHead, Alibi::PerSequence];
const HINTS: [Hints; 4] = [Hints::Unknown, Hints::RoundedUp, Hints::TooSmall, Hints::Huge];

/// How many values each factor has. Of a pair of yes and no, 1 is yes.
const SIZES: [usize; 18] = [
    ATTENTION_DTYPES.len(),
    HEAD_DIMS.len(),
    VALUE_DIMS.len(),
    HEADS.len(),
    MASKS.len(),
    2,
    2,
    ALIBI.len(),
    2,
    2,
    2,
    2,
    WORK.len(),
    HINTS.len(),
    WORKSPACES.len(),
    2,
    2,
    2,
];

/// Calls in which every pair of options occurs.
pub(crate) fn pairs_of_options() -> Vec<AnyCall> {
    let everything = |_: Choice, _: Choice| false;
    let rows = cover(&SIZES, &everything, 30);
    rows.iter().enumerate().map(|(seed, row)| call(row, seed as u64)).collect()
}

fn call(row: &[usize], seed: u64) -> AnyCall {
    let value = |factor: Factor| row[factor as usize];
    let yes = |factor: Factor| value(factor) == 1;
    let head_dim = HEAD_DIMS[value(Factor::HeadDim)];
    let shape = Shape {
        dtypes: Dtypes::same(ATTENTION_DTYPES[value(Factor::Dtype)]),
        heads: HEADS[value(Factor::Heads)],
        head_dim,
        value_dim: Some(VALUE_DIMS[value(Factor::ValueDim)](head_dim)),
        lengths: WORK[value(Factor::Work)].to_vec(),
        leftpad: yes(Factor::Leftpad),
        mask: Mask { top_left: yes(Factor::TopLeft), ..MASKS[value(Factor::Mask)] },
        softcap: if yes(Factor::Softcap) { 2.5 } else { 0.0 },
        alibi: ALIBI[value(Factor::Alibi)],
        sinks: yes(Factor::Sinks),
        seed,
        ..Shape::default()
    };
    let storage = Storage {
        seqused_q: yes(Factor::SequsedQ),
        seqused_k: yes(Factor::SequsedK),
        hints: HINTS[value(Factor::Hints)],
        workspace: WORKSPACES[value(Factor::Workspace)],
        seed,
        ..Storage::contiguous()
    };
    let wanted =
        Wanted { dlse: yes(Factor::Dlse), dsinks: yes(Factor::Dsinks), deterministic: yes(Factor::Deterministic) };
    (shape, storage, wanted)
}
