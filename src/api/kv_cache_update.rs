//! [`kv_cache_update`]

use super::kv_cache_update_split::update_split;
use super::{Host, Kv, Memory, On, ScaledCache, TensorMut, TensorRef, run};
use crate::error::{Result, ensure};
use crate::problem::Op;
use crate::problem::arguments::kv_cache_update;

/// New tokens for [`kv_cache_update`]. Dimensions: `T` tokens, `Hkv` heads, `D` and `Dv` elements per head.
#[derive(Clone, Copy, Debug)]
pub struct KvCacheUpdateInputs<'a, M = Host> {
    /// `[T, Hkv, D]`; f16, bf16 or f32. Rows may be strided.
    pub key: TensorRef<'a, M>,
    /// `[T, Hkv, Dv]`, of the keys' dtype; Dv is D unless the cache is [`Kv::Split`].
    pub value: TensorRef<'a, M>,
    /// `i32[T]` or `i64[T]`: `page * page_size + offset` of each token. Slots outside the cache are skipped, so -1
    /// marks padding. The other slots must be distinct.
    pub slot_mapping: TensorRef<'a, M>,
}

/// Options of [`kv_cache_update`].
#[derive(Clone, Copy, Debug)]
pub struct KvCacheUpdateOptions<'a, M = Host> {
    /// `f32[1]` or `f32[Hkv]`: quantization scale, which divides the keys
    pub k_scale: Option<TensorRef<'a, M>>,
    /// `f32[1]` or `f32[Hkv]`: quantization scale, which divides the values
    pub v_scale: Option<TensorRef<'a, M>>,
}

impl<M> Default for KvCacheUpdateOptions<'_, M> {
    fn default() -> Self {
        Self { k_scale: None, v_scale: None }
    }
}

/// Writes the keys and values of new tokens into a paged cache in place.
///
/// The cache has the dtype of the keys, or f8e4m3fn or f8e5m2, to which conversion rounds and saturates
/// (`docs/semantics.md#kv_cache_update`). A [`ScaledCache`] is of i8 or f8e4m3fn, and the call computes a scale for each row.
///
/// ```
/// use xla_attention::{KvCacheUpdateInputs, KvCacheUpdateOptions, Kv, On, TensorMut, TensorRef, kv_cache_update};
///
/// let (key, value) = ([1.0f32; 2 * 8], [2.0f32; 2 * 8]); // [T, Hkv, D] = [2, 1, 8]
/// let inputs = KvCacheUpdateInputs {
///     key: TensorRef::new(&key, &[2, 1, 8]),
///     value: TensorRef::new(&value, &[2, 1, 8]),
///     slot_mapping: TensorRef::new(&[5, -1], &[2]), // page 1, offset 1; and nowhere
/// };
/// let mut cache = [0.0f32; 3 * 4 * 2 * 8]; // [P, page_size, 2*Hkv, D]
/// let kv_cache = Kv::Interleaved(TensorMut::new(&mut cache, &[3, 4, 2, 8]));
/// kv_cache_update(&inputs, &KvCacheUpdateOptions::default(), kv_cache, On::cpu())?;
/// let slots: Vec<&[f32]> = cache.chunks(2 * 8).collect();
/// assert_eq!(slots[5], [key[..8].as_ref(), &value[..8]].concat());
/// assert!(slots.iter().enumerate().all(|(slot, rows)| slot == 5 || *rows == [0.0; 16]));
/// # Ok::<(), xla_attention::Error>(())
/// ```
///
/// # Errors
/// [`InvalidArgument`](crate::Code::InvalidArgument), naming the operand, where shapes or dtypes do not fit;
/// [`Unimplemented`](crate::Code::Unimplemented) for a head dimension that is no multiple of 8 up to 512.
pub fn kv_cache_update<'a, M: Memory>(
    inputs: &KvCacheUpdateInputs<M>,
    options: &KvCacheUpdateOptions<M>,
    kv_cache: impl Into<ScaledCache<'a, Kv<TensorMut<'a, M>>, M>>,
    on: On<M>,
) -> Result {
    let ScaledCache { kv_cache, kv_scale_cache } = kv_cache.into();
    match kv_cache.parts() {
        (_, k_cache, Some(v_cache)) => {
            ensure(kv_scale_cache.is_none(), || {
                "kv_scale_cache is given with K and V in two buffers, expected one buffer".into()
            })?;
            update_split(inputs, options, [k_cache, v_cache], on)
        }
        (kv_layout, kv_cache, None) => {
            let KvCacheUpdateInputs { key, value, slot_mapping } = *inputs;
            let KvCacheUpdateOptions { k_scale, v_scale } = *options;
            let cache = kv_cache.as_operand();
            let scales = kv_scale_cache.as_ref().map(TensorMut::as_operand);
            let operands = kv_cache_update::Operands {
                kv_cache: cache,
                key,
                value,
                slot_mapping,
                k_scale,
                v_scale,
                kv_scale_cache: scales,
            };
            let results = kv_cache_update::Results { kv_cache, kv_scale_cache };
            let attributes = kv_cache_update::Attributes { kv_layout };
            run(Op::KvCacheUpdate, operands.in_order(), results.in_order(), &attributes.in_order(), on)
        }
    }
}
