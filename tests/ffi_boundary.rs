//! What XLA and the handlers say to each other: metadata, stages, counts, attribute types, threads.

#![allow(clippy::unwrap_used, reason = "a failed step is a failed test")]

mod support;

use std::collections::BTreeSet;
use std::ffi::CStr;
use support::answers::{IfWrong, answers, assert_allowed};
use support::array::{Array, F32, I32, U8};
use support::batch::Shape;
use support::c_structs::FRAME_STRUCT_SIZE;
use support::case::Case;
use support::frame::{CPU, CUDA, Frame, Handler, INVALID_ARGUMENT, Refusal, Stage, metadata, target};
use support::guard::Side;
use support::invocation::{Attr, Invocation};
use support::pools::{Inline, Late, Threads};
use support::right_calls;
use support::storage::Storage;

const NAMES: [&str; 8] = [
    "xla_gpu_simple_add",
    "XlaGpuSimpleAdd",
    "xla_gpu_paged_attention",
    "xla_gpu_flash_attn_varlen",
    "xla_gpu_kv_cache_update",
    "xla_gpu_kv_cache_update_split",
    "xla_gpu_merge_attention_states",
    "xla_gpu_rope_kv_cache_update",
];

fn platforms() -> Vec<&'static str> {
    if cfg!(feature = "cuda") { vec![CPU, CUDA] } else { vec![CPU] }
}

/// Every handler there is: (target, platform, stage, handler).
fn handlers() -> Vec<(&'static str, &'static str, Stage, Handler)> {
    let mut all = Vec::new();
    for name in NAMES {
        for platform in platforms() {
            let row = target(name, platform);
            let stages = [(Stage::Initialize, row.initialize), (Stage::Execute, row.execute)];
            all.extend(stages.into_iter().filter_map(|(stage, h)| h.map(|h| (name, platform, stage, h))));
        }
    }
    all
}

#[test]
fn the_table_holds_every_target_for_every_platform_once() {
    // SAFETY: the table holds C strings that live as long as the library.
    let text = |p| unsafe { CStr::from_ptr(p) }.to_str().unwrap();
    let found: Vec<(&str, &str)> = xla_attention::targets().iter().map(|t| (text(t.name), text(t.platform))).collect();
    let expected: BTreeSet<_> = NAMES.into_iter().flat_map(|n| platforms().into_iter().map(move |p| (n, p))).collect();
    assert_eq!(found.iter().copied().collect::<BTreeSet<_>>(), expected);
    assert_eq!(found.len(), expected.len(), "{found:?}");
    for row in xla_attention::targets() {
        // On the CPU XLA never calls initialize; on CUDA it must not find modules missing under capture.
        assert_eq!(row.initialize.is_some(), text(row.platform) == CUDA, "{}", text(row.name));
        assert!(row.execute.is_some());
    }
}

#[test]
fn the_exported_table_is_the_table_of_the_crate() {
    // SAFETY: the table lives as long as the process.
    let table = unsafe { &*xla_attention::xa_targets() };
    assert_eq!((table.struct_size, table.api_major, table.api_minor), (32, 0, 1));
    assert_eq!((table.rows, table.count), (xla_attention::targets().as_ptr(), xla_attention::targets().len()));
}

#[test]
fn every_handler_says_that_it_is_of_api_0_1() {
    assert!(!handlers().is_empty());
    for (name, platform, stage, handler) in handlers() {
        // Faults if the answer is longer than API 0.1's structure.
        let said = metadata(handler);
        assert_eq!((said.major, said.minor), (0, 1), "{name} {platform} {stage:?}");
    }
}

#[test]
fn every_cuda_handler_may_be_captured_in_a_command_buffer() {
    for (name, platform, stage, handler) in handlers() {
        assert_eq!(metadata(handler).command_buffer_compatible, platform == CUDA, "{name} {platform} {stage:?}");
    }
}

fn invalid(text: impl Into<String>) -> Result<(), Refusal> {
    Err(Refusal { code: INVALID_ARGUMENT, text: text.into() })
}

