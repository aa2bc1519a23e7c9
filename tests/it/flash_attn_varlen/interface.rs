//! Operands and results that may be left out, sizes of zero, threads: what a caller may do without changing an answer.

use crate::support::array::{ATTENTION_DTYPES, Array, BF16, F32, I32, U8};
use crate::support::batch::{Dtypes, Shape};
use crate::support::case::Case;
use crate::support::check::check;
use crate::support::guard::{Side, for_both_sides};
use crate::support::invocation::{Attr, Invocation};
use crate::support::oracle::Mask;
use crate::support::pools::{HostPool, Inline, Late, NoPool, Threads};
use crate::support::storage::{Hints, Layout, Storage};

fn ordinary(dtypes: impl Into<Dtypes>, storage: &Storage) -> Case {
    let lengths = vec![(1, 90), (9, 9), (0, 4), (21, 64)];
    Case::flash(&Shape { dtypes: dtypes.into(), lengths, ..Shape::default() }.batch(), storage)
}

#[test]
fn any_workspace_serves() {
    for dtype in ATTENTION_DTYPES {
        for storage in [Storage::contiguous(), Storage::paged(Layout::Split, 16)] {
            let case = ordinary(dtype, &storage);
            for workspace in [None, Some(0), Some(1), Some(4096), Some(3_000_000)] {
                check(&case.asking(true, workspace));
            }
            // One without an element is none.
            let none = case.asking(true, None).invocation();
            let empty = none.clone().result("workspace", U8, &[0]);
            assert!(empty.results(Side::EndsAtGuard)[..2] == none.results(Side::EndsAtGuard)[..2]);
        }
    }
}

#[test]
fn optional_operands_without_an_element_count_as_left_out() {
    let case = ordinary(BF16, &Storage::contiguous());
    let expected = check(&case);
    let mut call = case.invocation();
    let optional =
        ["seqused_k", "block_table", "seqused_q", "leftpad_k", "alibi_slopes", "sinks", "q_scale", "k_scale"];
    for (index, name) in optional.into_iter().chain(["v_scale"]).enumerate() {
        call = call.operand(name, Array::left_out(if index < 4 { I32 } else { F32 }));
        assert!(call.results(Side::EndsAtGuard)[..2] == expected[..2], "up to {name}");
    }
}

#[test]
fn cu_seqlens_k_may_be_anything_where_it_is_not_read() {
    let case = ordinary(BF16, &Storage::paged(Layout::PerPage, 16));
    let expected = check(&case);
    for unread in [
        Array::i32s(&[0], &[]),
        Array::i32s(&[], &[i32::MIN]),
        Array::i32s(&[2, 2], &[i32::MIN, i32::MAX, -1, 7]),
        Array::i32s(&[7], &[i32::MIN; 7]),
        Array::i32s(&[1, 0, 3], &[]),
    ] {
        let call = case.invocation().with_operand("cu_seqlens_k", unread);
        for_both_sides(|side| assert!(call.results(side)[..2] == expected[..2], "{:?}", call.operands[4]));
    }
}

/// A call with these sizes and nothing in it; every output row has to say so.
struct Empty {
    rows: i64,
    keys: i64,
    slots: i64,
    max_pages: i64,
}

