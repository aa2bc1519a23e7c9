//! Prefill on Hopper: which calls its kernels take, and their parameters.

mod page_divisor;
mod tiles;

use super::split::room;
use super::{Call, Launch, Launches, Parameter, UNLIMITED, decode, max_tiles};
use crate::cuda::device::Device;
use crate::cuda::enqueue::LaunchConfig;
use crate::cuda::kernel_launch::NEXT_TILE_BYTES;
use crate::cuda::params::attention::AttentionParams;
use crate::cuda::params::hopper_prefill::{HopperPrefillParams, PageDivisor};
use crate::cuda::tensor_map::{Axis, TensorMap, supports_tma};
use crate::cuda::tiles::{HOPPER_PREFILL, HopperPrefillTile};
use crate::cuda::variants;
use crate::error::Result;
use crate::problem::KvView;
use crate::problem::attention::{Attention, KeyStorage};
use crate::tensor::Tensor;
use std::ptr::null_mut;

const KERNEL: &str = "hopper_prefill";
const FP8_KERNEL: &str = "hopper_prefill_fp8";

/// 16-bit elements of a 16-byte chunk, which a lane copies at a time.
const CHUNK: i64 = 8;

/// Rows of a swizzle atom: a page must be a multiple of this many tokens for TMA.
const ATOM_ROWS: i64 = 8;

/// Rows of a warp, which one TMA store writes.
const WARP_ROWS: i64 = 16;

/// How the kernel computes a call: its tile shape and how it packs query heads.
#[derive(Clone, Copy)]
pub(super) struct HopperPrefill {
    pub(super) tile: &'static HopperPrefillTile,
    /// `PackGQA`: query heads whose rows share a tile, the largest power of two that divides Hq / Hkv, at most 64.
    pub(super) pack_gqa: i64,
    /// Number of such packs per KV head.
    packs_per_kv_head: i64,
}

/// Query rows per sequence slot up to which causal calls use short tiles, which compute fewer masked scores at the diagonal
/// (D 64, 1k: 299 TFLOP/s instead of 280; 4k: 432 instead of 466; without a mask 410 instead of 437).
const SHORT_ON_AVERAGE: i64 = 1024;

/// Query rows per sequence slot from which on prefill also computes the short sequences.
const LONG_ON_AVERAGE: i64 = 256;

/// Strategy: one launch of prefill for all sequences of a call, nearly all of which are long.
pub(super) fn launches_for_all<'c>(call: &Call<'c>) -> Result<Option<Launches<'c>>> {
    let Some(prefill) = takes_all(call.problem).then(|| HopperPrefill::of(call.problem, &call.device)).flatten() else {
        return Ok(None);
    };
    let tiles = max_tiles(call.rows() * prefill.pack_gqa, prefill.tile.rows(), call.seqs().min(call.rows()));
    let params = AttentionParams { clears_padding_rows: 1, ..call.params_for(1, UNLIMITED) };
    let list = vec![prefill.launch(call, tiles, &params)?];
    Ok(Some(Launches { list, store_new_tokens: false }))
}

/// Strategy: prefill for the long sequences, decode for the others.
pub(super) fn launches<'c>(call: &Call<'c>) -> Result<Option<Launches<'c>>> {
    let Some(prefill) = HopperPrefill::of(call.problem, &call.device) else { return Ok(None) };
    let tiles = max_tiles(call.rows() * prefill.pack_gqa, prefill.tile.rows(), call.long_sequences());
    decode::with_prefill(call, |params| prefill.launch(call, tiles, params)).map(Some)
}

/// Whether prefill computes the short sequences too, which saves decode's launches. If sequences are long on average and
/// there are few keys per row (packed keys, or the capacity of the block table), then short sequences are few and have few
/// keys, so prefill takes no longer for them although they hardly fill a tile and their keys are not split.
fn takes_all(problem: &Attention) -> bool {
    let (rows, seqs) = (problem.num_rows as i64, problem.max_seqs as i64);
    let keys_are_few = match problem.keys.storage {
        KeyStorage::Contiguous { total } => total as i64 <= 2 * rows,
        KeyStorage::Paged(table) => (table.capacity() as i64).saturating_mul(seqs) <= 4 * rows,
    };
    !problem.batch_invariant && rows >= LONG_ON_AVERAGE * seqs && keys_are_few
}

