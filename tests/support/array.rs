//! Dense arrays: bytes with a dtype and a shape, on any device.

use half::{bf16, f16};
use std::sync::LazyLock;
/// Dtypes by their numbers in XLA (`XLA_FFI_DataType` of `c_api.h`).
pub use xla_attention::DType as Dtype;

pub const PRED: Dtype = Dtype::PRED;
pub const I8: Dtype = Dtype::I8;
pub const I32: Dtype = Dtype::I32;
pub const I64: Dtype = Dtype::I64;
pub const U32: Dtype = Dtype::U32;
pub const U8: Dtype = Dtype::U8;
pub const F16: Dtype = Dtype::F16;
pub const F32: Dtype = Dtype::F32;
pub const F64: Dtype = Dtype::F64;
pub const BF16: Dtype = Dtype::BF16;
pub const F8E5M2: Dtype = Dtype::F8E5M2;
pub const F8E4M3FN: Dtype = Dtype::F8E4M3FN;

/// Dtypes of queries for which attention kernels are built, besides fp8.
pub const ATTENTION_DTYPES: [Dtype; 3] = [F32, F16, BF16];

/// Dtypes of a quantized cache.
pub const FP8_DTYPES: [Dtype; 2] = [F8E4M3FN, F8E5M2];

/// Conversion between f64 and the elements of a dtype.
pub trait Numbers {
    /// The bytes of `value` in this dtype, rounded to nearest even. Integers wrap, fp8 saturates.
    fn encode(self, value: f64) -> Vec<u8>;

    /// The value of the bytes of one element.
    fn decode(self, bytes: &[u8]) -> f64;

    /// `value` rounded to this dtype.
    fn round(self, value: f64) -> f64;
}

impl Numbers for Dtype {
    fn encode(self, value: f64) -> Vec<u8> {
        match self {
            I8 => (value as i64 as i8).to_ne_bytes().to_vec(),
            U8 => (value as i64 as u8).to_ne_bytes().to_vec(),
            I32 => (value as i64 as i32).to_ne_bytes().to_vec(),
            I64 => (value as i64).to_ne_bytes().to_vec(),
            U32 => (value as i64 as u32).to_ne_bytes().to_vec(),
            F16 => f16::from_f32(to_odd(value)).to_ne_bytes().to_vec(),
            BF16 => bf16::from_f32(to_odd(value)).to_ne_bytes().to_vec(),
            F32 => (value as f32).to_ne_bytes().to_vec(),
            F64 => value.to_ne_bytes().to_vec(),
            F8E4M3FN => vec![E4M3FN.encode(value)],
            F8E5M2 => vec![E5M2.encode(value)],
            _ => panic!("no values of dtype {self}"),
        }
    }

    fn decode(self, bytes: &[u8]) -> f64 {
        match self {
            I8 => f64::from(i8::from_ne_bytes(bytes.try_into().unwrap())),
            U8 => f64::from(u8::from_ne_bytes(bytes.try_into().unwrap())),
            I32 => f64::from(i32::from_ne_bytes(bytes.try_into().unwrap())),
            I64 => i64::from_ne_bytes(bytes.try_into().unwrap()) as f64,
            U32 => f64::from(u32::from_ne_bytes(bytes.try_into().unwrap())),
            F16 => f16::from_ne_bytes(bytes.try_into().unwrap()).to_f64(),
            BF16 => bf16::from_ne_bytes(bytes.try_into().unwrap()).to_f64(),
            F32 => f64::from(f32::from_ne_bytes(bytes.try_into().unwrap())),
            F64 => f64::from_ne_bytes(bytes.try_into().unwrap()),
            F8E4M3FN => E4M3FN.decode(bytes[0]),
            F8E5M2 => E5M2.decode(bytes[0]),
            _ => panic!("no values of dtype {self}"),
        }
    }

    fn round(self, value: f64) -> f64 {
        match self {
            F16 => f16::from_f32(to_odd(value)).to_f64(),
            BF16 => bf16::from_f32(to_odd(value)).to_f64(),
            F32 => f64::from(value as f32),
            _ => self.decode(&self.encode(value)),
        }
    }
}

/// `value` as f32 in rounding to odd: the last bit is 1 if the conversion is inexact. A second rounding to fewer bits
/// then gives the same number as rounding `value` once. (`f16::from_f64` ignores the last 32 bits of its argument.)
#[allow(clippy::float_cmp, reason = "exactly equal is meant")]
fn to_odd(value: f64) -> f32 {
    let nearest = value as f32;
    let exact = f64::from(nearest);
    if exact == value || value.is_nan() {
        return nearest;
    }
    let away_from_zero = u32::from(exact.abs() > value.abs());
    f32::from_bits((nearest.to_bits() - away_from_zero) | 1)
}

