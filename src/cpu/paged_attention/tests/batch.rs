//! A ragged batch in memory, and its attention in f64.
//!
//! Everything that belongs to no sequence is NaN: unused pages, unused slots, keys that no query sees; table entries
//! that may not be read are hostile.

use crate::cpu::simd::Isa;
use crate::ops::paged_attention::{PagedAttention, SIGNATURE};
use crate::ops::{Attribute, Bound};
use crate::pool::Pool;
use crate::tensor::{DType, Tensor};
use half::{bf16, f16};

/// xorshift, for numbers that look random and are always the same.
pub(super) struct Random(pub(super) u64);

impl Random {
    pub(super) fn below(&mut self, n: usize) -> usize {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        ((self.0 >> 33) as usize) % n
    }
    fn signed(&mut self) -> f64 {
        self.below(1 << 24) as f64 / f64::from(1 << 23) - 1.0
    }
}

/// What a batch looks like.
#[derive(Clone, Debug)]
pub(super) struct Shape {
    pub(super) dtype: DType,
    pub(super) q_heads: usize,
    pub(super) kv_heads: usize,
    pub(super) d: usize,
    pub(super) page_size: usize,
    /// `sliding_window`, -1 is off
    pub(super) window: i64,
    pub(super) soft_cap: f32,
    /// (`len_q`, `len_k`) of each sequence
    pub(super) lengths: Vec<(usize, usize)>,
    /// Rows behind the last sequence
    pub(super) padding_rows: usize,
    pub(super) seed: u64,
}

impl Default for Shape {
    fn default() -> Self {
        Self {
            dtype: DType::F32,
            q_heads: 4,
            kv_heads: 2,
            d: 64,
            page_size: 16,
            window: -1,
            soft_cap: 0.0,
            lengths: vec![(1, 40)],
            padding_rows: 0,
            seed: 1,
        }
    }
}

/// Operands of a call.
#[derive(Clone)]
pub(super) struct Batch {
    pub(super) shape: Shape,
    pub(super) query: Vec<f64>,
    /// `[P, page_size, 2 * Hkv, D]`
    pub(super) cache: Vec<f64>,
    pub(super) num_pages: usize,
    pub(super) max_pages: usize,
    pub(super) context_lens: Vec<i32>,
    pub(super) block_tables: Vec<i32>,
    pub(super) query_start_loc: Vec<i32>,
    pub(super) num_seqs: i32,
}

/// `out [T, Hq, D]`, widened, and `lse [Hq, T]`.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct Answer {
    pub(super) out: Vec<f64>,
    pub(super) lse: Vec<f64>,
}

pub(super) fn round(dtype: DType, x: f64) -> f64 {
    match dtype {
        DType::F16 => f16::from_f64(x).to_f64(),
        DType::BF16 => bf16::from_f64(x).to_f64(),
        _ => f64::from(x as f32),
    }
}

fn to_bytes(dtype: DType, x: &[f64]) -> Vec<u8> {
    match dtype {
        DType::F16 => x.iter().flat_map(|x| f16::from_f64(*x).to_ne_bytes()).collect(),
        DType::BF16 => x.iter().flat_map(|x| bf16::from_f64(*x).to_ne_bytes()).collect(),
        _ => x.iter().flat_map(|x| (*x as f32).to_ne_bytes()).collect(),
    }
}

fn from_bytes(dtype: DType, bytes: &[u8]) -> Vec<f64> {
    let half = |f: fn([u8; 2]) -> f64| bytes.chunks_exact(2).map(|b| f(b.try_into().unwrap())).collect();
    match dtype {
        DType::F16 => half(|b| f16::from_ne_bytes(b).to_f64()),
        DType::BF16 => half(|b| bf16::from_ne_bytes(b).to_f64()),
        _ => bytes.chunks_exact(4).map(|b| f64::from(f32::from_ne_bytes(b.try_into().unwrap()))).collect(),
    }
}

pub(super) fn scale(d: usize) -> f32 {
    1.7 / (d as f32).sqrt()
}

