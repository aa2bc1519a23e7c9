//! How Hopper's prefill kernels cut up the work: the tables of their own headers.

use super::super::tiles::modifies_scores;
use super::{FP8_KERNEL, KERNEL};
use crate::ops::attention::Attention;
use crate::tensor::DType;
use std::sync::LazyLock;

/// What the kernels of one pair of head dimensions and score form are built for.
#[derive(Debug)]
pub(in crate::cuda::attention) struct Tile {
    pub(super) kernel: &'static str,
    /// Of q, K and V.
    pub(super) element_bytes: usize,
    pub(super) head_dim: usize,
    pub(super) value_dim: usize,
    /// As the value of the axis `head_dim`: D, or `DxDv` where they differ.
    pub(in crate::cuda::attention) head_dim_value: &'static str,
    /// Of fewer rows than another one, for short sequences.
    pub(super) is_short: bool,
    /// Value of the axis `score`.
    pub(super) score: &'static str,
    /// Packed query rows of a tile.
    pub(in crate::cuda::attention) rows: i64,
    /// Keys of a block.
    pub(super) keys: i64,
    pub(super) threads: u32,
    pub(in crate::cuda::attention) shared_memory: u32,
}

pub(super) static TILES: LazyLock<Vec<Tile>> = LazyLock::new(|| {
    let table = include_str!("../../../../kernels/include/hopper/shape.cuh").lines();
    let fp8_table = include_str!("../../../../kernels/include/hopper/fp8_shape.cuh").lines();
    let tiles = table.filter_map(|line| tile(KERNEL, 2, line));
    tiles.chain(fp8_table.filter_map(|line| tile(FP8_KERNEL, 1, line))).collect()
});

/// What ends the names of tiles for short sequences.
const SHORT: &str = "_short";

/// A line of the table: `ROW(dimensions, score, warpgroups, keys, stages, registers, loader's registers, shared bytes)`.
fn tile(kernel: &'static str, element_bytes: usize, line: &'static str) -> Option<Tile> {
    let mut fields = line.trim_start().strip_prefix("ROW(")?.split_once(')')?.0.split(',').map(str::trim);
    let (head_dim_value, score) = (fields.next()?, fields.next()?);
    let dims = head_dim_value.trim_end_matches(SHORT);
    let (head_dim, value_dim) = dims.split_once('x').unwrap_or((dims, dims));
    let numbers: Vec<u32> = fields.map_while(|field| field.parse().ok()).collect();
    let &[warpgroups, keys, _stages, _registers, _loader_registers, shared_memory] = &numbers[..] else { return None };
    Some(Tile {
        kernel,
        element_bytes,
        head_dim: head_dim.parse().ok()?,
        value_dim: value_dim.parse().ok()?,
        head_dim_value,
        is_short: head_dim_value.ends_with(SHORT),
        score,
        rows: 64 * i64::from(warpgroups),
        keys: i64::from(keys),
        threads: 128 * (warpgroups + 1),
        shared_memory,
    })
}

impl Tile {
    /// Elements of `bytes` bytes in a row of a panel in shared memory: the widest panels that both dimensions are
    /// multiples of.
    pub(super) fn panel(&self, bytes: usize) -> i64 {
        let is_wide = ((self.head_dim | self.value_dim) * bytes).is_multiple_of(128);
        (if is_wide { 128 } else { 64 }) / bytes as i64
    }

    pub(super) fn key_panel(&self) -> i64 {
        self.panel(self.element_bytes)
    }

    /// Whether the tensor cores take q, K and V of the call as they are, and the score form is built.
    pub(super) fn serves(&self, problem: &Attention) -> bool {
        let (dtype, out) = (problem.q.dtype, problem.out.dtype);
        let bytes = if [DType::F16, DType::BF16].contains(&dtype) && out == dtype {
            2
        } else if dtype == DType::F8E4M3FN && [DType::F16, DType::BF16].contains(&out) {
            1
        } else {
            return false;
        };
        let score = &problem.score;
        let form = match bytes {
            1 if score.softcap > 0.0 || score.alibi.is_some() => "modified",
            1 => "scaled",
            _ if modifies_scores(problem) => "modified",
            _ => "plain",
        };
        problem.kv_dtype == dtype
            && self.element_bytes == bytes
            && (self.head_dim, self.value_dim) == (problem.head_dim, problem.value_dim)
            && self.score == form
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cuda::variants;

    #[test]
    fn every_variant_has_its_tile() {
        for variant in variants::VARIANTS.iter().filter(|variant| variant.name.starts_with(KERNEL)) {
            let serves = |tile: &&Tile| {
                let dtype = if tile.element_bytes == 1 { "fp8" } else { "16" };
                let name = |storage| format!("{dtype}_{}_{storage}_{}", tile.head_dim_value, tile.score);
                ["contiguous", "paged"].iter().any(|storage| variant.name.ends_with(&name(storage)))
            };
            assert_eq!(TILES.iter().filter(serves).count(), 1, "{}", variant.name);
        }
        for tile in TILES.iter() {
            assert!(tile.shared_memory <= 227 * 1024, "{tile:?}");
        }
    }
}
