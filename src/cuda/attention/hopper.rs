//! Prefill on Hopper: which calls its kernels take, and with what parameter.

mod page_divisor;
mod tiles;

use super::split::room;
use super::{Call, Launch, Launches, Parameter, UNLIMITED, decode, most_tiles};
use crate::cuda::device::Device;
use crate::cuda::kernel::NEXT_TILE_BYTES;
use crate::cuda::launch::Shape;
use crate::cuda::params::attention::AttentionParams;
use crate::cuda::params::hopper_prefill::{HopperPrefillParams, PageDivisor};
use crate::cuda::tensor_map::{Axis, TensorMap, can_copy};
use crate::cuda::tiles::HOPPER_PREFILL;
use crate::cuda::variants;
use crate::error::Result;
use crate::problem::KvView;
use crate::problem::attention::{Attention, KeyStorage};
use crate::tensor::Tensor;
use std::ptr::null_mut;
use tiles::Tile;

const KERNEL: &str = "hopper_prefill";
const FP8_KERNEL: &str = "hopper_prefill_fp8";

/// Elements of 16 bytes, which a lane copies at a time.
const CHUNK: i64 = 8;

/// Tokens that a box of a page has in each of its groups.
const OCTET: i64 = 8;

/// Rows of a warp, which leave together.
const WARP_ROWS: i64 = 16;

/// How the kernel takes a problem that it can take.
#[derive(Clone, Copy)]
pub(super) struct Prefill {
    pub(super) tile: &'static Tile,
    /// Query heads whose rows are packed into tiles: the largest power of two that divides Hq / Hkv, at most 64.
    pub(super) pack: i64,
    /// Packs of a KV head.
    packs_per_kv_head: i64,
}

/// Query rows a sequence slot up to which causal sequences are better off with short tiles: those end sooner after the
/// diagonal (D 64, 1k: 299 TFLOP/s instead of 280; 4k: 432 instead of 466; without a mask 410 instead of 437).
const SHORT_ON_AVERAGE: i64 = 1024;

/// Query rows a sequence slot from which on prefill takes short sequences too.
const LONG_ON_AVERAGE: i64 = 256;

/// Takes every sequence of a call whose sequences are nearly all long.
pub(super) fn launches_for_all<'c>(call: &Call<'c>) -> Result<Option<Launches<'c>>> {
    let Some(prefill) = takes_all(call.problem).then(|| Prefill::of(call.problem, &call.device)).flatten() else {
        return Ok(None);
    };
    let tiles = most_tiles(call.rows() * prefill.pack, prefill.tile.rows(), call.seqs().min(call.rows()));
    let params = AttentionParams { clears_padding_rows: 1, ..call.params_for(1, UNLIMITED) };
    let list = vec![prefill.launch(call, tiles, &params)?];
    Ok(Some(Launches { list, store_new_tokens: false }))
}

/// Takes the long sequences, beside the launches of decode for the others.
pub(super) fn launches<'c>(call: &Call<'c>) -> Result<Option<Launches<'c>>> {
    let Some(prefill) = Prefill::of(call.problem, &call.device) else { return Ok(None) };
    let tiles = most_tiles(call.rows() * prefill.pack, prefill.tile.rows(), call.long_sequences());
    decode::beside(call, |params| prefill.launch(call, tiles, params)).map(Some)
}

/// Prefill takes the short sequences too, which saves the launches that decode. Where packed keys are hardly more than
/// the rows and sequences are long on average, short ones are few and so are their keys; kept whole in tiles that they
/// hardly fill, they take no longer than the others. Likewise where the page table has no room for many more keys than a
/// sequence has rows on average.
fn takes_all(problem: &Attention) -> bool {
    let (rows, seqs) = (problem.num_rows as i64, problem.max_seqs as i64);
    let keys_are_few = match problem.keys.storage {
        KeyStorage::Contiguous { total } => total as i64 <= 2 * rows,
        KeyStorage::Paged(table) => (table.capacity() as i64).saturating_mul(seqs) <= 4 * rows,
    };
    !problem.batch_invariant && rows >= LONG_ON_AVERAGE * seqs && keys_are_few
}

