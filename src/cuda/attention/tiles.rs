//! The tiles of the portable kernels: which one serves a call, and what follows from it.

use super::longest_or_mean_queries;
use crate::cuda::device::Device;
use crate::cuda::params::attention::TOKENS_PER_LOAD;
use crate::cuda::tiles::{ATTENTION, ROW_MASKS};
pub(super) use crate::cuda::tiles::{AttentionTile, RowMasksTile};
use crate::cuda::variants;
use crate::error::{Error, Result};
use crate::problem::attention::{Attention, KeyStorage};
use crate::tensor::DType;
use std::f32::consts::LOG2_E;

/// Packed rows of a tile that a warp computes alone (`kernels/include/warp_tiles.cuh`).
const WARP_TILE_ROWS: usize = 8;

impl AttentionTile {
    /// The tile of `shape` with the smallest head dimension that is at least D and Dv.
    pub(super) fn of(problem: &Attention, shape: &str) -> Result<&'static Self> {
        Self::smallest(problem, shape).ok_or_else(|| {
            let (dtype, head_dim) = (problem.kv_dtype, problem.head_dim.max(problem.value_dim));
            Error::unimplemented(format!("no {shape} kernel is built for K of {dtype} and head dimension {head_dim}"))
        })
    }

    /// The same, or `None`.
    pub(super) fn smallest(problem: &Attention, shape: &str) -> Option<&'static Self> {
        Self::serving(problem, shape).min_by_key(|t| t.head_dim)
    }

    /// The tiles of `shape` for the type of K and V whose head dimension is at least D and Dv.
    pub(super) fn serving(problem: &Attention, shape: &str) -> impl Iterator<Item = &'static Self> {
        let (bytes, head_dim) = (problem.kv_dtype.size(), problem.head_dim.max(problem.value_dim));
        // Not every tile is built with scales, or with a bias in decode. Past 256 columns scales leave no room for as many keys in
        // prefill.
        let has_shape = move |t: &Self| match (problem.scale_cache.is_some(), problem.score.bias.is_some()) {
            (true, _) => {
                (t.shape == shape || t.shape.strip_suffix("_scales") == Some(shape))
                    && variants::has("attention_token_scales", &["i8", t.head_dim_value, t.shape])
            }
            (false, true) if shape != "prefill" => {
                let dtype = variants::dtype_value(problem.kv_dtype);
                t.shape == shape
                    && shape == "decode"
                    && variants::has("attention_bias_decode", &[dtype, t.head_dim_value])
            }
            _ => t.shape == shape && is_built_for_logits(problem, t),
        };
        let serves = move |t: &&Self| t.bytes as usize == bytes && t.head_dim as usize >= head_dim && has_shape(t);
        ATTENTION.iter().filter(serves)
    }

    /// The tile of decode:
    ///
    /// - `decode_8rows` where it is built, if sequences have up to 8 packed rows each, by the caller's number or on average.
    ///   Longer ones have several tiles. A row's bits are those of `decode`, except with ALiBi: whether a block of keys is on
    ///   one side of all queries of a tile depends on the tile's rows.
    /// - `decode_8warps` where it is built, fits the device, and there are no more sequences times KV heads than SMs.
    /// - `decode` elsewhere, of which two CTAs per SM hide the start and the end of each other's tiles.
    pub(super) fn decode(problem: &Attention, device: &Device) -> Result<&'static Self> {
        let tile = Self::of(problem, "decode")?;
        let variant = |shape| Self::smallest(problem, shape).filter(|other| other.head_dim == tile.head_dim);
        let rows = longest_or_mean_queries(problem) * (problem.num_q_heads / problem.num_kv_heads) as i64;
        let has_same_bits = !problem.batch_invariant || problem.score.alibi.is_none();
        if let Some(with_8_rows) = variant("decode_8rows").filter(|tile| has_same_bits && rows <= tile.rows()) {
            return Ok(with_8_rows);
        }
        let is_few = decode_tiles(problem) <= device.sms as usize;
        let with_8_warps = variant("decode_8warps").filter(|wide| wide.shared_bytes <= device.shared_memory);
        Ok(with_8_warps.filter(|_| is_few && !problem.batch_invariant).unwrap_or(tile))
    }

    /// The name of the tiles' kernel for the problem; with a bias that of decode.
    pub(super) fn kernel(problem: &Attention, device: &Device) -> &'static str {
        if problem.score.bias.is_some() {
            return "attention_bias_decode";
        }
        match (problem.kv_dtype.size() == 1, problem.scale_cache.is_some(), converts_fp8(device)) {
            (false, ..) => "attention",
            (true, false, true) => "attention_fp8",
            (true, false, false) => "attention_fp8_sm80",
            (true, true, true) => "attention_token_scales",
            (true, true, false) => "attention_token_scales_sm80",
        }
    }

    /// The variant of the kernel: its index in the table of variants.
    pub(super) fn variant(&self, problem: &Attention, device: &Device) -> Result<usize> {
        let values = [kv_dtype_value(problem, device), self.head_dim_value, self.shape, logits_value(problem)];
        // With token scales there is no axis of logits, and with a bias none of shapes.
        let axes = if problem.score.bias.is_some() {
            2
        } else if problem.scale_cache.is_some() {
            3
        } else {
            4
        };
        variants::find(Self::kernel(problem, device), &values[..axes])
    }

    /// Packed query rows of a CTA.
    pub(super) fn rows(&self) -> i64 {
        i64::from(self.warp_rows * self.row_warps)
    }

    /// Keys per KV chunk: one step of a decode CTA.
    pub(super) fn kv_chunk_keys(&self) -> i64 {
        i64::from(self.keys * self.key_warps)
    }

    pub(super) fn threads(&self) -> u32 {
        32 * self.row_warps * self.key_warps * self.column_warps
    }

    /// Whether a decode launch of the call fits the device's shared memory. With `batch_invariant`, the longest rows of f32, or
    /// with scales, take more than 99 KB.
    pub(super) fn fits(&self, problem: &Attention, device: &Device) -> bool {
        self.decode_bytes(problem) <= device.shared_memory
    }

    /// Shared memory of a launch without `batch_invariant`: that of the tile and, where rows of K and V have scales, theirs
    /// for each stage of each ring (`kernels/include/token_scales.cuh`).
    pub(super) fn bytes_for(&self, problem: &Attention) -> u32 {
        let rings = if self.shape.starts_with("prefill") { 1 } else { self.threads() / 32 };
        let scale_bytes = if problem.scale_cache.is_some() { 2 * size_of::<f32>() as u32 * self.keys } else { 0 };
        self.shared_bytes + rings * self.stages * scale_bytes
    }

    /// Shared memory that decode uses.
    fn decode_bytes(&self, problem: &Attention) -> u32 {
        self.bytes_for(problem) + if problem.batch_invariant { self.fixed_splits_bytes() } else { 0 }
    }

    /// CTAs per SM of a decode launch: `ctas_per_sm`, but of three only two if these have as few waves of whole tiles, as up to two tiles per SM
    /// and from three to four. Two saturate DRAM too, and the ranges are longer. Many tiles are short, so a third CTA hides their starts and ends;
    /// and where loads straddle pages, it hides the arithmetic of addresses.
    pub(super) fn decode_ctas_per_sm(&self, problem: &Attention, device: &Device) -> u32 {
        let waves = |ctas_per_sm: usize| decode_tiles(problem).div_ceil(ctas_per_sm * device.sms as usize);
        if self.ctas_per_sm == 3 && fits_pages(problem) && waves(2) <= waves(3) { 2 } else { self.ctas_per_sm }
    }

    /// `PartialResults::max_warp_tile_chunks` of a decode launch, if rows are aligned to 16 bytes. The more tiles there are, the more
    /// keys it allows, because the CTAs that would divide the keys of a tile are then busy: over 128 keys, 32/8 heads of 128, 64 sequences
    /// take 13.9 us instead of 16.5, with half as many tiles 12.8 instead of 10.7; over e4m3fn 16.9 instead of 15.1, and 256 sequences 34
    /// instead of 45 (H200). More than 256 keys are for sequences of about the same length, or for many (`WorkPartitioner::are_warp_tiles`
    /// of `kernels/include/work_partition.cuh`): 400 of 29 to 468 keys, 32/32 heads of 64, take 161 us instead of 227.
    pub(super) fn max_warp_tile_chunks(&self, problem: &Attention, device: &Device) -> i32 {
        let Attention { score, .. } = problem;
        let transforms = score.softcap > 0.0 || score.alibi.is_some() || (self.bytes > 1 && transforms_logits(problem));
        let is_plain = !problem.batch_invariant && !transforms && score.bias.is_none() && problem.scale_cache.is_none();
        let fills_columns = [problem.head_dim, problem.value_dim] == [self.head_dim as usize; 2];
        let has_few_rows = problem.num_q_heads <= WARP_TILE_ROWS * problem.num_kv_heads;
        if !(self.has_warp_tiles && is_plain && fills_columns && has_few_rows && fits_pages(problem)) {
            return 0;
        }
        // Quarters of a tile per SM.
        let keys = match (self.bytes, 4 * decode_tiles(problem) / device.sms as usize) {
            (_, 0..5) => 0,
            (1, 5..24) | (2, 5..12) => 64,
            (2, _) => 512,
            _ => 256,
        };
        keys / self.kv_chunk_keys() as i32
    }

    /// Dynamic shared memory of a decode launch: enough that at most `decode_ctas_per_sm` CTAs fit on an SM. Those saturate
    /// DRAM; with more, the CTAs would be shorter and their last wave, in which SMs run idle, a larger part of the time.
    pub(super) fn decode_shared_memory(&self, problem: &Attention, device: &Device) -> u32 {
        let ctas = self.decode_ctas_per_sm(problem, device);
        let min_bytes = device.shared_memory_per_sm / (ctas + 1) - device.reserved_per_block + 128;
        self.decode_bytes(problem).max(min_bytes)
    }

    /// Factor from the kernel's scores to logits in base 2: `log2_unit()` of `kernels/include/logits_transform.cuh`.
    pub(super) fn log2_unit(problem: &Attention) -> f32 {
        let transforms = transforms_logits(problem) || problem.score.bias.is_some();
        if transforms { 1.0 } else { problem.score.softmax_scale * LOG2_E }
    }

    /// Additional shared memory of decode with `batch_invariant`: `kFixedSplitsBytes` of `kernels/include/tile_shape.cuh`.
    fn fixed_splits_bytes(&self) -> u32 {
        let warp_row_bytes = self.head_dim / self.column_warps * self.bytes.max(2);
        let rows = self.rows() as u32;
        let merged_rows = if warp_row_bytes <= 256 { rows - rows / 2 } else { rows };
        merged_rows * 4 * self.head_dim + (2 + self.key_warps) * rows * 8 + 32
    }
}

