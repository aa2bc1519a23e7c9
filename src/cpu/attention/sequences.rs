//! The metadata of a call, read once and clamped as `crate::problem::attention` says, and which keys a query sees.

use crate::error::{Result, with_room};
use crate::problem::attention::{Attention, KeyStorage, Score};
use std::ops::Range;

/// One of the sequences in use.
#[derive(Clone, Copy, Debug)]
pub(in crate::cpu) struct Sequence {
    pub(in crate::cpu) first_row: usize,
    pub(in crate::cpu) len_q: usize,
    pub(in crate::cpu) len_k: usize,
    /// The first keys, at most `len_k`, which no query sees
    pub(in crate::cpu) leftpad: usize,
    /// Position of query 0 among the keys
    pub(in crate::cpu) shift: i64,
    pub(in crate::cpu) keys: StoredKeys,
}

/// Where the keys of a sequence are.
#[derive(Clone, Copy, Debug)]
pub(in crate::cpu) enum StoredKeys {
    /// Neighbouring rows, from this one on
    Rows(usize),
    /// Page ids; entries below `ceil(len_k / page_size)` may be read, and are not to be trusted
    Pages(*const i32),
}

impl StoredKeys {
    /// Of keys that are neighbouring rows.
    pub(in crate::cpu) fn first_row(&self) -> usize {
        match *self {
            Self::Rows(first) => first,
            Self::Pages(_) => 0,
        }
    }
}

// SAFETY: the address of page ids that belong to the call, which any thread may read.
unsafe impl Send for StoredKeys {}
// SAFETY: the page ids are only read, from all threads of the call.
unsafe impl Sync for StoredKeys {}

/// Keys visible before and after a query's own position; negative is all of them.
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
    /// Its query rows.
    pub(in crate::cpu) fn rows(&self) -> Range<usize> {
        self.first_row..self.first_row + self.len_q
    }

    /// Position of query `i` among the keys.
    pub(in crate::cpu) fn position(&self, i: usize) -> i64 {
        i as i64 + self.shift
    }

    /// Keys that query `i` sees; empty ranges are `0..0`.
    pub(in crate::cpu) fn visible(&self, i: usize, window: Window) -> Range<usize> {
        let position = self.position(i);
        let low = if window.left < 0 { 0 } else { position.saturating_sub(window.left) };
        let high = if window.right < 0 { i64::MAX } else { position.saturating_add(window.right).saturating_add(1) };
        let (low, high) = (low.max(self.leftpad as i64), high.min(self.len_k as i64));
        if low < high { low as usize..high as usize } else { 0..0 }
    }

    /// Keys that some of the queries see. Neighbouring queries see ranges that overlap or touch, so there is no gap:
    /// each of these keys is seen by one of the queries.
    pub(in crate::cpu) fn visible_to_any(&self, queries: &Range<usize>, window: Window) -> Range<usize> {
        // From some query on the end of the visible keys lies behind the first key; up to some query their start lies
        // before the last key.
        let first_seeing = if window.right < 0 {
            0
        } else {
            (self.leftpad as i64).saturating_sub(window.right).saturating_sub(self.shift).max(0)
        };
        let end_seeing = if window.left < 0 {
            i64::MAX
        } else {
            (self.len_k as i64).saturating_add(window.left).saturating_sub(self.shift).max(0)
        };
        let first = first_seeing.max(queries.start as i64);
        let end = end_seeing.min(queries.end as i64);
        if first >= end || self.leftpad >= self.len_k {
            return 0..0;
        }
        self.visible(first as usize, window).start..self.visible(end as usize - 1, window).end
    }
}

/// What lies below `total` and in none of `taken`, which are in order and do not overlap, in pieces of at most `most`.
pub(in crate::cpu) fn gaps(
    taken: impl Iterator<Item = Range<usize>>,
    total: usize,
    most: usize,
) -> impl Iterator<Item = Range<usize>> {
    let mut free = 0;
    let end = std::iter::once(total..total);
    taken.filter(|taken| !taken.is_empty()).chain(end).flat_map(move |taken| {
        let gap = free..taken.start;
        free = taken.end;
        gap.clone().step_by(most).map(move |first| first..(first + most).min(gap.end))
    })
}

/// The sequences in use: their rows are in order and do not overlap, nor do their contiguous keys.
///
/// # Errors
/// `RESOURCE_EXHAUSTED`.
///
/// # Safety
/// The problem's metadata is readable.
pub(in crate::cpu) unsafe fn sequences(problem: &Attention) -> Result<Vec<Sequence>> {
    let slots = problem.max_seqs;
    // SAFETY: one element.
    let count = problem.queries.num_seqs.map_or(slots, |n| index(unsafe { n.read() }).min(slots));
    let mut ends = Ends::default();
    let mut sequences = with_room(count)?;
    // SAFETY: below B.
    sequences.extend((0..count).map(|b| unsafe { sequence(problem, b, &mut ends) }));
    Ok(sequences)
}

