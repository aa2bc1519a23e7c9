//! Rotate the queries and keys of new tokens by their positions and write K and V into a paged cache, in place.
//!
//! Row `p` of `cos_sin` holds the cosines of position p's `rot / 2` angles, then their sines. Pair i of a head, (a, b),
//! becomes `(a cos_i - b sin_i, b cos_i + a sin_i)`; it is elements i and `i + rot / 2` (GPT-NeoX, Llama), or with
//! `interleaved` elements `2i` and `2i + 1` (GPT-J). Elements from `rot` on pass through. The arithmetic is f32: one
//! product, then one fused multiply-add with the other; turned numbers are rounded once, to the query's dtype or, after
//! the division by the scale, to the cache's.
//!
//! A position outside `[0, max_pos)` is clamped; where `max_pos` is 0, rows pass unrotated. Queries of every row are
//! written, also where the row's slot lies outside the cache and its key and value go nowhere. All else about the cache
//! is as in [`super::kv_cache_update`].

use super::kv_cache_update::KvCacheUpdate;
use super::validate::{contiguous_rows, dense, indices, kernel_sizes};
use super::{BoolAttribute, CallArguments, CallResult, Operand};
use crate::error::{Result, ensure};
use crate::tensor::{DType, Dim, Tensor};

/// A validated call.
#[derive(Clone, Copy, Debug)]
pub struct RopeKvCacheUpdate<'a> {
    /// The keys before their rotation, the values, and where both go.
    pub update: KvCacheUpdate<'a>,
    /// `[T, Hq, D]`, of the keys' dtype; the last dimension is contiguous
    pub query: Tensor<'a>,
    /// `[T, Hq, D]`, dense
    pub query_out: Tensor<'a>,
    /// How queries and keys are rotated.
    pub rotation: Rotation,
}

/// Angles by position, and which elements they turn.
#[derive(Clone, Copy, Debug)]
pub struct Rotation {
    /// `i32[T]`, dense; clamped to `[0, max_pos)`
    pub positions: *const i32,
    /// `f32[max_pos, rot]`: rows are `row_stride` apart, first the cosines, then the sines
    pub cos_sin: *const f32,
    /// Elements from a row to the next.
    pub row_stride: i64,
    /// Rows of the table; without any, nothing is rotated.
    pub max_pos: usize,
    /// rot: the first elements of a head, which are rotated; even, at most D
    pub rotated: usize,
    /// Pairs are neighbours, not half of `rotated` apart.
    pub interleaved: bool,
}

// SAFETY: addresses and numbers; see `Tensor`.
unsafe impl Send for Rotation {}
// SAFETY: as above.
unsafe impl Sync for Rotation {}

/// The problem of a call.
pub(crate) fn problem<'a>(args: &CallArguments<'a>) -> Result<RopeKvCacheUpdate<'a>> {
    let update = super::kv_cache_update::problem(args)?;
    let key = &update.key.rows;
    let (query, query_out) = (args.operand(Operand::Query), args.result(CallResult::QueryOut));
    query.expect_dtype("query", &[key.dtype])?;
    let (rows, width) = (Dim::Is("T", key.dims[0]), Dim::Is("D", key.dims[2]));
    query.expect_shape("query", &[rows, Dim::Any("Hq"), width])?;
    ensure(query.dims[1] > 0, || format!("query has shape {:?}, expected at least one head", query.dims))?;
    contiguous_rows("query", &query)?;
    query_out.expect_dtype("query_out", &[key.dtype])?;
    query_out.expect_shape("query_out", &[rows, Dim::Is("Hq", query.dims[1]), width])?;
    dense("query_out", &query_out)?;
    Ok(RopeKvCacheUpdate { update, query, query_out, rotation: rotation(args, rows, key.dims[2])? })
}

fn rotation(args: &CallArguments, rows: Dim, head_dim: i64) -> Result<Rotation> {
    let positions = indices("positions", &args.operand(Operand::Positions), &[rows])?;
    let table = args.operand(Operand::CosSin);
    table.expect_dtype("cos_sin", &[DType::F32])?;
    table.expect_shape("cos_sin", &[Dim::Any("max_pos"), Dim::Any("rot")])?;
    let rotated = table.dims[1];
    ensure(rotated % 2 == 0 && rotated <= head_dim, || {
        format!("cos_sin has shape {:?}, expected [max_pos, rot] with rot even and at most D={head_dim}", table.dims)
    })?;
    contiguous_rows("cos_sin", &table)?;
    kernel_sizes(&[("max_pos", table.dims[0])])?;
    Ok(Rotation {
        positions,
        cos_sin: table.data.cast_const().cast(),
        row_stride: table.stride(0),
        max_pos: table.dims[0] as usize,
        rotated: rotated as usize,
        interleaved: args.bool(BoolAttribute::Interleaved),
    })
}