impl RowMasksTile {
    /// Threads of `attention_row_masks` (`kernels/include/row_mask_shape.cuh`).
    pub(super) const THREADS: u32 = 128;

    /// The tile for the type of K and V with the smallest head dimension that is at least D and Dv.
    pub(super) fn of(problem: &Attention) -> Option<&'static Self> {
        let (bytes, head_dim) = (problem.kv_dtype.size(), problem.head_dim.max(problem.value_dim));
        let serves = |tile: &&Self| tile.bytes as usize == bytes && tile.head_dim as usize >= head_dim;
        ROW_MASKS.iter().filter(serves).min_by_key(|tile| tile.head_dim)
    }

    /// Packed query rows of a CTA: 16 of each warp, or of the warps that have the same ones.
    pub(super) fn rows(&self) -> i64 {
        i64::from(Self::THREADS / 32 / self.column_warps * 16)
    }
}

/// Whether the tile's variant with the call's logits is built. Decode of 16 bits with a logits transform takes the next larger head
/// dimension at 32, 96 and 192: it reads the same bytes, and the library has room for other kernels.
fn is_built_for_logits(problem: &Attention, tile: &AttentionTile) -> bool {
    if tile.bytes != 2 || !transforms_logits(problem) {
        return true;
    }
    let dtype = variants::dtype_value(problem.kv_dtype);
    variants::has("attention", &[dtype, tile.head_dim_value, tile.shape, logits_value(problem)])
}

