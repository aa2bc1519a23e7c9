//! Numbers that look random, and element types as bytes.

use crate::cpu::element::Stored;
use crate::cpu::element_fp8::{E4m3, E5m2};
use crate::tensor::DType;
use half::{bf16, f16};
use std::sync::LazyLock;

/// xorshift: always the same numbers.
pub(super) struct Random(pub(super) u64);

impl Random {
    pub(super) fn below(&mut self, n: usize) -> usize {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        ((self.0 >> 33) as usize) % n
    }
    pub(super) fn signed(&mut self) -> f64 {
        self.below(1 << 24) as f64 / f64::from(1 << 23) - 1.0
    }
    pub(super) fn one_of<T: Copy>(&mut self, choices: &[T]) -> T {
        choices[self.below(choices.len())]
    }
}

/// The finite values of an 8-bit type with their codes, in order.
fn finite_values(value: impl Fn(u8) -> f32) -> Vec<(f64, u8)> {
    let mut all: Vec<(f64, u8)> = (0..=u8::MAX).map(|code| (f64::from(value(code)), code)).collect();
    all.retain(|(x, _)| x.is_finite());
    all.sort_by(|a, b| a.0.total_cmp(&b.0));
    all
}

static E4M3: LazyLock<Vec<(f64, u8)>> = LazyLock::new(|| finite_values(|code| E4m3(code).to_f32()));
static E5M2: LazyLock<Vec<(f64, u8)>> = LazyLock::new(|| finite_values(|code| E5m2(code).to_f32()));

/// The code of a value nearest to `x`.
fn nearest(values: &[(f64, u8)], x: f64) -> u8 {
    if x.is_nan() {
        return 0x7f;
    }
    let above = values.partition_point(|(y, _)| *y < x).min(values.len() - 1);
    let below = above.saturating_sub(1);
    values[if x - values[below].0 < values[above].0 - x { below } else { above }].1
}

/// `x` in the element type and back.
pub(super) fn round(dtype: DType, x: f64) -> f64 {
    from_bytes(dtype, &to_bytes(dtype, &[x]))[0]
}

pub(super) fn to_bytes(dtype: DType, x: &[f64]) -> Vec<u8> {
    match dtype {
        DType::F16 => x.iter().flat_map(|x| f16::from_f64(*x).to_ne_bytes()).collect(),
        DType::BF16 => x.iter().flat_map(|x| bf16::from_f64(*x).to_ne_bytes()).collect(),
        DType::F8E4M3FN => x.iter().map(|x| nearest(&E4M3, *x)).collect(),
        DType::F8E5M2 => x.iter().map(|x| nearest(&E5M2, *x)).collect(),
        _ => x.iter().flat_map(|x| (*x as f32).to_ne_bytes()).collect(),
    }
}

pub(super) fn from_bytes(dtype: DType, bytes: &[u8]) -> Vec<f64> {
    let half = |f: fn([u8; 2]) -> f64| bytes.chunks_exact(2).map(|b| f(b.try_into().unwrap())).collect();
    match dtype {
        DType::F16 => half(|b| f16::from_ne_bytes(b).to_f64()),
        DType::BF16 => half(|b| bf16::from_ne_bytes(b).to_f64()),
        DType::F8E4M3FN => bytes.iter().map(|code| f64::from(E4m3(*code).to_f32())).collect(),
        DType::F8E5M2 => bytes.iter().map(|code| f64::from(E5m2(*code).to_f32())).collect(),
        _ => bytes.chunks_exact(4).map(|b| f64::from(f32::from_ne_bytes(b.try_into().unwrap()))).collect(),
    }
}