/// An 8-bit float format.
struct Fp8 {
    mantissa_bits: i32,
    bias: i32,
    /// Non-negative finite numbers, by their code.
    finite: LazyLock<Vec<f64>>,
    /// The code of infinity, if the format has one.
    infinity: Option<u8>,
}

static E4M3FN: Fp8 =
    Fp8 { mantissa_bits: 3, bias: 7, finite: LazyLock::new(|| E4M3FN.magnitudes(0x7e)), infinity: None };
static E5M2: Fp8 =
    Fp8 { mantissa_bits: 2, bias: 15, finite: LazyLock::new(|| E5M2.magnitudes(0x7b)), infinity: Some(0x7c) };

impl Fp8 {
    fn magnitudes(&self, largest: u8) -> Vec<f64> {
        let magnitude = |code: u8| {
            let (exponent, mantissa) =
                (i32::from(code) >> self.mantissa_bits, i32::from(code) % (1 << self.mantissa_bits));
            let (exponent, implied) = if exponent == 0 { (1, 0) } else { (exponent, 1 << self.mantissa_bits) };
            f64::from(implied + mantissa) * f64::from(exponent - self.bias - self.mantissa_bits).exp2()
        };
        (0..=largest).map(magnitude).collect()
    }

    /// Rounds to nearest even. Numbers beyond the range, infinities included, become the largest finite number; NaN
    /// becomes 0x7f.
    #[allow(clippy::float_cmp, reason = "exactly halfway is meant")]
    fn encode(&self, value: f64) -> u8 {
        if value.is_nan() {
            return 0x7f;
        }
        let (magnitude, finite) = (value.abs(), &*self.finite);
        let above = finite.partition_point(|&x| x < magnitude).min(finite.len() - 1);
        let below = above.saturating_sub(1);
        let middle = f64::midpoint(finite[below], finite[above]);
        let code = if magnitude < middle || (magnitude == middle && below % 2 == 0) { below } else { above };
        code as u8 | u8::from(value.is_sign_negative()) << 7
    }

    fn decode(&self, code: u8) -> f64 {
        let magnitude = match code & 0x7f {
            finite if usize::from(finite) < self.finite.len() => self.finite[usize::from(finite)],
            other if self.infinity == Some(other) => f64::INFINITY,
            _ => f64::NAN,
        };
        if code >> 7 == 1 { -magnitude } else { magnitude }
    }
}

/// A dense row-major array.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Array {
    pub dtype: Dtype,
    pub dims: Vec<i64>,
    pub bytes: Vec<u8>,
}

/// Number of elements of a shape.
pub fn count(dims: &[i64]) -> usize {
    dims.iter().product::<i64>() as usize
}

impl Array {
    /// An array of `values` rounded to `dtype`.
    pub fn new(dtype: Dtype, dims: &[i64], values: &[f64]) -> Self {
        assert_eq!(values.len(), count(dims), "{dims:?}");
        Self { dtype, dims: dims.to_vec(), bytes: values.iter().flat_map(|&v| dtype.encode(v)).collect() }
    }

    pub fn i32s(dims: &[i64], values: &[i32]) -> Self {
        assert_eq!(values.len(), count(dims), "{dims:?}");
        Self { dtype: I32, dims: dims.to_vec(), bytes: values.iter().flat_map(|v| v.to_ne_bytes()).collect() }
    }

    pub fn f32s(dims: &[i64], values: &[f32]) -> Self {
        assert_eq!(values.len(), count(dims), "{dims:?}");
        Self { dtype: F32, dims: dims.to_vec(), bytes: values.iter().flat_map(|v| v.to_ne_bytes()).collect() }
    }

    pub fn i64s(dims: &[i64], values: &[i64]) -> Self {
        assert_eq!(values.len(), count(dims), "{dims:?}");
        Self { dtype: I64, dims: dims.to_vec(), bytes: values.iter().flat_map(|v| v.to_ne_bytes()).collect() }
    }

    /// An array whose bytes are all `byte`; 0xff is NaN in every float dtype.
    pub fn filled(dtype: Dtype, dims: &[i64], byte: u8) -> Self {
        Self { dtype, dims: dims.to_vec(), bytes: vec![byte; count(dims) * dtype.size()] }
    }

    /// An array of shape `[0]`, which stands for an optional operand or result that is left out.
    pub fn left_out(dtype: Dtype) -> Self {
        Self::filled(dtype, &[0], 0)
    }

    /// All elements as f64.
    pub fn values(&self) -> Vec<f64> {
        self.bytes.chunks_exact(self.dtype.size()).map(|b| self.dtype.decode(b)).collect()
    }
}
