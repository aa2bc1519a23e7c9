//! The protocol between XLA and the handlers apart from calls: metadata, stages, threads.

use crate::support::c_structs::FRAME_STRUCT_SIZE;
use crate::support::conformance::tables;
use crate::support::valid_calls;
use crate::support::{
    Array, AttentionCase, BatchSpec, CPU, CUDA, DeferredPool, Frame, Handler, HandlerMetadata, I32, INVALID_ARGUMENT,
    InlinePool, InvalidMetadata, Invocation, MemoryLayout, MetadataRequest, Refusal, Side, Stage, ThreadPool, addition,
    assert_matches_expected, expected_rows, handler_sets, request_metadata,
};
use std::collections::BTreeSet;
use std::ffi::CStr;

/// The targets in the tables.
fn names() -> impl Iterator<Item = &'static str> {
    tables().iter().flat_map(|table| table.interface.names.iter().copied())
}

fn platforms() -> Vec<&'static str> {
    if cfg!(feature = "cuda") { vec![CPU, CUDA] } else { vec![CPU] }
}

/// A handler, and its registration.
#[derive(Clone, Copy)]
pub(crate) struct Registered {
    pub(crate) version: (i32, i32),
    pub(crate) name: &'static str,
    pub(crate) platform: &'static str,
    pub(crate) stage: Stage,
    pub(crate) handler: Handler,
}

impl Registered {
    pub(crate) fn label(&self) -> String {
        format!("{} on {}, {:?}, API {:?}", self.name, self.platform, self.stage, self.version)
    }

    /// Its metadata, as the oldest host that accepts it reads them.
    pub(crate) fn metadata(&self) -> HandlerMetadata {
        request_metadata(self.handler, MetadataRequest::of(self.version))
            .unwrap_or_else(|e| panic!("{}: metadata call refused: {e:?}", self.label()))
    }
}

/// The handlers of all sets.
pub(crate) fn handlers() -> Vec<Registered> {
    let mut all = Vec::new();
    for set in handler_sets() {
        for name in names() {
            for platform in platforms() {
                let row = set.target(name, platform);
                let stages = [(Stage::Initialize, row.initialize), (Stage::Execute, row.execute)];
                all.extend(stages.into_iter().filter_map(|(stage, handler)| {
                    handler.map(|handler| Registered { version: set.version, name, platform, stage, handler })
                }));
            }
        }
    }
    all
}

#[test]
fn each_set_holds_every_target_for_every_platform_once() {
    // SAFETY: the table holds C strings that live as long as the library.
    let text = |p| unsafe { CStr::from_ptr(p) }.to_str().unwrap();
    let expected: BTreeSet<_> = names().flat_map(|n| platforms().into_iter().map(move |p| (n, p))).collect();
    for set in handler_sets() {
        let actual: Vec<(&str, &str)> = set.rows.iter().map(|t| (text(t.name), text(t.platform))).collect();
        assert_eq!(actual.iter().copied().collect::<BTreeSet<_>>(), expected);
        assert_eq!(actual.len(), expected.len(), "{actual:?}");
        for row in set.rows {
            // XLA never calls initialize on the CPU. On CUDA it loads the modules, which is not possible during
            // capture.
            assert_eq!(row.initialize.is_some(), text(row.platform) == CUDA, "{}", text(row.name));
            assert!(row.execute.is_some());
        }
    }
}

#[test]
fn the_sets_have_the_pinned_versions_and_no_common_handler() {
    let versions: Vec<_> = handler_sets().iter().map(|set| set.version).collect();
    assert_eq!(versions, [(0, 1), (0, 5)]);
    let addresses: BTreeSet<usize> = handlers().iter().map(|h| h.handler as usize).collect();
    // XlaGpuSimpleAdd has the handlers of xla_gpu_simple_add.
    assert_eq!(addresses.len() * names().count(), handlers().len() * (names().count() - 1));
}

#[test]
fn the_exported_table_is_the_table_of_the_crate() {
    // SAFETY: the table lives as long as the process.
    let table = unsafe { &*xla_attention::xa_targets() };
    assert_eq!((table.struct_size, table.api_major, table.api_minor), (32, 0, 1));
    assert_eq!((table.rows, table.count), (xla_attention::targets().as_ptr(), xla_attention::targets().len()));
}

