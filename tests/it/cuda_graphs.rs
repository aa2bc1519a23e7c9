//! What only a GPU can show: a captured graph replayed many times, and a first call that happens inside a capture.

use crate::support::device::{Around, Gpu};
use crate::support::right_calls;
use crate::support::{Case, Dtypes, F32, IfWrong, Layout, Mask, Shape, Storage, answers, assert_allowed};

#[test]
fn a_graph_replayed_a_thousand_times_gives_the_bits_of_one_launch() {
    let Some(gpu) = Gpu::or_skip() else { return };
    let lengths = vec![(1, 90), (40, 75), (0, 4), (1, 1), (1, 900)];
    for dtypes in Dtypes::ALL {
        let batch = Shape { dtypes, lengths: lengths.clone(), ..Shape::default() }.batch();
        let full = batch.with_form(|form| form.mask = Mask::FULL);
        for case in [
            Case::paged(&batch, &Storage::default()),
            Case::flash(&full, &Storage::contiguous()),
            Case::flash(&full, &Storage { workspace: Some(4_000_000), ..Storage::paged(Layout::Split, 16) }),
        ] {
            let call = case.invocation();
            let once = call.run_on_gpu(&gpu, Around::Redzones, 0).unwrap();
            assert_allowed(&case, &answers(&case, IfWrong::Unspecified), &once[0], Some(&once[1]));
            let often = call.run_on_gpu(&gpu, Around::Redzones, 1000).unwrap();
            assert!(once[..2] == often[..2], "{dtypes:?}");
        }
    }
}

#[test]
fn every_operator_can_be_captured() {
    let Some(gpu) = Gpu::or_skip() else { return };
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
    let Some(gpu) = Gpu::or_skip() else { return };
    // A variant that no other test of this process uses: f32, soft cap, one head dimension.
    let dtypes = F32.into();
    let shape = Shape { dtypes, head_dim: 200, softcap: 3.0, lengths: vec![(3, 9)], ..Shape::default() };
    let case = Case::paged(&shape.batch(), &Storage::default());
    let captured = case.invocation().run_unprepared(&gpu).unwrap();
    assert_allowed(&case, &answers(&case, IfWrong::Unspecified), &captured[0], Some(&captured[1]));
}
