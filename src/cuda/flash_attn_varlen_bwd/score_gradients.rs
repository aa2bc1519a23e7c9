//! dS of pairs of rows and keys in memory: where the kernel for dK and dV stores it, and the kernels that compute dQ and the
//! gradient of a shared bias from it.

use super::bias::{self, aligned_head_dim, is_aligned};
use super::{Launch, Parameter};
use crate::cuda::padded_bias::PaddedBias;
use crate::cuda::params::bias::{DQ_FROM_DS_ROWS, ScoreGradients};
use crate::cuda::tiles::{ATTENTION_BWD_DQ_FROM_DS, AttentionBwdDqFromDsTile};
use crate::cuda::variants;
use crate::error::{Error, Result};
use crate::problem::attention::Attention;
use crate::problem::flash_attn_varlen_bwd::FlashAttnVarlenBwd;
use crate::problem::workspace::{score_gradient_bytes, score_gradient_columns, sums_copied_gradient};
use std::ptr::null_mut;

const DQ_KERNEL: &str = "attention_bwd_dq_from_ds";

impl ScoreGradients {
    pub(super) const NONE: Self = Self { data: null_mut(), pitch: 0, has_token_rows: 0 };

    /// Where the call stores dS, if it has the gradient of a bias and the kernels for aligned rows take it: in place of the gradient
    /// where that is dS and begins its rows with chunks; where sequences or heads share the bias, or past 64 columns if it is a `copy`,
    /// after `delta` and that copy in the workspace, if it has room.
    pub(super) fn of(call: &FlashAttnVarlenBwd, copy: Option<&PaddedBias>, delta: *mut f32) -> Self {
        let forward = &call.forward;
        let (Some(bias), Some(dbias)) = (&forward.score.bias, &call.dbias) else { return Self::NONE };
        if aligned_head_dim(forward).is_none() || !is_aligned(call, bias) {
            return Self::NONE;
        }
        if bias::stored_dbias(call).is_some() {
            if copy.is_none() {
                return Self { data: dbias.data.cast(), pitch: bias.keys as i32, has_token_rows: 0 };
            }
            if !sums_copied_gradient(forward.head_dim.max(forward.value_dim) as i64) {
                return Self::NONE;
            }
        }
        let bytes = score_gradient_bytes(forward.num_q_heads, forward.num_rows, bias.keys);
        let place = bytes.and_then(|bytes| bias::place_after_delta(call, delta, copy, bytes));
        let (Some(pitch), Some(data)) = (score_gradient_columns(bias.keys), place) else { return Self::NONE };
        Self { data: data.cast(), pitch: pitch as i32, has_token_rows: 1 }
    }

    /// Whether dbias is the sum of some of them, or a copy.
    pub(super) fn are_summed(&self) -> bool {
        self.has_token_rows != 0
    }

    pub(super) fn are_stored(&self) -> bool {
        !self.data.is_null()
    }
}

/// The launch that computes dQ of the sequences all of whose dS has been stored.
pub(super) fn dq_launch<'p>(forward: &Attention, parameter: Parameter<'p>) -> Result<Option<Launch<'p>>> {
    let dim = forward.head_dim.max(forward.value_dim);
    let tile: &AttentionBwdDqFromDsTile = ATTENTION_BWD_DQ_FROM_DS
        .iter()
        .find(|tile| tile.head_dim as usize >= dim)
        .ok_or_else(|| Error::internal(format!("{DQ_KERNEL} is not built for head dimension {dim}")))?;
    let variant = variants::find(DQ_KERNEL, &[variants::dtype_value(forward.q.dtype), tile.head_dim_value])?;
    let rows = forward.num_rows * (forward.num_q_heads / forward.num_kv_heads);
    let ctas = rows.div_ceil(DQ_FROM_DS_ROWS as usize) * forward.num_kv_heads;
    // A warp has 32 rows.
    let threads = DQ_FROM_DS_ROWS as u32 * tile.column_warps;
    bias::launch(DQ_KERNEL, variant, ctas, [threads, tile.shared_bytes], parameter)
}
