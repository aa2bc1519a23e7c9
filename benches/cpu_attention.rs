//! Attention on the CPU: GFLOP/s of prefill and of the gradients, GB/s of K and V read by decode, beside the memory's own
//! read rate.
//!
//! `cargo bench --bench cpu_attention [-- WORDS]`: only the workloads whose names have all the words. How many threads:
//! `RAYON_NUM_THREADS`.

#![allow(clippy::print_stdout, clippy::unwrap_used, reason = "a program that prints, and stops where it cannot")]

use half::{bf16, f16};
use rayon::prelude::*;
use std::fmt;
use std::time::Instant;
use xla_attention::{Action, Attribute, Call, DType, Op, RayonPool, Tensor, call};

const PAGE_SIZE: usize = 16;
const FEW_PAGES: usize = 4;

/// Element types of q and out, and of K and V.
#[derive(Clone, Copy)]
struct Types {
    q: DType,
    kv: DType,
}

impl Types {
    const F32: Self = Self { q: DType::F32, kv: DType::F32 };
    const F16: Self = Self { q: DType::F16, kv: DType::F16 };
    const BF16: Self = Self { q: DType::BF16, kv: DType::BF16 };
    const BF16_E4M3: Self = Self { q: DType::BF16, kv: DType::F8E4M3FN };
    const BF16_E5M2: Self = Self { q: DType::BF16, kv: DType::F8E5M2 };
    const F16_E4M3: Self = Self { q: DType::F16, kv: DType::F8E4M3FN };
    const E4M3: Self = Self { q: DType::F8E4M3FN, kv: DType::F8E4M3FN };

    fn out(self) -> DType {
        if self.q == DType::F8E4M3FN { DType::BF16 } else { self.q }
    }
}

impl fmt::Display for Types {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let text = if self.q == self.kv { self.q.to_string() } else { format!("{} over {}", self.q, self.kv) };
        f.pad(&text)
    }
}

/// What is computed.
#[derive(Clone, Copy, PartialEq, Eq)]
enum What {
    Attention,
    /// Of packed keys.
    Gradients,
}

/// Sequences, and how they attend.
struct Workload {
    name: &'static str,
    types: Types,
    /// (`len_q`, `len_k`) of each sequence
    lengths: Vec<(usize, usize)>,
    q_heads: usize,
    kv_heads: usize,
    /// D and Dv
    head_dim: usize,
    causal: bool,
    /// K and V in pages of one buffer, or packed in two.
    paged: bool,
    /// All pages are the same few, which stay in the cache: what the arithmetic alone takes.
    few_pages: bool,
    what: What,
}

/// A cache line: XLA's buffers begin on one.
#[derive(Clone, Copy)]
#[repr(align(64))]
struct Line([u8; 64]);

fn numbers(dtype: DType, count: usize) -> Vec<Line> {
    let number = |i: usize| (i.wrapping_mul(2_654_435_761) >> 7) as f32 % 1000.0 / 500.0 - 1.0;
    let in_line = 64 / dtype.size();
    let line = |first: usize| {
        let mut line = Line([0; 64]);
        for (i, element) in line.0.chunks_exact_mut(dtype.size()).enumerate() {
            match dtype {
                DType::F16 => element.copy_from_slice(&f16::from_f32(number(first + i)).to_ne_bytes()),
                DType::BF16 => element.copy_from_slice(&bf16::from_f32(number(first + i)).to_ne_bytes()),
                DType::F32 => element.copy_from_slice(&number(first + i).to_ne_bytes()),
                // Codes of both signs around 1.
                _ => element[0] = ((number(first + i) * 16.0) as i8 as u8 & 0x8f) + 0x30,
            }
        }
        line
    };
    (0..count).step_by(in_line).map(line).collect()
}

/// The starts of rows that follow one another.
fn starts(lengths: impl Iterator<Item = usize>) -> Vec<i32> {
    let mut end = 0;
    let ends = lengths.map(|len| {
        end += len as i32;
        end
    });
    [0].into_iter().chain(ends).collect()
}

fn tensor<'a>(dtype: DType, data: &mut [Line], dims: &'a [i64]) -> Tensor<'a> {
    Tensor::dense(dtype, data.as_mut_ptr().cast(), dims)
}

fn indices<'a>(data: &[i32], dims: &'a [i64]) -> Tensor<'a> {
    Tensor::dense(DType::I32, data.as_ptr().cast_mut().cast(), dims)
}

