//! Parameters of multi-head latent attention on sm_90a.

use super::attention::AttentionParams;
use super::tensor_map::TensorMap;

/// The parameter of `hopper_mla`.
#[derive(Clone, Copy)]
#[repr(C)]
pub struct HopperMlaParams {
    pub attention: AttentionParams,
    /// The latent rows as `[1, 1, page, token, column]`, in boxes of `box_rows` rows and the columns of an atom's row. TMA fills
    /// the columns past D with zeros.
    pub cache: TensorMap,
    /// A power of two that divides the page and the rows of a block that a CTA loads. 0: all rows are copied by `cp.async`.
    pub box_rows: i32,
}