impl HopperPrefill {
    /// `None` for calls that the portable kernels compute.
    pub(super) fn of(problem: &Attention, device: &Device) -> Option<Self> {
        let (rows, seqs) = (problem.num_rows as i64, problem.max_seqs as i64);
        let is_short = problem.score.window_right >= 0 && rows <= SHORT_ON_AVERAGE * seqs;
        let mut tiles = HOPPER_PREFILL.iter().filter(|tile| tile.serves(problem));
        let tile = tiles.clone().find(|tile| tile.is_short == is_short).or_else(|| tiles.next())?;
        let group = (problem.num_q_heads / problem.num_kv_heads) as i64;
        let pack_gqa = (group & -group).min(64);
        let prefill = Self { tile, pack_gqa, packs_per_kv_head: group / pack_gqa };
        // A per-head v_scale with several packs per KV head is left to the portable kernels.
        let scales_values_by_head = problem.v_scale.is_some_and(|scale| scale.per_head);
        let fits = device.has_tensor_maps
            && (group == pack_gqa || !scales_values_by_head)
            && supports_tma(problem.q.dtype, problem.q.data, &prefill.query_axes(problem))
            && (prefill.loads_kv_by_tma(problem) || (!prefill.is_fp8() && loads_kv_by_cp_async(problem)));
        fits.then_some(prefill)
    }

