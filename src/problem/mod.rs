//! What to compute. Each operator's problem is validated by being made, at trace time and at run time alike.
//!
//! Nothing here knows XLA or CUDA, and nothing here reads the tensors' elements. `docs/semantics.md` is the definition of
//! all operators; a module says how its operands state one.

/// Every operator has a module of its name, with a function `problem` that makes the problem of a call.
macro_rules! modules {
    ($($op:ident $name:ident,)*) => {
        $(pub mod $name;)*
    };
}
for_each_operator!(modules);

pub mod attention;
pub mod workspace;

mod call_arguments;
mod kv_layout;
mod operators;
mod signature;
mod validate;

pub(crate) use call_arguments::CallArguments;
pub use kv_layout::KvView;
pub use operators::Op;
pub(crate) use operators::{
    BoolAttribute, CallResult, F32Attribute, I64Attribute, OPERATORS_JSON, Operand, arguments, for_each_operator,
    for_each_target,
};
pub use signature::{Attribute, AttributeKind, Signature};
pub use validate::{MAX_HEAD_DIM, Scale};