#[test]
fn a_frame_of_another_size_is_refused() {
    for size in [0, FRAME_STRUCT_SIZE - 8, FRAME_STRUCT_SIZE + 8] {
        for (_, _, stage, handler) in handlers() {
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
    for (_, _, own, handler) in handlers() {
        for stage in [Stage::Instantiate, Stage::Prepare, Stage::Initialize, Stage::Execute] {
            if stage != own {
                let text = format!("Wrong execution stage: expected `{}` but got `{}`", name(own), name(stage));
                assert_eq!(Frame::of(handler, stage).run(), invalid(text));
            }
        }
    }
}

#[test]
fn surplus_operands_and_results_are_refused() {
    for call in right_calls::all() {
        let target = if call.target == "XlaGpuSimpleAdd" { "xla_gpu_simple_add" } else { call.target };
        let (most_operands, most_results) = match target {
            "xla_gpu_simple_add" => (2, 1),
            "xla_gpu_paged_attention" => (11, 3),
            "xla_gpu_flash_attn_varlen" => (14, 3),
            "xla_gpu_kv_cache_update" => (6, 1),
            "xla_gpu_merge_attention_states" => (4, 2),
            "xla_gpu_rope_kv_cache_update" => (9, 2),
            _ => (7, 2),
        };
        let mut full = call.clone();
        while full.operands.len() < most_operands {
            full = full.operand("left out", Array::left_out(F32));
        }
        full.results(Side::EndsAtGuard);
        for surplus in 1..=3 {
            let more = (0..surplus).fold(full.clone(), |call, _| call.operand("surplus", Array::left_out(F32)));
            let given = most_operands + surplus;
            let text = format!("{target}: {given} operands given, at most {most_operands} expected");
            assert_eq!(more.refusal(), Refusal { code: INVALID_ARGUMENT, text });

            let mut more = call.clone();
            while more.results.len() < most_results + surplus {
                more = more.result("surplus", U8, &[0]);
            }
            let given = most_results + surplus;
            let text = format!("{target}: {given} results given, at most {most_results} expected");
            assert_eq!(more.refusal(), Refusal { code: INVALID_ARGUMENT, text });
        }
    }
}

#[test]
fn missing_operands_and_results_are_refused() {
    for call in right_calls::all() {
        let required = call.operands.len();
        for given in 0..required {
            let mut fewer = call.clone();
            fewer.operands.truncate(given);
            let refusal = fewer.refusal();
            // How many were expected is miscounted by XLA's header where optional operands follow.
            let text = "Wrong number of arguments: expected at least ";
            assert!(refusal.text.starts_with(text), "{}: {refusal:?}", call.target);
            assert!(refusal.text.ends_with(&format!(" but got {given}")), "{}: {refusal:?}", call.target);
            assert_eq!(refusal.code, INVALID_ARGUMENT);
        }
        let required = match call.target {
            "xla_gpu_flash_attn_varlen"
            | "xla_gpu_kv_cache_update_split"
            | "xla_gpu_merge_attention_states"
            | "xla_gpu_rope_kv_cache_update" => 2,
            _ => 1,
        };
        for given in 0..required {
            let mut fewer = call.clone();
            fewer.results.truncate(given);
            let refusal = fewer.refusal();
            assert!(refusal.text.starts_with("Wrong number of results: expected at least "), "{refusal:?}");
            assert!(refusal.text.ends_with(&format!(" but got {given}")), "{refusal:?}");
            assert_eq!(refusal.code, INVALID_ARGUMENT);
        }
    }
}

#[test]
fn attributes_are_counted_and_named() {
    let call = right_calls::paged_attention();
    let names = "batch_invariant, scale, sliding_window, soft_cap";
    let mut fewer = call.clone();
    fewer.attributes.retain(|(name, _)| *name != "scale");
    let text =
        "Wrong number of attributes: expected 4 but got 3 with name(s): batch_invariant, sliding_window, soft_cap";
    assert_eq!(fewer.refusal(), Refusal { code: INVALID_ARGUMENT, text: text.into() });
    fewer.attributes.clear();
    let text = "Wrong number of attributes: expected 4 but got 0";
    assert_eq!(fewer.refusal(), Refusal { code: INVALID_ARGUMENT, text: text.into() });
    let text = format!("Wrong number of attributes: expected 4 but got 5 with name(s): {names}, zeal");
    let more = call.clone().attribute("zeal", Attr::I64(1));
    assert_eq!(more.refusal(), Refusal { code: INVALID_ARGUMENT, text });
    let text = "Wrong number of attributes: expected 0 but got 1 with name(s): scale";
    let more = right_calls::simple_add().attribute("scale", Attr::F32(1.0));
    assert_eq!(more.refusal(), Refusal { code: INVALID_ARGUMENT, text: text.into() });

    let mut fewer = right_calls::flash_attn_varlen();
    fewer.attributes.retain(|(name, _)| *name != "top_left");
    let text = "Wrong number of attributes: expected 10 but got 9 with name(s): batch_invariant, causal, kv_layout, \
                max_seqlen_k, max_seqlen_q, softcap, softmax_scale, window_left, window_right";
    assert_eq!(fewer.refusal(), Refusal { code: INVALID_ARGUMENT, text: text.into() });

    let mut renamed = call;
    renamed.attributes.retain(|(name, _)| *name != "soft_cap");
    let refusal = renamed.attribute("softcap", Attr::F32(0.0)).refusal();
    assert!(refusal.text.starts_with("[execute] Failed to decode all FFI handler operands"), "{}", refusal.text);
    assert!(refusal.text.ends_with("\nDiagnostics:\nAttribute name mismatch: softcap vs soft_cap"), "{}", refusal.text);
}

#[test]
fn attributes_of_another_type_are_refused() {
    let scalars = [
        ("scale", Attr::F64(0.5), "F32", "F64"),
        ("scale", Attr::I64(1), "F32", "S64"),
        ("sliding_window", Attr::I32(4), "S64", "S32"),
        ("sliding_window", Attr::F32(4.0), "S64", "F32"),
        ("batch_invariant", Attr::I64(1), "PRED", "S64"),
    ];
    let flash = [
        ("causal", Attr::I64(1), "PRED", "S64"),
        ("top_left", Attr::I32(0), "PRED", "S32"),
        ("window_left", Attr::I32(-1), "S64", "S32"),
        ("max_seqlen_q", Attr::F32(0.0), "S64", "F32"),
        ("softmax_scale", Attr::F64(1.0), "F32", "F64"),
    ];
    let calls = scalars.map(|row| (right_calls::paged_attention(), row)).into_iter();
    for (call, (name, value, expected, given)) in calls.chain(flash.map(|row| (right_calls::flash_attn_varlen(), row)))
    {
        let refusal = call.attribute(name, value).refusal();
        let text = format!("\nDiagnostics:\nWrong scalar data type: expected {expected} but got {given}");
        assert!(refusal.text.ends_with(&text), "{name}: {}", refusal.text);
        assert_eq!(refusal.code, INVALID_ARGUMENT);
    }
    for (value, given) in [(Attr::Text("1".into()), "string"), (Attr::I64s(vec![1]), "array")] {
        let refusal = right_calls::kv_cache_update(1).attribute("kv_layout", value).refusal();
        let text = format!("\nDiagnostics:\nWrong attribute type: expected scalar but got {given}");
        assert!(refusal.text.ends_with(&text), "{}", refusal.text);
    }
}

#[test]
fn an_error_does_not_poison_the_next_call() {
    for call in right_calls::all() {
        let expected = call.results(Side::EndsAtGuard);
        let mut wrong = call.clone();
        wrong.operands[0].1 = Array::filled(I32, &[1, 2, 3, 4, 5, 6], 0);
        wrong.refusal();
        wrong.operands.pop();
        wrong.refusal();
        let after = call.results(Side::EndsAtGuard);
        // The workspace is scratch; everything before it is a result.
        let results = call.results.iter().filter(|r| r.name != "workspace").count();
        assert!(after[..results] == expected[..results], "{}", call.target);
    }
}

#[test]
fn many_threads_may_call_at_once_with_one_pool() {
    let shape = Shape { lengths: vec![(1, 60), (17, 20), (2, 9)], ..Shape::default() };
    let case = Case::paged(&shape.batch(), &Storage::default());
    let answers = answers(&case, IfWrong::Unspecified);
    let attention = case.invocation();
    let expected = attention.results(Side::EndsAtGuard);
    let add = Invocation::new("xla_gpu_simple_add")
        .operand("a", Array::new(F32, &[70_000], &vec![1.5; 70_000]))
        .operand("b", Array::new(F32, &[70_000], &vec![2.0; 70_000]))
        .result("out", F32, &[70_000]);
    let sums = Array::new(F32, &[70_000], &vec![3.5; 70_000]);
    let pool = Threads::new(2);
    std::thread::scope(|scope| {
        for _ in 0..8 {
            scope.spawn(|| {
                for round in 0..12 {
                    let side = if round % 2 == 0 { Side::EndsAtGuard } else { Side::BeginsAtGuard };
                    let results = attention.run(side, &pool).unwrap();
                    assert_allowed(&case, &answers, &results[0], Some(&results[1]));
                    assert!(results[..2] == expected[..2]);
                    assert!(add.run(side, &pool).unwrap()[0] == sums);
                    right_calls::kv_cache_update(2).run(side, &pool).unwrap();
                }
            });
        }
    });
}

#[test]
fn a_handler_that_runs_on_the_only_thread_of_its_pool_does_not_wait_for_it() {
    // The pool's one worker is busy with this very call until the call returns.
    let call = Case::paged(&Shape::default().batch(), &Storage::default()).invocation();
    let late = Late::default();
    call.run(Side::EndsAtGuard, &late).unwrap();
    late.run_all();
    call.run(Side::EndsAtGuard, &Inline(1)).unwrap();
}
