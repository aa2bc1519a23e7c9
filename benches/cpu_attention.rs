//! Attention on the CPU: GFLOP/s of prefill and of the gradients, and GB/s of K and V that decode reads, beside the
//! read bandwidth of the memory.
//!
//! `cargo bench --bench cpu_attention [-- FILTER...]` runs the workloads whose names contain all filters.
//! `RAYON_NUM_THREADS` sets the number of threads.

#![allow(clippy::print_stdout, clippy::unwrap_used, reason = "a bench prints its results and stops at the first error")]

use half::{bf16, f16};
use rayon::prelude::*;
use std::fmt;
use std::time::Instant;
use xla_attention::{Action, Attribute, Call, DType, Op, RayonPool, Tensor, call};

const PAGE_SIZE: usize = 16;
/// Distinct pages of workloads with [`Workload::few_pages`].
const FEW_PAGES: usize = 4;

/// Dtypes of q and of K and V; that of the output follows from q's.
#[derive(Clone, Copy)]
struct DTypes {
    q: DType,
    kv: DType,
}

impl DTypes {
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

impl fmt::Display for DTypes {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let text = if self.q == self.kv { self.q.to_string() } else { format!("{} over {}", self.q, self.kv) };
        f.pad(&text)
    }
}

/// The operation of a workload.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Operation {
    Attention,
    /// The gradients of attention over packed keys.
    Gradients,
}

/// The shapes and options of a call.
struct Workload {
    name: &'static str,
    dtypes: DTypes,
    /// (`len_q`, `len_k`) of each sequence.
    lengths: Vec<(usize, usize)>,
    q_heads: usize,
    kv_heads: usize,
    /// D and Dv.
    head_dim: usize,
    causal: bool,
    /// Whether K and V are in pages of one buffer, or packed in two buffers.
    paged: bool,
    /// Whether the block table names only a few pages, which stay in the CPU's cache, to measure the arithmetic alone.
    few_pages: bool,
    operation: Operation,
}

/// A cache line. Buffers begin on one, as XLA's do.
#[derive(Clone, Copy)]
#[repr(align(64))]
struct Line([u8; 64]);

/// At least `count` pseudo-random numbers around 0, in [-1, 1].
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
                // fp8 bit patterns of numbers of both signs around 1.
                _ => element[0] = ((number(first + i) * 16.0) as i8 as u8 & 0x8f) + 0x30,
            }
        }
        line
    };
    (0..count).step_by(in_line).map(line).collect()
}

