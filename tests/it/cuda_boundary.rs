//! The handlers for the platform `CUDA` on machines without a GPU: they decode a call and report the missing driver.
//! Their refusals are in the tables of `tests/conformance`.

use crate::support::valid_calls;
use crate::support::{CUDA, Frame, Stage, UNAVAILABLE, handler_sets, target};

#[test]
fn the_cuda_handlers_need_a_stream_and_no_other_context() {
    for (set, call) in handler_sets().into_iter().flat_map(|set| valid_calls::all().into_iter().map(move |c| (set, c)))
    {
        let refusal = call.outcome_in(set.frame(call.target, CUDA)).unwrap_err();
        let text = "Failed to get platform stream: XLA FFI GPU context is not available";
        assert!(refusal.text.ends_with(text), "{}", refusal.text);
    }
}

/// Whether libcuda can be loaded, determined without the crate.
fn has_driver() -> bool {
    // SAFETY: loads a library by name.
    !unsafe { libc::dlopen(c"libcuda.so.1".as_ptr(), libc::RTLD_LAZY) }.is_null()
}

#[test]
fn the_cuda_handlers_report_a_missing_driver() {
    if has_driver() {
        println!("skipped: this machine has a driver");
        return;
    }
    for call in valid_calls::all() {
        let row = target(call.target, CUDA);
        for (stage, handler) in [(Stage::Initialize, row.initialize), (Stage::Execute, row.execute)] {
            let refusal = call.outcome_in(Frame::of(handler.unwrap(), stage).stream(0)).unwrap_err();
            assert_eq!(refusal.code, UNAVAILABLE, "{} {stage:?}: {}", call.target, refusal.text);
            assert!(refusal.text.contains("libcuda"), "{}", refusal.text);
        }
    }
}
