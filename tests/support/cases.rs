//! Paged attention calls of every shape, with everything that belongs to no sequence poisoned.
//!
//! A [`Batch`] is the numbers: queries, keys and values of each sequence. A [`Storage`] is how they lie in the operands:
//! page size, order of the pages, rows and slots to spare. [`PagedCase::store`] puts one into the other, so that laws
//! ("another page size changes nothing") store one batch twice.

use super::array::{Array, Dtype, F32, U8};
use super::invocation::{Attr, Invocation};
use super::random::Random;

/// One sequence of a batch: `q [len_q, Hq, D]`, `k` and `v [len_k, Hkv, D]`.
#[derive(Clone, Debug)]
pub struct SequenceData {
    pub len_q: usize,
    pub len_k: usize,
    pub q: Vec<f64>,
    pub k: Vec<f64>,
    pub v: Vec<f64>,
}

/// Sequences and the options of a call.
#[derive(Clone, Debug)]
#[expect(clippy::struct_field_names, reason = "batch_invariant is the attribute's name")]
pub struct Batch {
    pub dtype: Dtype,
    pub q_heads: usize,
    pub kv_heads: usize,
    pub head_dim: usize,
    pub scale: f32,
    /// `None` is off.
    pub window: Option<i64>,
    /// 0 is off.
    pub soft_cap: f32,
    pub batch_invariant: bool,
    pub sequences: Vec<SequenceData>,
}

/// What a batch looks like before its numbers are drawn.
#[derive(Clone, Debug)]
pub struct Shape {
    pub dtype: Dtype,
    /// (Hq, Hkv)
    pub heads: (usize, usize),
    pub head_dim: usize,
    /// (`len_q`, `len_k`) of each sequence
    pub lengths: Vec<(usize, usize)>,
    pub window: Option<i64>,
    pub soft_cap: f32,
    /// Multiplies the queries: large values make one key win.
    pub sharpness: f64,
    pub batch_invariant: bool,
    pub seed: u64,
}

impl Default for Shape {
    fn default() -> Self {
        Self {
            dtype: F32,
            heads: (4, 2),
            head_dim: 64,
            lengths: vec![(1, 17), (5, 5), (3, 33)],
            window: None,
            soft_cap: 0.0,
            sharpness: 1.0,
            batch_invariant: false,
            seed: 1,
        }
    }
}

impl Shape {
    /// Draw the numbers.
    pub fn batch(&self) -> Batch {
        let (q_heads, kv_heads) = self.heads;
        let d = self.head_dim;
        let sequence = |(index, &(len_q, len_k)): (usize, &(usize, usize))| {
            let mut random = Random::new(self.seed.wrapping_mul(1000).wrapping_add(index as u64));
            let mut draw = |count: usize, size: f64| -> Vec<f64> {
                (0..count).map(|_| self.dtype.round(size * random.normal())).collect()
            };
            SequenceData {
                len_q,
                len_k,
                q: draw(len_q * q_heads * d, self.sharpness),
                k: draw(len_k * kv_heads * d, 1.0),
                v: draw(len_k * kv_heads * d, 1.0),
            }
        };
        Batch {
            dtype: self.dtype,
            q_heads,
            kv_heads,
            head_dim: d,
            scale: (d as f32).sqrt().recip(),
            window: self.window,
            soft_cap: self.soft_cap,
            batch_invariant: self.batch_invariant,
            sequences: self.lengths.iter().enumerate().map(sequence).collect(),
        }
    }
}

/// Where the numbers lie and what lies around them.
#[derive(Clone, Debug)]
pub struct Storage {
    pub page_size: usize,
    /// Query rows before the first sequence and after the last.
    pub rows_around: (usize, usize),
    /// Slots of the metadata beyond `num_seqs`.
    pub spare_seqs: usize,
    /// Entries of a table beyond the longest sequence's pages.
    pub spare_entries: usize,
    pub spare_pages: usize,
    /// Decides the order of the pages and the poison.
    pub seed: u64,
}