impl Workload {
    /// Key rows, whole pages where they are paged.
    fn key_rows(&self) -> usize {
        let unit = if self.paged { PAGE_SIZE } else { 1 };
        self.lengths.iter().map(|(_, len_k)| len_k.next_multiple_of(unit)).sum()
    }

    fn bytes(&self) -> usize {
        self.key_rows() * 2 * self.kv_heads * self.head_dim * self.types.kv.size()
    }

    /// Multiplications and additions of both products, or the five of the gradients, over the visible (query, key) pairs.
    fn flops(&self) -> f64 {
        let visible = |len_q: usize, len_k: usize, i: usize| if self.causal { i + 1 + len_k - len_q } else { len_k };
        let pairs = |(len_q, len_k)| (0..len_q).map(|i| visible(len_q, len_k, i)).sum::<usize>();
        let products = if self.what == What::Gradients { 5 } else { 2 };
        (2 * products * self.q_heads * self.head_dim * self.lengths.iter().copied().map(pairs).sum::<usize>()) as f64
    }

    /// Page ids of each sequence, in an order that is not the sequences'.
    fn block_table(&self) -> (Vec<i32>, [i64; 2]) {
        let pages = self.key_rows() / PAGE_SIZE;
        // A stride that shares no factor with the number of pages visits each once.
        let stride = (pages / 3..=pages + 1).find(|s| gcd(*s, pages) == 1).unwrap();
        let each = |(_, len_k): &(usize, usize)| len_k.div_ceil(PAGE_SIZE);
        let most = self.lengths.iter().map(each).max().unwrap();
        let mut next = 0;
        let mut table = vec![0; self.lengths.len() * most];
        for (row, count) in table.chunks_exact_mut(most).zip(self.lengths.iter().map(each)) {
            for entry in &mut row[..count] {
                *entry = (next * stride % if self.few_pages { FEW_PAGES } else { pages }) as i32;
                next += 1;
            }
        }
        (table, [self.lengths.len() as i64, most as i64])
    }

    /// The fastest of several calls.
    fn time(&self) -> Seconds {
        if self.what == What::Gradients { self.time_gradients() } else { self.time_attention() }
    }

    fn time_attention(&self) -> Seconds {
        let starts_q = starts(self.lengths.iter().map(|(len_q, _)| *len_q));
        let starts_k = starts(self.lengths.iter().map(|(_, len_k)| *len_k));
        let seqused_k: Vec<i32> = self.lengths.iter().map(|(_, len_k)| *len_k as i32).collect();
        let rows = *starts_q.last().unwrap() as usize;
        let (q_dims, one) = ([rows as i64, self.q_heads as i64, self.head_dim as i64], [self.lengths.len() as i64]);
        let mut query = numbers(self.types.q, rows * self.q_heads * self.head_dim);
        let mut out = numbers(self.types.out(), rows * self.q_heads * self.head_dim);
        let mut lse = numbers(DType::F32, rows * self.q_heads);
        let half = self.key_rows() * self.kv_heads * self.head_dim;
        let (mut k, mut v) = (numbers(self.types.kv, half * if self.paged { 2 } else { 1 }), Vec::new());
        let [key_rows, heads, d, page_size] =
            [self.key_rows(), self.kv_heads, self.head_dim, PAGE_SIZE].map(|x| x as i64);
        let (table, table_dims) = if self.paged { self.block_table() } else { (Vec::new(), [0, 0]) };
        let (k_dims, v_dims): (Vec<i64>, Vec<i64>) = if self.paged {
            (vec![key_rows / page_size, page_size, 2 * heads, d], vec![0])
        } else {
            v = numbers(self.types.kv, half);
            (vec![key_rows, heads, d], vec![key_rows, heads, d])
        };
        let (starts_dims, lse_dims) = ([one[0] + 1], [self.q_heads as i64, rows as i64]);
        let operands = [
            tensor(self.types.q, &mut query, &q_dims),
            tensor(self.types.kv, &mut k, &k_dims),
            tensor(self.types.kv, &mut v, &v_dims),
            indices(&starts_q, &starts_dims),
            indices(&starts_k, &starts_dims),
            indices(&seqused_k, &one),
            if self.paged { indices(&table, &table_dims) } else { Tensor::ABSENT },
        ];
        let results = [tensor(self.types.out(), &mut out, &q_dims), tensor(DType::F32, &mut lse, &lse_dims)];
        let attributes = [
            Attribute::Bool(false),
            Attribute::Bool(self.causal),
            Attribute::I64(i64::from(self.paged)),
            Attribute::I64(0),
            Attribute::I64(0),
            Attribute::F32(0.0),
            Attribute::F32((self.head_dim as f32).powf(-0.5)),
            Attribute::Bool(false),
            Attribute::I64(-1),
            Attribute::I64(-1),
        ];
        let action = Action::RunOnCpu(&RayonPool);
        let (operands, results, attributes) = (&operands, &results, &attributes);
        // SAFETY: the views describe the arrays above, which live through the calls.
        unsafe { time_calls(&Call { op: Op::FlashAttnVarlen, action, operands, results, attributes }) }
    }

