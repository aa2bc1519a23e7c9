//! A call through the C interface and the handlers of XLA, which has to be refused politely or to run within its memory.

use crate::mutated_call::{BufferSpec, MutatedCall};
use crate::support::{
    Array, Attr, BF16, CPU, Dtype, F16, F32, F64, Frame, GuardedBuffer, HandlerSet, I32, INVALID_ARGUMENT, InlinePool,
    Invocation, POISON, Random, Refusal, Side, UNIMPLEMENTED, c_attribute, c_call, c_request, c_tensor, handler_sets,
    operator_of,
};
use std::collections::BTreeMap;
use std::ptr::null_mut;
use xla_attention::ops::AttributeKind;
use xla_attention::{XaAttribute, XaCall, XaTensor};

/// An accepted call with more elements than this in one of its buffers is not run.
const MOST_ELEMENTS: i64 = 4096;

/// What has become of a damaged call.
pub(crate) enum CallOutcome {
    NotDecoded,
    Refused,
    /// Accepted, and too large to be run or strided.
    NotRun,
    Ran,
}

/// As in a frame: by name, and of two with the same name the later one.
fn attributes(plan: &MutatedCall) -> BTreeMap<&str, &Attr> {
    plan.attributes.iter().map(|(name, value)| (*name, value)).collect()
}

/// Whether the list of a handler takes as many buffers, and attributes of these names and types.
fn is_decoded(plan: &MutatedCall) -> bool {
    let (signature, given) = (operator_of(plan.target).signature(), attributes(plan));
    let typed = |(name, kind): &(&str, AttributeKind)| {
        matches!(
            (kind, given.get(name)),
            (AttributeKind::Bool, Some(Attr::Bool(_)))
                | (AttributeKind::I64, Some(Attr::I64(_)))
                | (AttributeKind::F32, Some(Attr::F32(_)))
        )
    };
    (signature.required_operands..=signature.operands.len()).contains(&plan.operands.len())
        && (signature.required_results..=signature.results.len()).contains(&plan.results.len())
        && given.len() == signature.attributes.len()
        && signature.attributes.iter().all(typed)
}

/// What the C interface says of the sizes; it takes attributes in their order and has no names for them.
fn checked(plan: &MutatedCall) -> Result<(), Refusal> {
    let strides = |list: &[BufferSpec]| list.iter().map(BufferSpec::strides).collect::<Vec<_>>();
    let (of_operands, of_results) = (strides(&plan.operands), strides(&plan.results));
    let tensor =
        |(x, strides): (&BufferSpec, &Option<Vec<i64>>)| c_tensor(x.dtype, &x.dims, strides.as_deref(), null_mut());
    let operands: Vec<XaTensor> = plan.operands.iter().zip(&of_operands).map(tensor).collect();
    let results: Vec<XaTensor> = plan.results.iter().zip(&of_results).map(tensor).collect();
    let attributes: Vec<XaAttribute> = attributes(plan).values().copied().map(c_attribute).collect();
    let request = c_request(operator_of(plan.target) as i32, 0, &operands, &results);
    let (list, count) = (attributes.as_ptr(), attributes.len());
    let (code, text) = c_call(&XaCall { attributes: list, num_attributes: count, ..request });
    if code == 0 { Ok(()) } else { Err(Refusal { code, text }) }
}

/// What a handler says if every buffer lies at an address that faults.
fn claimed(set: &HandlerSet, plan: &MutatedCall) -> Result<(), Refusal> {
    let nowhere = GuardedBuffer::new("a buffer of a refused call", Side::EndsAtGuard, &[]);
    let frame = set.frame(plan.target, CPU).attributes(&plan.attributes);
    // SAFETY: the call is one that has to be refused.
    let operand = |f: Frame<'static>, x: &BufferSpec| unsafe { f.operand(x.dtype, &x.dims, nowhere.data()) };
    // SAFETY: as above.
    let result = |f: Frame<'static>, x: &BufferSpec| unsafe { f.result(x.dtype, &x.dims, nowhere.data()) };
    plan.results.iter().fold(plan.operands.iter().fold(frame, operand), result).run()
}

