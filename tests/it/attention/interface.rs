//! Parameters that do not affect the results: workspaces, empty tensors, thread pools and hints. The tables of
//! `tests/conformance` also have calls with empty operands and with workspaces of other sizes.

use super::{Operator, ordinary};
use crate::support::{ATTENTION_DTYPES, BatchSpec, MaxSeqlenHints, MemoryLayout, Side, for_each_pool};

pub(crate) fn every_workspace_size_gives_the_right_result(op: Operator) {
    for dtype in ATTENTION_DTYPES {
        let batch = ordinary(dtype.into()).batch();
        for memory_layout in op.memory_layouts() {
            for workspace in [None, Some(0), Some(1), Some(4096), Some(100_000), Some(3_000_000)] {
                let memory_layout = MemoryLayout { workspace, ..memory_layout.clone() };
                let results = op.call(&batch, &memory_layout).assert_matches_reference();
                if op.is_paged() {
                    let without =
                        op.call(&batch, &MemoryLayout { lse: false, ..memory_layout }).assert_matches_reference();
                    assert!(without[0] == results[0], "{workspace:?}: out depends on whether the lse is asked for");
                }
            }
        }
    }
}

pub(crate) fn sizes_of_zero_are_valid(op: Operator) {
    for layout in op.layouts() {
        for lengths in [vec![], vec![(0, 0)], vec![(0, 7)], vec![(5, 0)], vec![(0, 0), (3, 0), (0, 3)]] {
            for (rows, spare, sinks) in [(0, 0, true), (3, 0, false), (0, 2, false), (3, 2, true)] {
                let spec = BatchSpec { lengths: lengths.clone(), sinks, ..BatchSpec::default() };
                let memory_layout = MemoryLayout {
                    rows_around: (0, rows),
                    spare_seqs: spare,
                    spare_pages: spare,
                    ..MemoryLayout::default()
                };
                let memory_layout = MemoryLayout { layout, spare_entries: spare, ..memory_layout };
                op.call(&spec.batch(), &memory_layout).assert_matches_reference();
            }
        }
    }
}

pub(crate) fn every_pool_gives_the_same_bits(op: Operator) {
    for (index, dtypes) in op.dtypes().into_iter().enumerate() {
        for memory_layout in op.memory_layouts() {
            // Enough work for several threads for the first dtypes, and little for the others.
            let mut spec = ordinary(dtypes);
            if index < 3 {
                spec.lengths.extend([(1, 2500), (300, 300), (60, 700)]);
            }
            let call = op.call(&spec.batch(), &memory_layout);
            let (expected, invocation) = (call.assert_matches_reference(), call.call());
            for_each_pool(|pool| {
                for side in [Side::EndsAtGuard, Side::BeginsAtGuard] {
                    let results = invocation.run(side, pool).unwrap();
                    assert!(call.computed(&results) == expected, "{dtypes:?}");
                }
            });
        }
    }
}

pub(crate) fn max_seqlen_hints_do_not_change_results(op: Operator) {
    for lengths in [vec![(1, 300), (1, 20)], vec![(60, 60), (1, 200)], vec![(3, 3)]] {
        let batch = BatchSpec { lengths, ..BatchSpec::default() }.batch();
        for hints in
            [MaxSeqlenHints::Unknown, MaxSeqlenHints::RoundedUp, MaxSeqlenHints::TooSmall, MaxSeqlenHints::Huge]
        {
            for memory_layout in op.memory_layouts() {
                op.call(&batch, &MemoryLayout { hints, ..memory_layout }).assert_matches_reference();
            }
        }
    }
}
