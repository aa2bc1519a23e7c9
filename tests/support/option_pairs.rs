//! Sets of small calls in which every pair of some options of the attention operators occurs.

use super::array::{BF16, F16, F32};
use super::batch::{Alibi, Dtypes, Scaled, Shape};
use super::case::Target;
use super::gradient_case::Wanted;
use super::oracle::Mask;
use super::pairwise::{Choice, Pair, cover, pairs};
use super::storage::{Hints, Layout, Storage};

/// (`len_q`, `len_k`) of the sequences of a batch.
type Lengths = &'static [(usize, usize)];

/// A set: what its calls choose from. An option that plays no part has one value.
#[derive(Clone, Copy)]
pub struct Options {
    pub targets: &'static [Target],
    pub dtypes: &'static [Dtypes],
    /// (D, Dv)
    pub head_dims: &'static [(usize, usize)],
    /// Dv for that of `head_dims`; all but the first differ from it.
    pub value_dims: &'static [fn(usize) -> usize],
    pub heads: &'static [(usize, usize)],
    pub work: &'static [Lengths],
    pub masks: &'static [Mask],
    pub alibi: &'static [Alibi],
    pub scales: &'static [[Scaled; 3]],
    pub layouts: &'static [Layout],
    /// 0 goes with contiguous keys.
    pub page_sizes: &'static [usize],
    pub workspaces: &'static [Option<usize>],
    pub hints: &'static [Hints],
    pub top_left: &'static [bool],
    pub leftpad: &'static [bool],
    pub softcap: &'static [bool],
    pub sinks: &'static [bool],
    pub seqused_q: &'static [bool],
    pub seqused_k: &'static [bool],
    pub lse: &'static [bool],
    pub batch_invariant: &'static [bool],
    pub dlse: &'static [bool],
    pub dsinks: &'static [bool],
    pub deterministic: &'static [bool],
    /// Decides which set it is.
    pub seed: u64,
}

/// The options by their place in a row of choices.
#[derive(Clone, Copy)]
enum Factor {
    Target,
    Dtypes,
    HeadDim,
    ValueDim,
    Heads,
    Work,
    Mask,
    Alibi,
    Scales,
    Layout,
    PageSize,
    Workspace,
    Hints,
    TopLeft,
    Leftpad,
    Softcap,
    Sinks,
    SequsedQ,
    SequsedK,
    Lse,
    BatchInvariant,
    Dlse,
    Dsinks,
    Deterministic,
}

pub const YES_OR_NO: &[bool] = &[false, true];

pub const ALIBI: &[Alibi] = &[Alibi::Off, Alibi::PerHead, Alibi::PerSequence];

const HINTS: &[Hints] = &[Hints::Unknown, Hints::RoundedUp, Hints::TooSmall, Hints::Huge];

const VALUE_DIMS: &[fn(usize) -> usize] = &[|d| d, |d| (d / 2).next_multiple_of(8), |d| (d + 56).min(256)];

const MASKS: &[Mask] = &[
    Mask::FULL,
    Mask::CAUSAL,
    Mask::window(20, -1),
    Mask::window(-1, 9),
    Mask::window(7, 3),
    Mask { window_left: 24, ..Mask::CAUSAL },
];

/// Lengths that no program should send.
const ODD: Lengths = &[(0, 9), (20, 6), (3, 0), (1, 1), (9, 33)];

impl Options {
    /// One call over contiguous keys, without an option.
    pub const PLAIN: Self = Self {
        targets: &[Target::FlashAttnVarlen],
        dtypes: &[Dtypes::same(F32)],
        head_dims: &[(64, 64)],
        value_dims: &[|d| d],
        heads: &[(4, 2)],
        work: &[&[(1, 17), (5, 5)]],
        masks: &[Mask::FULL],
        alibi: &[Alibi::Off],
        scales: &[[Scaled::No; 3]],
        layouts: &[Layout::Contiguous],
        page_sizes: &[0],
        workspaces: &[Some(1000)],
        hints: &[Hints::Unknown],
        top_left: &[false],
        leftpad: &[false],
        softcap: &[false],
        sinks: &[false],
        seqused_q: &[false],
        seqused_k: &[false],
        lse: &[true],
        batch_invariant: &[false],
        dlse: &[true],
        dsinks: &[true],
        deterministic: &[true],
        seed: 1,
    };

