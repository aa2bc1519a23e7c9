//! The operand and the result of a buffer that a call updates.

use crate::tensor::Tensor;

/// The operand and the result of one buffer of a cache or of its scales. Unless they alias, the old cache is copied before rows are written.
#[derive(Clone, Copy, Debug)]
pub struct CacheCopy<'a> {
    /// The operand.
    pub from: Tensor<'a>,
    /// The result.
    pub to: Tensor<'a>,
}

impl CacheCopy<'_> {
    /// Whether the result does not alias the operand.
    #[must_use]
    pub fn is_needed(&self) -> bool {
        self.from.data != self.to.data && !self.from.is_empty()
    }
}
