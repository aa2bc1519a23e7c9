//! Attention on CUDA: which work shapes a call needs, how large their grids are, and the kernels' one argument.
//!
//! Lengths are known on the device alone, so a grid holds every tile that the static sizes allow; the kernels find their
//! tiles themselves and those without one leave. `docs/kernels.md` explains the work shapes.

mod hopper;
mod mixed;
pub(super) mod params;
mod split;
pub(super) mod tiles;

use super::device::Device;
use super::launch::{self, Shape};
use super::{module, variants};
use crate::error::{Error, Result};
use crate::log;
use crate::ops::attention::Attention;
use crate::ops::kv_cache_update::KvCacheUpdate;
use crate::stream::Stream;
use hopper::Prefill;
use mixed::Mixed;
use params::{NewTokens, Params};
use split::{PartialResults, Split};
use tiles::Tile;

const KERNEL: &str = "attention";
const MERGE_KERNEL: &str = "merge_parts";

/// Threads of a CTA of [`MERGE_KERNEL`].
const MERGE_THREADS: u32 = 256;

/// Rows of a KV head that a warp of decode stores at most. It stores one after the other, with everything else behind
/// them: of more a launch of their own is quicker.
const ROWS_A_WARP: i64 = 4;

/// What a launch runs.
#[derive(Clone, Copy)]
enum Kernel {
    /// [`KERNEL`], cut up like this.
    Portable(&'static Tile),
    /// Those of [`hopper`].
    Hopper(Prefill),
    /// That of [`mixed`], which takes sequences of any length.
    Mixed(Mixed),
}

/// One kernel launch: the tiles of the sequences that have `min_queries` to `max_queries` queries.
struct Launch {
    variant: usize,
    kernel: Kernel,
    /// At least as many as one KV head can have.
    tiles: i64,
    min_queries: i32,
    max_queries: i32,
    /// How decode shares out its keys; prefill takes whole tiles.
    split: Option<Split>,
    /// The launch that merges the parts of cut tiles: its variant, and its shape.
    merging: Option<(usize, Shape)>,
}

impl Launch {
    fn new(problem: &Attention, device: &Device, kernel: Kernel, tiles: i64, queries: (i64, i64)) -> Result<Self> {
        let (variant, split) = match kernel {
            Kernel::Portable(tile) => {
                if !tile.is_decode() {
                    check_grid(problem, tiles)?;
                }
                let resident = device.resident_blocks(shared_memory(tile, problem), tile.ctas);
                let split = || Split::new(problem, tile, tiles, queries.1, i64::from(resident), 0);
                (tile.variant(problem, device)?, tile.is_decode().then(split))
            }
            Kernel::Hopper(prefill) => (prefill.variant(problem)?, None),
            Kernel::Mixed(mixed) => (mixed.variant(problem)?, Some(mixed.split(problem, device))),
        };
        let merging = split.map_or(Ok(None), |split| merging(problem, &split))?;
        let (min_queries, max_queries) = (queries.0 as i32, queries.1 as i32);
        Ok(Self { variant, kernel, tiles, min_queries, max_queries, split, merging })
    }

    /// Whether it can store `rows` new tokens in the cache beside attending over them.
    fn takes_new_tokens(&self, rows: usize) -> bool {
        match (self.kernel, self.split) {
            (Kernel::Portable(tile), Some(split)) => {
                let warps = split.shares * i64::from(tile.threads / 32);
                tile.takes_new_tokens() && rows as i64 <= ROWS_A_WARP * warps
            }
            _ => false,
        }
    }

    /// Prefill: a CTA for each tile and KV head. On Hopper one for each SM. Decode: a CTA for each share and KV head.
    fn shape(&self, problem: &Attention, device: &Device) -> Shape {
        let heads = problem.num_kv_heads as i64;
        match self.kernel {
            Kernel::Hopper(prefill) => prefill.shape(problem, self.tiles, device),
            Kernel::Mixed(mixed) => mixed.shape(device),
            Kernel::Portable(tile) => Shape {
                grid: self.split.map_or_else(
                    || [(self.tiles.max(1) * heads) as u32, 1, 1],
                    |split| [heads as u32, split.shares as u32, 1],
                ),
                threads: tile.threads,
                shared_memory: shared_memory(tile, problem),
            },
        }
    }

