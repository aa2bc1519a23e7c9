//! Calls of `simple_add`, their expected result, and a comparison of bits.

use super::{Array, BF16, F16, F32, I8, I32, I64, Invocation, U8};
use half::{bf16, f16};

/// A call of `simple_add`.
pub fn addition(a: Array, b: Array) -> Invocation {
    let (dtype, dims) = (a.dtype, a.dims.clone());
    let call = Invocation { description: format!("{dtype:?} {dims:?}"), ..Invocation::new("xla_gpu_simple_add") };
    call.operand("a", a).operand("b", b).result("out", dtype, &dims)
}

/// The element-wise sum in the arithmetic of the dtype.
pub fn sum(a: &Array, b: &Array) -> Array {
    macro_rules! add {
        ($t:ty, $add:expr) => {{
            let elements = |x: &Array| -> Vec<$t> {
                x.bytes.chunks_exact(size_of::<$t>()).map(|e| <$t>::from_ne_bytes(e.try_into().unwrap())).collect()
            };
            let add: fn($t, $t) -> $t = $add;
            elements(a).into_iter().zip(elements(b)).flat_map(|(a, b)| add(a, b).to_ne_bytes()).collect()
        }};
    }
    let bytes = match a.dtype {
        I8 => add!(i8, i8::wrapping_add),
        U8 => add!(u8, u8::wrapping_add),
        I32 => add!(i32, i32::wrapping_add),
        I64 => add!(i64, i64::wrapping_add),
        // f64 represents each sum that is close to a tie of a 16-bit dtype, so the intermediate rounding has no effect.
        F16 => add!(f16, |a, b| f16::from_f64(a.to_f64() + b.to_f64())),
        BF16 => add!(bf16, |a, b| bf16::from_f64(a.to_f64() + b.to_f64())),
        F32 => add!(f32, |a, b| a + b),
        _ => add!(f64, |a, b| a + b),
    };
    Array { dtype: a.dtype, dims: a.dims.clone(), bytes }
}

/// Asserts equal bits. All NaN count as equal, because the processor chooses the NaN that arithmetic returns.
pub fn assert_same(description: &str, actual: &Array, expected: &Array) {
    assert_eq!((actual.dtype, &actual.dims), (expected.dtype, &expected.dims), "{description}");
    if actual.bytes == expected.bytes {
        return;
    }
    for (i, (actual, expected)) in actual.values().iter().zip(expected.values()).enumerate() {
        let same = actual.to_bits() == expected.to_bits() || (actual.is_nan() && expected.is_nan());
        assert!(same, "{description}: element {i} is {actual:e}, expected {expected:e}");
    }
}
