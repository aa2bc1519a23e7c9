//! A bias of pairs of rows and keys: the operand `bias`.

use super::validate::{dense, kernel_sizes};
use super::{CallArguments, Operand};
use crate::error::{Error, Result, ensure};
use crate::tensor::DType;

/// A bias of each pair of a row and a key: `bias[b, h, i, j]` is added to the score of row i of sequence b, head h, and its
/// key j. What lies past its rows and keys is 0.
#[derive(Clone, Copy, Debug)]
pub struct Bias {
    /// `[B or 1, Hq or 1, rows, keys]`, dense
    pub data: *const u8,
    /// f32, or the dtype of q
    pub dtype: DType,
    /// B; 1 if the sequences share it
    pub seqs: usize,
    /// Hq; 1 if the heads share it
    pub heads: usize,
    /// Rows per sequence.
    pub rows: usize,
    /// Keys per row.
    pub keys: usize,
}

impl Bias {
    /// Whether sequences or heads of a call with these counts share it.
    #[cfg(feature = "cuda")]
    pub(crate) fn is_shared(&self, max_seqs: usize, num_q_heads: usize) -> bool {
        (self.seqs, self.heads) != (max_seqs, num_q_heads)
    }

    /// The element of row i of sequence b and head h, and its key 0; `None` if the bias has no such row.
    #[must_use]
    pub fn row(&self, b: usize, h: usize, i: usize) -> Option<*const u8> {
        let (b, h) = (if self.seqs == 1 { 0 } else { b }, if self.heads == 1 { 0 } else { h });
        let row = (b * self.heads + h) * self.rows + i;
        (i < self.rows).then(|| self.data.wrapping_add(row * self.keys * self.dtype.size()))
    }
}

/// Validates the optional operand `bias [B or 1, Hq or 1, Sq, Sk]`, which only calls over packed keys of q's dtype without
/// bounds of rows have.
pub(super) fn bias(
    args: &CallArguments,
    (q_dtype, kv_dtype): (DType, DType),
    is_paged: bool,
    has_key_ranges: bool,
    (q_heads, seqs): (i64, i64),
) -> Result<Option<Bias>> {
    let Some(bias) = args.optional_operand(Operand::Bias) else { return Ok(None) };
    let unsupported = if is_paged {
        Some("over pages")
    } else if q_dtype.size() == 1 || kv_dtype != q_dtype {
        Some("with 8-bit dtypes")
    } else {
        has_key_ranges.then_some("together with k_start or k_end")
    };
    if let Some(unsupported) = unsupported {
        return Err(Error::unimplemented(format!("bias is not supported {unsupported}")));
    }
    bias.expect_dtype("bias", or_f32(&[q_dtype, DType::F32]))?;
    let [b, h, rows, keys] = bias.dims[..] else {
        return Err(Error::invalid(bias_shape(bias.dims, q_heads, seqs)));
    };
    ensure((b == 1 || b == seqs) && (h == 1 || h == q_heads), || bias_shape(bias.dims, q_heads, seqs))?;
    dense("bias", &bias)?;
    kernel_sizes(&[("Sq", rows), ("Sk", keys)])?;
    let [seqs, heads, rows, keys] = [b, h, rows, keys].map(|size| size as usize);
    Ok(Some(Bias { data: bias.data, dtype: bias.dtype, seqs, heads, rows, keys }))
}

/// These two dtypes, the second of which is f32, without a repetition.
pub(super) fn or_f32(dtypes: &[DType; 2]) -> &[DType] {
    &dtypes[usize::from(dtypes[0] == DType::F32)..]
}

fn bias_shape(dims: &[i64], q_heads: i64, seqs: i64) -> String {
    format!("bias has shape {dims:?}, expected [1 or B={seqs}, 1 or Hq={q_heads}, Sq, Sk]")
}
