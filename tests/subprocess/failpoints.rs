//! An armed failpoint in each layer becomes an error that names the layer, and the next call succeeds.
//!
//! The failpoints are triggered through the handlers, as XLA calls them, and through the C interface; those of the CUDA
//! backend with a fake libcuda, or with `XLA_ATTENTION_TEST_DEVICE=cuda` on a GPU.

use crate::support::valid_calls;
use crate::support::{
    Array, CPU, F32, Frame, HostPool, INTERNAL, InlinePool, Invocation, Refusal, Side, ThreadPool, addition, c_call,
    c_request, c_tensor, runs_on_cpu,
};
use std::ffi::{CStr, c_char};
use xla_attention::{Failpoint, arm, xa_info, xa_op, xa_targets};

/// An addition of this many elements, which the CPU backend divides into tasks of 2^15.
fn long_addition(elements: usize) -> Invocation {
    let numbers = |first: usize| {
        Array::f32s(&[elements as i64], &(0..elements).map(|i| (first + i % 1000) as f32).collect::<Vec<_>>())
    };
    addition(numbers(3), numbers(40))
}

/// The operator's name in error messages, which is the same for both targets of `simple_add`.
fn name(call: &Invocation) -> &str {
    if call.target == "XlaGpuSimpleAdd" { "xla_gpu_simple_add" } else { call.target }
}

fn assert_reported(outcome: Result<Vec<Array>, Refusal>, call: &Invocation, text: &str) {
    let expected = Refusal { code: INTERNAL, text: format!("{}: {text}", name(call)) };
    assert_eq!(outcome.unwrap_err(), expected);
}

/// Failpoints in the handlers of every platform.
const HANDLER_FAILPOINTS: [(Failpoint, &str); 4] = [
    (Failpoint::ShimException, "C++ exception: failpoint: ShimException"),
    (Failpoint::ShimThrow, "C++ exception: without a text"),
    (Failpoint::Bridge, "panic: failpoint: Bridge"),
    (Failpoint::Problem, "panic: failpoint: Problem"),
];

#[test]
fn every_layer_of_a_cpu_handler_reports_its_failpoint_and_the_next_call_is_right() {
    for call in valid_calls::all() {
        let on_cpu = || call.outcome_in(Frame::new(call.target, CPU));
        let expected = on_cpu().unwrap();
        for (failpoint, text) in HANDLER_FAILPOINTS {
            arm(failpoint);
            assert_reported(on_cpu(), &call, text);
            assert_eq!(on_cpu().unwrap(), expected, "{} after {failpoint:?}", call.target);
        }
        arm(Failpoint::CpuCaller);
        let refusal = on_cpu().unwrap_err();
        assert_eq!(refusal.code, INTERNAL);
        assert!(refusal.text.starts_with(&format!("{}: 1 of ", name(&call))), "{}", refusal.text);
        assert!(refusal.text.ends_with(" parallel tasks panicked: failpoint: CpuCaller"), "{}", refusal.text);
        assert_eq!(on_cpu().unwrap(), expected, "{} after a panic in a task", call.target);
    }
}

#[test]
fn a_failpoint_on_a_pool_thread_is_reported_and_the_thread_continues() {
    let call = long_addition(3 << 15);
    let threads = ThreadPool::new(3);
    let on = |pool: &dyn HostPool| call.outcome_in(Frame::new(call.target, CPU).pool(pool));
    let expected = on(&InlinePool(1)).unwrap();
    for _ in 0..10 {
        arm(Failpoint::CpuWorker);
        assert_reported(on(&threads), &call, "1 of 3 parallel tasks panicked: failpoint: CpuWorker");
        assert_eq!(on(&threads).unwrap(), expected);
    }
}

/// Adds on the CPU through `xa_call`. Returns its code, its text and the sums.
fn c_addition(a: &[f32], b: &[f32]) -> ((i32, String), Vec<f32>) {
    let mut out = vec![0.0f32; a.len()];
    let dims = [a.len() as i64];
    let tensor = |data: *const f32| c_tensor(F32, &dims, None, data.cast_mut().cast());
    let (operands, results) = ([tensor(a.as_ptr()), tensor(b.as_ptr())], [tensor(out.as_mut_ptr())]);
    (c_call(&c_request(0, 1, &operands, &results)), out)
}

#[test]
fn every_layer_below_xa_call_reports_its_failpoint_and_the_next_call_is_right() {
    let numbers: Vec<f32> = (0..70_000).map(|i: i32| i as f32).collect();
    let sums: Vec<f32> = numbers.iter().map(|x| x + x).collect();
    let mut failpoints = vec![
        (Failpoint::CApi, "xa_call: panic: failpoint: CApi"),
        (Failpoint::Problem, "xla_gpu_simple_add: panic: failpoint: Problem"),
        (Failpoint::CpuCaller, "xla_gpu_simple_add: 1 of 3 parallel tasks panicked: failpoint: CpuCaller"),
    ];
    if std::thread::available_parallelism().is_ok_and(|threads| threads.get() > 1) {
        failpoints
            .push((Failpoint::CpuWorker, "xla_gpu_simple_add: 1 of 3 parallel tasks panicked: failpoint: CpuWorker"));
    }
    for (failpoint, text) in failpoints {
        arm(failpoint);
        assert_eq!(c_addition(&numbers, &numbers).0, (INTERNAL, text.to_owned()));
        assert_eq!(c_addition(&numbers, &numbers), ((0, String::new()), sums.clone()), "after {failpoint:?}");
    }
}

