//! Tests that the operators of attention share. A test is a function of the operator, and the operators' modules
//! (`flash_attn_varlen` and the others) list the tests that apply to them.

pub(crate) mod agreement;
pub(crate) mod batch_invariance;
pub(crate) mod interface;
pub(crate) mod metadata;
pub(crate) mod metamorphic;
pub(crate) mod nan_isolation;
pub(crate) mod results;

use crate::support::{
    ATTENTION_DTYPES, AttentionCase, Batch, BatchSpec, Dtypes, GradientCase, GradientOptions, KvLayout, Mask,
    MemoryLayout, PagedUpdateCase, Random, ReferenceCase, ScaleKind, clamped_sequences, flash_call, for_all,
    named_flash_batches, named_paged_batches, paged_call,
};

/// Declares tests of an operator that call the functions of these modules, and those that every operator has.
macro_rules! tests_of {
    ($operator:ident: $($parts:tt)*) => {
        $crate::attention::parts_of! { $operator: $($parts)* }

        mod as_every_operator {
            $crate::attention::parts_of! { $operator:
                agreement {
                    every_head_dimension_agrees_with_the_reference_in_every_type,
                    any_call_agrees_with_the_reference,
                }
                interface { sizes_of_zero_are_valid, every_pool_gives_the_same_bits }
                metadata {
                    hostile_starts_cost_no_more_than_valid_ones,
                    #[ignore = "a measurement: wants a machine for itself"]
                    hostile_starts_cost_at_most_twice_as_much,
                }
            }
        }
    };
}