impl Default for Storage {
    fn default() -> Self {
        Self { page_size: 16, rows_around: (0, 2), spare_seqs: 2, spare_entries: 3, spare_pages: 3, seed: 1 }
    }
}

/// A complete call of `xla_gpu_paged_attention`; the metadata may be changed before it is invoked.
#[derive(Clone, Debug)]
pub struct PagedCase {
    pub name: String,
    pub dtype: Dtype,
    pub q_heads: usize,
    pub kv_heads: usize,
    pub head_dim: usize,
    pub page_size: usize,
    pub max_pages: usize,
    pub scale: f32,
    pub window: Option<i64>,
    pub soft_cap: f32,
    pub batch_invariant: bool,
    /// `[T, Hq, D]`
    pub query: Array,
    /// `[P, page_size, 2*Hkv, D]`
    pub kv_cache: Array,
    /// `[S]`
    pub context_lens: Vec<i32>,
    /// `[S, max_pages]`
    pub block_tables: Vec<i32>,
    /// `[S+1]`
    pub query_start_loc: Vec<i32>,
    pub num_seqs: i32,
    /// The values of `query`.
    pub query_values: Vec<f64>,
    /// The values of `kv_cache`.
    pub cache_values: Vec<f64>,
}

impl PagedCase {
    /// Lay `batch` out as `storage` says. Unused rows, slots and pages hold NaN and infinities, unused metadata hostile
    /// numbers; so do stored keys that no query of their sequence sees.
    pub fn store(batch: &Batch, storage: &Storage) -> Self {
        let mut random = Random::new(storage.seed);
        let (q_heads, kv_heads, d) = (batch.q_heads, batch.kv_heads, batch.head_dim);
        let page_size = storage.page_size;
        let pages_of = |s: &SequenceData| s.len_k.div_ceil(page_size);
        let max_pages = batch.sequences.iter().map(pages_of).max().unwrap_or(0) + storage.spare_entries;
        let num_pages = batch.sequences.iter().map(pages_of).sum::<usize>() + storage.spare_pages;
        let max_seqs = batch.sequences.len() + storage.spare_seqs;
        let rows =
            storage.rows_around.0 + batch.sequences.iter().map(|s| s.len_q).sum::<usize>() + storage.rows_around.1;

        let mut poison = |count: usize| -> Vec<f64> {
            (0..count).map(|_| random.one_of(&[f64::NAN, f64::NAN, f64::INFINITY, f64::NEG_INFINITY])).collect()
        };
        let mut query = poison(rows * q_heads * d);
        let mut cache = poison(num_pages * page_size * 2 * kv_heads * d);
        let mut hostile = |count: usize| -> Vec<i32> { (0..count).map(|_| random.hostile_i32()).collect() };
        let (mut context_lens, mut block_tables) = (hostile(max_seqs), hostile(max_seqs * max_pages));
        let mut query_start_loc = hostile(max_seqs + 1);
        let mut free: Vec<usize> = (0..num_pages).collect();
        random.shuffle(&mut free);

        let mut row = storage.rows_around.0;
        query_start_loc[0] = row as i32;
        for (b, sequence) in batch.sequences.iter().enumerate() {
            query[row * q_heads * d..][..sequence.q.len()].copy_from_slice(&sequence.q);
            row += sequence.len_q;
            query_start_loc[b + 1] = row as i32;
            context_lens[b] = sequence.len_k as i32;
            let first_seen = batch.first_seen(sequence);
            let mut page = 0;
            for j in 0..sequence.len_k {
                if j % page_size == 0 {
                    page = free.pop().unwrap();
                    block_tables[b * max_pages + j / page_size] = page as i32;
                }
                if j < first_seen {
                    continue;
                }
                for head in 0..kv_heads {
                    // kv_cache [P, page_size, 2*Hkv, D], K of head h at 2h, V at 2h+1
                    let at = ((page * page_size + j % page_size) * 2 * kv_heads + 2 * head) * d;
                    let from = (j * kv_heads + head) * d;
                    cache[at..][..d].copy_from_slice(&sequence.k[from..][..d]);
                    cache[at + d..][..d].copy_from_slice(&sequence.v[from..][..d]);
                }
            }
            // A server that reuses pages which slid out of the window leaves the tables pointing at other data.
            if let Some(&unused) = free.first() {
                block_tables[b * max_pages..][..first_seen / page_size].fill(unused as i32);
            }
        }
        let mut case = Self {
            name: String::new(),
            dtype: batch.dtype,
            q_heads,
            kv_heads,
            head_dim: d,
            page_size,
            max_pages,
            scale: batch.scale,
            window: batch.window,
            soft_cap: batch.soft_cap,
            batch_invariant: batch.batch_invariant,
            query: Array::new(batch.dtype, &[rows as i64, q_heads as i64, d as i64], &query),
            kv_cache: Array::new(
                batch.dtype,
                &[num_pages as i64, page_size as i64, 2 * kv_heads as i64, d as i64],
                &cache,
            ),
            context_lens,
            block_tables,
            query_start_loc,
            num_seqs: batch.sequences.len() as i32,
            query_values: Vec::new(),
            cache_values: Vec::new(),
        };
        case.query_values = case.query.values();
        case.cache_values = case.kv_cache.values();
        let lengths: Vec<_> = batch.sequences.iter().map(|s| (s.len_q, s.len_k)).collect();
        case.name = format!(
            "{:?} {q_heads}/{kv_heads} heads, D {d}, (len_q, len_k) {lengths:?}, window {:?}, soft_cap {}, {storage:?}",
            batch.dtype, batch.window, batch.soft_cap
        );
        case
    }

