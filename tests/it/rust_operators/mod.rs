//! The safe functions of Rust: each gives what the oracle says, on the CPU or, with `XLA_ATTENTION_TEST_DEVICE=cuda`, on
//! the GPU; and what they refuse.

mod driver;
mod host;
mod refusals;

use crate::support::answers::{IfWrong, answers, assert_allowed};
use crate::support::array::{Array, BF16, F8E4M3FN, F16, F32, I64};
use crate::support::cache_updates::Update;
use crate::support::case::{Case, Target};
use crate::support::check::computed;
use crate::support::gathers::Gather;
use crate::support::gradient_case::{GradientCase, assert_gradients, gradient_answers};
use crate::support::invocation::Invocation;
use crate::support::option_pairs::Options;
use crate::support::rotations::Rope;
use crate::support::states::{ANY_LSE, State};
use crate::support::steps::Step;
use crate::support::storage::Layout;
use driver::results;

/// Every so many of the calls that together hold every pair of options.
const STRIDE: usize = 5;

#[test]
fn attention_with_any_options_is_what_the_oracle_says() {
    let calls: Vec<_> = Options::ATTENTION.calls().into_iter().step_by(STRIDE).collect();
    for target in [Target::FlashAttnVarlen, Target::PagedAttention] {
        assert!(calls.iter().filter(|(of, ..)| *of == target).count() > 1, "{target:?} is hardly called");
    }
    for (target, shape, storage, _) in calls {
        let case = Case::store(target, &shape.batch(), &storage);
        let found = results(&case.invocation());
        let found = computed(&case, &found);
        assert_allowed(&case, &answers(&case, IfWrong::Unspecified), &found[0], found.get(1));
    }
}

#[test]
fn gradients_with_any_options_are_what_the_oracle_says() {
    for (_, shape, storage, wanted) in Options::GRADIENTS.calls().into_iter().step_by(STRIDE) {
        let case = GradientCase::store(&shape.batch(), &storage, wanted);
        assert_gradients(&case, &gradient_answers(&case, IfWrong::Unspecified), &results(&case.invocation()));
    }
}

#[test]
fn caches_are_updated_in_every_layout() {
    let mut updates = Update::each_type(&Layout::PAGED);
    let slots = vec![-1, 3, i64::MAX, 12, 11, i64::MIN];
    updates.push(Update { slots, wide_slots: true, ..Update::default() });
    updates.push(Update { layout: Layout::Split, dims: [16, 24], ..Update::default() });
    for update in updates {
        assert!(results(&update.invocation(true)) == update.expected(), "{update:?}");
    }
}

#[test]
fn queries_and_keys_are_rotated_on_their_way() {
    let updates = Update::each_type(&[Layout::Interleaved, Layout::Stacked, Layout::PerPage]);
    for (update, interleaved) in updates.into_iter().zip([false, true].iter().cycle()) {
        let positions = (0..update.slots.len() as i32).map(|token| 5 * token - 3).collect();
        let rope = Rope { update, interleaved: *interleaved, rotated: 12, positions, ..Rope::default() };
        assert!(results(&rope.invocation(true)) == rope.expected(), "{rope:?}");
    }
}

#[test]
fn new_rows_are_stored_and_attended_to() {
    let calls = Options::ATTENTION.calls().into_iter().filter(|(of, ..)| *of == Target::PagedAttention);
    for (_, shape, storage, _) in calls.step_by(STRIDE) {
        let step = Step::new(&shape.batch(), &storage);
        let found = results(&step.invocation(true));
        let (out, lse) = (&found[0], step.case.lse.then(|| &found[2]));
        assert!(found[1] == *step.cache(), "{}", step.case.name);
        assert_allowed(&step.case, &answers(&step.case, IfWrong::Unspecified), out, lse);
    }
}

#[test]
fn caches_are_gathered_from_every_layout() {
    for layout in Layout::PAGED {
        let scales = [None, Some(vec![0.5, 3.0])];
        for gather in [
            Gather { layout, ..Gather::default() },
            Gather { layout, dtype: F8E4M3FN, out: BF16, scales, ..Gather::default() },
        ] {
            gather.assert_found(&results(&gather.invocation()));
        }
    }
}

#[test]
fn states_are_merged() {
    for dtype in [F16, BF16, F32] {
        let [a, b] = [1, 2].map(|seed| State::random(dtype, (7, 3, 40), &ANY_LSE, seed));
        State::of(&results(&a.merge(&b))).assert_merged_from(&a, &b);
    }
}

#[test]
fn elements_are_added() {
    let add = |a: Array, b: Array| {
        let (dtype, dims) = (a.dtype, a.dims.clone());
        results(&Invocation::new("xla_gpu_simple_add").operand("a", a).operand("b", b).result("out", dtype, &dims))
    };
    let sum = add(Array::f32s(&[2, 1, 2], &[1.0, 2.0, 3.0, 4.0]), Array::f32s(&[2, 1, 2], &[0.5, 0.25, 8.0, -4.0]));
    assert_eq!(sum, [Array::f32s(&[2, 1, 2], &[1.5, 2.25, 11.0, 0.0])]);
    assert_eq!(add(Array::i64s(&[], &[i64::MAX]), Array::i64s(&[], &[1])), [Array::i64s(&[], &[i64::MIN])]);
    let nothing = Array::filled(I64, &[0, 3], 0);
    assert_eq!(add(nothing.clone(), nothing.clone()), [nothing]);
}