/// Tiles of decode, if each sequence has one.
fn decode_tiles(problem: &Attention) -> usize {
    problem.max_seqs.min(problem.num_rows) * problem.num_kv_heads
}

/// Whether the tokens that decode looks up together lie in one page.
fn fits_pages(problem: &Attention) -> bool {
    match problem.keys.storage {
        KeyStorage::Contiguous { .. } => true,
        KeyStorage::Paged(table) => table.page_size.is_multiple_of(TOKENS_PER_LOAD as usize),
    }
}

/// The value of K's and V's type on the axis `dtype` of the portable kernels and of decode by clusters.
pub(super) fn kv_dtype_value(problem: &Attention, device: &Device) -> &'static str {
    match problem.kv_dtype {
        DType::F8E4M3FN | DType::F8E5M2 if converts_fp8(device) => "fp8",
        DType::F8E4M3FN | DType::F8E5M2 => "fp8_shifted",
        dtype => variants::dtype_value(dtype),
    }
}

/// The call's value on their axis `logits`.
pub(super) fn logits_value(problem: &Attention) -> &'static str {
    if transforms_logits(problem) { "softcap_alibi" } else { "none" }
}

/// Whether the device has instructions that convert fp8 to f16.
pub(super) fn converts_fp8(device: &Device) -> bool {
    device.capability >= 89
}

