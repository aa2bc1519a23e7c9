//! [`merge_attention_states`]

use super::{Memory, On, TensorMut, TensorRef, run};
use crate::error::Result;
use crate::problem::Op;
use crate::problem::arguments::merge_attention_states::{Operands, Results};

/// Attention over a set of keys, in tensors of type `T`.
#[derive(Clone, Copy, Debug)]
pub struct AttentionState<T> {
    /// `[n, h, d]`: n query rows, h heads; f16, bf16 or f32. Rows that are read may lie apart.
    pub out: T,
    /// `f32[h, n]`: natural logarithm of the softmax denominators, -inf where a row saw no key.
    pub lse: T,
}

/// Merge the attention of the same queries over two disjoint sets of keys into that over both.
///
/// The outputs are weighted by `exp(lse)`, so that keys may be attended to in parts: a shared prefix once for all
/// requests, a long context piece by piece. A part whose lse is not finite is empty, and its output not read; where both
/// are, `out` is 0 and `lse` -inf ([`crate::problem::merge_attention_states`]).
///
/// ```
/// use xla_attention::{AttentionState, On, TensorMut, TensorRef, merge_attention_states};
///
/// // One row of one head, d = 2. The first part has seen three times the weight of the second.
/// let (out_a, lse_a) = ([4.0f32, 8.0], [3f32.ln()]);
/// let (out_b, lse_b) = ([0.0f32, 0.0], [0.0f32]);
/// let (mut out, mut lse) = ([0.0f32; 2], [0.0f32]);
/// merge_attention_states(
///     &AttentionState { out: TensorRef::new(&out_a, &[1, 1, 2]), lse: TensorRef::new(&lse_a, &[1, 1]) },
///     &AttentionState { out: TensorRef::new(&out_b, &[1, 1, 2]), lse: TensorRef::new(&lse_b, &[1, 1]) },
///     AttentionState { out: TensorMut::new(&mut out, &[1, 1, 2]), lse: TensorMut::new(&mut lse, &[1, 1]) },
///     On::cpu(),
/// )?;
/// assert!((out[0] - 3.0).abs() < 1e-6 && (out[1] - 6.0).abs() < 1e-6);
/// assert!((lse[0] - 4f32.ln()).abs() < 1e-6);
/// # Ok::<(), xla_attention::Error>(())
/// ```
///
/// # Errors
/// [`InvalidArgument`](crate::Code::InvalidArgument), naming the operand (`out_a`, `lse_b`), where shapes or dtypes do
/// not fit.
pub fn merge_attention_states<M: Memory>(
    a: &AttentionState<TensorRef<M>>,
    b: &AttentionState<TensorRef<M>>,
    merged: AttentionState<TensorMut<M>>,
    on: On<M>,
) -> Result {
    let operands = Operands { out_a: a.out, lse_a: a.lse, out_b: b.out, lse_b: b.lse };
    let results = Results { out: merged.out, lse: merged.lse };
    run(Op::MergeAttentionStates, operands.in_order(), results.in_order(), &[], on)
}
