//! Tensors as the safe functions take them: memory with a type and a shape, read or written, of the host or a device.

use crate::error::{Result, ensure};
use crate::tensor::{DType, Tensor};
use half::{bf16, f16};
use std::marker::PhantomData;

/// The most dimensions that a tensor of these functions may have.
pub const MAX_RANK: usize = 8;

/// Memory of the host: tensors are made of slices, calls run on the CPU.
#[derive(Clone, Copy, Debug)]
pub enum Host {}

/// Memory of a CUDA device: tensors are made of addresses, calls are enqueued on a stream.
#[derive(Clone, Copy, Debug)]
pub enum Device {}

/// Where the memory of tensors is: [`Host`] or [`Device`].
pub trait Memory: Copy + sealed::Sealed {}
impl Memory for Host {}
impl Memory for Device {}

/// A Rust type that is the element type of a tensor.
///
/// The 8-bit floats have no type in Rust; their tensors are made of bytes ([`TensorRef::from_bytes`]).
pub trait Element: Copy + sealed::Sealed {
    /// The type by XLA's number.
    const DTYPE: DType;
}

mod sealed {
    pub trait Sealed {}
    impl Sealed for super::Host {}
    impl Sealed for super::Device {}
}

macro_rules! elements {
    ($($element:ty = $dtype:ident),*) => {
        $(impl sealed::Sealed for $element {}
        impl Element for $element { const DTYPE: DType = DType::$dtype; })*
    };
}
elements!(f16 = F16, bf16 = BF16, f32 = F32, f64 = F64, i8 = I8, u8 = U8, i32 = I32, i64 = I64);

/// A tensor that a function reads, in memory that stays unchanged for `'a`.
///
/// Making one checks nothing. The function that it is given to holds the shape against the memory and, if they do not
/// fit, returns an error with the operand's name.
///
/// ```
/// use xla_attention::TensorRef;
///
/// let (keys, starts) = ([0.5f32; 5 * 2 * 64], [0, 3, 5]);
/// let k = TensorRef::new(&keys, &[5, 2, 64]);
/// let cu_seqlens_k = TensorRef::new(&starts, &[3]);
/// ```
#[derive(Clone, Copy, Debug)]
pub struct TensorRef<'a, M = Host> {
    view: View,
    memory: PhantomData<(&'a (), M)>,
}

/// A tensor that a function writes, in memory that nothing else uses for `'a`.
///
/// While it lives its memory cannot be read, nor be an operand of the same call:
///
/// ```compile_fail,E0502
/// use xla_attention::{On, TensorMut, TensorRef, simple_add};
///
/// let mut a = [1.0f32; 4];
/// let sum = TensorMut::new(&mut a, &[4]);
/// simple_add(TensorRef::new(&a, &[4]), TensorRef::new(&a, &[4]), sum, On::cpu())?;
/// # Ok::<(), xla_attention::Error>(())
/// ```
#[derive(Debug)]
pub struct TensorMut<'a, M = Host> {
    view: View,
    memory: PhantomData<(&'a mut (), M)>,
}

impl<'a> TensorRef<'a, Host> {
    /// A dense tensor of this shape, the last dimension innermost.
    #[must_use]
    pub fn new<T: Element>(elements: &'a [T], shape: &[usize]) -> Self {
        Self::of(View::new(elements.as_ptr().cast_mut().cast(), size_of_val(elements), T::DTYPE, shape))
    }

    /// The same of bytes in the machine's order, for types that Rust does not have (8-bit floats) or that are known only
    /// at run time. Where there are elements, the bytes are to be aligned to them.
    #[must_use]
    pub fn from_bytes(bytes: &'a [u8], dtype: DType, shape: &[usize]) -> Self {
        Self::of(View::new(bytes.as_ptr().cast_mut(), bytes.len(), dtype, shape))
    }
}

