//! The parameter of the attention kernels, built from the problem, and the limits that the kernels put on a call.

use super::tiles::converts_fp8;
use crate::cuda::device::Device;
use crate::cuda::params::attention::{
    AttentionParams, KvSource, NewRowSource, NewTokens, PartialResults, QueryType, ScaleSource,
};
use crate::cuda::params::divisor::IndexDivisor;
use crate::cuda::params::slots::SlotMapping;
use crate::error::{Error, Result, ensure};
use crate::problem::attention::{Attention, KeyStorage, LARGEST_Q_OFFSET};
use crate::problem::kv_cache_update::KvCacheUpdate;
use crate::problem::{KvView, Scale};
use crate::tensor::{DType, Tensor};
use std::f32::consts::LOG2_E;
use std::ptr::null;

/// Positions of keys are 32-bit numbers, and adding a block's size to one must not overflow.
const LONGEST_CONTEXT: usize = i32::MAX as usize - 256;

/// `divide_small` of `kernels/include/work_tile.cuh` is exact below 2^20, and it divides up to `Hq / Hkv` plus the rows of a
/// tile.
const LARGEST_GROUP: i64 = 1 << 19;

/// The page size that stands for contiguous keys: longer than any context, and a multiple of every kernel's blocks.
const ENDLESS_PAGE: i32 = 1 << 30;

const _: () = assert!(crate::cuda::params::attention::LARGEST_Q_OFFSET == LARGEST_Q_OFFSET);

impl AttentionParams {
    /// The parameter, without what differs between launches.
    pub(in crate::cuda) fn new(problem: &Attention, device: &Device) -> Result<Self> {
        check_sizes(problem)?;
        check_alignments(problem)?;
        let divisor = decoded_divisor(problem, device);
        // Decoding fp8 has divided q and K by this.
        let products_divisor = if problem.q.dtype.size() == 1 { divisor * divisor } else { divisor };
        let (queries, keys, score) = (&problem.queries, &problem.keys, &problem.score);
        let group = (problem.num_q_heads / problem.num_kv_heads) as i32;
        let (block_table, block_table_stride, num_pages, page_size) = match keys.storage {
            KeyStorage::Contiguous { .. } => (null(), 0, 1, ENDLESS_PAGE),
            KeyStorage::Paged(table) => {
                let page_size = table.page_size.clamp(1, i32::MAX as usize) as i32;
                (table.entries, table.stride, table.num_pages as i32, page_size)
            }
        };
        let softmax_scale_log2 = score.softmax_scale * LOG2_E;
        Ok(Self {
            q: problem.q.data.cast(),
            q_token_stride: problem.q.stride(0),
            q_head_stride: problem.q.stride(1),
            out: problem.out.data.cast(),
            out_token_stride: problem.out.stride(0),
            out_head_stride: problem.out.stride(1),
            lse: problem.lse.unwrap_or(std::ptr::null_mut()),
            k: KvSource::new(&problem.k),
            v: KvSource::new(&problem.v),
            block_table,
            block_table_stride,
            cu_seqlens_q: queries.starts,
            seqused_q: queries.used.unwrap_or(null()),
            cu_seqlens_k: keys.starts.unwrap_or(null()),
            seqused_k: keys.used.unwrap_or(null()),
            leftpad_k: keys.leftpad.unwrap_or(null()),
            q_offset: queries.offset.unwrap_or(null()),
            num_seqs: queries.num_seqs.unwrap_or(null()),
            alibi_slopes: score.alibi.map_or(null(), |alibi| alibi.slopes),
            alibi_stride: score.alibi.map_or(0, |a| if a.per_sequence { problem.num_q_heads as i64 } else { 0 }),
            sinks: score.sinks.unwrap_or(null()),
            q_scale: ScaleSource::new(score.q_scale),
            k_scale: ScaleSource::new(score.k_scale),
            v_scale: ScaleSource::new(problem.v_scale),
            value_factor: divisor,
            softmax_scale_log2,
            softcap_log2: score.softcap * LOG2_E,
            score_factor: products_divisor
                * if score.softcap > 0.0 { score.softmax_scale / score.softcap } else { softmax_scale_log2 },
            num_tokens: problem.num_rows as i32,
            max_seqs: problem.max_seqs as i32,
            num_pages,
            page_size,
            capacity: keys.storage.capacity().1 as i32,
            num_kv_heads: problem.num_kv_heads as i32,
            group,
            group_reciprocal: 1.0 / group as f32,
            tile_queries: IndexDivisor::of(1),
            head_dim: problem.head_dim as i32,
            value_dim: problem.value_dim as i32,
            window_left: window(score.window_left),
            window_right: window(score.window_right),
            top_left: i32::from(score.top_left),
            min_queries: 1,
            max_queries: i32::MAX,
            clears_padding_rows: 0,
            q_type: query_type(problem.q.dtype),
            kv_is_e5m2: i32::from(problem.kv_dtype == DType::F8E5M2),
            out_is_bf16: i32::from(problem.out.dtype == DType::BF16),
            widens_out: i32::from(problem.out.dtype == DType::F32 && problem.q.dtype != DType::F32),
            has_narrow_rows: i32::from(!has_wide_rows(problem)),
            partial: PartialResults::NONE,
            new_tokens: NewTokens::NONE,
        })
    }