    /// Of numbers that no attention gave: they take as long. An lse above all scores keeps the weights small.
    fn time_gradients(&self) -> Seconds {
        let starts_q = starts(self.lengths.iter().map(|(len_q, _)| *len_q));
        let starts_k = starts(self.lengths.iter().map(|(_, len_k)| *len_k));
        let [rows, keys] = [&starts_q, &starts_k].map(|starts| *starts.last().unwrap() as usize);
        let row_dims = [rows, self.q_heads, self.head_dim].map(|x| x as i64);
        let key_dims = [keys, self.kv_heads, self.head_dim].map(|x| x as i64);
        let (lse_dims, starts_dims) = ([row_dims[1], row_dims[0]], [starts_q.len() as i64]);
        let dtype = self.types.q;
        let mut of_rows = [0; 4].map(|_| numbers(dtype, rows * self.q_heads * self.head_dim));
        let mut of_keys = [0; 4].map(|_| numbers(dtype, keys * self.kv_heads * self.head_dim));
        let lse = vec![(keys as f32).ln() + 1.0; rows * self.q_heads];
        let [dout, q, out, dq] = of_rows.each_mut().map(|data| tensor(dtype, data, &row_dims));
        let [k, v, dk, dv] = of_keys.each_mut().map(|data| tensor(dtype, data, &key_dims));
        let lse = Tensor::dense(DType::F32, lse.as_ptr().cast_mut().cast(), &lse_dims);
        let (starts_q, starts_k) = (indices(&starts_q, &starts_dims), indices(&starts_k, &starts_dims));
        let attributes = [
            Attribute::Bool(self.causal),
            Attribute::Bool(false),
            Attribute::I64(0),
            Attribute::I64(0),
            Attribute::F32(0.0),
            Attribute::F32((self.head_dim as f32).powf(-0.5)),
            Attribute::Bool(false),
            Attribute::I64(-1),
            Attribute::I64(-1),
        ];
        let (action, op) = (Action::RunOnCpu(&RayonPool), Op::FlashAttnVarlenBwd);
        let (operands, results) = (&[dout, q, k, v, out, lse, starts_q, starts_k], &[dq, dk, dv]);
        // SAFETY: the views describe the arrays above, which live through the calls.
        unsafe { time_calls(&Call { op, action, operands, results, attributes: &attributes }) }
    }
}

/// # Safety
/// The call's views are live arrays.
unsafe fn time_calls(this: &Call) -> Seconds {
    // SAFETY: the caller's word.
    let mut once = || unsafe { call(this) }.unwrap();
    let warm_up = fastest(1, &mut once);
    fastest((2.0 / warm_up.cpu).clamp(5.0, 200.0) as usize, once)
}

fn gcd(a: usize, b: usize) -> usize {
    if b == 0 { a } else { gcd(b, a % b) }
}

/// What a call takes: of time, and of this process' time on all cores together, which neighbours disturb less.
#[derive(Clone, Copy)]
struct Seconds {
    wall: f64,
    cpu: f64,
}

/// The least wall time and the least processor time of several calls.
fn fastest(times: usize, mut run: impl FnMut()) -> Seconds {
    let mut least = Seconds { wall: f64::INFINITY, cpu: f64::INFINITY };
    for _ in 0..times {
        let (wall, cpu) = (Instant::now(), cpu_seconds());
        run();
        least.cpu = least.cpu.min(cpu_seconds() - cpu);
        least.wall = least.wall.min(wall.elapsed().as_secs_f64());
    }
    least
}

fn cpu_seconds() -> f64 {
    let mut time = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    // SAFETY: writes the struct.
    unsafe { libc::clock_gettime(libc::CLOCK_PROCESS_CPUTIME_ID, &raw mut time) };
    time.tv_sec as f64 + time.tv_nsec as f64 * 1e-9
}

