//! A bias of pairs of rows and keys in rows that begin at multiples of 16 bytes, as TMA and some portable kernels load it: where the
//! call has it, or copied to such rows in the workspace.

use super::enqueue::LaunchConfig;
use super::kernel_launch::{Launch, Parameter};
use super::params::bias::{COPY_ROWS_PER_CTA, COPY_ROWS_THREADS, CopyRowsParams};
use super::tensor_map::{Axis, L2Promotion, TensorMap, supports_tma};
use super::variants;
use crate::error::{Error, Result};
use crate::problem::attention::Bias;
use crate::tensor::{DType, Tensor};
use std::ptr::null;

const COPY_KERNEL: &str = "copy_bias_rows";

/// Bytes of a row of a box that TMA copies: those of a swizzle atom.
const BOX_BYTES: usize = 128;

/// Bytes of which rows are multiples, and of an element of `copy_bias_rows`.
const CHUNK_BYTES: usize = 16;
const COPIED_BYTES: usize = 2;

impl Bias {
    /// Keys of a box.
    fn box_keys(&self) -> i64 {
        (BOX_BYTES / self.dtype.size()) as i64
    }

    /// The axes of the bias or of its gradient as `[1, 1, matrix, row, key]`, the innermost first, in boxes of `rows` rows.
    fn axes(&self, rows: i64) -> [Axis; 5] {
        let matrices = self.seqs.saturating_mul(self.heads) as i64;
        let [all_rows, keys] = [self.rows, self.keys].map(|len| len as i64);
        // The wrappers of TMA have five axes.
        let unused = Axis { len: 1, stride: self.box_keys(), box_len: 1 };
        [
            Axis { len: keys, stride: 1, box_len: self.box_keys() },
            Axis { len: all_rows, stride: keys, box_len: rows },
            Axis { len: matrices, stride: all_rows.saturating_mul(keys), box_len: 1 },
            unused,
            unused,
        ]
    }

    /// Whether TMA copies the bias, or its gradient at `data`, if it has this type: rows are multiples of 16 bytes, and coordinates
    /// have 31 bits.
    fn supports_tma(&self, dtype: DType, data: *const u8) -> bool {
        let axes = self.axes(1);
        let has_coordinates = axes.iter().all(|axis| axis.len <= i64::from(i32::MAX));
        self.dtype == dtype && has_coordinates && supports_tma(dtype, data, &axes)
    }

    /// The tensor map of the bias, or of its gradient at `data`, in boxes of `rows` rows.
    pub(super) fn tensor_map(&self, data: *const u8, rows: i64) -> Result<TensorMap> {
        TensorMap::new(self.dtype, data, &self.axes(rows), L2Promotion::Bytes256)
    }

    /// Elements of `copy_bias_rows` per row.
    fn copied_pitch(&self) -> usize {
        self.keys.saturating_mul(self.dtype.size()) / COPIED_BYTES
    }

    /// Rows of all matrices.
    pub(super) fn all_rows(&self) -> usize {
        self.seqs.saturating_mul(self.heads).saturating_mul(self.rows)
    }

    /// The bias at `data` in rows of whole chunks. The keys that this adds have zeros, as what lies past a bias has.
    fn padded(&self, data: *const u8) -> Self {
        Self { data, keys: self.keys.next_multiple_of(CHUNK_BYTES / self.dtype.size()), ..*self }
    }
}

/// A bias in rows of whole chunks, which TMA loads.
#[derive(Clone, Copy)]
pub(super) struct PaddedBias {
    /// The call's, or its padded copy.
    pub(super) bias: Bias,
    /// What is copied, in `copy_bias_rows`.
    original: Option<Bias>,
}

impl PaddedBias {
    /// Bytes of the copy of a call's bias; 0 if TMA loads it where it is.
    pub(super) fn copied_bytes(bias: &Bias, dtype: DType) -> usize {
        let copied = || bias.padded(null()).keys.saturating_mul(dtype.size()).saturating_mul(bias.all_rows());
        if bias.supports_tma(dtype, bias.data) { 0 } else { copied().min(isize::MAX as usize) }
    }