    /// # Safety
    /// As of [`Plan::launch`]; `params` is that of this launch.
    unsafe fn enqueue(&self, problem: &Attention, device: &Device, stream: Stream, params: &Params) -> Result {
        let shape = self.shape(problem, device);
        match self.kernel {
            // SAFETY: this function's contract.
            Kernel::Portable(_) => unsafe { enqueue(KERNEL, self.variant, shape, stream, params) },
            Kernel::Hopper(prefill) => {
                let counter = prefill.counter(problem, self.tiles, device);
                let params = prefill.params(problem, params, counter)?;
                // SAFETY: as above.
                unsafe {
                    clear(counter, stream)?;
                    enqueue(prefill.kernel(), self.variant, shape, stream, &params)
                }
            }
            Kernel::Mixed(mixed) => {
                let params = mixed.params(problem, params)?;
                // SAFETY: as above.
                unsafe {
                    clear(hopper::counter_place(problem), stream)?;
                    enqueue(mixed::KERNEL, self.variant, shape, stream, &params)
                }
            }
        }
    }
}

/// A grid holds this many tiles of every KV head.
fn check_grid(problem: &Attention, tiles: i64) -> Result {
    let ctas = tiles.max(1).saturating_mul(problem.num_kv_heads as i64);
    if ctas <= i64::from(i32::MAX) {
        return Ok(());
    }
    Err(Error::unimplemented(format!("prefill takes up to {ctas} blocks; a grid has up to 2^31 - 1")))
}

/// Dynamic shared memory of a launch of the portable kernel.
fn shared_memory(tile: &Tile, problem: &Attention) -> u32 {
    if !tile.is_decode() {
        return tile.shared_memory;
    }
    let folded = if problem.batch_invariant { tile.fold_bytes() } else { 0 };
    (tile.shared_memory + folded).max(tile.least_shared_memory())
}

/// The launches of a call, in order; none where there is no row.
///
/// A sequence whose packed rows fill no more than one decode tile is decoded, a longer one prefilled, each in a launch
/// that skips the other's. Which one a sequence belongs to depends on its own length alone; this is what
/// `batch_invariant` asks for. Otherwise, where the sizes leave room for one query a sequence on average, or the caller
/// says that no sequence is longer than a decode tile, decode takes all; where nearly all have to be long, Hopper's
/// prefill does.
fn launches(problem: &Attention, device: &Device) -> Result<[Option<Launch>; 2]> {
    let (rows, seqs) = (problem.num_rows as i64, problem.max_seqs as i64);
    let group = (problem.num_q_heads / problem.num_kv_heads) as i64;
    let unlimited = i64::from(i32::MAX);
    if rows == 0 {
        return Ok([None, None]);
    }
    let decode = Tile::decode(problem, device)?;
    // The sum over sequences that have a row of ceil(packed rows / tile) is at most this.
    let bound = |packed: i64, tile: i64, sequences: i64| (packed + sequences * (tile - 1)) / tile;
    let few = (decode.rows / group).max(1);
    let longest = problem.queries.longest as i64;
    let mostly_short = rows <= seqs || (1..=few).contains(&longest);
    if mostly_short && !problem.batch_invariant {
        let tiles = bound(rows * group, decode.rows, rows.min(seqs));
        return Ok([Some(Launch::new(problem, device, Kernel::Portable(decode), tiles, (1, unlimited))?), None]);
    }
    let tuned = Prefill::of(problem, device);
    if let Some(prefill) = tuned
        && hopper::takes_all(problem)
    {
        let tiles = bound(rows * prefill.pack, prefill.tile.rows, seqs.min(rows));
        return Ok([Some(Launch::new(problem, device, Kernel::Hopper(prefill), tiles, (1, unlimited))?), None]);
    }
    let decode_tiles = rows.min(seqs) * ((few * group + decode.rows - 1) / decode.rows);
    let decoded = Launch::new(problem, device, Kernel::Portable(decode), decode_tiles, (1, few))?;
    let long_sequences = seqs.min(rows / (few + 1));
    if long_sequences == 0 {
        return Ok([Some(decoded), None]);
    }
    if let Some(prefill) = tuned
        && let Some(mixed) = Mixed::of(problem, device, prefill, decode_tiles, few)
    {
        return Ok([Some(Launch::new(problem, device, Kernel::Mixed(mixed), decode_tiles, (1, unlimited))?), None]);
    }
    let (kernel, tiles) = if let Some(prefill) = tuned {
        (Kernel::Hopper(prefill), bound(rows * prefill.pack, prefill.tile.rows, long_sequences))
    } else {
        let tile = Tile::of(problem, "prefill")?;
        (Kernel::Portable(tile), bound(rows * group, tile.rows, long_sequences))
    };
    let prefilled = Launch::new(problem, device, kernel, tiles, (few + 1, unlimited))?;
    Ok([Some(prefilled), Some(decoded)])
}

/// What merges the parts that a launch leaves: [`Launch::merging`].
fn merging(problem: &Attention, split: &Split) -> Result<Option<(usize, Shape)>> {
    let ends = split.ends_to_merge();
    if ends == 0 {
        return Ok(None);
    }
    let variant = variants::find(MERGE_KERNEL, &[variants::dtype_value(problem.out.dtype)])?;
    Ok(Some((
        variant,
        Shape { grid: [problem.num_kv_heads as u32, ends, 1], threads: MERGE_THREADS, shared_memory: 0 },
    )))
}

/// What a call launches, chosen; nothing is enqueued yet.
pub(crate) struct Plan<'p, 'a> {
    problem: &'p Attention<'a>,
    device: Device,
    /// All but what differs between launches.
    params: Params,
    launches: [Option<Launch>; 2],
}

impl<'p, 'a> Plan<'p, 'a> {
    pub(crate) fn new(problem: &'p Attention<'a>) -> Result<Self> {
        Self::on(problem, Device::current()?)
    }