/// Cumulative sequence lengths.
fn cu_seqlens(lengths: impl Iterator<Item = usize>) -> Vec<i32> {
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
    /// Key rows; the rows of paged keys include the ends of last pages.
    fn key_rows(&self) -> usize {
        let page_size = if self.paged { PAGE_SIZE } else { 1 };
        self.lengths.iter().map(|(_, len_k)| len_k.next_multiple_of(page_size)).sum()
    }

    /// Bytes of K and V.
    fn bytes(&self) -> usize {
        self.key_rows() * 2 * self.kv_heads * self.head_dim * self.dtypes.kv.size()
    }

    /// Multiplications and additions of the two products of attention, or the five of its gradients, over the visible
    /// (query, key) pairs.
    fn flops(&self) -> f64 {
        let visible = |len_q: usize, len_k: usize, i: usize| if self.causal { i + 1 + len_k - len_q } else { len_k };
        let pairs = |(len_q, len_k)| (0..len_q).map(|i| visible(len_q, len_k, i)).sum::<usize>();
        let products = if self.operation == Operation::Gradients { 5 } else { 2 };
        (2 * products * self.q_heads * self.head_dim * self.lengths.iter().copied().map(pairs).sum::<usize>()) as f64
    }

    /// A block table whose page ids are in a scattered order.
    fn block_table(&self) -> (Vec<i32>, [i64; 2]) {
        let pages = self.key_rows() / PAGE_SIZE;
        // A stride that is coprime to the number of pages takes each page once.
        let stride = (pages / 3..=pages + 1).find(|s| gcd(*s, pages) == 1).unwrap();
        let each = |(_, len_k): &(usize, usize)| len_k.div_ceil(PAGE_SIZE);
        let max_pages = self.lengths.iter().map(each).max().unwrap();
        let mut next = 0;
        let mut table = vec![0; self.lengths.len() * max_pages];
        for (row, count) in table.chunks_exact_mut(max_pages).zip(self.lengths.iter().map(each)) {
            for entry in &mut row[..count] {
                *entry = (next * stride % if self.few_pages { FEW_PAGES } else { pages }) as i32;
                next += 1;
            }
        }
        (table, [self.lengths.len() as i64, max_pages as i64])
    }

    /// The time of the fastest of several calls.
    fn time(&self) -> Seconds {
        if self.operation == Operation::Gradients { self.time_gradients() } else { self.time_attention() }
    }

    fn time_attention(&self) -> Seconds {
        let cu_seqlens_q = cu_seqlens(self.lengths.iter().map(|(len_q, _)| *len_q));
        let cu_seqlens_k = cu_seqlens(self.lengths.iter().map(|(_, len_k)| *len_k));
        let seqused_k: Vec<i32> = self.lengths.iter().map(|(_, len_k)| *len_k as i32).collect();
        let rows = *cu_seqlens_q.last().unwrap() as usize;
        let (q_dims, one) = ([rows as i64, self.q_heads as i64, self.head_dim as i64], [self.lengths.len() as i64]);
        let mut query = numbers(self.dtypes.q, rows * self.q_heads * self.head_dim);
        let mut out = numbers(self.dtypes.out(), rows * self.q_heads * self.head_dim);
        let mut lse = numbers(DType::F32, rows * self.q_heads);
        let half = self.key_rows() * self.kv_heads * self.head_dim;
        let (mut k, mut v) = (numbers(self.dtypes.kv, half * if self.paged { 2 } else { 1 }), Vec::new());
        let [key_rows, heads, d, page_size] =
            [self.key_rows(), self.kv_heads, self.head_dim, PAGE_SIZE].map(|x| x as i64);
        let (table, table_dims) = if self.paged { self.block_table() } else { (Vec::new(), [0, 0]) };
        let (k_dims, v_dims): (Vec<i64>, Vec<i64>) = if self.paged {
            (vec![key_rows / page_size, page_size, 2 * heads, d], vec![0])
        } else {
            v = numbers(self.dtypes.kv, half);
            (vec![key_rows, heads, d], vec![key_rows, heads, d])
        };
        let (cu_seqlens_dims, lse_dims) = ([one[0] + 1], [self.q_heads as i64, rows as i64]);
        let operands = [
            tensor(self.dtypes.q, &mut query, &q_dims),
            tensor(self.dtypes.kv, &mut k, &k_dims),
            tensor(self.dtypes.kv, &mut v, &v_dims),
            indices(&cu_seqlens_q, &cu_seqlens_dims),
            indices(&cu_seqlens_k, &cu_seqlens_dims),
            indices(&seqused_k, &one),
            if self.paged { indices(&table, &table_dims) } else { Tensor::ABSENT },
        ];
        let results = [tensor(self.dtypes.out(), &mut out, &q_dims), tensor(DType::F32, &mut lse, &lse_dims)];
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

    /// `out` and the lse are not those of an actual forward pass, which does not change the time. The lse is above all
    /// scores, so that the probabilities stay small.
    fn time_gradients(&self) -> Seconds {
        let cu_seqlens_q = cu_seqlens(self.lengths.iter().map(|(len_q, _)| *len_q));
        let cu_seqlens_k = cu_seqlens(self.lengths.iter().map(|(_, len_k)| *len_k));
        let [rows, keys] = [&cu_seqlens_q, &cu_seqlens_k].map(|starts| *starts.last().unwrap() as usize);
        let row_dims = [rows, self.q_heads, self.head_dim].map(|x| x as i64);
        let key_dims = [keys, self.kv_heads, self.head_dim].map(|x| x as i64);
        let (lse_dims, cu_seqlens_dims) = ([row_dims[1], row_dims[0]], [cu_seqlens_q.len() as i64]);
        let dtype = self.dtypes.q;
        let mut row_data = [0; 4].map(|_| numbers(dtype, rows * self.q_heads * self.head_dim));
        let mut key_data = [0; 4].map(|_| numbers(dtype, keys * self.kv_heads * self.head_dim));
        let lse = vec![(keys as f32).ln() + 1.0; rows * self.q_heads];
        let [dout, q, out, dq] = row_data.each_mut().map(|data| tensor(dtype, data, &row_dims));
        let [k, v, dk, dv] = key_data.each_mut().map(|data| tensor(dtype, data, &key_dims));
        let lse = Tensor::dense(DType::F32, lse.as_ptr().cast_mut().cast(), &lse_dims);
        let (cu_seqlens_q, cu_seqlens_k) =
            (indices(&cu_seqlens_q, &cu_seqlens_dims), indices(&cu_seqlens_k, &cu_seqlens_dims));
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
        let (operands, results) = (&[dout, q, k, v, out, lse, cu_seqlens_q, cu_seqlens_k], &[dq, dk, dv]);
        // SAFETY: the views describe the arrays above, which live through the calls.
        unsafe { time_calls(&Call { op, action, operands, results, attributes: &attributes }) }
    }
}

/// The time of the fastest of several calls, as many as take about two seconds.
///
/// # Safety
/// The call's views are live arrays.
unsafe fn time_calls(this: &Call) -> Seconds {
    // SAFETY: the caller guarantees that the views are live.
    let mut once = || unsafe { call(this) }.unwrap();
    let warm_up = fastest(1, &mut once);
    fastest((2.0 / warm_up.cpu).clamp(5.0, 200.0) as usize, once)
}

fn gcd(a: usize, b: usize) -> usize {
    if b == 0 { a } else { gcd(b, a % b) }
}

/// Time of a call.
#[derive(Clone, Copy)]
struct Seconds {
    wall: f64,
    /// CPU time of all threads of this process, which depends less on the load of the machine.
    cpu: f64,
}

/// The smallest wall time and the smallest CPU time of several runs.
fn fastest(times: usize, mut run: impl FnMut()) -> Seconds {
    let mut best = Seconds { wall: f64::INFINITY, cpu: f64::INFINITY };
    for _ in 0..times {
        let (wall, cpu) = (Instant::now(), cpu_seconds());
        run();
        best.cpu = best.cpu.min(cpu_seconds() - cpu);
        best.wall = best.wall.min(wall.elapsed().as_secs_f64());
    }
    best
}

fn cpu_seconds() -> f64 {
    let mut time = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    // SAFETY: `clock_gettime` writes the struct, which is live.
    unsafe { libc::clock_gettime(libc::CLOCK_PROCESS_CPUTIME_ID, &raw mut time) };
    time.tv_sec as f64 + time.tv_nsec as f64 * 1e-9
}

/// Bytes per second that all threads together read sequentially.
fn read_bandwidth() -> f64 {
    let data = vec![1u64; 1 << 26];
    let sum = || data.par_chunks(1 << 16).map(|chunk| chunk.iter().fold(0u64, |a, b| a ^ b)).reduce(|| 0, |a, b| a ^ b);
    (data.len() * 8) as f64
        / fastest(10, || {
            std::hint::black_box(sum());
        })
        .wall
}

fn workloads() -> Vec<Workload> {
    let prefill = |causal, dtypes| Workload {
        name: if causal { "prefill causal 1 x 2048, 8 heads" } else { "prefill full   1 x 2048, 8 heads" },
        dtypes,
        lengths: vec![(2048, 2048)],
        q_heads: 8,
        kv_heads: 8,
        head_dim: 128,
        causal,
        paged: false,
        few_pages: false,
        operation: Operation::Attention,
    };
    // Attention or gradients; each shape runs both.
    let training = |dtypes, name, (seqs, length): (usize, usize), head_dim, operation| Workload {
        name,
        lengths: vec![(length, length); seqs],
        head_dim,
        operation,
        ..prefill(true, dtypes)
    };
    let decode = |dtypes| Workload {
        name: "decode 8 x 2048, 32/8 heads",
        dtypes,
        lengths: vec![(1, 2048); 8],
        q_heads: 32,
        kv_heads: 8,
        head_dim: 128,
        causal: true,
        paged: true,
        few_pages: false,
        operation: Operation::Attention,
    };
    let cached = |dtypes| Workload { name: "decode 8 x 2048, 32/8 heads, in cache", few_pages: true, ..decode(dtypes) };
    let one_long =
        |dtypes| Workload { name: "decode 1 x 16384, 32/8 heads", lengths: vec![(1, 16384)], ..decode(dtypes) };
    let mha = |dtypes| Workload {
        name: "decode 4 x 2048, 16/16 heads",
        lengths: vec![(1, 2048); 4],
        q_heads: 16,
        kv_heads: 16,
        ..decode(dtypes)
    };
    let ragged = |dtypes| Workload {
        name: "ragged 2 chunks of 256, 14 decoding",
        lengths: (0..16).map(|b| (if b % 8 == 3 { 256 } else { 1 }, 300 + 97 * b)).collect(),
        ..decode(dtypes)
    };
    let two_bytes_and_four = [DTypes::F32, DTypes::BF16, DTypes::F16];
    let fp8 = [DTypes::BF16_E4M3, DTypes::BF16_E5M2, DTypes::F16_E4M3, DTypes::E4M3];
    let all: Vec<DTypes> = two_bytes_and_four.into_iter().chain(fp8).collect();
    let mut workloads = Vec::new();
    for causal in [false, true] {
        workloads.extend(all.iter().map(|dtypes| prefill(causal, *dtypes)));
    }
    workloads.extend(all.iter().map(|dtypes| decode(*dtypes)));
    workloads.extend(all.iter().map(|dtypes| cached(*dtypes)));
    for dtypes in two_bytes_and_four {
        workloads.extend([one_long(dtypes), mha(dtypes), ragged(dtypes)]);
    }
    for dtypes in [DTypes::F32, DTypes::BF16] {
        for (seqs, length, d, forward, backward) in TRAINING {
            workloads.push(training(dtypes, forward, (seqs, length), d, Operation::Attention));
            workloads.push(training(dtypes, backward, (seqs, length), d, Operation::Gradients));
        }
    }
    workloads
}

/// (sequences, their length, D, name for attention, name for gradients)
const TRAINING: [(usize, usize, usize, &str, &str); 4] = [
    (4, 512, 64, "training 4 x 512, 8 heads of 64", "gradients 4 x 512, 8 heads of 64"),
    (2, 1024, 64, "training 2 x 1024, 8 heads of 64", "gradients 2 x 1024, 8 heads of 64"),
    (2, 1024, 128, "training 2 x 1024, 8 heads of 128", "gradients 2 x 1024, 8 heads of 128"),
    (1, 2048, 128, "training 1 x 2048, 8 heads of 128", "gradients 1 x 2048, 8 heads of 128"),
];

fn main() {
    let filters: Vec<String> = std::env::args().skip(1).filter(|argument| !argument.starts_with("--")).collect();
    println!("{} threads, memory read {:.1} GB/s", rayon::current_num_threads(), read_bandwidth() / 1e9);
    for work in workloads() {
        let name = format!("{:38} {:18}", work.name, work.dtypes);
        if !filters.iter().all(|filter| name.contains(filter)) {
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
