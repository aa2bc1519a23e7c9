//! [`merge_attention_states`]

use super::{Memory, On, TensorMut, TensorRef, run};
use crate::error::Result;
use crate::problem::Op;
use crate::problem::arguments::merge_attention_states::{Operands, Results};

/// The result of attention over a set of keys, in tensors of type `T`.
#[derive(Clone, Copy, Debug)]
pub struct AttentionState<T> {
    /// `[n, h, d]`: n query rows, h heads; f16, bf16 or f32. Rows of inputs may be strided.
    pub out: T,
    /// `f32[h, n]`: log-sum-exp of the scores (natural logarithm), -inf if the row attended to no key
    pub lse: T,
}

/// Merges attention of the same queries over two disjoint sets of keys into attention over their union.
///
/// The outputs are weighted by `exp(lse)`. Attention can thus be computed over parts of the keys, for instance once for
/// all requests over a shared prefix, or chunk by chunk over a long context. A state whose lse is not finite is empty,
/// and its output is not read; two empty states give `out` 0 and `lse` -inf
/// (`docs/semantics.md#merge_attention_states`).
///
/// ```
/// use xla_attention::{AttentionState, On, TensorMut, TensorRef, merge_attention_states};
///
/// // One row of one head, d = 2. The first state has three times the weight of the second.
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
