//! Rotates the queries and keys of new tokens by their positions (`RoPE`) and writes K and V into a paged cache in
//! place (`docs/semantics.md#rope_kv_cache_update`).

use super::kv_cache_update::{KvCacheUpdate, layout};
use super::validate::{contiguous_rows, dense, indices, kernel_sizes};
use super::{BoolAttribute, CallArguments, CallResult, Operand};
use crate::error::{Result, ensure};
use crate::tensor::{DType, Dim, Tensor};

/// A validated call.
#[derive(Clone, Copy, Debug)]
pub struct RopeKvCacheUpdate<'a> {
    /// The cache update, with keys that are not rotated yet.
    pub update: KvCacheUpdate<'a>,
    /// `[T, Hq, D]`, of the keys' dtype; the last dimension is contiguous
    pub query: Tensor<'a>,
    /// `[T, Hq, D]`, dense
    pub query_out: Tensor<'a>,
    /// The rotation of queries and keys.
    pub rotation: Rotation,
}

/// The angles of each position, and the elements that they rotate.
#[derive(Clone, Copy, Debug)]
pub struct Rotation {
    /// `i32[T]`, dense; clamped to `[0, max_pos)`
    pub positions: *const i32,
    /// `f32[max_pos, rot]` with rows `row_stride` apart: `rot / 2` cosines, then `rot / 2` sines
    pub cos_sin: *const f32,
    /// Stride of the rows in elements.
    pub row_stride: i64,
    /// Number of rows of `cos_sin`. If it is 0, nothing is rotated.
    pub max_pos: usize,
    /// rot: number of rotated elements per head, counted from the first; even, at most D
    pub rotated: usize,
    /// Whether a pair is elements `2i` and `2i + 1` (GPT-J). Otherwise it is `i` and `i + rot / 2` (GPT-NeoX, Llama).
    pub interleaved: bool,
}

// SAFETY: the struct consists of addresses and numbers; each access through it states why it is allowed (see `Tensor`).
unsafe impl Send for Rotation {}
// SAFETY: as for `Send`.
unsafe impl Sync for Rotation {}

/// Validates a call and returns its problem.
pub(crate) fn problem<'a>(args: &CallArguments<'a>) -> Result<RopeKvCacheUpdate<'a>> {
    let update = KvCacheUpdate::in_one_buffer(args, layout(args)?)?;
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
