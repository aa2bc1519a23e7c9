//! Multi-head latent attention: one KV head whose keys and values are the same rows, read once (`kernels/mla.cu`,
//! and on Hopper if q has 16 bits `kernels/hopper_mla.cu`, over 8-bit caches `kernels/hopper_mla_fp8.cu`).
//!
//! One launch serves sequences of any length. As in decode, the keys of all tiles are divided between CTAs, and the combine
//! kernel merges the partials of tiles that several CTAs computed. With `batch_invariant` no tile is split, so that the bits of
//! a row depend on its own sequence alone.

use super::params::has_wide_rows;
use super::split::{KvSplit, WorkUnit};
use super::tiles::{converts_fp8, transforms_logits};
use super::{Launch, Launches, Parameter, UNLIMITED, decode, longest_or_mean_queries, max_tiles};
use crate::cuda::device::Device;
use crate::cuda::enqueue::{LaunchAttributes, LaunchConfig};
use crate::cuda::params::attention::AttentionParams;
use crate::cuda::params::hopper_mla::HopperMlaParams;
use crate::cuda::tensor_map::{Axis, L2Promotion, TensorMap, supports_tma};
use crate::cuda::tiles::{MLA, MlaTile};
use crate::cuda::variants;
use crate::error::{Error, Result};
use crate::problem::attention::{Attention, KeyStorage};
use crate::tensor::DType;
use std::cmp::Reverse;
use std::f32::consts::LOG2_E;

/// Columns of an atom's row in shared memory, those of a box.
const ATOM_COLUMNS: i64 = 64;
/// Rows of an atom, the fewest of a box.
const ATOM_ROWS: i64 = 8;
/// Packed rows of a CTA of `hopper_mla.cu`.
const CTA_ROWS: u32 = 64;

impl MlaTile {
    /// The tile for the problem's types: the smallest one for few rows that has all packed rows of a sequence, otherwise the
    /// largest one, and of tiles with as many rows Hopper's if the device is one, then the one for more shared memory. With
    /// `batch_invariant` the size of the batch does not matter.
    fn of(problem: &Attention, device: &Device) -> Result<&'static Self> {
        let operands = operands(problem, device);
        let fits = |tile: &&Self| operands.contains(&tile.operands) && tile.shared_bytes <= device.shared_memory;
        let loads = has_wide_rows(problem);
        let packed = longest_or_mean_queries(problem).saturating_mul(problem.num_q_heads as i64);
        let runs = |tile: &&Self| {
            let holds = !tile.has_few_rows() || loads && !problem.batch_invariant && packed <= i64::from(tile.rows);
            holds && (!tile.is_hopper() || device.capability == 90 && loads && tile.fills_ctas(problem, device))
        };
        let preference = |tile: &&Self| {
            let fewest = tile.has_few_rows().then_some(Reverse(tile.rows));
            (fewest, tile.rows, tile.is_hopper(), tile.shared_bytes)
        };
        MLA.iter().filter(|tile| fits(tile) && runs(tile)).max_by_key(preference).ok_or_else(|| {
            let operands = operands[0];
            Error::unimplemented(format!(
                "no kernel for {operands} fits {} bytes of shared memory",
                device.shared_memory
            ))
        })
    }

    /// Whether groups of warps divide the keys of this tile, because it has too few rows for all warps.
    fn has_few_rows(&self) -> bool {
        self.key_groups > 1
    }

    /// Whether this is a tile of a kernel whose code runs on sm_90 only.
    fn is_hopper(&self) -> bool {
        self.shape.starts_with("hopper")
    }

    /// Whether this is a tile of `hopper_mla.cu`, which loads 16-bit rows by TMA.
    fn loads_by_tma(&self) -> bool {
        self.is_hopper() && self.operands != "fp8"
    }

    /// CTAs that compute a tile together.
    fn ctas(&self) -> u32 {
        if self.loads_by_tma() { self.rows / CTA_ROWS } else { 1 }
    }

    /// Whether all CTAs of most tiles have rows, and there is TMA to load keys for all of them.
    fn fills_ctas(&self, problem: &Attention, device: &Device) -> bool {
        let sequences = problem.num_rows.min(problem.max_seqs) as i64;
        let packed = (problem.num_rows * problem.num_q_heads) as i64;
        self.ctas() == 1 || self.box_rows(problem, device) > 0 && packed >= sequences * i64::from(self.rows)
    }

    /// Rows of a box of the cache: the largest power of two that divides the page and the rows of a block that a CTA loads. 0
    /// where TMA cannot load the cache.
    fn box_rows(&self, problem: &Attention, device: &Device) -> i64 {
        let KeyStorage::Paged(table) = problem.keys.storage else { return 0 };
        if table.num_pages == 0 || !device.has_tensor_maps {
            return 0;
        }
        let rows = 1 << (table.page_size as u64 | u64::from(self.keys / self.ctas())).trailing_zeros();
        let is_whole = rows >= ATOM_ROWS && supports_tma(problem.kv_dtype, problem.k.data, &cache_axes(problem, rows));
        if is_whole { rows } else { 0 }
    }

    /// The kernel of this tile: its name and its index in the table of variants.
    fn variant(&self, problem: &Attention) -> Result<(&'static str, usize)> {
        let logits = if has_logits_transform(problem) { "scaled" } else { "none" };
        let kernel = match (self.operands, self.shape) {
            _ if self.loads_by_tma() => "hopper_mla",
            _ if self.is_hopper() => "hopper_mla_fp8",
            ("f32", _) => "mla_f32",
            (_, "large") => "mla",
            (_, "small") => "mla_small",
            ("fp8_shifted", _) => "mla_few_rows_sm80",
            _ => "mla_few_rows",
        };
        Ok((kernel, variants::find(kernel, &[self.operands, self.shape, logits])?))
    }
}

