//! What the attention functions share.

use super::{Memory, TensorMut, TensorRef};

/// What attention writes: `out`, and on request more. Made of `out` alone by `into`.
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
    /// `[Tq, Hq, Dv]`, of the queries' dtype; bf16 or f16 where these are f8e4m3fn. Rows that see no key and rows of no
    /// sequence become 0.
    pub out: TensorMut<'a, M>,
    /// `f32[Hq, Tq]`: natural logarithm of the softmax denominators, -inf for such rows (the sink's logit where a row of
    /// a sequence sees only that)
    pub softmax_lse: Option<TensorMut<'a, M>>,
    /// `u8[N]`, of any size and content: lets a GPU split long sequences;
    /// [`AttentionSizes::workspace`](crate::problem::workspace::AttentionSizes::workspace) says how much it can use. The CPU
    /// does not.
    pub workspace: Option<TensorMut<'a, M>>,
}

impl<'a, M> From<TensorMut<'a, M>> for AttentionResults<'a, M> {
    fn from(out: TensorMut<'a, M>) -> Self {
        Self { out, softmax_lse: None, workspace: None }
    }
}

/// The scale of q·k, by default `D^-0.5` of the queries `[Tq, Hq, D]`.
pub(super) fn softmax_scale<M: Memory>(given: Option<f32>, query: TensorRef<M>) -> f32 {
    given.unwrap_or_else(|| (query.view().last_size() as f64).sqrt().recip() as f32)
}

/// Keys on one side of a query's own, as an attribute.
pub(super) fn window(keys: Option<usize>) -> i64 {
    keys.map_or(-1, super::number)
}
