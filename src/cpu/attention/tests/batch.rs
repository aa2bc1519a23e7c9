//! A ragged batch in memory.
//!
//! Everything that belongs to no sequence is NaN: unused pages, unused slots, keys that no query sees; table entries
//! that may not be read are hostile.

use super::super::plan::Plan;
use super::definition::Answer;
use super::numbers::{Random, from_bytes, round, to_bytes};
use super::shape::{Shape, Storage, Through};
use crate::cpu::simd::Isa;
use crate::ops::Op;
use crate::ops::attention::Attention;
use crate::ops::{Attribute, Bound, flash_attn_varlen, paged_attention};
use crate::pool::Pool;
use crate::tensor::{DType, Tensor};

/// Operands of a call.
#[derive(Clone)]
pub(super) struct Batch {
    pub(super) shape: Shape,
    pub(super) query: Vec<f64>,
    /// K, or K and V
    pub(super) k: Vec<f64>,
    pub(super) v: Vec<f64>,
    pub(super) num_pages: usize,
    pub(super) max_pages: usize,
    pub(super) cu_seqlens_q: Vec<i32>,
    pub(super) cu_seqlens_k: Vec<i32>,
    pub(super) seqused_q: Vec<i32>,
    pub(super) seqused_k: Vec<i32>,
    pub(super) leftpad_k: Vec<i32>,
    pub(super) block_table: Vec<i32>,
    /// For `paged_attention`.
    pub(super) num_seqs: i32,
    pub(super) slopes: Vec<f32>,
    pub(super) sinks: Vec<f32>,
    pub(super) q_scale: Vec<f32>,
    pub(super) k_scale: Vec<f32>,
    pub(super) v_scale: Vec<f32>,
}

impl Batch {
    pub(super) fn new(shape: Shape) -> Self {
        let mut random = Random(shape.seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1);
        let mut batch = Self::with_metadata(shape, &mut random);
        let Shape { q_heads, kv_heads, d, dv, q_dtype, kv_dtype, .. } = batch.shape;
        let row_len = q_heads * d;
        batch.query =
            vec![f64::NAN; (batch.cu_seqlens_q[batch.slots()] as usize + batch.shape.rows_around.1) * row_len];
        for (b, (len_q, len_k)) in batch.shape.lengths.clone().into_iter().enumerate() {
            let first = batch.row(b, 0) * row_len;
            batch.query[first..first + len_q * row_len].fill_with(|| round(q_dtype, 2.0 * random.signed()));
            let seen = (0..len_q)
                .flat_map(|i| batch.shape.visible(b, i))
                .fold(len_k..0, |all, j| all.start.min(j)..all.end.max(j + 1));
            for (j, head) in seen.flat_map(|j| (0..kv_heads).map(move |head| (j, head))) {
                let (k, v) = (batch.k_at(b, j, head), batch.v_at(b, j, head));
                batch.k[k..k + d].fill_with(|| round(kv_dtype, 1.5 * random.signed()));
                batch.values()[v..v + dv].fill_with(|| round(kv_dtype, 1.5 * random.signed()));
            }
        }
        batch
    }

