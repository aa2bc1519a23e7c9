//! What hostile metadata may cost: no more than right metadata in a call of the same shapes.

#![allow(clippy::print_stdout, reason = "a table of what was measured")]

use super::array::{Array, BF16, Dtype, F8E4M3FN, F16, F32, I32, U8};
use super::case::i32s;
use super::entry::View;
use super::guard::{Guarded, Side};
use super::invocation::{Attr, Invocation};
use super::machine::runs_on_cpu;
use super::random::Random;
use std::time::Instant;
use xla_attention::{Action, RayonPool};

/// The shapes of a call: as many keys as rows, and a row for each query head of [`Sizes::heads`].
#[derive(Clone, Copy, Debug)]
pub struct Sizes {
    /// Of queries.
    pub dtype: Dtype,
    pub kv_dtype: Dtype,
    pub rows: usize,
    /// B
    pub slots: usize,
    /// (Hq, Hkv)
    pub heads: (usize, usize),
    pub head_dim: usize,
}

impl Sizes {
    /// A call that takes some milliseconds on the CPU, or some seconds on the emulator.
    pub fn small() -> Self {
        let (rows, slots) = if on_emulator() { (64, 32) } else { (512, 256) };
        Self { dtype: F32, kv_dtype: F32, rows, slots, heads: (4, 2), head_dim: 32 }
    }

    /// A row for each of 256 query heads in each of many sequences.
    pub fn planned() -> Self {
        let rows = if on_emulator() { 32 } else { 1000 };
        Self { rows, slots: rows, heads: (256, 1), head_dim: 8, ..Self::small() }
    }

    /// Calls that take some milliseconds on the device at hand.
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

    /// Calls that take some milliseconds over 8-bit keys, with queries of 8 and of 16 bits.
    pub fn large_fp8() -> Vec<Self> {
        let large = Self::large()[0];
        [F8E4M3FN, BF16].map(|dtype| Self { dtype, kv_dtype: F8E4M3FN, ..large }).to_vec()
    }

    /// More slots than a kernel holds in shared memory.
    pub fn many_slots() -> Self {
        let slots = if runs_on_cpu() { 1 << 14 } else { 1 << 16 };
        Self { rows: slots / 2, slots, ..Self::large()[0] }
    }

    fn out_dtype(self) -> Dtype {
        if self.dtype == F8E4M3FN { BF16 } else { self.dtype }
    }

    fn q(self) -> Array {
        self.ones(self.dtype, self.rows, self.heads.0)
    }

    fn kv(self, rows: usize) -> Array {
        self.ones(self.kv_dtype, rows, self.heads.1)
    }

    /// Rows for heads of a number, all elements the same.
    fn ones(self, dtype: Dtype, rows: usize, heads: usize) -> Array {
        let dims = [rows, heads, self.head_dim];
        Array { dtype, dims: dims.map(|n| n as i64).to_vec(), bytes: dtype.encode(1.0).repeat(dims.iter().product()) }
    }

    fn out_dims(self) -> [i64; 3] {
        [self.rows, self.heads.0, self.head_dim].map(|n| n as i64)
    }

    fn lse_dims(self) -> [i64; 2] {
        [self.heads.0, self.rows].map(|n| n as i64)
    }
}

/// The GPU is that of `tests/emulator`.
fn on_emulator() -> bool {
    !runs_on_cpu() && std::env::var_os("XLA_ATTENTION_EMULATOR").is_some()
}

const PAGE_SIZE: usize = 16;

/// A call of an operator for these starts of queries and keys; operators over pages have no starts of keys.
pub type Operator = fn(Sizes, &[i32], &[i32]) -> Invocation;

pub fn flash_attn_varlen(sizes: Sizes, starts_q: &[i32], starts_k: &[i32]) -> Invocation {
    varlen(Invocation::new("xla_gpu_flash_attn_varlen"), sizes, [starts_q, starts_k])
        .attribute("batch_invariant", Attr::Bool(false))
        .attribute("kv_layout", Attr::I64(0))
        .result("out", sizes.out_dtype(), &sizes.out_dims())
        .result("softmax_lse", F32, &sizes.lse_dims())
        .result("workspace", U8, &[1 << 24])
}