impl Prefill {
    /// `None` where the portable kernel has to do it.
    pub(super) fn of(problem: &Attention, device: &Device) -> Option<Self> {
        let (rows, seqs) = (problem.num_rows as i64, problem.max_seqs as i64);
        let is_short = problem.score.window_right >= 0 && rows <= SHORT_ON_AVERAGE * seqs;
        let mut tiles = HOPPER_PREFILL.iter().filter(|tile| tile.serves(problem));
        let tile = tiles.clone().find(|tile| tile.is_short == is_short).or_else(|| tiles.next())?;
        let group = (problem.num_q_heads / problem.num_kv_heads) as i64;
        let pack = (group & -group).min(64);
        let prefill = Self { tile, pack, packs_per_kv_head: group / pack };
        // The kernel finds the output's factor by pack.
        let scales_values_by_head = problem.v_scale.is_some_and(|scale| scale.per_head);
        let fits = device.has_tensor_maps
            && (group == pack || !scales_values_by_head)
            && can_copy(problem.q.dtype, problem.q.data, &prefill.query_axes(problem))
            && (prefill.has_key_boxes(problem) || (!prefill.is_fp8() && has_key_rows(problem)));
        fits.then_some(prefill)
    }

    /// The launch for sequences of `tiles` tiles per KV head at most, with the portable kernel's parameter for them.
    fn launch<'c>(&self, call: &Call<'c>, tiles: i64, attention: &AttentionParams) -> Result<Launch<'c>> {
        let Call { problem, device, .. } = call;
        let next_tile = self.next_tile(problem, tiles, device);
        let kernel = if self.is_fp8() { FP8_KERNEL } else { KERNEL };
        let parameter =
            Parameter::Prefill(PrefillParameter { prefill: *self, problem, attention: *attention, next_tile });
        let launch = Launch::new(kernel, self.variant(problem)?, self.shape(problem, tiles, device), parameter);
        Ok(Launch { next_tile, ..launch })
    }

    /// The kernel: its index in the table of variants.
    fn variant(&self, problem: &Attention) -> Result<usize> {
        let storage = match problem.keys.storage {
            KeyStorage::Contiguous { .. } => "contiguous",
            KeyStorage::Paged(_) => "paged",
        };
        let Tile { head_dim, logits, .. } = self.tile;
        if self.is_fp8() {
            return variants::find(FP8_KERNEL, &[head_dim, storage, logits]);
        }
        variants::find(KERNEL, &[variants::dtype_value(problem.q.dtype), head_dim, storage, logits])
    }

    fn is_fp8(&self) -> bool {
        self.tile.bytes == 1
    }

    /// A CTA for each SM, fewer where there are fewer tiles; `tiles` is for each KV head.
    fn shape(&self, problem: &Attention, tiles: i64, device: &Device) -> Shape {
        let all = tiles.max(1) * self.packs(problem);
        let ctas = all.min(i64::from(device.sms)) as u32;
        Shape { grid: [ctas, 1, 1], threads: self.tile.threads(), shared_memory: self.tile.shared_bytes }
    }

    /// Packs of all KV heads.
    fn packs(&self, problem: &Attention) -> i64 {
        problem.num_kv_heads as i64 * self.packs_per_kv_head
    }

    /// The place in the caller's workspace of the dynamic scheduler's tile index; null where there is no room or no CTA
    /// takes a second tile.
    fn next_tile(&self, problem: &Attention, tiles: i64, device: &Device) -> *mut u8 {
        let is_wanted = tiles * self.packs(problem) > i64::from(device.sms);
        if is_wanted { next_tile_place(problem) } else { null_mut() }
    }

    /// K or V with `dim` columns a head, in boxes of `keys` keys.
    pub(super) fn key_map(&self, problem: &Attention, view: &KvView, dim: u32, keys: i64) -> Result<TensorMap> {
        TensorMap::new(problem.kv_dtype, view.data, &self.key_axes(problem, view, dim, keys))
    }

    /// Keys of a box: those of a block, of pages a power of two of octets that divides page and block, so that a box lies
    /// in one page and in one block.
    fn keys_in_box(&self, problem: &Attention) -> i64 {
        let block = i64::from(self.tile.keys);
        let KeyStorage::Paged(table) = problem.keys.storage else { return block };
        let both = (table.page_size as i64 | block) / OCTET;
        OCTET * (both & -both)
    }

    fn query_axes(&self, problem: &Attention) -> [Axis; 4] {
        self.row_axes(problem, &problem.q, self.tile.dim, self.tile.rows())
    }

    fn out_axes(&self, problem: &Attention) -> [Axis; 4] {
        self.row_axes(problem, &problem.out, self.tile.value_dim, WARP_ROWS)
    }

    /// `[panel, token, head, column]`, the innermost first: a box is `rows` packed rows of q or out.
    fn row_axes(&self, problem: &Attention, tensor: &Tensor, dim: u32, rows: i64) -> [Axis; 4] {
        let columns = self.tile.panel(tensor.dtype.size());
        let panels = i64::from(dim) / columns;
        [
            Axis { len: columns, stride: 1, in_box: columns },
            axis(problem.num_q_heads as i64, tensor.stride(1), self.pack),
            axis(problem.num_rows as i64, tensor.stride(0), rows / self.pack),
            axis(panels, columns, panels),
        ]
    }

    /// Of K or V with `dim` columns a head. Contiguous `[1, head, panel, token, column]`, paged
    /// `[page, octet, panel of all heads, token of the octet, column]`. A box is `keys` keys of a head.
    fn key_axes(&self, problem: &Attention, view: &KvView, dim: u32, keys: i64) -> [Axis; 5] {
        let (heads, columns) = (problem.num_kv_heads as i64, self.tile.key_panel());
        let panels = i64::from(dim) / columns;
        let element = Axis { len: columns, stride: 1, in_box: columns };
        match problem.keys.storage {
            KeyStorage::Contiguous { total } => [
                element,
                axis(total as i64, view.token_stride, keys),
                axis(panels, columns, panels),
                axis(heads, view.head_stride, 1),
                axis(1, 0, 1),
            ],
            KeyStorage::Paged(table) => {
                let all_panels = (heads - 1) * step(problem.num_kv_heads, view.head_stride) / columns + panels;
                let (octets, pages) = (table.page_size as i64 / OCTET, table.num_pages as i64);
                [
                    element,
                    axis(OCTET, view.token_stride, OCTET),
                    axis(all_panels, columns, panels),
                    axis(octets, OCTET * view.token_stride, keys / OCTET),
                    axis(pages, view.page_stride, 1),
                ]
            }
        }
    }

    /// Whether boxes fetch K and V: pages are whole octets of tokens, and heads lie at multiples of a panel. Rows of
    /// other pages are fetched one by one.
    pub(super) fn has_key_boxes(&self, problem: &Attention) -> bool {
        let (panel, keys) = (self.tile.key_panel(), self.keys_in_box(problem));
        [(&problem.k, self.tile.dim), (&problem.v, self.tile.value_dim)].into_iter().all(|(view, dim)| {
            let is_regular = match problem.keys.storage {
                KeyStorage::Contiguous { .. } => true,
                KeyStorage::Paged(table) => {
                    let step = step(problem.num_kv_heads, view.head_stride);
                    table.page_size as i64 % OCTET == 0
                        && step % panel == 0
                        && step / panel * (problem.num_kv_heads as i64) < i64::from(i32::MAX)
                }
            };
            is_regular && can_copy(problem.kv_dtype, view.data, &self.key_axes(problem, view, dim, keys))
        })
    }
}