    /// Lengths, pages, options; the query is empty, K and V are NaN.
    fn with_metadata(shape: Shape, random: &mut Random) -> Self {
        let count = shape.lengths.len();
        // `paged_attention` has two slots more than there are sequences, which hold garbage.
        let spare = if shape.through == Through::PagedAttention { 2 } else { 0 };
        let starts = |first: usize, len: &dyn Fn(usize) -> usize| {
            let ends = (0..count).scan(first, |end, b| {
                *end += len(b);
                Some(*end as i32)
            });
            [first as i32].into_iter().chain(ends).chain([i32::MIN; 2].into_iter().take(spare)).collect::<Vec<i32>>()
        };
        let given = |len: &dyn Fn(usize) -> usize| {
            (0..count).map(|b| len(b) as i32).chain([i32::MAX; 2].into_iter().take(spare)).collect::<Vec<i32>>()
        };
        let page_size = if let Storage::Paged(page_size, _) = shape.storage { page_size } else { 1 };
        let pages = |b: usize| shape.lengths[b].1.div_ceil(page_size);
        let max_pages = (0..count).map(pages).max().unwrap_or(0) + 1;
        let num_pages = (0..count).map(pages).sum::<usize>() + 3;
        let mut free: Vec<usize> = (0..num_pages).collect();
        let mut block_table: Vec<i32> =
            (0..(count + spare) * max_pages).map(|i| [i32::MIN, -1, i32::MAX][i % 3]).collect();
        for (b, entry) in (0..count).flat_map(|b| (0..pages(b)).map(move |entry| (b, entry))) {
            block_table[b * max_pages + entry] = free.swap_remove(random.below(free.len())) as i32;
        }
        let factors = |random: &mut Random, count| (0..count).map(|_| 1.0 + 0.5 * random.signed() as f32).collect();
        let scales = if shape.scales == Some(true) { shape.kv_heads } else { 1 };
        let slopes = if shape.alibi == Some(true) { count * shape.q_heads } else { shape.q_heads };
        let cu_seqlens_k = starts(2, &|b| shape.lengths[b].1 + shape.spare_keys(b));
        let rows = match shape.storage {
            Storage::Contiguous => cu_seqlens_k[count] as usize + 3,
            Storage::Paged(..) => num_pages * page_size,
        };
        let (k_len, v_len) = match shape.storage {
            Storage::Paged(_, 1..) => (rows * shape.kv_heads * 2 * shape.d, 0),
            _ => (rows * shape.kv_heads * shape.d, rows * shape.kv_heads * shape.dv),
        };
        Self {
            query: Vec::new(),
            k: vec![f64::NAN; k_len],
            v: vec![f64::NAN; v_len],
            num_pages,
            max_pages,
            cu_seqlens_q: starts(shape.rows_around.0, &|b| shape.lengths[b].0 + shape.spare_rows(b)),
            cu_seqlens_k,
            seqused_q: given(&|b| shape.lengths[b].0),
            seqused_k: given(&|b| shape.lengths[b].1),
            leftpad_k: given(&|b| shape.leftpad_of(b)),
            block_table,
            num_seqs: count as i32,
            slopes: (0..slopes).map(|_| 0.2 * random.signed() as f32).collect(),
            sinks: (0..shape.q_heads).map(|_| 3.0 * random.signed() as f32).collect(),
            q_scale: factors(random, scales),
            k_scale: factors(random, scales),
            v_scale: factors(random, scales),
            shape,
        }
    }

    fn slots(&self) -> usize {
        self.shape.lengths.len()
    }

    pub(super) fn rows(&self) -> usize {
        self.query.len() / (self.shape.q_heads * self.shape.d)
    }

    /// Row of query `i` of sequence `b`.
    pub(super) fn row(&self, b: usize, i: usize) -> usize {
        self.cu_seqlens_q[b] as usize + i
    }

    pub(super) fn query_row(&self, row: usize, head: usize) -> &[f64] {
        &self.query[(row * self.shape.q_heads + head) * self.shape.d..][..self.shape.d]
    }

    pub(super) fn key_row(&self, b: usize, j: usize, head: usize) -> &[f64] {
        &self.k[self.k_at(b, j, head)..][..self.shape.d]
    }

    pub(super) fn value_row(&self, b: usize, j: usize, head: usize) -> &[f64] {
        let values = if self.v.is_empty() { &self.k } else { &self.v };
        &values[self.v_at(b, j, head)..][..self.shape.dv]
    }

    /// The buffer that holds V.
    fn values(&mut self) -> &mut Vec<f64> {
        if self.v.is_empty() { &mut self.k } else { &mut self.v }
    }

    /// (page, offset in it) of key `j` of sequence `b`, or (0, row).
    fn token(&self, b: usize, j: usize) -> (usize, usize) {
        match self.shape.storage {
            Storage::Contiguous => (0, self.cu_seqlens_k[b] as usize + j),
            Storage::Paged(page_size, _) => {
                (self.block_table[b * self.max_pages + j / page_size] as usize, j % page_size)
            }
        }
    }

    /// First element of a K row in its buffer.
    fn k_at(&self, b: usize, j: usize, head: usize) -> usize {
        let (page, token) = self.token(b, j);
        let heads = self.shape.kv_heads;
        let row = match self.shape.storage {
            Storage::Contiguous => token * heads + head,
            Storage::Paged(page_size, 1) => (page * page_size + token) * 2 * heads + 2 * head,
            Storage::Paged(page_size, 3) => (page * 2 * page_size + token) * heads + head,
            Storage::Paged(page_size, _) => (page * page_size + token) * heads + head,
        };
        row * self.shape.d
    }

    /// First element of a V row in its buffer.
    fn v_at(&self, b: usize, j: usize, head: usize) -> usize {
        let (page, token) = self.token(b, j);
        let heads = self.shape.kv_heads;
        let row = match self.shape.storage {
            Storage::Contiguous => token * heads + head,
            Storage::Paged(page_size, 1) => (page * page_size + token) * 2 * heads + 2 * head + 1,
            Storage::Paged(page_size, 2) => ((self.num_pages + page) * page_size + token) * heads + head,
            Storage::Paged(page_size, 3) => ((page * 2 + 1) * page_size + token) * heads + head,
            Storage::Paged(page_size, _) => (page * page_size + token) * heads + head,
        };
        row * self.shape.dv
    }

