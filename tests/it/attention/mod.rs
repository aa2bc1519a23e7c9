//! The operators of attention, tested alike: a function of these modules is a test of the operator that it is given, and the
//! topics of the operators (`flash_attn_varlen` and the others) list those that apply to each.

pub(crate) mod agreement;
pub(crate) mod containment;
pub(crate) mod interface;
pub(crate) mod invariance;
pub(crate) mod laws;
pub(crate) mod metadata;
mod results;

use crate::support::answers::{IfWrong, members};
use crate::support::array::{ATTENTION_DTYPES, Array};
use crate::support::batch::{Batch, Dtypes, Scaled, Shape};
use crate::support::case::{Case, Target};
use crate::support::check::{check, check_against, computed};
use crate::support::gradient_case::{GradientCase, Wanted, check_gradients, check_gradients_against};
use crate::support::invocation::Invocation;
use crate::support::named_shapes::{flash_shapes, paged_shapes};
use crate::support::oracle::Mask;
use crate::support::steps::Step;
use crate::support::storage::{Layout, Storage};
use crate::support::strategies;
use proptest::prelude::*;

/// Functions of these modules as tests of an operator, under their names.
macro_rules! tests_of {
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
pub(crate) use tests_of;

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Operator {
    FlashAttnVarlen,
    FlashAttnVarlenBwd,
    PagedAttention,
    PagedAttentionUpdate,
}

use Operator::{FlashAttnVarlen, FlashAttnVarlenBwd, PagedAttention, PagedAttentionUpdate};

impl Operator {
    /// Its keys are pages of one layout, its mask is causal.
    fn is_paged(self) -> bool {
        [PagedAttention, PagedAttentionUpdate].contains(&self)
    }

    /// The operator whose results it computes, or differentiates.
    fn target(self) -> Target {
        if self.is_paged() { Target::PagedAttention } else { Target::FlashAttnVarlen }
    }

    /// Those of 32 and 16 bits come first.
    fn dtypes(self) -> Vec<Dtypes> {
        if self == FlashAttnVarlenBwd { ATTENTION_DTYPES.map(Dtypes::same).into() } else { Dtypes::ALL.into() }
    }

    fn layouts(self) -> Vec<Layout> {
        match self {
            FlashAttnVarlen => Layout::ALL.into(),
            FlashAttnVarlenBwd => vec![Layout::Contiguous],
            PagedAttention | PagedAttentionUpdate => vec![Layout::Interleaved],
        }
    }

    /// One for keys that are rows and one for pages, as far as it takes them.
    fn storages(self) -> Vec<Storage> {
        match self {
            FlashAttnVarlen => vec![Storage::contiguous(), Storage::paged(Layout::Split, 16)],
            FlashAttnVarlenBwd => vec![Storage::contiguous()],
            PagedAttention | PagedAttentionUpdate => vec![Storage::default()],
        }
    }

    fn masks(self) -> &'static [Mask] {
        if self.is_paged() { &[Mask::CAUSAL] } else { &[Mask::CAUSAL, Mask::FULL] }
    }

    /// Calls with names, for which the operator is made.
    fn named_shapes(self, dtypes: Dtypes) -> Vec<(&'static str, Shape, Storage)> {
        if self.is_paged() { paged_shapes(dtypes) } else { flash_shapes(dtypes) }
    }

    /// Small calls as odd as it allows.
    pub(crate) fn calls(self) -> BoxedStrategy<(Shape, Storage)> {
        match self {
            FlashAttnVarlen => strategies::flash_calls().boxed(),
            PagedAttention | PagedAttentionUpdate => strategies::paged_calls().boxed(),
            FlashAttnVarlenBwd => (strategies::flash_calls(), 8..=256usize, 0..3usize)
                .prop_map(|((shape, storage), dv, dtype)| {
                    // Wide values in small numbers: the reference is slow.
                    let value_dim = Some((dv / shape.heads.0.div_ceil(4)).next_multiple_of(8));
                    let (dtypes, scales) = (ATTENTION_DTYPES[dtype].into(), [Scaled::No; 3]);
                    let shape = Shape { dtypes, value_dim, scales, batch_invariant: false, ..shape };
                    (shape, Storage { layout: Layout::Contiguous, ..storage })
                })
                .boxed(),
        }
    }

    /// `batch` as `storage` says; the seed of that decides which gradients are wanted.
    pub(crate) fn call(self, batch: &Batch, storage: &Storage) -> Call {
        match self {
            PagedAttentionUpdate => Call::Update(Box::new(Step::new(batch, storage))),
            FlashAttnVarlenBwd => GradientCase::store(batch, storage, Wanted::drawn(storage.seed)).into(),
            FlashAttnVarlen | PagedAttention => Case::store(self.target(), batch, storage).into(),
        }
    }

    /// A case whose metadata may have been changed.
    fn call_of(self, case: Case) -> Call {
        match self {
            FlashAttnVarlenBwd => GradientCase::of(case, Wanted::ALL).into(),
            _ => case.into(),
        }
    }
}