    /// Of `flash_attn_varlen` and `paged_attention`: decode, prefill, both, and a context long enough to be split.
    pub const ATTENTION: Self = Self {
        targets: &[Target::FlashAttnVarlen, Target::PagedAttention],
        dtypes: &Dtypes::ALL,
        head_dims: &[
            (8, 8),
            (32, 32),
            (40, 40),
            (64, 64),
            (96, 96),
            (112, 112),
            (128, 128),
            (192, 192),
            (200, 200),
            (256, 256),
        ],
        value_dims: VALUE_DIMS,
        heads: &[(1, 1), (3, 3), (4, 2), (3, 1), (8, 2), (5, 1), (16, 1)],
        work: &[
            &[(1, 37), (1, 64), (1, 5), (1, 90)],
            &[(40, 40), (23, 23)],
            &[(1, 70), (18, 50), (1, 3), (7, 7)],
            &[(1, 600), (3, 420)],
            ODD,
        ],
        masks: MASKS,
        alibi: ALIBI,
        scales: &[
            [Scaled::No; 3],
            [Scaled::AsAWhole; 3],
            [Scaled::PerHead; 3],
            [Scaled::No, Scaled::AsAWhole, Scaled::PerHead],
        ],
        layouts: &Layout::ALL,
        page_sizes: &[0, 1, 7, 16, 32, 128],
        workspaces: &[None, Some(40), Some(200_000), Some(9_000_001)],
        hints: HINTS,
        top_left: YES_OR_NO,
        leftpad: YES_OR_NO,
        softcap: YES_OR_NO,
        sinks: YES_OR_NO,
        seqused_q: YES_OR_NO,
        seqused_k: YES_OR_NO,
        lse: YES_OR_NO,
        batch_invariant: YES_OR_NO,
        seed: 20,
        ..Self::PLAIN
    };

    /// Of `flash_attn_varlen_bwd`: decode, prefill, both, more than one block of keys or of queries.
    pub const GRADIENTS: Self = Self {
        dtypes: &[Dtypes::same(F32), Dtypes::same(F16), Dtypes::same(BF16)],
        head_dims: &[(8, 8), (40, 40), (64, 64), (96, 96), (128, 128), (136, 136), (192, 192), (256, 256)],
        heads: &[(1, 1), (3, 3), (4, 2), (3, 1), (5, 1), (16, 1)],
        work: &[
            &[(1, 37), (1, 64), (1, 5), (1, 90)],
            &[(40, 40), (23, 23)],
            &[(1, 70), (18, 50), (1, 3), (7, 7)],
            &[(3, 420), (140, 20)],
            ODD,
        ],
        workspaces: &[None, Some(0), Some(41), Some(200_000), Some(9_000_001)],
        value_dims: VALUE_DIMS,
        masks: MASKS,
        alibi: ALIBI,
        hints: HINTS,
        top_left: YES_OR_NO,
        leftpad: YES_OR_NO,
        softcap: YES_OR_NO,
        sinks: YES_OR_NO,
        seqused_q: YES_OR_NO,
        seqused_k: YES_OR_NO,
        dlse: YES_OR_NO,
        dsinks: YES_OR_NO,
        deterministic: YES_OR_NO,
        seed: 30,
        ..Self::PLAIN
    };

    /// How many values each option has.
    pub fn sizes(&self) -> [usize; 24] {
        [
            self.targets.len(),
            self.dtypes.len(),
            self.head_dims.len(),
            self.value_dims.len(),
            self.heads.len(),
            self.work.len(),
            self.masks.len(),
            self.alibi.len(),
            self.scales.len(),
            self.layouts.len(),
            self.page_sizes.len(),
            self.workspaces.len(),
            self.hints.len(),
            self.top_left.len(),
            self.leftpad.len(),
            self.softcap.len(),
            self.sinks.len(),
            self.seqused_q.len(),
            self.seqused_k.len(),
            self.lse.len(),
            self.batch_invariant.len(),
            self.dlse.len(),
            self.dsinks.len(),
            self.deterministic.len(),
        ]
    }

