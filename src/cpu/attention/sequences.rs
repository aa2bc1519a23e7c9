//! The metadata of a call, read once and clamped as `docs/semantics.md#metadata` says, and the keys that a query
//! attends to.

use super::row_ranges::RowRanges;
use super::row_trees::RowTree;
use crate::error::{Result, with_room};
use crate::problem::attention::{Attention, KeyStorage, Score, position_of_query_0};
use std::ops::Range;

/// A sequence in use, with clamped lengths.
#[derive(Clone, Copy, Debug)]
pub(in crate::cpu) struct Sequence {
    pub(in crate::cpu) first_row: usize,
    pub(in crate::cpu) len_q: usize,
    pub(in crate::cpu) len_k: usize,
    /// Keys at the start that no query attends to, at most `len_k`.
    pub(in crate::cpu) leftpad: usize,
    /// Position of query 0 among the keys.
    pub(in crate::cpu) shift: i64,
    /// Bounds of the keys of each query.
    pub(in crate::cpu) ranges: RowRanges,
    /// The tree among the newest keys.
    pub(in crate::cpu) tree: RowTree,
    pub(in crate::cpu) keys: SequenceKeys,
}

/// Where the keys of a sequence are.
#[derive(Clone, Copy, Debug)]
pub(in crate::cpu) enum SequenceKeys {
    /// Packed: consecutive rows from this one on.
    Rows(usize),
    /// Paged: the sequence's page ids, of which `ceil(len_k / page_size)` may be read. They are not validated.
    Pages(*const i32),
}

impl SequenceKeys {
    /// The first row of packed keys; 0 for paged ones.
    pub(in crate::cpu) fn first_row(&self) -> usize {
        match *self {
            Self::Rows(first) => first,
            Self::Pages(_) => 0,
        }
    }
}

// SAFETY: the page ids belong to the call, which outlives its tasks, and no thread writes them.
unsafe impl Send for SequenceKeys {}
// SAFETY: the threads of the call only read the page ids.
unsafe impl Sync for SequenceKeys {}

/// Number of keys visible before and after a query's own position; negative is unlimited.
#[derive(Clone, Copy, Debug)]
pub(in crate::cpu) struct Window {
    left: i64,
    right: i64,
}

impl Window {
    pub(in crate::cpu) fn of(score: &Score) -> Self {
        Self { left: score.window_left, right: score.window_right }
    }
}

impl Sequence {
    /// The sequence's query rows.
    pub(in crate::cpu) fn rows(&self) -> Range<usize> {
        self.first_row..self.first_row + self.len_q
    }

    /// Position of query `i` among the keys.
    pub(in crate::cpu) fn position(&self, i: usize) -> i64 {
        i as i64 + self.shift
    }

    /// Whether each query has keys of its own, so that queries next to each other may attend to keys that are not.
    pub(in crate::cpu) fn has_row_masks(&self) -> bool {
        !self.ranges.is_none() || self.tree.exists()
    }

    /// Keys that query `i` attends to, but for those among them that the tree hides; an empty range is `0..0`.
    pub(in crate::cpu) fn visible(&self, i: usize, window: Window) -> Range<usize> {
        let position = self.position(i);
        let low = if window.left < 0 { 0 } else { position.saturating_sub(window.left) };
        let high = if window.right < 0 || self.tree.exists() {
            i64::MAX
        } else {
            position.saturating_add(window.right).saturating_add(1)
        };
        let (low, high) = self.ranges.bound(i, low.max(self.leftpad as i64)..high.min(self.len_k as i64));
        if low < high { low as usize..high as usize } else { 0..0 }
    }

    /// Keys that at least one of the queries attends to, from the first to the last. Without bounds per row there is no gap
    /// between: the ranges of consecutive queries overlap or touch. With them or a tree there may be ([`Self::cover`]).
    pub(in crate::cpu) fn visible_to_any(&self, queries: &Range<usize>, window: Window) -> Range<usize> {
        if self.has_row_masks() {
            let of_queries = queries.clone().map(|i| self.visible(i, window)).filter(|keys| !keys.is_empty());
            return of_queries.reduce(|a, b| a.start.min(b.start)..a.end.max(b.end)).unwrap_or(0..0);
        }
        // Queries before `first_visible` attend to no key because their window ends before the first key; queries from
        // `end_visible` on because their window begins after the last key.
        let first_visible = if window.right < 0 {
            0
        } else {
            (self.leftpad as i64).saturating_sub(window.right).saturating_sub(self.shift).max(0)
        };
        let end_visible = if window.left < 0 {
            i64::MAX
        } else {
            (self.len_k as i64).saturating_add(window.left).saturating_sub(self.shift).max(0)
        };
        let first = first_visible.max(queries.start as i64);
        let end = end_visible.min(queries.end as i64);
        if first >= end || self.leftpad >= self.len_k {
            return 0..0;
        }
        self.visible(first as usize, window).start..self.visible(end as usize - 1, window).end
    }

