//! Tensors of the safe API: memory of the host or a device with a dtype and a shape, borrowed to be read or written.

use crate::error::{Result, ensure};
use crate::tensor::{DType, Tensor};
use half::{bf16, f16};
use std::marker::PhantomData;

/// Maximum rank of a tensor.
pub const MAX_RANK: usize = 8;

/// Host memory: tensors borrow slices, and calls run on the CPU.
#[derive(Clone, Copy, Debug)]
pub enum Host {}

/// CUDA device memory: tensors hold addresses, and calls are enqueued on a stream.
#[derive(Clone, Copy, Debug)]
pub enum Device {}

/// The memory that a tensor is in: [`Host`] or [`Device`].
pub trait Memory: Copy + sealed::Sealed {}
impl Memory for Host {}
impl Memory for Device {}

/// A Rust type that is the element type of a tensor.
///
/// Rust has no 8-bit floats; their tensors are made from bytes ([`TensorRef::from_bytes`]).
pub trait Element: Copy + sealed::Sealed {
    /// XLA's number of the element type.
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

/// A tensor that a function reads. Its memory does not change during `'a`.
///
/// The constructor validates nothing. The function that receives the tensor returns an error with the operand's name if
/// the shape does not fit the memory.
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

/// A tensor that a function writes. Nothing else uses its memory during `'a`.
///
/// While it exists, its memory cannot be read, and cannot be an operand of the same call:
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
    /// A dense row-major tensor of this shape.
    #[must_use]
    pub fn new<T: Element>(elements: &'a [T], shape: &[usize]) -> Self {
        Self::of(View::new(elements.as_ptr().cast_mut().cast(), size_of_val(elements), T::DTYPE, shape))
    }

    /// A dense row-major tensor made from bytes in native byte order, for dtypes that Rust does not have (8-bit floats)
    /// or that are known only at run time. The bytes must be aligned to the element size.
    #[must_use]
    pub fn from_bytes(bytes: &'a [u8], dtype: DType, shape: &[usize]) -> Self {
        Self::of(View::new(bytes.as_ptr().cast_mut(), bytes.len(), dtype, shape))
    }
}

impl TensorRef<'_, Device> {
    /// A dense row-major tensor in `bytes` bytes of device memory. The caller chooses its lifetime.
    ///
    /// # Safety
    /// From the start of a call with this tensor until the work that it has enqueued has finished,
    /// - the `bytes` bytes at `address` are memory that the call's stream can read, and
    /// - nothing writes them, except work that is ordered by that stream.
    #[must_use]
    pub unsafe fn from_device(address: usize, bytes: usize, dtype: DType, shape: &[usize]) -> Self {
        Self::of(View::new(address as *mut u8, bytes, dtype, shape))
    }
}

impl<M> TensorRef<'_, M> {
    fn of(view: View) -> Self {
        Self { view, memory: PhantomData }
    }

    /// The tensor with these strides in elements, for rows in a larger buffer, such as the queries in the output of a
    /// fused q, k and v projection.
    ///
    /// The last dimension must be contiguous. Only operands whose documentation says "Rows may be strided" accept other
    /// strides than dense ones: queries, keys and values, page tables, and states to be merged.
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
    /// A dense row-major tensor of this shape.
    #[must_use]
    pub fn new<T: Element>(elements: &'a mut [T], shape: &[usize]) -> Self {
        Self::of(View::new(elements.as_mut_ptr().cast(), size_of_val(elements), T::DTYPE, shape))
    }

    /// A dense row-major tensor made from bytes in native byte order, as [`TensorRef::from_bytes`].
    #[must_use]
    pub fn from_bytes(bytes: &'a mut [u8], dtype: DType, shape: &[usize]) -> Self {
        Self::of(View::new(bytes.as_mut_ptr(), bytes.len(), dtype, shape))
    }
}

impl TensorMut<'_, Device> {
    /// A dense row-major tensor in `bytes` bytes of device memory. The caller chooses its lifetime.
    ///
    /// # Safety
    /// From the start of a call with this tensor until the work that it has enqueued has finished,
    /// - the `bytes` bytes at `address` are memory that the call's stream can read and write, and
    /// - nothing else reads or writes them, except work that is ordered by that stream.
    ///
    /// The same call has no other tensor in the same memory.
    #[must_use]
    pub unsafe fn from_device(address: usize, bytes: usize, dtype: DType, shape: &[usize]) -> Self {
        Self::of(View::new(address as *mut u8, bytes, dtype, shape))
    }
}

impl<'a, M> TensorMut<'a, M> {
    fn of(view: View) -> Self {
        Self { view, memory: PhantomData }
    }

    /// Borrows the tensor for a call, so that it can be used again afterwards.
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

    /// Borrows the tensor to be read, for instance a cache after its update.
    #[must_use]
    pub fn shared(&self) -> TensorRef<'_, M> {
        self.as_operand()
    }

    /// The operand that aliases this result in the same call.
    pub(super) fn as_operand(&self) -> TensorRef<'a, M> {
        TensorRef::of(self.view)
    }

    pub(super) fn view(self) -> View {
        self.view
    }
}

/// One number per dimension.
#[derive(Clone, Copy, Debug)]
struct Sizes {
    /// The number of dimensions, which may exceed the capacity of `numbers`.
    rank: usize,
    numbers: [i64; MAX_RANK],
}

impl Sizes {
    /// A size that does not fit into i64 becomes `i64::MAX`, which validation refuses as well.
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

/// Memory with a dtype and a shape, none of which is validated yet.
#[derive(Clone, Copy, Debug)]
pub(super) struct View {
    data: *mut u8,
    bytes: usize,
    dtype: DType,
    shape: Sizes,
    strides: Option<Sizes>,
}

// SAFETY: the struct consists of an address and numbers. `TensorRef` and `TensorMut` borrow plain numbers, which are
// `Send` and `Sync`.
unsafe impl Send for View {}
// SAFETY: as for `Send`.
unsafe impl Sync for View {}

impl View {
    fn new(data: *mut u8, bytes: usize, dtype: DType, shape: &[usize]) -> Self {
        Self { data, bytes, dtype, shape: Sizes::new(shape), strides: None }
    }

    /// The size of the last dimension; 0 for rank 0.
    pub(super) fn last_size(&self) -> i64 {
        self.shape.as_slice().last().copied().unwrap_or(0)
    }

    /// The tensor, after validating that all of its elements lie in the memory.
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
        // The strides of an empty tensor have no meaning and could overflow in arithmetic, so they are dropped.
        Ok(Tensor { strides: strides.filter(|_| !tensor.is_empty()), ..tensor })
    }
}

/// The number of elements from the first to the last one in memory; `None` if it overflows.
fn extent(dims: &[i64], strides: &[i64]) -> Option<i64> {
    if dims.contains(&0) {
        return Some(0);
    }
    dims.iter().zip(strides).try_fold(1i64, |sum, (&dim, &stride)| sum.checked_add((dim - 1).checked_mul(stride)?))
}