/// Bytes a second that all threads together read in order.
fn read_rate() -> f64 {
    let data = vec![1u64; 1 << 26];
    let sum = || data.par_chunks(1 << 16).map(|chunk| chunk.iter().fold(0u64, |a, b| a ^ b)).reduce(|| 0, |a, b| a ^ b);
    (data.len() * 8) as f64
        / fastest(10, || {
            std::hint::black_box(sum());
        })
        .wall
}

fn workloads() -> Vec<Workload> {
    let prefill = |causal, types| Workload {
        name: if causal { "prefill causal 1 x 2048, 8 heads" } else { "prefill full   1 x 2048, 8 heads" },
        types,
        lengths: vec![(2048, 2048)],
        q_heads: 8,
        kv_heads: 8,
        head_dim: 128,
        causal,
        paged: false,
        few_pages: false,
        what: What::Attention,
    };
    // Gradients beside the attention of the same shape.
    let training = |types, name, (seqs, length): (usize, usize), head_dim, what| Workload {
        name,
        lengths: vec![(length, length); seqs],
        head_dim,
        what,
        ..prefill(true, types)
    };
    let decode = |types| Workload {
        name: "decode 8 x 2048, 32/8 heads",
        types,
        lengths: vec![(1, 2048); 8],
        q_heads: 32,
        kv_heads: 8,
        head_dim: 128,
        causal: true,
        paged: true,
        few_pages: false,
        what: What::Attention,
    };
    let cached = |types| Workload { name: "decode 8 x 2048, 32/8 heads, in cache", few_pages: true, ..decode(types) };
    let one_long =
        |types| Workload { name: "decode 1 x 16384, 32/8 heads", lengths: vec![(1, 16384)], ..decode(types) };
    let mha = |types| Workload {
        name: "decode 4 x 2048, 16/16 heads",
        lengths: vec![(1, 2048); 4],
        q_heads: 16,
        kv_heads: 16,
        ..decode(types)
    };
    let ragged = |types| Workload {
        name: "ragged 2 chunks of 256, 14 decoding",
        lengths: (0..16).map(|b| (if b % 8 == 3 { 256 } else { 1 }, 300 + 97 * b)).collect(),
        ..decode(types)
    };
    let two_bytes_and_four = [Types::F32, Types::BF16, Types::F16];
    let fp8 = [Types::BF16_E4M3, Types::BF16_E5M2, Types::F16_E4M3, Types::E4M3];
    let all: Vec<Types> = two_bytes_and_four.into_iter().chain(fp8).collect();
    let mut workloads = Vec::new();
    for causal in [false, true] {
        workloads.extend(all.iter().map(|types| prefill(causal, *types)));
    }
    workloads.extend(all.iter().map(|types| decode(*types)));
    workloads.extend(all.iter().map(|types| cached(*types)));
    for types in two_bytes_and_four {
        workloads.extend([one_long(types), mha(types), ragged(types)]);
    }
    for types in [Types::F32, Types::BF16] {
        for (seqs, length, d, forward, backward) in TRAINING {
            workloads.push(training(types, forward, (seqs, length), d, What::Attention));
            workloads.push(training(types, backward, (seqs, length), d, What::Gradients));
        }
    }
    workloads
}

/// Sequences, their length, D, and what attention and gradients are called.
const TRAINING: [(usize, usize, usize, &str, &str); 4] = [
    (4, 512, 64, "training 4 x 512, 8 heads of 64", "gradients 4 x 512, 8 heads of 64"),
    (2, 1024, 64, "training 2 x 1024, 8 heads of 64", "gradients 2 x 1024, 8 heads of 64"),
    (2, 1024, 128, "training 2 x 1024, 8 heads of 128", "gradients 2 x 1024, 8 heads of 128"),
    (1, 2048, 128, "training 1 x 2048, 8 heads of 128", "gradients 1 x 2048, 8 heads of 128"),
];

fn main() {
    let words: Vec<String> = std::env::args().skip(1).filter(|word| !word.starts_with("--")).collect();
    println!("{} threads, memory read {:.1} GB/s", rayon::current_num_threads(), read_rate() / 1e9);
    for work in workloads() {
        let name = format!("{:38} {:18}", work.name, work.types);
        if !words.iter().all(|word| name.contains(word)) {
            continue;
        }
        let Seconds { wall, cpu } = work.time();
        println!(
            "{name} {:8.3} ms {:8.3} CPU ms {:7.1} GFLOP/s {:6.1} GB/s",
            wall * 1e3,
            cpu * 1e3,
            work.flops() / wall / 1e9,
            work.bytes() as f64 / wall / 1e9
        );
    }
}
