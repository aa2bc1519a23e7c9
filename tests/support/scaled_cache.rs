//! Caches with a scale per row, `kv_scale_cache`: the reference of their quantization.

use super::{Array, Dtype, F8E4M3FN, F32, I8, KvGeometry, Numbers};

/// Dtypes of a cache whose rows have scales.
pub const SCALED_DTYPES: [Dtype; 2] = [I8, F8E4M3FN];

/// Rows whose largest magnitude is below this are stored as zeros.
pub const SMALLEST_ROW: f64 = 1.0 / (1u128 << 100) as f64;

/// The codes and the scale of a row.
pub fn quantize_row(dtype: Dtype, row: &[f64]) -> (Vec<u8>, f32) {
    let largest = row.iter().fold(0.0f64, |largest, x| if x.is_nan() { f64::INFINITY } else { largest.max(x.abs()) });
    if largest.is_infinite() {
        return (vec![0; row.len()], f32::NAN);
    }
    if largest < SMALLEST_ROW {
        return (vec![0; row.len()], 0.0);
    }
    let (largest, largest_code) = (largest as f32, if dtype == I8 { 127.0f32 } else { 448.0 });
    let factor = largest_code / largest;
    let code = |x: f64| {
        let product = f64::from(x as f32 * factor);
        if dtype == I8 {
            (product.round_ties_even().clamp(-127.0, 127.0) as i8) as u8
        } else {
            dtype.encode(product)[0]
        }
    };
    (row.iter().map(|x| code(*x)).collect(), largest / largest_code)
}

impl KvGeometry {
    /// The shape of the scales of a cache in one buffer.
    pub fn scale_dims(&self) -> Vec<i64> {
        let mut dims = self.shapes().remove(0);
        dims.pop();
        dims
    }

    /// The index of the scale of a row of K (`value` 0) or V (1).
    pub fn scale_at(&self, value: usize, page: usize, token: usize, head: usize) -> usize {
        self.element(value, page, token, head).1 / self.dims[value]
    }
}

/// The cache as f64: each row multiplied by its scale.
pub fn dequantized(cache: &Array, scales: &Array) -> Vec<f64> {
    let (values, scales) = (cache.values(), scales.values());
    let d = values.len().checked_div(scales.len()).unwrap_or(1);
    values.iter().enumerate().map(|(i, x)| x * scales[i / d]).collect()
}

/// Stores a row in the cache, at element `at`, and its scale.
pub fn put_quantized(cache: &mut Array, scales: &mut Array, at: usize, row: &[f64]) {
    let (codes, scale) = quantize_row(cache.dtype, row);
    cache.bytes[at..][..row.len()].copy_from_slice(&codes);
    put_scale(scales, at / row.len(), scale);
}

/// Sets a scale.
pub fn put_scale(scales: &mut Array, index: usize, scale: f32) {
    scales.bytes[index * F32.size()..][..F32.size()].copy_from_slice(&scale.to_ne_bytes());
}

/// A cache and its scales after an update with keys and values `[T, Hkv, D]`. Rows whose slot is not in the cache are
/// skipped.
pub fn quantized_cache_update(
    (cache, scales): (&Array, &Array),
    kv_geometry: &KvGeometry,
    rows: &[Array; 2],
    slots: &[i64],
) -> [Array; 2] {
    let (mut cache, mut scales) = (cache.clone(), scales.clone());
    for (value, rows) in rows.iter().enumerate() {
        let (heads, d, numbers) = (kv_geometry.kv_heads, kv_geometry.dims[value], rows.values());
        for (t, slot) in slots.iter().enumerate().filter_map(|(t, &slot)| Some((t, kv_geometry.valid_slot(slot)?))) {
            for head in 0..heads {
                let at = kv_geometry.slot_element(value, slot, head).1;
                put_quantized(&mut cache, &mut scales, at, &numbers[(t * heads + head) * d..][..d]);
            }
        }
    }
    [cache, scales]
}