    /// T
    pub fn rows(&self) -> usize {
        self.query.dims[0] as usize
    }

    /// S
    pub fn max_seqs(&self) -> usize {
        self.context_lens.len()
    }

    /// P
    pub fn num_pages(&self) -> usize {
        self.kv_cache.dims[0] as usize
    }

    /// The call with `out` alone.
    pub fn invocation_without_lse(&self) -> Invocation {
        let (seqs, max_pages) = (self.max_seqs() as i64, self.max_pages as i64);
        let mut call = Invocation::new("xla_gpu_paged_attention")
            .operand("query", self.query.clone())
            .operand("kv_cache", self.kv_cache.clone())
            .operand("context_lens", Array::i32s(&[seqs], &self.context_lens))
            .operand("block_tables", Array::i32s(&[seqs, max_pages], &self.block_tables))
            .operand("query_start_loc", Array::i32s(&[seqs + 1], &self.query_start_loc))
            .operand("num_seqs", Array::i32s(&[1], &[self.num_seqs]))
            .result("out", self.dtype, &self.query.dims)
            .attribute("batch_invariant", Attr::Bool(self.batch_invariant))
            .attribute("scale", Attr::F32(self.scale))
            .attribute("sliding_window", Attr::I64(self.window.unwrap_or(-1)))
            .attribute("soft_cap", Attr::F32(self.soft_cap));
        call.what.clone_from(&self.name);
        call
    }

    /// The call with `out`, `softmax_lse` and a workspace that is full of arbitrary bytes.
    pub fn invocation(&self) -> Invocation {
        self.invocation_without_lse().result("softmax_lse", F32, &[self.q_heads as i64, self.rows() as i64]).result(
            "workspace",
            U8,
            &[1000],
        )
    }
}

impl Batch {
    /// The first key that a query of the sequence sees; everything if it has no query.
    fn first_seen(&self, sequence: &SequenceData) -> usize {
        match self.window {
            _ if sequence.len_q == 0 => sequence.len_k,
            None => 0,
            Some(window) => {
                let first_position = sequence.len_k as i64 - sequence.len_q as i64;
                (first_position.saturating_sub(window - 1)).clamp(0, sequence.len_k as i64) as usize
            }
        }
    }

    /// The batch with only this sequence in it.
    pub fn only(&self, index: usize) -> Self {
        Self { sequences: vec![self.sequences[index].clone()], ..self.clone() }
    }
}

