//! Attention problems as numbers: the sequences of a batch, their sizes and options, independent of a memory layout.

use super::{BF16, Dtype, F8E4M3FN, F8E5M2, F16, F32, I8, Mask, Numbers, Random, Tree, bounded, random_tree, shown};
use std::fmt;

/// Dtypes of the queries, of keys and values, and of the output.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub struct Dtypes {
    pub q: Dtype,
    pub kv: Dtype,
    pub out: Dtype,
    /// Whether each row of keys and values has a scale, in `kv_scale_cache`.
    pub scaled: bool,
}

impl Dtypes {
    /// The table of `docs/semantics.md#dtypes`.
    pub const ALL: [Self; 13] = [
        Self::same(F32),
        Self::same(F16),
        Self::same(BF16),
        Self::over(F16, F8E4M3FN),
        Self::over(F16, F8E5M2),
        Self::over(BF16, F8E4M3FN),
        Self::over(BF16, F8E5M2),
        Self::narrow(BF16),
        Self::narrow(F16),
        Self::wide(F16, F16),
        Self::wide(BF16, BF16),
        Self::wide(F16, F8E5M2),
        Self::wide(BF16, F8E4M3FN),
    ];

    pub const fn same(dtype: Dtype) -> Self {
        Self { q: dtype, kv: dtype, out: dtype, scaled: false }
    }

    /// Queries in one dtype over a cache in another.
    pub const fn over(q: Dtype, kv: Dtype) -> Self {
        Self { q, kv, out: q, scaled: false }
    }

    /// Queries, keys and values in f8e4m3fn.
    pub const fn narrow(out: Dtype) -> Self {
        Self { q: F8E4M3FN, kv: F8E4M3FN, out, scaled: false }
    }

    /// An output of f32, for results that are merged.
    pub const fn wide(q: Dtype, kv: Dtype) -> Self {
        Self { q, kv, out: F32, scaled: false }
    }

    /// Those of paged caches with a scale per row.
    pub const SCALED: [Self; 6] = [
        Self::scaled(BF16, I8, BF16),
        Self::scaled(F16, F8E4M3FN, F16),
        Self::scaled(BF16, F8E4M3FN, BF16),
        Self::scaled(F16, I8, F16),
        Self::scaled(BF16, I8, F32),
        Self::scaled(F16, F8E4M3FN, F32),
    ];

    /// Queries over a cache with a scale per row.
    pub const fn scaled(q: Dtype, kv: Dtype, out: Dtype) -> Self {
        Self { q, kv, out, scaled: true }
    }

    /// The dtype in which the naive formula computes: the narrower one of the queries and the output, and not f8.
    pub fn compute(self) -> Dtype {
        if self.q == F8E4M3FN { self.out } else { self.q }
    }

    /// The largest relative error of rounding to that dtype, if it has 16 bits.
    pub fn rounding(self) -> f64 {
        match self.compute() {
            F16 => (-11f64).exp2(),
            BF16 => (-8f64).exp2(),
            _ => 0.0,
        }
    }
}

impl From<Dtype> for Dtypes {
    fn from(dtype: Dtype) -> Self {
        Self::same(dtype)
    }
}

impl fmt::Debug for Dtypes {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let scaled = if self.scaled { " with scales" } else { "" };
        write!(f, "{:?} over {:?}{scaled} to {:?}", self.q, self.kv, self.out)
    }
}

/// Sizes, dtypes and options that all sequences of a call share.
#[derive(Clone, Debug)]
pub struct AttentionConfig {
    pub dtypes: Dtypes,
    pub q_heads: usize,
    pub kv_heads: usize,
    pub head_dim: usize,
    pub value_dim: usize,
    pub softmax_scale: f32,
    pub mask: Mask,
    /// 0 means no soft cap.
    pub softcap: f32,
    /// `[Hq]`.
    pub sinks: Option<Vec<f32>>,
    /// `[1]` or `[Hkv]`, as are the other two scales.
    pub q_scale: Option<Vec<f32>>,
    pub k_scale: Option<Vec<f32>>,
    pub v_scale: Option<Vec<f32>>,
    pub batch_invariant: bool,
}