    /// The same with `packs` groups of `pack` query heads in place of the KV heads and their groups, in tiles of `tile_queries`.
    pub(in crate::cuda) fn with_packs(&self, pack: i64, packs: i64, tile_queries: i64) -> Self {
        Self {
            num_kv_heads: packs as i32,
            group: pack as i32,
            group_reciprocal: 1.0 / pack as f32,
            tile_queries: IndexDivisor::of(tile_queries as u64),
            ..*self
        }
    }
}

impl NewTokens {
    /// The cache already has all keys.
    pub(super) const NONE: Self = {
        let rows = NewRowSource { base: null(), token_stride: 0, head_stride: 0 };
        Self { key: rows, value: rows, slots: SlotMapping::NONE }
    };

    /// The rows of an update, if decode can store them: they go into the cache unchanged, and vectors of 16 bytes fit.
    pub(super) fn of(update: &KvCacheUpdate) -> Option<Self> {
        let can_copy = [&update.key, &update.value].iter().all(|new| {
            let rows = &new.rows;
            let is_same = rows.dtype == update.cache_dtype && new.scale.is_none();
            is_same && is_aligned(rows.data, &row_steps(rows), rows.dtype.size(), 16)
        });
        let source = |rows: &Tensor| NewRowSource {
            base: rows.data.cast(),
            token_stride: rows.stride(0),
            head_stride: rows.stride(1),
        };
        can_copy.then(|| Self {
            key: source(&update.key.rows),
            value: source(&update.value.rows),
            slots: SlotMapping::new(update),
        })
    }
}

impl KvSource {
    pub(super) fn new(view: &KvView) -> Self {
        Self {
            base: view.data.cast(),
            page_stride: view.page_stride,
            token_stride: view.token_stride,
            head_stride: view.head_stride,
        }
    }
}

impl ScaleSource {
    fn new(scale: Option<Scale>) -> Self {
        scale.map_or(Self { values: null(), head_stride: 0 }, |scale| Self {
            values: scale.values,
            head_stride: i64::from(scale.per_head),
        })
    }
}

/// The number by which the kernels for 8-bit keys divide when they decode (`kernels/include/fp8.cuh`).
fn decoded_divisor(problem: &Attention, device: &Device) -> f32 {
    if problem.kv_dtype == DType::F8E4M3FN && !converts_fp8(device) { 256.0 } else { 1.0 }
}

fn query_type(dtype: DType) -> QueryType {
    match dtype {
        DType::BF16 => QueryType::Bf16,
        DType::F8E4M3FN => QueryType::Fp8,
        _ => QueryType::F16,
    }
}

/// A window that 32 bits cannot hold is no window, because distances between keys and queries fit 32 bits.
fn window(keys: i64) -> i32 {
    i32::try_from(keys).ok().filter(|keys| *keys < i32::MAX).unwrap_or(-1)
}

fn check_sizes(problem: &Attention) -> Result {
    let group = (problem.num_q_heads / problem.num_kv_heads) as i64;
    ensure_fits("Hq / Hkv", group, LARGEST_GROUP)?;
    ensure_fits("Tq * Hq / Hkv", problem.num_rows as i64 * group, i64::from(i32::MAX) - 256)?;
    let (keys, capacity) = problem.keys.storage.capacity();
    ensure_fits(keys, capacity as i64, LONGEST_CONTEXT as i64)
}

fn ensure_fits(name: &str, size: i64, limit: i64) -> Result {
    if size < limit {
        return Ok(());
    }
    Err(Error::unimplemented(format!("{name} is {size}; the CUDA kernels count to {limit}")))
}

/// The kernels load 16 bytes at a time, or 8 of fp8 rows that are not aligned to 16.
fn check_alignments(problem: &Attention) -> Result {
    check_rows("q", &problem.q)?;
    check_rows("out", &problem.out)?;
    for (name, view) in [("K", &problem.k), ("V", &problem.v)] {
        check_alignment(name, view.data, &view_steps(problem, view), problem.kv_dtype.size())?;
    }
    Ok(())
}

/// Checks the alignment of rows `[T, H, D]`.
pub(in crate::cuda) fn check_rows(name: &str, rows: &Tensor) -> Result {
    check_alignment(name, rows.data, &row_steps(rows), rows.dtype.size())
}