#[test]
fn every_handler_reports_the_version_of_its_set() {
    assert!(!handlers().is_empty());
    for registered in handlers() {
        // A handler whose structure is longer than that of this version faults.
        let metadata = registered.metadata();
        assert_eq!((metadata.major, metadata.minor), registered.version, "{}", registered.label());
    }
}

#[test]
fn every_cuda_handler_may_be_captured_in_a_command_buffer() {
    for registered in handlers() {
        let metadata = registered.metadata();
        assert_eq!(metadata.command_buffer_compatible, registered.platform == CUDA, "{}", registered.label());
    }
}

fn invalid(text: impl Into<String>) -> Result<(), Refusal> {
    Err(Refusal { code: INVALID_ARGUMENT, text: text.into() })
}

#[test]
fn a_frame_of_another_size_is_refused() {
    for size in [0, FRAME_STRUCT_SIZE - 8, FRAME_STRUCT_SIZE + 8] {
        for Registered { stage, handler, .. } in handlers() {
            let text = format!(
                "Unexpected XLA_FFI_CallFrame size: expected 168 got {size}. Check installed software versions."
            );
            assert_eq!(Frame::of(handler, stage).struct_size(size).run(), invalid(text));
        }
    }
}

#[test]
fn a_handler_refuses_to_run_in_another_stage() {
    let name = |stage| format!("{stage:?}").to_lowercase();
    for Registered { stage: own, handler, .. } in handlers() {
        for stage in [Stage::Instantiate, Stage::Prepare, Stage::Initialize, Stage::Execute] {
            if stage != own {
                let text = format!("Wrong execution stage: expected `{}` but got `{}`", name(own), name(stage));
                assert_eq!(Frame::of(handler, stage).run(), invalid(text));
            }
        }
    }
}

fn on_cpu(call: &Invocation) -> Result<Vec<Array>, Refusal> {
    call.run_on_cpu(Side::EndsAtGuard, &InlinePool(4))
}

#[test]
fn an_error_does_not_poison_the_next_call() {
    for call in valid_calls::all() {
        let expected = on_cpu(&call).unwrap();
        let mut wrong = call.clone();
        wrong.operands[0].1 = Array::filled(I32, &[1, 2, 3, 4, 5, 6], 0);
        on_cpu(&wrong).unwrap_err();
        wrong.operands.pop();
        on_cpu(&wrong).unwrap_err();
        let after = on_cpu(&call).unwrap();
        // The workspace is scratch memory. The other results come before it.
        let results = call.results.iter().filter(|r| r.name != "workspace").count();
        assert!(after[..results] == expected[..results], "{}", call.target);
    }
}

#[test]
fn many_threads_may_call_at_once_with_one_pool() {
    let spec = BatchSpec { lengths: vec![(1, 60), (17, 20), (2, 9)], ..BatchSpec::default() };
    let case = AttentionCase::paged(&spec.batch(), &MemoryLayout::default());
    let expected_rows = expected_rows(&case, InvalidMetadata::Unspecified);
    let attention = case.invocation();
    let expected = on_cpu(&attention).unwrap();
    let [a, b, sums] = [1.5, 2.0, 3.5].map(|x| Array::f32s(&[70_000], &vec![x; 70_000]));
    let add = addition(a, b);
    let pool = ThreadPool::new(2);
    std::thread::scope(|scope| {
        for _ in 0..8 {
            scope.spawn(|| {
                for round in 0..12 {
                    let side = if round % 2 == 0 { Side::EndsAtGuard } else { Side::BeginsAtGuard };
                    let results = attention.run_on_cpu(side, &pool).unwrap();
                    assert_matches_expected(&case, &expected_rows, &results[0], Some(&results[1]));
                    assert!(results[..2] == expected[..2]);
                    assert!(add.run_on_cpu(side, &pool).unwrap()[0] == sums);
                    valid_calls::in_layout("xla_gpu_kv_cache_update", 2).run_on_cpu(side, &pool).unwrap();
                }
            });
        }
    });
}

#[test]
fn a_handler_that_runs_on_the_only_thread_of_its_pool_does_not_wait_for_it() {
    // The only worker of the pool is busy with this call until the call returns.
    let call = AttentionCase::paged(&BatchSpec::default().batch(), &MemoryLayout::default()).invocation();
    let late = DeferredPool::default();
    call.run_on_cpu(Side::EndsAtGuard, &late).unwrap();
    late.run_all();
    call.run_on_cpu(Side::EndsAtGuard, &InlinePool(1)).unwrap();
}
