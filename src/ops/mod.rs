//! What to compute. Each operator's problem is validated by being made, at trace time and at run time alike.
//!
//! Nothing here knows XLA or CUDA, and nothing here reads the tensors' elements.

pub mod kv_cache_update;
pub mod paged_attention;
pub mod simple_add;

mod kv_layout;
mod signature;

pub use kv_layout::KvView;
pub(crate) use signature::Bound;
pub use signature::{Attribute, AttributeKind, Signature};