/// The axes of the cache, the innermost first. A box is `rows` rows of a page.
fn cache_axes(problem: &Attention, rows: i64) -> [Axis; 5] {
    let (pages, page_size) = match problem.keys.storage {
        KeyStorage::Paged(table) => (table.num_pages as i64, table.page_size as i64),
        KeyStorage::Contiguous { .. } => (1, 1),
    };
    // The stride of an axis with a single entry may be anything, but TMA needs a valid one.
    let axis = |len, stride, box_len| Axis { len, stride: if len > 1 { stride } else { ATOM_COLUMNS }, box_len };
    [
        axis(problem.head_dim as i64, 1, ATOM_COLUMNS),
        axis(page_size, problem.k.token_stride, rows),
        axis(pages, problem.k.page_stride, 1),
        axis(1, 0, 1),
        axis(1, 0, 1),
    ]
}

/// The inputs of the parameter of `hopper_mla`, which is encoded at the launch.
pub(super) struct LatentParameter<'c> {
    problem: &'c Attention<'c>,
    pub(super) attention: AttentionParams,
    box_rows: i64,
}

impl LatentParameter<'_> {
    pub(super) fn params(&self) -> Result<HopperMlaParams> {
        let Self { problem, attention, box_rows } = *self;
        let cache = if box_rows > 0 {
            let axes = cache_axes(problem, box_rows);
            TensorMap::new(problem.kv_dtype, problem.k.data, &axes, L2Promotion::Bytes128)?
        } else {
            TensorMap::NONE
        };
        Ok(HopperMlaParams { attention, cache, box_rows: box_rows as i32 })
    }
}

/// The values of the axis `operands`: of kernels that compute in the type of q, and of those that convert 8-bit rows and q to
/// f16.
fn operands(problem: &Attention, device: &Device) -> &'static [&'static str] {
    match (problem.q.dtype, problem.kv_dtype.size() == 1, converts_fp8(device)) {
        (DType::F32, ..) => &["f32"],
        (DType::F16, false, _) => &["f16"],
        (DType::F16, true, false) => &["f16_fp8", "fp8_shifted"],
        (DType::F16, true, true) => &["f16_fp8", "fp8"],
        (_, false, _) => &["bf16"],
        (_, true, false) => &["bf16_fp8", "fp8_shifted"],
        (_, true, true) => &["bf16_fp8", "fp8"],
    }
}