/// Finite numbers; integers are as hostile as they can be.
fn contents(random: &mut Random, sizes: &BufferSpec) -> Array {
    let count = sizes.elements().unwrap() as usize;
    if sizes.dtype == I32 {
        let values: Vec<i32> = (0..count).map(|_| random.hostile_i32()).collect();
        return Array::i32s(&sizes.dims, &values);
    }
    let values: Vec<f64> = (0..count).map(|_| random.normal()).collect();
    Array::new(sizes.dtype, &sizes.dims, &values)
}

/// The call with memory; its updates in place, if they can be.
fn invocation(plan: &MutatedCall, aliases: &[(usize, usize)], seed: u64) -> Invocation {
    let mut random = Random::new(seed);
    let call = Invocation { what: format!("{plan:?} seed {seed}"), ..Invocation::new(plan.target) };
    let call = plan.operands.iter().fold(call, |call, x| call.operand(x.name, contents(&mut random, x)));
    let call = plan.attributes.iter().fold(call, |call, (name, value)| call.attribute(name, value.clone()));
    let in_place = random.below(2) == 0;
    plan.results.iter().enumerate().fold(call, |call, (index, x)| {
        let operand = aliases.iter().find(|(operand, result)| {
            let given = plan.operands.get(*operand);
            in_place && *result == index && given.is_some_and(|o| (o.dtype, &o.dims) == (x.dtype, &x.dims))
        });
        match operand {
            Some((operand, _)) => call.result_in_place(x.name, *operand),
            None => call.result(x.name, x.dtype, &x.dims),
        }
    })
}

/// An element that was never written: bits that no arithmetic on finite floats gives.
fn unwritten(result: &Array) -> Option<usize> {
    let is_float = [F16, BF16, F32, F64].contains(&result.dtype);
    let untouched = |element: &[u8]| is_float && element.iter().all(|&b| b == POISON);
    result.bytes.chunks_exact(result.dtype.size()).position(untouched)
}

fn run(plan: &MutatedCall, aliases: &[(usize, usize)], seed: u64) {
    let call = invocation(plan, aliases, seed);
    let side = if seed.is_multiple_of(2) { Side::EndsAtGuard } else { Side::BeginsAtGuard };
    let results =
        call.run(side, &InlinePool(3)).unwrap_or_else(|e| panic!("the sizes were accepted, the call was not: {e:?}"));
    for (outcome, result) in call.results.iter().zip(&results).filter(|(outcome, _)| outcome.name != "workspace") {
        assert_eq!(unwritten(result), None, "{} has an element that was not written", outcome.name);
    }
}

/// A type of which [`contents`] can make numbers.
fn is_known(dtype: Dtype) -> bool {
    dtype.size() > 0
}

/// Make a call through the C interface and the handlers of every set: it is refused politely and alike without a touch of
/// memory, or runs within its memory. `aliases` are those of the case; `seed` makes its numbers.
pub(crate) fn try_call(plan: &MutatedCall, aliases: &[(usize, usize)], seed: u64) -> CallOutcome {
    let said = checked(plan);
    if let Err(refusal) = &said {
        assert!([INVALID_ARGUMENT, UNIMPLEMENTED].contains(&refusal.code), "{plan:?}: {refusal:?}");
        let target = operator_of(plan.target).signature().target;
        assert!(refusal.text.starts_with(&format!("{target}: ")), "{plan:?}: {refusal:?}");
    }
    let mut buffers = plan.operands.iter().chain(&plan.results);
    if buffers.clone().any(|b| b.strides().is_some()) {
        return if said.is_ok() { CallOutcome::NotRun } else { CallOutcome::Refused };
    }
    if !is_decoded(plan) {
        for set in handler_sets() {
            let refusal = claimed(&set, plan).expect_err("a frame that cannot be decoded");
            assert_eq!(refusal.code, INVALID_ARGUMENT, "{:?}: {plan:?}: {refusal:?}", set.version);
        }
        return CallOutcome::NotDecoded;
    }
    if said.is_err() {
        for set in handler_sets() {
            assert_eq!(claimed(&set, plan), said, "{:?}: {plan:?}", set.version);
        }
        return CallOutcome::Refused;
    }
    if !buffers.all(|b| is_known(b.dtype) && b.elements().is_some_and(|n| n <= MOST_ELEMENTS)) {
        return CallOutcome::NotRun;
    }
    run(plan, aliases, seed);
    CallOutcome::Ran
}
