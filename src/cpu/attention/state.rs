//! The softmax state of an item's rows, and how rows lie in it.
//!
//! Row per lane: rows are taken in panels of two vectors (the last may have one); with W lanes in a panel, q is
//! `[words of D][W]` and o `[Dv][W]`, panel after panel. Vector per row: q is `[rows][words of D]`, o `[rows][Dv]`, each
//! row padded with zeros to whole vectors, and the lanes of m and l are (key, row). A word is what a lane multiplies at a
//! time: an f32, or two bf16.

use super::plan::{Arrangement, Item};
use super::softmax::merge_factors;
use crate::cpu::simd::{MAX_LANES, Simd};

/// Vectors of a panel.
pub(super) const PANEL: usize = 2;

/// First lane and width of the panel that has this lane.
#[inline(always)]
pub(super) fn panel_of_lane<S: Simd>(lanes: usize, lane: usize) -> (usize, usize) {
    let full = PANEL * S::LANES;
    let base = lane / full * full;
    (base, full.min(lanes - base))
}

impl Arrangement {
    /// The query row that a lane of m and l belongs to.
    pub(super) fn row_of_lane(self, lane: usize) -> usize {
        match self {
            Self::RowPerLane => lane,
            Self::VectorPerRow(rows) => lane % rows,
        }
    }

    /// How much further on than the key of a step's first lane that of this lane is.
    pub(super) fn key_of_lane(self, lane: usize, elements_per_lane: usize) -> usize {
        match self {
            Self::RowPerLane => 0,
            // The keys between are those of the next step, with which this one shares words.
            Self::VectorPerRow(rows) => lane / rows * elements_per_lane,
        }
    }
}

/// Where a row of q or o stands: element i at `first + i * step`.
#[derive(Clone, Copy)]
pub(super) struct RowPlace {
    first: usize,
    step: usize,
}

impl RowPlace {
    /// Of the row among `lanes` rows of `d` elements or words.
    #[inline(always)]
    pub(super) fn new<S: Simd>(arrangement: Arrangement, lanes: usize, d: usize, row: usize) -> Self {
        match arrangement {
            Arrangement::RowPerLane => {
                let (base, width) = panel_of_lane::<S>(lanes, row);
                Self { first: base * d + row - base, step: width }
            }
            Arrangement::VectorPerRow(_) => Self { first: row * d.next_multiple_of(S::LANES), step: 1 },
        }
    }

    /// Put a row of `d` elements there.
    ///
    /// # Safety
    /// `all` has room for all rows, `from` has `d` elements.
    #[inline(always)]
    pub(super) unsafe fn write(self, all: *mut f32, from: *const f32, d: usize) {
        for i in 0..d {
            // SAFETY: element i < d of the row, and its place.
            unsafe { all.add(self.first + i * self.step).write(from.add(i).read()) }
        }
    }

    /// Fetch a row of `d` elements from there.
    ///
    /// # Safety
    /// As `write`, the other way.
    #[inline(always)]
    pub(super) unsafe fn read(self, all: *const f32, to: *mut f32, d: usize) {
        for i in 0..d {
            // SAFETY: element i < d of the row, and its place.
            unsafe { to.add(i).write(all.add(self.first + i * self.step).read()) }
        }
    }
}

/// Softmax state of the rows of one KV head after some keys: o is not yet divided by l, m is in base 2.
#[derive(Clone, Copy)]
pub(super) struct State {
    pub(super) o: *mut f32,
    pub(super) m: *mut f32,
    pub(super) l: *mut f32,
    pub(super) lanes: usize,
}

impl State {
    /// The state of the item's `head`-th KV head in `all`, which has [`Item::state_len`] elements: for each head o,
    /// then m, then l.
    pub(super) fn of_head(item: &Item, all: *mut f32, head: usize) -> Self {
        let o = all.wrapping_add(head * item.head_state_len());
        let m = o.wrapping_add(item.o_len);
        Self { o, m, l: m.wrapping_add(item.lanes), lanes: item.lanes }
    }

    /// No key seen.
    ///
    /// # Safety
    /// The state is one of the item's.
    pub(super) unsafe fn reset(self, item: &Item) {
        // SAFETY: the state has these elements.
        unsafe {
            self.o.write_bytes(0, item.o_len);
            self.l.write_bytes(0, item.lanes);
            std::slice::from_raw_parts_mut(self.m, item.lanes).fill(f32::NEG_INFINITY);
        }
    }

    /// m and l of a row.
    ///
    /// # Safety
    /// The state is one of an item of this arrangement that has this row.
    pub(super) unsafe fn of_row(self, arrangement: Arrangement, row: usize) -> (f32, f32) {
        // SAFETY: lanes of the item.
        let l = |lane: usize| unsafe { self.l.add(lane).read() };
        let sum = match arrangement {
            Arrangement::RowPerLane => l(row),
            Arrangement::VectorPerRow(rows) => (row..self.lanes).step_by(rows).map(l).sum(),
        };
        // SAFETY: the first lane of the row; all of them have the same m.
        (unsafe { self.m.add(row).read() }, sum)
    }

    /// Add a later piece's state of the same rows.
    ///
    /// # Safety
    /// Both are states of items of this arrangement and `dv`.
    #[inline(always)]
    pub(super) unsafe fn merge<S: Simd>(self, simd: S, part: State, arrangement: Arrangement, dv: usize) {
        let padded = dv.next_multiple_of(S::LANES);
        for lane in (0..self.lanes).step_by(S::LANES) {
            // SAFETY: vector `lane` of both states; rows of both o.
            unsafe {
                let of = |s: State| (s.m.add(lane), s.l.add(lane));
                let (m, l) = of(part);
                let (keep, add) = merge_factors(simd, of(self), (m.cast_const(), l.cast_const()));
                match arrangement {
                    Arrangement::RowPerLane => {
                        let (base, width) = panel_of_lane::<S>(self.lanes, lane);
                        for i in 0..dv {
                            self.combine(simd, part, base * dv + i * width + lane - base, (keep, add));
                        }
                    }
                    // One vector of lanes, in which row r has lane r.
                    Arrangement::VectorPerRow(rows) => {
                        let (mut keeps, mut adds) = ([0.0f32; MAX_LANES], [0.0f32; MAX_LANES]);
                        simd.store(keeps.as_mut_ptr(), keep);
                        simd.store(adds.as_mut_ptr(), add);
                        for row in 0..rows {
                            let (keep, add) = (simd.splat(keeps[row]), simd.splat(adds[row]));
                            for at in (row * padded..(row + 1) * padded).step_by(S::LANES) {
                                self.combine(simd, part, at, (keep, add));
                            }
                        }
                    }
                }
            }
        }
    }

    /// A vector of o becomes its own times `keep` plus the part's times `add`.
    ///
    /// # Safety
    /// Vector `at` is one of both o.
    #[inline(always)]
    unsafe fn combine<S: Simd>(self, simd: S, part: State, at: usize, (keep, add): (S::V, S::V)) {
        // SAFETY: the caller's word.
        unsafe {
            let sum = simd.mul(simd.load(self.o.add(at)), keep);
            simd.store(self.o.add(at), simd.fma(simd.load(part.o.add(at)), add, sum));
        }
    }
}