impl Empty {
    fn call(&self, layout: Layout) -> Invocation {
        let (d, hkv) = (16, 2);
        let k: Vec<i64> = match layout {
            Layout::Contiguous => vec![self.keys, hkv, d],
            Layout::Split => vec![self.keys, 4, hkv, d],
            Layout::Interleaved => vec![self.keys, 4, 2 * hkv, d],
            Layout::Stacked => vec![2, self.keys, 4, hkv, d],
            Layout::PerPage => vec![self.keys, 2, 4, hkv, d],
        };
        let nan = |dims: &[i64]| Array::filled(BF16, dims, 0xff);
        let zeros = |dims: &[i64]| Array::filled(I32, dims, 0);
        let paged = layout != Layout::Contiguous;
        let call = Invocation::new("xla_gpu_flash_attn_varlen")
            .operand("q", nan(&[self.rows, 4, d]))
            .operand("k", nan(&k))
            .operand("v", if layout.has_two_buffers() { nan(&k) } else { Array::left_out(BF16) })
            .operand("cu_seqlens_q", zeros(&[self.slots + 1]))
            .operand("cu_seqlens_k", zeros(&[self.slots + 1]))
            .result("out", BF16, &[self.rows, 4, d])
            .result("softmax_lse", F32, &[4, self.rows]);
        let call = if paged {
            call.operand("seqused_k", zeros(&[self.slots])).operand("block_table", zeros(&[self.slots, self.max_pages]))
        } else {
            call
        };
        [
            ("batch_invariant", Attr::Bool(false)),
            ("causal", Attr::Bool(true)),
            ("kv_layout", Attr::I64(layout.kv_layout())),
            ("max_seqlen_k", Attr::I64(0)),
            ("max_seqlen_q", Attr::I64(0)),
            ("softcap", Attr::F32(0.0)),
            ("softmax_scale", Attr::F32(1.0)),
            ("top_left", Attr::Bool(false)),
            ("window_left", Attr::I64(-1)),
            ("window_right", Attr::I64(-1)),
        ]
        .into_iter()
        .fold(call, |call, (name, value)| call.attribute(name, value))
    }
}

#[test]
fn sizes_of_zero_are_calls_like_any_other() {
    for layout in Layout::ALL {
        for (rows, keys, slots, max_pages) in [
            (0, 0, 0, 0),
            (3, 0, 0, 0),
            (3, 0, 2, 0),
            (3, 0, 2, 2),
            (3, 2, 2, 0),
            (0, 2, 2, 2),
            (3, 2, 0, 2),
            (3, 2, 2, 2),
        ] {
            let call = Empty { rows, keys, slots, max_pages }.call(layout);
            for_both_sides(|side| {
                let results = call.results(side);
                assert!(results[0].values().iter().all(|&o| o == 0.0), "{layout:?} {:?}", call.operands);
                assert!(results[1].values().iter().all(|&l| l == f64::NEG_INFINITY), "{layout:?}");
            });
        }
    }
}

#[test]
fn without_sequences_nothing_is_missed() {
    // With B = 0 per-sequence operands are [0], which means left out: no error for their absence.
    for layout in Layout::PAGED {
        let call = Empty { rows: 3, keys: 2, slots: 0, max_pages: 2 }.call(layout);
        // Not read, for seqused_k is given, although it has no element.
        let call = call.with_operand("cu_seqlens_k", Array::i32s(&[0], &[]));
        let call = call.operand("seqused_q", Array::left_out(I32)).operand("leftpad_k", Array::left_out(I32));
        assert!(call.results(Side::EndsAtGuard)[0].values().iter().all(|&o| o == 0.0), "{layout:?}");
    }
}

#[test]
fn every_pool_gives_the_same_bits() {
    for dtypes in Dtypes::ALL {
        for storage in [Storage::contiguous(), Storage::paged(Layout::Split, 16)] {
            let case = ordinary(dtypes, &storage);
            let expected = check(&case);
            let late = Late::default();
            let pools: [&dyn HostPool; 6] = [&Inline(1), &Inline(3), &Inline(64), &Threads::new(3), &late, &NoPool];
            for pool in pools {
                let results = case.invocation().run(Side::EndsAtGuard, pool).unwrap();
                assert!(results[..2] == expected[..2]);
            }
            // Helpers that arrive after the call has returned and its memory is gone.
            late.run_all();
        }
    }
}

#[test]
fn hints_never_decide_which_rows_are_computed() {
    for lengths in [vec![(1, 300), (1, 20)], vec![(60, 60), (1, 200)], vec![(3, 3)]] {
        let shape = Shape { lengths, mask: Mask::CAUSAL, ..Shape::default() };
        for hints in [Hints::Unknown, Hints::RoundedUp, Hints::TooSmall, Hints::Huge] {
            for layout in [Layout::Contiguous, Layout::Split] {
                check(&Case::flash(&shape.batch(), &Storage { hints, ..Storage::paged(layout, 16) }));
            }
        }
    }
}
