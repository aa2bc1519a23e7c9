//! Tests of what hostile metadata costs: a call with it must not take longer than a call of the same shapes with valid
//! metadata.

#![allow(clippy::print_stdout, reason = "a table of what was measured")]

use super::{
    Array, AttentionCase, BF16, BatchSpec, BufferMemory, CacheUpdateCase, CallBuffers, Dtype, Dtypes, F8E4M3FN, F16,
    F32, GatherCase, GradientCase, GradientOptions, Invocation, KvGeometry, KvLayout, Mask, MemoryLayout, Numbers,
    PagedUpdateCase, Random, Side, count, dims_of, on_emulator, runs_on_cpu,
};
use std::time::Instant;
use xla_attention::Op;
#[cfg(feature = "cuda")]
use xla_attention::Stream;
use xla_attention::{Action, RayonPool};

/// The sizes of a call. It has as many keys as query rows.
#[derive(Clone, Copy, Debug)]
pub struct CostSizes {
    /// Dtype of the queries.
    pub dtype: Dtype,
    pub kv_dtype: Dtype,
    pub rows: usize,
    /// B, the number of sequence slots.
    pub slots: usize,
    /// (Hq, Hkv).
    pub heads: (usize, usize),
    pub head_dim: usize,
}

impl CostSizes {
    /// Sizes of a call that takes some milliseconds on the CPU and some seconds on the emulator.
    pub fn small() -> Self {
        let (rows, slots) = if on_emulator() { (64, 32) } else { (512, 256) };
        Self { dtype: F32, kv_dtype: F32, rows, slots, heads: (4, 2), head_dim: 32 }
    }

    /// Many sequences of one row each with 256 query heads, which make planning the work expensive.
    pub fn planned() -> Self {
        let rows = if on_emulator() { 32 } else { 1000 };
        Self { rows, slots: rows, heads: (256, 1), head_dim: 8, ..Self::small() }
    }

    /// Sizes of calls that take some milliseconds on the tested device.
    pub fn large() -> Vec<Self> {
        let of = |dtype| Self { dtype, kv_dtype: dtype, rows: 1024, slots: 1024, heads: (8, 2), head_dim: 64 };
        if runs_on_cpu() {
            return vec![of(BF16), of(F32)];
        }
        let long = |dtype| Self { rows: 8192, head_dim: 128, ..of(dtype) };
        let many = Self { rows: 4096, slots: 4096, ..long(BF16) };
        let fp32 = Self { rows: 2048, ..long(F32) };
        vec![long(BF16), Self { head_dim: 64, ..long(F16) }, many, Self { head_dim: 80, ..many }, fp32]
    }

    /// Sizes of calls over fp8 keys, with fp8 and with bf16 queries.
    pub fn large_fp8() -> Vec<Self> {
        let large = Self::large()[0];
        [F8E4M3FN, BF16].map(|dtype| Self { dtype, kv_dtype: F8E4M3FN, ..large }).to_vec()
    }

    /// More sequence slots than a kernel can keep in shared memory.
    pub fn many_slots() -> Self {
        let slots = if runs_on_cpu() { 1 << 14 } else { 1 << 16 };
        Self { rows: slots / 2, slots, ..Self::large()[0] }
    }

    /// Number of pages for as many tokens as there are rows.
    fn pages(self) -> usize {
        self.rows.div_ceil(PAGE_SIZE)
    }

