//! What to compute. Each operator's problem is validated by being made, at trace time and at run time alike.
//!
//! Nothing here knows XLA or CUDA, and nothing here reads the tensors' elements.

pub mod attention;
pub mod flash_attn_varlen;
pub mod flash_attn_varlen_bwd;
pub mod kv_cache_update;
pub mod merge_attention_states;
pub mod paged_attention;
pub mod paged_attention_update;
pub mod rope_kv_cache_update;
pub mod simple_add;
pub mod workspace;

mod call_arguments;
mod checks;
mod kv_layout;
mod operators;
mod signature;

pub(crate) use call_arguments::Bound;
pub use checks::{MAX_HEAD_DIM, Scale};
pub use kv_layout::KvView;
pub use operators::Op;
pub(crate) use operators::{
    BoolAttribute, CallResult, F32Attribute, I64Attribute, OPERATORS_JSON, Operand, arguments, for_each_target,
};
pub use signature::{Attribute, AttributeKind, Signature};