/// Where the rows and the contiguous keys of the sequences so far end.
#[derive(Default)]
struct Ends {
    rows: usize,
    keys: usize,
}

/// # Safety
/// As [`sequences`]; `b` is below B.
unsafe fn sequence(problem: &Attention, b: usize, ends: &mut Ends) -> Sequence {
    let (queries, keys) = (&problem.queries, &problem.keys);
    // SAFETY: arrays of B, or B+1 where they hold starts.
    let (starts_q, starts_k, used_q, used_k, leftpad) = unsafe {
        (
            pair(queries.starts, b),
            keys.starts.map(|starts| pair(starts, b)),
            queries.used.map(|used| index(used.add(b).read())),
            keys.used.map(|used| index(used.add(b).read())),
            keys.leftpad.map_or(0, |leftpad| index(leftpad.add(b).read())),
        )
    };
    let rows = next_rows(starts_q, &mut ends.rows, problem.num_rows);
    let len_q = used_q.map_or(rows.len(), |used| used.min(rows.len()));
    let (stored, len_k) = match keys.storage {
        KeyStorage::Contiguous { total } => {
            let rows = next_rows(starts_k.unwrap_or_default(), &mut ends.keys, total);
            (StoredKeys::Rows(rows.start), used_k.map_or(rows.len(), |used| used.min(rows.len())))
        }
        KeyStorage::Paged(table) => {
            // An address only: nothing is read where there is no key.
            let pages = table.entries.wrapping_offset(b as isize * table.stride as isize);
            let (start, end) = starts_k.unwrap_or_default();
            let between = || (i64::from(end) - i64::from(start)).max(0) as usize;
            (StoredKeys::Pages(pages), used_k.unwrap_or_else(between).min(table.capacity()))
        }
    };
    let shift = if problem.score.top_left { 0 } else { len_k as i64 - len_q as i64 };
    Sequence { first_row: rows.start, len_q, len_k, leftpad: leftpad.min(len_k), shift, keys: stored }
}

/// Elements b and b+1.
///
/// # Safety
/// They are readable.
unsafe fn pair(starts: *const i32, b: usize) -> (i32, i32) {
    // SAFETY: the caller's word.
    unsafe { (starts.add(b).read(), starts.add(b + 1).read()) }
}

/// A length or a start; negative ones are 0.
fn index(x: i32) -> usize {
    usize::try_from(x).unwrap_or(0)
}

/// The rows of the sequence whose starts are these: both are the running maximum of the starts up to theirs, clamped to
/// `[0, total]`. `end` is that of the sequence before, and becomes this one's.
fn next_rows((start, next): (i32, i32), end: &mut usize, total: usize) -> Range<usize> {
    // Only the first sequence's start is not the end of another.
    let first = index(start).min(total).max(*end);
    *end = index(next).min(total).max(first);
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
            let found: Vec<_> = starts.windows(2).map(|pair| next_rows((pair[0], pair[1]), &mut end, 10)).collect();
            assert_eq!(found, expected, "{starts:?}");
        }
    }

    #[test]
    fn gaps_are_what_is_not_taken() {
        let found = |taken: &[Range<usize>]| gaps(taken.iter().cloned(), 10, 4).collect::<Vec<_>>();
        assert_eq!(found(&[]), [0..4, 4..8, 8..10]);
        assert_eq!(found(&[0..10, 10..10]), []);
        assert_eq!(found(&[2..3, 9..9, 3..5, 0..0, 6..10]), [0..2, 5..6]);
        assert_eq!(found(&[0..1, 1..1]), [1..5, 5..9, 9..10]);
    }

    #[test]
    fn what_some_query_sees_is_the_union_of_what_each_query_sees() {
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
            let keys = StoredKeys::Rows(0);
            let sequence = Sequence { first_row: 0, len_q, len_k, leftpad, shift, keys };
            for window in windows.iter().flatten() {
                for (first, last) in (0..len_q).flat_map(|a| (a..len_q).map(move |b| (a, b))) {
                    let seen: Vec<usize> = (0..len_k)
                        .filter(|j| (first..=last).any(|i| sequence.visible(i, *window).contains(j)))
                        .collect();
                    let found: Vec<usize> = sequence.visible_to_any(&(first..last + 1), *window).collect();
                    assert_eq!(found, seen, "{sequence:?} {window:?} {first} to {last}");
                }
            }
        }
    }
}
