//! Query rows with masks of their own, on every GPU: bounds of their keys (`k_start`, `k_end`), and trees among the newest keys
//! (`tree_mask`). No other kernel knows of them. Without such masks, the kernel that divides keys takes few queries over many keys
//! (`portable_split_kv`).

use super::split::{KvSplit, WorkUnit};
use super::split_times::divides_row_masks;
use super::tiles::{AttentionTile, RowMasksTile, converts_fp8};
use super::{Call, Launch, Launches, Parameter, UNLIMITED, decode};
use crate::cuda::device::Device;
use crate::cuda::enqueue::LaunchConfig;
use crate::cuda::params::attention::AttentionParams;
use crate::cuda::params::key_ranges::{KeyRangeParams, KeyRangeSource};
use crate::cuda::params::tree_mask::{RowMaskParams, TreeMaskSource};
use crate::cuda::variants;
use crate::error::{Error, Result};
use crate::problem::attention::{Attention, KeyRanges, TreeMask};
use std::ptr::null;

impl KeyRangeSource {
    pub(in crate::cuda) fn new(ranges: &KeyRanges) -> Self {
        Self { start: ranges.start.unwrap_or(null()), end: ranges.end.unwrap_or(null()) }
    }
}

impl TreeMaskSource {
    pub(super) fn new(tree: Option<TreeMask>) -> Self {
        tree.map_or(Self { words: null(), max_queries: 0, query_words: 0 }, |tree| Self {
            words: tree.words,
            max_queries: tree.max_queries as i32,
            query_words: tree.query_words as i32,
        })
    }
}

/// Takes every call with such masks: a launch that divides the keys of short sequences and of trees between CTAs, and one for
/// longer sequences, which have no tree, with a CTA per tile and KV head. The first takes all sequences of a call in which most
/// are short, or have few queries over many keys; but with `batch_invariant` the kernel of a sequence must not depend on the batch.
pub(super) fn launches<'c>(call: &Call<'c>) -> Result<Option<Launches<'c>>> {
    let queries = &call.problem.queries;
    if !call.has_row_masks() {
        return Ok(None);
    }
    let split = split_kernel(call.problem, &call.device)?;
    let one_tile = (split.tile.rows() / call.group()).max(1);
    let short = queries.tree.map_or(one_tile, |tree| one_tile.max(tree.max_queries as i64));
    let longest = queries.longest as i64;
    let is_mostly_short = call.rows() <= call.seqs() || (1..=short).contains(&longest);
    let divides_all = !call.problem.batch_invariant && (is_mostly_short || divides_row_masks(call)?);
    let max_queries = if divides_all { UNLIMITED } else { short };
    let long_sequences = if max_queries == UNLIMITED { 0 } else { call.seqs().min(call.rows() / (max_queries + 1)) };
    // The caller may be wrong about that: results must not depend on it.
    let are_all_long = queries.tree.is_none()
        && !call.problem.batch_invariant
        && longest > short
        && longest.saturating_mul(call.seqs()) == call.rows();
    let mut list = vec![];
    if long_sequences > 0 {
        list.push(unsplit_launch(call, if are_all_long { 1 } else { max_queries + 1 }, long_sequences)?);
    }
    if !(long_sequences > 0 && are_all_long) {
        let is_first = list.is_empty();
        list.extend(split_launches(call, &split, &split.partition(call, max_queries), max_queries, is_first)?);
    }
    Ok(Some(Launches { list, store_new_tokens: false }))
}

/// The launches of a call without such masks, for sequences of any length, if the work partition has room for partials
/// ([`KvSplit::has_room`]).
pub(super) fn launches_with_split_keys<'c>(call: &Call<'c>) -> Result<Option<Launches<'c>>> {
    let kernel = split_kernel(call.problem, &call.device)?;
    let partition = kernel.partition(call, UNLIMITED);
    if !partition.has_room() {
        return Ok(None);
    }
    let list = split_launches(call, &kernel, &partition, UNLIMITED, true)?;
    Ok(Some(Launches { list, store_new_tokens: false }))
}

