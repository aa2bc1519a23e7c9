//! A block of keys: K and V as f32, and the sums of their gradients.

use super::panel::row_stride;
use super::plan::{Item, KEYS, Plan};
use crate::cpu::element_rows::{narrow_row, widen_row};
use crate::cpu::simd::Simd;
use crate::problem::KvView;
use crate::problem::flash_attn_varlen_bwd::FlashAttnVarlenBwd;
use crate::tensor::Tensor;
use std::ops::Range;

/// Rows [`row_stride`] apart, [`KEYS`] of them.
#[derive(Clone, Copy)]
pub(super) struct Block {
    pub(super) k: *mut f32,
    pub(super) v: *mut f32,
    pub(super) dk: *mut f32,
    pub(super) dv: *mut f32,
}

impl Block {
    /// f32 that a block takes.
    pub(super) fn len(d: usize, dv: usize) -> usize {
        2 * KEYS * (row_stride(d) + row_stride(dv))
    }

    /// In memory of [`Block::len`] elements.
    pub(super) fn new(memory: *mut f32, d: usize, dv: usize) -> Self {
        let v = memory.wrapping_add(KEYS * row_stride(d));
        let dk = v.wrapping_add(KEYS * row_stride(dv));
        Self { k: memory, v, dk, dv: dk.wrapping_add(KEYS * row_stride(d)) }
    }

    /// Make these the keys at positions `keys` of the item's sequence, with gradients of 0.
    ///
    /// # Safety
    /// The problem's views are valid host memory; plan and item are the problem's, `keys` at most [`KEYS`] of the item;
    /// the memory is the block's own.
    #[inline(always)]
    pub(super) unsafe fn load<S: Simd>(
        self,
        simd: S,
        problem: &FlashAttnVarlenBwd,
        (plan, item): (&Plan, &Item),
        keys: Range<usize>,
    ) {
        let forward = &problem.forward;
        let first = plan.sequences[item.sequence].keys.first_row();
        for (view, to, d) in [(&forward.k, self.k, forward.head_dim), (&forward.v, self.v, forward.value_dim)] {
            for (j, key) in keys.clone().enumerate() {
                let from = row_of(view, forward.kv_dtype.size(), first + key, item.kv_head);
                // SAFETY: a row of the view; the block has room for it.
                unsafe { widen_row(simd, forward.kv_dtype, from, to.add(j * row_stride(d)), d) };
            }
        }
        // SAFETY: the block's sums.
        unsafe {
            self.dk.write_bytes(0, KEYS * row_stride(forward.head_dim));
            self.dv.write_bytes(0, KEYS * row_stride(forward.value_dim));
        }
    }

    /// Write the gradients of the keys.
    ///
    /// # Safety
    /// As [`Block::load`]; no other task accesses these keys of the KV head in dk and dv.
    #[inline(always)]
    pub(super) unsafe fn write<S: Simd>(
        self,
        simd: S,
        problem: &FlashAttnVarlenBwd,
        (plan, item): (&Plan, &Item),
        keys: Range<usize>,
    ) {
        let forward = &problem.forward;
        let first = plan.sequences[item.sequence].keys.first_row();
        for (j, key) in keys.enumerate().map(|(j, key)| (j, first + key)) {
            // SAFETY: row j of the block; row `key` of the dense [Tk, Hkv, D] and [Tk, Hkv, Dv].
            unsafe {
                let write = |result: &Tensor, from: *mut f32, d: usize, factor: f32| {
                    let from = from.add(j * row_stride(d));
                    scale_row(simd, from, d, factor);
                    let at = (key * forward.num_kv_heads + item.kv_head) * d * result.dtype.size();
                    narrow_row(simd, result.dtype, from, result.data.add(at), d);
                };
                write(&problem.dk, self.dk, forward.head_dim, forward.score.softmax_scale);
                write(&problem.dv, self.dv, forward.value_dim, 1.0);
            }
        }
    }
}

/// # Safety
/// `row` has `d` elements, and is writable up to the end of a vector.
#[inline(always)]
pub(super) unsafe fn scale_row<S: Simd>(simd: S, row: *mut f32, d: usize, factor: f32) {
    for i in (0..d).step_by(S::LANES) {
        // SAFETY: i < d; the row goes on to the end of a vector.
        unsafe { simd.store(row.add(i), simd.mul(simd.load(row.add(i)), simd.splat(factor))) };
    }
}

/// The address of row `key` of a head.
fn row_of(view: &KvView, element: usize, key: usize, head: usize) -> *const u8 {
    let at = key as i64 * view.token_stride + head as i64 * view.head_stride;
    view.data.wrapping_offset(at as isize * element as isize)
}

/// Keys that no query sees have no gradient.
///
/// # Safety
/// dk and dv are writable; no other task accesses these keys.
pub(super) unsafe fn clear(problem: &FlashAttnVarlenBwd, keys: &Range<usize>) {
    for result in [&problem.dk, &problem.dv] {
        let bytes = (result.dims[1] * result.dims[2]) as usize * result.dtype.size();
        // SAFETY: rows of a dense result; zero bytes are 0.0 in every dtype.
        unsafe { result.data.add(keys.start * bytes).write_bytes(0, keys.len() * bytes) };
    }
}