impl AttentionConfig {
    /// The KV head that a query head attends to.
    pub fn kv_head(&self, head: usize) -> usize {
        head / (self.q_heads / self.kv_heads)
    }
}

/// One sequence of a batch: `q [len_q, Hq, D]`, `k [len_k, Hkv, D]`, `v [len_k, Hkv, Dv]`.
#[derive(Clone, Debug)]
pub struct SequenceData {
    pub len_q: usize,
    pub len_k: usize,
    /// Number of keys at the beginning that are padding.
    pub leftpad: usize,
    /// The position of query 0 among the keys, if the batch has offsets.
    pub q_offset: i32,
    /// Entries of `k_start` and `k_end` of each query, if the batch has them.
    pub key_ranges: Vec<(i32, i32)>,
    /// Its tree, if the batch has trees and they have room for it.
    pub tree: Option<Tree>,
    pub q: Vec<f64>,
    pub k: Vec<f64>,
    pub v: Vec<f64>,
    /// ALiBi slopes, `[Hq]`. With [`Alibi::PerHead`] all sequences have the same ones.
    pub slopes: Vec<f32>,
}

/// Which of `k_start` and `k_end` are given.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum KeyBounds {
    None,
    Start,
    End,
    Both,
}

impl KeyBounds {
    pub const ALL: [Self; 4] = [Self::None, Self::Start, Self::End, Self::Both];

    pub fn has_start(self) -> bool {
        [Self::Start, Self::Both].contains(&self)
    }

    pub fn has_end(self) -> bool {
        [Self::End, Self::Both].contains(&self)
    }
}

/// The form of a bias of pairs of rows and keys.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct BiasForm {
    /// Whether each sequence has its own; otherwise all share it.
    pub per_sequence: bool,
    /// Whether each query head has its own.
    pub per_head: bool,
    /// That of the queries if `None`.
    pub dtype: Option<Dtype>,
    /// It ends before the longest sequence's last row and key.
    pub short: bool,
}

impl BiasForm {
    /// `[1, 1]`, of the dtype of the queries.
    pub const SHARED: Self = Self { per_sequence: false, per_head: false, dtype: None, short: false };
    /// Each pair of a row and a key of each sequence and head has its own.
    pub const OWN: Self = Self { per_sequence: true, per_head: true, ..Self::SHARED };
    /// What broadcasts in each way, and one that ends early, of the dtype of the queries.
    pub const OF_QUERY_TYPE: [Self; 5] = [
        Self::OWN,
        Self::SHARED,
        Self { per_head: true, ..Self::SHARED },
        Self { short: true, ..Self::OWN },
        Self { per_sequence: true, ..Self::SHARED },
    ];
    /// Every value of each property, and what broadcasts in each way.
    pub const ALL: [Self; 5] = [
        Self::SHARED,
        Self { per_sequence: true, per_head: true, dtype: Some(F32), short: false },
        Self { per_head: true, ..Self::SHARED },
        Self { per_sequence: true, short: true, ..Self::SHARED },
        Self { dtype: Some(F32), short: true, ..Self::SHARED },
    ];
}

/// A bias, `[B or 1, Hq or 1, rows, keys]`. What no row of a sequence reads is NaN.
#[derive(Clone, Debug)]
pub struct BatchBias {
    pub dtype: Dtype,
    pub per_sequence: bool,
    /// Hq or 1.
    pub heads: usize,
    pub rows: usize,
    pub keys: usize,
    pub values: Vec<f64>,
}

impl BatchBias {
    /// Elements of a sequence.
    fn sequence_len(&self) -> usize {
        self.heads * self.rows * self.keys
    }
}

/// ALiBi: off, with one slope per head, or with slopes per sequence and head.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Alibi {
    Off,
    PerHead,
    PerSequence,
}

