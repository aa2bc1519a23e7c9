//! Caches that are updated, with or without the scales of their rows.

use super::{Host, Kv, TensorMut};

/// A paged cache that a call updates, and the scales of its rows if it is of i8 or of f8e4m3fn with a scale per token and KV
/// head (`docs/quantized_cache.md`).
///
/// `T` is the cache: a [`TensorMut`], or a [`Kv`] of them. Functions take a cache without scales as it is.
///
/// ```
/// use xla_attention::{KvCacheUpdateInputs, KvCacheUpdateOptions, Kv, On, ScaledCache, TensorMut, TensorRef, kv_cache_update};
///
/// let (key, value) = ([0.5f32; 8], [-3.0f32; 8]); // [T, Hkv, D] = [1, 1, 8]
/// let inputs = KvCacheUpdateInputs {
///     key: TensorRef::new(&key, &[1, 1, 8]),
///     value: TensorRef::new(&value, &[1, 1, 8]),
///     slot_mapping: TensorRef::new(&[1], &[1]),
/// };
/// // [P, page_size, 2*Hkv, D], and the same without D
/// let (mut cache, mut scales) = ([0i8; 2 * 2 * 8], [0.0f32; 2 * 2]);
/// let cache_with_scales = ScaledCache {
///     kv_cache: Kv::Interleaved(TensorMut::new(&mut cache, &[1, 2, 2, 8])),
///     kv_scale_cache: Some(TensorMut::new(&mut scales, &[1, 2, 2])),
/// };
/// kv_cache_update(&inputs, &KvCacheUpdateOptions::default(), cache_with_scales, On::cpu())?;
/// assert_eq!(cache[16..], [[127; 8], [-127; 8]].concat());
/// assert_eq!(scales, [0.0, 0.0, 0.5 / 127.0, 3.0 / 127.0]);
/// # Ok::<(), xla_attention::Error>(())
/// ```
#[derive(Debug)]
pub struct ScaledCache<'a, T, M = Host> {
    /// The cache.
    pub kv_cache: T,
    /// f32, of the shape of the cache without its last dimension: the scale of each row. With it the cache is of i8 or
    /// f8e4m3fn.
    pub kv_scale_cache: Option<TensorMut<'a, M>>,
}

impl<'a, M> From<TensorMut<'a, M>> for ScaledCache<'a, TensorMut<'a, M>, M> {
    fn from(kv_cache: TensorMut<'a, M>) -> Self {
        Self { kv_cache, kv_scale_cache: None }
    }
}

impl<'a, M> From<Kv<TensorMut<'a, M>>> for ScaledCache<'a, Kv<TensorMut<'a, M>>, M> {
    fn from(kv_cache: Kv<TensorMut<'a, M>>) -> Self {
        Self { kv_cache, kv_scale_cache: None }
    }
}
