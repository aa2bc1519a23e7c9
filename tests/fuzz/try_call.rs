//! Makes a call through the C interface and the XLA handlers. It must be refused with a proper error, or stay within
//! its memory.

use crate::mutated_call::{BufferSpec, MutatedCall};
use crate::support::{
    Array, Attr, BF16, CPU, Dtype, F16, F32, F64, Frame, GuardedBuffer, HandlerSet, I32, INVALID_ARGUMENT, InlinePool,
    Invocation, POISON, PRED, Random, Refusal, Side, UNIMPLEMENTED, c_attribute, c_call, c_request, c_tensor,
    handler_sets, operator_of,
};
use std::collections::BTreeMap;
use std::ptr::null_mut;
use xla_attention::ops::AttributeKind;
use xla_attention::{XaAttribute, XaCall, XaTensor};

/// A valid call with more elements than this in a buffer is not run.
const MAX_ELEMENTS: i64 = 4096;

/// The outcome of a mutated call.
pub(crate) enum CallOutcome {
    NotDecoded,
    Refused,
    /// Valid, but too large to be run, or strided.
    NotRun,
    Ran,
}

/// Attributes by name. Of two with the same name the later one counts, as in a call frame.
fn attributes(mutated: &MutatedCall) -> BTreeMap<&str, &Attr> {
    mutated.attributes.iter().map(|(name, value)| (*name, value)).collect()
}

/// Whether the handler's signature has this number of buffers, and attributes with these names and types.
fn is_decoded(mutated: &MutatedCall) -> bool {
    let (signature, given) = (operator_of(mutated.target).signature(), attributes(mutated));
    let typed = |(name, kind): &(&str, AttributeKind)| {
        matches!(
            (kind, given.get(name)),
            (AttributeKind::Bool, Some(Attr::Bool(_)))
                | (AttributeKind::I64, Some(Attr::I64(_)))
                | (AttributeKind::F32, Some(Attr::F32(_)))
        )
    };
    (signature.required_operands..=signature.operands.len()).contains(&mutated.operands.len())
        && (signature.required_results..=signature.results.len()).contains(&mutated.results.len())
        && given.len() == signature.attributes.len()
        && signature.attributes.iter().all(typed)
}

/// Validates the call through the C interface, which takes attributes in order and without names.
fn validate(mutated: &MutatedCall) -> Result<(), Refusal> {
    let strides = |list: &[BufferSpec]| list.iter().map(BufferSpec::strides).collect::<Vec<_>>();
    let (operand_strides, result_strides) = (strides(&mutated.operands), strides(&mutated.results));
    let tensor =
        |(x, strides): (&BufferSpec, &Option<Vec<i64>>)| c_tensor(x.dtype, &x.dims, strides.as_deref(), null_mut());
    let operands: Vec<XaTensor> = mutated.operands.iter().zip(&operand_strides).map(tensor).collect();
    let results: Vec<XaTensor> = mutated.results.iter().zip(&result_strides).map(tensor).collect();
    let attributes: Vec<XaAttribute> = attributes(mutated).values().copied().map(c_attribute).collect();
    let request = c_request(operator_of(mutated.target) as i32, 0, &operands, &results);
    let (list, count) = (attributes.as_ptr(), attributes.len());
    let (code, text) = c_call(&XaCall { attributes: list, num_attributes: count, ..request });
    if code == 0 { Ok(()) } else { Err(Refusal { code, text }) }
}

/// Calls a handler with all buffers at an address that faults.
fn call_handler_at_guard_page(set: &HandlerSet, mutated: &MutatedCall) -> Result<(), Refusal> {
    let memory = GuardedBuffer::new("a buffer of a refused call", Side::EndsAtGuard, &[]);
    let frame = set.frame(mutated.target, CPU).attributes(&mutated.attributes);
    // SAFETY: the call must be refused, and a refused call accesses no memory.
    let operand = |f: Frame<'static>, x: &BufferSpec| unsafe { f.operand(x.dtype, &x.dims, memory.data()) };
    // SAFETY: as for the operands.
    let result = |f: Frame<'static>, x: &BufferSpec| unsafe { f.result(x.dtype, &x.dims, memory.data()) };
    mutated.results.iter().fold(mutated.operands.iter().fold(frame, operand), result).run()
}

