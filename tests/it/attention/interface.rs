//! What a caller may do without changing an answer. Operands and results without an element, and workspaces of any size, are
//! in the tables of `tests/conformance` too.

use super::{Operator, ordinary};
use crate::support::{ATTENTION_DTYPES, Hints, Shape, Side, Storage, for_each_pool};

pub(crate) fn any_workspace_serves(op: Operator) {
    for dtype in ATTENTION_DTYPES {
        let batch = ordinary(dtype.into()).batch();
        for storage in op.storages() {
            for workspace in [None, Some(0), Some(1), Some(4096), Some(100_000), Some(3_000_000)] {
                let storage = Storage { workspace, ..storage.clone() };
                let results = op.call(&batch, &storage).check();
                if op.is_paged() {
                    let without = op.call(&batch, &Storage { lse: false, ..storage }).check();
                    assert!(without[0] == results[0], "{workspace:?}: out depends on whether the lse is asked for");
                }
            }
        }
    }
}

pub(crate) fn sizes_of_zero_are_calls_like_any_other(op: Operator) {
    for layout in op.layouts() {
        for lengths in [vec![], vec![(0, 0)], vec![(0, 7)], vec![(5, 0)], vec![(0, 0), (3, 0), (0, 3)]] {
            for (rows, spare, sinks) in [(0, 0, true), (3, 0, false), (0, 2, false), (3, 2, true)] {
                let shape = Shape { lengths: lengths.clone(), sinks, ..Shape::default() };
                let storage =
                    Storage { rows_around: (0, rows), spare_seqs: spare, spare_pages: spare, ..Storage::default() };
                let storage = Storage { layout, spare_entries: spare, ..storage };
                op.call(&shape.batch(), &storage).check();
            }
        }
    }
}

pub(crate) fn every_pool_gives_the_same_bits(op: Operator) {
    for (index, dtypes) in op.dtypes().into_iter().enumerate() {
        for storage in op.storages() {
            // Work that is worth several threads, and some that is not.
            let mut shape = ordinary(dtypes);
            if index < 3 {
                shape.lengths.extend([(1, 2500), (300, 300), (60, 700)]);
            }
            let call = op.call(&shape.batch(), &storage);
            let (expected, invocation) = (call.check(), call.call());
            for_each_pool(|pool| {
                for side in [Side::EndsAtGuard, Side::BeginsAtGuard] {
                    let results = invocation.run(side, pool).unwrap();
                    assert!(call.computed(&results) == expected, "{dtypes:?}");
                }
            });
        }
    }
}

pub(crate) fn hints_never_decide_which_rows_are_computed(op: Operator) {
    for lengths in [vec![(1, 300), (1, 20)], vec![(60, 60), (1, 200)], vec![(3, 3)]] {
        let batch = Shape { lengths, ..Shape::default() }.batch();
        for hints in [Hints::Unknown, Hints::RoundedUp, Hints::TooSmall, Hints::Huge] {
            for storage in op.storages() {
                op.call(&batch, &Storage { hints, ..storage }).check();
            }
        }
    }
}