/// What the kernel's parameter is made of.
pub(super) struct PrefillParameter<'c> {
    pub(super) prefill: Prefill,
    pub(super) problem: &'c Attention<'c>,
    /// The portable kernel's parameter for the same sequences.
    pub(super) attention: AttentionParams,
    /// The place of the dynamic scheduler's tile index, or null.
    pub(super) next_tile: *mut u8,
}

impl PrefillParameter<'_> {
    pub(super) fn params(&self) -> Result<HopperPrefillParams> {
        let Self { prefill, problem, attention, next_tile } = self;
        let score = &problem.score;
        let [head_dim, value_dim] = [prefill.tile.dim, prefill.tile.value_dim];
        let rows = |tensor: &Tensor, axes: &[Axis]| TensorMap::new(tensor.dtype, tensor.data, axes);
        let has_boxes = prefill.has_key_boxes(problem);
        let is_paged = matches!(problem.keys.storage, KeyStorage::Paged(_));
        let keys = |view: &KvView, dim| {
            if has_boxes {
                prefill.key_map(problem, view, dim, prefill.keys_in_box(problem))
            } else {
                Ok(TensorMap::NONE)
            }
        };
        let head_panels =
            |view: &KvView| (step(problem.num_kv_heads, view.head_stride) / prefill.tile.key_panel()) as i32;
        // A pack of more heads than a warp has rows leaves row by row.
        let out_axes = prefill.out_axes(problem);
        let stores_by_tma = prefill.pack <= WARP_ROWS && can_copy(problem.out.dtype, problem.out.data, &out_axes);
        Ok(HopperPrefillParams {
            attention: attention.with_packs(prefill.pack, prefill.packs(problem)),
            q: rows(&problem.q, &prefill.query_axes(problem))?,
            k: keys(&problem.k, head_dim)?,
            v: keys(&problem.v, value_dim)?,
            out: if stores_by_tma { rows(&problem.out, &out_axes)? } else { TensorMap::NONE },
            next_tile: next_tile.cast(),
            is_causal: i32::from(score.window_left < 0 && score.window_right >= 0),
            packs_per_kv_head: prefill.packs_per_kv_head as i32,
            box_row_groups: if has_boxes && is_paged { (prefill.keys_in_box(problem) / OCTET) as i32 } else { 0 },
            k_head_atom_columns: head_panels(&problem.k),
            v_head_atom_columns: head_panels(&problem.v),
            group_log2: prefill.pack.trailing_zeros() as i32,
            stores_by_tma: i32::from(stores_by_tma),
            page_divisor: PageDivisor::of(&problem.keys.storage),
        })
    }
}