/// The launches for sequences of up to `max_queries` queries, in the work ranges of `split`.
fn split_launches<'c>(
    call: &Call<'c>,
    kernel: &SplitKernel,
    split: &KvSplit,
    max_queries: i64,
    is_first: bool,
) -> Result<Vec<Launch<'c>>> {
    let Call { problem, device, .. } = call;
    let attention = AttentionParams {
        clears_padding_rows: i32::from(is_first),
        partial: split.partial,
        ..call.params_for(1, max_queries)
    };
    let (ranges, tree) = (KeyRangeSource::new(&problem.queries.key_ranges), TreeMaskSource::new(problem.queries.tree));
    let params = RowMaskParams { attention, ranges, tree };
    let grid = [problem.num_kv_heads as u32, split.ranges as u32, 1];
    let shared_memory = kernel.shared_memory(problem, device);
    let config = LaunchConfig { grid, threads: RowMasksTile::THREADS, shared_memory };
    let attend = Launch::new(kernel.name, kernel.variant, config, Parameter::RowMasks(Box::new(params)));
    let rows = call.packed_rows().min(kernel.tile.rows());
    let combine = decode::combine(problem, device, split, &attention, rows)?;
    Ok([Some(attend), combine].into_iter().flatten().collect())
}

/// The launch for up to `sequences` sequences of at least `min_queries` queries, none of which has a tree.
fn unsplit_launch<'c>(call: &Call<'c>, min_queries: i64, sequences: i64) -> Result<Launch<'c>> {
    let Call { problem, device, .. } = call;
    let attention = AttentionParams { clears_padding_rows: 1, ..call.params_for(min_queries, UNLIMITED) };
    if let Some(prefill) = call.hopper_prefill() {
        return prefill.launch(call, prefill.max_tiles(call, sequences), &attention);
    }
    let (kernel, variant, tile) = unsplit_kernel(problem, device)?;
    let tiles = call.max_tiles(tile.rows(), sequences).max(1);
    let ctas = tiles.saturating_mul(problem.num_kv_heads as i64);
    if ctas > i64::from(i32::MAX) {
        return Err(Error::unimplemented(format!("the call takes up to {ctas} blocks; a grid has up to 2^31 - 1")));
    }
    let config = LaunchConfig { grid: [ctas as u32, 1, 1], threads: tile.threads(), shared_memory: tile.shared_bytes };
    let params = KeyRangeParams { attention, ranges: KeyRangeSource::new(&problem.queries.key_ranges) };
    Ok(Launch::new(kernel, variant, config, Parameter::KeyRanges(Box::new(params))))
}

impl RowMasksTile {
    /// Additional shared memory with fixed-size splits: `kKeptStatesBytes`.
    fn kept_states_bytes(&self) -> u32 {
        RowMasksTile::THREADS * (4 + self.head_dim / self.column_warps / 2) * 4
    }

    /// Whether the kernel can compute fixed-size splits: `kHasFixedSplits`.
    fn has_fixed_splits(&self) -> bool {
        self.shared_bytes + self.kept_states_bytes() <= 163 * 1024
    }
}