/// Whether the call needs a logits transform: anything between q . k and the softmax besides `softmax_scale`. The kernels
/// for 8-bit K and V always have one.
pub(in crate::cuda) fn transforms_logits(problem: &Attention) -> bool {
    let (score, is_fp8) = (&problem.score, problem.kv_dtype.size() == 1);
    is_fp8 || score.softcap > 0.0 || score.q_scale.is_some() || score.k_scale.is_some() || score.alibi.is_some()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::problem::attention::{Alibi, Keys, PageTable, Queries, Score};
    use crate::problem::{KvScaleCache, KvView};
    use crate::tensor::Tensor;

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
            for dim in (8..=512).step_by(8) {
                let q = Tensor { dtype: q, ..plain.q };
                for (head_dim, value_dim) in [(dim, 8), (8, dim)] {
                    let problem = Attention { q, kv_dtype, head_dim, value_dim, ..plain };
                    for (shape, capability) in [("prefill", 80), ("prefill", 90), ("decode", 80), ("decode", 89)] {
                        let tile = AttentionTile::of(&problem, shape).expect("there is a tile");
                        assert!(tile.head_dim as usize >= dim, "{tile:?}");
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
    fn every_head_dimension_finds_a_kernel_for_token_scales() {
        let view = KvView { data: std::ptr::null_mut(), page_stride: 0, token_stride: 0, head_stride: 0 };
        let plain = super::super::tests::problem(64, 1, 8, 64);
        let q = Tensor { dtype: DType::F16, ..plain.q };
        let scale_cache = Some(KvScaleCache { k: view, v: view });
        for kv_dtype in [DType::I8, DType::F8E4M3FN] {
            for dim in (8..=512).step_by(8) {
                let problem = Attention { q, kv_dtype, scale_cache, head_dim: dim, value_dim: dim, ..plain };
                for (shape, capability) in
                    [("prefill", 80), ("prefill", 90), ("decode", 80), ("decode", 89), ("decode_8rows", 80)]
                {
                    if shape == "decode_8rows" && dim > 256 {
                        continue;
                    }
                    let tile = AttentionTile::of(&problem, shape).expect("there is a tile");
                    assert!(tile.head_dim as usize == dim.next_power_of_two().max(64), "{tile:?}");
                    let device = Device { capability, ..super::super::tests::device(true) };
                    let variant = tile.variant(&problem, &device).expect("there is a kernel");
                    let variant = &variants::VARIANTS[variant];
                    assert!(variant.name.starts_with(AttentionTile::kernel(&problem, &device)), "{}", variant.name);
                    assert!(variant.target.parse::<u32>().expect("a number") <= capability, "{}", variant.name);
                    // 8 bytes per key, stage and ring: one in prefill, four in decode.
                    let rings = if shape == "prefill" { 1 } else { 4 };
                    assert_eq!(tile.bytes_for(&problem) - tile.shared_bytes, 8 * rings * tile.keys * tile.stages);
                    assert!(tile.bytes_for(&problem) <= 99 * 1024, "{tile:?}");
                }
            }
        }
    }

    #[test]
    fn eight_warps_decode_few_sequences_on_devices_with_room_for_them() {
        let problem = super::super::tests::problem;
        let shape = |problem: &Attention, shared_memory| {
            let device = Device { shared_memory, ..super::super::tests::device(true) };
            AttentionTile::decode(problem, &device).expect("there is a tile").shape
        };
        let (large, few) = (227 * 1024, problem(66, 66, 8, 128));
        assert_eq!((shape(&few, large), shape(&problem(67, 67, 8, 128), large)), ("decode_8warps", "decode"));
        assert_eq!(shape(&few, 99 * 1024), "decode");
        assert_eq!(shape(&Attention { batch_invariant: true, ..few }, large), "decode");
        for dim in [64, 96, 256] {
            assert_eq!(shape(&problem(1, 1, 8, dim), large), "decode");
        }
    }

    #[test]
    fn sequences_of_few_packed_rows_over_8_bit_caches_have_tiles_of_8_rows() {
        let shape = |problem: &Attention| {
            AttentionTile::decode(problem, &super::super::tests::device(true)).expect("there is a tile").shape
        };
        // A group of 4 query heads.
        let of = |rows, kv_dtype, dim| Attention { kv_dtype, ..super::super::tests::problem(rows, 64, 8, dim) };
        let of_rows = [64, 128, 129].map(|rows| shape(&of(rows, DType::F8E4M3FN, 128)));
        assert_eq!(of_rows, ["decode_8rows", "decode_8rows", "decode"]);
        for (dim, expected) in [(64, "decode_8rows"), (96, "decode"), (200, "decode_8rows"), (512, "decode")] {
            assert_eq!(shape(&of(64, DType::F8E5M2, dim)), expected, "{dim}");
        }
        let plain = of(64, DType::F8E4M3FN, 128);
        assert_eq!(shape(&Attention { num_q_heads: 18, ..plain }), "decode");
        assert_eq!(shape(&Attention { queries: Queries { longest: 3, ..plain.queries }, ..plain }), "decode");
        let view = KvView { data: std::ptr::null_mut(), page_stride: 0, token_stride: 0, head_stride: 0 };
        let scaled = Attention { scale_cache: Some(KvScaleCache { k: view, v: view }), ..of(64, DType::I8, 256) };
        assert_eq!(shape(&scaled), "decode_8rows");
        let invariant = Attention { batch_invariant: true, ..plain };
        assert_eq!(shape(&invariant), "decode_8rows");
        let alibi = Some(Alibi { slopes: std::ptr::null(), per_sequence: false });
        assert_eq!(shape(&Attention { score: Score { alibi, ..plain.score }, ..invariant }), "decode");
        assert_eq!(shape(&Attention { score: Score { alibi, ..plain.score }, ..plain }), "decode_8rows");
    }

    #[test]
    fn few_tiles_have_two_ctas_per_sm() {
        let device = super::super::tests::device(true);
        let ctas = |seqs, kv_dtype, dim, page_size| {
            let sizes = super::super::tests::problem(seqs, seqs, 8, dim);
            let table = PageTable { entries: std::ptr::null(), stride: 0, max_pages: 1, num_pages: 1, page_size };
            let keys = Keys { storage: KeyStorage::Paged(table), ..sizes.keys };
            let problem = Attention { kv_dtype, keys, ..sizes };
            let tile = AttentionTile::of(&problem, "decode").expect("there is a tile");
            let ctas = tile.decode_ctas_per_sm(&problem, &device);
            assert_eq!(device.resident_blocks(tile.decode_shared_memory(&problem, &device), 8), device.sms * ctas);
            ctas
        };
        // Two KV heads, 132 SMs.
        let seqs = [1, 132, 133, 198, 199, 264, 265, 1000];
        assert_eq!(seqs.map(|seqs| ctas(seqs, DType::F8E4M3FN, 128, 16)), [2, 2, 3, 3, 2, 2, 3, 3]);
        assert_eq!([1, 8, 24, 32].map(|page_size| ctas(4, DType::F8E5M2, 96, page_size)), [3, 3, 3, 2]);
        assert_eq!([64, 256, 512].map(|dim| ctas(4, DType::F8E4M3FN, dim, 16)), [4, 2, 2]);
        assert_eq!([32, 64, 96, 128, 192].map(|dim| ctas(265, DType::BF16, dim, 16)), [3, 3, 2, 3, 2]);
    }

    #[test]
    fn decode_with_a_soft_cap_takes_the_next_head_dimension_that_is_built() {
        let of = |softcap, dtype: DType, dim, shape| {
            let plain = super::super::tests::problem(64, 64, 8, dim);
            let problem = Attention { kv_dtype: dtype, score: Score { softcap, ..plain.score }, ..plain };
            AttentionTile::of(&problem, shape).expect("there is a tile").head_dim
        };
        let dims = [24, 64, 72, 96, 160, 192, 512];
        assert_eq!(dims.map(|dim| of(5.0, DType::BF16, dim, "decode")), [64, 64, 128, 128, 256, 256, 512]);
        for (softcap, dtype, shape) in
            [(0.0, DType::F16, "decode"), (5.0, DType::F16, "prefill"), (5.0, DType::F8E5M2, "decode")]
        {
            assert_eq!(
                dims.map(|dim| of(softcap, dtype, dim, shape)),
                [32, 64, 96, 96, 192, 192, 512],
                "{dtype} {shape}"
            );
        }
    }

    #[test]
    fn warps_compute_the_tiles_of_many_short_sequences() {
        let device = super::super::tests::device(true);
        let chunks = |problem: &Attention| {
            let tile = AttentionTile::of(problem, "decode").expect("there is a tile");
            tile.max_warp_tile_chunks(problem, &device)
        };
        // Two KV heads of four query heads each, 132 SMs.
        let of = |seqs, dim| super::super::tests::problem(seqs, seqs, 8, dim);
        assert_eq!([82, 83, 197, 198, 5000].map(|seqs| chunks(&of(seqs, 128))), [0, 1, 1, 8, 8]);
        assert_eq!([32, 64, 72, 96, 128, 192, 256, 512].map(|dim| chunks(&of(264, dim))), [0, 8, 0, 0, 8, 0, 8, 0]);
        let plain = of(264, 128);
        assert_eq!([8, 16, 18].map(|num_q_heads| chunks(&Attention { num_q_heads, ..plain })), [8, 8, 0]);
        assert_eq!([DType::F16, DType::F32].map(|kv_dtype| chunks(&Attention { kv_dtype, ..plain })), [8, 0]);
        let paged = |page_size| {
            let table = PageTable { entries: std::ptr::null(), stride: 0, max_pages: 1, num_pages: 1, page_size };
            Attention { keys: Keys { storage: KeyStorage::Paged(table), ..plain.keys }, ..plain }
        };
        assert_eq!([1, 16, 24, 48].map(|page_size| chunks(&paged(page_size))), [0, 8, 0, 8]);
        // Of 8 bits a chunk has 128 keys up to 128 columns.
        let of_8_bits = |seqs, dim| {
            let problem = Attention { kv_dtype: DType::F8E4M3FN, ..of(seqs, dim) };
            let tile = AttentionTile::decode(&problem, &device).expect("there is a tile");
            tile.max_warp_tile_chunks(&problem, &device)
        };
        assert_eq!([395, 396].map(|seqs| of_8_bits(seqs, 128)), [0, 2]);
        assert_eq!([82, 83].map(|seqs| of_8_bits(seqs, 256)), [0, 1]);
        assert_eq!([64, 96, 128, 256].map(|dim| of_8_bits(500, dim)), [2, 0, 2, 4]);
        for other in [
            Attention { value_dim: 120, ..plain },
            Attention { batch_invariant: true, ..plain },
            Attention { score: Score { softcap: 5.0, ..plain.score }, ..plain },
        ] {
            assert_eq!(chunks(&other), 0);
        }
    }

    #[test]
    fn every_tile_fits_the_shared_memory_of_its_gpus() {
        for (capability, sm, block) in [(80, 164, 163), (86, 100, 99), (90, 228, 227)] {
            let (shared_memory_per_sm, shared_memory) = (sm * 1024, block * 1024);
            let device =
                Device { capability, shared_memory, shared_memory_per_sm, ..super::super::tests::device(false) };
            for tile in &ATTENTION {
                let is_built = match tile.shape {
                    "fused" => block == 227,
                    "decode_8warps" => block >= 163,
                    _ => true,
                };
                for batch_invariant in [false, true] {
                    let problem = Attention { batch_invariant, ..super::super::tests::problem(1, 1, 8, 64) };
                    // f32 past D 256 with batch_invariant.
                    if tile.shape == "decode" && !tile.fits(&problem, &device) {
                        assert!(batch_invariant && (tile.bytes, tile.head_dim, block) == (4, 512, 99), "{tile:?}");
                        continue;
                    }
                    let asked = match tile.shape {
                        "decode" | "decode_8rows" | "decode_8warps" => tile.decode_shared_memory(&problem, &device),
                        _ => tile.shared_bytes,
                    };
                    assert!(!is_built || asked <= shared_memory, "{tile:?}");
                }
            }
        }
    }
}
