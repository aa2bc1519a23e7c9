//! An operator's signature: names of operands, results and attributes, which are required, and attribute types.

/// The signature of one target (`docs/reference/custom_calls.md`). A released signature grows only by trailing optional
/// operands and results.
#[derive(Debug)]
pub struct Signature {
    /// The operator's number.
    pub(super) number: usize,
    /// The custom call's target name, with which every error message begins.
    pub target: &'static str,
    /// Names of the operands, the required ones first.
    pub operands: &'static [&'static str],
    /// Number of required operands.
    pub required_operands: usize,
    /// Names of the results, the required ones first.
    pub results: &'static [&'static str],
    /// Number of required results.
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

/// The value of an attribute. A call lists its attributes in alphabetical order of their names.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Attribute {
    /// MLIR `i1`
    Bool(bool),
    /// MLIR `i64`
    I64(i64),
    /// MLIR `f32`
    F32(f32),
}