    fn on(problem: &'p Attention<'a>, device: Device) -> Result<Self> {
        let params = Params::new(problem, &device)?;
        let launches = launches(problem, &device)?;
        Ok(Self { problem, device, params, launches })
    }

    /// Takes over an update of the cache that is to be carried out first, if decode can do it: then decode comes before
    /// prefill, has the new keys from where they come from and stores every row that has a slot.
    pub(crate) fn take_over(&mut self, update: &KvCacheUpdate) -> bool {
        let rows = self.problem.num_rows;
        let can = |launch: &Option<Launch>| launch.as_ref().is_some_and(|launch| launch.takes_new_tokens(rows));
        let Some(decode) = self.launches.iter().position(can) else { return false };
        let Some(new_tokens) = NewTokens::of(update) else { return false };
        self.launches.swap(0, decode);
        self.params.new_tokens = new_tokens;
        true
    }

    /// Load the kernels that it launches.
    pub(crate) fn load(&self) -> Result {
        for launch in self.launches.iter().flatten() {
            module::function(launch.variant)?;
            if let Some((variant, _)) = launch.merging {
                module::function(variant)?;
            }
        }
        Ok(())
    }

    /// # Safety
    /// The problem's views are device memory of the current context that outlives the kernels' run; `out`, `lse` and the
    /// workspace are writable; where the plan has taken over an update, so are the caches, and its views outlive the run
    /// too.
    pub(crate) unsafe fn launch(&self, stream: Stream) -> Result {
        let mut params = self.params;
        // The first launch also writes the rows that no sequence owns.
        params.clears_unowned_rows = 1;
        for launch in self.launches.iter().flatten() {
            (params.min_queries, params.max_queries) = (launch.min_queries, launch.max_queries);
            params.partial = launch.split.map_or(PartialResults::NONE, |split| split.partial);
            // SAFETY: the caller vouches for the memory.
            unsafe { launch.enqueue(self.problem, &self.device, stream, &params) }?;
            params.clears_unowned_rows = 0;
            if let Some((variant, shape)) = launch.merging {
                // SAFETY: as above.
                unsafe { enqueue(MERGE_KERNEL, variant, shape, stream, &params) }?;
            }
        }
        Ok(())
    }
}

/// Load the kernels that [`launch`] takes.
pub(crate) fn prepare(problem: &Attention) -> Result {
    Plan::new(problem)?.load()
}

/// # Safety
/// As of [`Plan::launch`].
pub(crate) unsafe fn launch(problem: &Attention, stream: Stream) -> Result {
    // SAFETY: this function's contract.
    unsafe { Plan::new(problem)?.launch(stream) }
}

/// The number of the next tile becomes 0, if it has a place.
///
/// # Safety
/// `counter` is null or [`hopper::NUMBER_BYTES`] writable bytes of device memory of the current context.
unsafe fn clear(counter: *mut u8, stream: Stream) -> Result {
    // SAFETY: this function's contract.
    if counter.is_null() { Ok(()) } else { unsafe { launch::fill(counter, 0, hopper::NUMBER_BYTES, stream) } }
}

/// # Safety
/// `P` is the kernel's parameter; what it names is device memory that outlives the kernel's run.
unsafe fn enqueue<P>(kernel: &str, variant: usize, shape: Shape, stream: Stream, params: &P) -> Result {
    log::call(kernel, (variant, shape), || format!("{} with {shape:?}", variants::VARIANTS[variant].name));
    // SAFETY: this function's contract.
    unsafe { launch::launch(module::function(variant)?, shape, stream, params) }
}

#[cfg(test)]
pub(super) mod tests {
    use super::*;
    use crate::ops::attention::{KeyStorage, Keys, Queries, Score};
    use crate::ops::kv_cache_update::NewRows;
    use crate::ops::{KvView, Scale};
    use crate::tensor::{DType, Tensor};
    use std::ptr::{null, null_mut};

