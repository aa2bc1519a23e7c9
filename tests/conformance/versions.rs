//! Hosts of another API version than 0.1: longer and shorter tables and structures, metadata asked for without a table.

use crate::protocol::handlers;
use crate::support::c_structs::MetadataExtension;
use crate::support::frame::{
    CPU, Frame, HandlerMetadata, INVALID_ARGUMENT, MetadataRequest, OtherApi, Refusal, Stage, metadata,
    request_metadata,
};
use crate::support::guard::Side;
use crate::table::cases;
use std::mem::size_of;

/// Entries of the host's table: jaxlib 0.5.0, the oldest that JAX's front-end takes, ends before `RunId_Get`; 0.10.2
/// has what 0.1 has; later ones append (`Error_GetCode`, collectives).
const TABLES: [((i32, i32), usize); 4] = [((0, 1), 16), ((0, 2), 18), ((0, 3), 18), ((0, 4), 40)];

#[test]
fn calls_work_and_are_refused_under_older_and_newer_tables() {
    let mut ran = 0;
    for (version, entries) in TABLES {
        let api = OtherApi::new(version, entries);
        for case in cases().filter(|c| c.memory.is_none() && (c.name == "the right call" || c.name == "0 operands")) {
            ran += 1;
            let frame = Frame::new(case.target, CPU).api(&api);
            let outcome = case.invocation(false).run_in(frame, Side::EndsAtGuard);
            assert_eq!(outcome.err(), case.refusal, "{} under API {version:?}: {}", case.target, case.name);
        }
    }
    assert_eq!(ran, TABLES.len() * 2 * 10);
}

#[test]
fn metadata_is_told_at_every_stage_and_without_a_table() {
    for (name, platform, stage, handler) in handlers() {
        let said = metadata(handler);
        for stage_of_frame in [Stage::Instantiate, Stage::Prepare, Stage::Initialize, Stage::Execute] {
            for with_api in [true, false] {
                let request = MetadataRequest { with_api, stage: stage_of_frame, ..MetadataRequest::default() };
                assert_eq!(request_metadata(handler, request), Ok(said), "{name} {platform} {stage:?}");
            }
        }
    }
}

#[test]
fn metadata_is_told_to_hosts_whose_structures_are_longer_and_refused_to_shorter_ones() {
    for (name, platform, _, handler) in handlers() {
        let said: HandlerMetadata = metadata(handler);
        let request = |metadata_size, extension_size| {
            request_metadata(handler, MetadataRequest { extension_size, metadata_size, ..MetadataRequest::default() })
        };
        let extension = size_of::<MetadataExtension>();
        // API 0.2 appends `state_type_id`, eight bytes.
        for (metadata_size, extension_size) in [(36, extension), (44, extension), (48, extension + 8), (200, 100)] {
            assert_eq!(request(metadata_size, extension_size), Ok(said), "{name} {platform} {metadata_size}");
        }
        let shorter = |what: &str, expected: usize, got: usize| {
            let text = format!(
                "Unexpected {what} size: expected at least {expected} got {got}. Check installed software versions."
            );
            Err(Refusal { code: INVALID_ARGUMENT, text })
        };
        assert_eq!(request(32, extension), shorter("XLA_FFI_Metadata", 36, 32));
        assert_eq!(request(36, 24), shorter("XLA_FFI_Metadata_Extension", extension, 24));
    }
}
