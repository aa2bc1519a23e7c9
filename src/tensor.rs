//! [`Tensor`], a typed view of a buffer, which all layers below the front-ends use.

use crate::error::{Error, Result, ensure};
use std::fmt;

/// An element type by XLA's number for it (`XLA_FFI_DataType`, which is XLA's `PrimitiveType`).
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
#[repr(transparent)]
pub struct DType(pub i32);

macro_rules! dtypes {
    ($($name:ident = $code:literal, $text:literal, $bytes:literal;)*) => {
        impl DType {
            $(#[doc = concat!("`", $text, "`")] pub const $name: Self = Self($code);)*

            /// Bytes per element; 0 for a type that no operator takes.
            #[must_use]
            pub const fn size(self) -> usize {
                match self.0 { $($code => $bytes,)* _ => 0 }
            }
        }
        impl fmt::Display for DType {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                match self.0 { $($code => f.write_str($text),)* code => write!(f, "number {code} of XLA") }
            }
        }
    };
}

dtypes! {
    PRED = 1, "pred", 1;
    I8 = 2, "i8", 1;
    I16 = 3, "i16", 2;
    I32 = 4, "i32", 4;
    I64 = 5, "i64", 8;
    U8 = 6, "u8", 1;
    U16 = 7, "u16", 2;
    U32 = 8, "u32", 4;
    U64 = 9, "u64", 8;
    F16 = 10, "f16", 2;
    F32 = 11, "f32", 4;
    F64 = 12, "f64", 8;
    C64 = 15, "c64", 8;
    C128 = 18, "c128", 16;
    BF16 = 16, "bf16", 2;
    F8E5M2 = 19, "f8e5m2", 1;
    F8E4M3FN = 20, "f8e4m3fn", 1;
}

impl DType {
    /// The number that stands for an operand that was left out.
    pub const ABSENT: Self = Self(0);
}

impl fmt::Debug for DType {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

/// A typed view of memory that the caller owns: host memory on the CPU, device memory on CUDA.
#[derive(Clone, Copy, Debug)]
pub struct Tensor<'a> {
    /// Element type.
    pub dtype: DType,
    /// First element. May be null if there is no element, or if only shapes are validated.
    pub data: *mut u8,
    /// Sizes, outermost first.
    pub dims: &'a [i64],
    /// Stride of each dimension in elements; `None` for a dense row-major tensor.
    pub strides: Option<&'a [i64]>,
}

// SAFETY: a view consists of an address and numbers; each access through it states why it is allowed.
unsafe impl Send for Tensor<'_> {}
// SAFETY: as for `Send`.
unsafe impl Sync for Tensor<'_> {}

impl<'a> Tensor<'a> {
    /// The view that stands for an optional operand or result that was left out.
    pub const ABSENT: Tensor<'static> =
        Tensor { dtype: DType::ABSENT, data: std::ptr::null_mut(), dims: &[], strides: None };

    /// A dense view.
    #[must_use]
    pub fn dense(dtype: DType, data: *mut u8, dims: &'a [i64]) -> Self {
        Self { dtype, data, dims, strides: None }
    }

    /// Whether the operand was left out. A rank-1 buffer without elements counts as left out too.
    #[must_use]
    pub fn is_left_out(&self) -> bool {
        self.dtype == DType::ABSENT || self.dims == [0]
    }

    /// Number of elements.
    #[must_use]
    pub fn len(&self) -> usize {
        self.dims.iter().product::<i64>() as usize
    }

