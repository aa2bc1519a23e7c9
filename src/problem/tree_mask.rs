//! Trees of query rows: the operand `tree_mask`.

use super::validate::{dense, kernel_sizes};
use super::{CallArguments, Operand};
use crate::error::Result;
use crate::tensor::{DType, Dim};

/// Which of its sequence's newest `len_q` keys each query row attends to, in place of the causal mask, as metadata on the
/// device: query i attends to key `len_k - len_q + j` only if bit `j % 32` of word `j / 32` of its words is set. Keys before
/// these are hidden by the other masks alone. A sequence of more than `max_queries` queries has no tree.
#[derive(Clone, Copy, Debug)]
pub struct TreeMask {
    /// `[B, max_queries, query_words]`, dense
    pub words: *const u32,
    /// `q_max`
    pub max_queries: usize,
    /// `ceil(q_max / 32)`
    pub query_words: usize,
}

/// Bits of a word.
const WORD_BITS: i64 = 32;

impl TreeMask {
    /// The words of query 0 of sequence `index`, which has `len_q` queries; `None` if it has no tree.
    #[must_use]
    pub fn of_sequence(&self, index: usize, len_q: usize) -> Option<*const u32> {
        (len_q <= self.max_queries).then(|| self.words.wrapping_add(index * self.max_queries * self.query_words))
    }

    /// Validates the optional operand `tree_mask`, i32 or u32 `[B, q_max, ceil(q_max / 32)]`; `slots` is the target's name of B and
    /// its value.
    pub(super) fn of(args: &CallArguments, (slots, seqs): (&'static str, i64)) -> Result<Option<Self>> {
        let Some(mask) = args.optional_operand(Operand::TreeMask) else { return Ok(None) };
        let name = Operand::TreeMask.name();
        mask.expect_dtype(name, &[DType::I32, DType::U32])?;
        let shape = [Dim::Is(slots, seqs), Dim::Any("q_max")];
        mask.expect_shape(name, &[shape[0], shape[1], Dim::Any("ceil(q_max/32)")])?;
        kernel_sizes(&[("q_max", mask.dims[1])])?;
        let query_words = (mask.dims[1] + WORD_BITS - 1) / WORD_BITS;
        mask.expect_shape(name, &[shape[0], shape[1], Dim::Is("ceil(q_max/32)", query_words)])?;
        dense(name, &mask)?;
        let max_queries = mask.dims[1] as usize;
        Ok(Some(Self { words: mask.data.cast_const().cast(), max_queries, query_words: query_words as usize }))
    }
}
