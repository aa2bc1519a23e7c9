//! Host copies of tensors.

#[cfg(feature = "cuda")]
use crate::error::Result;
use crate::tensor::Tensor;

/// A host buffer with the strides of a tensor: its elements and the bytes between them.
pub(crate) struct HostTensor {
    words: Vec<u64>,
    /// Bytes before the first element; not 0 if a stride is negative.
    before: usize,
}

impl HostTensor {
    /// Zeros with the shape and strides of `tensor`.
    pub(crate) fn zeros(tensor: &Tensor) -> Self {
        let (before, after) = reach(tensor);
        Self { words: vec![0; (before + after).div_ceil(8)], before }
    }

    /// A copy of `tensor`, made by `copy(to, from, bytes)`.
    ///
    /// # Errors
    /// Those of `copy`.
    #[cfg(feature = "cuda")]
    pub(crate) fn of(tensor: &Tensor, copy: impl FnOnce(*mut u8, *const u8, usize) -> Result) -> Result<Self> {
        let mut host = Self::zeros(tensor);
        let (before, after) = reach(tensor);
        if before + after > 0 {
            copy(host.words.as_mut_ptr().cast(), tensor.data.wrapping_sub(before), before + after)?;
        }
        Ok(host)
    }

    /// A view of this buffer with the dtype, shape and strides of `tensor`.
    pub(crate) fn view<'a>(&self, tensor: &Tensor<'a>) -> Tensor<'a> {
        if tensor.is_empty() || tensor.data.is_null() {
            return *tensor;
        }
        Tensor { data: self.words.as_ptr().cast_mut().cast::<u8>().wrapping_add(self.before), ..*tensor }
    }
}

/// The number of bytes before the first element, and from it to the end.
fn reach(tensor: &Tensor) -> (usize, usize) {
    if tensor.is_empty() || tensor.data.is_null() {
        return (0, 0);
    }
    let (mut low, mut high) = (0, 0);
    for (axis, size) in tensor.dims.iter().enumerate() {
        let far = (size - 1) * tensor.stride(axis);
        (low, high) = (low + far.min(0), high + far.max(0));
    }
    let size = tensor.dtype.size();
    (-low as usize * size, (high + 1) as usize * size)
}

#[cfg(all(test, feature = "cuda"))]
mod tests {
    #![allow(clippy::unwrap_used, reason = "a failed step is a failed test")]

    use super::*;
    use crate::tensor::DType;

    #[test]
    fn a_copy_has_the_elements_where_the_tensor_has_them() {
        let mut memory: Vec<i32> = (0..20).collect();
        let first = memory[7..].as_mut_ptr().cast();
        let tensor = Tensor { dtype: DType::I32, data: first, dims: &[2, 3], strides: Some(&[-5, 4]) };
        let copy = HostTensor::of(&tensor, |to, from, bytes| {
            // SAFETY: the tensor spans elements 2 to 15 of `memory`.
            unsafe { to.copy_from_nonoverlapping(from, bytes) };
            Ok(())
        });
        let copy = copy.unwrap();
        let view = copy.view(&tensor);
        for (offset, expected) in [(0, 7), (4, 11), (8, 15), (-5, 2), (3, 10)] {
            // SAFETY: the offset is one of the tensor's elements.
            assert_eq!(unsafe { view.data.cast::<i32>().offset(offset).read() }, expected);
        }
        assert!(HostTensor::zeros(&Tensor::ABSENT).view(&Tensor::ABSENT).data.is_null());
    }
}