    /// The launch for sequences of at most `tiles` tiles per KV head, with the portable kernel's parameter for them.
    fn launch<'c>(&self, call: &Call<'c>, tiles: i64, attention: &AttentionParams) -> Result<Launch<'c>> {
        let Call { problem, device, .. } = call;
        let next_tile = self.next_tile(problem, tiles, device);
        let kernel = if self.is_fp8() { FP8_KERNEL } else { KERNEL };
        let parameter =
            Parameter::Prefill(PrefillParameter { prefill: *self, problem, attention: *attention, next_tile });
        let launch = Launch::new(kernel, self.variant(problem)?, self.shape(problem, tiles, device), parameter);
        Ok(Launch { next_tile, ..launch })
    }

    /// The index of the kernel in the table of variants.
    fn variant(&self, problem: &Attention) -> Result<usize> {
        let storage = match problem.keys.storage {
            KeyStorage::Contiguous { .. } => "contiguous",
            KeyStorage::Paged(_) => "paged",
        };
        let HopperPrefillTile { head_dim, logits, .. } = self.tile;
        if self.is_fp8() {
            return variants::find(FP8_KERNEL, &[head_dim, storage, logits]);
        }
        variants::find(KERNEL, &[variants::dtype_value(problem.q.dtype), head_dim, storage, logits])
    }

    fn is_fp8(&self) -> bool {
        self.tile.bytes == 1
    }

    /// One CTA per SM, fewer if there are fewer tiles; `tiles` is the number per KV head.
    fn shape(&self, problem: &Attention, tiles: i64, device: &Device) -> LaunchConfig {
        let all = tiles.max(1) * self.num_packs(problem);
        let ctas = all.min(i64::from(device.sms)) as u32;
        LaunchConfig { grid: [ctas, 1, 1], threads: self.tile.threads(), shared_memory: self.tile.shared_bytes }
    }

    /// Number of packs of all KV heads.
    fn num_packs(&self, problem: &Attention) -> i64 {
        problem.num_kv_heads as i64 * self.packs_per_kv_head
    }

    /// Address in the caller's workspace of the dynamic scheduler's tile counter; null without room for it or if every CTA
    /// has only one tile.
    fn next_tile(&self, problem: &Attention, tiles: i64, device: &Device) -> *mut u8 {
        let is_wanted = tiles * self.num_packs(problem) > i64::from(device.sms);
        if is_wanted { next_tile_address(problem) } else { null_mut() }
    }

    /// Tensor map of K or V with `dim` columns per head, in boxes of `keys` keys.
    pub(super) fn key_map(&self, problem: &Attention, view: &KvView, dim: u32, keys: i64) -> Result<TensorMap> {
        TensorMap::new(problem.kv_dtype, view.data, &self.key_axes(problem, view, dim, keys))
    }

    /// Keys per box: contiguous, those of a block; paged, the largest power of two that divides page and block, so that a
    /// box is within one page and one block.
    fn keys_per_box(&self, problem: &Attention) -> i64 {
        let block = i64::from(self.tile.keys);
        let KeyStorage::Paged(table) = problem.keys.storage else { return block };
        let both = (table.page_size as i64 | block) / ATOM_ROWS;
        ATOM_ROWS * (both & -both)
    }

    fn query_axes(&self, problem: &Attention) -> [Axis; 4] {
        self.row_axes(problem, &problem.q, self.tile.dim, self.tile.rows())
    }

    fn out_axes(&self, problem: &Attention) -> [Axis; 4] {
        self.row_axes(problem, &problem.out, self.tile.value_dim, WARP_ROWS)
    }

    /// Axes of q or out as `[atom column, token, head, column]`, the innermost first. A box is `rows` packed rows.
    fn row_axes(&self, problem: &Attention, tensor: &Tensor, dim: u32, rows: i64) -> [Axis; 4] {
        let columns = self.tile.atom_row(tensor.dtype.size());
        let atom_columns = i64::from(dim) / columns;
        [
            Axis { len: columns, stride: 1, box_len: columns },
            axis(problem.num_q_heads as i64, tensor.stride(1), self.pack_gqa),
            axis(problem.num_rows as i64, tensor.stride(0), rows / self.pack_gqa),
            axis(atom_columns, columns, atom_columns),
        ]
    }

    /// Axes of K or V with `dim` columns per head, the innermost first. Contiguous `[1, head, atom column, token, column]`;
    /// paged `[page, row group, atom column of all heads, token of the row group, column]`. A box is `keys` keys of a head.
    fn key_axes(&self, problem: &Attention, view: &KvView, dim: u32, keys: i64) -> [Axis; 5] {
        let (heads, columns) = (problem.num_kv_heads as i64, self.tile.kv_atom_row());
        let atom_columns = i64::from(dim) / columns;
        let element = Axis { len: columns, stride: 1, box_len: columns };
        match problem.keys.storage {
            KeyStorage::Contiguous { total } => [
                element,
                axis(total as i64, view.token_stride, keys),
                axis(atom_columns, columns, atom_columns),
                axis(heads, view.head_stride, 1),
                axis(1, 0, 1),
            ],
            KeyStorage::Paged(table) => {
                let all_atom_columns =
                    (heads - 1) * step(problem.num_kv_heads, view.head_stride) / columns + atom_columns;
                let (row_groups, pages) = (table.page_size as i64 / ATOM_ROWS, table.num_pages as i64);
                [
                    element,
                    axis(ATOM_ROWS, view.token_stride, ATOM_ROWS),
                    axis(all_atom_columns, columns, atom_columns),
                    axis(row_groups, ATOM_ROWS * view.token_stride, keys / ATOM_ROWS),
                    axis(pages, view.page_stride, 1),
                ]
            }
        }
    }

    /// Whether TMA can load K and V: pages are a multiple of [`ATOM_ROWS`] tokens, and heads start at multiples of an atom
    /// row. Otherwise the kernel copies rows with `cp.async`.
    pub(super) fn loads_kv_by_tma(&self, problem: &Attention) -> bool {
        let (atom_row, keys) = (self.tile.kv_atom_row(), self.keys_per_box(problem));
        [(&problem.k, self.tile.dim), (&problem.v, self.tile.value_dim)].into_iter().all(|(view, dim)| {
            let is_regular = match problem.keys.storage {
                KeyStorage::Contiguous { .. } => true,
                KeyStorage::Paged(table) => {
                    let step = step(problem.num_kv_heads, view.head_stride);
                    table.page_size as i64 % ATOM_ROWS == 0
                        && step % atom_row == 0
                        && step / atom_row * (problem.num_kv_heads as i64) < i64::from(i32::MAX)
                }
            };
            is_regular && supports_tma(problem.kv_dtype, view.data, &self.key_axes(problem, view, dim, keys))
        })
    }
}