/// Named shapes, for each element type: what servers send, and the corners.
pub fn named_shapes(dtype: Dtype) -> Vec<(&'static str, Shape, Storage)> {
    let storage = Storage::default();
    let shape = Shape { dtype, ..Shape::default() };
    let paged = |page_size| Storage { page_size, ..storage.clone() };
    vec![
        ("one_head_decode", Shape { heads: (1, 1), head_dim: 8, lengths: vec![(1, 1)], ..shape.clone() }, paged(1)),
        (
            "smollm2_mixed",
            Shape { heads: (9, 3), lengths: vec![(7, 7), (1, 40), (1, 97), (12, 60)], ..shape.clone() },
            paged(16),
        ),
        (
            "llama3_8b_decode",
            Shape { heads: (32, 8), head_dim: 128, lengths: vec![(1, 1), (1, 65), (1, 128), (1, 33)], ..shape.clone() },
            paged(16),
        ),
        (
            "mqa_prefill_page_7",
            Shape { heads: (4, 1), head_dim: 40, lengths: vec![(19, 19), (13, 50)], ..shape.clone() },
            paged(7),
        ),
        (
            "head_dim_256",
            Shape { heads: (2, 2), head_dim: 256, lengths: vec![(9, 70), (1, 64)], ..shape.clone() },
            paged(64),
        ),
        (
            "head_dim_24_page_1",
            Shape { heads: (8, 2), head_dim: 24, lengths: vec![(3, 9), (1, 31)], ..shape.clone() },
            paged(1),
        ),
        (
            "long_prefill",
            Shape { heads: (2, 1), head_dim: 32, lengths: vec![(150, 150), (70, 201)], ..shape.clone() },
            paged(16),
        ),
        ("long_decode", Shape { heads: (4, 1), head_dim: 16, lengths: vec![(1, 1500)], ..shape.clone() }, paged(16)),
        (
            "long_decode_of_wide_rows",
            Shape { heads: (16, 8), head_dim: 256, lengths: vec![(1, 700), (2, 300), (1, 1)], ..shape.clone() },
            paged(16),
        ),
        (
            "chunk_at_the_end_of_a_long_context",
            Shape { heads: (2, 1), head_dim: 256, lengths: vec![(30, 2300)], ..shape.clone() },
            paged(64),
        ),
        (
            "window_1_sees_only_itself",
            Shape { window: Some(1), lengths: vec![(1, 20), (6, 40)], ..shape.clone() },
            paged(7),
        ),
        (
            "window_slides_over_pages",
            Shape { window: Some(24), lengths: vec![(1, 200), (33, 90), (40, 40)], ..shape.clone() },
            paged(7),
        ),
        ("window_wider_than_everything", Shape { window: Some(i64::MAX), ..shape.clone() }, paged(16)),
        ("soft_cap", Shape { soft_cap: 30.0, sharpness: 8.0, ..shape.clone() }, paged(16)),
        (
            "soft_cap_and_window",
            Shape { soft_cap: 2.5, window: Some(9), lengths: vec![(12, 60), (1, 45)], ..shape.clone() },
            paged(16),
        ),
        ("one_key_wins", Shape { sharpness: 60.0, lengths: vec![(20, 80), (1, 300)], ..shape.clone() }, paged(16)),
        ("more_queries_than_keys", Shape { lengths: vec![(20, 3), (9, 0), (4, 6)], ..shape.clone() }, paged(16)),
        (
            "sequences_without_queries",
            Shape { lengths: vec![(0, 10), (3, 9), (0, 0), (2, 2)], ..shape.clone() },
            paged(7),
        ),
        ("no_sequence", Shape { lengths: vec![], ..shape.clone() }, Storage { rows_around: (0, 5), ..paged(16) }),
        ("rows_before_the_first_start", shape.clone(), Storage { rows_around: (4, 3), ..paged(16) }),
        (
            "nothing_to_spare",
            Shape { lengths: vec![(2, 32), (1, 16)], ..shape.clone() },
            Storage { rows_around: (0, 0), spare_seqs: 0, spare_entries: 0, spare_pages: 0, ..paged(16) },
        ),
        ("batch_invariant", Shape { batch_invariant: true, ..shape }, paged(16)),
    ]
}
