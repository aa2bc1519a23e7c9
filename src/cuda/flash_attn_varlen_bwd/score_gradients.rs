//! dS of pairs of rows and keys in memory: where the kernel for dK and dV stores it, and the kernels that compute dQ and the
//! gradient of a shared bias from it.

use super::bias::{self, DsPlaces, has_plain_logits, is_aligned};
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
use crate::tensor::DType;
use std::ptr::null_mut;

const DQ_KERNEL: &str = "attention_bwd_dq_from_ds";

impl ScoreGradients {
    pub(super) const NONE: Self = Self { data: null_mut(), pitch: 0, has_token_rows: 0 };

    /// Where the kernel for dK and dV stores dS of a call, if it is worth it and one of `places` serves. Where the gradient of the bias is dS,
    /// that is its place. Otherwise it is in the workspace in q's type, after `delta` and the `copy` of the bias, if that has room: if
    /// sequences or heads share the bias, whose rows must begin with chunks then, or if the bias is of f32 beside 16-bit operands.
    pub(super) fn of(call: &FlashAttnVarlenBwd, places: DsPlaces, copy: Option<&PaddedBias>, delta: *mut f32) -> Self {
        let forward = &call.forward;
        let Some(bias) = forward.score.bias.as_ref().filter(|_| has_plain_logits(forward)) else { return Self::NONE };
        let is_f32 = bias.dtype != forward.q.dtype;
        let own = bias::stored_dbias(call);
        if let Some(dbias) = own.filter(|dbias| places.gradient && dbias.dtype == bias.dtype) {
            return Self { data: dbias.data.cast(), pitch: bias.keys as i32, has_token_rows: 0 };
        }
        let is_worth_it = is_f32 || (call.dbias.is_some() && own.is_none() && is_aligned(call, bias));
        if places.workspace && is_worth_it { Self::in_workspace(call, bias, copy, delta) } else { Self::NONE }
    }

    /// The same with a row of each query head and token.
    fn in_workspace(call: &FlashAttnVarlenBwd, bias: &Bias, copy: Option<&PaddedBias>, delta: *mut f32) -> Self {
        let forward = &call.forward;
        let bytes = score_gradient_bytes(forward.num_q_heads, forward.num_rows, bias.keys);
        let place = bytes.and_then(|bytes| bias::place_after_delta(call, delta, copy, bytes));
        let (Some(pitch), Some(data)) = (score_gradient_columns(bias.keys), place) else { return Self::NONE };
        Self { data: data.cast(), pitch: pitch as i32, has_token_rows: 1 }
    }

    /// Whether they are in the workspace, and dbias is a sum of them.
    pub(super) fn are_summed(&self) -> bool {
        self.has_token_rows != 0
    }

    pub(super) fn are_stored(&self) -> bool {
        !self.data.is_null()
    }
}

/// The tile of the kernel that computes dQ from `ds`.
pub(super) fn dq_tile(forward: &Attention, ds: &ScoreGradients) -> Result<&'static AttentionBwdDqFromDsTile> {
    let dim = forward.head_dim.max(forward.value_dim);
    let is_f32 = !ds.are_summed() && forward.score.bias.is_some_and(|bias| bias.dtype == DType::F32);
    let rows = match (is_f32, ds.pitch % 8) {
        (true, 0 | 4) => "f32_aligned",
        (true, _) => "f32",
        (false, 0) => "aligned",
        (false, _) => "shifted",
    };
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