    /// How many items and tasks the backend plans.
    pub(super) fn planned(&self) -> usize {
        let planned = std::cell::Cell::new(0);
        self.with_problem(false, |problem| {
            // SAFETY: the problem's arrays live for this call.
            let plan = unsafe { Plan::new(problem, Isa::best().sizes(), 4) }.unwrap();
            planned.set(plan.items.len() + plan.tasks.len());
        });
        planned.get()
    }

    /// What the backend computes. Outputs are NaN before the call.
    pub(super) fn run(&self, isa: Isa, pool: &dyn Pool) -> Answer {
        self.run_as(isa, pool, false)
    }

    pub(super) fn run_as(&self, isa: Isa, pool: &dyn Pool, batch_invariant: bool) -> Answer {
        self.with_problem(batch_invariant, |problem| {
            // SAFETY: the problem's arrays live for this call.
            unsafe { super::super::run_with(isa, problem, pool) }.unwrap();
        })
    }

    /// The results that `call` leaves, NaN before it.
    fn with_problem(&self, batch_invariant: bool, call: impl Fn(&Attention)) -> Answer {
        let shape = &self.shape;
        let bytes = [(shape.q_dtype, &self.query), (shape.kv_dtype, &self.k), (shape.kv_dtype, &self.v)];
        let [query, k, v] = bytes.map(|(dtype, x)| to_bytes(dtype, x));
        let mut out = to_bytes(shape.out_dtype, &vec![f64::NAN; self.rows() * shape.q_heads * shape.dv]);
        let mut lse = vec![f32::NAN; shape.q_heads * self.rows()];
        let [rows, q_heads, d, dv] = [self.rows(), shape.q_heads, shape.d, shape.dv].map(|x| x as i64);
        let (query_dims, out_dims, lse_dims) = ([rows, q_heads, d], [rows, q_heads, dv], [q_heads, rows]);
        let (k_dims, v_dims) = self.stored_dims();
        let view = |dtype, data: &[u8], dims| Tensor::dense(dtype, data.as_ptr().cast_mut(), dims);
        let [query, k, v] = [
            view(shape.q_dtype, &query, &query_dims),
            view(shape.kv_dtype, &k, &k_dims),
            view(shape.kv_dtype, &v, &v_dims),
        ];
        let results = [
            Tensor::dense(shape.out_dtype, out.as_mut_ptr(), &out_dims),
            Tensor::dense(DType::F32, lse.as_mut_ptr().cast(), &lse_dims),
        ];
        match shape.through {
            Through::PagedAttention => self.paged_attention(query, k, &results, batch_invariant, call),
            Through::FlashAttnVarlen => self.flash_attn_varlen([query, k, v], &results, batch_invariant, call),
        }
        Answer { out: from_bytes(shape.out_dtype, &out), lse: lse.into_iter().map(f64::from).collect() }
    }

    /// Shapes of K and V, or of the buffer of both and of none.
    fn stored_dims(&self) -> (Vec<i64>, Vec<i64>) {
        let Shape { kv_heads: heads, d, dv, storage, .. } = self.shape;
        let rows = self.k.len() / (heads * d);
        let (pages, two) = (self.num_pages, 2);
        let (k, v) = match storage {
            Storage::Contiguous => (vec![rows, heads, d], vec![rows, heads, dv]),
            Storage::Paged(page_size, 0) => (vec![pages, page_size, heads, d], vec![pages, page_size, heads, dv]),
            Storage::Paged(page_size, 1) => (vec![pages, page_size, two * heads, d], vec![0]),
            Storage::Paged(page_size, 2) => (vec![two, pages, page_size, heads, d], vec![0]),
            Storage::Paged(page_size, _) => (vec![pages, two, page_size, heads, d], vec![0]),
        };
        let signed = |dims: Vec<usize>| dims.into_iter().map(|x| x as i64).collect();
        (signed(k), signed(v))
    }

    fn paged_attention(
        &self,
        query: Tensor,
        cache: Tensor,
        results: &[Tensor],
        batch_invariant: bool,
        call: impl Fn(&Attention),
    ) {
        let (slots, num_seqs) = (self.seqused_k.len() as i64, [self.num_seqs]);
        let (seqs, table, starts, heads) = ([slots], [slots, self.max_pages as i64], [slots + 1], self.head_dims());
        let options = self.options(&heads);
        let given = [
            query,
            cache,
            index(&self.seqused_k, &seqs),
            index(&self.block_table, &table),
            index(&self.cu_seqlens_q, &starts),
            index(&num_seqs, &[1]),
        ];
        let operands: Vec<Tensor> = given.into_iter().chain(options).collect();
        let (left, _) = self.shape.window;
        let attributes = [
            Attribute::Bool(batch_invariant),
            Attribute::F32(self.shape.softmax_scale()),
            Attribute::I64(if left < 0 { -1 } else { left.saturating_add(1) }),
            Attribute::F32(self.shape.softcap),
        ];
        let bound = Bound::new(Op::PagedAttention.signature(), &operands, results, &attributes, true).unwrap();
        call(&paged_attention::problem(&bound).unwrap());
    }

