//! The online softmax state (o, m, l) of a work tile's rows, and the layouts of q and of the state.
//!
//! E is [`Simd::ELEMENTS_PER_LANE`]: a lane holds one f32, or two bf16 that are multiplied together.
//!
//! ```text
//! RowsInLanes        q [micro-panel][D / E][NR]    o [micro-panel][Dv][NR]    m, l [rows]
//! HeadDimInLanes     q [rows][D / E]               o [rows][Dv]               m, l [keys of a step][rows]
//! ```
//!
//! A micro-panel (BLIS's word) holds the query rows of NR lanes: two vectors, or one in the last micro-panel. In
//! `HeadDimInLanes`, rows of q and o are padded with zeros to whole vectors, and m and l are one vector.

use super::plan::{QueryLayout, WorkTile};
use super::softmax::merge_scales;
use crate::cpu::simd::{MAX_LANES, Simd};

/// Vectors of a micro-panel.
pub(super) const PANEL_VECTORS: usize = 2;

/// (first lane, NR) of the micro-panel that `lane` belongs to.
#[inline(always)]
pub(super) fn panel_of_lane<S: Simd>(lanes: usize, lane: usize) -> (usize, usize) {
    let full = PANEL_VECTORS * S::LANES;
    let base = lane / full * full;
    (base, full.min(lanes - base))
}

impl QueryLayout {
    /// The query row that a lane of m and l belongs to.
    pub(super) fn row_of_lane(self, lane: usize) -> usize {
        match self {
            Self::RowsInLanes => lane,
            Self::HeadDimInLanes(rows) => lane % rows,
        }
    }

    /// How many keys the key of a lane comes after that of lane 0.
    pub(super) fn key_offset_of_lane(self, lane: usize, elements_per_lane: usize) -> usize {
        match self {
            Self::RowsInLanes => 0,
            // Every E-th key is one of this step; those between belong to the next steps, with whose p this step's p
            // shares lanes.
            Self::HeadDimInLanes(rows) => lane / rows * elements_per_lane,
        }
    }
}

/// Where the elements of a row of q or o are: element i at `first + i * stride`.
#[derive(Clone, Copy)]
pub(super) struct RowElements {
    first: usize,
    stride: usize,
}

impl RowElements {
    /// The elements of `row` in an array of `lanes` rows of `d` elements (of q: D / E).
    #[inline(always)]
    pub(super) fn new<S: Simd>(layout: QueryLayout, lanes: usize, d: usize, row: usize) -> Self {
        match layout {
            QueryLayout::RowsInLanes => {
                let (base, width) = panel_of_lane::<S>(lanes, row);
                Self { first: base * d + row - base, stride: width }
            }
            QueryLayout::HeadDimInLanes(_) => Self { first: row * d.next_multiple_of(S::LANES), stride: 1 },
        }
    }

    /// Copy a row of `d` elements into the array.
    ///
    /// # Safety
    /// `all` has room for all rows, `from` has `d` elements.
    #[inline(always)]
    pub(super) unsafe fn scatter(self, all: *mut f32, from: *const f32, d: usize) {
        for i in 0..d {
            // SAFETY: i < d, which is an element of `from` and of the row in `all`.
            unsafe { all.add(self.first + i * self.stride).write(from.add(i).read()) }
        }
    }

    /// Copy a row of `d` elements out of the array.
    ///
    /// # Safety
    /// `all` has all rows, `to` has room for `d` elements.
    #[inline(always)]
    pub(super) unsafe fn gather(self, all: *const f32, to: *mut f32, d: usize) {
        for i in 0..d {
            // SAFETY: i < d, which is an element of the row in `all` and of `to`.
            unsafe { to.add(i).write(all.add(self.first + i * self.stride).read()) }
        }
    }
}

/// Softmax state of the rows of one KV head after some of the keys: o is not yet divided by l, m is in base 2.
#[derive(Clone, Copy)]
pub(super) struct SoftmaxState {
    pub(super) o: *mut f32,
    pub(super) m: *mut f32,
    pub(super) l: *mut f32,
    pub(super) lanes: usize,
}

