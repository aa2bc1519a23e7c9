//! GPU only: captured graphs that are replayed many times, and a first call during capture.

use crate::support::device::{BufferPadding, Gpu};
use crate::support::valid_calls;
use crate::support::{
    AttentionCase, BatchSpec, Dtypes, F32, InvalidMetadata, KvLayout, Mask, MemoryLayout, assert_matches_expected,
    expected_rows,
};

#[test]
fn a_graph_replayed_a_thousand_times_gives_the_bits_of_one_launch() {
    let Some(gpu) = Gpu::or_skip() else { return };
    let lengths = vec![(1, 90), (40, 75), (0, 4), (1, 1), (1, 900)];
    for dtypes in Dtypes::ALL {
        let batch = BatchSpec { dtypes, lengths: lengths.clone(), ..BatchSpec::default() }.batch();
        let full = batch.with_config(|config| config.mask = Mask::FULL);
        for case in [
            AttentionCase::paged(&batch, &MemoryLayout::default()),
            AttentionCase::flash(&full, &MemoryLayout::contiguous()),
            AttentionCase::flash(
                &full,
                &MemoryLayout { workspace: Some(4_000_000), ..MemoryLayout::paged(KvLayout::Split, 16) },
            ),
        ] {
            let call = case.invocation();
            let once = call.run_on_gpu(&gpu, BufferPadding::Redzones, 0).unwrap();
            assert_matches_expected(
                &case,
                &expected_rows(&case, InvalidMetadata::Unspecified),
                &once[0],
                Some(&once[1]),
            );
            let often = call.run_on_gpu(&gpu, BufferPadding::Redzones, 1000).unwrap();
            assert!(once[..2] == often[..2], "{dtypes:?}");
        }
    }
}

#[test]
fn every_operator_can_be_captured() {
    let Some(gpu) = Gpu::or_skip() else { return };
    for call in valid_calls::all() {
        let direct = call.run_on_gpu(&gpu, BufferPadding::Redzones, 0).unwrap();
        let captured = call.run_on_gpu(&gpu, BufferPadding::Redzones, 3).unwrap();
        for (index, result) in call.results.iter().enumerate().filter(|(_, r)| r.name != "workspace") {
            assert!(direct[index] == captured[index], "{}: {}", call.target, result.name);
        }
    }
}

#[test]
fn a_call_that_finds_its_module_missing_loads_it_inside_a_capture() {
    let Some(gpu) = Gpu::or_skip() else { return };
    // A kernel variant that no other test of this process loads: f32, with a soft cap, for this head dimension.
    let dtypes = F32.into();
    let spec = BatchSpec { dtypes, head_dim: 200, softcap: 3.0, lengths: vec![(3, 9)], ..BatchSpec::default() };
    let case = AttentionCase::paged(&spec.batch(), &MemoryLayout::default());
    let captured = case.invocation().run_unprepared(&gpu).unwrap();
    assert_matches_expected(
        &case,
        &expected_rows(&case, InvalidMetadata::Unspecified),
        &captured[0],
        Some(&captured[1]),
    );
}