/// Whether the call takes the kernel with a logits transform, the only one of f32.
fn has_logits_transform(problem: &Attention) -> bool {
    problem.q.dtype == DType::F32 || transforms_logits(problem)
}

/// The launches of a call; none if there is no row.
pub(super) fn launches<'c>(problem: &'c Attention, device: &Device) -> Result<Launches<'c>> {
    if problem.num_rows == 0 {
        return Ok(Launches::default());
    }
    let tile = MlaTile::of(problem, device)?;
    let log2_unit = if has_logits_transform(problem) { 1.0 } else { problem.score.softmax_scale * LOG2_E };
    let unit = WorkUnit { rows: i64::from(tile.rows), chunk_keys: i64::from(tile.keys), log2_unit };
    let (rows, seqs) = (problem.num_rows as i64, problem.max_seqs as i64);
    let tiles = max_tiles(rows * problem.num_q_heads as i64, unit.rows, rows.min(seqs));
    let workspace = problem.workspace.filter(|_| !problem.batch_invariant);
    let splittable = Attention { workspace, batch_invariant: false, ..*problem };
    let resident = i64::from(device.resident_blocks(tile.shared_bytes, tile.ctas_per_sm) / tile.ctas());
    let split = KvSplit::of_units(&splittable, unit, tiles, UNLIMITED, resident, 0);
    // The portable kernels convert whole blocks of e4m3fn as those for sm_80 do, on every device.
    let has_instruction = tile.is_hopper() || tile.has_few_rows();
    let converting = Device { capability: if has_instruction { device.capability } else { 80 }, ..*device };
    let plain = AttentionParams::new(problem, &converting)?;
    let params = AttentionParams { clears_padding_rows: 1, partial: split.partial, ..plain };
    let (kernel, variant) = tile.variant(problem)?;
    let grid = [1, split.ranges as u32 * tile.ctas(), 1];
    let config = LaunchConfig { grid, threads: 32 * tile.warps, shared_memory: tile.shared_bytes };
    let parameter = if tile.loads_by_tma() {
        Parameter::Latent(LatentParameter { problem, attention: params, box_rows: tile.box_rows(problem, device) })
    } else {
        Parameter::Attention(params)
    };
    let attributes = LaunchAttributes { cluster: tile.ctas(), ..LaunchAttributes::NONE };
    let attend = Launch { attributes, ..Launch::new(kernel, variant, config, parameter) };
    let combine = decode::combine(problem, device, &split, &params, unit.rows)?;
    Ok(Launches { list: [Some(attend), combine].into_iter().flatten().collect(), store_new_tokens: false })
}

#[cfg(test)]
mod tests {
    use super::super::tests::{device, problem};
    use super::*;
    use crate::problem::KvView;
    use crate::problem::attention::{Keys, PageTable};
    use crate::problem::workspace::AttentionSizes;
    use crate::tensor::Tensor;