/// The name of the kernel for the type of K and V, and the value of the axis `dtype`.
fn named(
    problem: &Attention,
    device: &Device,
    [plain, fp8, fp8_sm80]: [&'static str; 3],
) -> (&'static str, &'static str) {
    match (problem.kv_dtype.size() == 1, converts_fp8(device)) {
        (false, _) => (plain, variants::dtype_value(problem.kv_dtype)),
        (true, true) => (fp8, "fp8"),
        (true, false) => (fp8_sm80, "fp8_shifted"),
    }
}

/// The kernel that divides keys, its variant of the smallest sufficient head dimension, and its tile.
struct SplitKernel {
    name: &'static str,
    variant: usize,
    tile: &'static RowMasksTile,
}

impl SplitKernel {
    /// Whether the states of fixed-size splits fit; elsewhere tiles stay whole with `batch_invariant`.
    fn has_fixed_splits(&self, problem: &Attention, device: &Device) -> bool {
        let bytes = self.tile.shared_bytes + self.tile.kept_states_bytes();
        problem.batch_invariant && self.tile.has_fixed_splits() && bytes <= device.shared_memory
    }

    fn shared_memory(&self, problem: &Attention, device: &Device) -> u32 {
        let kept = if self.has_fixed_splits(problem, device) { self.tile.kept_states_bytes() } else { 0 };
        self.tile.shared_bytes + kept
    }

    /// The work partition of the sequences of up to `max_queries` queries.
    fn partition(&self, call: &Call, max_queries: i64) -> KvSplit {
        let Call { problem, device, .. } = call;
        let has_fixed_splits = self.has_fixed_splits(problem, device);
        let workspace = problem.workspace.filter(|_| has_fixed_splits || !problem.batch_invariant);
        let splittable = Attention { workspace, batch_invariant: has_fixed_splits, ..**problem };
        let (rows, sequences) = (self.tile.rows(), call.seqs().min(call.rows()));
        let per_sequence = max_queries.saturating_mul(call.group()).saturating_add(rows - 1) / rows;
        let tiles = call.max_tiles(rows, sequences).min(sequences.saturating_mul(per_sequence));
        let unit = WorkUnit { rows, chunk_keys: i64::from(self.tile.keys), log2_unit: 1.0 };
        let resident = device.resident_blocks(self.shared_memory(problem, device), self.tile.ctas_per_sm);
        KvSplit::of_units(&splittable, unit, tiles, max_queries, i64::from(resident), 0)
    }
}

fn split_kernel(problem: &Attention, device: &Device) -> Result<SplitKernel> {
    let kernels = ["attention_row_masks", "attention_row_masks_fp8", "attention_row_masks_fp8_sm80"];
    let (kernel, dtype) = named(problem, device, kernels);
    let tile = RowMasksTile::of(problem).ok_or_else(|| not_built(problem, kernel, dtype))?;
    Ok(SplitKernel { name: kernel, variant: variants::find(kernel, &[dtype, tile.head_dim_value])?, tile })
}

/// The same of the kernel with a CTA per tile.
fn unsplit_kernel(problem: &Attention, device: &Device) -> Result<(&'static str, usize, &'static AttentionTile)> {
    let kernels = ["attention_key_ranges", "attention_key_ranges_fp8", "attention_key_ranges_fp8_sm80"];
    let (kernel, dtype) = named(problem, device, kernels);
    let built = AttentionTile::serving(problem, "prefill").filter_map(|tile| {
        let variant = variants::find(kernel, &[dtype, tile.head_dim_value]).ok()?;
        Some((kernel, variant, tile))
    });
    built.min_by_key(|(_, _, tile)| tile.head_dim).ok_or_else(|| not_built(problem, kernel, dtype))
}

fn not_built(problem: &Attention, kernel: &str, dtype: &str) -> Error {
    let head_dim = problem.head_dim.max(problem.value_dim);
    Error::unimplemented(format!("no kernel {kernel} is built for K of {dtype} and head dimension {head_dim}"))
}

#[cfg(test)]
mod tests {
    use super::super::LaunchPlan;
    use super::super::hopper::tests::{paged, ragged};
    use super::super::hopper_split_kv::tests::few_queries;
    use super::super::tests::{device, named_on, problem};
    use super::*;
    use crate::problem::attention::{KeyStorage, Keys, Queries, Score};
    use crate::tensor::{DType, Tensor};

    const SPLIT: &str = "attention_row_masks_bf16_128";
    const UNSPLIT: &str = "attention_key_ranges_bf16_128";

    /// The problem with a bound of each row.
    fn bounded(problem: &Attention<'static>) -> Attention<'static> {
        let key_ranges = KeyRanges { start: None, end: Some(std::ptr::dangling()) };
        Attention { queries: Queries { key_ranges, ..problem.queries }, ..*problem }
    }

    /// The problem with trees of up to `max_queries` queries.
    fn with_trees(problem: &Attention<'static>, max_queries: usize) -> Attention<'static> {
        let tree = TreeMask { words: std::ptr::dangling(), max_queries, query_words: max_queries.div_ceil(32) };
        Attention { queries: Queries { tree: Some(tree), ..problem.queries }, ..*problem }
    }

    #[test]
    fn launches_cover_every_sequence_length_exactly_once() {
        for capability in [80, 90, 120] {
            let device = Device { capability, ..device(false) };
            let named = |problem: &Attention| named_on(problem, &device);
            let all = [(SPLIT, 1, i32::MAX)];
            // Four query heads per KV head, so that a tile has the rows of 16 queries.
            let both = [(UNSPLIT, 17, i32::MAX), (SPLIT, 1, 16)];
            assert_eq!(named(&bounded(&problem(64, 64, 8, 96))), all);
            assert_eq!(named(&bounded(&problem(5000, 7, 8, 96))), both);
            assert_eq!(named(&bounded(&problem(16, 1, 8, 96))), [(SPLIT, 1, 16)]);
            let hinted = |longest, batch_invariant| {
                let plain = bounded(&problem(640, 10, 8, 96));
                named(&Attention { queries: Queries { longest, ..plain.queries }, batch_invariant, ..plain })
            };
            assert_eq!((hinted(16, false), hinted(16, true)), (all.to_vec(), both.to_vec()));
            assert_eq!((hinted(64, false), hinted(64, true)), (vec![(UNSPLIT, 1, i32::MAX)], both.to_vec()));
            // Longer sequences have no tree.
            assert_eq!(named(&with_trees(&problem(5000, 7, 8, 96), 8)), both);
            let trees = with_trees(&problem(5000, 7, 8, 96), 40);
            assert_eq!(named(&trees), [(UNSPLIT, 41, i32::MAX), (SPLIT, 1, 40)]);
            // A wrong hint does not give a tree to the kernel that has none.
            assert_eq!(
                named(&Attention { queries: Queries { longest: 5000, ..trees.queries }, num_rows: 35000, ..trees })
                    .len(),
                2
            );
            assert_eq!(named(&with_trees(&problem(40, 1, 8, 96), 40)), [(SPLIT, 1, 40)]);
        }
        assert!(named_on(&problem(64, 64, 8, 96), &device(true)).iter().all(|(name, ..)| !name.contains("_masks")));
    }

    #[test]
    fn hopper_computes_long_packed_sequences_in_16_bits() {
        let named = |problem: &Attention<'static>| named_on(&bounded(problem), &device(true));
        let (portable, short) = (UNSPLIT, (SPLIT, 1, 10));
        assert_eq!(named(&ragged()), [("hopper_key_ranges_bf16_128_key_ranges", 11, i32::MAX), short]);
        let capped = Attention { score: Score { softcap: 2.0, ..ragged().score }, ..ragged() };
        for other in [capped, paged(16)] {
            assert_eq!(named(&other), [(portable, 11, i32::MAX), short]);
        }
        let wide = Tensor { dtype: DType::F32, ..ragged().q };
        let wide = Attention { q: wide, kv_dtype: DType::F32, ..ragged() };
        assert!(named(&wide).iter().all(|(name, ..)| !name.contains("hopper")));
        // Without bounds no call takes their kernel.
        assert!(named_on(&ragged(), &device(true)).iter().all(|(name, ..)| !name.contains("key_ranges")));
    }

    #[test]
    fn few_queries_over_many_keys_are_divided_whatever_their_number() {
        let older = Device { capability: 80, ..device(false) };
        let first = |problem: &Attention<'static>, device: &Device| named_on(&bounded(problem), device)[0];
        let (few, more) = (few_queries(1, 64, [32, 8]), few_queries(16, 64, [32, 8]));
        assert_eq!(first(&few, &older), (SPLIT, 1, i32::MAX));
        assert_eq!(first(&more, &older), (UNSPLIT, 17, i32::MAX));
        let hopper = device(true);
        for problem in [&few, &more] {
            assert_eq!(first(problem, &hopper), ("hopper_row_masks_bf16_128_row_masks", 1, i32::MAX));
        }
        let capped = Attention { score: Score { softcap: 2.0, ..few.score }, ..few };
        assert_eq!(first(&capped, &hopper), (SPLIT, 1, i32::MAX));
        let invariant = Attention { batch_invariant: true, ..few_queries(1, 64, [32, 8]) };
        assert_eq!(first(&invariant, &older), (UNSPLIT, 17, i32::MAX));
    }

    const ROOM: [i64; 1] = [16_000_000];

    /// Decode of `seqs` sequences over up to 8192 keys, with a workspace.
    fn decode(seqs: usize, batch_invariant: bool) -> Attention<'static> {
        let plain = bounded(&problem(seqs, seqs, 8, 128));
        let workspace = Tensor::dense(DType::U8, std::ptr::without_provenance_mut(1 << 20), &ROOM);
        let storage = KeyStorage::Contiguous { total: 8192 };
        let keys = Keys { storage, ..plain.keys };
        Attention { workspace: Some(workspace), keys, batch_invariant, ..plain }
    }

    /// The grids and the shared memory of a call's launches.
    fn configs(problem: &Attention, device: Device) -> Vec<([u32; 3], u32)> {
        let plan = LaunchPlan::on(problem, None, device).expect("the sizes are allowed");
        plan.0.list.iter().map(|launch| (launch.config.grid, launch.config.shared_memory)).collect()
    }

    #[test]
    fn keys_are_divided_between_all_ctas_that_run_at_a_time() {
        let [(grid, bytes), (combine, _)] = configs(&decode(4, false), device(true))[..] else {
            panic!("two launches")
        };
        // Two CTAs per SM, and 16 or more keys per split.
        assert_eq!((grid, bytes, combine[0]), ([2, 132, 1], 88032, 2));
        // With fixed-size splits, their states take more shared memory. Where that is more than there is, tiles stay whole.
        let invariant = configs(&decode(4, true), device(true));
        assert_eq!((invariant.len(), invariant[0].1), (2, 88032 + 34816));
        let small =
            Device { shared_memory: 99 * 1024, shared_memory_per_sm: 100 * 1024, capability: 120, ..device(false) };
        assert_eq!(configs(&decode(4, true), small), [([2, 66, 1], 88032)]);
        assert_eq!(configs(&decode(4, false), small).len(), 2);
    }

    #[test]
    fn every_dtype_and_head_dimension_finds_a_kernel() {
        let plain = problem(64, 1, 8, 64);
        for (q, kv_dtype) in [
            (DType::F32, DType::F32),
            (DType::F16, DType::F16),
            (DType::BF16, DType::BF16),
            (DType::BF16, DType::F8E5M2),
            (DType::F8E4M3FN, DType::F8E4M3FN),
        ] {
            for dim in (8..=512).step_by(8) {
                for capability in [80, 86, 89, 90] {
                    let device = Device { capability, ..device(true) };
                    let q = Tensor { dtype: q, ..plain.q };
                    let problem = Attention { q, kv_dtype, head_dim: 8, value_dim: dim, ..plain };
                    let (_, unsplit, tile) = unsplit_kernel(&problem, &device).expect("there is a kernel");
                    // The ranges of a tile's rows are in shared memory too.
                    assert!(tile.shared_bytes + 8 * tile.rows() as u32 <= 99 * 1024, "{tile:?}");
                    let split = split_kernel(&problem, &device).expect("there is a kernel");
                    let RowMasksTile { bytes, head_dim, shared_bytes, .. } = *split.tile;
                    let has_fixed_splits = ![(2, 512), (4, 256)].contains(&(bytes, head_dim));
                    assert!(shared_bytes <= 99 * 1024 && split.tile.has_fixed_splits() == has_fixed_splits);
                    for (variant, head_dim) in [(unsplit, tile.head_dim), (split.variant, head_dim)] {
                        let target = variants::VARIANTS[variant].target.parse::<u32>().expect("a number");
                        assert!(head_dim as usize >= dim && target <= capability, "{head_dim}");
                    }
                }
            }
        }
    }
}