#[test]
fn functions_without_an_error_return_their_failure_value() {
    arm(Failpoint::CApi);
    assert!(xa_targets().is_null());
    assert!(!xa_targets().is_null());
    arm(Failpoint::CApi);
    assert!(xa_info().is_null());
    assert!(!xa_info().is_null());
    // SAFETY: the name is a terminated string.
    let number = || unsafe { xa_op(c"xla_gpu_paged_attention".as_ptr()) };
    arm(Failpoint::CApi);
    assert_eq!(number(), -1);
    assert_eq!(number(), 1);
    let workspace = || {
        let mut c = [-1; 3];
        // SAFETY: `c` has room for three numbers.
        unsafe { xla_attention::xa_workspace(1, 8, 2, 128, 128, 16, false, &raw mut c) };
        c
    };
    arm(Failpoint::CApi);
    assert_eq!(workspace(), [0; 3]);
    assert_ne!(workspace(), [0; 3]);
    let bias_workspace = || {
        let mut c = [-1; 2];
        // SAFETY: `c` has room for two numbers.
        unsafe {
            xla_attention::xa_bias_workspace(4, 8, 128, 128, 16, false, 77, 16, true, false, false, 0, 0, &raw mut c);
        }
        c
    };
    arm(Failpoint::CApi);
    assert_eq!(bias_workspace(), [0; 2]);
    assert_eq!(bias_workspace()[1], 160);
}

#[cfg(feature = "cuda")]
#[test]
fn the_pjrt_functions_report_a_failpoint() {
    arm(Failpoint::CApi);
    assert!(xla_attention::GetPjrtApi().is_null());
    let mut text = [0 as c_char; 256];
    arm(Failpoint::CApi);
    // SAFETY: the name is terminated, and `text` has the given length.
    let code =
        unsafe { xla_attention::xa_stand_before_pjrt_plugin(c"/nowhere".as_ptr(), text.as_mut_ptr(), text.len()) };
    // SAFETY: the call has terminated the text.
    let text = unsafe { CStr::from_ptr(text.as_ptr()) }.to_str().unwrap();
    assert_eq!((code, text), (INTERNAL, "xa_stand_before_pjrt_plugin: panic: failpoint: CApi"));
}

#[cfg(feature = "cuda")]
mod cuda {
    use super::*;
    use crate::support::fake_libcuda;
    use crate::support::{CUDA, Stage, target};

    #[test]
    #[cfg_attr(not(every_architecture), ignore = "XLA_ATTENTION_CUDA_ARCHS leaves kernels out")]
    fn every_layer_of_a_cuda_handler_reports_its_failpoint_and_the_next_call_works() {
        if !runs_on_cpu() {
            println!("skipped: the fake libcuda is for machines without a GPU");
            return;
        }
        let reported = fake_libcuda::outcomes("failpoints::cuda::child_that_calls_the_cuda_handlers", "none", false);
        assert_eq!(reported.last().map(String::as_str), Some("done"), "{reported:?}");
    }

    #[test]
    #[ignore = "runs in a separate process"]
    fn child_that_calls_the_cuda_handlers() {
        // An earlier target has already loaded the kernels of these targets.
        let shares_its_kernel = [
            "XlaGpuSimpleAdd",
            "xla_gpu_kv_cache_update_split",
            "xla_gpu_paged_attention",
            "xla_gpu_paged_attention_update",
            "xla_gpu_mla_paged_attention_update",
        ];
        for call in valid_calls::all() {
            let row = target(call.target, CUDA);
            for (stage, handler) in [(Stage::Initialize, row.initialize), (Stage::Execute, row.execute)] {
                let call_handler = || call.outcome_in(Frame::of(handler.unwrap(), stage).stream(1));
                let mut failpoints = HANDLER_FAILPOINTS.to_vec();
                if stage == Stage::Execute {
                    failpoints.push((Failpoint::CudaLaunch, "panic: failpoint: CudaLaunch"));
                } else if !shares_its_kernel.contains(&call.target) {
                    failpoints.push((Failpoint::CudaLoad, "panic: failpoint: CudaLoad"));
                }
                for (failpoint, text) in failpoints {
                    arm(failpoint);
                    assert_reported(call_handler(), &call, text);
                }
                call_handler().unwrap();
            }
        }
        println!("outcome: done");
    }

    #[test]
    fn a_failpoint_on_a_gpu_leaves_the_context_usable() {
        if runs_on_cpu() {
            println!("skipped: XLA_ATTENTION_TEST_DEVICE does not choose a GPU");
            return;
        }
        let call = long_addition(1000);
        let on_gpu = || call.run(Side::EndsAtGuard, &InlinePool(1));
        for (failpoint, text) in [
            (Failpoint::Problem, "panic: failpoint: Problem"),
            (Failpoint::CudaLoad, "panic: failpoint: CudaLoad"),
            (Failpoint::CudaLaunch, "panic: failpoint: CudaLaunch"),
        ] {
            arm(failpoint);
            assert_reported(on_gpu(), &call, text);
            if failpoint != Failpoint::Problem {
                assert_eq!(on_gpu().unwrap(), call.outcome_in(Frame::new(call.target, CPU)).unwrap());
            }
        }
    }
}
