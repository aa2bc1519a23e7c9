//! `XLA_ATTENTION_CHECK=1`: every call is looked over, and its results are held against a second computation.
//!
//! For debugging only: a checked call waits for its end, copies what it was given to the host, and takes as long as the
//! CPU needs for it. `src/dispatch/checked.rs` is the order of the steps; this room has the parts: what is wrong with
//! metadata, attention by its definition, tensors on the host, and comparing.

pub(crate) mod accuracy;
pub(crate) mod compare;
pub(crate) mod definition;
pub(crate) mod gradients;
pub(crate) mod host;
pub(crate) mod metadata;
mod numbers;

use crate::environment;
use std::sync::OnceLock;

/// Whether calls are checked; read once, when the library is first used.
pub(crate) fn is_enabled() -> bool {
    static ON: OnceLock<bool> = OnceLock::new();
    *ON.get_or_init(|| environment::switch("XLA_ATTENTION_CHECK"))
}
