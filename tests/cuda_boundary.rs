//! The handlers for the platform `CUDA` where no GPU is needed: they decode, and miss a driver politely. What they refuse
//! is in the tables of `tests/conformance`.

#![cfg(feature = "cuda")]
#![allow(clippy::unwrap_used, clippy::print_stdout, reason = "a failed step is a failed test; a skipped one says so")]

mod support;

use support::array::Array;
use support::frame::{Buffer, CUDA, Frame, Stage, UNAVAILABLE, target};
use support::guard::Side;
use support::invocation::{Invocation, Outcome};
use support::right_calls;

/// The buffers of an invocation; the results are poisoned.
fn place(call: &Invocation) -> (Vec<Buffer>, Vec<Buffer>) {
    let operands = call.operands.iter().map(|(name, a)| Buffer::place(name, Side::EndsAtGuard, a)).collect();
    let result = |r: &Outcome| Buffer::place(r.name, Side::EndsAtGuard, &Array::filled(r.dtype, &r.dims, 0xff));
    (operands, call.results.iter().map(result).collect())
}

fn frame<'a>(frame: Frame<'a>, call: &Invocation, buffers: &'a (Vec<Buffer>, Vec<Buffer>)) -> Frame<'a> {
    let frame = buffers.0.iter().fold(frame.attributes(&call.attributes), Frame::operand);
    buffers.1.iter().fold(frame, Frame::result)
}

#[test]
fn the_cuda_handlers_need_a_stream_and_no_other_context() {
    for call in right_calls::all() {
        let buffers = place(&call);
        let refusal = frame(Frame::new(call.target, CUDA), &call, &buffers).run().unwrap_err();
        let text = "Failed to get platform stream: XLA FFI GPU context is not available";
        assert!(refusal.text.ends_with(text), "{}", refusal.text);
    }
}

/// Whether the driver's library can be loaded, asked without the crate.
fn driver_is_there() -> bool {
    // SAFETY: loads a library by name.
    !unsafe { libc::dlopen(c"libcuda.so.1".as_ptr(), libc::RTLD_LAZY) }.is_null()
}

#[test]
fn the_cuda_handlers_say_that_there_is_no_driver() {
    if driver_is_there() {
        println!("skipped: this machine has a driver");
        return;
    }
    for call in right_calls::all() {
        let row = target(call.target, CUDA);
        for (stage, handler) in [(Stage::Initialize, row.initialize), (Stage::Execute, row.execute)] {
            let buffers = place(&call);
            let refusal = frame(Frame::of(handler.unwrap(), stage).stream(0), &call, &buffers).run().unwrap_err();
            assert_eq!(refusal.code, UNAVAILABLE, "{} {stage:?}: {}", call.target, refusal.text);
            assert!(refusal.text.contains("libcuda"), "{}", refusal.text);
        }
    }
}
