//! dS of pairs of rows and keys in memory: where the kernel for dK and dV stores it, and the kernels that compute dQ and the
//! gradient of a shared bias from it.

use super::bias::{self, has_plain_logits, has_type_of_q, is_aligned};
use super::row_blocks::RowBlocks;
use super::{Launch, Parameter};
use crate::cuda::padded_bias::PaddedBias;
use crate::cuda::params::bias::{DQ_FROM_DS_ROWS, ScoreGradients};
use crate::cuda::tiles::{ATTENTION_BWD_DQ_FROM_DS, AttentionBwdDqFromDsTile};
use crate::cuda::variants;
use crate::error::{Error, Result};
use crate::problem::attention::{Attention, Bias};
use crate::problem::flash_attn_varlen_bwd::FlashAttnVarlenBwd;
use crate::problem::workspace::{score_gradient_bytes, score_gradient_columns};
use std::ptr::null_mut;

const DQ_KERNEL: &str = "attention_bwd_dq_from_ds";

impl ScoreGradients {
    pub(super) const NONE: Self = Self { data: null_mut(), pitch: 0, has_token_rows: 0 };

    /// Where the kernel for dK and dV stores dS, if it `can_store` it and the call has the gradient of a bias of q's type. Where that gradient
    /// is dS, it is stored in its place; where sequences or heads share the bias, whose rows must begin with chunks then, after `delta` and the
    /// `copy` of the bias in the workspace, if it has room.
    pub(super) fn of(call: &FlashAttnVarlenBwd, can_store: bool, copy: Option<&PaddedBias>, delta: *mut f32) -> Self {
        let forward = &call.forward;
        let (Some(bias), Some(dbias)) = (&forward.score.bias, &call.dbias) else { return Self::NONE };
        if !can_store || !has_plain_logits(forward) || !has_type_of_q(call, bias) {
            return Self::NONE;
        }
        if bias::stored_dbias(call).is_some() {
            Self { data: dbias.data.cast(), pitch: bias.keys as i32, has_token_rows: 0 }
        } else {
            Self::in_workspace(call, bias, copy, delta)
        }
    }

    /// The same with a row of each query head and token, of a bias that sequences or heads share.
    fn in_workspace(call: &FlashAttnVarlenBwd, bias: &Bias, copy: Option<&PaddedBias>, delta: *mut f32) -> Self {
        let forward = &call.forward;
        if !is_aligned(call, bias) {
            return Self::NONE;
        }
        let bytes = score_gradient_bytes(forward.num_q_heads, forward.num_rows, bias.keys);
        let place = bytes.and_then(|bytes| bias::place_after_delta(call, delta, copy, bytes));
        let (Some(pitch), Some(data)) = (score_gradient_columns(bias.keys), place) else { return Self::NONE };
        Self { data: data.cast(), pitch: pitch as i32, has_token_rows: 1 }
    }

    /// Whether dbias is a sum of them.
    pub(super) fn are_summed(&self) -> bool {
        self.has_token_rows != 0
    }

    pub(super) fn are_stored(&self) -> bool {
        !self.data.is_null()
    }
}

/// The tile of the kernel that computes dQ from `ds`.
pub(super) fn dq_tile(forward: &Attention, ds: &ScoreGradients) -> Result<&'static AttentionBwdDqFromDsTile> {
    let (dim, rows) = (forward.head_dim.max(forward.value_dim), if ds.pitch % 8 == 0 { "aligned" } else { "shifted" });
    let tile = ATTENTION_BWD_DQ_FROM_DS.iter().find(|tile| tile.rows == rows && tile.head_dim as usize >= dim);
    tile.ok_or_else(|| Error::internal(format!("{DQ_KERNEL} is not built for head dimension {dim}")))
}

/// The launch that computes dQ of the sequences all of whose dS has been stored, from blocks of packed query rows.
pub(super) fn dq_launch<'p>(
    forward: &Attention,
    tile: &AttentionBwdDqFromDsTile,
    blocks: RowBlocks,
    parameter: Parameter<'p>,
) -> Result<Option<Launch<'p>>> {
    let values = [variants::dtype_value(forward.q.dtype), tile.head_dim_value, tile.rows];
    let variant = variants::find(DQ_KERNEL, &values)?;
    let ctas = blocks.count(DQ_FROM_DS_ROWS as usize) * forward.num_kv_heads * tile.parts as usize;
    // A warp has 32 rows.
    let threads = DQ_FROM_DS_ROWS as u32 * tile.column_warps;
    bias::launch(DQ_KERNEL, variant, ctas, [threads, tile.shared_bytes], parameter)
}
