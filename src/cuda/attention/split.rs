//! Split-KV on the host: how many work ranges a decode launch has, and where in the workspace their partials go. The
//! partition itself happens on the device (`kernels/include/work_partition.cuh`), because only it knows lengths.

use super::tiles::AttentionTile;
use crate::cuda::params::attention::{MIN_SPLIT_KEYS, MIN_SPLIT_TILE_KEYS, PartialResults, SPLIT_RECORD_BYTES};
use crate::problem::attention::Attention;
use std::ptr::null_mut;

/// The limit of the grid's second dimension.
const MAX_RANGES: i64 = 65535;

impl PartialResults {
    /// No tile may be split.
    pub(super) const NONE: Self = Self {
        split_records: null_mut(),
        states: null_mut(),
        outputs: null_mut(),
        rows_per_head: 0,
        pitch: 0,
        num_ranges: 0,
        max_fixed_splits: 0,
        log2_unit: 0.0,
        max_warp_tile_chunks: 0,
    };
}

/// What a kernel whose keys are split computes at a time.
#[derive(Clone, Copy)]
pub(super) struct WorkUnit {
    /// Packed rows of a tile.
    pub(super) rows: i64,
    /// Keys of a KV chunk.
    pub(super) chunk_keys: i64,
    /// [`PartialResults::log2_unit`]
    pub(super) log2_unit: f32,
}

/// The work partition of a decode launch.
#[derive(Clone, Copy, Debug)]
pub(super) struct KvSplit {
    /// Work ranges, and so CTAs, per KV head.
    pub(super) ranges: i64,
    /// At most so many tiles per KV head; at least 1.
    pub(super) tiles: i64,
    /// Whether the longest possible tile is long enough to be split.
    pub(super) may_split: bool,
    pub(super) partial: PartialResults,
}

impl KvSplit {
    /// The partition of at most `tiles` tiles per KV head, of sequences of at most `max_queries` queries, between
    /// `resident_ctas` CTAs, as many as the device runs at a time. The first `taken` bytes of the workspace are in use.
    pub(super) fn new(
        problem: &Attention,
        tile: &AttentionTile,
        tiles: i64,
        max_queries: i64,
        resident_ctas: i64,
        taken: usize,
    ) -> Self {
        let log2_unit = AttentionTile::log2_unit(problem);
        let unit = WorkUnit { rows: tile.rows(), chunk_keys: tile.kv_chunk_keys(), log2_unit };
        Self::of_units(problem, unit, tiles, max_queries, resident_ctas, taken)
    }

    /// The same for tiles of any kernel.
    pub(super) fn of_units(
        problem: &Attention,
        unit: WorkUnit,
        tiles: i64,
        max_queries: i64,
        resident_ctas: i64,
        taken: usize,
    ) -> Self {
        let heads = problem.num_kv_heads as i64;
        let keys = longest_tile(problem, max_queries);
        // The longest tile in KV chunks. If visible keys do not begin at 0, its first and last chunk may have one key each.
        let chunk = unit.chunk_keys;
        let from_0 = problem.score.window_left < 0 && problem.keys.leftpad.is_none();
        let may_split = if from_0 { (keys + chunk - 1) / chunk * chunk } else { keys + 2 * chunk }
            >= i64::from(MIN_SPLIT_TILE_KEYS);
        let splits = if may_split { (keys as u64).div_ceil(MIN_SPLIT_KEYS as u64) as i64 } else { 1 };
        let tiles = tiles.max(1);
        let ranges = (resident_ctas / heads).clamp(1, tiles.saturating_mul(splits)).min(MAX_RANGES);
        let mut partial = PartialResults {
            pitch: problem.value_dim as i32,
            max_fixed_splits: if problem.batch_invariant { max_fixed_splits(heads) } else { 0 },
            log2_unit: unit.log2_unit,
            ..PartialResults::NONE
        };
        if may_split && ranges > 1 {
            partial.allocate(problem, unit.rows, ranges, taken);
        }
        Self { ranges, tiles, may_split, partial }
    }

    /// Whether there is memory for the partials of half of the work ranges, or none is needed. With less, the device leaves tiles
    /// whole (`choose_split` in `kernels/include/work_partition.cuh`).
    pub(super) fn has_room(&self) -> bool {
        !self.may_split || self.ranges == 1 || 2 * i64::from(self.partial.num_ranges) >= self.ranges
    }