    /// A call of attention with these starts. Contiguous keys are as many as the rows, and each sequence has those that
    /// its starts give it. Of a paged cache every sequence has all pages.
    fn case(self, target: Op, starts_q: &[i32], starts_k: &[i32]) -> AttentionCase {
        let paged = target == Op::PagedAttention;
        let (slots, pages) = (starts_q.len() - 1, self.pages());
        let out = if self.dtype == F8E4M3FN { BF16 } else { self.dtype };
        let kv_geometry = KvGeometry {
            layout: if paged { KvLayout::Interleaved } else { KvLayout::Contiguous },
            num_pages: if paged { pages } else { self.rows },
            page_size: if paged { PAGE_SIZE } else { 1 },
            kv_heads: self.heads.1,
            dims: [self.head_dim; 2],
        };
        let spec = BatchSpec {
            dtypes: Dtypes { q: self.dtype, kv: self.kv_dtype, out, scaled: false },
            heads: self.heads,
            head_dim: self.head_dim,
            mask: if paged { Mask::CAUSAL } else { Mask::FULL },
            lengths: vec![],
            ..BatchSpec::default()
        };
        let workspace = Some(1 << 24);
        let empty = AttentionCase::store(
            target,
            &spec.batch(),
            &MemoryLayout { layout: kv_geometry.layout, workspace, ..MemoryLayout::default().bare() },
        );
        AttentionCase {
            q: ones(self.dtype, &dims_of(&[self.rows, self.heads.0, self.head_dim])),
            kv: kv_geometry.shapes().iter().map(|dims| ones(self.kv_dtype, dims)).collect(),
            kv_geometry,
            max_pages: pages,
            cu_seqlens_q: starts_q.to_vec(),
            num_seqs: slots as i32,
            cu_seqlens_k: starts_k.to_vec(),
            seqused_k: paged.then(|| vec![(pages * PAGE_SIZE) as i32; slots]),
            block_table: (0..if paged { slots } else { 0 }).flat_map(|_| 0..pages as i32).collect(),
            ..empty
        }
    }
}

/// An array of ones.
fn ones(dtype: Dtype, dims: &[i64]) -> Array {
    Array { dtype, dims: dims.to_vec(), bytes: dtype.encode(1.0).repeat(count(dims)) }
}

const PAGE_SIZE: usize = 16;

/// Makes a call with these starts of queries and of keys. Operators over a paged cache ignore the starts of keys.
pub type BuildCall = fn(CostSizes, &[i32], &[i32]) -> Invocation;

pub fn flash_attn_varlen(sizes: CostSizes, starts_q: &[i32], starts_k: &[i32]) -> Invocation {
    sizes.case(Op::FlashAttnVarlen, starts_q, starts_k).invocation()
}

/// `flash_attn_varlen` without any key, so that planning takes most of the time.
pub fn flash_attn_varlen_without_keys(sizes: CostSizes, starts_q: &[i32], _: &[i32]) -> Invocation {
    let one_row = ones(sizes.kv_dtype, &dims_of(&[1, sizes.heads.1, sizes.head_dim]));
    let call = flash_attn_varlen(sizes, starts_q, &vec![0; starts_q.len()]);
    call.with_operand("k", one_row.clone()).with_operand("v", one_row)
}

/// `flash_attn_varlen` with a `seqused_q` that uses every row.
pub fn flash_attn_varlen_with_seqused_q(sizes: CostSizes, starts_q: &[i32], starts_k: &[i32]) -> Invocation {
    let case = sizes.case(Op::FlashAttnVarlen, starts_q, starts_k);
    AttentionCase { seqused_q: Some(vec![i32::MAX; sizes.slots]), ..case }.invocation()
}

pub fn flash_attn_varlen_bwd(sizes: CostSizes, starts_q: &[i32], starts_k: &[i32]) -> Invocation {
    let forward = sizes.case(Op::FlashAttnVarlen, starts_q, starts_k);
    let lse = Array::filled(F32, &dims_of(&[sizes.heads.0, sizes.rows]), 0);
    let (out, dout) = (forward.q.clone(), forward.q.clone());
    let forward = AttentionCase { workspace: Some(1 << 26), ..forward };
    GradientCase { forward, options: GradientOptions::MINIMAL, out, lse, dout, dlse: None }.invocation()
}

pub fn paged_attention(sizes: CostSizes, starts_q: &[i32], starts_k: &[i32]) -> Invocation {
    sizes.case(Op::PagedAttention, starts_q, starts_k).invocation()
}

/// `paged_attention_update` whose new rows have no slot.
pub fn paged_attention_update(sizes: CostSizes, starts_q: &[i32], starts_k: &[i32]) -> Invocation {
    let case = sizes.case(Op::PagedAttention, starts_q, starts_k);
    let row = ones(sizes.dtype, &dims_of(&[sizes.rows, sizes.heads.1, sizes.head_dim]));
    let (before, slots) = (case.kv[0].clone(), vec![-1; sizes.rows]);
    PagedUpdateCase {
        attention: case,
        before,
        scales_before: None,
        key: row.clone(),
        value: row,
        slots,
        wide_slots: false,
    }
    .invocation(true)
}