    /// The bias of a call whose q has this type, with memory at `copy` for [`copied_bytes`](Self::copied_bytes), aligned to 16
    /// bytes. `None` if TMA loads neither the bias nor a copy.
    pub(super) fn new(bias: &Bias, dtype: DType, copy: Option<*mut u8>) -> Option<Self> {
        if bias.supports_tma(dtype, bias.data) {
            return Some(Self { bias: *bias, original: None });
        }
        let padded = bias.padded(copy?);
        let is_counted = i32::try_from(padded.copied_pitch()).is_ok();
        let is_copied = is_counted && padded.supports_tma(dtype, padded.data) && is_element(dtype, bias.data);
        is_copied.then_some(Self { bias: padded, original: Some(*bias) })
    }

    /// Bytes of the bias, or of its copy.
    pub(super) fn bytes(&self) -> usize {
        self.bias.all_rows().saturating_mul(self.bias.keys).saturating_mul(self.bias.dtype.size())
    }

    /// Whether it is a copy.
    pub(super) fn is_copied(&self) -> bool {
        self.original.is_some()
    }

    /// Whether a kernel that stores the bias' gradient by TMA, or chunk by chunk, can compute `dbias`.
    pub(super) fn supports_gradient(&self, dbias: &Tensor) -> bool {
        let is_stored = match self.original {
            Some(_) => is_element(dbias.dtype, dbias.data),
            None => self.bias.supports_tma(dbias.dtype, dbias.data),
        };
        dbias.dtype == self.bias.dtype && is_stored
    }

    /// Where such a kernel stores it: at `dbias`, or in the place of a copied bias, of which it loads each box once, before.
    pub(super) fn gradient_place(&self, dbias: &Tensor) -> *mut u8 {
        if self.original.is_some() { self.bias.data.cast_mut() } else { dbias.data }
    }

    /// The launch that makes the copy, if there is one.
    pub(super) fn copy_launch<P: Parameter>(
        &self,
        parameter: impl FnOnce(CopyRowsParams) -> P,
    ) -> Result<Option<Launch<P>>> {
        self.original.map(|original| copy_rows(&original, &self.bias, parameter)).transpose()
    }

    /// The launch that copies the gradient from the place of a copied bias.
    pub(super) fn gradient_launch<P: Parameter>(
        &self,
        dbias: &Tensor,
        parameter: impl FnOnce(CopyRowsParams) -> P,
    ) -> Result<Option<Launch<P>>> {
        let gradient = self.original.map(|original| Bias { data: dbias.data, ..original });
        gradient.map(|gradient| copy_rows(&self.bias, &gradient, parameter)).transpose()
    }
}

fn is_element(dtype: DType, data: *const u8) -> bool {
    (data as usize).is_multiple_of(dtype.size())
}

/// The launch that copies the rows of `from` to those of `to`, which differ in keys alone: what `from` lacks becomes 0.
fn copy_rows<P: Parameter>(from: &Bias, to: &Bias, parameter: impl FnOnce(CopyRowsParams) -> P) -> Result<Launch<P>> {
    let [from_pitch, to_pitch] = [from, to].map(Bias::copied_pitch);
    let params = CopyRowsParams {
        from: from.data.cast(),
        to: to.data.cast_mut().cast(),
        rows: from.all_rows() as i64,
        from_pitch: from_pitch as i64,
        to_pitch: to_pitch as i64,
        columns: from_pitch.min(to_pitch) as i32,
        width: to_pitch as i32,
    };
    let ctas = from.all_rows().div_ceil(COPY_ROWS_PER_CTA as usize);
    if ctas > i32::MAX as usize {
        return Err(Error::unimplemented(format!("copying a bias takes {ctas} blocks; a grid has up to 2^31 - 1")));
    }
    let config = LaunchConfig { grid: [ctas as u32, 1, 1], threads: COPY_ROWS_THREADS as u32, shared_memory: 0 };
    Ok(Launch::new(COPY_KERNEL, variants::find(COPY_KERNEL, &[])?, config, parameter(params)))
}