    /// A call of these sizes over contiguous bf16 keys, without options; no memory.
    pub(in crate::cuda) fn problem(rows: usize, seqs: usize, q_heads: usize, head_dim: usize) -> Attention<'static> {
        let view = KvView { data: null_mut(), page_stride: 0, token_stride: 0, head_stride: 0 };
        let empty = Tensor::dense(DType::BF16, null_mut(), &[0, 8, 8]);
        Attention {
            q: empty,
            kv_dtype: DType::BF16,
            k: view,
            v: view,
            out: empty,
            lse: None,
            workspace: None,
            queries: Queries { num_seqs: None, starts: null(), used: None, longest: 0 },
            keys: Keys {
                starts: None,
                used: None,
                leftpad: None,
                storage: KeyStorage::Contiguous { total: 16 },
                longest: 0,
            },
            score: Score {
                softmax_scale: 1.0,
                q_scale: None,
                k_scale: None,
                softcap: 0.0,
                window_left: -1,
                window_right: -1,
                top_left: false,
                alibi: None,
                sinks: None,
            },
            v_scale: None,
            num_rows: rows,
            num_q_heads: q_heads,
            num_kv_heads: 2,
            head_dim,
            value_dim: head_dim,
            max_seqs: seqs,
            batch_invariant: false,
        }
    }

    /// An H200; without tensor maps as under an old driver.
    pub(in crate::cuda) fn device(has_tensor_maps: bool) -> Device {
        Device {
            capability: 90,
            shared_memory: 227 * 1024,
            shared_memory_per_sm: 228 * 1024,
            sms: 132,
            has_tensor_maps,
        }
    }

    fn named(problem: &Attention) -> Vec<(&'static str, i32, i32)> {
        named_on(problem, &device(false))
    }

    pub(super) fn named_on(problem: &Attention, device: &Device) -> Vec<(&'static str, i32, i32)> {
        names(&launches(problem, device).expect("the sizes are allowed"))
    }

    fn names(launches: &[Option<Launch>]) -> Vec<(&'static str, i32, i32)> {
        let describe = |l: &Launch| (variants::VARIANTS[l.variant].name, l.min_queries, l.max_queries);
        launches.iter().flatten().map(describe).collect()
    }

    #[test]
    fn lengths_are_shared_out_between_the_shapes_without_gap_or_overlap() {
        let decode = "attention_bf16_128_wide_plain";
        let prefill = "attention_bf16_128_prefill_plain";
        assert_eq!(named(&problem(64, 64, 8, 104)), [(decode, 1, i32::MAX)]);
        assert_eq!(named(&problem(65, 64, 8, 104)), [(prefill, 5, i32::MAX), (decode, 1, 4)]);
        // Nobody can have more than 4 queries.
        assert_eq!(named(&problem(4, 1, 8, 104)), [(decode, 1, 4)]);
        let invariant = Attention { batch_invariant: true, ..problem(64, 64, 8, 104) };
        assert_eq!(named(&invariant), [(prefill, 5, i32::MAX), ("attention_bf16_128_decode_plain", 1, 4)]);
        assert!(named(&problem(0, 64, 8, 104)).is_empty());
    }

    #[test]
    fn advice_moves_whole_sequences_and_never_leaves_one_out() {
        let advised = |longest, batch_invariant| {
            let plain = problem(640, 160, 8, 128);
            named(&Attention { queries: Queries { longest, ..plain.queries }, batch_invariant, ..plain })
        };
        let both = [("attention_bf16_128_prefill_plain", 5, i32::MAX), ("attention_bf16_128_decode_plain", 1, 4)];
        assert_eq!(advised(4, false), [("attention_bf16_128_decode_plain", 1, i32::MAX)]);
        assert_eq!(advised(8, false), both);
        assert_eq!(advised(4, true), both);
    }