/// The inputs of the kernel's parameter, which is encoded at the launch.
pub(super) struct PrefillParameter<'c> {
    pub(super) prefill: HopperPrefill,
    pub(super) problem: &'c Attention<'c>,
    /// The portable kernel's parameter for the same sequences.
    pub(super) attention: AttentionParams,
    /// Address of the dynamic scheduler's tile counter, or null.
    pub(super) next_tile: *mut u8,
}

impl PrefillParameter<'_> {
    pub(super) fn params(&self) -> Result<HopperPrefillParams> {
        let Self { prefill, problem, attention, next_tile } = self;
        let score = &problem.score;
        let [head_dim, value_dim] = [prefill.tile.dim, prefill.tile.value_dim];
        let rows = |tensor: &Tensor, axes: &[Axis]| TensorMap::new(tensor.dtype, tensor.data, axes);
        let by_tma = prefill.loads_kv_by_tma(problem);
        let is_paged = matches!(problem.keys.storage, KeyStorage::Paged(_));
        let keys = |view: &KvView, dim| {
            if by_tma {
                prefill.key_map(problem, view, dim, prefill.keys_per_box(problem))
            } else {
                Ok(TensorMap::NONE)
            }
        };
        let head_atom_columns =
            |view: &KvView| (step(problem.num_kv_heads, view.head_stride) / prefill.tile.kv_atom_row()) as i32;
        // f32 O of 16-bit queries, and O with more heads per pack_gqa than rows per warp, is stored row by row.
        let out_axes = prefill.out_axes(problem);
        let stores_by_tma = attention.widens_out == 0
            && prefill.pack_gqa <= WARP_ROWS
            && supports_tma(problem.out.dtype, problem.out.data, &out_axes);
        Ok(HopperPrefillParams {
            attention: attention.with_packs(prefill.pack_gqa, prefill.num_packs(problem)),
            q: rows(&problem.q, &prefill.query_axes(problem))?,
            k: keys(&problem.k, head_dim)?,
            v: keys(&problem.v, value_dim)?,
            out: if stores_by_tma { rows(&problem.out, &out_axes)? } else { TensorMap::NONE },
            next_tile: next_tile.cast(),
            is_causal: i32::from(score.window_left < 0 && score.window_right >= 0),
            packs_per_kv_head: prefill.packs_per_kv_head as i32,
            box_row_groups: if by_tma && is_paged { (prefill.keys_per_box(problem) / ATOM_ROWS) as i32 } else { 0 },
            k_head_atom_columns: head_atom_columns(&problem.k),
            v_head_atom_columns: head_atom_columns(&problem.v),
            group_log2: prefill.pack_gqa.trailing_zeros() as i32,
            stores_by_tma: i32::from(stores_by_tma),
            page_divisor: PageDivisor::of(&problem.keys.storage),
        })
    }
}

/// Address of the dynamic scheduler's tile counter in the workspace; null without room for it.
pub(super) fn next_tile_address(problem: &Attention) -> *mut u8 {
    room(problem, 0, NEXT_TILE_BYTES)
        .filter(|(_, bytes)| *bytes >= NEXT_TILE_BYTES)
        .map_or(null_mut(), |(place, _)| place)
}

/// Whether `cp.async` can load K and V: rows are whole 16-byte chunks, and 32 bits hold the index of any chunk of a head.
fn loads_kv_by_cp_async(problem: &Attention) -> bool {
    let KeyStorage::Paged(table) = problem.keys.storage else { return false };
    let can_number = |view: &KvView| {
        let axes = [(table.num_pages, view.page_stride), (table.page_size, view.token_stride)];
        let steps = axes.map(|(count, stride)| step(count, stride));
        let last: i128 = axes.iter().zip(steps).map(|((count, _), step)| (*count as i128 - 1) * i128::from(step)).sum();
        let are_chunks = [steps[0], steps[1], step(problem.num_kv_heads, view.head_stride)]
            .iter()
            .all(|step| *step >= 0 && step % CHUNK == 0);
        are_chunks && last / i128::from(CHUNK) <= i128::from(u32::MAX)
    };
    table.num_pages > 0 && [problem.k, problem.v].iter().all(can_number)
}