impl SoftmaxState {
    /// The state of KV head number `head` of the tile in `all`, which has [`WorkTile::state_len`] elements: o, m and l
    /// of each head in turn.
    pub(super) fn of_head(tile: &WorkTile, all: *mut f32, head: usize) -> Self {
        let o = all.wrapping_add(head * tile.head_state_len());
        let m = o.wrapping_add(tile.o_len);
        Self { o, m, l: m.wrapping_add(tile.lanes), lanes: tile.lanes }
    }

    /// The state before the first key: o = 0, m = -inf, l = 0.
    ///
    /// # Safety
    /// The state is one of the tile's, and writable.
    pub(super) unsafe fn reset(self, tile: &WorkTile) {
        // SAFETY: a state of this tile has o_len elements of o, and `lanes` of l and of m.
        unsafe {
            self.o.write_bytes(0, tile.o_len);
            self.l.write_bytes(0, tile.lanes);
            std::slice::from_raw_parts_mut(self.m, tile.lanes).fill(f32::NEG_INFINITY);
        }
    }

    /// m and l of a row.
    ///
    /// # Safety
    /// The state is one of a tile of this layout that has this row.
    pub(super) unsafe fn of_row(self, layout: QueryLayout, row: usize) -> (f32, f32) {
        // SAFETY: called below with lanes of the tile only.
        let l = |lane: usize| unsafe { self.l.add(lane).read() };
        let sum = match layout {
            QueryLayout::RowsInLanes => l(row),
            QueryLayout::HeadDimInLanes(rows) => (row..self.lanes).step_by(rows).map(l).sum(),
        };
        // SAFETY: lane `row` is the row's only lane, or the first of several with the same m.
        (unsafe { self.m.add(row).read() }, sum)
    }

    /// Merge the state of a later KV split of the same rows into this one.
    ///
    /// # Safety
    /// Both are states of the same tile, which has this layout and this `dv`.
    #[inline(always)]
    pub(super) unsafe fn merge<S: Simd>(self, simd: S, other: SoftmaxState, layout: QueryLayout, dv: usize) {
        let row_stride = dv.next_multiple_of(S::LANES);
        for lane in (0..self.lanes).step_by(S::LANES) {
            // SAFETY: `lanes` is a multiple of LANES, so both states have the vectors of m and l from `lane` on; the
            // offsets below are those of the rows of these lanes in o.
            unsafe {
                let stats = |s: SoftmaxState| (s.m.add(lane), s.l.add(lane));
                let (m, l) = stats(other);
                let (scale, other_scale) = merge_scales(simd, stats(self), (m.cast_const(), l.cast_const()));
                match layout {
                    QueryLayout::RowsInLanes => {
                        let (base, width) = panel_of_lane::<S>(self.lanes, lane);
                        for i in 0..dv {
                            self.merge_vector(simd, other, base * dv + i * width + lane - base, (scale, other_scale));
                        }
                    }
                    // m and l are one vector, and lane r is one of row r.
                    QueryLayout::HeadDimInLanes(rows) => {
                        let (mut scales, mut other_scales) = ([0.0f32; MAX_LANES], [0.0f32; MAX_LANES]);
                        simd.store(scales.as_mut_ptr(), scale);
                        simd.store(other_scales.as_mut_ptr(), other_scale);
                        for row in 0..rows {
                            let (scale, other_scale) = (simd.splat(scales[row]), simd.splat(other_scales[row]));
                            for at in (row * row_stride..(row + 1) * row_stride).step_by(S::LANES) {
                                self.merge_vector(simd, other, at, (scale, other_scale));
                            }
                        }
                    }
                }
            }
        }
    }

    /// `o[at..] = o[at..] * scale + other.o[at..] * other_scale` for one vector.
    ///
    /// # Safety
    /// Both o have the vector at `at`.
    #[inline(always)]
    unsafe fn merge_vector<S: Simd>(self, simd: S, other: SoftmaxState, at: usize, (scale, other_scale): (S::V, S::V)) {
        // SAFETY: the caller guarantees the vector in both o.
        unsafe {
            let sum = simd.mul(simd.load(self.o.add(at)), scale);
            simd.store(self.o.add(at), simd.fma(simd.load(other.o.add(at)), other_scale, sum));
        }
    }
}