/// The same without a key: what is left is planning.
pub fn flash_attn_varlen_without_keys(sizes: Sizes, starts_q: &[i32], _: &[i32]) -> Invocation {
    let none = vec![0; starts_q.len()];
    let call = flash_attn_varlen(sizes, starts_q, &none);
    let one = sizes.kv(1);
    call.with_operand("k", one.clone()).with_operand("v", one)
}

/// The same with a `seqused_q` that leaves every row in use.
pub fn flash_attn_varlen_with_seqused_q(sizes: Sizes, starts_q: &[i32], starts_k: &[i32]) -> Invocation {
    flash_attn_varlen(sizes, starts_q, starts_k)
        .operand("seqused_k", Array::left_out(I32))
        .operand("block_table", Array::left_out(I32))
        .operand("seqused_q", i32s(&vec![i32::MAX; sizes.slots]))
}

pub fn flash_attn_varlen_bwd(sizes: Sizes, starts_q: &[i32], starts_k: &[i32]) -> Invocation {
    let (q, kv) = (sizes.q(), sizes.kv(sizes.rows));
    let call = Invocation::new("xla_gpu_flash_attn_varlen_bwd").operand("dout", q.clone());
    let mut call = varlen(call, sizes, [starts_q, starts_k]);
    let starts = call.operands.split_off(4);
    call = call.operand("out", q).operand("softmax_lse", Array::filled(F32, &sizes.lse_dims(), 0));
    call.operands.extend(starts);
    call.attribute("deterministic", Attr::Bool(false))
        .result("dq", sizes.dtype, &sizes.out_dims())
        .result("dk", sizes.dtype, &kv.dims)
        .result("dv", sizes.dtype, &kv.dims)
        .result("dsinks", F32, &[0])
        .result("workspace", U8, &[1 << 26])
}

/// Operands and attributes of both operators over packed keys.
fn varlen(call: Invocation, sizes: Sizes, [starts_q, starts_k]: [&[i32]; 2]) -> Invocation {
    call.operand("q", sizes.q())
        .operand("k", sizes.kv(sizes.rows))
        .operand("v", sizes.kv(sizes.rows))
        .operand("cu_seqlens_q", i32s(starts_q))
        .operand("cu_seqlens_k", i32s(starts_k))
        .attribute("causal", Attr::Bool(false))
        .attribute("max_seqlen_k", Attr::I64(0))
        .attribute("max_seqlen_q", Attr::I64(0))
        .attribute("softcap", Attr::F32(0.0))
        .attribute("softmax_scale", Attr::F32(0.125))
        .attribute("top_left", Attr::Bool(false))
        .attribute("window_left", Attr::I64(-1))
        .attribute("window_right", Attr::I64(-1))
}

/// Pages for as many tokens as there are rows.
fn cache(sizes: Sizes) -> Array {
    let pages = sizes.rows.div_ceil(PAGE_SIZE);
    let dims = [pages, PAGE_SIZE, 2 * sizes.heads.1, sizes.head_dim].map(|n| n as i64).to_vec();
    Array { dims, ..sizes.ones(sizes.kv_dtype, pages * PAGE_SIZE, 2 * sizes.heads.1) }
}

/// Every sequence has all keys of the cache.
pub fn paged_attention(sizes: Sizes, starts_q: &[i32], _: &[i32]) -> Invocation {
    let pages = sizes.rows.div_ceil(PAGE_SIZE);
    let slots = starts_q.len() - 1;
    let table: Vec<i32> = (0..slots).flat_map(|_| 0..pages as i32).collect();
    Invocation::new("xla_gpu_paged_attention")
        .operand("query", sizes.q())
        .operand("kv_cache", cache(sizes))
        .operand("context_lens", i32s(&vec![(pages * PAGE_SIZE) as i32; slots]))
        .operand("block_tables", Array::i32s(&[slots as i64, pages as i64], &table))
        .operand("query_start_loc", i32s(starts_q))
        .operand("num_seqs", i32s(&[slots as i32]))
        .attribute("batch_invariant", Attr::Bool(false))
        .attribute("scale", Attr::F32(0.125))
        .attribute("sliding_window", Attr::I64(-1))
        .attribute("soft_cap", Attr::F32(0.0))
        .result("out", sizes.out_dtype(), &sizes.out_dims())
        .result("softmax_lse", F32, &sizes.lse_dims())
        .result("workspace", U8, &[1 << 24])
}

