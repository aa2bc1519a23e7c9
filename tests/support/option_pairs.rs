//! Every pair of options of the attention operators, in a set of small calls.

use super::batch::{Alibi, Dtypes, Scaled, Shape};
use super::case::Target;
use super::oracle::Mask;
use super::pairwise::{Choice, Pair, cover, pairs};
use super::storage::{Hints, Layout, Storage};

const HEAD_DIMS: [usize; 10] = [8, 32, 40, 64, 96, 112, 128, 192, 200, 256];

/// Dv for a D.
const VALUE_DIMS: [fn(usize) -> usize; 3] = [|d| d, |d| (d / 2).next_multiple_of(8), |d| (d + 56).min(256)];

const HEADS: [(usize, usize); 7] = [(1, 1), (3, 3), (4, 2), (3, 1), (8, 2), (5, 1), (16, 1)];

/// 0 goes with contiguous keys.
const PAGE_SIZES: [usize; 6] = [0, 1, 7, 16, 32, 128];

const MASKS: [Mask; 6] = [
    Mask::FULL,
    Mask::CAUSAL,
    Mask::window(20, -1),
    Mask::window(-1, 9),
    Mask::window(7, 3),
    Mask { window_left: 24, ..Mask::CAUSAL },
];

const SCALES: [[Scaled; 3]; 4] =
    [[Scaled::No; 3], [Scaled::AsAWhole; 3], [Scaled::PerHead; 3], [Scaled::No, Scaled::AsAWhole, Scaled::PerHead]];

const WORKSPACES: [Option<usize>; 4] = [None, Some(40), Some(200_000), Some(9_000_001)];

/// What a batch does: decode, prefill, both, a context long enough to be split, and lengths that nobody expects.
const WORK: [&[(usize, usize)]; 5] = [
    &[(1, 37), (1, 64), (1, 5), (1, 90)],
    &[(40, 40), (23, 23)],
    &[(1, 70), (18, 50), (1, 3), (7, 7)],
    &[(1, 600), (3, 420)],
    &[(0, 9), (20, 6), (3, 0), (1, 1), (9, 33)],
];

/// The factors of the set, by their place in a row.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Factor {
    Dtypes,
    HeadDim,
    ValueDim,
    Heads,
    Target,
    Layout,
    PageSize,
    SequsedQ,
    SequsedK,
    Leftpad,
    Mask,
    TopLeft,
    Softcap,
    Alibi,
    Sinks,
    Scales,
    Lse,
    Workspace,
    Hints,
    BatchInvariant,
    Work,
}

const ALIBI: [Alibi; 3] = [Alibi::Off, Alibi::PerHead, Alibi::PerSequence];
const HINTS: [Hints; 4] = [Hints::Unknown, Hints::RoundedUp, Hints::TooSmall, Hints::Huge];
const TARGETS: [Target; 2] = [Target::FlashAttnVarlen, Target::PagedAttention];

/// How many values each factor has. Of a pair of yes and no, 1 is yes.
const SIZES: [usize; 21] = [
    Dtypes::ALL.len(),
    HEAD_DIMS.len(),
    VALUE_DIMS.len(),
    HEADS.len(),
    TARGETS.len(),
    Layout::ALL.len(),
    PAGE_SIZES.len(),
    2,
    2,
    2,
    MASKS.len(),
    2,
    2,
    ALIBI.len(),
    2,
    SCALES.len(),
    2,
    WORKSPACES.len(),
    HINTS.len(),
    2,
    WORK.len(),
];

/// What SPEC rules out: `paged_attention` has not all options, contiguous keys have no pages, and values of another
/// width need a buffer of their own.
fn excluded(a: Choice, b: Choice) -> bool {
    let value = |factor: Factor| [a, b].into_iter().find(|c| c.0 == factor as usize).map(|c| c.1);
    let contiguous = value(Factor::Layout).map(|v| Layout::ALL[v] == Layout::Contiguous);
    let no_pages = value(Factor::PageSize).map(|v| PAGE_SIZES[v] == 0);
    let two_buffers = value(Factor::Layout).map(|v| Layout::ALL[v].has_two_buffers());
    let other_width = value(Factor::ValueDim).is_some_and(|v| v != 0);
    // Only paged attention can be asked not to give the lse.
    let paged_attention = value(Factor::Target) == Some(1) || value(Factor::Lse) == Some(0);
    let beyond_paged_attention = value(Factor::Layout).is_some_and(|v| Layout::ALL[v] != Layout::Interleaved)
        || no_pages == Some(true)
        || other_width
        || value(Factor::SequsedQ) == Some(1)
        || value(Factor::SequsedK) == Some(0)
        || value(Factor::Leftpad) == Some(1)
        || value(Factor::Mask).is_some_and(|v| !MASKS[v].causal)
        || value(Factor::TopLeft) == Some(1)
        || value(Factor::Hints).is_some_and(|v| HINTS[v] != Hints::Unknown)
        || value(Factor::Target) == Some(0);
    (paged_attention && beyond_paged_attention)
        || contiguous.is_some_and(|contiguous| no_pages.is_some_and(|none| none != contiguous))
        || (other_width && two_buffers == Some(false))
}

/// The pairs that have to occur, and the rows of the set.
pub fn covered() -> (Vec<Pair>, Vec<Vec<usize>>) {
    (pairs(&SIZES, &excluded), cover(&SIZES, &excluded, 20))
}

/// The set: everything that a call needs.
pub fn calls() -> Vec<(Target, Shape, Storage)> {
    let rows = cover(&SIZES, &excluded, 20);
    rows.iter().enumerate().map(|(seed, row)| call(row, seed as u64)).collect()
}

fn call(row: &[usize], seed: u64) -> (Target, Shape, Storage) {
    let value = |factor: Factor| row[factor as usize];
    let yes = |factor: Factor| value(factor) == 1;
    let head_dim = HEAD_DIMS[value(Factor::HeadDim)];
    let shape = Shape {
        dtypes: Dtypes::ALL[value(Factor::Dtypes)],
        heads: HEADS[value(Factor::Heads)],
        head_dim,
        value_dim: Some(VALUE_DIMS[value(Factor::ValueDim)](head_dim)),
        lengths: WORK[value(Factor::Work)].to_vec(),
        leftpad: yes(Factor::Leftpad),
        mask: Mask { top_left: yes(Factor::TopLeft), ..MASKS[value(Factor::Mask)] },
        softcap: if yes(Factor::Softcap) { 2.5 } else { 0.0 },
        alibi: ALIBI[value(Factor::Alibi)],
        sinks: yes(Factor::Sinks),
        scales: SCALES[value(Factor::Scales)],
        sharpness: 1.0,
        batch_invariant: yes(Factor::BatchInvariant),
        seed,
    };
    let storage = Storage {
        layout: Layout::ALL[value(Factor::Layout)],
        page_size: PAGE_SIZES[value(Factor::PageSize)],
        seqused_q: yes(Factor::SequsedQ),
        seqused_k: yes(Factor::SequsedK),
        hints: HINTS[value(Factor::Hints)],
        lse: yes(Factor::Lse),
        workspace: WORKSPACES[value(Factor::Workspace)],
        seed,
        ..Storage::default()
    };
    (TARGETS[value(Factor::Target)], shape, storage)
}