impl Batch {
    pub(super) fn new(shape: Shape) -> Self {
        let mut random = Random(shape.seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1);
        let lengths = shape.lengths.clone();
        let slots = lengths.len() + 2;
        let pages: Vec<usize> = lengths.iter().map(|(_, len_k)| len_k.div_ceil(shape.page_size)).collect();
        let max_pages = pages.iter().max().unwrap_or(&0) + 1;
        let num_pages = pages.iter().sum::<usize>() + 3;
        let mut free: Vec<usize> = (0..num_pages).collect();
        let (token_len, row_len) = (2 * shape.kv_heads * shape.d, shape.q_heads * shape.d);
        let mut batch = Self {
            query: Vec::new(),
            cache: vec![f64::NAN; num_pages * shape.page_size * token_len],
            num_pages,
            max_pages,
            context_lens: vec![i32::MAX; slots],
            block_tables: (0..slots * max_pages).map(|i| [i32::MIN, -1, i32::MAX][i % 3]).collect(),
            query_start_loc: vec![i32::MIN; slots + 1],
            num_seqs: lengths.len() as i32,
            shape,
        };
        let dtype = batch.shape.dtype;
        let mut row = 0;
        batch.query_start_loc[0] = 0;
        for (b, (len_q, len_k)) in lengths.into_iter().enumerate() {
            row += len_q;
            batch.query_start_loc[b + 1] = row as i32;
            batch.context_lens[b] = len_k as i32;
            for entry in 0..pages[b] {
                let page = free.swap_remove(random.below(free.len()));
                batch.block_tables[b * max_pages + entry] = page as i32;
            }
            let first_seen = (0..len_q).filter_map(|i| batch.visible(b, i).next()).min().unwrap_or(len_k);
            for j in first_seen..len_k {
                let at = batch.token(b, j) * token_len;
                for x in &mut batch.cache[at..at + token_len] {
                    *x = round(dtype, 1.5 * random.signed());
                }
            }
        }
        batch.query = (0..row * row_len).map(|_| round(dtype, 2.0 * random.signed())).collect();
        batch.query.resize((row + batch.shape.padding_rows) * row_len, f64::NAN);
        batch
    }

    pub(super) fn rows(&self) -> usize {
        self.query.len() / (self.shape.q_heads * self.shape.d)
    }

    /// Keys that query `i` of sequence `b` sees, from the definition alone.
    fn visible(&self, b: usize, i: usize) -> impl Iterator<Item = usize> + use<> {
        let (len_q, len_k) = self.shape.lengths[b];
        let (position, window) = (i as i64 + len_k as i64 - len_q as i64, self.shape.window);
        (0..len_k).filter(move |j| {
            let j = *j as i64;
            j <= position && (window == -1 || j > position - window)
        })
    }

    /// Place of key `j` of sequence `b` in the cache, in tokens.
    fn token(&self, b: usize, j: usize) -> usize {
        let page = self.block_tables[b * self.max_pages + j / self.shape.page_size] as usize;
        page * self.shape.page_size + j % self.shape.page_size
    }

    /// The definition in f64, rows of no sequence included.
    pub(super) fn expected(&self) -> Answer {
        let Shape { q_heads, kv_heads, d, .. } = self.shape;
        let rows = self.rows();
        let mut answer = Answer { out: vec![0.0; rows * q_heads * d], lse: vec![f64::NEG_INFINITY; q_heads * rows] };
        for b in 0..self.shape.lengths.len() {
            for i in 0..self.shape.lengths[b].0 {
                for h in 0..q_heads {
                    let row = self.query_start_loc[b] as usize + i;
                    let q = &self.query[(row * q_heads + h) * d..][..d];
                    let k_at = |j: usize| (self.token(b, j) * kv_heads + h / (q_heads / kv_heads)) * 2 * d;
                    let keys: Vec<usize> = self.visible(b, i).collect();
                    let score = |j: &usize| {
                        let k = &self.cache[k_at(*j)..][..d];
                        let s = f64::from(scale(d)) * q.iter().zip(k).map(|(q, k)| q * k).sum::<f64>();
                        let cap = f64::from(self.shape.soft_cap);
                        if cap > 0.0 { cap * (s / cap).tanh() } else { s }
                    };
                    let scores: Vec<f64> = keys.iter().map(score).collect();
                    let sum: f64 = scores.iter().map(|s| s.exp()).sum();
                    answer.lse[h * rows + row] = sum.ln();
                    for (j, s) in keys.iter().zip(scores) {
                        let v = &self.cache[k_at(*j) + d..][..d];
                        for (o, v) in answer.out[(row * q_heads + h) * d..][..d].iter_mut().zip(v) {
                            *o += s.exp() / sum * v;
                        }
                    }
                }
            }
        }
        answer
    }

