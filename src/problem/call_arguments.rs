//! The arguments of a call, validated against its operator's signature.

use super::operators::{BoolAttribute, CallResult, F32Attribute, I64Attribute, Operand};
use super::signature::{Attribute, Signature};
use crate::error::{Result, ensure};
use crate::failpoint::{self, Failpoint};
use crate::tensor::{DType, Tensor, missing};
use std::fmt;
use std::hash::{Hash, Hasher};

/// The operands, results and attributes of a call. Their number and types match the [`Signature`]; access is by name.
pub(crate) struct CallArguments<'a> {
    signature: &'static Signature,
    operands: &'a [Tensor<'a>],
    results: &'a [Tensor<'a>],
    attributes: &'a [Attribute],
}

impl<'a> CallArguments<'a> {
    /// Validates what does not depend on the operator: counts, attribute types and sizes. With `in_memory`, a tensor
    /// with elements must also have an aligned address.
    pub(crate) fn new(
        signature: &'static Signature,
        operands: &'a [Tensor<'a>],
        results: &'a [Tensor<'a>],
        attributes: &'a [Attribute],
        in_memory: bool,
    ) -> Result<Self> {
        failpoint::trigger(Failpoint::Problem);
        count("operand", signature.operands, signature.required_operands, operands)?;
        count("result", signature.results, signature.required_results, results)?;
        ensure(attributes.len() == signature.attributes.len(), || {
            format!("{} attributes given, expected {}", attributes.len(), signature.attributes.len())
        })?;
        for ((name, kind), given) in signature.attributes.iter().zip(attributes) {
            ensure(kind.admits(*given), || format!("attribute {name} is {given:?}, expected {kind:?}"))?;
        }
        for (name, tensor) in signature.operands.iter().zip(operands).chain(signature.results.iter().zip(results)) {
            tensor.check_sizes(name)?;
            if in_memory {
                tensor.check_data(name)?;
            }
        }
        Ok(Self { signature, operands, results, attributes })
    }

    /// A required operand.
    pub(crate) fn operand(&self, name: Operand) -> Tensor<'a> {
        self.given(name).unwrap_or(Tensor::ABSENT)
    }
    /// An optional operand; `None` if left out.
    pub(crate) fn optional_operand(&self, name: Operand) -> Option<Tensor<'a>> {
        self.given(name).filter(|t| !t.is_left_out())
    }
    /// A required result.
    pub(crate) fn result(&self, name: CallResult) -> Tensor<'a> {
        self.given_result(name).unwrap_or(Tensor::ABSENT)
    }
    /// An optional result; `None` if left out.
    pub(crate) fn optional_result(&self, name: CallResult) -> Option<Tensor<'a>> {
        self.given_result(name).filter(|t| !t.is_left_out())
    }
    /// Whether no result, apart from the workspace, has an element, so that there is nothing to compute. Beside a size
    /// of 0 the other sizes can be arbitrarily large, so they must not be used in arithmetic.
    pub(crate) fn has_empty_results(&self) -> bool {
        let workspace = CallResult::Workspace.place(self.signature);
        let results = self.results.iter().enumerate().filter(|(index, _)| Some(*index) != workspace);
        results.map(|(_, result)| result).all(|result| result.is_empty() || result.is_left_out())
    }
    fn given(&self, name: Operand) -> Option<Tensor<'a>> {
        self.find(name.place(self.signature), self.operands, name.name())
    }
    fn given_result(&self, name: CallResult) -> Option<Tensor<'a>> {
        self.find(name.place(self.signature), self.results, name.name())
    }
    fn attribute(&self, place: Option<usize>, name: &str) -> Option<Attribute> {
        self.find(place, self.attributes, name)
    }
    /// What is given in the place of `name` in the signature.
    fn find<T: Copy>(&self, place: Option<usize>, given: &[T], name: &str) -> Option<T> {
        debug_assert!(place.is_some(), "{} has no {name}", self.signature.target);
        place.and_then(|place| given.get(place)).copied()
    }
    /// An attribute that the signature types as `i64`.
    pub(crate) fn i64(&self, name: I64Attribute) -> i64 {
        if let Some(Attribute::I64(value)) = self.attribute(name.place(self.signature), name.name()) {
            value
        } else {
            0
        }
    }
    /// An attribute that the signature types as `f32`.
    pub(crate) fn f32(&self, name: F32Attribute) -> f32 {
        if let Some(Attribute::F32(value)) = self.attribute(name.place(self.signature), name.name()) {
            value
        } else {
            0.0
        }
    }
    /// An attribute that the signature types as `i1`.
    pub(crate) fn bool(&self, name: BoolAttribute) -> bool {
        matches!(self.attribute(name.place(self.signature), name.name()), Some(Attribute::Bool(true)))
    }
}

/// Hashes target, dtypes and shapes.
impl Hash for CallArguments<'_> {
    fn hash<H: Hasher>(&self, state: &mut H) {
        let shapes = |tensors: &[Tensor]| tensors.iter().map(|t| (t.dtype, t.dims.to_vec())).collect::<Vec<_>>();
        (self.signature.target, shapes(self.operands), shapes(self.results)).hash(state);
    }
}

/// Shows dtypes and shapes of the given operands and results, and the size of the workspace.
impl fmt::Display for CallArguments<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let given = |names: &[&str], tensors: &[Tensor]| {
            let given = names.iter().zip(tensors).filter(|(name, t)| **name != "workspace" && !t.is_left_out());
            given.map(|(name, t)| format!("{name} {}{:?}", t.dtype, t.dims)).collect::<Vec<_>>().join(", ")
        };
        let (operands, results) = (self.signature.operands, self.signature.results);
        write!(f, "{} to {}", given(operands, self.operands), given(results, self.results))?;
        if results.contains(&"workspace") {
            let bytes = self.optional_result(CallResult::Workspace).map_or(0, |workspace| workspace.bytes());
            write!(f, ", workspace of {bytes} bytes")?;
        }
        Ok(())
    }
}

fn count(kind: &str, names: &[&str], required: usize, given: &[Tensor]) -> Result {
    ensure(given.len() <= names.len(), || {
        format!("{} {kind}s given, at most {} expected ({})", given.len(), names.len(), names.join(", "))
    })?;
    for (index, name) in names[..required].iter().enumerate() {
        if given.get(index).is_none_or(|t| t.dtype == DType::ABSENT) {
            return Err(missing(name));
        }
    }
    Ok(())
}