    /// Sets `covered[j]` to whether at least one of the queries attends to key `first + j`, for at most
    /// [`LONGEST_COVER`] keys; returns whether any is covered.
    pub(in crate::cpu) fn cover(
        &self,
        queries: &Range<usize>,
        window: Window,
        first: usize,
        covered: &mut [bool],
    ) -> bool {
        // How many ranges begin at a key, less those that have ended before it.
        let mut steps = [0i64; LONGEST_COVER + 1];
        let (len, newest) = (covered.len(), self.tree.first());
        let relative = |key: usize| key.saturating_sub(first).min(len);
        for i in queries.clone() {
            let keys = self.visible(i, window);
            let older_end = keys.end.min(newest).max(keys.start);
            steps[relative(keys.start)] += 1;
            steps[relative(older_end)] -= 1;
            for key in relative(older_end)..relative(keys.end) {
                if self.tree.shows(i, first + key) {
                    steps[key] += 1;
                    steps[key + 1] -= 1;
                }
            }
        }
        let mut ranges = 0;
        for (covered, step) in covered.iter_mut().zip(steps) {
            ranges += step;
            *covered = ranges > 0;
        }
        covered.contains(&true)
    }
}

/// The most keys of [`Sequence::cover`]: those of a block.
pub(in crate::cpu) const LONGEST_COVER: usize = 128;

/// The indices below `total` that lie in none of the ranges `taken`, which are in order and do not overlap, as ranges
/// of at most `max_len` indices.
pub(in crate::cpu) fn gaps(
    taken: impl Iterator<Item = Range<usize>>,
    total: usize,
    max_len: usize,
) -> impl Iterator<Item = Range<usize>> {
    let mut free = 0;
    let end = std::iter::once(total..total);
    taken.filter(|taken| !taken.is_empty()).chain(end).flat_map(move |taken| {
        let gap = free..taken.start;
        free = taken.end;
        gap.clone().step_by(max_len).map(move |first| first..(first + max_len).min(gap.end))
    })
}

/// The sequences in use. Their rows are in order and do not overlap, and neither do their packed keys.
///
/// # Errors
/// `RESOURCE_EXHAUSTED`.
///
/// # Safety
/// The problem's metadata is readable.
pub(in crate::cpu) unsafe fn sequences(problem: &Attention) -> Result<Vec<Sequence>> {
    let slots = problem.max_seqs;
    // SAFETY: num_seqs has one element, which the caller says is readable.
    let count = problem.queries.num_seqs.map_or(slots, |n| non_negative(unsafe { n.read() }).min(slots));
    let mut ends = Ends::default();
    let mut sequences = with_room(count)?;
    // SAFETY: b < count <= B.
    sequences.extend((0..count).map(|b| unsafe { sequence(problem, b, &mut ends) }));
    Ok(sequences)
}

/// The ends of the query rows and of the packed keys of the sequences so far.
#[derive(Default)]
struct Ends {
    rows: usize,
    keys: usize,
}

/// # Safety
/// As [`sequences`]; `b` is below B.
unsafe fn sequence(problem: &Attention, b: usize, ends: &mut Ends) -> Sequence {
    let (queries, keys) = (&problem.queries, &problem.keys);
    // SAFETY: b < B; lengths have B elements and starts B + 1.
    let (starts_q, starts_k, used_q, used_k, leftpad, offset) = unsafe {
        (
            pair(queries.starts, b),
            keys.starts.map(|starts| pair(starts, b)),
            queries.used.map(|used| non_negative(used.add(b).read())),
            keys.used.map(|used| non_negative(used.add(b).read())),
            keys.leftpad.map_or(0, |leftpad| non_negative(leftpad.add(b).read())),
            queries.offset.map(|offset| offset.add(b).read()),
        )
    };
    let rows = clamp_rows(starts_q, &mut ends.rows, problem.num_rows);
    let len_q = used_q.map_or(rows.len(), |used| used.min(rows.len()));
    let (stored, len_k) = match keys.storage {
        KeyStorage::Contiguous { total } => {
            let rows = clamp_rows(starts_k.unwrap_or_default(), &mut ends.keys, total);
            (SequenceKeys::Rows(rows.start), used_k.map_or(rows.len(), |used| used.min(rows.len())))
        }
        KeyStorage::Paged(table) => {
            // This only computes an address: a sequence without keys may have no row in the table.
            let pages = table.entries.wrapping_offset(b as isize * table.stride as isize);
            let (start, end) = starts_k.unwrap_or_default();
            let between = || (i64::from(end) - i64::from(start)).max(0) as usize;
            (SequenceKeys::Pages(pages), used_k.unwrap_or_else(between).min(table.capacity()))
        }
    };
    let shift = position_of_query_0(&problem.score, offset, len_q, len_k);
    // SAFETY: the bounds have Tq elements, and the rows are some of them.
    let ranges = unsafe { RowRanges::of(&queries.key_ranges, rows.start, len_q) };
    // SAFETY: the mask is that of B sequences, and b is below B.
    let tree = unsafe { RowTree::of(queries.tree, b, len_q, len_k) };
    Sequence { first_row: rows.start, len_q, len_k, leftpad: leftpad.min(len_k), shift, ranges, tree, keys: stored }
}