    fn flash_attn_varlen(
        &self,
        [query, k, v]: [Tensor; 3],
        results: &[Tensor],
        batch_invariant: bool,
        call: impl Fn(&Attention),
    ) {
        let shape = &self.shape;
        let slots = shape.lengths.len() as i64;
        let (seqs, table, starts, heads) = ([slots], [slots, self.max_pages as i64], [slots + 1], self.head_dims());
        let kv_layout = if let Storage::Paged(_, layout) = shape.storage { layout } else { 0 };
        let paged = shape.storage != Storage::Contiguous;
        let [alibi, sinks, q_scale, k_scale, v_scale] = self.options(&heads);
        let given = |is_given: bool, tensor| if is_given { tensor } else { Tensor::ABSENT };
        let operands = [
            query,
            k,
            v,
            index(&self.cu_seqlens_q, &starts),
            // Not to be read where pages and lengths are given.
            if paged && shape.seqused_k { index(&[], &[0]) } else { index(&self.cu_seqlens_k, &starts) },
            given(shape.seqused_k, index(&self.seqused_k, &seqs)),
            given(paged, index(&self.block_table, &table)),
            given(shape.seqused_q, index(&self.seqused_q, &seqs)),
            given(shape.leftpad, index(&self.leftpad_k, &seqs)),
            alibi,
            sinks,
            q_scale,
            k_scale,
            v_scale,
        ];
        let attributes = [
            Attribute::Bool(batch_invariant),
            Attribute::Bool(shape.window.1 == 0),
            Attribute::I64(kv_layout),
            Attribute::I64(0),
            Attribute::I64(0),
            Attribute::F32(shape.softcap),
            Attribute::F32(shape.softmax_scale()),
            Attribute::Bool(shape.top_left),
            Attribute::I64(shape.window.0),
            Attribute::I64(shape.window.1),
        ];
        let bound = Bound::new(Op::FlashAttnVarlen.signature(), &operands, results, &attributes, true).unwrap();
        call(&flash_attn_varlen::problem(&bound).unwrap());
    }

    /// Shapes of slopes, sinks, and scales.
    fn head_dims(&self) -> (Vec<i64>, [i64; 1], [i64; 1]) {
        let (slots, q_heads) = (self.shape.lengths.len() as i64, self.shape.q_heads as i64);
        let slopes = if self.shape.alibi == Some(true) { vec![slots, q_heads] } else { vec![q_heads] };
        (slopes, [q_heads], [self.q_scale.len() as i64])
    }

    /// `alibi_slopes`, `sinks`, `q_scale`, `k_scale`, `v_scale`
    fn options<'a>(&'a self, (slopes, sinks, scales): &'a (Vec<i64>, [i64; 1], [i64; 1])) -> [Tensor<'a>; 5] {
        let given = |is_given: bool, data: &'a [f32], dims: &'a [i64]| {
            if is_given { Tensor::dense(DType::F32, data.as_ptr().cast_mut().cast(), dims) } else { Tensor::ABSENT }
        };
        let scaled = self.shape.scales.is_some();
        [
            given(self.shape.alibi.is_some(), &self.slopes, slopes),
            given(self.shape.sinks, &self.sinks, sinks),
            given(scaled, &self.q_scale, scales),
            given(scaled, &self.k_scale, scales),
            given(scaled, &self.v_scale, scales),
        ]
    }

    /// Hold what `isa` computes against the definition.
    pub(super) fn check(&self, isa: Isa, pool: &dyn Pool) {
        let (found, expected) = (self.run(isa, pool), self.expected());
        let largest = expected.out.iter().fold(0.0f64, |m, x| m.max(x.abs()));
        // Half a place of the output's type, and f32 arithmetic.
        let shape = &self.shape;
        let place = match shape.out_dtype {
            DType::F16 => 2f64.powi(-11),
            DType::BF16 => 2f64.powi(-8),
            _ => 0.0,
        };
        // p rounded to bf16, times |v| and v_scale of at most 1.5 each.
        let rounded = isa.sizes().1 == 2 && super::super::multiplies_bf16(shape.q_dtype, shape.out_dtype);
        let p_place = if rounded { 2f64.powi(-9) * 1.5 * 1.5 } else { 0.0 };
        let allowed = place * largest + 4e-6 * largest.max(1.0) + p_place;
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

fn index<'a>(data: &[i32], dims: &'a [i64]) -> Tensor<'a> {
    Tensor::dense(DType::I32, data.as_ptr().cast_mut().cast(), dims)
}