/// The same, with new rows that go nowhere.
pub fn paged_attention_update(sizes: Sizes, starts_q: &[i32], starts_k: &[i32]) -> Invocation {
    let attention = paged_attention(sizes, starts_q, starts_k);
    let rows = sizes.ones(sizes.dtype, sizes.rows, sizes.heads.1);
    let mut call = Invocation { target: "xla_gpu_paged_attention_update", results: vec![], ..attention.clone() }
        .operand("key", rows.clone())
        .operand("value", rows)
        .operand("slot_mapping", Array::filled(I32, &[sizes.rows as i64], 0xff))
        .result("out", sizes.dtype, &sizes.out_dims())
        .result_in_place("kv_cache", 1);
    call.results.extend(attention.results.into_iter().skip(1));
    call
}

pub fn kv_cache_update(sizes: Sizes, slots: &[i32]) -> Invocation {
    let rows = sizes.ones(sizes.dtype, sizes.rows, sizes.heads.1);
    Invocation::new("xla_gpu_kv_cache_update")
        .operand("kv_cache", cache(sizes))
        .operand("key", rows.clone())
        .operand("value", rows)
        .operand("slot_mapping", i32s(slots))
        .attribute("kv_layout", Attr::I64(1))
        .result_in_place("kv_cache", 0)
}

