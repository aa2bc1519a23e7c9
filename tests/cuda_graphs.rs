//! What only a GPU can show: a captured graph replayed many times, and a first call that happens inside a capture.

#![cfg(feature = "cuda")]
#![allow(clippy::unwrap_used, clippy::print_stdout, reason = "a failed step is a failed test; a skipped one says so")]

mod support;

use support::array::{ATTENTION_DTYPES, F32};
use support::cases::{PagedCase, Shape, Storage};
use support::device::{Around, Gpu};
use support::oracle::{IfWrong, assert_allowed, paged_attention};
use support::right_calls;

fn gpu() -> Option<Gpu> {
    let gpu = Gpu::first();
    if gpu.is_none() {
        println!("skipped: this machine has no GPU");
    }
    gpu
}

#[test]
fn a_graph_replayed_a_thousand_times_gives_the_bits_of_one_launch() {
    let Some(gpu) = gpu() else { return };
    for dtype in ATTENTION_DTYPES {
        let shape = Shape { dtype, lengths: vec![(1, 90), (40, 75), (0, 4), (1, 1)], ..Shape::default() };
        let case = PagedCase::store(&shape.batch(), &Storage::default());
        let call = case.invocation();
        let once = call.run_on_gpu(&gpu, Around::Redzones, 0).unwrap();
        assert_allowed(&case, &paged_attention(&case, IfWrong::Unspecified), &once[0], Some(&once[1]));
        let often = call.run_on_gpu(&gpu, Around::Redzones, 1000).unwrap();
        assert!(once[..2] == often[..2], "{dtype:?}");
    }
}

#[test]
fn every_operator_can_be_captured() {
    let Some(gpu) = gpu() else { return };
    for call in right_calls::all() {
        let direct = call.run_on_gpu(&gpu, Around::Redzones, 0).unwrap();
        let captured = call.run_on_gpu(&gpu, Around::Redzones, 3).unwrap();
        for (index, result) in call.results.iter().enumerate().filter(|(_, r)| r.name != "workspace") {
            assert!(direct[index] == captured[index], "{}: {}", call.target, result.name);
        }
    }
}

#[test]
fn a_call_that_finds_its_module_missing_loads_it_inside_a_capture() {
    let Some(gpu) = gpu() else { return };
    // A variant that no other test of this process uses: f32, soft cap, one head dimension.
    let shape = Shape { dtype: F32, head_dim: 200, soft_cap: 3.0, lengths: vec![(3, 9)], ..Shape::default() };
    let case = PagedCase::store(&shape.batch(), &Storage::default());
    let captured = case.invocation().run_unprepared(&gpu).unwrap();
    assert_allowed(&case, &paged_attention(&case, IfWrong::Unspecified), &captured[0], Some(&captured[1]));
}