pub fn kv_cache_update(sizes: CostSizes, slots: &[i32]) -> Invocation {
    let CostSizes { dtype, heads: (_, heads), head_dim, .. } = sizes;
    let slots = slots.iter().map(|&slot| slot.into()).collect();
    let (num_pages, page_size, dims) = (sizes.pages(), PAGE_SIZE, [head_dim; 2]);
    CacheUpdateCase { dtype, num_pages, page_size, heads, dims, slots, ..CacheUpdateCase::default() }.invocation(true)
}

/// Names and lists of `B + 1` starts.
type Starts = Vec<(&'static str, Vec<i32>)>;

fn valid_starts(rows: usize, slots: usize) -> Starts {
    let of = |start: &dyn Fn(usize) -> usize| (0..=slots).map(|b| start(b) as i32).collect();
    vec![("one sequence", of(&|b| if b == 0 { 0 } else { rows })), ("even sequences", of(&|b| b * rows / slots))]
}

fn hostile_starts(rows: usize, slots: usize) -> Starts {
    let of = |start: &dyn Fn(usize) -> usize| (0..=slots).map(|b| start(b) as i32).collect();
    let mut random = Random::new(slots as u64);
    vec![
        ("0, T, 0, T", of(&|b| b % 2 * rows)),
        ("T, 0, T, 0", of(&|b| (b + 1) % 2 * rows)),
        ("0, T, 2, T, 4, T", of(&|b| if b % 2 == 0 { b * rows / slots } else { rows })),
        ("0, T-1, 1, T-2, 2", of(&|b| if b % 2 == 0 { b / 2 } else { rows - (b / 2).min(rows) })),
        ("descending", of(&|b| rows - b * rows / slots)),
        ("random", (0..=slots).map(|_| random.below(rows + 1) as i32).collect()),
        (
            "from one end of i32 to the other",
            (0..=slots).map(|b| if b % 2 == 0 { i32::MIN } else { i32::MAX }).collect(),
        ),
    ]
}

/// Asserts that no call with hostile starts takes more than `max_ratio` times as long as the slowest with valid starts.
pub fn hostile_starts_cost_no_more(description: &str, operator: BuildCall, sizes: CostSizes, max_ratio: f64) {
    let CostSizes { rows, slots, .. } = sizes;
    let (valid, hostile) = (valid_starts(rows, slots), hostile_starts(rows, slots));
    let call = |(name_q, starts_q): &(&str, Vec<i32>), (name_k, starts_k): &(&str, Vec<i32>)| {
        (format!("queries {name_q}; keys {name_k}"), operator(sizes, starts_q, starts_k))
    };
    let pairs = |some: &Starts, others: &Starts| -> Vec<_> {
        some.iter().flat_map(|q| others.iter().map(move |k| (q.clone(), k.clone()))).collect()
    };
    let same = hostile.iter().map(|starts| (starts.clone(), starts.clone())).collect();
    let hostile = [pairs(&hostile, &valid), pairs(&valid, &hostile), same].concat();
    let calls = |pairs: Vec<(_, _)>| pairs.into_iter().map(move |(q, k)| call(&q, &k));
    cost_no_more(&format!("{description}, {sizes:?}"), calls(pairs(&valid, &valid)), calls(hostile), max_ratio);
}

/// Asserts the same of cache updates whose rows share a slot or have none, compared with a slot per row.
pub fn hostile_slots_cost_no_more(sizes: CostSizes, max_ratio: f64) {
    let all = sizes.rows as i32;
    let of = |name: &str, slot: &dyn Fn(i32) -> i32| {
        (name.to_owned(), kv_cache_update(sizes, &(0..all).map(slot).collect::<Vec<_>>()))
    };
    let valid = [of("ascending", &|row| row), of("far apart", &|row| row * 17 % all)];
    let hostile = [
        of("all equal", &|_| 3),
        of("two", &|row| row % 2),
        of("of one page", &|row| row % PAGE_SIZE as i32),
        of("from one end of i32 to the other", &|row| if row % 2 == 0 { i32::MIN } else { i32::MAX }),
    ];
    cost_no_more(&format!("kv_cache_update, {sizes:?}"), valid, hostile, max_ratio);
}

/// A gather whose results have room for as many rows as the cache has tokens; every block table row names all pages.
fn gather_kv_cache(sizes: CostSizes, lens: &[i32], page: impl Fn(usize) -> i32) -> Invocation {
    let CostSizes { kv_dtype: dtype, heads: (_, heads), head_dim, rows: capacity, .. } = sizes;
    let (pages, lens) = (sizes.pages(), lens.to_vec());
    let tables = (0..lens.len() * pages).map(|entry| page(entry % pages)).collect();
    let (page_size, dims) = (PAGE_SIZE, [head_dim; 2]);
    let gather = GatherCase { dtype, out: dtype, num_pages: pages, page_size, heads, dims, ..GatherCase::default() };
    GatherCase { max_pages: pages, tables, lens, capacity, ..gather }.invocation()
}

/// Asserts the same of gathers with hostile lengths and pages, compared with valid ones that fill the results.
pub fn hostile_gathers_cost_no_more(sizes: CostSizes, max_ratio: f64) {
    let CostSizes { rows, slots, .. } = sizes;
    let lens = |len: &dyn Fn(usize) -> i32| (0..slots).map(len).collect::<Vec<_>>();
    let even = lens(&|_| (rows / slots) as i32);
    let ascending = |page: usize| page as i32;
    let of = |name: &str, lens: &[i32]| (name.to_owned(), gather_kv_cache(sizes, lens, ascending));
    let valid = [of("one sequence", &lens(&|b| if b == 0 { rows as i32 } else { 0 })), of("even sequences", &even)];
    let hostile = [
        of("all of any length", &vec![i32::MAX; slots]),
        of("from one end of i32 to the other", &lens(&|b| if b % 2 == 0 { i32::MIN } else { i32::MAX })),
        of("the last alone", &lens(&|b| if b + 1 == slots { i32::MAX } else { -1 })),
        (
            "pages of no cache".to_owned(),
            gather_kv_cache(sizes, &even, |p| if p % 2 == 0 { i32::MIN } else { i32::MAX }),
        ),
    ];
    cost_no_more(&format!("gather_kv_cache, {sizes:?}"), valid, hostile, max_ratio);
}

type Named = (String, Invocation);

/// Prints a table of all times and compares them.
fn cost_no_more(
    description: &str,
    valid: impl IntoIterator<Item = Named>,
    hostile: impl IntoIterator<Item = Named>,
    max_ratio: f64,
) {
    let time = |(name, call): Named| (name, seconds(&call));
    let valid: Vec<_> = valid.into_iter().map(time).collect();
    let hostile: Vec<_> = hostile.into_iter().map(time).collect();
    let slowest = valid.iter().map(|(_, seconds)| *seconds).fold(0.0, f64::max);
    println!("{description}: milliseconds, times the slowest valid call");
    for (name, seconds) in valid.iter().chain(&hostile) {
        println!("{:10.3} {:6.2}  {name}", 1e3 * seconds, seconds / slowest);
    }
    for (name, seconds) in hostile {
        assert!(
            seconds <= max_ratio * slowest,
            "{description}, {name}: {:.1} ms, the slowest valid call takes {:.1}",
            1e3 * seconds,
            1e3 * slowest
        );
    }
}

/// Seconds that a call takes until it is complete: the least of three.
pub fn seconds(invocation: &Invocation) -> f64 {
    #[cfg(feature = "cuda")]
    if let Some(seconds) = super::device::on_chosen_gpu(|gpu| {
        let launch = Action::LaunchCuda(Stream(gpu.stream as usize));
        seconds_of(invocation, &invocation.on_gpu(gpu, super::device::BufferPadding::None), launch, || gpu.finish())
    }) {
        return seconds;
    }
    seconds_of(invocation, &invocation.guarded(Side::BeginsAtGuard), Action::RunOnCpu(&RayonPool), || ())
}

fn seconds_of<M: BufferMemory>(call: &Invocation, buffers: &CallBuffers<M>, action: Action, finish: impl Fn()) -> f64 {
    let [inputs, outputs] = buffers.views();
    let once = || {
        let began = Instant::now();
        // SAFETY: the views are of `buffers`, which outlive the call.
        unsafe { call.run_action(action, &inputs, &outputs) }.unwrap();
        finish();
        began.elapsed().as_secs_f64()
    };
    // On a GPU the first call loads the kernels.
    once();
    (0..3).map(|_| once()).fold(f64::INFINITY, f64::min)
}
