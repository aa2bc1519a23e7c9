//! What an operator is called with: names, what is required, attribute types.

/// The interface of one target (`docs/reference/custom_calls.md`). A released one grows only by trailing optional
/// operands and results.
#[derive(Debug)]
pub struct Signature {
    /// The custom call's target name, and what every error text begins with.
    pub target: &'static str,
    /// Names of the operands, the required ones first.
    pub operands: &'static [&'static str],
    /// How many of them are required.
    pub required_operands: usize,
    /// Names of the results, the required ones first.
    pub results: &'static [&'static str],
    /// How many of them are required.
    pub required_results: usize,
    /// Names and types of the attributes, in alphabetical order; all are required.
    pub attributes: &'static [(&'static str, AttributeKind)],
}

/// The type of an attribute.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum AttributeKind {
    /// MLIR `i1`
    Bool,
    /// MLIR `i64`
    I64,
    /// MLIR `f32`
    F32,
}

impl AttributeKind {
    pub(super) fn admits(self, given: Attribute) -> bool {
        matches!(
            (self, given),
            (Self::Bool, Attribute::Bool(_)) | (Self::I64, Attribute::I64(_)) | (Self::F32, Attribute::F32(_))
        )
    }
}

/// A typed attribute; a call's attributes stand in alphabetical order of their names.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Attribute {
    /// MLIR `i1`
    Bool(bool),
    /// MLIR `i64`
    I64(i64),
    /// MLIR `f32`
    F32(f32),
}
