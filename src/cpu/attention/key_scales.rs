//! Scales of the keys of a block, laid out as its scores are.

use super::block_rows::{BLOCK, HeadScales};
use crate::cpu::simd::{MAX_LANES, Simd};

/// Elements of the scales of K, and of those of V: one per key, and a vector more, because whole vectors are loaded.
pub(super) const SCALES: usize = BLOCK + MAX_LANES;

/// The scales of the keys of a block, in the order of the steps of its scores: of K, which multiply products, and of V, which
/// multiply p.
#[derive(Clone, Copy)]
pub(super) struct KeyScales {
    k: *const f32,
    v: *const f32,
    /// Lanes of a key in a step; 0 if all lanes of a step have one key.
    rows: usize,
}

impl KeyScales {
    /// One scale per key, for scores whose lanes all have the key of their step. Past the block's last key there may be one
    /// more, because keys are computed in pairs.
    ///
    /// # Safety
    /// The scales of the block's keys are readable, `to` has 2 * [`SCALES`] elements.
    #[inline(always)]
    pub(super) unsafe fn load_per_key(from: HeadScales, to: *mut f32) -> Self {
        let (k, v) = (to, to.wrapping_add(SCALES));
        for j in 0..from.len() {
            // SAFETY: j is a key of the block, of which there are at most BLOCK, below SCALES.
            unsafe {
                let (k_scale, v_scale) = from.of_key(j);
                k.add(j).write(k_scale);
                v.add(j).write(v_scale);
            }
        }
        // SAFETY: from.len() is at most BLOCK, below SCALES.
        unsafe {
            k.add(from.len()).write(0.0);
            v.add(from.len()).write(0.0);
        }
        Self { k, v, rows: 0 }
    }

    /// The scales of scores in the layout of `gemv`: `steps` steps, each with LANES / ROWS keys, E apart, of ROWS lanes each.
    /// Keys past the block have scales of 0.
    ///
    /// # Safety
    /// As [`Self::load_per_key`]; the steps have at most [`BLOCK`] keys.
    #[inline(always)]
    pub(super) unsafe fn load_per_lane<S: Simd, const ROWS: usize>(
        from: HeadScales,
        steps: usize,
        to: *mut f32,
    ) -> Self {
        let (k, v, keys) = (to, to.wrapping_add(SCALES), S::LANES / ROWS);
        for step in 0..steps {
            let first = step / S::ELEMENTS_PER_LANE * keys * S::ELEMENTS_PER_LANE + step % S::ELEMENTS_PER_LANE;
            for index in 0..keys {
                let j = first + index * S::ELEMENTS_PER_LANE;
                // SAFETY: j is a key of the block where it is below its length, and step * keys + index below BLOCK.
                unsafe {
                    let (k_scale, v_scale) = if j < from.len() { from.of_key(j) } else { (0.0, 0.0) };
                    k.add(step * keys + index).write(k_scale);
                    v.add(step * keys + index).write(v_scale);
                }
            }
        }
        Self { k, v, rows: ROWS }
    }

    /// The scales without those of the first `keys` keys, of which each is a step.
    #[inline(always)]
    pub(super) fn without_first(self, keys: usize) -> Self {
        debug_assert!(self.rows == 0);
        Self { k: self.k.wrapping_add(keys), v: self.v.wrapping_add(keys), ..self }
    }

    /// The scales of K of a step.
    ///
    /// # Safety
    /// The step is one of those that the scales were loaded for.
    #[inline(always)]
    pub(super) unsafe fn k<S: Simd>(self, simd: S, step: usize) -> S::V {
        // SAFETY: the caller guarantees it.
        unsafe { self.of_step(simd, self.k, step) }
    }

    /// p of a step, multiplied by the scales of V. A p of 0 stays 0, whatever the scale.
    ///
    /// # Safety
    /// As [`Self::k`].
    #[inline(always)]
    pub(super) unsafe fn weigh<S: Simd>(self, simd: S, step: usize, p: S::V) -> S::V {
        let zero = simd.splat(0.0);
        // SAFETY: the caller guarantees it.
        let scale = unsafe { self.of_step(simd, self.v, step) };
        simd.mul(p, simd.select_lt(zero, p, scale, zero))
    }

    /// # Safety
    /// As [`Self::k`].
    #[inline(always)]
    unsafe fn of_step<S: Simd>(self, simd: S, scales: *const f32, step: usize) -> S::V {
        // SAFETY: a step has one key, or LANES / rows of them, after which there is a vector of room.
        unsafe {
            match self.rows {
                0 => simd.splat(scales.add(step).read()),
                rows => simd.repeat_each(simd.load(scales.add(step * (S::LANES / rows))), rows),
            }
        }
    }
}