    /// What the backend computes. Outputs are NaN before the call.
    pub(super) fn run(&self, isa: Isa, pool: &dyn Pool) -> Answer {
        self.run_as(isa, pool, false)
    }

    pub(super) fn run_as(&self, isa: Isa, pool: &dyn Pool, batch_invariant: bool) -> Answer {
        let Shape { dtype, q_heads, kv_heads, d, page_size, .. } = self.shape;
        let [rows, q_heads, kv_heads, d, page_size] = [self.rows(), q_heads, kv_heads, d, page_size].map(|x| x as i64);
        let slots = self.context_lens.len() as i64;
        let (query, cache) = (to_bytes(dtype, &self.query), to_bytes(dtype, &self.cache));
        let mut out = to_bytes(dtype, &vec![f64::NAN; self.query.len()]);
        let mut lse = vec![f32::NAN; (q_heads * rows) as usize];
        let view = |dtype, data: *const u8, dims| Tensor::dense(dtype, data.cast_mut(), dims);
        let index = |data: &[i32], dims| Tensor::dense(DType::I32, data.as_ptr().cast_mut().cast(), dims);
        let q_dims = [rows, q_heads, d];
        let cache_dims = [self.num_pages as i64, page_size, 2 * kv_heads, d];
        let (seq_dims, table_dims, start_dims) = ([slots], [slots, self.max_pages as i64], [slots + 1]);
        let num_seqs = [self.num_seqs];
        let operands = [
            view(dtype, query.as_ptr(), &q_dims),
            view(dtype, cache.as_ptr(), &cache_dims),
            index(&self.context_lens, &seq_dims),
            index(&self.block_tables, &table_dims),
            index(&self.query_start_loc, &start_dims),
            index(&num_seqs, &[1]),
        ];
        let lse_dims = [q_heads, rows];
        let results = [
            Tensor::dense(dtype, out.as_mut_ptr(), &q_dims),
            Tensor::dense(DType::F32, lse.as_mut_ptr().cast(), &lse_dims),
        ];
        let attributes = [
            Attribute::Bool(batch_invariant),
            Attribute::F32(scale(self.shape.d)),
            Attribute::I64(self.shape.window),
            Attribute::F32(self.shape.soft_cap),
        ];
        let bound = Bound::new(&SIGNATURE, &operands, &results, &attributes, true).unwrap();
        let problem = PagedAttention::new(&bound).unwrap();
        // SAFETY: the views are of the arrays above.
        unsafe { super::super::run_with(isa, &problem, pool) }.unwrap();
        Answer { out: from_bytes(dtype, &out), lse: lse.into_iter().map(f64::from).collect() }
    }

    /// Hold what `isa` computes against the definition.
    pub(super) fn check(&self, isa: Isa, pool: &dyn Pool) {
        let (found, expected) = (self.run(isa, pool), self.expected());
        let largest = expected.out.iter().fold(0.0f64, |m, x| m.max(x.abs()));
        // Half a place of the output's type, and f32 arithmetic.
        let place = match self.shape.dtype {
            DType::F16 => 2f64.powi(-11),
            DType::BF16 => 2f64.powi(-8),
            _ => 0.0,
        };
        let allowed = place * largest + 4e-6 * largest.max(1.0);
        for (i, (found, expected)) in found.out.iter().zip(&expected.out).enumerate() {
            let error = (found - expected).abs();
            assert!(error <= allowed, "{isa:?} {:?}: out[{i}] is {found}, expected {expected}", self.shape);
        }
        for (i, (found, expected)) in found.lse.iter().zip(&expected.lse).enumerate() {
            let same =
                found.to_bits() == expected.to_bits() || (found - expected).abs() <= 1e-5 * expected.abs().max(1.0);
            assert!(same, "{isa:?} {:?}: lse[{i}] is {found}, expected {expected}", self.shape);
        }
    }
}