    /// Whether there is no element.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.dims.contains(&0)
    }

    /// Size of all elements in bytes.
    #[must_use]
    pub fn bytes(&self) -> usize {
        self.len() * self.dtype.size()
    }

    /// Stride of `axis` in elements. A dimension of size 1 has the stride of a dense tensor, whatever is given.
    #[must_use]
    pub fn stride(&self, axis: usize) -> i64 {
        // Beside a size of 0 the other sizes can be arbitrarily large. Wrapping is harmless, because no element exists.
        let dense = || self.dims[axis + 1..].iter().fold(1i64, |n, &d| n.wrapping_mul(d));
        self.strides.filter(|_| self.dims[axis] != 1).map_or_else(dense, |s| s[axis])
    }

    /// Whether the tensor is dense and row-major. Dimensions of size 1 may have any stride.
    #[must_use]
    pub fn is_dense(&self) -> bool {
        let mut dense = 1i64;
        let mut fits = |(&dim, &stride): (&i64, &i64)| {
            let fits = dim == 1 || stride == dense;
            dense = dense.wrapping_mul(dim);
            fits
        };
        self.is_empty() || self.strides.is_none_or(|strides| self.dims.iter().zip(strides).rev().all(&mut fits))
    }

    /// Refuses impossible sizes: negative sizes, sizes or strides whose byte range overflows, strides of another rank.
    ///
    /// # Errors
    /// `INVALID_ARGUMENT`, naming the operand.
    pub fn check_sizes(&self, name: &str) -> Result {
        ensure(self.dims.iter().all(|&d| d >= 0), || format!("{name} has shape {:?}: a size is negative", self.dims))?;
        let elements = self.dims.iter().try_fold(1i64, |n, &d| n.checked_mul(d));
        let bytes = elements.and_then(|n| n.checked_mul(self.dtype.size().max(1) as i64));
        ensure(bytes.is_some(), || format!("{name} has shape {:?}: its size overflows", self.dims))?;
        ensure(self.strides.is_none_or(|s| s.len() == self.dims.len()), || {
            format!("{name} has {} strides, expected {}", self.strides.map_or(0, <[i64]>::len), self.dims.len())
        })?;
        let near = |strides: &[i64]| self.is_empty() || self.reach(strides).is_some_and(|bytes| bytes < 1 << 62);
        ensure(self.strides.is_none_or(near), || {
            format!("{name} has shape {:?} and strides {:?}: its size overflows", self.dims, self.strides)
        })
    }

    /// The largest distance between two elements in bytes, `None` if it overflows. The tensor must not be empty.
    fn reach(&self, strides: &[i64]) -> Option<u64> {
        let size = self.dtype.size().max(1) as u64;
        self.dims.iter().zip(strides).try_fold(0u64, |sum, (&dim, &stride)| {
            sum.checked_add((dim as u64 - 1).checked_mul(stride.unsigned_abs())?.checked_mul(size)?)
        })
    }

    /// Refuses a tensor with elements whose address is null or not aligned to its element size.
    ///
    /// # Errors
    /// `INVALID_ARGUMENT`, naming the operand.
    pub fn check_data(&self, name: &str) -> Result {
        if self.is_empty() || self.dtype == DType::ABSENT {
            return Ok(());
        }
        ensure(!self.data.is_null(), || format!("{name} has shape {:?} and no memory", self.dims))?;
        ensure((self.data as usize).is_multiple_of(self.dtype.size().max(1)), || {
            format!("{name} lies at {:p}, expected a multiple of {} bytes", self.data, self.dtype.size())
        })
    }

    /// Refuses an element type that is not in `allowed`.
    ///
    /// # Errors
    /// `INVALID_ARGUMENT`, naming the operand and what was expected.
    pub fn expect_dtype(&self, name: &str, allowed: &[DType]) -> Result {
        ensure(allowed.contains(&self.dtype), || {
            let list: Vec<String> = allowed.iter().map(ToString::to_string).collect();
            format!("{name} has dtype {}, expected {}", self.dtype, list.join(" or "))
        })
    }

    /// Refuses a shape that does not match `expected`, which has one [`Dim`] per dimension.
    ///
    /// # Errors
    /// `INVALID_ARGUMENT`: `block_tables has shape [3, 7], expected [num_seqs=4, max_pages]`.
    pub fn expect_shape(&self, name: &str, expected: &[Dim]) -> Result {
        let fits =
            self.dims.len() == expected.len() && self.dims.iter().zip(expected).all(|(&found, dim)| dim.admits(found));
        ensure(fits, || {
            let list: Vec<String> = expected.iter().map(ToString::to_string).collect();
            format!("{name} has shape {:?}, expected [{}]", self.dims, list.join(", "))
        })
    }
}

/// The expected size of one dimension.
#[derive(Clone, Copy, Debug)]
pub enum Dim {
    /// Any size; the name appears in error messages.
    Any(&'static str),
    /// The size that another operand determines, with its name.
    Is(&'static str, i64),
}

impl Dim {
    fn admits(&self, found: i64) -> bool {
        matches!(*self, Dim::Any(_)) || matches!(*self, Dim::Is(_, size) if size == found)
    }
}

impl fmt::Display for Dim {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Dim::Any(name) => f.write_str(name),
            Dim::Is(name, size) => write!(f, "{name}={size}"),
        }
    }
}

/// The error for a required operand `name` that is not given.
pub(crate) fn missing(name: &str) -> Error {
    Error::invalid(format!("{name} is missing"))
}