    /// Boundaries between work ranges at which a tile may be split: a `SplitRecord` for each.
    pub(super) fn num_split_records(&self) -> u32 {
        (self.partial.num_ranges - 1).max(0) as u32
    }
}

impl PartialResults {
    /// Lays out the workspace: split records, then states, then outputs. With too little of it there are fewer ranges, or
    /// no tile is split.
    fn allocate(&mut self, problem: &Attention, tile_rows: i64, ranges: i64, taken: usize) {
        let Some((start, size)) = room(problem, taken, SPLIT_RECORD_BYTES as usize) else { return };
        let size = size as i64;
        let row_bytes = (size_of::<[f32; 2]>() as i64 + 4 * i64::from(self.pitch)) * problem.num_kv_heads as i64;
        let (split_records, rows) = if self.max_fixed_splits > 0 {
            let split_records = ranges - 1;
            (split_records, (size - split_records * i64::from(SPLIT_RECORD_BYTES)) / row_bytes)
        } else {
            // A boundary has a partial on either side.
            let rows = 2 * tile_rows;
            let split_records = (size / (i64::from(SPLIT_RECORD_BYTES) + rows * row_bytes)).min(ranges - 1);
            (split_records, split_records * rows)
        };
        // With an even number of 8-byte states, the outputs after them are aligned to 16 bytes.
        let rows = rows.min(1 << 23) / 2 * 2;
        if split_records < 1 || rows < 2 {
            return;
        }
        let states = start.wrapping_add(split_records as usize * SPLIT_RECORD_BYTES as usize);
        let outputs = states.wrapping_add(rows as usize * problem.num_kv_heads * size_of::<[f32; 2]>());
        (self.split_records, self.states, self.outputs) = (start.cast(), states.cast(), outputs.cast());
        self.rows_per_head = rows as i32;
        self.num_ranges = split_records as i32 + 1;
    }
}

/// The part of the workspace after its first `taken` bytes, aligned to `alignment`, and its size.
pub(super) fn room(problem: &Attention, taken: usize, alignment: usize) -> Option<(*mut u8, usize)> {
    let workspace = problem.workspace?;
    let first = (workspace.data as usize + taken).next_multiple_of(alignment) - workspace.data as usize;
    Some((workspace.data.wrapping_add(first), workspace.bytes().checked_sub(first)?))
}

/// `batch_invariant`: maximum fixed-size splits per tile. Enough for one sequence to occupy a large GPU. Results depend on
/// it, so it must not depend on the device.
fn max_fixed_splits(num_kv_heads: i64) -> i32 {
    (256 / num_kv_heads).clamp(8, 128) as i32
}

/// Maximum number of keys that the rows of a tile of up to `max_queries` queries attend to.
pub(super) fn longest_tile(problem: &Attention, max_queries: i64) -> i64 {
    let capacity = problem.keys.storage.capacity().1 as i64;
    let score = &problem.score;
    if score.window_left < 0 || score.window_right < 0 {
        return capacity;
    }
    let queries = max_queries.min(problem.num_rows as i64);
    capacity.min(score.window_left.saturating_add(score.window_right).saturating_add(queries))
}

#[cfg(test)]
mod tests {
    use super::super::tests::problem;
    use super::*;
    use crate::problem::attention::{KeyStorage, Keys};
    use crate::problem::workspace::AttentionSizes;
    use crate::tensor::{DType, Tensor};

    /// CTAs that 132 SMs with two CTAs each run at a time.
    const RESIDENT: i64 = 264;

