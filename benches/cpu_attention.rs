//! Paged attention on the CPU: GFLOP/s of prefill, GB/s of K and V read by decode, beside the memory's own read rate.
//!
//! `cargo bench --bench cpu_attention`

#![allow(clippy::print_stdout, clippy::unwrap_used, reason = "a program that prints, and stops where it cannot")]

use half::{bf16, f16};
use rayon::prelude::*;
use std::time::Instant;
use xla_attention::{Action, Attribute, Call, DType, Op, RayonPool, Tensor, call};

/// A batch of equal sequences.
struct Workload {
    name: &'static str,
    dtype: DType,
    seqs: usize,
    len_q: usize,
    len_k: usize,
    q_heads: usize,
    kv_heads: usize,
    head_dim: usize,
    page_size: usize,
}

/// A cache line: XLA's buffers begin on one.
#[derive(Clone, Copy)]
#[repr(align(64))]
struct Line([u8; 64]);

/// Operands of a workload; pages lie in an order that is not the sequences'.
struct Operands {
    query: Vec<Line>,
    cache: Vec<Line>,
    out: Vec<Line>,
    context_lens: Vec<i32>,
    block_tables: Vec<i32>,
    query_start_loc: Vec<i32>,
}

fn numbers(dtype: DType, count: usize) -> Vec<Line> {
    let number = |i: usize| (i.wrapping_mul(2_654_435_761) >> 7) as f32 % 1000.0 / 500.0 - 1.0;
    let in_line = 64 / dtype.size();
    let line = |first: usize| {
        let mut line = Line([0; 64]);
        for (i, element) in line.0.chunks_exact_mut(dtype.size()).enumerate() {
            match dtype {
                DType::F16 => element.copy_from_slice(&f16::from_f32(number(first + i)).to_ne_bytes()),
                DType::BF16 => element.copy_from_slice(&bf16::from_f32(number(first + i)).to_ne_bytes()),
                _ => element.copy_from_slice(&number(first + i).to_ne_bytes()),
            }
        }
        line
    };
    (0..count).step_by(in_line).map(line).collect()
}

impl Workload {
    fn pages(&self) -> usize {
        self.len_k.div_ceil(self.page_size)
    }

    fn cache_elements(&self) -> usize {
        self.seqs * self.pages() * self.page_size * 2 * self.kv_heads * self.head_dim
    }

    fn operands(&self) -> Operands {
        let query = numbers(self.dtype, self.seqs * self.len_q * self.q_heads * self.head_dim);
        let pages = self.seqs * self.pages();
        // A stride that shares no factor with the number of pages visits each once.
        let stride = (pages / 3..=pages + 1).find(|s| gcd(*s, pages) == 1).unwrap();
        Operands {
            out: vec![Line([0; 64]); query.len()],
            query,
            cache: numbers(self.dtype, self.cache_elements()),
            context_lens: vec![self.len_k as i32; self.seqs],
            block_tables: (0..pages).map(|i| (i * stride % pages) as i32).collect(),
            query_start_loc: (0..=self.seqs).map(|b| (b * self.len_q) as i32).collect(),
        }
    }

    /// Seconds of the fastest of several calls.
    fn seconds(&self) -> f64 {
        let mut operands = self.operands();
        let [seqs, rows, pages] = [self.seqs, self.seqs * self.len_q, self.pages()].map(|x| x as i64);
        let [q_heads, kv_heads, d] = [self.q_heads, self.kv_heads, self.head_dim].map(|x| x as i64);
        let q_dims = [rows, q_heads, d];
        let cache_dims = [seqs * pages, self.page_size as i64, 2 * kv_heads, d];
        let (seq_dims, table_dims, start_dims) = ([seqs], [seqs, pages], [seqs + 1]);
        let num_seqs = [self.seqs as i32];
        let index = |x: &[i32], dims| Tensor::dense(DType::I32, x.as_ptr().cast_mut().cast(), dims);
        let views = [
            Tensor::dense(self.dtype, operands.query.as_mut_ptr().cast(), &q_dims),
            Tensor::dense(self.dtype, operands.cache.as_mut_ptr().cast(), &cache_dims),
            index(&operands.context_lens, &seq_dims),
            index(&operands.block_tables, &table_dims),
            index(&operands.query_start_loc, &start_dims),
            index(&num_seqs, &[1]),
        ];
        let results = [Tensor::dense(self.dtype, operands.out.as_mut_ptr().cast(), &q_dims)];
        let scale = (self.head_dim as f32).powf(-0.5);
        let attributes = [Attribute::Bool(false), Attribute::F32(scale), Attribute::I64(-1), Attribute::F32(0.0)];
        let action = Action::RunOnCpu(&RayonPool);
        let this =
            Call { op: Op::PagedAttention, action, operands: &views, results: &results, attributes: &attributes };
        // SAFETY: the views describe the operands, which live through the call.
        let mut once = || unsafe { call(&this) }.unwrap();
        let warm_up = fastest(1, &mut once);
        fastest((2.0 / warm_up).clamp(5.0, 200.0) as usize, once)
    }

    /// Multiplications and additions of both products over the visible (query, key) pairs.
    fn flops(&self) -> f64 {
        let pairs: usize = (0..self.len_q).map(|i| i + 1 + self.len_k - self.len_q).sum();
        (4 * self.seqs * self.q_heads * self.head_dim * pairs) as f64
    }
}

fn gcd(a: usize, b: usize) -> usize {
    if b == 0 { a } else { gcd(b, a % b) }
}

fn fastest(times: usize, mut run: impl FnMut()) -> f64 {
    (0..times).map(|_| seconds(&mut run)).fold(f64::INFINITY, f64::min)
}

fn seconds(run: &mut impl FnMut()) -> f64 {
    let start = Instant::now();
    run();
    start.elapsed().as_secs_f64()
}

/// Bytes a second that all threads together read in order.
fn read_rate() -> f64 {
    let data = vec![1u64; 1 << 26];
    let sum = || data.par_chunks(1 << 16).map(|chunk| chunk.iter().fold(0u64, |a, b| a ^ b)).reduce(|| 0, |a, b| a ^ b);
    (data.len() * 8) as f64
        / fastest(10, || {
            std::hint::black_box(sum());
        })
}

fn main() {
    println!("{} threads, memory read {:.1} GB/s", rayon::current_num_threads(), read_rate() / 1e9);
    let prefill = |name, dtype| Workload {
        name,
        dtype,
        seqs: 1,
        len_q: 2048,
        len_k: 2048,
        q_heads: 8,
        kv_heads: 8,
        head_dim: 128,
        page_size: 16,
    };
    let decode = |name, dtype| Workload { seqs: 8, len_q: 1, q_heads: 32, ..prefill(name, dtype) };
    for work in [
        prefill("prefill f32  1 x 2048, 8 heads, d128", DType::F32),
        prefill("prefill bf16 1 x 2048, 8 heads, d128", DType::BF16),
        decode("decode  f32  8 x 2048, 32/8 heads, d128", DType::F32),
        decode("decode  bf16 8 x 2048, 32/8 heads, d128", DType::BF16),
        decode("decode  f16  8 x 2048, 32/8 heads, d128", DType::F16),
    ] {
        let seconds = work.seconds();
        let bytes = (work.cache_elements() * work.dtype.size()) as f64;
        println!(
            "{:42} {:8.3} ms {:7.1} GFLOP/s {:6.1} GB/s",
            work.name,
            seconds * 1e3,
            work.flops() / seconds / 1e9,
            bytes / seconds / 1e9
        );
    }
}
