//! The tensor maps of prefill: axes and boxes of q, K, V and out, and which layouts TMA and `cp.async` can load.

#[cfg(test)]
mod tests;

use super::HopperPrefill;
use crate::cuda::tensor_map::{Axis, L2Promotion, TensorMap, supports_tma};
use crate::error::Result;
use crate::problem::KvView;
use crate::problem::attention::{Attention, KeyStorage};
use crate::tensor::Tensor;

/// 16-bit elements of a 16-byte chunk, which a lane copies at a time.
const CHUNK: i64 = 8;

/// Rows of a swizzle atom: a page must be a multiple of this many tokens for TMA.
pub(super) const ATOM_ROWS: i64 = 8;

/// Rows of a warp, which one TMA store writes.
pub(super) const WARP_ROWS: i64 = 16;

impl HopperPrefill {
    /// Whether D or Dv is smaller than the tile's: tensor maps clip the columns of each head.
    pub(super) fn clips_columns(&self, problem: &Attention) -> bool {
        [problem.head_dim, problem.value_dim] != [self.tile.dim, self.tile.value_dim].map(|dim| dim as usize)
    }

    /// Whether K and V are pages in boxes of one atom column, of several. Boxes that clip columns cannot have more. They take the
    /// kernels for contiguous keys, whose blocks are one atom column after the other.
    pub(in crate::cuda::attention) fn clips_pages(&self, problem: &Attention) -> bool {
        matches!(problem.keys.storage, KeyStorage::Paged(_))
            && self.clips_columns(problem)
            && i64::from(self.tile.dim) > self.tile.kv_atom_row()
            && self.loads_kv_by_tma(problem)
    }

    /// Tensor map of K or V with `dim` columns per head, in boxes of `keys` keys. With promotion, calls that read every
    /// key once take 6 % longer.
    pub(in crate::cuda::attention) fn key_map(
        &self,
        problem: &Attention,
        view: &KvView,
        dim: usize,
        keys: i64,
    ) -> Result<TensorMap> {
        TensorMap::new(problem.kv_dtype, view.data, &self.key_axes(problem, view, dim, keys), L2Promotion::None)
    }

    /// Keys per box: contiguous, those of a block; paged, the largest power of two that divides page and block, so that a
    /// box is within one page and one block.
    pub(super) fn keys_per_box(&self, problem: &Attention) -> i64 {
        let block = i64::from(self.tile.keys);
        let KeyStorage::Paged(table) = problem.keys.storage else { return block };
        let both = (table.page_size as i64 | block) / ATOM_ROWS;
        ATOM_ROWS * (both & -both)
    }

    /// Whether a box of q has one atom column: columns are clipped, or the box has fewer rows than the tile, whose next atom column
    /// is further away.
    pub(super) fn query_boxes_are_columns(&self, problem: &Attention) -> bool {
        self.clips_columns(problem) || self.queries_per_tile() * self.pack_gqa < self.tile.rows()
    }

    pub(in crate::cuda::attention) fn query_axes(&self, problem: &Attention) -> [Axis; 5] {
        let are_columns = self.query_boxes_are_columns(problem);
        self.row_axes(problem, &problem.q, problem.head_dim, self.queries_per_tile(), are_columns)
    }

    pub(super) fn out_axes(&self, problem: &Attention) -> [Axis; 5] {
        let queries = WARP_ROWS / self.pack_gqa;
        let mut axes = self.row_axes(problem, &problem.out, problem.value_dim, queries, self.clips_columns(problem));
        if self.tile.stages_out_by_atom_column() {
            axes[4].box_len = 1;
        }
        axes
    }

    /// Axes of q or out as `[atom column, token, pack, head of the pack, column]`, the innermost first. A box is `queries` packed
    /// queries, with all atom columns or with one.
    fn row_axes(&self, problem: &Attention, tensor: &Tensor, dim: usize, queries: i64, are_columns: bool) -> [Axis; 5] {
        let [element, atom_columns] = column_axes(dim, self.tile.atom_row(tensor.dtype.size()), are_columns);
        let heads = self.heads_per_pack(problem);
        [
            element,
            axis(heads, tensor.stride(1), self.pack_gqa),
            axis(self.num_packs(problem), heads * tensor.stride(1), 1),
            axis(problem.num_rows as i64, tensor.stride(0), queries),
            atom_columns,
        ]
    }