    /// Decode of `seqs` sequences over `keys` keys.
    fn decode(seqs: usize, kv_heads: usize, keys: usize, batch_invariant: bool) -> Attention<'static> {
        let plain = problem(seqs, seqs, 4 * kv_heads, 128);
        let storage = KeyStorage::Contiguous { total: keys };
        Attention { keys: Keys { storage, ..plain.keys }, num_kv_heads: kv_heads, batch_invariant, ..plain }
    }

    /// The split of a call with `bytes` bytes of workspace from `start` on, an address that is not read.
    fn split(problem: &Attention, start: usize, bytes: i64) -> KvSplit {
        let dims = [bytes];
        let workspace = Tensor::dense(DType::U8, start as *mut u8, &dims);
        let tile = AttentionTile::of(problem, "decode").expect("the sizes are allowed");
        let with_workspace = Attention { workspace: Some(workspace), ..*problem };
        KvSplit::new(&with_workspace, tile, problem.num_rows as i64, 1, RESIDENT, 0)
    }

    fn recommended_bytes(problem: &Attention) -> i64 {
        let sizes = AttentionSizes {
            num_q_heads: problem.num_q_heads as i64,
            num_kv_heads: problem.num_kv_heads as i64,
            head_dim: problem.head_dim as i64,
            value_dim: problem.value_dim as i64,
            dtype: problem.q.dtype,
            batch_invariant: problem.batch_invariant,
        };
        sizes.workspace().fixed
    }

    #[test]
    fn the_wanted_workspace_has_room_for_every_work_range_wherever_it_begins() {
        for kv_heads in 1..=RESIDENT as usize {
            for batch_invariant in [false, true] {
                let problem = decode(64, kv_heads, 1 << 17, batch_invariant);
                for start in [1 << 20, (1 << 20) + 1, (1 << 20) + 63] {
                    let split = split(&problem, start, recommended_bytes(&problem));
                    let ranges = RESIDENT / kv_heads as i64;
                    assert_eq!(split.ranges, ranges);
                    assert_eq!(
                        i64::from(split.partial.num_ranges),
                        if ranges > 1 { ranges } else { 0 },
                        "{kv_heads} heads"
                    );
                    // Two partials of a full tile per boundary.
                    let rows = if ranges > 1 { 2 * 16 * (ranges - 1) } else { 0 };
                    assert!(i64::from(split.partial.rows_per_head) >= rows, "{kv_heads} heads");
                }
            }
        }
    }

    #[test]
    fn no_partial_lies_outside_of_the_workspace() {
        for (kv_heads, batch_invariant) in [(1, false), (8, false), (8, true), (100, true)] {
            let problem = decode(64, kv_heads, 1 << 17, batch_invariant);
            let all = recommended_bytes(&problem);
            for bytes in [0, 1, 63, 64, 200, 20_000, 40_000, all / 3, all - 1, all, 2 * all, 1 << 40] {
                for start in [1 << 20, (1 << 20) + 17] {
                    let PartialResults { split_records, states, outputs, rows_per_head, num_ranges, pitch, .. } =
                        split(&problem, start, bytes).partial;
                    if num_ranges == 0 {
                        assert!(split_records.is_null() && bytes < all, "{bytes} bytes");
                        continue;
                    }
                    let rows = rows_per_head as usize * kv_heads;
                    assert!(num_ranges > 1 && rows_per_head < 1 << 24 && pitch == 128);
                    assert!(
                        split_records as usize >= start
                            && (split_records as usize).is_multiple_of(SPLIT_RECORD_BYTES as usize)
                    );
                    assert!(
                        states as usize
                            >= split_records as usize + SPLIT_RECORD_BYTES as usize * (num_ranges as usize - 1)
                    );
                    assert!(outputs as usize >= states as usize + 8 * rows && (outputs as usize).is_multiple_of(16));
                    assert!(outputs as usize + 4 * 128 * rows <= start + bytes as usize, "{bytes} bytes");
                }
            }
        }
    }

    #[test]
    fn only_tiles_that_can_be_long_are_split() {
        let records = |problem: &Attention| split(problem, 1 << 20, recommended_bytes(problem)).num_split_records();
        assert_eq!(records(&decode(8, 8, 384, false)), 0);
        assert_eq!(records(&decode(8, 8, 576, false)), 0);
        assert!(records(&decode(8, 8, 577, false)) > 0);
        let long = decode(8, 8, 1 << 17, false);
        assert!(records(&long) > 0);
        let mut windowed = long;
        (windowed.score.window_left, windowed.score.window_right) = (127, 0);
        assert_eq!(records(&windowed), 0);
        windowed.score.window_left = 4095;
        assert!(records(&windowed) > 0);
        assert_eq!(
            KvSplit::new(&long, AttentionTile::of(&long, "decode").expect("bf16"), 8, 1, RESIDENT, 0)
                .num_split_records(),
            0
        );
    }

    #[test]
    fn a_small_call_asks_for_no_more_ctas_than_it_can_use() {
        assert_eq!(split(&decode(1, 8, 100, false), 1 << 20, 0).ranges, 1);
        assert_eq!(split(&decode(2, 8, 384, false), 1 << 20, 0).ranges, 2);
        assert_eq!(split(&decode(1, 8, 1024, false), 1 << 20, 0).ranges, 8);
        assert_eq!(split(&decode(1, 300, 1024, false), 1 << 20, 0).ranges, 1);
    }
}
