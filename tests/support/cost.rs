//! What starts that go down and up may cost: no more than right ones in a call of the same shapes.

#![allow(clippy::print_stdout, reason = "a table of what was measured")]

use super::array::{Array, BF16, Dtype, F16, F32, I32, U8};
use super::case::i32s;
use super::guard::Side;
use super::invocation::{Attr, Invocation};
use super::machine::runs_on_cpu;
use super::random::Random;
use std::time::Instant;
use xla_attention::{Action, Call, DType, RayonPool, Tensor, call};

/// The shapes of a call: as many keys as rows, and a row for each query head of [`Sizes::heads`].
#[derive(Clone, Copy, Debug)]
pub struct Sizes {
    pub dtype: Dtype,
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
        Self { dtype: F32, rows, slots, heads: (4, 2), head_dim: 32 }
    }

    /// A row for each of 256 query heads in each of many sequences.
    pub fn planned() -> Self {
        let rows = if on_emulator() { 32 } else { 1000 };
        Self { rows, slots: rows, heads: (256, 1), head_dim: 8, ..Self::small() }
    }

    /// Calls that take some milliseconds on the device at hand.
    pub fn large() -> Vec<Self> {
        let large = Self { dtype: BF16, rows: 1024, slots: 1024, heads: (8, 2), head_dim: 64 };
        if runs_on_cpu() {
            return vec![large, Self { dtype: F32, ..large }];
        }
        let long = Self { rows: 8192, slots: 1024, head_dim: 128, ..large };
        let many = Self { rows: 4096, slots: 4096, ..long };
        let fp32 = Self { dtype: F32, rows: 2048, ..long };
        vec![long, Self { dtype: F16, head_dim: 64, ..long }, many, Self { head_dim: 80, ..many }, fp32]
    }

    /// Rows for heads of a number, all elements the same.
    fn ones(self, rows: usize, heads: usize) -> Array {
        let dims = [rows, heads, self.head_dim];
        Array {
            dtype: self.dtype,
            dims: dims.map(|n| n as i64).to_vec(),
            bytes: self.dtype.encode(1.0).repeat(dims.iter().product()),
        }
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
    let kv = sizes.ones(sizes.rows, sizes.heads.1);
    varlen(Invocation::new("xla_gpu_flash_attn_varlen"), sizes, "q", &kv, [starts_q, starts_k])
        .attribute("batch_invariant", Attr::Bool(false))
        .attribute("kv_layout", Attr::I64(0))
        .result("out", sizes.dtype, &sizes.out_dims())
        .result("softmax_lse", F32, &sizes.lse_dims())
        .result("workspace", U8, &[1 << 24])
}

/// The same without a key: what is left is planning.
pub fn flash_attn_varlen_without_keys(sizes: Sizes, starts_q: &[i32], _: &[i32]) -> Invocation {
    let none = vec![0; starts_q.len()];
    let call = flash_attn_varlen(sizes, starts_q, &none);
    let one = sizes.ones(1, sizes.heads.1);
    call.with_operand("k", one.clone()).with_operand("v", one)
}

