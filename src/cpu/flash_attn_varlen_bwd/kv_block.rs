//! A block of keys: packed K and V, and the accumulators of dK and dV.

use super::packing::{PackRows, row_stride};
use super::plan::{BwdPlan, BwdTile, KEYS};
use crate::cpu::attention::packing::ZEROS;
use crate::cpu::attention::sequences::Window;
use crate::cpu::element_rows::narrow_row;
use crate::cpu::simd::Simd;
use crate::problem::KvView;
use crate::problem::flash_attn_varlen_bwd::FlashAttnVarlenBwd;
use crate::tensor::Tensor;
use std::ops::Range;

/// Arrays for [`KEYS`] keys. E is [`Simd::ELEMENTS_PER_LANE`].
#[derive(Clone, Copy)]
pub(super) struct KvBlock {
    /// Rows of K, of D / E lanes, [`row_stride`] apart.
    pub(super) k: *mut f32,
    /// E rows of K, interleaved, of D lanes, [`row_stride`] apart; `k` where E is 1.
    pub(super) k_interleaved: *mut f32,
    /// Rows of V, as those of K.
    pub(super) v: *mut f32,
    /// f32, rows of D, [`row_stride`] apart.
    pub(super) dk: *mut f32,
    /// f32, rows of Dv, [`row_stride`] apart.
    pub(super) dv: *mut f32,
}

impl KvBlock {
    /// f32 of a block.
    pub(super) fn len(d: usize, dv: usize) -> usize {
        KEYS * (3 * row_stride(d) + 2 * row_stride(dv))
    }

    /// A block in memory of [`KvBlock::len`] f32. Packed rows have no more lanes than f32.
    pub(super) fn new<S: Simd>(memory: *mut f32, d: usize, dv: usize) -> Self {
        let second = memory.wrapping_add(KEYS * row_stride(d));
        let v = second.wrapping_add(KEYS * row_stride(d));
        let dk = v.wrapping_add(KEYS * row_stride(dv));
        let k_interleaved = if S::ELEMENTS_PER_LANE == 1 { memory } else { second };
        Self { k: memory, k_interleaved, v, dk, dv: dk.wrapping_add(KEYS * row_stride(d)) }
    }

    /// Load the keys at positions `keys` of the tile's sequence, and set their gradients to 0.
    ///
    /// # Safety
    /// The problem's views are valid host memory; plan and tile are the problem's; `keys` are at most [`KEYS`] of the
    /// tile's; nothing else accesses the block's memory. If E is 2, K and V are bf16.
    #[inline(always)]
    pub(super) unsafe fn load<S: Simd>(
        self,
        simd: S,
        problem: &FlashAttnVarlenBwd,
        (plan, tile): (&BwdPlan, &BwdTile),
        keys: Range<usize>,
    ) {
        let forward = &problem.forward;
        let first = plan.sequences[tile.sequence].keys.first_row();
        let interleaved = (S::ELEMENTS_PER_LANE > 1 && tile.gradients.dq()).then_some(self.k_interleaved);
        let (k, v) = (&forward.k, &forward.v);
        // The probabilities of keys that no query of the tile attends to are 0, which times a NaN in a key would be NaN.
        let (sequence, mut attended) = (&plan.sequences[tile.sequence], [true; KEYS]);
        if sequence.has_row_masks() {
            sequence.cover(&tile.queries, Window::of(&forward.score), keys.start, &mut attended[..keys.len()]);
        }
        for (view, rows, interleaved, d) in
            [(k, self.k, interleaved, forward.head_dim), (v, self.v, None, forward.value_dim)]
        {
            let mut from = [std::ptr::null(); KEYS];
            let from = &mut from[..keys.len()];
            for (from, (key, attended)) in from.iter_mut().zip(keys.clone().zip(attended)) {
                *from = if attended {
                    row_of(view, forward.kv_dtype.size(), first + key, tile.kv_head)
                } else {
                    ZEROS.as_ptr().cast()
                };
            }
            // SAFETY: the keys are some of the sequence, so `from` are rows of the view; the arrays have room for KEYS
            // rows.
            unsafe { simd.vectorize(PackRows { dtype: forward.kv_dtype, from, d, rows: Some(rows), interleaved }) };
        }
        // SAFETY: dk and dv of the block have KEYS rows each.
        unsafe {
            self.dk.write_bytes(0, KEYS * row_stride(forward.head_dim));
            self.dv.write_bytes(0, KEYS * row_stride(forward.value_dim));
        }
    }

    /// Store the gradients of the keys.
    ///
    /// # Safety
    /// As [`KvBlock::load`]; no other task accesses these keys of the KV head in the results dk and dv.
    #[inline(always)]
    pub(super) unsafe fn store_gradients<S: Simd>(
        self,
        simd: S,
        problem: &FlashAttnVarlenBwd,
        (plan, tile): (&BwdPlan, &BwdTile),
        keys: Range<usize>,
    ) {
        let forward = &problem.forward;
        let first = plan.sequences[tile.sequence].keys.first_row();
        for (j, key) in keys.enumerate().map(|(j, key)| (j, first + key)) {
            // SAFETY: row j < KEYS of the block; `key` is a row of the dense [Tk, Hkv, D] and [Tk, Hkv, Dv].
            unsafe {
                let store = |result: &Tensor, from: *mut f32, d: usize, factor: f32| {
                    let from = from.add(j * row_stride(d));
                    scale_row(simd, from, d, factor);
                    let at = (key * forward.num_kv_heads + tile.kv_head) * d * result.dtype.size();
                    narrow_row(simd, result.dtype, from, result.data.add(at), d);
                };
                store(&problem.dk, self.dk, forward.head_dim, forward.score.softmax_scale);
                store(&problem.dv, self.dv, forward.value_dim, 1.0);
            }
        }
    }
}

/// Multiply the `d` elements of a row by `factor`.
///
/// # Safety
/// `row` has `d` elements rounded up to whole vectors, and is writable.
#[inline(always)]
pub(super) unsafe fn scale_row<S: Simd>(simd: S, row: *mut f32, d: usize, factor: f32) {
    for i in (0..d).step_by(S::LANES) {
        // SAFETY: i < d, and the row goes on to the end of the vector.
        unsafe { simd.store(row.add(i), simd.mul(simd.load(row.add(i)), simd.splat(factor))) };
    }
}

/// The address of row `key` of a head.
fn row_of(view: &KvView, element_bytes: usize, key: usize, head: usize) -> *const u8 {
    let at = key as i64 * view.token_stride + head as i64 * view.head_stride;
    view.data.wrapping_offset(at as isize * element_bytes as isize)
}

/// Set dk and dv of keys that no query attends to to 0.
///
/// # Safety
/// dk and dv are writable; no other task accesses these keys.
pub(super) unsafe fn clear_gradients(problem: &FlashAttnVarlenBwd, keys: &Range<usize>) {
    for result in [&problem.dk, &problem.dv] {
        let bytes = (result.dims[1] * result.dims[2]) as usize * result.dtype.size();
        // SAFETY: `keys` are rows of a dense result; zero bytes are 0.0 in every dtype.
        unsafe { result.data.add(keys.start * bytes).write_bytes(0, keys.len() * bytes) };
    }
}