/// A call of one of the operators.
#[derive(Clone)]
pub(crate) enum Call {
    Forward(Box<Case>),
    Backward(Box<GradientCase>),
    Update(Box<Step>),
}

impl From<Case> for Call {
    fn from(case: Case) -> Self {
        Self::Forward(Box::new(case))
    }
}

impl From<GradientCase> for Call {
    fn from(case: GradientCase) -> Self {
        Self::Backward(Box::new(case))
    }
}

impl Call {
    fn case(&self) -> &Case {
        match self {
            Self::Forward(case) => case,
            Self::Backward(gradients) => &gradients.forward,
            Self::Update(step) => &step.case,
        }
    }

    /// With a name, to be found by when it fails.
    pub(crate) fn named(mut self, name: &str) -> Self {
        let case = match &mut self {
            Self::Forward(case) => case,
            Self::Backward(gradients) => &mut gradients.forward,
            Self::Update(step) => &mut step.case,
        };
        case.name = format!("{name}: {}", case.name);
        self
    }

    pub(crate) fn invocation(&self) -> Invocation {
        match self {
            Self::Forward(case) => case.invocation(),
            Self::Backward(gradients) => gradients.invocation(),
            Self::Update(step) => step.invocation(true),
        }
    }

    /// Results without the workspace.
    fn computed<'a>(&self, results: &'a [Array]) -> &'a [Array] {
        match self {
            Self::Forward(case) => computed(case, results),
            Self::Backward(gradients) => gradients.computed(results),
            Self::Update(step) => step.computed(results),
        }
    }

    /// The results are what the reference allows, from run to run; gives them.
    pub(crate) fn check(&self) -> Vec<Array> {
        match self {
            Self::Forward(case) => check(case),
            Self::Backward(gradients) => check_gradients(gradients),
            Self::Update(step) => step.check(),
        }
    }

    /// The same for sequences whose metadata is wrong.
    fn check_against(&self, if_wrong: IfWrong) {
        match self {
            Self::Forward(case) => check_against(case, if_wrong),
            Self::Backward(gradients) => check_gradients_against(gradients, if_wrong),
            Self::Update(_) => panic!("the rows that an update stores follow from its metadata"),
        };
    }
}

/// Decode, prefill, a sequence without queries and a chunk; none has more queries than keys.
fn ordinary(dtypes: Dtypes) -> Shape {
    Shape { dtypes, lengths: vec![(1, 90), (9, 9), (0, 4), (21, 64)], ..Shape::default() }
}

/// The sequences of a case that have queries and the right metadata, and those that have the wrong.
fn right_and_wrong(case: &Case) -> (usize, usize) {
    let with_queries = members(case).into_iter().filter(|m| m.len_q > 0);
    let (right, wrong): (Vec<_>, Vec<_>) = with_queries.partition(|m| m.specified);
    (right.len(), wrong.len())
}