    /// What SPEC rules out: `paged_attention` has not all options, contiguous keys have no pages, and values of another
    /// width need a buffer of their own.
    fn excludes(&self, a: Choice, b: Choice) -> bool {
        fn of<T: Copy>([a, b]: [Choice; 2], factor: Factor, values: &[T]) -> Option<T> {
            [a, b].into_iter().find(|choice| choice.0 == factor as usize).map(|choice| values[choice.1])
        }
        let both = [a, b];
        let layout = of(both, Factor::Layout, self.layouts);
        let no_pages = of(both, Factor::PageSize, self.page_sizes).map(|size| size == 0);
        let target = of(both, Factor::Target, self.targets);
        let own_width = of(both, Factor::HeadDim, self.head_dims).is_some_and(|(d, dv)| d != dv);
        let own_width = own_width || [a, b].iter().any(|choice| choice.0 == Factor::ValueDim as usize && choice.1 != 0);
        // Only paged attention can be asked not to give the lse.
        let paged_attention = target == Some(Target::PagedAttention) || of(both, Factor::Lse, self.lse) == Some(false);
        let beyond_paged_attention = layout.is_some_and(|layout| layout != Layout::Interleaved)
            || no_pages == Some(true)
            || own_width
            || of(both, Factor::SequsedQ, self.seqused_q) == Some(true)
            || of(both, Factor::SequsedK, self.seqused_k) == Some(false)
            || of(both, Factor::Leftpad, self.leftpad) == Some(true)
            || of(both, Factor::Mask, self.masks).is_some_and(|mask| !mask.causal)
            || of(both, Factor::TopLeft, self.top_left) == Some(true)
            || of(both, Factor::Hints, self.hints).is_some_and(|hints| hints != Hints::Unknown)
            || target == Some(Target::FlashAttnVarlen);
        (paged_attention && beyond_paged_attention)
            || layout.is_some_and(|layout| no_pages.is_some_and(|none| none != (layout == Layout::Contiguous)))
            || (own_width && layout.is_some_and(|layout| !layout.has_two_buffers()))
    }

    /// The pairs that have to occur, and the rows of the set.
    pub fn covered(&self) -> (Vec<Pair>, Vec<Vec<usize>>) {
        let excluded = |a: Choice, b: Choice| self.excludes(a, b);
        (pairs(&self.sizes(), &excluded), cover(&self.sizes(), &excluded, self.seed))
    }

    /// The set: everything that a call needs.
    pub fn calls(&self) -> Vec<(Target, Shape, Storage, Wanted)> {
        let (_, rows) = self.covered();
        rows.iter().enumerate().map(|(seed, row)| self.call(row, seed as u64)).collect()
    }

    fn call(&self, row: &[usize], seed: u64) -> (Target, Shape, Storage, Wanted) {
        let value = |factor: Factor| row[factor as usize];
        let yes = |factor: Factor, of: &[bool]| of[value(factor)];
        let (head_dim, value_dim) = self.head_dims[value(Factor::HeadDim)];
        let top_left = yes(Factor::TopLeft, self.top_left);
        let shape = Shape {
            dtypes: self.dtypes[value(Factor::Dtypes)],
            heads: self.heads[value(Factor::Heads)],
            head_dim,
            value_dim: Some(self.value_dims[value(Factor::ValueDim)](value_dim)),
            lengths: self.work[value(Factor::Work)].to_vec(),
            leftpad: yes(Factor::Leftpad, self.leftpad),
            mask: Mask { top_left, ..self.masks[value(Factor::Mask)] },
            softcap: if yes(Factor::Softcap, self.softcap) { 2.5 } else { 0.0 },
            alibi: self.alibi[value(Factor::Alibi)],
            sinks: yes(Factor::Sinks, self.sinks),
            scales: self.scales[value(Factor::Scales)],
            batch_invariant: yes(Factor::BatchInvariant, self.batch_invariant),
            seed,
            ..Shape::default()
        };
        let storage = Storage {
            layout: self.layouts[value(Factor::Layout)],
            page_size: self.page_sizes[value(Factor::PageSize)],
            seqused_q: yes(Factor::SequsedQ, self.seqused_q),
            seqused_k: yes(Factor::SequsedK, self.seqused_k),
            hints: self.hints[value(Factor::Hints)],
            lse: yes(Factor::Lse, self.lse),
            workspace: self.workspaces[value(Factor::Workspace)],
            seed,
            ..Storage::default()
        };
        let wanted = Wanted {
            dlse: yes(Factor::Dlse, self.dlse),
            dsinks: yes(Factor::Dsinks, self.dsinks),
            deterministic: yes(Factor::Deterministic, self.deterministic),
        };
        (self.targets[value(Factor::Target)], shape, storage, wanted)
    }
}