/// Checks the alignment of a dense tensor whose rows may begin at any element.
pub(in crate::cuda) fn check_dense(name: &str, data: *const u8, element_bytes: usize) -> Result {
    check_alignment(name, data, &[], element_bytes)
}

/// Whether rows of K and V are multiples of 16 bytes and aligned to 16 bytes.
pub(super) fn has_wide_rows(problem: &Attention) -> bool {
    let bytes = problem.kv_dtype.size();
    [(&problem.k, problem.head_dim), (&problem.v, problem.value_dim)].into_iter().all(|(view, dim)| {
        let [pages, tokens, heads] = view_steps(problem, view);
        is_aligned(view.data, &[pages, tokens, heads, dim as i64], bytes, 16)
    })
}

/// Strides of rows and heads of `[T, H, D]`; 0 for axes of length 1, whose stride may be anything.
fn row_steps(tensor: &Tensor) -> [i64; 2] {
    [0, 1].map(|axis| if tensor.dims[axis] > 1 { tensor.stride(axis) } else { 0 })
}

/// Likewise of pages, tokens and heads.
fn view_steps(problem: &Attention, view: &KvView) -> [i64; 3] {
    let (pages, tokens) = match problem.keys.storage {
        KeyStorage::Contiguous { total } => (1, total),
        KeyStorage::Paged(table) => (table.num_pages, table.page_size),
    };
    let counts = [pages, tokens, problem.num_kv_heads];
    let strides = [view.page_stride, view.token_stride, view.head_stride];
    [0, 1, 2].map(|axis| if counts[axis] > 1 { strides[axis] } else { 0 })
}

fn is_aligned(data: *const u8, steps: &[i64], element_bytes: usize, alignment: i64) -> bool {
    data as i64 % alignment == 0 && steps.iter().all(|step| step * element_bytes as i64 % alignment == 0)
}

/// Checks that rows at `data`, with strides of `steps` elements, are aligned to the kernels' loads.
fn check_alignment(name: &str, data: *const u8, steps: &[i64], element_bytes: usize) -> Result {
    let alignment = if element_bytes == 1 { 8 } else { 16 };
    ensure(is_aligned(data, steps, element_bytes, alignment), || {
        format!(
            "{name} lies at {data:p} with steps of {steps:?} elements of {element_bytes} bytes, expected multiples of \
             {alignment} bytes for both"
        )
    })
}

#[cfg(test)]
mod tests {
    use super::super::tests::{device, problem};
    use super::*;
    use crate::problem::attention::{Keys, PageTable, Score};

    fn params(problem: &Attention) -> Result<AttentionParams> {
        AttentionParams::new(problem, &device(true))
    }

    #[test]
    fn factors_undo_what_decoding_divides_by() {
        let plain = problem(1, 1, 2, 64);
        let plain = Attention { q: Tensor { dtype: DType::F8E4M3FN, ..plain.q }, kv_dtype: DType::F8E4M3FN, ..plain };
        let factors = |capability| {
            let params = AttentionParams::new(&plain, &Device { capability, ..device(true) }).expect("it is right");
            (params.score_factor / LOG2_E, params.value_factor)
        };
        assert_eq!((factors(90), factors(86)), ((1.0, 1.0), (65536.0, 256.0)));
    }

    #[test]
    fn sizes_past_the_kernels_counters_are_refused_not_wrapped() {
        let plain = problem(1, 1, 2, 64);
        let num_ranges = Attention { num_q_heads: 1 << 20, ..plain };
        assert!(params(&num_ranges).is_err_and(|e| e.message.contains("Hq / Hkv is 524288")));
        assert!(params(&Attention { num_q_heads: (1 << 20) - 2, ..plain }).is_ok());
        let table = PageTable { entries: null(), stride: 0, max_pages: 1 << 27, num_pages: 1, page_size: 16 };
        let paged = Attention { keys: Keys { storage: KeyStorage::Paged(table), ..plain.keys }, ..plain };
        assert!(params(&paged).is_err_and(|e| e.message.contains("max_pages * page_size")));
        let total = i32::MAX as usize - 256;
        let long = Attention { keys: Keys { storage: KeyStorage::Contiguous { total }, ..plain.keys }, ..plain };
        assert!(params(&long).is_err_and(|e| e.message.contains("Tk")));
        let wide = Attention { score: Score { window_left: i64::MAX, window_right: 7, ..plain.score }, ..plain };
        assert_eq!(params(&wide).map(|p| (p.window_left, p.window_right)), Ok((-1, 7)));
    }

    #[test]
    fn rows_that_the_kernels_cannot_copy_are_refused() {
        let plain = problem(2, 1, 4, 64);
        let view = |token_stride| KvView { token_stride, ..plain.k };
        assert!(params(&Attention { k: view(72), ..plain }).is_ok());
        let odd = params(&Attention { k: view(68), ..plain });
        assert!(odd.is_err_and(|e| e.message.contains("multiples of 16 bytes")));
    }
}