/// The sequences of a call, and what they share.
#[derive(Clone, Debug)]
pub struct Batch {
    pub config: AttentionConfig,
    pub alibi: Alibi,
    /// Whether `leftpad_k` is given; without it no sequence has padding.
    pub leftpad: bool,
    /// Whether `q_offset` is given.
    pub q_offset: bool,
    pub key_bounds: KeyBounds,
    /// `q_max` of `tree_mask`, if that is given.
    pub tree: Option<usize>,
    pub bias: Option<BatchBias>,
    pub sequences: Vec<SequenceData>,
}

impl Batch {
    /// The batch with only the sequence `index`.
    pub fn only(&self, index: usize) -> Self {
        let mut batch = Self { sequences: vec![self.sequences[index].clone()], ..self.clone() };
        if let Some(bias) = batch.bias.as_mut().filter(|bias| bias.per_sequence) {
            bias.values = bias.values[index * bias.sequence_len()..][..bias.sequence_len()].to_vec();
        }
        batch
    }

    /// The batch with a changed configuration.
    pub fn with_config(&self, change: impl FnOnce(&mut AttentionConfig)) -> Self {
        let mut batch = self.clone();
        change(&mut batch.config);
        batch
    }

    /// The mask of a sequence.
    pub fn mask(&self, sequence: &SequenceData) -> Mask {
        self.config.mask.at(self.q_offset.then_some(sequence.q_offset))
    }

    /// The keys that query `i` of a sequence attends to.
    pub fn visible(&self, sequence: &SequenceData, i: usize) -> Vec<usize> {
        let (start, end) = sequence.key_ranges.get(i).copied().unwrap_or_default();
        let bounds = (self.key_bounds.has_start().then_some(start), self.key_bounds.has_end().then_some(end));
        let &SequenceData { len_q, len_k, leftpad, .. } = sequence;
        let (mask, row) = (self.mask(sequence), sequence.tree.as_ref().map(|tree| &tree[i]));
        let mask = if row.is_some() { mask.of_tree() } else { mask };
        let keys = bounded(mask.visible(i, len_q, len_k, leftpad), bounds);
        shown(keys, (len_q, len_k), |j| row.is_none_or(|row| row[j]))
    }

    /// Whether a query of `sequence` attends to key j, for each j.
    pub fn visible_keys(&self, sequence: &SequenceData) -> Vec<bool> {
        let mut visible_keys = vec![false; sequence.len_k];
        for i in 0..sequence.len_q {
            self.visible(sequence, i).into_iter().for_each(|j| visible_keys[j] = true);
        }
        visible_keys
    }
}

/// Whether a scale is given, and for which heads.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum ScaleKind {
    None,
    PerTensor,
    PerHead,
}

with_defaults! {
    /// Describes a batch before its numbers are drawn.
    #[derive(Clone, Debug)]
    pub struct BatchSpec {
        pub dtypes: Dtypes = Dtypes::same(F32),
        /// (Hq, Hkv).
        pub heads: (usize, usize) = (4, 2),
        pub head_dim: usize = 64,
        /// Dv; `None` means D.
        pub value_dim: Option<usize> = None,
        /// (`len_q`, `len_k`) of each sequence.
        pub lengths: Vec<(usize, usize)> = vec![(1, 17), (5, 5), (3, 33)],
        /// Whether some of the first keys of each sequence are padding.
        pub leftpad: bool = false,
        /// Whether each sequence has a `q_offset`.
        pub q_offset: bool = false,
        /// Which bounds each query has.
        pub key_bounds: KeyBounds = KeyBounds::None,
        /// `q_max` of `tree_mask`; longer sequences have no tree.
        pub tree: Option<usize> = None,
        pub bias: Option<BiasForm> = None,
        pub mask: Mask = Mask::CAUSAL,
        pub softcap: f32 = 0.0,
        pub alibi: Alibi = Alibi::Off,
        pub sinks: bool = false,
        /// Scales of q, k and v.
        pub scales: [ScaleKind; 3] = [ScaleKind::None; 3],
        /// Factor of the queries. A large one makes the softmax pick one key.
        pub sharpness: f64 = 1.0,
        pub batch_invariant: bool = false,
        pub seed: u64 = 1,
    }
}

