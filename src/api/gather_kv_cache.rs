//! [`gather_kv_cache`]

use super::{Host, Kv, Memory, On, TensorMut, TensorRef, run};
use crate::error::Result;
use crate::problem::Op;
use crate::problem::arguments::gather_kv_cache::{Attributes, Operands, Results};

/// Inputs of [`gather_kv_cache`]. Dimensions: `S` sequences, `M` table entries per sequence.
#[derive(Clone, Copy, Debug)]
pub struct GatherKvCacheInputs<'a, M = Host> {
    /// The cache: f16, bf16, f32, f8e4m3fn or f8e5m2, with scales of its rows i8 or f8e4m3fn. Rows may be strided.
    pub kv_cache: Kv<TensorRef<'a, M>>,
    /// `i32[S, M]`: the pages of each sequence, in order.
    pub block_tables: TensorRef<'a, M>,
    /// `i32[S]`: tokens per sequence.
    pub context_lens: TensorRef<'a, M>,
}

/// Options of [`gather_kv_cache`].
#[derive(Clone, Copy, Debug)]
pub struct GatherKvCacheOptions<'a, M = Host> {
    /// `f32[1]` or `f32[Hkv]`: dequantization scale of the keys
    pub k_scale: Option<TensorRef<'a, M>>,
    /// `f32[1]` or `f32[Hkv]`: dequantization scale of the values
    pub v_scale: Option<TensorRef<'a, M>>,
    /// f32, the shape of the cache without its last dimension: the scale of each row of a cache of i8 or f8e4m3fn that has K
    /// and V in one buffer
    pub kv_scale_cache: Option<TensorRef<'a, M>>,
}

impl<M> Default for GatherKvCacheOptions<'_, M> {
    fn default() -> Self {
        Self { k_scale: None, v_scale: None, kv_scale_cache: None }
    }
}

/// Results of [`gather_kv_cache`]. Dimensions: `N` rows, the maximum number of tokens.
#[derive(Debug)]
pub struct GatherKvCacheResults<'a, M = Host> {
    /// `[N, Hkv, D]`, of the cache's dtype, or for an 8-bit cache also f16, bf16 or f32.
    pub keys: TensorMut<'a, M>,
    /// `[N, Hkv, Dv]`, of the keys' dtype.
    pub values: TensorMut<'a, M>,
    /// `i32[S+1]`: the first row of each sequence, and the end of the last.
    pub cu_seqlens: TensorMut<'a, M>,
}

/// Copies the keys and values of sequences out of a paged cache into packed rows, in the order of the tokens.
///
/// Tokens beyond N rows are left out, and rows without a token are 0 (`docs/semantics.md#gather_kv_cache`).
///
/// ```
/// use xla_attention::{
///     GatherKvCacheInputs, GatherKvCacheOptions, GatherKvCacheResults, Kv, On, TensorMut, TensorRef, gather_kv_cache,
/// };
///
/// // [P, page_size, 2*Hkv, D] = [3, 2, 2, 8]: every element of a row is the number of its slot.
/// let cache: Vec<f32> = (0..3 * 2 * 2 * 8).map(|i| (i / 16) as f32).collect();
/// let inputs = GatherKvCacheInputs {
///     kv_cache: Kv::Interleaved(TensorRef::new(&cache, &[3, 2, 2, 8])),
///     block_tables: TensorRef::new(&[2, 0, 1, 1], &[2, 2]),
///     context_lens: TensorRef::new(&[3, 1], &[2]),
/// };
/// let (mut keys, mut values, mut cu_seqlens) = ([9.0f32; 5 * 8], [9.0f32; 5 * 8], [0; 3]);
/// let results = GatherKvCacheResults {
///     keys: TensorMut::new(&mut keys, &[5, 1, 8]),
///     values: TensorMut::new(&mut values, &[5, 1, 8]),
///     cu_seqlens: TensorMut::new(&mut cu_seqlens, &[3]),
/// };
/// gather_kv_cache(&inputs, &GatherKvCacheOptions::default(), results, On::cpu())?;
/// let slots: Vec<f32> = keys.chunks(8).map(|row| row[0]).collect();
/// assert_eq!(slots, [4.0, 5.0, 0.0, 2.0, 0.0]); // pages 2 and 0; page 1; and a row without a token
/// assert_eq!(cu_seqlens, [0, 3, 4]);
/// # Ok::<(), xla_attention::Error>(())
/// ```
///
/// # Errors
/// [`InvalidArgument`](crate::Code::InvalidArgument), naming the operand, where shapes or dtypes do not fit;
/// [`Unimplemented`](crate::Code::Unimplemented) for a head dimension that is no multiple of 8 up to 512.
pub fn gather_kv_cache<M: Memory>(
    inputs: &GatherKvCacheInputs<M>,
    options: &GatherKvCacheOptions<M>,
    results: GatherKvCacheResults<M>,
    on: On<M>,
) -> Result {
    let GatherKvCacheInputs { kv_cache, block_tables, context_lens } = *inputs;
    let GatherKvCacheOptions { k_scale, v_scale, kv_scale_cache } = *options;
    let GatherKvCacheResults { keys, values, cu_seqlens } = results;
    let (kv_layout, k_cache, v_cache) = kv_cache.parts();
    let operands = Operands { k_cache, v_cache, block_tables, context_lens, k_scale, v_scale, kv_scale_cache };
    let results = Results { keys, values, cu_seqlens };
    run(Op::GatherKvCache, operands.in_order(), results.in_order(), &Attributes { kv_layout }.in_order(), on)
}