    /// Decode of `seqs` sequences with `q_heads` query heads, in these types.
    fn latent(seqs: usize, q_heads: usize, q: DType, kv_dtype: DType) -> Attention<'static> {
        let plain = problem(seqs, seqs, q_heads, 576);
        let storage = KeyStorage::Contiguous { total: 1 << 16 };
        Attention {
            q: Tensor { dtype: q, ..plain.q },
            out: Tensor { dtype: q, ..plain.out },
            kv_dtype,
            keys: Keys { storage, ..plain.keys },
            num_kv_heads: 1,
            value_dim: 512,
            ..plain
        }
    }

    #[test]
    fn every_combination_of_types_finds_a_kernel_on_every_gpu() {
        for (q, kv, on_hopper, on_large, on_small) in [
            (DType::F16, DType::F16, "hopper_mla_f16_hopper_none", "mla_f16_large_none", "mla_small_f16_small_none"),
            (
                DType::BF16,
                DType::BF16,
                "hopper_mla_bf16_hopper_none",
                "mla_bf16_large_none",
                "mla_small_bf16_small_none",
            ),
            (
                DType::BF16,
                DType::F8E4M3FN,
                "hopper_mla_fp8_fp8_hopper_64_scaled",
                "mla_bf16_fp8_large_scaled",
                "mla_small_bf16_fp8_small_scaled",
            ),
            (
                DType::F16,
                DType::F8E5M2,
                "hopper_mla_fp8_fp8_hopper_64_scaled",
                "mla_f16_fp8_large_scaled",
                "mla_small_f16_fp8_small_scaled",
            ),
            (
                DType::F32,
                DType::F32,
                "mla_f32_f32_small_scaled",
                "mla_f32_f32_small_scaled",
                "mla_f32_f32_small_scaled",
            ),
        ] {
            let problem = latent(4, 128, q, kv);
            let devices = [(90, 227, on_hopper), (100, 227, on_large), (80, 163, on_large), (120, 99, on_small)];
            for (capability, kilobytes, expected) in devices {
                let device = Device { capability, shared_memory: kilobytes * 1024, ..device(false) };
                let launches = launches(&problem, &device).expect("the sizes are allowed");
                assert_eq!(variants::VARIANTS[launches.list[0].variant].name, expected);
                assert!(launches.list[0].config.shared_memory <= device.shared_memory);
            }
        }
    }

    #[test]
    fn sequences_with_few_packed_rows_over_8_bits_take_small_tiles() {
        let bf16 = DType::BF16;
        let decode = |q_heads, kv| latent(4, q_heads, bf16, kv);
        let name = |problem: &Attention, capability, kilobytes: u32| {
            let device = Device { capability, shared_memory: kilobytes * 1024, ..device(false) };
            let launches = launches(problem, &device).expect("the sizes are allowed");
            variants::VARIANTS[launches.list[0].variant].name
        };
        for (capability, kilobytes) in [(80, 163), (86, 99), (89, 99), (90, 227), (100, 227), (120, 99)] {
            let expected = if capability == 90 {
                "hopper_mla_fp8_fp8_hopper_16_scaled"
            } else if capability < 89 {
                "mla_few_rows_sm80_fp8_shifted_rows_16_scaled"
            } else {
                "mla_few_rows_fp8_rows_16_scaled"
            };
            for (q_heads, kv) in [(16, DType::F8E4M3FN), (1, DType::F8E5M2)] {
                assert_eq!(name(&decode(q_heads, kv), capability, kilobytes), expected);
            }
            if capability == 90 {
                for (q_heads, expected) in [(17, "_32_"), (32, "_32_"), (33, "_64_")] {
                    assert!(name(&decode(q_heads, DType::F8E4M3FN), capability, kilobytes).contains(expected));
                }
            }
            // Not more rows, nor where the size of the batch must not matter, nor rows that are no multiples of 16 bytes.
            let fits = decode(16, DType::F8E4M3FN);
            let others = [
                decode(17, DType::F8E4M3FN),
                decode(16, bf16),
                Attention { num_rows: 8, ..fits },
                Attention { batch_invariant: true, ..fits },
                Attention { head_dim: 568, ..fits },
            ];
            for other in others {
                assert_ne!(name(&other, capability, kilobytes), expected);
            }
        }
    }

    /// The parameter of the launch of attention.
    fn attention_of<'l>(launches: &'l Launches) -> &'l AttentionParams {
        match &launches.list[0].parameter {
            Parameter::Attention(params) => params,
            Parameter::Latent(of) => &of.attention,
            _ => panic!("of another kernel"),
        }
    }

    #[test]
    fn tiles_of_two_ctas_take_pages_of_boxes_and_queries_that_fill_them() {
        let paged = |rows, seqs, q_heads, page_size| {
            let table = PageTable { entries: std::ptr::null(), stride: 64, max_pages: 64, num_pages: 64, page_size };
            let plain = latent(seqs, q_heads, DType::BF16, DType::BF16);
            let k = KvView { page_stride: 576 * page_size as i64, token_stride: 576, ..plain.k };
            let keys = Keys { storage: KeyStorage::Paged(table), ..plain.keys };
            Attention { num_rows: rows, keys, k, ..plain }
        };
        for (rows, seqs, q_heads, page_size, expected) in [
            (4, 4, 128, 64, (2, 32)),
            (4, 4, 128, 16, (2, 16)),
            (4, 4, 128, 24, (2, 8)),
            (4, 4, 128, 12, (1, 0)),
            (4, 4, 64, 128, (1, 64)),
            (8, 4, 64, 128, (2, 32)),
            (64, 4, 16, 64, (2, 32)),
            (2, 4, 128, 64, (2, 32)),
        ] {
            let problem = paged(rows, seqs, q_heads, page_size);
            let launches = launches(&problem, &device(true)).expect("the sizes are allowed");
            let Parameter::Latent(of) = &launches.list[0].parameter else { panic!("of another kernel") };
            assert_eq!((launches.list[0].attributes.cluster, of.box_rows), expected);
            assert!(launches.list[0].config.grid[1].is_multiple_of(expected.0));
            let without = super::launches(&problem, &device(false)).expect("the sizes are allowed");
            assert_eq!(without.list[0].attributes.cluster, 1);
        }
    }

    #[test]
    fn the_wanted_workspace_has_room_for_every_work_range_and_batch_invariance_takes_none() {
        let plain = latent(2, 128, DType::BF16, DType::BF16);
        let sizes = AttentionSizes {
            num_q_heads: 128,
            num_kv_heads: 1,
            head_dim: 576,
            value_dim: 512,
            dtype: DType::BF16,
            batch_invariant: false,
        };
        let bytes = [sizes.latent_workspace().fixed];
        for start in [1 << 20, (1 << 20) + 1] {
            let workspace = Some(Tensor::dense(DType::U8, std::ptr::without_provenance_mut(start), &bytes));
            let problem = Attention { workspace, ..plain };
            let split = launches(&problem, &device(false)).expect("the sizes are allowed");
            assert_eq!((split.list.len(), attention_of(&split).partial.num_ranges), (2, 132));
            let invariant = Attention { batch_invariant: true, ..problem };
            let whole = launches(&invariant, &device(false)).expect("the sizes are allowed");
            assert_eq!((whole.list.len(), attention_of(&whole).partial.num_ranges), (1, 0));
        }
        assert_eq!(AttentionSizes { batch_invariant: true, ..sizes }.latent_workspace().fixed, 0);
    }

    #[test]
    fn rows_of_8_bits_take_hopper_s_kernel_if_they_are_aligned_to_16_bytes() {
        for (head_dim, value_dim, cluster, kernel) in [
            (576, 512, 1, "hopper_mla_fp8_fp8_hopper_64_scaled"),
            (48, 32, 1, "hopper_mla_fp8_fp8_hopper_64_scaled"),
            (568, 512, 1, "mla_bf16_fp8_large_scaled"),
            (576, 504, 1, "mla_bf16_fp8_large_scaled"),
        ] {
            let table =
                PageTable { entries: std::ptr::null(), stride: 64, max_pages: 64, num_pages: 64, page_size: 64 };
            let plain = latent(4, 128, DType::BF16, DType::F8E4M3FN);
            let k = KvView { page_stride: 64 * head_dim as i64, token_stride: head_dim as i64, ..plain.k };
            let keys = Keys { storage: KeyStorage::Paged(table), ..plain.keys };
            let problem = Attention { keys, k, v: k, head_dim, value_dim, ..plain };
            let launches = launches(&problem, &device(true)).expect("the sizes are allowed");
            assert_eq!(variants::VARIANTS[launches.list[0].variant].name, kernel);
            assert_eq!(launches.list[0].attributes.cluster, cluster);
        }
    }

    #[test]
    #[expect(clippy::float_cmp, reason = "powers of two")]
    fn fp8_is_divided_by_what_the_kernel_does_not_multiply() {
        for (capability, q_heads, e4m3fn) in
            [(80, 128, 256.0), (90, 128, 1.0), (100, 128, 256.0), (80, 16, 256.0), (90, 16, 1.0), (100, 16, 1.0)]
        {
            let factor = |kv| {
                let problem = latent(1, q_heads, DType::BF16, kv);
                let device = Device { capability, ..device(false) };
                attention_of(&launches(&problem, &device).expect("the sizes are allowed")).value_factor
            };
            assert_eq!([DType::BF16, DType::F8E4M3FN, DType::F8E5M2].map(factor), [1.0, e4m3fn, 1.0]);
        }
    }
}