macro_rules! parts_of {
    ($operator:ident: $($part:ident { $($(#[$attribute:meta])* $test:ident),* $(,)? })*) => {
        $(mod $part {
            $(#[test]
            $(#[$attribute])*
            fn $test() {
                crate::attention::$part::$test(crate::attention::Operator::$operator);
            })*
        })*
    };
}
pub(crate) use {parts_of, tests_of};

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Operator {
    FlashAttnVarlen,
    FlashAttnVarlenBwd,
    PagedAttention,
    PagedAttentionUpdate,
}

use Operator::{FlashAttnVarlen, FlashAttnVarlenBwd, PagedAttention, PagedAttentionUpdate};
use std::ops::{Deref, DerefMut};
use xla_attention::Op;

impl Operator {
    /// Whether its keys lie in pages of one layout and its mask is causal.
    fn is_paged(self) -> bool {
        [PagedAttention, PagedAttentionUpdate].contains(&self)
    }

    /// The forward operator that it computes or differentiates.
    fn target(self) -> Op {
        if self.is_paged() { Op::PagedAttention } else { Op::FlashAttnVarlen }
    }

    /// Combinations with fp8 come last.
    fn dtypes(self) -> Vec<Dtypes> {
        if self == FlashAttnVarlenBwd { ATTENTION_DTYPES.map(Dtypes::same).into() } else { Dtypes::ALL.into() }
    }

    fn layouts(self) -> Vec<KvLayout> {
        match self {
            FlashAttnVarlen => KvLayout::ALL.into(),
            FlashAttnVarlenBwd => vec![KvLayout::Contiguous],
            PagedAttention | PagedAttentionUpdate => vec![KvLayout::Interleaved],
        }
    }

    /// One memory layout with contiguous keys and one with pages, if the operator has both.
    fn memory_layouts(self) -> Vec<MemoryLayout> {
        match self {
            FlashAttnVarlen => vec![MemoryLayout::contiguous(), MemoryLayout::paged(KvLayout::Split, 16)],
            FlashAttnVarlenBwd => vec![MemoryLayout::contiguous()],
            PagedAttention | PagedAttentionUpdate => vec![MemoryLayout::default()],
        }
    }

    fn masks(self) -> &'static [Mask] {
        if self.is_paged() { &[Mask::CAUSAL] } else { &[Mask::CAUSAL, Mask::FULL] }
    }

    /// Batches of models and servers, and corner cases.
    fn named_batches(self, dtypes: Dtypes) -> Vec<(&'static str, BatchSpec, MemoryLayout)> {
        if self.is_paged() { named_paged_batches(dtypes) } else { named_flash_batches(dtypes) }
    }

    /// A random small call.
    fn random_call(self, random: &mut Random) -> (BatchSpec, MemoryLayout) {
        match self {
            FlashAttnVarlen => flash_call(random),
            PagedAttention | PagedAttentionUpdate => paged_call(random),
            FlashAttnVarlenBwd => {
                let (spec, memory_layout) = flash_call(random);
                // Small values of Dv for many heads, because the reference is slow.
                let value_dim = (random.between(8, 256) / spec.heads.0.div_ceil(4)).next_multiple_of(8);
                let (dtypes, scales) = (random.one_of(&ATTENTION_DTYPES).into(), [ScaleKind::None; 3]);
                let spec = BatchSpec { dtypes, value_dim: Some(value_dim), scales, batch_invariant: false, ..spec };
                (spec, MemoryLayout { layout: KvLayout::Contiguous, ..memory_layout })
            }
        }
    }

    /// Calls `property` with random calls.
    pub(crate) fn for_calls(self, count: u64, property: impl Fn(BatchSpec, MemoryLayout, &mut Random)) {
        for_all(count, &|random| {
            let (spec, memory_layout) = self.random_call(random);
            property(spec, memory_layout, random);
        });
    }

    /// The call for `batch` in this memory layout, whose seed chooses the gradient options.
    pub(crate) fn call(self, batch: &Batch, memory_layout: &MemoryLayout) -> Call {
        match self {
            PagedAttentionUpdate => Call::CacheUpdateCase(Box::new(PagedUpdateCase::new(batch, memory_layout))),
            FlashAttnVarlenBwd => {
                GradientCase::store(batch, memory_layout, GradientOptions::from_seed(memory_layout.seed)).into()
            }
            FlashAttnVarlen | PagedAttention => AttentionCase::store(self.target(), batch, memory_layout).into(),
        }
    }

    /// The call for a case whose metadata a test has changed.
    fn call_of(self, case: AttentionCase) -> Call {
        match self {
            FlashAttnVarlenBwd => GradientCase::of(case, GradientOptions::ALL).into(),
            _ => case.into(),
        }
    }
}

/// A call of one of these operators.
#[derive(Clone)]
pub(crate) enum Call {
    Forward(Box<AttentionCase>),
    Backward(Box<GradientCase>),
    CacheUpdateCase(Box<PagedUpdateCase>),
}

impl From<AttentionCase> for Call {
    fn from(case: AttentionCase) -> Self {
        Self::Forward(Box::new(case))
    }
}

impl From<GradientCase> for Call {
    fn from(case: GradientCase) -> Self {
        Self::Backward(Box::new(case))
    }
}

impl Deref for Call {
    type Target = dyn ReferenceCase;

    fn deref(&self) -> &Self::Target {
        match self {
            Self::Forward(case) => &**case,
            Self::Backward(gradients) => &**gradients,
            Self::CacheUpdateCase(step) => &**step,
        }
    }
}

impl DerefMut for Call {
    fn deref_mut(&mut self) -> &mut Self::Target {
        match self {
            Self::Forward(case) => &mut **case,
            Self::Backward(gradients) => &mut **gradients,
            Self::CacheUpdateCase(step) => &mut **step,
        }
    }
}

/// Decode, prefill, a sequence without queries and a chunk. No sequence has more queries than keys.
fn ordinary(dtypes: Dtypes) -> BatchSpec {
    BatchSpec { dtypes, lengths: vec![(1, 90), (9, 9), (0, 4), (21, 64)], ..BatchSpec::default() }
}

/// Number of sequences with queries whose metadata is valid, and invalid.
fn valid_and_invalid(case: &AttentionCase) -> (usize, usize) {
    let with_queries = clamped_sequences(case).into_iter().filter(|m| m.len_q > 0);
    let (valid, invalid): (Vec<_>, Vec<_>) = with_queries.partition(|m| m.specified);
    (valid.len(), invalid.len())
}
