//! How the kernels cut up the work: the table of their own header.

use super::KERNEL;
use crate::cuda::device::Device;
use crate::cuda::variants;
use crate::error::{Error, Result};
use crate::ops::attention::Attention;
use std::f32::consts::LOG2_E;
use std::sync::LazyLock;

/// What the kernels of one work shape, element size and head dimension are built for.
#[derive(Debug)]
pub(super) struct Tile {
    /// Value of the axis `shape`: `prefill`, `decode` or `wide`; `mixed` is for [`mixed`](super::mixed) alone.
    shape: &'static str,
    element_bytes: usize,
    /// The head dimension up to which it serves, as a number and as the value of the axis `head_dim`.
    pub(super) head_dim: usize,
    head_dim_value: &'static str,
    /// Packed query rows of a CTA.
    pub(super) rows: i64,
    /// Keys that a CTA takes up in one round.
    pub(super) keys_a_round: i64,
    pub(super) threads: u32,
    /// CTAs an SM for which the kernel's registers are allotted.
    pub(super) ctas: u32,
    /// Dynamic shared memory, in bytes.
    pub(super) shared_memory: u32,
}

static TILES: LazyLock<Vec<Tile>> =
    LazyLock::new(|| include_str!("../../../kernels/include/tile_shape.cuh").lines().filter_map(tile).collect());

/// A line of the table: `ROW(shape, bytes, D, row warps, key warps, 16-row tiles, keys, stages, CTAs, shared bytes)`.
fn tile(line: &'static str) -> Option<Tile> {
    let fields = line.trim_start().strip_prefix("ROW(")?.split_once(')')?.0;
    let mut fields = fields.split(',').map(str::trim);
    let (shape, element_bytes, head_dim_value) = (fields.next()?, fields.next()?.parse().ok()?, fields.next()?);
    let numbers: Vec<u32> = fields.map_while(|field| field.parse().ok()).collect();
    let &[row_warps, key_warps, row_tiles, keys, _stages, ctas, shared_bytes] = &numbers[..] else { return None };
    Some(Tile {
        shape,
        element_bytes,
        head_dim: head_dim_value.parse().ok()?,
        head_dim_value,
        rows: i64::from(16 * row_tiles * row_warps),
        keys_a_round: i64::from(keys * key_warps),
        threads: 32 * row_warps * key_warps,
        ctas,
        shared_memory: shared_bytes,
    })
}

impl Tile {
    /// The tile of `shape` whose head dimension is the next one that holds D and Dv.
    pub(super) fn of(problem: &Attention, shape: &str) -> Result<&'static Self> {
        let (dtype, head_dim) = (problem.kv_dtype, problem.head_dim.max(problem.value_dim));
        let serves = |t: &&Self| t.shape == shape && t.element_bytes == dtype.size() && t.head_dim >= head_dim;
        TILES.iter().filter(serves).min_by_key(|t| t.head_dim).ok_or_else(|| {
            Error::unimplemented(format!("no {shape} kernel is built for K of {dtype} and head dimension {head_dim}"))
        })
    }

    /// The tile of decode: the wide one where there is one, the device has room for it, and each sequence and KV head can
    /// have an SM of its own. With more, two CTAs an SM hide where the other's tiles begin and end.
    pub(super) fn decode(problem: &Attention, device: &Device) -> Result<&'static Self> {
        let tile = Self::of(problem, "decode")?;
        let is_few = problem.max_seqs.min(problem.num_rows) * problem.num_kv_heads <= device.sms as usize;
        let fits = |wide: &&Self| wide.head_dim == tile.head_dim && wide.shared_memory <= device.shared_memory;
        let wide = Self::of(problem, "wide").ok().filter(fits);
        Ok(wide.filter(|_| is_few && !problem.batch_invariant).unwrap_or(tile))
    }

    /// The kernel of this tile for the problem: its index in the table of variants.
    pub(super) fn variant(&self, problem: &Attention, device: &Device) -> Result<usize> {
        let score = if modifies_scores(problem) { "modified" } else { "plain" };
        let (kernel, dtype) = match (problem.kv_dtype.size() == 1, converts_fp8(device)) {
            (false, _) => (KERNEL, variants::dtype_value(problem.kv_dtype)),
            (true, true) => ("attention_fp8", "fp8"),
            (true, false) => ("attention_fp8_sm80", "fp8_shifted"),
        };
        variants::find(kernel, &[dtype, self.head_dim_value, self.shape, score])
    }

    /// Whether the kernel takes new tokens on their way into the cache: `kTakesNewTokens` of
    /// `kernels/include/new_tokens.cuh`.
    pub(super) fn takes_new_tokens(&self) -> bool {
        self.is_decode() && self.element_bytes > 1 && self.head_dim * self.element_bytes < 1024
    }

    pub(super) fn is_decode(&self) -> bool {
        self.shape != "prefill"
    }

    /// With this much shared memory no more than `ctas` CTAs share an SM of 228 KB. Decode is bound by memory, which these
    /// keep busy; more would only make the last wave of CTAs, in which SMs run empty, longer.
    pub(super) fn least_shared_memory(&self) -> u32 {
        228 * 1024 / (self.ctas + 1) - 1024 + 128
    }

    /// What the kernel's scores are times to be logits to base 2: `log2_unit()` of `kernels/include/score_form.cuh`.
    pub(super) fn log2_unit(problem: &Attention) -> f32 {
        if modifies_scores(problem) { 1.0 } else { problem.score.softmax_scale * LOG2_E }
    }

    /// Shared memory that decode with `batch_invariant` takes besides: `kFoldBytes` of the header.
    pub(super) fn fold_bytes(&self) -> u32 {
        (self.rows * (4 * self.head_dim as i64 + 16)) as u32
    }
}

