//! The operators as `ffi/operators.toml` declares them. `build_support/operators.rs` generates the included code.

use super::signature::{Attribute, AttributeKind, Signature};

include!(concat!(env!("OUT_DIR"), "/operators.rs"));

/// The declarations as JSON, for `xa_info`.
pub(crate) const OPERATORS_JSON: &str = include_str!(concat!(env!("OUT_DIR"), "/operators.json"));

impl Op {
    /// The operator with this number.
    #[must_use]
    pub fn from_number(number: i32) -> Option<Self> {
        Self::ALL.into_iter().find(|op| *op as i32 == number)
    }

    /// The operator's signature.
    #[must_use]
    pub fn signature(self) -> &'static Signature {
        &SIGNATURES[self as usize]
    }
}
