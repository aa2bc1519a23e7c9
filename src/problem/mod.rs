//! The operators' problems: for each operator a struct that holds the validated arguments of a call.
//!
//! An operator's module has a function `problem`, which validates dtypes, shapes, strides and attributes, at trace time
//! and at run time alike. This layer knows neither XLA nor CUDA and never reads an element of a tensor.
//! `docs/semantics.md` defines what the operators compute.

/// Declares one module per operator, each with a function `problem`.
macro_rules! modules {
    ($($op:ident $name:ident,)*) => {
        $(pub mod $name;)*
    };
}
for_each_operator!(modules);

pub mod attention;
pub mod workspace;

mod bias;
mod cache_copy;
mod call_arguments;
mod kv_layout;
mod kv_scale_cache;
mod operators;
mod signature;
mod tree_mask;
mod validate;

pub(crate) use call_arguments::CallArguments;
pub use kv_layout::KvView;
pub use kv_scale_cache::{KvScaleCache, SMALLEST_ROW, largest_code};
pub use operators::Op;
pub(crate) use operators::{
    BoolAttribute, CallResult, F32Attribute, I64Attribute, OPERATORS_JSON, Operand, arguments, for_each_operator,
    for_each_target,
};
pub use signature::{Attribute, AttributeKind, Signature};
pub use validate::{MAX_HEAD_DIM, MAX_LATENT_DIM, Scale};
