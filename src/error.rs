//! What can go wrong, and the only map from it to XLA's status codes.

use std::fmt;

/// Status codes of XLA's FFI (`XLA_FFI_Error_Code`, absl's numbering).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(i32)]
pub enum Code {
    /// The caller's mistake: a shape, dtype or attribute that the operator's definition excludes.
    InvalidArgument = 3,
    /// There is no memory for what the call's sizes ask for.
    ResourceExhausted = 8,
    /// The machine is not in a state to run this: no usable driver, GPU too old, module refused.
    FailedPrecondition = 9,
    /// Allowed by the definition, not built (yet); the text names the nearest thing that works.
    Unimplemented = 12,
    /// A fault of ours or of the driver.
    Internal = 13,
    /// Something that has to be there is not, for instance libcuda.
    Unavailable = 14,
}

/// An error with the status code under which XLA reports it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Error {
    /// How XLA classifies it.
    pub code: Code,
    /// What is wrong and what was expected; names the operand or attribute.
    pub message: String,
}

/// `std::result::Result` with this crate's [`Error`].
pub type Result<T = ()> = std::result::Result<T, Error>;

impl Error {
    /// The caller's mistake.
    pub fn invalid(message: impl Into<String>) -> Self {
        Self { code: Code::InvalidArgument, message: message.into() }
    }

    /// Right, but not built.
    pub fn unimplemented(message: impl Into<String>) -> Self {
        Self { code: Code::Unimplemented, message: message.into() }
    }

    /// A fault of ours or of the driver.
    pub fn internal(message: impl Into<String>) -> Self {
        Self { code: Code::Internal, message: message.into() }
    }

    /// No memory for so many bytes.
    #[must_use]
    pub fn exhausted(bytes: usize) -> Self {
        Self { code: Code::ResourceExhausted, message: format!("no memory for {bytes} bytes") }
    }

    /// The machine cannot run this as it stands.
    pub fn precondition(message: impl Into<String>) -> Self {
        Self { code: Code::FailedPrecondition, message: message.into() }
    }

    /// A library or device is missing.
    pub fn unavailable(message: impl Into<String>) -> Self {
        Self { code: Code::Unavailable, message: message.into() }
    }

    /// The same error with the target's name in front of the text.
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

/// `Err(invalid)` unless `condition` holds; the text is built only then.
///
/// # Errors
/// [`Code::InvalidArgument`] with the text of `message`.
pub(crate) fn ensure(condition: bool, message: impl FnOnce() -> String) -> Result {
    if condition { Ok(()) } else { Err(Error::invalid(message())) }
}

/// An empty vector with room for `count` elements, for counts that follow from a caller's sizes: without memory the
/// call fails, not the process.
///
/// # Errors
/// [`Code::ResourceExhausted`].
pub(crate) fn with_room<T>(count: usize) -> Result<Vec<T>> {
    let mut items = Vec::new();
    items.try_reserve_exact(count).map_err(|_| Error::exhausted(count.saturating_mul(size_of::<T>())))?;
    Ok(items)
}

/// Append `item`, as [`with_room`] makes room.
///
/// # Errors
/// [`Code::ResourceExhausted`].
pub(crate) fn push<T>(items: &mut Vec<T>, item: T) -> Result {
    items.try_reserve(1).map_err(|_| Error::exhausted((items.len() + 1).saturating_mul(size_of::<T>())))?;
    items.push(item);
    Ok(())
}