impl TensorRef<'_, Device> {
    /// A dense tensor in `bytes` bytes of device memory, the last dimension innermost. Its lifetime is the caller's choice.
    ///
    /// # Safety
    /// From the time a call is given this tensor until the work which it has enqueued is done,
    /// - so many bytes at `address` are memory that the calls' stream can read, and
    /// - nothing writes them, except in the order of that stream.
    #[must_use]
    pub unsafe fn from_device(address: usize, bytes: usize, dtype: DType, shape: &[usize]) -> Self {
        Self::of(View::new(address as *mut u8, bytes, dtype, shape))
    }
}

impl<M> TensorRef<'_, M> {
    fn of(view: View) -> Self {
        Self { view, memory: PhantomData }
    }

    /// The tensor with so many elements between neighbours along each dimension, for rows that lie amid others, as
    /// queries in the product of one matrix for q, k and v do.
    ///
    /// The elements of a row are neighbours always, and its rows may lie apart in the operands of which that is said:
    /// queries, keys and values wherever they are stored, tables, outputs to be merged. The others are dense.
    ///
    /// ```
    /// # use xla_attention::TensorRef;
    /// // [T, Hq + 2 * Hkv, D]: 4 query heads, 2 heads of keys, 2 of values
    /// let qkv = [0.0f32; 10 * 8 * 64];
    /// let q = TensorRef::new(&qkv, &[10, 4, 64]).with_strides(&[8 * 64, 64, 1]);
    /// let k = TensorRef::new(&qkv[4 * 64..], &[10, 2, 64]).with_strides(&[8 * 64, 64, 1]);
    /// ```
    #[must_use]
    pub fn with_strides(mut self, strides: &[usize]) -> Self {
        self.view.strides = Some(Sizes::new(strides));
        self
    }

    pub(super) fn view(self) -> View {
        self.view
    }
}

impl<'a> TensorMut<'a, Host> {
    /// A dense tensor of this shape, the last dimension innermost.
    #[must_use]
    pub fn new<T: Element>(elements: &'a mut [T], shape: &[usize]) -> Self {
        Self::of(View::new(elements.as_mut_ptr().cast(), size_of_val(elements), T::DTYPE, shape))
    }

    /// The same of bytes in the machine's order, as [`TensorRef::from_bytes`].
    #[must_use]
    pub fn from_bytes(bytes: &'a mut [u8], dtype: DType, shape: &[usize]) -> Self {
        Self::of(View::new(bytes.as_mut_ptr(), bytes.len(), dtype, shape))
    }
}

impl TensorMut<'_, Device> {
    /// A dense tensor in `bytes` bytes of device memory, the last dimension innermost. Its lifetime is the caller's choice.
    ///
    /// # Safety
    /// From the time a call is given this tensor until the work which it has enqueued is done,
    /// - so many bytes at `address` are memory that the calls' stream can read and write, and
    /// - nothing else reads or writes them, except in the order of that stream.
    ///
    /// No other tensor of the same memory is given to the same call.
    #[must_use]
    pub unsafe fn from_device(address: usize, bytes: usize, dtype: DType, shape: &[usize]) -> Self {
        Self::of(View::new(address as *mut u8, bytes, dtype, shape))
    }
}

impl<'a, M> TensorMut<'a, M> {
    fn of(view: View) -> Self {
        Self { view, memory: PhantomData }
    }

    /// The same tensor for a while: what a function takes is gone, and this one can be used again after it.
    ///
    /// ```
    /// use xla_attention::{On, TensorMut, TensorRef, simple_add};
    ///
    /// let (one, mut out) = ([1.0f32], [0.0f32]);
    /// let (a, mut sum) = (TensorRef::new(&one, &[1]), TensorMut::new(&mut out, &[1]));
    /// simple_add(a, a, sum.reborrow(), On::cpu())?;
    /// simple_add(a, a, sum, On::cpu())?;
    /// assert_eq!(out, [2.0]);
    /// # Ok::<(), xla_attention::Error>(())
    /// ```
    #[must_use]
    pub fn reborrow(&mut self) -> TensorMut<'_, M> {
        TensorMut::of(self.view)
    }

    /// The same tensor to be read: a cache, after it was updated.
    #[must_use]
    pub fn shared(&self) -> TensorRef<'_, M> {
        self.as_operand()
    }

    /// The operand whose update in place is this result, for the same call.
    pub(super) fn as_operand(&self) -> TensorRef<'a, M> {
        TensorRef::of(self.view)
    }

    pub(super) fn view(self) -> View {
        self.view
    }
}

