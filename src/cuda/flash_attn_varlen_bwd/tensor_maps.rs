//! The tensor maps of Hopper's gradients.

use crate::cuda::tensor_map::{Axis, L2Promotion, TensorMap};
use crate::error::Result;
use crate::problem::KvView;
use crate::problem::flash_attn_varlen_bwd::FlashAttnVarlenBwd;
use crate::tensor::Tensor;

/// What a tensor map is encoded from.
pub(super) struct TensorMapConfig {
    pub(super) data: *const u8,
    pub(super) axes: [Axis; 5],
}

impl TensorMapConfig {
    /// The configurations of q, k, v, dout, dk, dv, with boxes of `queries`, `keys` (loads) and `written` (stores) rows.
    pub(super) fn all(problem: &FlashAttnVarlenBwd, [queries, keys, written]: [i64; 3], columns: i64) -> [Self; 6] {
        let forward = &problem.forward;
        let view_config = |view: &KvView, dim: usize| {
            let sizes = [problem.num_keys as i64, forward.num_kv_heads as i64, dim as i64];
            Self::new(view.data, [view.token_stride, view.head_stride], sizes, [keys, columns])
        };
        [
            Self::of_tensor(&forward.q, [queries, columns]),
            view_config(&forward.k, forward.head_dim),
            view_config(&forward.v, forward.value_dim),
            Self::of_tensor(&problem.dout, [queries, columns]),
            Self::of_tensor(&problem.dk, [written, columns]),
            Self::of_tensor(&problem.dv, [written, columns]),
        ]
    }

    pub(super) fn of_tensor(tensor: &Tensor, box_len: [i64; 2]) -> Self {
        let sizes = [0, 1, 2].map(|axis| tensor.dims[axis]);
        Self::new(tensor.data, [tensor.stride(0), tensor.stride(1)], sizes, box_len)
    }

    pub(super) fn encode(&self, problem: &FlashAttnVarlenBwd) -> Result<TensorMap> {
        TensorMap::new(problem.forward.q.dtype, self.data, &self.axes, L2Promotion::Bytes256)
    }

    /// Boxes of `box_len` rows and columns of one head of `[rows, heads, dim]`, clipped at the end of a sequence: see
    /// `RaggedRows` of `kernels/include/hopper_bwd/ragged_rows.cuh`.
    fn new(data: *const u8, [row, head]: [i64; 2], [rows, heads, dim]: [i64; 3], box_len: [i64; 2]) -> Self {
        /// End of the rows axis, at which boxes are clipped.
        const END: i64 = 1 << 30;
        /// Stride of the last axis plus a row, in 16-bit elements: END of these steps wrap around the address space.
        const WRAP: i64 = 1 << 33;
        // The stride of an axis of length 1 is never used but must be valid.
        const ANY_STRIDE: i64 = 64;
        let row = if rows > 1 { row } else { ANY_STRIDE };
        let head = if heads > 1 { head } else { ANY_STRIDE };
        Self {
            data,
            axes: [
                Axis { len: dim, stride: 1, box_len: box_len[1] },
                Axis { len: heads, stride: head, box_len: 1 },
                Axis { len: END, stride: row, box_len: box_len[0] },
                Axis { len: 2 * END, stride: row, box_len: 1 },
                Axis { len: 2 * END, stride: WRAP - row, box_len: 1 },
            ],
        }
    }
}