pub fn flash_attn_varlen_bwd(sizes: Sizes, starts_q: &[i32], starts_k: &[i32]) -> Invocation {
    let kv = sizes.ones(sizes.rows, sizes.heads.1);
    let q = sizes.ones(sizes.rows, sizes.heads.0);
    let call = Invocation::new("xla_gpu_flash_attn_varlen_bwd").operand("dout", q.clone());
    let mut call = varlen(call, sizes, "q", &kv, [starts_q, starts_k]);
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
fn varlen(
    call: Invocation,
    sizes: Sizes,
    q: &'static str,
    kv: &Array,
    [starts_q, starts_k]: [&[i32]; 2],
) -> Invocation {
    call.operand(q, sizes.ones(sizes.rows, sizes.heads.0))
        .operand("k", kv.clone())
        .operand("v", kv.clone())
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

/// Every sequence has all keys of the cache.
pub fn paged_attention(sizes: Sizes, starts_q: &[i32], _: &[i32]) -> Invocation {
    let pages = sizes.rows.div_ceil(PAGE_SIZE);
    let slots = starts_q.len() - 1;
    let cache = sizes.ones(pages * PAGE_SIZE, 2 * sizes.heads.1);
    let dims = [pages, PAGE_SIZE, 2 * sizes.heads.1, sizes.head_dim].map(|n| n as i64);
    let table: Vec<i32> = (0..slots).flat_map(|_| 0..pages as i32).collect();
    Invocation::new("xla_gpu_paged_attention")
        .operand("query", sizes.ones(sizes.rows, sizes.heads.0))
        .operand("kv_cache", Array { dims: dims.to_vec(), ..cache })
        .operand("context_lens", i32s(&vec![(pages * PAGE_SIZE) as i32; slots]))
        .operand("block_tables", Array::i32s(&[slots as i64, pages as i64], &table))
        .operand("query_start_loc", i32s(starts_q))
        .operand("num_seqs", i32s(&[slots as i32]))
        .attribute("batch_invariant", Attr::Bool(false))
        .attribute("scale", Attr::F32(0.125))
        .attribute("sliding_window", Attr::I64(-1))
        .attribute("soft_cap", Attr::F32(0.0))
        .result("out", sizes.dtype, &sizes.out_dims())
        .result("softmax_lse", F32, &sizes.lse_dims())
        .result("workspace", U8, &[1 << 24])
}

/// The same, with new rows that go nowhere.
pub fn paged_attention_update(sizes: Sizes, starts_q: &[i32], starts_k: &[i32]) -> Invocation {
    let attention = paged_attention(sizes, starts_q, starts_k);
    let rows = sizes.ones(sizes.rows, sizes.heads.1);
    let mut call = Invocation { target: "xla_gpu_paged_attention_update", results: vec![], ..attention.clone() }
        .operand("key", rows.clone())
        .operand("value", rows)
        .operand("slot_mapping", Array::filled(I32, &[sizes.rows as i64], 0xff))
        .result("out", sizes.dtype, &sizes.out_dims())
        .result_in_place("kv_cache", 1);
    call.results.extend(attention.results.into_iter().skip(1));
    call
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

/// No hostile call takes more than `most` times as long as the slowest right one. Prints a table of all of them.
pub fn hostile_starts_cost_no_more(what: &str, operator: Operator, sizes: Sizes, most: f64) {
    let Sizes { rows, slots, .. } = sizes;
    let (right, hostile) = (right_starts(rows, slots), hostile_starts(rows, slots));
    let measure = |(name_q, starts_q): &(&str, Vec<i32>), (name_k, starts_k): &(&str, Vec<i32>)| {
        (format!("queries {name_q}; keys {name_k}"), seconds(&operator(sizes, starts_q, starts_k)))
    };
    let pairs = |some: &Starts, others: &Starts| -> Vec<_> {
        some.iter().flat_map(|q| others.iter().map(move |k| (q.clone(), k.clone()))).collect()
    };
    let times = |pairs: Vec<(_, _)>| -> Vec<(String, f64)> { pairs.iter().map(|(q, k)| measure(q, k)).collect() };
    let allowed = times(pairs(&right, &right));
    let slowest = allowed.iter().map(|(_, seconds)| *seconds).fold(0.0, f64::max);
    let same = hostile.iter().map(|starts| (starts.clone(), starts.clone())).collect();
    let found = times([pairs(&hostile, &right), pairs(&right, &hostile), same].concat());
    println!("{what}, {sizes:?}: milliseconds, times the slowest right call");
    for (name, seconds) in allowed.iter().chain(&found) {
        println!("{:10.3} {:6.2}  {name}", 1e3 * seconds, seconds / slowest);
    }
    for (name, seconds) in found {
        assert!(
            seconds <= most * slowest,
            "{what}, {sizes:?}, {name}: {:.1} ms, the slowest right call takes {:.1}",
            1e3 * seconds,
            1e3 * slowest
        );
    }
}

fn tensors(views: &[(DType, *mut u8, Vec<i64>)]) -> Vec<Tensor<'_>> {
    views.iter().map(|(dtype, data, dims)| Tensor::dense(*dtype, *data, dims)).collect()
}

/// How long the quickest of some calls takes.
fn seconds(invocation: &Invocation) -> f64 {
    const CALLS: usize = 3;
    #[cfg(feature = "cuda")]
    if let Some(seconds) = super::device::on_chosen_gpu(|gpu| invocation.seconds_on_gpu(gpu, CALLS)) {
        return seconds;
    }
    let side = Side::BeginsAtGuard;
    let place = |name: &str, array: &Array| super::frame::Buffer::place(name, side, array);
    let operands: Vec<_> = invocation.operands.iter().map(|(name, array)| place(name, array)).collect();
    let own: Vec<_> = invocation.results.iter().map(|r| place(r.name, &Array::filled(r.dtype, &r.dims, 0))).collect();
    let view = |b: &super::frame::Buffer| (DType(b.dtype.0), b.memory.data(), b.dims.clone());
    let inputs: Vec<_> = operands.iter().map(view).collect();
    let outputs: Vec<_> =
        invocation.results.iter().zip(&own).map(|(r, own)| view(r.alias.map_or(own, |at| &operands[at]))).collect();
    let (operands, results) = (tensors(&inputs), tensors(&outputs));
    let attributes = invocation.sorted_attributes();
    let action = Action::RunOnCpu(&RayonPool);
    let call_ = Call { op: invocation.op(), action, operands: &operands, results: &results, attributes: &attributes };
    let once = || {
        let began = Instant::now();
        // SAFETY: the views are of the buffers above.
        unsafe { call(&call_) }.unwrap();
        began.elapsed().as_secs_f64()
    };
    (0..CALLS).map(|_| once()).fold(f64::INFINITY, f64::min)
}
