//! Bounds of the keys of each query row: `k_start` and `k_end`.

use crate::problem::attention::KeyRanges;
use std::ops::Range;

/// The bounds of the rows of one sequence.
#[derive(Clone, Copy, Debug)]
pub(in crate::cpu) struct RowRanges {
    /// Those of the sequence's query 0 on.
    of_rows: KeyRanges,
    /// Queries of the sequence.
    len: usize,
}

// SAFETY: the bounds belong to the call, which outlives its tasks, and no thread writes them.
unsafe impl Send for RowRanges {}
// SAFETY: the threads of the call only read the bounds.
unsafe impl Sync for RowRanges {}

impl RowRanges {
    /// No bounds.
    #[cfg(test)]
    pub(in crate::cpu) const NONE: Self = Self { of_rows: KeyRanges::NONE, len: 0 };

    /// The bounds of `len` rows from row `first` on.
    ///
    /// # Safety
    /// These rows have readable bounds for as long as this is used.
    pub(super) unsafe fn of(ranges: &KeyRanges, first: usize, len: usize) -> Self {
        let from = |of: Option<*const i32>| of.map(|of| of.wrapping_add(first));
        Self { of_rows: KeyRanges { start: from(ranges.start), end: from(ranges.end) }, len }
    }

    /// Whether there is no bound.
    pub(in crate::cpu) fn is_none(&self) -> bool {
        self.of_rows.is_none()
    }

    /// The part of `keys`, which lie in the sequence, within the bounds of query `i`. Nothing of it is left where the start is not below the end.
    pub(super) fn bound(&self, i: usize, keys: Range<i64>) -> (i64, i64) {
        if self.is_none() || i >= self.len {
            return (keys.start, keys.end);
        }
        // SAFETY: i is below the number of rows, whose bounds are readable.
        let entry = |of: Option<*const i32>| of.map(|of| i64::from(unsafe { of.add(i).read() }));
        let KeyRanges { start, end } = self.of_rows;
        (
            entry(start).map_or(keys.start, |start| start.max(keys.start)),
            entry(end).map_or(keys.end, |end| end.min(keys.end)),
        )
    }
}
