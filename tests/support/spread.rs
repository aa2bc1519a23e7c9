//! Arrays that do not lie densely, as eager torch and Rust may pass them.

use super::array::Array;
use super::guard::{Guarded, Side};
use xla_attention::{DType, Tensor};

/// An array spread out in memory: each dimension but the last leaves `gap` elements of garbage after its neighbours.
pub struct Spread {
    memory: Guarded,
    dtype: DType,
    dims: Vec<i64>,
    strides: Vec<i64>,
}

impl Spread {
    /// `array` with `gap` elements of 0xff after the neighbours along each dimension but the last.
    pub fn new(name: &str, side: Side, array: &Array, gap: i64) -> Self {
        let rank = array.dims.len();
        let mut strides = vec![1i64; rank];
        for axis in (0..rank.saturating_sub(1)).rev() {
            strides[axis] = strides[axis + 1] * array.dims[axis + 1] + gap;
        }
        let extent: i64 = 1 + array.dims.iter().zip(&strides).map(|(d, s)| (d - 1) * s).sum::<i64>();
        let size = array.dtype.size();
        let mut bytes = vec![0xffu8; extent as usize * size];
        for index in 0..array.bytes.len() / size {
            let at = offset(index as i64, &array.dims, &strides);
            bytes[at * size..][..size].copy_from_slice(&array.bytes[index * size..][..size]);
        }
        let memory = Guarded::new(name, side, &bytes);
        Self { memory, dtype: DType(array.dtype.0), dims: array.dims.clone(), strides }
    }

    pub fn tensor(&self) -> Tensor<'_> {
        Tensor { dtype: self.dtype, data: self.memory.data(), dims: &self.dims, strides: Some(&self.strides) }
    }

    /// The elements, packed; everything between them is still garbage.
    pub fn packed(&self) -> Vec<u8> {
        let (bytes, size) = (self.memory.bytes(), self.dtype.size());
        let mut touched = vec![false; bytes.len()];
        let count = self.dims.iter().product::<i64>();
        let mut packed = Vec::new();
        for index in 0..count {
            let at = offset(index, &self.dims, &self.strides) * size;
            packed.extend_from_slice(&bytes[at..at + size]);
            touched[at..at + size].fill(true);
        }
        assert!(bytes.iter().zip(touched).all(|(byte, element)| element || *byte == 0xff), "a gap was written");
        packed
    }
}

/// Where element `index` (counted row-major) of a strided tensor lies.
fn offset(index: i64, dims: &[i64], strides: &[i64]) -> usize {
    let (mut rest, mut at) = (index, 0);
    for (dim, stride) in dims.iter().zip(strides).rev() {
        at += rest % dim * stride;
        rest /= dim;
    }
    at as usize
}