    /// Whether the plan takes over an update with rows of these strides, and its launches.
    fn taking_over(
        problem: &Attention,
        scale: Option<Scale>,
        strides: &[i64],
    ) -> (bool, Vec<(&'static str, i32, i32)>) {
        let dims = [problem.num_rows, problem.num_kv_heads, problem.head_dim].map(|size| size as i64);
        let dense = Tensor::dense(problem.kv_dtype, null_mut(), &dims);
        let rows = NewRows { rows: Tensor { strides: Some(strides), ..dense }, cache: problem.k, scale };
        let slot_mapping = Tensor::dense(DType::I32, null_mut(), &dims[..1]);
        let (cache_dtype, copies) = (problem.kv_dtype, [None, None]);
        let (num_pages, page_size) = (4, 16);
        let update = KvCacheUpdate { key: rows, value: rows, cache_dtype, slot_mapping, copies, num_pages, page_size };
        let mut plan = Plan::on(problem, device(false)).expect("the sizes are allowed");
        (plan.take_over(&update), names(&plan.launches))
    }

    #[test]
    fn decode_takes_over_updates_that_it_can_store_and_comes_first() {
        let (decode, strides) = (problem(64, 64, 8, 128), [256, 128, 1]);
        assert_eq!(taking_over(&decode, None, &strides), (true, vec![("attention_bf16_128_wide_plain", 1, i32::MAX)]));
        let both = [("attention_bf16_128_decode_plain", 1, 4), ("attention_bf16_128_prefill_plain", 5, i32::MAX)];
        let invariant = Attention { batch_invariant: true, ..decode };
        assert_eq!(taking_over(&invariant, None, &strides), (true, both.to_vec()));
        // Nine CTAs of four warps a KV head, for as many tiles.
        let few = |rows| Attention { batch_invariant: true, ..problem(rows, 9, 8, 128) };
        assert_eq!(taking_over(&few(144), None, &strides), (true, both.to_vec()));
        let [first, second] = both;
        assert_eq!(taking_over(&few(145), None, &strides), (false, vec![second, first]));
        let scale = Some(Scale { values: null(), per_head: false });
        assert!(!taking_over(&decode, scale, &strides).0);
        assert!(!taking_over(&decode, None, &[256, 132, 1]).0);
        let of = |dtype| Attention { q: Tensor { dtype, ..decode.q }, kv_dtype: dtype, ..decode };
        assert!(taking_over(&of(DType::F32), None, &strides).0);
        assert!(!taking_over(&of(DType::F8E4M3FN), None, &strides).0);
        let wide = Attention { head_dim: 256, value_dim: 256, ..of(DType::F32) };
        assert!(!taking_over(&wide, None, &[512, 256, 1]).0);
    }

    #[test]
    fn more_tiles_than_a_grid_holds_are_refused() {
        let prefill =
            |seqs| launches(&Attention { num_kv_heads: 256, ..problem(1 << 27, seqs, 256, 8) }, &device(false));
        assert!(prefill(1 << 26).is_err_and(|e| e.message.contains("a grid has up to 2^31 - 1")));
        assert!(prefill(1 << 10).is_ok());
    }

    #[test]
    fn the_grid_holds_every_tile_of_every_batch() {
        for (rows, seqs, q_heads) in [(64, 64, 8), (1000, 7, 2), (1000, 999, 6), (300, 40, 48), (5, 0, 8)] {
            let problem = problem(rows, seqs, q_heads, 128);
            let device = device(false);
            let group = q_heads as i64 / 2;
            // The most tiles come from as many sequences as possible, each just past a multiple of the tile.
            for launch in launches(&problem, &device).expect("the sizes are allowed").iter().flatten() {
                let Kernel::Portable(tile) = launch.kernel else { panic!("the device has no tensor maps") };
                let (mut left, mut tiles) = (rows as i64, 0);
                let smallest = i64::from(launch.min_queries);
                for rest in (1..=seqs as i64).rev() {
                    let spare = (left - rest * smallest).max(0);
                    let queries = (smallest + spare).min(i64::from(launch.max_queries)).min(left);
                    if queries < smallest {
                        break;
                    }
                    tiles += (queries * group + tile.rows - 1) / tile.rows;
                    left -= queries;
                }
                assert!(tiles <= launch.tiles, "{rows} rows, {seqs} sequences, group {group}: {tiles} tiles");
                let shape = launch.shape(&problem, &device);
                let ctas = shape.grid[0] * shape.grid[1];
                assert!(launch.split.is_some() || i64::from(ctas) >= 2 * tiles.max(1));
                assert!(ctas.is_multiple_of(2));
            }
        }
    }
}
