//! Sets of small attention calls in which every pair of option values occurs.

use super::{
    Alibi, BF16, BatchSpec, Choice, Dtype, Dtypes, F16, F32, GradientOptions, KeyBounds, KvLayout, Mask,
    MaxSeqlenHints, MemoryLayout, Pair, ScaleKind, cover, pairs,
};
use xla_attention::Op;

/// (`len_q`, `len_k`) of the sequences of a batch.
type Lengths = &'static [(usize, usize)];

/// Declares the options, each with the value that it has where a set does not vary it.
macro_rules! options {
    ($($(#[$doc:meta])* $name:ident: $type:ty = $value:expr,)*) => {
        /// The values that the calls of a set choose from, per option.
        #[derive(Clone, Copy)]
        pub struct PairwiseOptions {
            $($(#[$doc])* pub $name: &'static [$type],)*
            /// Seed of the covering array.
            pub seed: u64,
        }

        /// Indices of the options in a row of choices.
        #[allow(non_camel_case_types, reason = "they are those of `Options`")]
        #[derive(Clone, Copy)]
        enum Factor { $($name,)* }

        /// The options whose value is chosen.
        struct Chosen { $($name: Option<$type>,)* }

        impl PairwiseOptions {
            /// One call over contiguous keys without any option.
            pub const PLAIN: Self = Self { $($name: &[$value],)* seed: 1 };

            /// Number of values per option.
            pub fn sizes(&self) -> Vec<usize> {
                vec![$(self.$name.len(),)*]
            }

            fn chosen(&self, choices: &[Choice]) -> Chosen {
                let of = |factor: Factor| choices.iter().find(|choice| choice.0 == factor as usize);
                Chosen { $($name: of(Factor::$name).map(|choice| self.$name[choice.1]),)* }
            }
        }
    };
}

options! {
    target: Op = Op::FlashAttnVarlen,
    dtypes: Dtypes = Dtypes::same(F32),
    /// (D, Dv).
    head_dims: (usize, usize) = (64, 64),
    /// Computes Dv from that of `head_dims`.
    value_dim: fn(usize) -> usize = |d| d,
    heads: (usize, usize) = (4, 2),
    work: Lengths = &[(1, 17), (5, 5)],
    mask: Mask = Mask::FULL,
    alibi: Alibi = Alibi::Off,
    scales: [ScaleKind; 3] = [ScaleKind::None; 3],
    layout: KvLayout = KvLayout::Contiguous,
    /// 0 stands for contiguous keys.
    page_size: usize = 0,
    workspace: Option<usize> = Some(1000),
    hints: MaxSeqlenHints = MaxSeqlenHints::Unknown,
    top_left: bool = false,
    leftpad: bool = false,
    q_offset: bool = false,
    key_bounds: KeyBounds = KeyBounds::None,
    softcap: f32 = 0.0,
    sinks: bool = false,
    seqused_q: bool = false,
    seqused_k: bool = false,
    lse: bool = true,
    batch_invariant: bool = false,
    dlse: bool = true,
    dsinks: bool = true,
    deterministic: bool = true,
    gradients: Option<Dtype> = None,
}

pub const YES_OR_NO: &[bool] = &[false, true];

pub const SOFTCAP: &[f32] = &[0.0, 2.5];

pub const ALIBI: &[Alibi] = &[Alibi::Off, Alibi::PerHead, Alibi::PerSequence];

const HINTS: &[MaxSeqlenHints] =
    &[MaxSeqlenHints::Unknown, MaxSeqlenHints::RoundedUp, MaxSeqlenHints::TooSmall, MaxSeqlenHints::Huge];

const VALUE_DIMS: &[fn(usize) -> usize] = &[|d| d, |d| (d / 2).next_multiple_of(8), |d| (d + 56).min(256)];

const MASKS: &[Mask] = &[
    Mask::FULL,
    Mask::CAUSAL,
    Mask::window(20, -1),
    Mask::window(-1, 9),
    Mask::window(7, 3),
    Mask { window_left: 24, ..Mask::CAUSAL },
];

/// Lengths that are valid and unusual.
const ODD: Lengths = &[(0, 9), (20, 6), (3, 0), (1, 1), (9, 33)];

impl PairwiseOptions {
    /// `flash_attn_varlen` and `paged_attention`: decode, prefill, both, and a context that is long enough for
    /// split-KV.
    pub const ATTENTION: Self = Self {
        target: &[Op::FlashAttnVarlen, Op::PagedAttention],
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
        value_dim: VALUE_DIMS,
        heads: &[(1, 1), (3, 3), (4, 2), (3, 1), (8, 2), (5, 1), (16, 1)],
        work: &[
            &[(1, 37), (1, 64), (1, 5), (1, 90)],
            &[(40, 40), (23, 23)],
            &[(1, 70), (18, 50), (1, 3), (7, 7)],
            &[(1, 600), (3, 420)],
            ODD,
        ],
        mask: MASKS,
        alibi: ALIBI,
        scales: &[
            [ScaleKind::None; 3],
            [ScaleKind::PerTensor; 3],
            [ScaleKind::PerHead; 3],
            [ScaleKind::None, ScaleKind::PerTensor, ScaleKind::PerHead],
        ],
        layout: &KvLayout::ALL,
        page_size: &[0, 1, 7, 16, 32, 128],
        workspace: &[None, Some(40), Some(200_000), Some(9_000_001)],
        hints: HINTS,
        key_bounds: &KeyBounds::ALL,
        lse: YES_OR_NO,
        batch_invariant: YES_OR_NO,
        seed: 20,
        ..Self::ROWS_AND_SCORES
    };

    /// `flash_attn_varlen_bwd`: decode, prefill, both, and several blocks of keys or of queries.
    pub const GRADIENTS: Self = Self {
        target: Self::PLAIN.target,
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
        workspace: &[None, Some(0), Some(41), Some(200_000), Some(9_000_001)],
        scales: Self::PLAIN.scales,
        layout: Self::PLAIN.layout,
        page_size: Self::PLAIN.page_size,
        lse: Self::PLAIN.lse,
        batch_invariant: Self::PLAIN.batch_invariant,
        dlse: YES_OR_NO,
        dsinks: YES_OR_NO,
        deterministic: YES_OR_NO,
        gradients: &[None, Some(F32)],
        seed: 30,
        ..Self::ATTENTION
    };

    /// Options that all operators except `paged_attention` have.
    const ROWS_AND_SCORES: Self = Self {
        top_left: YES_OR_NO,
        leftpad: YES_OR_NO,
        q_offset: YES_OR_NO,
        softcap: SOFTCAP,
        sinks: YES_OR_NO,
        seqused_q: YES_OR_NO,
        seqused_k: YES_OR_NO,
        ..Self::PLAIN
    };

    /// Calls over contiguous keys with the options that affect the Hopper kernels. A caller adds lengths of several
    /// blocks.
    pub const BEYOND_BLOCKS: Self = Self { mask: &Mask::BEYOND_BLOCKS, ..Self::ROWS_AND_SCORES };

    /// Whether no call can have both values: `paged_attention` lacks some options, an offset excludes an alignment, contiguous keys have no pages, and a
    /// Dv other than D needs separate buffers.
    fn excludes(&self, a: Choice, b: Choice) -> bool {
        let of = self.chosen(&[a, b]);
        let no_pages = of.page_size.map(|size| size == 0);
        let own_width = of.head_dims.is_some_and(|(d, dv)| d != dv) || of.value_dim.is_some_and(|dv| dv(64) != 64);
        // Only `paged_attention` has an optional lse.
        let paged_attention = of.target == Some(Op::PagedAttention) || of.lse == Some(false);
        let beyond_paged_attention = of.layout.is_some_and(|layout| layout != KvLayout::Interleaved)
            || no_pages == Some(true)
            || own_width
            || of.seqused_q == Some(true)
            || of.seqused_k == Some(false)
            || of.leftpad == Some(true)
            || of.q_offset == Some(true)
            || of.mask.is_some_and(|mask| !mask.causal)
            || of.top_left == Some(true)
            || of.hints.is_some_and(|hints| hints != MaxSeqlenHints::Unknown)
            || of.target == Some(Op::FlashAttnVarlen);
        (paged_attention && beyond_paged_attention)
            || (of.top_left == Some(true) && of.q_offset == Some(true))
            || of.layout.is_some_and(|layout| no_pages.is_some_and(|none| none != (layout == KvLayout::Contiguous)))
            || (own_width && of.layout.is_some_and(|layout| !layout.has_two_buffers()))
    }

    /// The pairs that must occur.
    pub fn required_pairs(&self) -> Vec<Pair> {
        pairs(&self.sizes(), &|a, b| self.excludes(a, b))
    }

    /// The rows of the covering array.
    pub fn rows(&self) -> Vec<Vec<usize>> {
        cover(&self.sizes(), &|a, b| self.excludes(a, b), self.seed)
    }

    /// The calls of the set.
    pub fn calls(&self) -> Vec<(Op, BatchSpec, MemoryLayout, GradientOptions)> {
        self.rows().iter().enumerate().map(|(seed, row)| self.call(row, seed as u64).unwrap()).collect()
    }

    fn call(&self, row: &[usize], seed: u64) -> Option<(Op, BatchSpec, MemoryLayout, GradientOptions)> {
        let of = self.chosen(&row.iter().copied().enumerate().collect::<Vec<_>>());
        let (head_dim, value_dim) = of.head_dims?;
        // Trees, of `paged_attention` alone, are beside the covering array.
        let has_trees = of.target? == Op::PagedAttention;
        let tree = [None, Some(18), Some(40)][seed as usize % 3].filter(|_| has_trees);
        let spec = BatchSpec {
            dtypes: of.dtypes?,
            heads: of.heads?,
            head_dim,
            value_dim: Some(of.value_dim?(value_dim)),
            lengths: of.work?.to_vec(),
            leftpad: of.leftpad?,
            q_offset: of.q_offset?,
            key_bounds: of.key_bounds?,
            tree,
            mask: Mask { top_left: of.top_left?, ..of.mask? },
            softcap: of.softcap?,
            alibi: of.alibi?,
            sinks: of.sinks?,
            scales: of.scales?,
            batch_invariant: of.batch_invariant?,
            seed,
            ..BatchSpec::default()
        };
        let memory_layout = MemoryLayout {
            layout: of.layout?,
            page_size: of.page_size?,
            seqused_q: of.seqused_q?,
            seqused_k: of.seqused_k?,
            hints: of.hints?,
            lse: of.lse?,
            workspace: of.workspace?,
            seed,
            ..MemoryLayout::default()
        };
        let (deterministic, dtype) = (of.deterministic?, of.gradients?);
        let options = GradientOptions { dlse: of.dlse?, dsinks: of.dsinks?, dbias: true, deterministic, dtype };
        Some((of.target?, spec, memory_layout, options))
    }
}
