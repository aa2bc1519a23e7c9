//! Packs rows of q, K, V and dout for the micro-kernels. E is [`Simd::ELEMENTS_PER_LANE`], and a lane holds one f32 or
//! two bf16 that are multiplied together:
//!
//! ```text
//! rows          [rows][D / E]     a lane holds E elements of one row
//! interleaved   [rows / E][D]     a lane holds one column of E rows
//! ```
//!
//! Where E is 1, both are the same.

use crate::cpu::attention::kv_loader::{AsF32, Bf16Pairs, KvLoader};
use crate::cpu::attention::packing::{ZEROS, pack_interleaved, pack_row};
use crate::cpu::simd::{MAX_LANES, Simd, SimdKernel};
use crate::tensor::DType;
use half::{bf16, f16};

/// Distance in lanes between packed rows of `lanes` lanes: whole vectors, and one more, so that rows do not all map to
/// the same few sets of the cache.
pub(super) fn row_stride(lanes: usize) -> usize {
    lanes.next_multiple_of(MAX_LANES) + MAX_LANES
}

/// Packs the rows `from`, of `d` elements of type `dtype`: f32, f16 or bf16, and bf16 if E is 2.
///
/// # Safety
/// The rows are readable. `rows` has room for their number of rows, [`row_stride`] of d / E lanes apart, and
/// `interleaved` for their number, divided by E and rounded up, [`row_stride`] of d lanes apart.
pub(super) struct PackRows<'a> {
    pub(super) dtype: DType,
    pub(super) from: &'a [*const u8],
    pub(super) d: usize,
    pub(super) rows: Option<*mut f32>,
    pub(super) interleaved: Option<*mut f32>,
}

impl SimdKernel for PackRows<'_> {
    type Output = ();
    #[inline(always)]
    unsafe fn run<S: Simd>(self, simd: S) {
        // SAFETY: each arm names a loader for rows of `dtype`.
        unsafe {
            match self.dtype {
                _ if S::ELEMENTS_PER_LANE == 2 => self.pack::<S, Bf16Pairs>(simd),
                DType::F16 => self.pack::<S, AsF32<f16>>(simd),
                DType::BF16 => self.pack::<S, AsF32<bf16>>(simd),
                _ => self.pack::<S, AsF32<f32>>(simd),
            }
        }
    }
}

impl PackRows<'_> {
    /// # Safety
    /// As [`PackRows`]; the loader is one for the rows' dtype.
    #[inline(always)]
    unsafe fn pack<S: Simd, L: KvLoader<S>>(&self, simd: S) {
        let (loader, d) = (L::new(simd, self.dtype), self.d);
        if let Some(to) = self.rows {
            for (i, &row) in self.from.iter().enumerate() {
                // SAFETY: the row is readable, and `rows` has room for row i and, up to the next one, a whole vector.
                unsafe { pack_row(simd, loader, row, to.add(i * row_stride(d / S::ELEMENTS_PER_LANE)), d) };
            }
        }
        if let Some(to) = self.interleaved {
            for (i, rows) in self.from.chunks(S::ELEMENTS_PER_LANE).enumerate() {
                // The weight of the missing partner of an odd last row is 0, and so has the partner to be: 0 * NaN
                // would be NaN.
                let second = rows.get(1).map_or(ZEROS.as_ptr().cast(), |&row| row);
                // SAFETY: the rows are readable, as are ZEROS, and `interleaved` has room for its row i and, up to the
                // next one, a whole vector.
                unsafe { pack_interleaved(simd, loader, (rows[0], second), (to.add(i * row_stride(d)), S::MR), d) };
            }
        }
    }
}