/// Finite random numbers. Integers are hostile.
fn contents(random: &mut Random, spec: &BufferSpec) -> Array {
    let count = spec.elements().unwrap() as usize;
    if spec.dtype == I32 {
        let values: Vec<i32> = (0..count).map(|_| random.hostile_i32()).collect();
        return Array::i32s(&spec.dims, &values);
    }
    let values: Vec<f64> = (0..count).map(|_| random.normal()).collect();
    Array::new(spec.dtype, &spec.dims, &values)
}

/// The call with memory. Its updates are in place if `aliases` allow it and a random choice says so.
fn invocation(mutated: &MutatedCall, aliases: &[(usize, usize)], seed: u64) -> Invocation {
    let mut random = Random::new(seed);
    let call = Invocation { description: format!("{mutated:?} seed {seed}"), ..Invocation::new(mutated.target) };
    let call = mutated.operands.iter().fold(call, |call, x| call.operand(x.name, contents(&mut random, x)));
    let call = mutated.attributes.iter().fold(call, |call, (name, value)| call.attribute(name, value.clone()));
    let in_place = random.below(2) == 0;
    mutated.results.iter().enumerate().fold(call, |call, (index, x)| {
        let operand = aliases.iter().find(|(operand, result)| {
            let given = mutated.operands.get(*operand);
            in_place && *result == index && given.is_some_and(|o| (o.dtype, &o.dims) == (x.dtype, &x.dims))
        });
        match operand {
            Some((operand, _)) => call.result_in_place(x.name, *operand),
            None => call.result(x.name, x.dtype, &x.dims),
        }
    })
}

/// The first element that was not written: its bits are not the result of arithmetic on finite numbers.
fn unwritten(result: &Array) -> Option<usize> {
    let is_float = [F16, BF16, F32, F64].contains(&result.dtype);
    let untouched = |element: &[u8]| is_float && element.iter().all(|&b| b == POISON);
    result.bytes.chunks_exact(result.dtype.size()).position(untouched)
}

fn run(mutated: &MutatedCall, aliases: &[(usize, usize)], seed: u64) {
    let call = invocation(mutated, aliases, seed);
    let side = if seed.is_multiple_of(2) { Side::EndsAtGuard } else { Side::BeginsAtGuard };
    let results =
        call.run(side, &InlinePool(3)).unwrap_or_else(|e| panic!("the sizes were accepted, the call was not: {e:?}"));
    for (outcome, result) in call.results.iter().zip(&results).filter(|(outcome, _)| outcome.name != "workspace") {
        assert_eq!(unwritten(result), None, "{} has an element that was not written", outcome.name);
    }
}

/// Whether [`contents`] can make numbers of this dtype, which an operand that is not read may have.
fn is_known(dtype: Dtype) -> bool {
    dtype.size() > 0 && dtype != PRED
}

/// Makes the call through the C interface and through the handlers of every set. All must refuse it with the same error
/// and without an access to memory, or the call must stay within its memory. `aliases` are those of the conformance
/// case; `seed` determines the contents.
pub(crate) fn try_call(mutated: &MutatedCall, aliases: &[(usize, usize)], seed: u64) -> CallOutcome {
    let validation = validate(mutated);
    if let Err(refusal) = &validation {
        assert!([INVALID_ARGUMENT, UNIMPLEMENTED].contains(&refusal.code), "{mutated:?}: {refusal:?}");
        let target = operator_of(mutated.target).signature().target;
        assert!(refusal.text.starts_with(&format!("{target}: ")), "{mutated:?}: {refusal:?}");
    }
    let mut buffers = mutated.operands.iter().chain(&mutated.results);
    if buffers.clone().any(|b| b.strides().is_some()) {
        return if validation.is_ok() { CallOutcome::NotRun } else { CallOutcome::Refused };
    }
    if !is_decoded(mutated) {
        for set in handler_sets() {
            let refusal = call_handler_at_guard_page(&set, mutated).expect_err("a frame that cannot be decoded");
            assert_eq!(refusal.code, INVALID_ARGUMENT, "{:?}: {mutated:?}: {refusal:?}", set.version);
        }
        return CallOutcome::NotDecoded;
    }
    if validation.is_err() {
        for set in handler_sets() {
            assert_eq!(call_handler_at_guard_page(&set, mutated), validation, "{:?}: {mutated:?}", set.version);
        }
        return CallOutcome::Refused;
    }
    if !buffers.all(|b| is_known(b.dtype) && b.elements().is_some_and(|n| n <= MAX_ELEMENTS)) {
        return CallOutcome::NotRun;
    }
    run(mutated, aliases, seed);
    CallOutcome::Ran
}