    /// Axes of K or V with `dim` columns per head, the innermost first. Contiguous `[1, head, atom column, token, column]`;
    /// paged `[page, row group, atom column of all heads, token of the row group, column]`, clipped
    /// `[page, row group, head, token of the row group, column]`. A box is `keys` keys of a head.
    fn key_axes(&self, problem: &Attention, view: &KvView, dim: usize, keys: i64) -> [Axis; 5] {
        let (heads, atom_row) = (problem.num_kv_heads as i64, self.tile.kv_atom_row());
        let [element, atom_columns] = column_axes(dim, atom_row, self.clips_columns(problem));
        match problem.keys.storage {
            KeyStorage::Contiguous { total } => [
                element,
                axis(total as i64, view.token_stride, keys),
                atom_columns,
                axis(heads, view.head_stride, 1),
                axis(1, 0, 1),
            ],
            KeyStorage::Paged(table) => {
                let head_columns = if self.clips_columns(problem) {
                    axis(heads, view.head_stride, 1)
                } else {
                    let other_heads = (heads - 1) * step(problem.num_kv_heads, view.head_stride) / atom_row;
                    axis(other_heads + atom_columns.len, atom_row, atom_columns.len)
                };
                let (row_groups, pages) = (table.page_size as i64 / ATOM_ROWS, table.num_pages as i64);
                [
                    element,
                    axis(ATOM_ROWS, view.token_stride, ATOM_ROWS),
                    head_columns,
                    axis(row_groups, ATOM_ROWS * view.token_stride, keys / ATOM_ROWS),
                    axis(pages, view.page_stride, 1),
                ]
            }
        }
    }

    /// Whether the kernel can load K and V, by TMA or with `cp.async`.
    pub(in crate::cuda::attention) fn loads_kv(&self, problem: &Attention) -> bool {
        self.loads_kv_by_tma(problem) || self.tile.kv_bytes() == 2 && loads_kv_by_cp_async(problem)
    }

    /// Whether TMA can load K and V: pages are a multiple of [`ATOM_ROWS`] tokens, and heads start at multiples of an atom
    /// row unless columns are clipped. Otherwise the kernel copies rows with `cp.async`.
    pub(in crate::cuda::attention) fn loads_kv_by_tma(&self, problem: &Attention) -> bool {
        if self.is_f32() {
            return false;
        }
        let (atom_row, keys) = (self.tile.kv_atom_row(), self.keys_per_box(problem));
        [(&problem.k, problem.head_dim), (&problem.v, problem.value_dim)].into_iter().all(|(view, dim)| {
            let is_regular = match problem.keys.storage {
                KeyStorage::Contiguous { .. } => true,
                KeyStorage::Paged(table) => {
                    let step = step(problem.num_kv_heads, view.head_stride);
                    let heads_fit = self.clips_columns(problem)
                        || step % atom_row == 0
                            && step / atom_row * (problem.num_kv_heads as i64) < i64::from(i32::MAX);
                    table.page_size as i64 % ATOM_ROWS == 0 && heads_fit
                }
            };
            is_regular && supports_tma(problem.kv_dtype, view.data, &self.key_axes(problem, view, dim, keys))
        })
    }
}

/// Whether `cp.async` can load K and V: rows are whole 16-byte chunks, and 32 bits hold the index of any chunk of a head.
fn loads_kv_by_cp_async(problem: &Attention) -> bool {
    let KeyStorage::Paged(table) = problem.keys.storage else { return false };
    let can_number = |view: &KvView| {
        let axes = [(table.num_pages, view.page_stride), (table.page_size, view.token_stride)];
        let steps = axes.map(|(count, stride)| step(count, stride));
        let last: i128 = axes.iter().zip(steps).map(|((count, _), step)| (*count as i128 - 1) * i128::from(step)).sum();
        let are_chunks = [steps[0], steps[1], step(problem.num_kv_heads, view.head_stride)]
            .iter()
            .all(|step| *step >= 0 && step % CHUNK == 0);
        are_chunks && last / i128::from(CHUNK) <= i128::from(u32::MAX)
    };
    table.num_pages > 0 && [problem.k, problem.v].iter().all(can_number)
}

/// The axes of `dim` columns of a head: those of an atom row, and the atom columns, all of them in a box. Or the first axis has
/// all columns of the head, and a box has one atom column.
fn column_axes(dim: usize, atom_row: i64, are_columns: bool) -> [Axis; 2] {
    let dim = dim as i64;
    let (len, atom_columns) = if are_columns { (dim, 1) } else { (atom_row, dim / atom_row) };
    [Axis { len, stride: 1, box_len: atom_row }, axis(atom_columns, atom_row, atom_columns)]
}

/// The stride of an axis with several entries, else 0.
pub(super) fn step(count: usize, stride: i64) -> i64 {
    if count > 1 { stride } else { 0 }
}

/// An axis. The stride of one with a single entry may be anything, but TMA needs a valid one.
fn axis(len: i64, stride: i64, box_len: i64) -> Axis {
    Axis { len, stride: if len > 1 { stride } else { 128 }, box_len }
}