/// The place of the dynamic scheduler's tile index, if the workspace has room for it; null otherwise.
pub(super) fn next_tile_place(problem: &Attention) -> *mut u8 {
    room(problem, 0, NEXT_TILE_BYTES)
        .filter(|(_, bytes)| *bytes >= NEXT_TILE_BYTES)
        .map_or(null_mut(), |(place, _)| place)
}

/// Whether K and V can be fetched row by row: rows are whole chunks, of which 32 bits are enough to number a head's.
fn has_key_rows(problem: &Attention) -> bool {
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

/// Elements from one to the next, where there is a next one.
fn step(count: usize, stride: i64) -> i64 {
    if count > 1 { stride } else { 0 }
}

/// An axis; the stride of one that ends with its first element may be anything, and must be something.
fn axis(len: i64, stride: i64, in_box: i64) -> Axis {
    Axis { len, stride: if len > 1 { stride } else { 128 }, in_box }
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

    fn prefilled_by(problem: &Attention) -> &'static str {
        named_on(problem, &device(true))[0].0
    }

    #[test]
    fn the_kernel_prefills_what_it_is_built_for() {
        assert_eq!(prefilled_by(&ragged()), "hopper_prefill_bf16_128_contiguous_none");
        assert_eq!(prefilled_by(&paged(16)), "hopper_prefill_bf16_128_paged_none");
        let mut capped = paged(8);
        capped.score.softcap = 30.0;
        assert_eq!(prefilled_by(&capped), "hopper_prefill_bf16_128_paged_softcap_alibi");
        assert_eq!(named_on(&ragged(), &device(false))[0].0, "attention_bf16_128_prefill_none");
        // Who decodes is another matter.
        assert_eq!(named_on(&ragged(), &device(true))[1].0, "attention_bf16_128_decode_8warps_none");
        let short = Attention { queries: Queries { longest: 1, ..ragged().queries }, ..ragged() };
        assert_eq!(prefilled_by(&short), "attention_bf16_128_decode_8warps_none");
    }

    #[test]
    fn short_causal_sequences_have_tiles_of_their_own() {
        let tall = "hopper_prefill_bf16_64_contiguous_none";
        let short = "hopper_prefill_bf16_64_short_contiguous_none";
        let named = |head_dim: usize, rows: usize, window_right| {
            let plain = ragged();
            let q = Tensor::dense(DType::BF16, null_mut(), &[1000, 12, 64]);
            let mut problem = Attention { q, head_dim, value_dim: head_dim, num_rows: rows, ..plain };
            problem.score.window_right = window_right;
            prefilled_by(&problem)
        };
        assert_eq!(named(64, 7 * 1024, 0), short);
        assert_eq!(named(64, 7 * 1024 + 1, 0), tall);
        assert_eq!(named(64, 7 * 1024, -1), tall);
        assert_eq!(named(128, 7 * 1024, 0), "hopper_prefill_bf16_128_contiguous_none");
    }

    #[test]
    fn fp8_is_multiplied_as_it_is_where_all_of_it_is_e4m3fn() {
        let codes = |plain: Attention<'static>| {
            let q = Tensor::dense(DType::F8E4M3FN, null_mut(), &[1000, 12, 128]);
            let out = Tensor::dense(DType::BF16, null_mut(), &[1000, 12, 128]);
            Attention { q, kv_dtype: DType::F8E4M3FN, out, ..plain }
        };
        assert_eq!(prefilled_by(&codes(ragged())), "hopper_prefill_fp8_128_contiguous_scaled");
        let mut capped = codes(paged(16));
        capped.score.softcap = 30.0;
        assert_eq!(prefilled_by(&capped), "hopper_prefill_fp8_128_paged_softcap_alibi");
        let plain = codes(ragged());
        let q = Tensor { dtype: DType::BF16, ..plain.q };
        assert_eq!(prefilled_by(&Attention { q, ..plain }), "attention_fp8_fp8_128_prefill_softcap_alibi");
        // Rows of 8-byte chunks.
        let view = KvView { token_stride: 264, ..plain.k };
        assert_eq!(prefilled_by(&Attention { k: view, ..plain }), "attention_fp8_fp8_128_prefill_softcap_alibi");
        let misplaced = KvView { data: std::ptr::without_provenance_mut(8), ..plain.k };
        assert_eq!(prefilled_by(&Attention { v: misplaced, ..plain }), "attention_fp8_fp8_128_prefill_softcap_alibi");
    }

    #[test]
    fn short_sequences_among_long_ones_are_prefilled() {
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
    fn what_boxes_cannot_fetch_is_left_to_the_portable_kernel() {
        let portable = "attention_bf16_128_prefill_none";
        let plain = ragged();
        let narrow = Attention { value_dim: 64, ..plain };
        let broadcast = Attention { k: KvView { token_stride: 0, ..plain.k }, ..plain };
        let empty = Attention { keys: Keys { storage: KeyStorage::Contiguous { total: 0 }, ..plain.keys }, ..plain };
        let values = 1.0f32;
        let scaled = Attention { v_scale: Some(Scale { values: &raw const values, per_head: true }), ..plain };
        for problem in [narrow, broadcast, empty, scaled] {
            assert_eq!(prefilled_by(&problem), portable);
        }
        let head_dim = Attention { head_dim: 120, value_dim: 120, ..plain };
        assert_eq!(prefilled_by(&head_dim), portable);
    }

    #[test]
    fn heads_are_packed_by_powers_of_two() {
        for (heads, pack, packs) in [(2, 1, 2), (8, 4, 2), (12, 2, 6), (14, 1, 14), (256, 64, 4)] {
            let plain = ragged();
            let q = Tensor { dims: &[1000, 256, 128], ..plain.q };
            let problem = Attention { q, num_q_heads: heads, ..plain };
            let prefill = Prefill::of(&problem, &device(true)).expect("the kernel takes it");
            assert_eq!((prefill.pack, prefill.packs(&problem)), (pack, packs), "{heads} heads");
        }
    }

    #[test]
    fn boxes_lie_in_one_page_and_one_block() {
        for (page_size, keys) in [(8, 8), (16, 16), (24, 8), (48, 16), (128, 128), (1024, 128)] {
            let problem = paged(page_size);
            let prefill = Prefill::of(&problem, &device(true)).expect("the kernel takes it");
            assert_eq!(prefill.keys_in_box(&problem), keys, "pages of {page_size}");
        }
    }

    #[test]
    fn rows_of_pages_that_are_no_boxes_are_fetched_one_by_one() {
        let mut odd_heads = paged(16);
        odd_heads.k.head_stride = 136;
        let broadcast = Attention { v: KvView { token_stride: 0, ..odd_heads.v }, ..paged(16) };
        for problem in [paged(1), paged(4), paged(12), paged(100), odd_heads, broadcast] {
            let prefill = Prefill::of(&problem, &device(true)).expect("the kernel takes it");
            assert!(!prefill.has_key_boxes(&problem));
        }
        for problem in [paged(8), paged(16), ragged()] {
            let prefill = Prefill::of(&problem, &device(true)).expect("the kernel takes it");
            assert!(prefill.has_key_boxes(&problem));
        }
    }

    #[test]
    fn rows_that_32_bits_cannot_number_are_left_to_the_portable_kernel() {
        let far = |page_stride, num_pages| {
            let KeyStorage::Paged(table) = paged(4).keys.storage else { unreachable!() };
            let storage = KeyStorage::Paged(PageTable { num_pages, ..table });
            let k = KvView { page_stride, ..paged(4).k };
            Attention { k, keys: Keys { storage, ..paged(4).keys }, ..paged(4) }
        };
        let is_taken = |problem| Prefill::of(&problem, &device(true)).is_some();
        // The last row of a head begins 3 tokens after its last page.
        assert!(is_taken(far((8 << 32) - 8 - 3 * 512, 2)));
        assert!(!is_taken(far((8 << 32) - 3 * 512, 2)));
        assert!(!is_taken(far(i64::MAX - 7, 2)));
        assert!(is_taken(far(i64::MAX, 1)));
        assert!(!is_taken(far(2052, 50)));
        assert!(!is_taken(far(2048, 0)));
    }

    #[test]
    fn the_tile_index_lies_in_the_workspace_or_nowhere() {
        let plain = ragged();
        let prefill = Prefill::of(&plain, &device(true)).expect("the kernel takes it");
        for (start, bytes, wanted) in [(1 << 20, 8, 1 << 20), ((1 << 20) + 1, 15, (1 << 20) + 8), (1 << 20, 7, 0)] {
            let dims = [bytes];
            let workspace = Some(Tensor::dense(DType::U8, start as *mut u8, &dims));
            let problem = Attention { workspace, ..plain };
            assert_eq!(prefill.next_tile(&problem, 100, &device(true)) as usize, wanted);
            // Two heads, six packs: each CTA has a tile of its own.
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
        assert_eq!(prefilled_by(&latent), "hopper_prefill_bf16_192x128_paged_none");
        latent.score.softcap = 30.0;
        assert_eq!(prefilled_by(&latent), "attention_bf16_192_prefill_softcap_alibi");
    }
}