/// The stride of an axis with several entries, else 0.
fn step(count: usize, stride: i64) -> i64 {
    if count > 1 { stride } else { 0 }
}

/// An axis. The stride of one with a single entry may be anything, but TMA needs a valid one.
fn axis(len: i64, stride: i64, box_len: i64) -> Axis {
    Axis { len, stride: if len > 1 { stride } else { 128 }, box_len }
}

#[cfg(test)]
pub(super) mod tests {
    use super::super::tests::{device, named_on, problem};
    use super::*;
    use crate::problem::Scale;
    use crate::problem::attention::{Keys, PageTable, Queries};
    use crate::tensor::DType;
    use std::ptr::null;

    /// 1000 rows of 12 heads over 2 KV heads of 2000 keys, in 7 sequences; no memory.
    pub(in crate::cuda::attention) fn ragged() -> Attention<'static> {
        let plain = problem(1000, 7, 12, 128);
        let view = KvView { token_stride: 256, head_stride: 128, ..plain.k };
        let q = Tensor::dense(DType::BF16, null_mut(), &[1000, 12, 128]);
        let storage = KeyStorage::Contiguous { total: 2000 };
        Attention { q, k: view, v: view, keys: Keys { storage, ..plain.keys }, ..plain }
    }

    /// The same keys in an interleaved cache.
    pub(in crate::cuda::attention) fn paged(page_size: usize) -> Attention<'static> {
        let plain = ragged();
        let table = PageTable { entries: null(), stride: 0, max_pages: 64, num_pages: 50, page_size };
        let view = KvView { page_stride: 512 * page_size as i64, token_stride: 512, head_stride: 256, ..plain.k };
        Attention { k: view, v: view, keys: Keys { storage: KeyStorage::Paged(table), ..plain.keys }, ..plain }
    }

    fn first_kernel(problem: &Attention) -> &'static str {
        named_on(problem, &device(true))[0].0
    }

    #[test]
    fn calls_with_a_variant_take_the_kernel() {
        assert_eq!(first_kernel(&ragged()), "hopper_prefill_bf16_128_contiguous_none");
        assert_eq!(first_kernel(&paged(16)), "hopper_prefill_bf16_128_paged_none");
        let mut capped = paged(8);
        capped.score.softcap = 30.0;
        assert_eq!(first_kernel(&capped), "hopper_prefill_bf16_128_paged_softcap_alibi");
        assert_eq!(named_on(&ragged(), &device(false))[0].0, "attention_bf16_128_prefill_none");
        // The short sequences have a separate decode launch.
        assert_eq!(named_on(&ragged(), &device(true))[1].0, "attention_bf16_128_decode_8warps_none");
        let wide = Attention { out: Tensor { dtype: DType::F32, ..ragged().out }, ..ragged() };
        assert_eq!(first_kernel(&wide), "hopper_prefill_bf16_128_contiguous_none");
        let short = Attention { queries: Queries { longest: 1, ..ragged().queries }, ..ragged() };
        assert_eq!(first_kernel(&short), "attention_bf16_128_decode_8warps_none");
    }

    #[test]
    fn short_causal_sequences_take_short_tiles() {
        let tall = "hopper_prefill_bf16_64_contiguous_none";
        let short = "hopper_prefill_bf16_64_short_contiguous_none";
        let named = |head_dim: usize, rows: usize, window_right| {
            let plain = ragged();
            let q = Tensor::dense(DType::BF16, null_mut(), &[1000, 12, 64]);
            let mut problem = Attention { q, head_dim, value_dim: head_dim, num_rows: rows, ..plain };
            problem.score.window_right = window_right;
            first_kernel(&problem)
        };
        assert_eq!(named(64, 7 * 1024, 0), short);
        assert_eq!(named(64, 7 * 1024 + 1, 0), tall);
        assert_eq!(named(64, 7 * 1024, -1), tall);
        assert_eq!(named(128, 7 * 1024, 0), "hopper_prefill_bf16_128_contiguous_none");
    }

    #[test]
    fn e4m3fn_q_k_and_v_take_the_fp8_kernel() {
        let codes = |plain: Attention<'static>| {
            let q = Tensor::dense(DType::F8E4M3FN, null_mut(), &[1000, 12, 128]);
            let out = Tensor::dense(DType::BF16, null_mut(), &[1000, 12, 128]);
            Attention { q, kv_dtype: DType::F8E4M3FN, out, ..plain }
        };
        assert_eq!(first_kernel(&codes(ragged())), "hopper_prefill_fp8_128_contiguous_scaled");
        let mut capped = codes(paged(16));
        capped.score.softcap = 30.0;
        assert_eq!(first_kernel(&capped), "hopper_prefill_fp8_128_paged_softcap_alibi");
        let plain = codes(ragged());
        let q = Tensor { dtype: DType::BF16, ..plain.q };
        assert_eq!(first_kernel(&Attention { q, ..plain }), "attention_fp8_fp8_128_prefill_softcap_alibi");
        // Rows of 8-byte chunks.
        let view = KvView { token_stride: 264, ..plain.k };
        assert_eq!(first_kernel(&Attention { k: view, ..plain }), "attention_fp8_fp8_128_prefill_softcap_alibi");
        let misplaced = KvView { data: std::ptr::without_provenance_mut(8), ..plain.k };
        assert_eq!(first_kernel(&Attention { v: misplaced, ..plain }), "attention_fp8_fp8_128_prefill_softcap_alibi");
    }

    #[test]
    fn short_sequences_among_long_ones_take_prefill() {
        let names = |problem: &Attention| named_on(problem, &device(true));
        let all = [("hopper_prefill_bf16_128_contiguous_none", 1, i32::MAX)];
        let few = Attention { max_seqs: 3, ..ragged() };
        assert_eq!(names(&few), all);
        let pages = Attention { max_seqs: 3, ..paged(16) };
        assert_eq!(names(&pages), [("hopper_prefill_bf16_128_paged_none", 1, i32::MAX)]);
        let many_keys = KeyStorage::Contiguous { total: 2001 };
        for problem in [
            ragged(),
            Attention { max_seqs: 4, ..few },
            Attention { batch_invariant: true, ..few },
            Attention { keys: Keys { storage: many_keys, ..few.keys }, ..few },
            Attention { max_seqs: 3, ..paged(32) },
        ] {
            assert_eq!(names(&problem).len(), 2);
        }
    }

    #[test]
    fn unsupported_calls_take_the_portable_kernel() {
        let portable = "attention_bf16_128_prefill_none";
        let plain = ragged();
        let narrow = Attention { value_dim: 64, ..plain };
        let broadcast = Attention { k: KvView { token_stride: 0, ..plain.k }, ..plain };
        let empty = Attention { keys: Keys { storage: KeyStorage::Contiguous { total: 0 }, ..plain.keys }, ..plain };
        let values = 1.0f32;
        let scaled = Attention { v_scale: Some(Scale { values: &raw const values, per_head: true }), ..plain };
        for problem in [narrow, broadcast, empty, scaled] {
            assert_eq!(first_kernel(&problem), portable);
        }
        let head_dim = Attention { head_dim: 120, value_dim: 120, ..plain };
        assert_eq!(first_kernel(&head_dim), portable);
    }

    #[test]
    fn heads_are_packed_by_powers_of_two() {
        for (heads, pack_gqa, packs) in [(2, 1, 2), (8, 4, 2), (12, 2, 6), (14, 1, 14), (256, 64, 4)] {
            let plain = ragged();
            let q = Tensor { dims: &[1000, 256, 128], ..plain.q };
            let problem = Attention { q, num_q_heads: heads, ..plain };
            let prefill = HopperPrefill::of(&problem, &device(true)).expect("the kernel takes it");
            assert_eq!((prefill.pack_gqa, prefill.num_packs(&problem)), (pack_gqa, packs), "{heads} heads");
        }
    }

    #[test]
    fn boxes_are_within_one_page_and_one_block() {
        for (page_size, keys) in [(8, 8), (16, 16), (24, 8), (48, 16), (128, 128), (1024, 128)] {
            let problem = paged(page_size);
            let prefill = HopperPrefill::of(&problem, &device(true)).expect("the kernel takes it");
            assert_eq!(prefill.keys_per_box(&problem), keys, "pages of {page_size}");
        }
    }

    #[test]
    fn pages_that_tma_cannot_load_take_cp_async() {
        let mut odd_heads = paged(16);
        odd_heads.k.head_stride = 136;
        let broadcast = Attention { v: KvView { token_stride: 0, ..odd_heads.v }, ..paged(16) };
        for problem in [paged(1), paged(4), paged(12), paged(100), odd_heads, broadcast] {
            let prefill = HopperPrefill::of(&problem, &device(true)).expect("the kernel takes it");
            assert!(!prefill.loads_kv_by_tma(&problem));
        }
        for problem in [paged(8), paged(16), ragged()] {
            let prefill = HopperPrefill::of(&problem, &device(true)).expect("the kernel takes it");
            assert!(prefill.loads_kv_by_tma(&problem));
        }
    }

    #[test]
    fn chunk_indices_past_32_bits_take_the_portable_kernel() {
        let far = |page_stride, num_pages| {
            let KeyStorage::Paged(table) = paged(4).keys.storage else { unreachable!() };
            let storage = KeyStorage::Paged(PageTable { num_pages, ..table });
            let k = KvView { page_stride, ..paged(4).k };
            Attention { k, keys: Keys { storage, ..paged(4).keys }, ..paged(4) }
        };
        let is_taken = |problem| HopperPrefill::of(&problem, &device(true)).is_some();
        // The last row of a head begins 3 tokens after its last page.
        assert!(is_taken(far((8 << 32) - 8 - 3 * 512, 2)));
        assert!(!is_taken(far((8 << 32) - 3 * 512, 2)));
        assert!(!is_taken(far(i64::MAX - 7, 2)));
        assert!(is_taken(far(i64::MAX, 1)));
        assert!(!is_taken(far(2052, 50)));
        assert!(!is_taken(far(2048, 0)));
    }

    #[test]
    fn the_tile_counter_is_in_the_workspace_or_null() {
        let plain = ragged();
        let prefill = HopperPrefill::of(&plain, &device(true)).expect("the kernel takes it");
        for (start, bytes, expected) in [(1 << 20, 8, 1 << 20), ((1 << 20) + 1, 15, (1 << 20) + 8), (1 << 20, 7, 0)] {
            let dims = [bytes];
            let workspace = Some(Tensor::dense(DType::U8, start as *mut u8, &dims));
            let problem = Attention { workspace, ..plain };
            assert_eq!(prefill.next_tile(&problem, 100, &device(true)) as usize, expected);
            // Six packs: every CTA has one tile.
            assert!(prefill.next_tile(&problem, 22, &device(true)).is_null());
        }
    }

    #[test]
    fn head_dimensions_may_differ() {
        let plain = paged(16);
        let k = KvView { page_stride: 384 * 16, token_stride: 384, head_stride: 192, ..plain.k };
        let v = KvView { page_stride: 256 * 16, token_stride: 256, head_stride: 128, ..plain.k };
        let q = Tensor::dense(DType::BF16, null_mut(), &[1000, 12, 192]);
        let mut latent = Attention { q, k, v, head_dim: 192, ..plain };
        assert_eq!(first_kernel(&latent), "hopper_prefill_bf16_192x128_paged_none");
        latent.score.softcap = 30.0;
        assert_eq!(first_kernel(&latent), "attention_bf16_192_prefill_softcap_alibi");
    }
}