/// Elements b and b + 1 of `starts`.
///
/// # Safety
/// Both elements are readable.
unsafe fn pair(starts: *const i32, b: usize) -> (i32, i32) {
    // SAFETY: the caller guarantees that both elements are readable.
    unsafe { (starts.add(b).read(), starts.add(b + 1).read()) }
}

/// A length or a start from the metadata; a negative one is 0.
fn non_negative(x: i32) -> usize {
    usize::try_from(x).unwrap_or(0)
}

/// The rows of the sequence with these starts, each of which is replaced by the running maximum of the starts so far,
/// clamped to `[0, total]`. `end` is the end of the sequence before on entry, and of this one on return.
fn clamp_rows((start, next): (i32, i32), end: &mut usize, total: usize) -> Range<usize> {
    // The start of every sequence but the first is the end of the one before it.
    let first = non_negative(start).min(total).max(*end);
    *end = non_negative(next).min(total).max(first);
    first..*end
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn starts_are_read_as_their_running_maximum() {
        const LOW: i32 = i32::MIN;
        const HIGH: i32 = i32::MAX;
        for (starts, expected) in [
            (vec![0, 4, 4, 10], vec![0..4, 4..4, 4..10]),
            (vec![2, 4, 9], vec![2..4, 4..9]),
            (vec![LOW, 4, HIGH, 2, 5], vec![0..4, 4..10, 10..10, 10..10]),
            (vec![0, 10, 0, 10, 0, 10], vec![0..10, 10..10, 10..10, 10..10, 10..10]),
            (vec![0, 6, 4, 8], vec![0..6, 6..6, 6..8]),
            (vec![5, 2, 3, LOW], vec![5..5, 5..5, 5..5]),
            (vec![HIGH, 0, 3], vec![10..10, 10..10]),
        ] {
            let mut end = 0;
            let found: Vec<_> = starts.windows(2).map(|pair| clamp_rows((pair[0], pair[1]), &mut end, 10)).collect();
            assert_eq!(found, expected, "{starts:?}");
        }
    }

    #[test]
    fn gaps_are_the_indices_in_no_taken_range() {
        let found = |taken: &[Range<usize>]| gaps(taken.iter().cloned(), 10, 4).collect::<Vec<_>>();
        assert_eq!(found(&[]), [0..4, 4..8, 8..10]);
        assert_eq!(found(&[0..10, 10..10]), []);
        assert_eq!(found(&[2..3, 9..9, 3..5, 0..0, 6..10]), [0..2, 5..6]);
        assert_eq!(found(&[0..1, 1..1]), [1..5, 5..9, 9..10]);
    }

    #[test]
    fn keys_visible_to_any_query_are_the_union_over_the_queries() {
        let windows = [-1, 0, 1, 5, i64::MAX].map(|left| [-1, 0, 2, 7, i64::MAX].map(|right| Window { left, right }));
        for (len_q, len_k, leftpad, top_left) in [
            (4, 9, 0, false),
            (9, 4, 0, false),
            (9, 4, 0, true),
            (3, 3, 2, false),
            (6, 12, 12, true),
            (12, 30, 17, true),
        ] {
            let shift = if top_left { 0 } else { len_k as i64 - len_q as i64 };
            let keys = SequenceKeys::Rows(0);
            let (ranges, tree) = (RowRanges::NONE, RowTree::NONE);
            let sequence = Sequence { first_row: 0, len_q, len_k, leftpad, shift, ranges, tree, keys };
            for window in windows.iter().flatten() {
                for (first, last) in (0..len_q).flat_map(|a| (a..len_q).map(move |b| (a, b))) {
                    let expected: Vec<usize> = (0..len_k)
                        .filter(|j| (first..=last).any(|i| sequence.visible(i, *window).contains(j)))
                        .collect();
                    let found: Vec<usize> = sequence.visible_to_any(&(first..last + 1), *window).collect();
                    assert_eq!(found, expected, "{sequence:?} {window:?} {first} to {last}");
                }
            }
        }
    }
}
