//! Kernels belong to a CUDA context. These tests create and reset contexts of a fake libcuda, whose functions launch
//! only in the context in which they were loaded.

use crate::support::device::{BufferPadding, Gpu};
use crate::support::fake_libcuda;
use crate::support::{Array, addition, runs_on_cpu};
use xla_attention::{Action, Stream};

const LAUNCH: Action = Action::LaunchCuda(Stream(0));

/// More contexts than a table of modules of a fixed size would hold.
const MANY: u32 = 200;

/// Makes a context current.
fn enter(address: u32, id: u32) {
    // SAFETY: this child process runs one test on one thread.
    unsafe { std::env::set_var("FAKE_LIBCUDA", format!("context {address:x} {id}")) };
}

/// Number of modules that the fake libcuda has loaded.
fn loads() -> i32 {
    type LoadsSoFar = extern "C" fn() -> i32;
    // SAFETY: the fake libcuda exports this function with this type.
    let symbol = unsafe { cudarc::driver::sys::culib().get::<LoadsSoFar>("loads_so_far".as_bytes()) };
    (*symbol.unwrap())()
}

#[test]
#[ignore = "runs in a separate process"]
fn child_with_many_contexts() {
    let mut failed = vec![];
    let mut visit = |address, id| {
        enter(address, id);
        failed.extend(fake_libcuda::add(LAUNCH).err().map(|error| format!("{address:x} {id}: {}", error.message)));
    };
    // Contexts at one address after resets, then each at another address, twice.
    (1..=MANY).for_each(|id| visit(0x1000, id));
    println!("outcome: {}", loads());
    for _ in 0..2 {
        (1..=MANY).for_each(|id| visit(0x2000 + 16 * id, MANY + id));
        println!("outcome: {}", loads());
    }
    // The last context of those at the common address.
    visit(0x1000, MANY);
    println!("outcome: {}", loads());
    println!("outcome: {failed:?}");
}

#[test]
#[cfg_attr(not(every_architecture), ignore = "XLA_ATTENTION_CUDA_ARCHS leaves kernels out")]
fn a_context_is_identified_by_its_id() {
    if !runs_on_cpu() {
        println!("skipped: with a fake libcuda only");
        return;
    }
    let reported = fake_libcuda::outcomes("cuda_contexts::child_with_many_contexts", "context 1000 1", true);
    let loads = [MANY, 2 * MANY, 2 * MANY, 2 * MANY].map(|loads| loads.to_string());
    assert_eq!(reported[..4], loads);
    assert_eq!(reported[4], "[]");
}

#[test]
#[cfg_attr(not(every_architecture), ignore = "XLA_ATTENTION_CUDA_ARCHS leaves kernels out")]
fn without_context_ids_a_context_is_identified_by_its_address() {
    if !runs_on_cpu() {
        println!("skipped: with a fake libcuda only");
        return;
    }
    let (name, behaviour) = ("cuda_contexts::child_with_two_contexts", "context 1000 1");
    assert_eq!(fake_libcuda::outcomes(name, behaviour, false), ["2"]);
}

#[test]
#[ignore = "runs in a separate process"]
fn child_with_two_contexts() {
    for (address, id) in [(0x1000, 1), (0x2000, 2), (0x1000, 1), (0x2000, 2)] {
        enter(address, id);
        fake_libcuda::add(LAUNCH).unwrap();
    }
    println!("outcome: {}", loads());
}

/// A reset removes everything that was loaded on the device.
#[test]
fn calls_work_after_a_device_reset() {
    if runs_on_cpu() {
        println!("skipped: XLA_ATTENTION_TEST_DEVICE=cuda chooses a GPU");
        return;
    }
    let reported =
        fake_libcuda::printed_outcomes(&mut fake_libcuda::child("cuda_contexts::child_that_resets_the_device"));
    assert_eq!(reported, ["[2.0, 4.0, 6.0]"; 3]);
}

#[test]
#[ignore = "runs in a separate process"]
fn child_that_resets_the_device() {
    let numbers = Array::f32s(&[3], &[1.0, 2.0, 3.0]);
    let call = addition(numbers.clone(), numbers);
    for _ in 0..3 {
        let results = call.run_on_gpu(&Gpu::first().unwrap(), BufferPadding::None, 0).unwrap();
        println!("outcome: {:?}", results[0].values());
        // SAFETY: nothing else in this process uses the device.
        let reset = unsafe { cudarc::driver::sys::cuDevicePrimaryCtxReset_v2(0) };
        assert_eq!(reset, cudarc::driver::sys::CUresult::CUDA_SUCCESS);
    }
}