/// Whether the device has instructions from fp8 to f16.
pub(super) fn converts_fp8(device: &Device) -> bool {
    device.capability >= 89
}

/// Whether something besides `softmax_scale` happens to scores.
pub(in crate::cuda) fn modifies_scores(problem: &Attention) -> bool {
    let (score, is_fp8) = (&problem.score, problem.kv_dtype.size() == 1);
    is_fp8 || score.softcap > 0.0 || score.q_scale.is_some() || score.k_scale.is_some() || score.alibi.is_some()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tensor::{DType, Tensor};
    use std::collections::BTreeSet;

    #[test]
    fn every_variant_has_its_tile_and_every_tile_its_variants() {
        let is_ours = |name: &str| name.starts_with(KERNEL) && !name.starts_with("attention_bwd");
        for kernel in variants::KERNELS.iter().filter(|k| is_ours(k.name)) {
            let axes: Vec<&str> = kernel.axes.iter().map(|axis| axis.name).collect();
            assert_eq!(axes, ["dtype", "head_dim", "shape", "score"]);
        }
        let mut used = BTreeSet::new();
        for variant in variants::VARIANTS.iter().filter(|v| is_ours(v.name)) {
            let fields: Vec<&str> = variant.name.rsplitn(4, '_').collect();
            let &[_score, shape, head_dim, dtype] = &fields[..] else { panic!("{}", variant.name) };
            let bytes = match dtype {
                "attention_f32" => 4,
                "attention_f16" | "attention_bf16" => 2,
                _ => 1,
            };
            let serves = |t: &&Tile| t.shape == shape && t.element_bytes == bytes && t.head_dim_value == head_dim;
            assert_eq!(TILES.iter().filter(serves).count(), 1, "{}", variant.name);
            used.insert((shape, bytes, head_dim));
        }
        for variant in variants::VARIANTS.iter().filter_map(|v| v.name.strip_prefix("hopper_mixed_")) {
            used.insert(("mixed", 2, variant.rsplit_once('_').expect("two axes").1));
        }
        assert_eq!(TILES.len(), used.len());
    }

    #[test]
    fn every_head_dimension_finds_a_kernel() {
        let plain = super::super::tests::problem(64, 1, 8, 64);
        for (q, kv_dtype) in [
            (DType::F32, DType::F32),
            (DType::F16, DType::F16),
            (DType::BF16, DType::BF16),
            (DType::F16, DType::F8E5M2),
            (DType::BF16, DType::F8E4M3FN),
            (DType::F8E4M3FN, DType::F8E4M3FN),
        ] {
            for dim in (8..=256).step_by(8) {
                let q = Tensor { dtype: q, ..plain.q };
                for (head_dim, value_dim) in [(dim, 8), (8, dim)] {
                    let problem = Attention { q, kv_dtype, head_dim, value_dim, ..plain };
                    for (shape, capability) in [("prefill", 80), ("prefill", 90), ("decode", 80), ("decode", 89)] {
                        let tile = Tile::of(&problem, shape).expect("there is a tile");
                        assert!(tile.head_dim >= dim, "{tile:?}");
                        let device = Device { capability, ..super::super::tests::device(true) };
                        let variant = tile.variant(&problem, &device).expect("there is a kernel");
                        let variant = &variants::VARIANTS[variant];
                        assert_eq!(variant.name.contains("fp8"), kv_dtype.size() == 1);
                        assert!(variant.target.parse::<u32>().expect("a number") <= capability, "{}", variant.name);
                    }
                }
            }
        }
    }

    #[test]
    fn wide_tiles_are_for_few_sequences_and_devices_with_room_for_them() {
        let problem = super::super::tests::problem;
        let shape = |problem: &Attention, shared_memory| {
            let device = Device { shared_memory, ..super::super::tests::device(true) };
            Tile::decode(problem, &device).expect("there is a tile").shape
        };
        let (large, few) = (227 * 1024, problem(66, 66, 8, 128));
        assert_eq!((shape(&few, large), shape(&problem(67, 67, 8, 128), large)), ("wide", "decode"));
        assert_eq!(shape(&few, 99 * 1024), "decode");
        assert_eq!(shape(&Attention { batch_invariant: true, ..few }, large), "decode");
        for dim in [64, 96, 256] {
            assert_eq!(shape(&problem(1, 1, 8, dim), large), "decode");
        }
    }

    #[test]
    fn every_tile_fits_the_shared_memory_of_its_gpus() {
        for tile in TILES.iter() {
            let (folded, least) =
                if tile.is_decode() { (tile.fold_bytes(), tile.least_shared_memory()) } else { (0, 0) };
            let asked = (tile.shared_memory + folded).max(least);
            let kilobytes = match tile.shape {
                "mixed" => 227,
                "wide" => 163,
                _ => 99,
            };
            assert!(asked <= kilobytes * 1024, "{tile:?}");
        }
    }
}
