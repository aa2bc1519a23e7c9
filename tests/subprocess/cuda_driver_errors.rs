//! Error messages if the driver or the GPU cannot run a kernel, with a fake libcuda.

use crate::support::fake_libcuda;
use xla_attention::{Action, Code, Error, Stream};

/// The outcomes of preparing and of launching an addition with this behaviour of the fake libcuda: "done", or a code
/// and a text.
fn outcomes(behaviour: &str) -> [String; 2] {
    fake_libcuda::outcomes("cuda_driver_errors::child_that_prepares_and_launches", behaviour, false).try_into().unwrap()
}

#[test]
#[ignore = "runs in a separate process"]
fn child_that_prepares_and_launches() {
    for action in [Action::PrepareCuda, Action::LaunchCuda(Stream(0))] {
        let outcome = fake_libcuda::add(action);
        let text =
            outcome.map_or_else(|Error { code, message }| format!("{code:?}: {message}"), |()| "done".to_owned());
        println!("outcome: {text}");
    }
}

fn assert_both(behaviour: &str, code: Code, parts: &[&str]) {
    for outcome in outcomes(behaviour) {
        assert!(outcome.starts_with(&format!("{code:?}: xla_gpu_simple_add: ")), "{behaviour}: {outcome}");
        for part in parts {
            assert!(outcome.contains(part), "{behaviour}: {outcome} does not say {part:?}");
        }
    }
}

#[test]
#[cfg_attr(not(every_architecture), ignore = "XLA_ATTENTION_CUDA_ARCHS leaves kernels out")]
fn the_fake_libcuda_works_without_an_error() {
    assert_eq!(outcomes("none"), ["done", "done"]);
}

#[test]
#[cfg_attr(not(every_architecture), ignore = "XLA_ATTENTION_CUDA_ARCHS leaves kernels out")]
fn a_driver_that_is_too_old_for_cubins_gets_ptx() {
    assert_eq!(outcomes("older driver"), ["done", "done"]);
}

#[test]
fn without_a_context_the_error_says_how_to_make_one() {
    assert_both("no context", Code::FailedPrecondition, &["context"]);
}

#[test]
fn a_gpu_that_is_too_old_is_named_with_what_is_needed() {
    assert_both("old GPU", Code::FailedPrecondition, &["the GPU is sm_75", "sm_80 or newer"]);
}

#[test]
#[cfg_attr(not(every_architecture), ignore = "XLA_ATTENTION_CUDA_ARCHS leaves kernels out")]
fn a_refused_module_is_reported_with_the_log_of_the_driver() {
    let parts = ["the driver (CUDA 11.4) refuses the kernel simple_add_f32 on sm_90", "the log of the driver", "PTX"];
    assert_both("refused module", Code::FailedPrecondition, &parts);
}

#[test]
#[cfg_attr(not(every_architecture), ignore = "XLA_ATTENTION_CUDA_ARCHS leaves kernels out")]
fn a_failed_launch_is_reported_with_the_drivers_text() {
    let [prepared, launched] = outcomes("failed launch");
    assert_eq!(prepared, "done");
    assert!(launched.starts_with("Internal: xla_gpu_simple_add: cuLaunchKernel: "), "{launched}");
    assert!(launched.contains("too many resources requested for launch"), "{launched}");
}

#[test]
#[cfg_attr(not(every_architecture), ignore = "XLA_ATTENTION_CUDA_ARCHS leaves kernels out")]
fn an_error_without_a_text_is_reported_by_name() {
    let [_, launched] = outcomes("earlier error");
    assert!(launched.contains("cuLaunchKernel: CUDA_ERROR_ILLEGAL_ADDRESS"), "{launched}");
}
