//! The crate's error type, with XLA's status codes.

use std::fmt;

/// Status codes of XLA's FFI (`XLA_FFI_Error_Code`, absl's numbering).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(i32)]
pub enum Code {
    /// The call is wrong: the operator's definition excludes this shape, dtype or attribute.
    InvalidArgument = 3,
    /// The memory that the call's sizes require cannot be allocated.
    ResourceExhausted = 8,
    /// The machine cannot run the call: the driver is unusable, the GPU is too old, or the module is refused.
    FailedPrecondition = 9,
    /// The definition allows the call, but it is not implemented. The message names the nearest call that works.
    Unimplemented = 12,
    /// A bug of this library or an error of the driver.
    Internal = 13,
    /// A library or device is missing, for instance libcuda.
    Unavailable = 14,
}

/// An error with the status code under which XLA reports it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Error {
    /// The status code.
    pub code: Code,
    /// What is wrong and what was expected, with the name of the operand or attribute.
    pub message: String,
}

/// `std::result::Result` with this crate's [`Error`].
pub type Result<T = ()> = std::result::Result<T, Error>;

impl Error {
    /// [`Code::InvalidArgument`]
    pub fn invalid(message: impl Into<String>) -> Self {
        Self { code: Code::InvalidArgument, message: message.into() }
    }

    /// [`Code::Unimplemented`]
    pub fn unimplemented(message: impl Into<String>) -> Self {
        Self { code: Code::Unimplemented, message: message.into() }
    }

    /// [`Code::Internal`]
    pub fn internal(message: impl Into<String>) -> Self {
        Self { code: Code::Internal, message: message.into() }
    }

    /// [`Code::ResourceExhausted`] for an allocation of `bytes`.
    #[must_use]
    pub fn exhausted(bytes: usize) -> Self {
        Self { code: Code::ResourceExhausted, message: format!("no memory for {bytes} bytes") }
    }

    /// [`Code::FailedPrecondition`]
    pub fn precondition(message: impl Into<String>) -> Self {
        Self { code: Code::FailedPrecondition, message: message.into() }
    }

    /// [`Code::Unavailable`]
    pub fn unavailable(message: impl Into<String>) -> Self {
        Self { code: Code::Unavailable, message: message.into() }
    }

    /// The same error with the target's name in front of the message.
    #[must_use]
    pub fn of(mut self, target: &str) -> Self {
        self.message = format!("{target}: {}", self.message);
        self
    }
}

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.message)
    }
}

impl std::error::Error for Error {}

/// Fails unless `condition` holds. The message is built only on failure.
///
/// # Errors
/// [`Code::InvalidArgument`] with `message`.
pub(crate) fn ensure(condition: bool, message: impl FnOnce() -> String) -> Result {
    if condition { Ok(()) } else { Err(Error::invalid(message())) }
}

/// An empty vector with capacity for `count` elements. Use it where the count follows from a caller's sizes: if the
/// memory cannot be allocated, the call fails instead of the process.
///
/// # Errors
/// [`Code::ResourceExhausted`].
pub(crate) fn with_room<T>(count: usize) -> Result<Vec<T>> {
    let mut items = Vec::new();
    items.try_reserve_exact(count).map_err(|_| Error::exhausted(count.saturating_mul(size_of::<T>())))?;
    Ok(items)
}

/// Append `item`; a failed allocation is an error as in [`with_room`].
///
/// # Errors
/// [`Code::ResourceExhausted`].
pub(crate) fn push<T>(items: &mut Vec<T>, item: T) -> Result {
    items.try_reserve(1).map_err(|_| Error::exhausted((items.len() + 1).saturating_mul(size_of::<T>())))?;
    items.push(item);
    Ok(())
}
