//! Results and defaults that the attention functions share.

use super::{Memory, TensorMut, TensorRef};

/// The results of attention: `out`, and optionally more. `out.into()` makes the results without options.
///
/// ```
/// use xla_attention::{AttentionResults, TensorMut};
///
/// let (mut out, mut lse) = ([0.0f32; 5 * 4 * 64], [0.0f32; 4 * 5]); // [Tq, Hq, Dv], [Hq, Tq]
/// let out = TensorMut::new(&mut out, &[5, 4, 64]);
/// let results = AttentionResults { softmax_lse: Some(TensorMut::new(&mut lse, &[4, 5])), ..out.into() };
/// ```
#[derive(Debug)]
pub struct AttentionResults<'a, M = super::Host> {
    /// `[Tq, Hq, Dv]`, of the queries' dtype or f32, or bf16 or f16 for f8e4m3fn queries. Padding rows and rows that
    /// attend to no key are 0.
    pub out: TensorMut<'a, M>,
    /// `f32[Hq, Tq]`: log-sum-exp of the scores (natural logarithm). -inf for padding rows and for rows that attend to no
    /// key; the sink's logit for a row that attends only to a sink
    pub softmax_lse: Option<TensorMut<'a, M>>,
    /// `u8[N]`, of any size, uninitialized: scratch memory with which a GPU splits long sequences.
    /// [`AttentionSizes::workspace`](crate::ops::workspace::AttentionSizes::workspace) returns the useful size. The CPU
    /// ignores it.
    pub workspace: Option<TensorMut<'a, M>>,
}

impl<'a, M> From<TensorMut<'a, M>> for AttentionResults<'a, M> {
    fn from(out: TensorMut<'a, M>) -> Self {
        Self { out, softmax_lse: None, workspace: None }
    }
}

/// The softmax scale, by default `D^-0.5` for queries `[Tq, Hq, D]`.
pub(super) fn softmax_scale<M: Memory>(given: Option<f32>, query: TensorRef<M>) -> f32 {
    given.unwrap_or_else(|| (query.view().last_size() as f64).sqrt().recip() as f32)
}

/// `window_left` or `window_right` as an attribute, -1 for unlimited.
pub(super) fn window(keys: Option<usize>) -> i64 {
    keys.map_or(-1, super::number)
}