/// Names and `B + 1` starts.
type Starts = Vec<(&'static str, Vec<i32>)>;

fn right_starts(rows: usize, slots: usize) -> Starts {
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

/// No call with hostile starts takes more than `most` times as long as the slowest with right ones.
pub fn hostile_starts_cost_no_more(what: &str, operator: Operator, sizes: Sizes, most: f64) {
    let Sizes { rows, slots, .. } = sizes;
    let (right, hostile) = (right_starts(rows, slots), hostile_starts(rows, slots));
    let call = |(name_q, starts_q): &(&str, Vec<i32>), (name_k, starts_k): &(&str, Vec<i32>)| {
        (format!("queries {name_q}; keys {name_k}"), operator(sizes, starts_q, starts_k))
    };
    let pairs = |some: &Starts, others: &Starts| -> Vec<_> {
        some.iter().flat_map(|q| others.iter().map(move |k| (q.clone(), k.clone()))).collect()
    };
    let same = hostile.iter().map(|starts| (starts.clone(), starts.clone())).collect();
    let hostile = [pairs(&hostile, &right), pairs(&right, &hostile), same].concat();
    let calls = |pairs: Vec<(_, _)>| pairs.into_iter().map(move |(q, k)| call(&q, &k));
    cost_no_more(&format!("{what}, {sizes:?}"), calls(pairs(&right, &right)), calls(hostile), most);
}

/// Slots that are equal, or are none, take no longer than a slot of its own for each row.
pub fn hostile_slots_cost_no_more(sizes: Sizes, most: f64) {
    let all = sizes.rows as i32;
    let of = |name: &str, slot: &dyn Fn(i32) -> i32| {
        (name.to_owned(), kv_cache_update(sizes, &(0..all).map(slot).collect::<Vec<_>>()))
    };
    let right = [of("ascending", &|row| row), of("far apart", &|row| row * 17 % all)];
    let hostile = [
        of("all equal", &|_| 3),
        of("two", &|row| row % 2),
        of("of one page", &|row| row % PAGE_SIZE as i32),
        of("from one end of i32 to the other", &|row| if row % 2 == 0 { i32::MIN } else { i32::MAX }),
    ];
    cost_no_more(&format!("kv_cache_update, {sizes:?}"), right, hostile, most);
}

/// Room for as many rows as the cache has tokens, which each sequence may name.
fn gather_kv_cache(sizes: Sizes, lens: &[i32], page: impl Fn(usize) -> i32) -> Invocation {
    let (pages, slots) = (sizes.rows.div_ceil(PAGE_SIZE), lens.len());
    let tables: Vec<i32> = (0..slots * pages).map(|entry| page(entry % pages)).collect();
    let rows = [sizes.rows, sizes.heads.1, sizes.head_dim].map(|n| n as i64);
    Invocation::new("xla_gpu_gather_kv_cache")
        .operand("k_cache", cache(sizes))
        .operand("v_cache", Array::left_out(sizes.kv_dtype))
        .operand("block_tables", Array::i32s(&[slots as i64, pages as i64], &tables))
        .operand("context_lens", i32s(lens))
        .attribute("kv_layout", Attr::I64(1))
        .result("keys", sizes.kv_dtype, &rows)
        .result("values", sizes.kv_dtype, &rows)
        .result("cu_seqlens", I32, &[slots as i64 + 1])
}

/// Lengths and pages of any kind take no longer to gather than right ones that fill the rows.
pub fn hostile_gathers_cost_no_more(sizes: Sizes, most: f64) {
    let Sizes { rows, slots, .. } = sizes;
    let lens = |len: &dyn Fn(usize) -> i32| (0..slots).map(len).collect::<Vec<_>>();
    let even = lens(&|_| (rows / slots) as i32);
    let ascending = |page: usize| page as i32;
    let of = |name: &str, lens: &[i32]| (name.to_owned(), gather_kv_cache(sizes, lens, ascending));
    let right = [of("one sequence", &lens(&|b| if b == 0 { rows as i32 } else { 0 })), of("even sequences", &even)];
    let hostile = [
        of("all of any length", &vec![i32::MAX; slots]),
        of("from one end of i32 to the other", &lens(&|b| if b % 2 == 0 { i32::MIN } else { i32::MAX })),
        of("the last alone", &lens(&|b| if b + 1 == slots { i32::MAX } else { -1 })),
        (
            "pages of no cache".to_owned(),
            gather_kv_cache(sizes, &even, |p| if p % 2 == 0 { i32::MIN } else { i32::MAX }),
        ),
    ];
    cost_no_more(&format!("gather_kv_cache, {sizes:?}"), right, hostile, most);
}

type Named = (String, Invocation);

/// Prints a table of all calls.
fn cost_no_more(
    what: &str,
    right: impl IntoIterator<Item = Named>,
    hostile: impl IntoIterator<Item = Named>,
    most: f64,
) {
    let time = |(name, call): Named| (name, seconds(&call));
    let right: Vec<_> = right.into_iter().map(time).collect();
    let hostile: Vec<_> = hostile.into_iter().map(time).collect();
    let slowest = right.iter().map(|(_, seconds)| *seconds).fold(0.0, f64::max);
    println!("{what}: milliseconds, times the slowest right call");
    for (name, seconds) in right.iter().chain(&hostile) {
        println!("{:10.3} {:6.2}  {name}", 1e3 * seconds, seconds / slowest);
    }
    for (name, seconds) in hostile {
        assert!(
            seconds <= most * slowest,
            "{what}, {name}: {:.1} ms, the slowest right call takes {:.1}",
            1e3 * seconds,
            1e3 * slowest
        );
    }
}

/// How long the quickest of some calls takes.
pub fn seconds(invocation: &Invocation) -> f64 {
    const CALLS: usize = 3;
    #[cfg(feature = "cuda")]
    if let Some(seconds) = super::device::on_chosen_gpu(|gpu| invocation.seconds_on_gpu(gpu, CALLS)) {
        return seconds;
    }
    let place = |name: &str, array: &Array| Guarded::new(name, Side::BeginsAtGuard, &array.bytes);
    let operands: Vec<_> = invocation.operands.iter().map(|(name, array)| place(name, array)).collect();
    let own: Vec<_> = invocation.results.iter().map(|r| place(r.name, &Array::filled(r.dtype, &r.dims, 0))).collect();
    let [inputs, outputs] =
        [&operands, &own].map(|list| list.iter().map(|b| View::dense(b.data())).collect::<Vec<_>>());
    let once = || {
        let began = Instant::now();
        // SAFETY: the views are of the buffers above.
        unsafe { invocation.enter(Action::RunOnCpu(&RayonPool), &inputs, &outputs) }.unwrap();
        began.elapsed().as_secs_f64()
    };
    (0..CALLS).map(|_| once()).fold(f64::INFINITY, f64::min)
}