/// A number for each dimension.
#[derive(Clone, Copy, Debug)]
struct Sizes {
    /// How many there are, also if that is more than the array holds.
    rank: usize,
    numbers: [i64; MAX_RANK],
}

impl Sizes {
    /// What no i64 holds becomes the largest one, of which no memory has so many elements either.
    fn new(sizes: &[usize]) -> Self {
        let mut numbers = [0; MAX_RANK];
        for (number, &size) in numbers.iter_mut().zip(sizes) {
            *number = i64::try_from(size).unwrap_or(i64::MAX);
        }
        Self { rank: sizes.len(), numbers }
    }

    fn as_slice(&self) -> &[i64] {
        &self.numbers[..self.rank.min(MAX_RANK)]
    }
}

/// Memory, its type and its shape, of which nothing has been checked.
#[derive(Clone, Copy, Debug)]
pub(super) struct View {
    data: *mut u8,
    bytes: usize,
    dtype: DType,
    shape: Sizes,
    strides: Option<Sizes>,
}

// SAFETY: an address and numbers. The tensors around it are references to elements, which are plain numbers.
unsafe impl Send for View {}
// SAFETY: as above.
unsafe impl Sync for View {}

impl View {
    fn new(data: *mut u8, bytes: usize, dtype: DType, shape: &[usize]) -> Self {
        Self { data, bytes, dtype, shape: Sizes::new(shape), strides: None }
    }

    /// The size of the last dimension, 0 without one.
    pub(super) fn last_size(&self) -> i64 {
        self.shape.as_slice().last().copied().unwrap_or(0)
    }

    /// The tensor, after all of its elements were found to lie in the memory.
    pub(super) fn tensor(&self, name: &str) -> Result<Tensor<'_>> {
        let (dims, strides) = (self.shape.as_slice(), self.strides.as_ref().map(Sizes::as_slice));
        let rank = self.shape.rank.max(self.strides.map_or(0, |strides| strides.rank));
        ensure(rank <= MAX_RANK, || format!("{name} has rank {rank}, expected at most {MAX_RANK}"))?;
        ensure(self.dtype.size() > 0, || format!("{name} has dtype {}, which no operator takes", self.dtype))?;
        let tensor = Tensor { dtype: self.dtype, data: self.data, dims, strides };
        tensor.check_sizes(name)?;
        let memory = self.bytes;
        match strides {
            None => ensure(tensor.bytes() == memory, || {
                let (dtype, bytes) = (self.dtype, tensor.bytes());
                format!("{name} has shape {dims:?} of {dtype}, which is {bytes} bytes, in memory of {memory}")
            })?,
            Some(strides) => {
                let needed = extent(dims, strides).and_then(|elements| elements.checked_mul(self.dtype.size() as i64));
                ensure(needed.is_some_and(|needed| needed as usize <= memory), || {
                    format!(
                        "{name} has shape {dims:?} and strides {strides:?}, which leave its memory of {memory} bytes"
                    )
                })?;
            }
        }
        // Without an element no stride has a meaning, and no code should compute with one.
        Ok(Tensor { strides: strides.filter(|_| !tensor.is_empty()), ..tensor })
    }
}

/// Elements from the first to the last; `None` if that is more than can be counted.
fn extent(dims: &[i64], strides: &[i64]) -> Option<i64> {
    if dims.contains(&0) {
        return Some(0);
    }
    dims.iter().zip(strides).try_fold(1i64, |sum, (&dim, &stride)| sum.checked_add((dim - 1).checked_mul(stride)?))
}
