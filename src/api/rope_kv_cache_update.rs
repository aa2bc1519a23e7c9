//! [`rope_kv_cache_update`]

use super::{Host, Kv, Memory, On, TensorMut, TensorRef, run};
use crate::error::{Error, Result};
use crate::problem::Op;
use crate::problem::arguments::rope_kv_cache_update::{Attributes, Operands, Results};

/// New tokens for [`rope_kv_cache_update`]. Dimensions: `T` tokens, `Hq` and `Hkv` heads, `D` elements per head, of
/// which the first `rot` are rotated.
#[derive(Clone, Copy, Debug)]
pub struct RopeKvCacheUpdateInputs<'a, M = Host> {
    /// `[T, Hq, D]`, of the keys' dtype. Rows may be strided.
    pub query: TensorRef<'a, M>,
    /// `[T, Hkv, D]`; f16, bf16 or f32. Rows may be strided.
    pub key: TensorRef<'a, M>,
    /// `[T, Hkv, D]`, of the keys' dtype; values are not rotated. Rows may be strided.
    pub value: TensorRef<'a, M>,
    /// `i32[T]` or `i64[T]`, as in [`KvCacheUpdateInputs`](super::KvCacheUpdateInputs)
    pub slot_mapping: TensorRef<'a, M>,
    /// `i32[T]`: the row of `cos_sin` for each token, clamped to `[0, max_pos)`
    pub positions: TensorRef<'a, M>,
    /// `f32[max_pos, rot]`: the cosines of a position's `rot / 2` angles, then their sines; rot is even, at most D.
    /// Rows may be strided.
    pub cos_sin: TensorRef<'a, M>,
}

/// Options of [`rope_kv_cache_update`].
#[derive(Clone, Copy, Debug)]
pub struct RopeKvCacheUpdateOptions<'a, M = Host> {
    /// Whether a pair is elements `2i` and `2i + 1` (GPT-J). Otherwise it is `i` and `i + rot / 2` (GPT-NeoX, Llama).
    pub interleaved: bool,
    /// `f32[1]` or `f32[Hkv]`: quantization scale, which divides the keys
    pub k_scale: Option<TensorRef<'a, M>>,
    /// `f32[1]` or `f32[Hkv]`: quantization scale, which divides the values
    pub v_scale: Option<TensorRef<'a, M>>,
}

impl<M> Default for RopeKvCacheUpdateOptions<'_, M> {
    fn default() -> Self {
        Self { interleaved: false, k_scale: None, v_scale: None }
    }
}

/// Results of [`rope_kv_cache_update`].
#[derive(Debug)]
pub struct RopeKvCacheUpdateResults<'a, M = Host> {
    /// The cache, updated in place, in any layout that holds keys and values in one tensor.
    pub kv_cache: Kv<TensorMut<'a, M>>,
    /// `[T, Hq, D]`: the rotated queries
    pub query_out: TensorMut<'a, M>,
}

/// Rotates the queries and keys of new tokens by their positions (`RoPE`), and writes keys and values into a paged
/// cache in place.
///
/// A pair (a, b) becomes `(a cos - b sin, b cos + a sin)`; elements from `rot` on are unchanged
/// (`docs/semantics.md#rope_kv_cache_update`).
///
/// ```
/// use xla_attention::{
///     Kv, On, RopeKvCacheUpdateInputs, RopeKvCacheUpdateOptions, RopeKvCacheUpdateResults, TensorMut, TensorRef,
///     rope_kv_cache_update,
/// };
///
/// let row = [1.0f32, 2.0, 0.0, 0.0, 5.0, 6.0, 7.0, 8.0]; // T, Hq and Hkv are 1, D is 8
/// let quarter_turn = [0.0f32, 0.0, 1.0, 1.0]; // rot is 4: cosines, then sines
/// let tensor = TensorRef::new(&row, &[1, 1, 8]);
/// let inputs = RopeKvCacheUpdateInputs {
///     query: tensor,
///     key: tensor,
///     value: tensor,
///     slot_mapping: TensorRef::new(&[0], &[1]),
///     positions: TensorRef::new(&[0], &[1]),
///     cos_sin: TensorRef::new(&quarter_turn, &[1, 4]),
/// };
/// let (mut cache, mut query) = ([0.0f32; 2 * 8], [0.0f32; 8]);
/// let results = RopeKvCacheUpdateResults {
///     kv_cache: Kv::Interleaved(TensorMut::new(&mut cache, &[1, 1, 2, 8])), // [P, page_size, 2*Hkv, D]
///     query_out: TensorMut::new(&mut query, &[1, 1, 8]),
/// };
/// rope_kv_cache_update(&inputs, &RopeKvCacheUpdateOptions::default(), results, On::cpu())?;
/// assert_eq!(query, [0.0, 0.0, 1.0, 2.0, 5.0, 6.0, 7.0, 8.0]);
/// assert_eq!((&cache[..8], &cache[8..]), (&query[..], &row[..]));
/// # Ok::<(), xla_attention::Error>(())
/// ```
///
/// # Errors
/// As [`kv_cache_update`](super::kv_cache_update); also [`Unimplemented`](crate::Code::Unimplemented) for a cache that
/// is [`Kv::Split`].
pub fn rope_kv_cache_update<M: Memory>(
    inputs: &RopeKvCacheUpdateInputs<M>,
    options: &RopeKvCacheUpdateOptions<M>,
    results: RopeKvCacheUpdateResults<M>,
    on: On<M>,
) -> Result {
    let op = Op::RopeKvCacheUpdate;
    let (kv_layout, kv_cache, None) = results.kv_cache.parts() else {
        let text = "kv_cache is two tensors; one that holds keys and values, in any layout, works";
        return Err(Error::unimplemented(text).of(op.signature().target));
    };
    let operands = Operands {
        kv_cache: kv_cache.as_operand(),
        query: inputs.query,
        key: inputs.key,
        value: inputs.value,
        slot_mapping: inputs.slot_mapping,
        positions: inputs.positions,
        cos_sin: inputs.cos_sin,
        k_scale: options.k_scale,
        v_scale: options.v_scale,
    };
    let attributes = Attributes { interleaved: options.interleaved, kv_layout };
    let results = Results { kv_cache, query_out: results.query_out };
    run(op, operands.in_order(), results.in_order(), &attributes.in_order(), on)
}
