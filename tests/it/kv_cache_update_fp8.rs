//! Cache updates into fp8 caches: the rounding of numbers to codes, from every dtype.

use crate::support::{
    Array, BF16, CacheUpdateCase, Dtype, F8E4M3FN, F8E5M2, F16, F32, FP8_DTYPES, KvLayout, Numbers, Random,
    for_each_side,
};

/// The codes that an update stores for the keys `[T, Hkv, D]`, with guard pages on either side.
fn stored(keys: &Array, fp8: Dtype, scale: Option<f32>) -> Vec<Vec<u8>> {
    let (rows, heads, d) = (keys.dims[0] as usize, keys.dims[1] as usize, keys.dims[2] as usize);
    let update = CacheUpdateCase {
        layout: KvLayout::Stacked,
        dtype: keys.dtype,
        fp8: Some(fp8),
        num_pages: 1,
        page_size: rows,
        heads,
        dims: [d; 2],
        slots: (0..rows as i64).collect(),
        scales: [scale.map(|scale| vec![scale]), None],
        ..CacheUpdateCase::default()
    };
    let call = update.invocation(true).with_operand("key", keys.clone());
    let mut caches = vec![];
    // kv_cache is [2, 1, rows, heads, d], and its first half holds the keys.
    for_each_side(|side| caches.push(call.results(side)[0].bytes[..rows * heads * d].to_vec()));
    caches
}

/// Asserts that an update stores the reference's code for each element of `keys`.
fn check(keys: &Array, fp8: Dtype, scale: Option<f32>) {
    let divisor = f64::from(scale.unwrap_or(1.0));
    for codes in stored(keys, fp8, scale) {
        for (x, code) in keys.values().iter().zip(codes) {
            let expected = fp8.encode(F32.round(x / divisor))[0];
            assert!(code == expected, "{x:e} / {divisor} became {code:#x}, not {expected:#x}, in {fp8:?}");
        }
    }
}

/// `bytes` as rows of 256 heads with D = 64.
fn keys_of(dtype: Dtype, bytes: Vec<u8>) -> Array {
    let count = bytes.len() / dtype.size();
    Array { dtype, dims: vec![(count / (256 * 64)) as i64, 256, 64], bytes }
}

#[test]
fn every_16_bit_number_is_rounded_to_its_code() {
    let ones = 2f32.next_down();
    for dtype in [F16, BF16] {
        let keys = keys_of(dtype, (0..=u16::MAX).flat_map(u16::to_ne_bytes).collect());
        for fp8 in FP8_DTYPES {
            for scale in
                [None, Some(1.0), Some(0.25), Some(0.37), Some(-3.0), Some(1e-4), Some(1e4), Some(1e-13), Some(ones)]
            {
                check(&keys, fp8, scale);
            }
        }
    }
}

#[test]
fn f32_quotients_around_every_boundary_are_rounded_to_their_codes_for_every_scale() {
    // Powers of two, other numbers, numbers whose reciprocal or remainders are inexact or not representable in f32, and
    // one whose mantissa is all ones.
    let two = |exponent: i32| 2f32.powi(exponent);
    let large = [1.1 * two(41), 1.1 * two(101), 1.9 * two(126), -two(127), f32::INFINITY];
    let small = [two(-40), 1.7 * two(-41), 1.3 * two(-99), 1.6 * two(-100) * two(-40), 0.0];
    let scales = [0.25, 3.0, -0.37, 2f32.next_down()].into_iter().chain(large).chain(small);
    for fp8 in FP8_DTYPES {
        let codes: Vec<f64> = (0..=u8::MAX).map(|code| fp8.decode(&[code])).collect();
        for scale in scales.clone().map(Some).chain([None]) {
            let divisor = f64::from(scale.unwrap_or(1.0));
            let mut numbers =
                vec![f32::INFINITY, f32::NEG_INFINITY, f32::MAX, f32::MIN, -f32::NAN, 464.0, 61440.0, 0.0, -0.0];
            for (x, next) in codes.iter().zip(&codes[1..]) {
                let middle = ((x + next) / 2.0 * divisor) as f32;
                numbers.extend([(x * divisor) as f32, middle.next_down(), middle, middle.next_up()]);
            }
            let mut random = Random::new(11);
            numbers.resize_with(256 * 64, || f32::from_bits(random.next() as u32));
            check(&keys_of(F32, numbers.iter().flat_map(|x| x.to_ne_bytes()).collect()), fp8, scale);
        }
    }
}

#[test]
fn codes_are_those_of_the_formats() {
    let rows: &[(Dtype, f64, u8)] = &[
        (F8E4M3FN, 1.0, 0x38),
        (F8E4M3FN, -1.0, 0xb8),
        (F8E4M3FN, 448.0, 0x7e),
        (F8E4M3FN, 449.0, 0x7e),
        (F8E4M3FN, f64::INFINITY, 0x7e),
        (F8E4M3FN, f64::NEG_INFINITY, 0xfe),
        (F8E4M3FN, f64::NAN, 0x7f),
        (F8E4M3FN, 0.001_953_125, 0x01),
        (F8E4M3FN, 0.000_976_562_5, 0x00),
        (F8E4M3FN, -0.0, 0x80),
        (F8E4M3FN, 17.0, 0x58),
        (F8E4M3FN, 19.0, 0x5a),
        (F8E5M2, 1.0, 0x3c),
        (F8E5M2, 57344.0, 0x7b),
        (F8E5M2, 1e6, 0x7b),
        (F8E5M2, f64::INFINITY, 0x7b),
        (F8E5M2, f64::NEG_INFINITY, 0xfb),
        (F8E5M2, f64::NAN, 0x7f),
        (F8E5M2, 0.000_015_258_789_062_5, 0x01),
        (F8E5M2, -0.000_007_629_394_531_25, 0x80),
    ];
    for &(fp8, x, code) in rows {
        let keys = Array::new(F32, &[1, 1, 8], &[x; 8]);
        assert_eq!(stored(&keys, fp8, None), [[code; 8], [code; 8]], "{x:e} in {fp8:?}");
    }
}