impl BatchSpec {
    /// Draws the numbers.
    pub fn batch(&self) -> Batch {
        let mut random = Random::new(self.seed.wrapping_mul(77).wrapping_add(5));
        let config = self.config(&mut random);
        let common = slopes(&mut random, self.heads.0);
        let sequence = |(index, &(len_q, len_k)): (usize, &(usize, usize))| {
            let mut random = Random::new(self.seed.wrapping_mul(1000).wrapping_add(index as u64));
            let SequenceData { q, k, v, .. } = draw(&config, (len_q, len_k), self.sharpness, &mut random);
            let leftpad = if self.leftpad { random.one_of(&[0, 1, len_k / 3, len_k / 2, len_k]).min(len_k) } else { 0 };
            let shift = len_k as i32 - len_q as i32;
            let q_offset = if self.q_offset {
                random.one_of(&[shift, 0, shift / 2, shift - 3, 9, -7, len_k as i32, -(len_q as i32), 99])
            } else {
                0
            };
            let slopes = match self.alibi {
                Alibi::PerSequence => slopes(&mut random, self.heads.0),
                Alibi::PerHead | Alibi::Off => common.clone(),
            };
            let key_ranges = if self.key_bounds == KeyBounds::None {
                vec![(0, 0); len_q]
            } else {
                key_ranges(&mut random, len_q, len_k)
            };
            let tree = self.tree.filter(|q_max| len_q <= *q_max).map(|_| random_tree(&mut random, len_q));
            SequenceData { len_q, len_k, leftpad, q_offset, key_ranges, tree, q, k, v, slopes }
        };
        let sequences = self.lengths.iter().enumerate().map(sequence).collect();
        Batch {
            config,
            alibi: self.alibi,
            leftpad: self.leftpad,
            q_offset: self.q_offset,
            key_bounds: self.key_bounds,
            tree: self.tree,
            bias: self.bias.map(|form| bias(form, self, &mut Random::new(self.seed + 99))),
            sequences,
        }
    }

    fn config(&self, random: &mut Random) -> AttentionConfig {
        let (q_heads, kv_heads) = self.heads;
        let sinks = (0..q_heads).map(|_| (1.0 + 2.0 * random.normal()) as f32).collect();
        let [q_scale, k_scale, v_scale] = self.scales.map(|scaled| {
            let count = match scaled {
                ScaleKind::None => return None,
                ScaleKind::PerTensor => 1,
                ScaleKind::PerHead => kv_heads,
            };
            Some((0..count).map(|_| (0.4 + 1.2 * random.unit()) as f32).collect())
        });
        AttentionConfig {
            dtypes: self.dtypes,
            q_heads,
            kv_heads,
            head_dim: self.head_dim,
            value_dim: self.value_dim.unwrap_or(self.head_dim),
            softmax_scale: (self.head_dim as f32).sqrt().recip(),
            mask: self.mask,
            softcap: self.softcap,
            sinks: self.sinks.then_some(sinks),
            q_scale,
            k_scale,
            v_scale,
            batch_invariant: self.batch_invariant,
        }
    }
}

/// Random queries, keys and values of one sequence, rounded to their dtypes.
fn draw(config: &AttentionConfig, (len_q, len_k): (usize, usize), sharpness: f64, random: &mut Random) -> SequenceData {
    let mut rows = |rows: usize, heads: usize, dim: usize, dtype: Dtype, size: f64| -> Vec<f64> {
        (0..rows * heads * dim).map(|_| dtype.round(size * random.normal())).collect()
    };
    // A cache quantizes its rows.
    let kv = if config.dtypes.scaled { F32 } else { config.dtypes.kv };
    SequenceData {
        len_q,
        len_k,
        leftpad: 0,
        q_offset: 0,
        key_ranges: Vec::new(),
        tree: None,
        q: rows(len_q, config.q_heads, config.head_dim, config.dtypes.q, sharpness),
        k: rows(len_k, config.kv_heads, config.head_dim, kv, 1.0),
        v: rows(len_k, config.kv_heads, config.value_dim, kv, 1.0),
        slopes: Vec::new(),
    }
}

