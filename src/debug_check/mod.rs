//! Debug check mode (`XLA_ATTENTION_CHECK=1`): the metadata of every call is validated, and its results are compared
//! with a second computation.
//!
//! A checked call synchronizes, copies its operands to the host and recomputes its results on the CPU, so it is slow.
//! `src/dispatch/checked.rs` runs the steps. This module has the parts: validation of metadata, attention by its
//! definition, host copies of tensors, and comparison.

pub(crate) mod accuracy;
pub(crate) mod compare;
pub(crate) mod definition;
pub(crate) mod gradients;
pub(crate) mod host;
pub(crate) mod metadata;
mod numbers;

use crate::environment;
use std::sync::OnceLock;

/// Whether debug check mode is enabled. The environment is read once, when the library is first used.
pub(crate) fn is_enabled() -> bool {
    static ON: OnceLock<bool> = OnceLock::new();
    *ON.get_or_init(|| environment::switch("XLA_ATTENTION_CHECK"))
}
