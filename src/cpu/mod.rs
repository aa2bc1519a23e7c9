//! The operators on the CPU, run on the caller's thread pool.

#![allow(
    clippy::inline_always,
    reason = "vector code has to be inlined into the function that enables its instructions"
)]

use crate::problem::for_each_operator;

/// Each operator has a module with its name and a function `run`.
macro_rules! modules {
    ($($op:ident $name:ident,)*) => {
        $(pub(crate) mod $name;)*
    };
}
for_each_operator!(modules);

mod aligned;
pub(crate) mod attention;
mod bf16_rounding;
mod cache_rows;
mod element;
mod element_fp8;
mod element_rows;
mod elementary;
mod fp8_decoding;
mod fp8_encoding;
mod micro_kernel;
mod row_quantization;
mod score_bias;
mod simd;
