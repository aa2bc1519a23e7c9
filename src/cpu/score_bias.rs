//! The bias of scores, `[B or 1, Hq or 1, Sq, Sk]`, element by element.

use super::simd::{MAX_LANES, Simd};
use crate::problem::attention::Bias;
use crate::tensor::DType;
use half::{bf16, f16};
use std::ptr::null;

/// The bias of one query row and head.
#[derive(Clone, Copy)]
pub(super) struct BiasRow {
    /// The element of the sequence's key 0.
    from: *const u8,
    dtype: DType,
    /// Elements of the row; those past them are 0.
    keys: usize,
}

impl BiasRow {
    /// No bias.
    pub(super) const NONE: Self = Self { from: null(), dtype: DType::F32, keys: 0 };

    /// That of row i of sequence b and head h.
    pub(super) fn of(bias: &Bias, b: usize, h: usize, i: usize) -> Self {
        bias.row(b, h, i).map_or(Self::NONE, |from| Self { from, dtype: bias.dtype, keys: bias.keys })
    }

    /// The bias of key j.
    ///
    /// # Safety
    /// The row is readable.
    #[inline(always)]
    unsafe fn at(&self, j: usize) -> f32 {
        if j >= self.keys {
            return 0.0;
        }
        // SAFETY: the row has `keys` elements, of which j is one. They are aligned as their type.
        unsafe {
            match self.dtype {
                DType::BF16 => self.from.cast::<bf16>().add(j).read_unaligned().to_f32(),
                DType::F16 => self.from.cast::<f16>().add(j).read_unaligned().to_f32(),
                _ => self.from.cast::<f32>().add(j).read_unaligned(),
            }
        }
    }
}

/// A vector of the biases of LANES rows: of row `lane` that of key `key(lane)`.
///
/// # Safety
/// The rows are readable.
#[inline(always)]
pub(super) unsafe fn bias_of_lanes<S: Simd>(simd: S, rows: &[BiasRow], key: impl Fn(usize) -> usize) -> S::V {
    let mut biases = [0.0f32; MAX_LANES];
    for (lane, (bias, row)) in biases.iter_mut().zip(&rows[..S::LANES]).enumerate() {
        // SAFETY: the caller guarantees readable rows.
        *bias = unsafe { row.at(key(lane)) };
    }
    // SAFETY: the array has MAX_LANES elements, and LANES <= MAX_LANES.
    unsafe { simd.load(biases.as_ptr()) }
}