/// Ranges of keys per query, in one of the forms that they have in use, or arbitrary ones: empty, past either end, with gaps
/// between those of neighbouring queries.
fn key_ranges(random: &mut Random, len_q: usize, len_k: usize) -> Vec<(i32, i32)> {
    let (shift, keys) = (len_k as i32 - len_q as i32, len_k as i32);
    let form = random.below(5);
    let size = 1 + random.below(len_k.max(1)) as i32;
    let range = |i: usize, random: &mut Random| {
        let position = i as i32 + shift;
        match form {
            // A prefix that everyone attends to, before a causal mask.
            0 => (0, (position + 1).max(size)),
            // Documents or chunks of one size, and their blocks up to the query's own.
            1 => (position.div_euclid(size) * size, position.div_euclid(size) * size + size),
            2 => (0, position.div_euclid(size) * size + size),
            // Every other block, with keys between that no query attends to.
            3 => (position.div_euclid(size) * size, position.div_euclid(size) * size + (size + 1) / 2),
            _ => {
                let start = random.one_of(&[0, 1, -3, keys / 2, keys - 1, keys, keys + 5, i32::MIN, i32::MAX]);
                (start, random.one_of(&[keys, start.saturating_add(2), start, keys / 3, 1, 0, -1, i32::MIN, i32::MAX]))
            }
        }
    };
    (0..len_q).map(|i| range(i, random)).collect()
}

/// The ranges of a sequence without its first `keys` keys.
pub fn shifted(ranges: &[(i32, i32)], keys: usize) -> Vec<(i32, i32)> {
    let keys = keys as i32;
    ranges.iter().map(|(start, end)| (start.saturating_sub(keys), end.saturating_sub(keys))).collect()
}

/// A bias for sequences of the lengths of `spec`, with -inf in some elements and in all elements of some rows.
fn bias(form: BiasForm, spec: &BatchSpec, random: &mut Random) -> BatchBias {
    let dtype = form.dtype.unwrap_or(spec.dtypes.q);
    let longest = |of: fn(&(usize, usize)) -> usize| spec.lengths.iter().map(of).max().unwrap_or(0);
    let (mut rows, mut keys) = (longest(|of| of.0).max(1), longest(|of| of.1).max(1));
    if form.short {
        (rows, keys) = (rows - rows / 3, keys - keys / 4);
    }
    let heads = if form.per_head { spec.heads.0 } else { 1 };
    let count = if form.per_sequence { spec.lengths.len() } else { 1 };
    let mut values = Vec::with_capacity(count * heads * rows * keys);
    for (index, i) in (0..count).flat_map(|index| (0..heads * rows).map(move |row| (index, row % rows))) {
        let hides_all = random.below(11) == 0;
        for j in 0..keys {
            let in_sequence = |lengths: &(usize, usize)| i < lengths.0 && j < lengths.1;
            let is_read = if form.per_sequence {
                in_sequence(&spec.lengths[index])
            } else {
                spec.lengths.iter().any(in_sequence)
            };
            let hidden = hides_all || random.below(12) == 0;
            let drawn = dtype.round(2.0 * random.normal());
            values.push(if !is_read {
                f64::NAN
            } else if hidden {
                f64::NEG_INFINITY
            } else {
                drawn
            });
        }
    }
    BatchBias { dtype, per_sequence: form.per_sequence, heads, rows, keys, values }
}

/// `[Hq]`: slopes that models use, and others that the formula allows.
fn slopes(random: &mut Random, heads: usize) -> Vec<f32> {
    (0..heads).map(|_| random.one_of(&[0.5f32, 0.25, 0.0625, 0.0039, 0.7, 1.0, 0.0, -0.0313])).collect()
}
