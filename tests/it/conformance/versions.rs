//! Hosts whose API version differs from that of the handlers: longer and shorter tables and structures, requests for
//! metadata without a table, and the handlers that a host accepts.

use super::mismatch;
use super::protocol::{Registered, handlers};
use crate::support::c_structs::MetadataExtension;
use crate::support::conformance::{cases, tables};
use crate::support::{
    CPU, HandlerSet, HostApiTable, INVALID_ARGUMENT, MetadataRequest, Refusal, Side, Stage, handler_sets,
    request_metadata,
};
use std::mem::size_of;

/// API versions of hosts, and the number of entries in their tables. The table of jaxlib 0.5.0, the oldest version that
/// the JAX front-end supports, ends before `RunId_Get`; 0.10.2 has the table of API 0.1; 0.12.0 has two more entries;
/// later versions append further ones.
const TABLES: [((i32, i32), usize); 6] =
    [((0, 1), 16), ((0, 2), 18), ((0, 3), 18), ((0, 4), 40), ((0, 5), 20), ((0, 6), 40)];

#[test]
fn calls_work_and_are_refused_under_older_and_newer_tables() {
    let mut ran = 0;
    for (version, entries) in TABLES {
        let api = HostApiTable::new(version, entries);
        for set in handler_sets().into_iter().filter(|set| set.version <= version) {
            for case in cases().filter(|c| c.memory.is_none() && (c.name == "the valid call" || c.name == "0 operands"))
            {
                ran += 1;
                let frame = set.frame(case.target, CPU).api(&api);
                let outcome = case.invocation(false).run_in(frame, Side::EndsAtGuard);
                let refusal = case.refusal.as_ref().map(|refusal| set.expected_refusal(Stage::Execute, refusal));
                assert_eq!(outcome.err(), refusal, "{} under API {version:?}: {}", case.target, case.name);
            }
        }
    }
    let targets: usize = tables().iter().map(|table| table.interface.names.len()).sum();
    assert_eq!(ran, (TABLES.len() + 2) * 2 * targets);
}

/// The set that a front-end registers with a host of version `newest` that accepts handlers from `oldest` on: the last
/// set up to `newest` of which the host accepts every handler.
fn registered(oldest: (i32, i32), newest: (i32, i32)) -> Option<HandlerSet> {
    let accepts = |set: &HandlerSet| {
        handlers().iter().filter(|h| h.version == set.version).all(|handler| {
            let metadata = handler.metadata();
            (oldest..=newest).contains(&(metadata.major, metadata.minor))
        })
    };
    handler_sets().into_iter().rev().filter(|set| set.version <= newest).find(accepts)
}

#[test]
fn a_host_that_has_dropped_0_1_takes_the_newest_set_whose_handlers_do_what_the_tables_say() {
    let version = |oldest, newest| registered((0, oldest), (0, newest)).map(|set| set.version);
    assert_eq!(version(1, 1), Some((0, 1)));
    assert_eq!(version(1, 4), Some((0, 1)));
    assert_eq!(version(1, 5), Some((0, 5)));
    assert_eq!(version(2, 4), None);
    let set = registered((0, 2), (0, 7)).unwrap();
    assert_eq!(set.version, (0, 5));

    let api = HostApiTable::new((0, 7), 24);
    let mut ran = 0;
    for case in cases().filter(|case| case.memory.is_none()) {
        ran += 1;
        let outcome = case.invocation(false).run_in(set.frame(case.target, CPU).api(&api), Side::EndsAtGuard);
        assert_eq!(mismatch(set, case, outcome), None);
    }
    assert!(ran >= 500, "{ran} cases");
}

#[test]
fn metadata_is_returned_at_every_stage_and_without_a_table() {
    for registered in handlers() {
        let metadata = registered.metadata();
        for stage in [Stage::Instantiate, Stage::Prepare, Stage::Initialize, Stage::Execute] {
            for with_api in [true, false] {
                let request = MetadataRequest { with_api, stage, ..MetadataRequest::of(registered.version) };
                assert_eq!(
                    request_metadata(registered.handler, request),
                    Ok(metadata),
                    "{} {stage:?}",
                    registered.label()
                );
            }
        }
    }
}

#[test]
fn metadata_is_returned_to_hosts_with_longer_structures_and_refused_to_shorter_ones() {
    for registered @ Registered { version, handler, .. } in handlers() {
        let metadata = registered.metadata();
        let request = |metadata_size, extension_size| {
            let request = MetadataRequest { extension_size, metadata_size, ..MetadataRequest::of(version) };
            request_metadata(handler, request)
        };
        let extension = size_of::<MetadataExtension>();
        // API 0.2 appends `state_type_id`, which has eight bytes.
        for (metadata_size, extension_size) in [(36, extension), (44, extension), (48, extension + 8), (200, 100)] {
            assert_eq!(request(metadata_size, extension_size), Ok(metadata), "{} {metadata_size}", registered.label());
        }
        let shorter = |struct_name: &str, expected: usize, got: usize| {
            let text = format!(
                "Unexpected {struct_name} size: expected at least {expected} got {got}. Check installed software versions."
            );
            Err(Refusal { code: INVALID_ARGUMENT, text })
        };
        assert_eq!(request(32, extension), shorter("XLA_FFI_Metadata", 36, 32));
        assert_eq!(request(36, 24), shorter("XLA_FFI_Metadata_Extension", extension, 24));
    }
}
