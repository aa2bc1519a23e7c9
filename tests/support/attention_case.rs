//! Complete calls of the attention operators. Everything that belongs to no sequence holds NaN or infinities.
//!
//! A [`Batch`] holds the numbers and a [`MemoryLayout`] says how they lie in the operands. An [`AttentionCase`] is a
//! batch in a memory layout. A metamorphic test ("another page size gives the same result") stores one batch in two
//! layouts. A test may change the metadata of a case before the call.

use super::stored_keys::store_keys;
use super::{
    Alibi, Array, AttentionConfig, Attr, Batch, BatchBias, F32, Invocation, KvGeometry, KvLayout, MaxSeqlenHints,
    MemoryLayout, Random, SequenceData, TreeMask, U8, dequantized, poisoned, put,
};
use xla_attention::Op;

/// A call of an attention operator. B is the number of sequence slots in the metadata, M the number of entries of a
/// block table row.
#[derive(Clone, Debug)]
pub struct AttentionCase {
    pub name: String,
    /// `FlashAttnVarlen`, `PagedAttention` or `MlaPagedAttention`.
    pub target: Op,
    pub config: AttentionConfig,
    /// The element of `kv` at which each row of K and V begins.
    pub kv_geometry: KvGeometry,
    /// M
    pub max_pages: usize,
    /// Queries, `[Tq, Hq, D]`.
    pub q: Array,
    /// K and V, or the one buffer that holds both.
    pub kv: Vec<Array>,
    /// The scales of the rows of `kv`.
    pub scale_cache: Option<Array>,
    /// `cu_seqlens_q` or `query_start_loc`, `[B+1]`.
    pub cu_seqlens_q: Vec<i32>,
    /// `num_seqs` of paged attention.
    pub num_seqs: i32,
    /// `[B]`
    pub seqused_q: Option<Vec<i32>>,
    /// `cu_seqlens_k`, `[B+1]`; of any length with any contents where the operator does not read it.
    pub cu_seqlens_k: Vec<i32>,
    /// `seqused_k` or `context_lens`, `[B]`.
    pub seqused_k: Option<Vec<i32>>,
    /// `[B]`
    pub leftpad_k: Option<Vec<i32>>,
    /// `[B]`
    pub q_offset: Option<Vec<i32>>,
    /// `[Tq]`
    pub k_start: Option<Vec<i32>>,
    /// `[Tq]`
    pub k_end: Option<Vec<i32>>,
    /// `[B, q_max, ceil(q_max / 32)]`
    pub tree_mask: Option<TreeMask>,
    /// `[B, M]`
    pub block_table: Vec<i32>,
    /// `[B or 1, Hq or 1, Sq, Sk]`
    pub bias: Option<Array>,
    /// `bias` as f64.
    pub bias_values: Vec<f64>,
    /// `[Hq]` or `[B, Hq]`.
    pub alibi_slopes: Option<Vec<f32>>,
    pub alibi: Alibi,
    /// `max_seqlen_q` and `max_seqlen_k`.
    pub hints: (i64, i64),
    pub lse: bool,
    pub workspace: Option<usize>,
    /// `q` as f64.
    pub q_values: Vec<f64>,
    /// `kv` as f64, multiplied by the scales of its rows if it has them.
    pub kv_values: Vec<Vec<f64>>,
}

impl AttentionCase {
    /// A call of `xla_gpu_flash_attn_varlen`.
    pub fn flash(batch: &Batch, memory_layout: &MemoryLayout) -> Self {
        Self::store(Op::FlashAttnVarlen, batch, memory_layout)
    }

    /// A call of `xla_gpu_paged_attention`.
    pub fn paged(batch: &Batch, memory_layout: &MemoryLayout) -> Self {
        Self::store(Op::PagedAttention, batch, memory_layout)
    }

    /// A call of `xla_gpu_mla_paged_attention`: the layout is that of latent rows, and the scale of K is that of V too.
    pub fn latent(batch: &Batch, memory_layout: &MemoryLayout) -> Self {
        let batch = batch.with_config(|config| config.v_scale.clone_from(&config.k_scale));
        let memory_layout = MemoryLayout { layout: KvLayout::Latent, ..memory_layout.clone() };
        Self::store(Op::MlaPagedAttention, &batch, &memory_layout)
    }

    /// Stores `batch` as `memory_layout` says. Rows, slots and pages that no sequence uses hold NaN and infinities, as
    /// do stored keys that no query of their sequence attends to. Unused metadata holds hostile numbers.
    pub fn store(target: Op, batch: &Batch, memory_layout: &MemoryLayout) -> Self {
        let mut random = Random::new(memory_layout.seed);
        let slots = batch.sequences.len() + memory_layout.spare_seqs;
        let (q, cu_seqlens_q, seqused_q) = store_queries(target, batch, memory_layout, &mut random);
        let keys = store_keys(batch, memory_layout, &mut random);
        let mut per_slot = |of: &dyn Fn(&SequenceData) -> i32| -> Vec<i32> {
            let own = batch.sequences.iter().map(of);
            let spare: Vec<i32> = (0..memory_layout.spare_seqs).map(|_| random.hostile_i32()).collect();
            own.chain(spare).collect()
        };
        let seqused_k = memory_layout.seqused_k.then(|| per_slot(&|s| s.len_k as i32));
        let leftpad_k = batch.leftpad.then(|| per_slot(&|s| s.leftpad as i32));
        let q_offset = batch.q_offset.then(|| per_slot(&|s| s.q_offset));
        let bias = batch.bias.as_ref().map(|bias| store_bias(bias, batch.sequences.len(), slots));
        let (k_start, k_end) = store_key_ranges(batch, &cu_seqlens_q, q.dims[0] as usize, &mut random);
        let trees = batch.sequences.iter().map(|sequence| &sequence.tree);
        let tree_mask = batch.tree.map(|q_max| TreeMask::store(q_max, slots, trees, &mut random));
        let longest = |of: fn(&SequenceData) -> usize| batch.sequences.iter().map(of).max().unwrap_or(0);
        let hints = match memory_layout.hints {
            MaxSeqlenHints::Unknown => (0, 0),
            MaxSeqlenHints::RoundedUp => {
                let rounded = |length: usize| length.next_power_of_two() as i64;
                (rounded(longest(|s| s.len_q)), rounded(longest(|s| s.len_k)))
            }
            MaxSeqlenHints::TooSmall => (1, 1),
            MaxSeqlenHints::Huge => (i64::MAX, i64::MAX),
        };
        let case = Self {
            name: name_of(target, batch, memory_layout),
            target,
            config: batch.config.clone(),
            kv_geometry: keys.kv_geometry,
            max_pages: keys.max_pages,
            q_values: q.values(),
            kv_values: match &keys.scale_cache {
                Some(scales) => vec![dequantized(&keys.kv[0], scales)],
                None => keys.kv.iter().map(Array::values).collect(),
            },
            q,
            kv: keys.kv,
            scale_cache: keys.scale_cache,
            cu_seqlens_q,
            num_seqs: batch.sequences.len() as i32,
            seqused_q,
            cu_seqlens_k: keys.starts,
            seqused_k,
            leftpad_k,
            q_offset,
            k_start,
            k_end,
            tree_mask,
            block_table: keys.block_table,
            bias_values: bias.as_ref().map_or_else(Vec::new, Array::values),
            bias,
            alibi_slopes: slopes(batch, slots),
            alibi: batch.alibi,
            hints,
            lse: memory_layout.lse || target == Op::FlashAttnVarlen,
            workspace: memory_layout.workspace,
        };
        let suits = match target {
            Op::FlashAttnVarlen => case.tree_mask.is_none(),
            Op::MlaPagedAttention => case.suits_latent_attention(),
            _ => case.suits_paged_attention(),
        };
        assert!(suits, "{}", case.name);
        case
    }

    /// Makes the starts of queries and of contiguous keys unordered: one in three becomes smaller, one in a hundred
    /// larger. With `limit_rows`, `seqused_q` leaves each sequence at most six rows.
    pub fn disorder(&mut self, limit_rows: bool, seed: u64) {
        let mut random = Random::new(seed);
        let change = |start: &mut i32, random: &mut Random| match random.below(96) {
            0 => *start += random.below(20) as i32,
            1..=32 => *start = random.below(*start as usize + 1) as i32,
            _ => {}
        };
        self.cu_seqlens_q.iter_mut().for_each(|start| change(start, &mut random));
        if !self.is_paged() {
            self.cu_seqlens_k.iter_mut().for_each(|start| change(start, &mut random));
        }
        if limit_rows {
            self.seqused_q = Some((0..self.slots()).map(|_| random.below(7) as i32).collect());
        }
        self.name = format!("disordered {seed}: {}", self.name);
    }

    /// Whether the operator has every option that the case uses.
    fn suits_paged_attention(&self) -> bool {
        self.has_paged_metadata() && self.kv_geometry.layout == KvLayout::Interleaved && self.config.mask.causal
    }

    /// Likewise of attention over latent rows.
    fn suits_latent_attention(&self) -> bool {
        let config = &self.config;
        self.has_paged_metadata()
            && self.kv_geometry.layout == KvLayout::Latent
            && self.alibi == Alibi::Off
            && config.kv_heads == 1
            && config.q_scale.is_none()
            && self.tree_mask.is_none()
            && config.k_scale == config.v_scale
    }

    /// Whether all metadata is that of the operators over one paged cache.
    fn has_paged_metadata(&self) -> bool {
        let lengths = self.seqused_k.is_some() && self.seqused_q.is_none() && self.leftpad_k.is_none();
        lengths && !self.config.mask.top_left && self.q_offset.is_none()
    }

    /// Tq.
    pub fn rows(&self) -> usize {
        self.q.dims[0] as usize
    }

    /// B.
    pub fn slots(&self) -> usize {
        self.cu_seqlens_q.len() - 1
    }

    /// Whether the keys lie in pages.
    pub fn is_paged(&self) -> bool {
        self.kv_geometry.layout != KvLayout::Contiguous
    }

    pub fn invocation(&self) -> Invocation {
        let mut call = Invocation::of(self.target, |name| self.operand(name), |name| self.attribute(name));
        let dims = [self.rows(), self.config.q_heads, self.config.value_dim].map(|x| x as i64);
        let lse_dims: &[i64] = if self.lse { &[dims[1], dims[0]] } else { &[0] };
        call = call.result("out", self.config.dtypes.out, &dims);
        if self.lse || self.workspace.is_some() {
            call = call.result("softmax_lse", F32, lse_dims);
        }
        if let Some(bytes) = self.workspace {
            call = call.result("workspace", U8, &[bytes as i64]);
        }
        call.description.clone_from(&self.name);
        call
    }

    /// The operand of this name; `None` if the case leaves it out.
    pub(super) fn operand(&self, name: &str) -> Option<Array> {
        let (config, slots) = (&self.config, self.slots() as i64);
        let table = || Array::i32s(&[slots, self.max_pages as i64], &self.block_table);
        let slopes = |values: &Vec<f32>| {
            let heads = config.q_heads as i64;
            let dims: &[i64] = if self.alibi == Alibi::PerSequence { &[slots, heads] } else { &[heads] };
            Array::f32s(dims, values)
        };
        match name {
            "q" | "query" => Some(self.q.clone()),
            "k" | "kv_cache" => Some(self.kv[0].clone()),
            "v" => Some(self.kv.get(1).cloned().unwrap_or_else(|| Array::left_out(config.dtypes.kv))),
            "cu_seqlens_q" | "query_start_loc" => Some(i32s(&self.cu_seqlens_q)),
            "cu_seqlens_k" => Some(i32s(&self.cu_seqlens_k)),
            "seqused_k" | "context_lens" => self.seqused_k.as_deref().map(i32s),
            "block_table" | "block_tables" => self.is_paged().then(table),
            "num_seqs" => Some(i32s(&[self.num_seqs])),
            "seqused_q" => self.seqused_q.as_deref().map(i32s),
            "leftpad_k" => self.leftpad_k.as_deref().map(i32s),
            "q_offset" => self.q_offset.as_deref().map(i32s),
            "k_start" => self.k_start.as_deref().map(i32s),
            "k_end" => self.k_end.as_deref().map(i32s),
            "kv_scale_cache" => self.scale_cache.clone(),
            "tree_mask" => self.tree_mask.as_ref().map(|mask| mask.array(self.slots())),
            "bias" => self.bias.clone(),
            "alibi_slopes" => self.alibi_slopes.as_ref().map(slopes),
            "sinks" => f32s(config.sinks.as_ref()),
            "q_scale" => f32s(config.q_scale.as_ref()),
            "k_scale" | "kv_scale" => f32s(config.k_scale.as_ref()),
            "v_scale" => f32s(config.v_scale.as_ref()),
            _ => panic!("no operand of attention is called {name}"),
        }
    }

    pub(super) fn attribute(&self, name: &str) -> Attr {
        let AttentionConfig { softmax_scale, mask, softcap, batch_invariant, .. } = self.config;
        match name {
            "batch_invariant" => Attr::Bool(batch_invariant),
            "causal" => Attr::Bool(mask.causal),
            "kv_layout" => Attr::I64(self.kv_geometry.layout.kv_layout()),
            "max_seqlen_k" => Attr::I64(self.hints.1),
            "max_seqlen_q" => Attr::I64(self.hints.0),
            // `sliding_window` counts the query's own position, `window_left` does not.
            "sliding_window" if mask.window_left >= 0 => Attr::I64(mask.window_left.saturating_add(1)),
            "sliding_window" => Attr::I64(-1),
            "softcap" | "soft_cap" => Attr::F32(softcap),
            "softmax_scale" | "scale" => Attr::F32(softmax_scale),
            "top_left" => Attr::Bool(mask.top_left),
            "window_left" => Attr::I64(mask.window_left),
            "window_right" => Attr::I64(mask.window_right),
            _ => panic!("no attribute of attention is called {name}"),
        }
    }
}

/// `[N]`; `None` without values.
pub(super) fn f32s(values: Option<&Vec<f32>>) -> Option<Array> {
    values.map(|v| Array::f32s(&[v.len() as i64], v))
}

/// `slot_mapping [T]` in i64 or i32.
pub(super) fn slot_mapping(slots: &[i64], wide: bool) -> Array {
    let tokens = [slots.len() as i64];
    if wide {
        return Array::i64s(&tokens, slots);
    }
    Array::i32s(&tokens, &slots.iter().map(|&slot| i32::try_from(slot).unwrap()).collect::<Vec<_>>())
}

/// `[N]`.
pub fn i32s(values: &[i32]) -> Array {
    Array::i32s(&[values.len() as i64], values)
}

fn name_of(target: Op, batch: &Batch, memory_layout: &MemoryLayout) -> String {
    let lengths: Vec<_> = batch.sequences.iter().map(|s| (s.len_q, s.len_k, s.leftpad)).collect();
    format!(
        "{target:?}, (len_q, len_k, leftpad) {lengths:?}, {:?}, alibi {:?}, key bounds {:?}, trees {:?}, bias {:?}, {memory_layout:?}",
        batch.config,
        batch.alibi,
        batch.key_bounds,
        batch.tree,
        batch.bias.as_ref().map(|bias| (bias.dtype, bias.per_sequence, bias.heads, bias.rows, bias.keys))
    )
}

/// `[Hq]` or `[B, Hq]`; slots without a sequence have NaN.
fn slopes(batch: &Batch, slots: usize) -> Option<Vec<f32>> {
    let heads = batch.config.q_heads;
    match batch.alibi {
        Alibi::Off => None,
        Alibi::PerHead => Some(batch.sequences.first().map_or_else(|| vec![0.5; heads], |s| s.slopes.clone())),
        Alibi::PerSequence => {
            let mut slopes: Vec<f32> = batch.sequences.iter().flat_map(|s| s.slopes.iter().copied()).collect();
            slopes.resize(slots * heads, f32::NAN);
            Some(slopes)
        }
    }
}

/// The bias; that of slots without a sequence is NaN.
fn store_bias(bias: &BatchBias, sequences: usize, slots: usize) -> Array {
    let count = if bias.per_sequence { slots } else { 1 };
    let of_sequence = bias.heads * bias.rows * bias.keys;
    let mut values = bias.values.clone();
    debug_assert_eq!(values.len(), if bias.per_sequence { sequences } else { 1 } * of_sequence);
    values.resize(count * of_sequence, f64::NAN);
    let dims = [count, bias.heads, bias.rows, bias.keys].map(|x| x as i64);
    let mut array = Array::filled(bias.dtype, &dims, 0);
    put(&mut array, 0, &values);
    array
}

/// The queries, their starts, and `seqused_q`.
fn store_queries(
    target: Op,
    batch: &Batch,
    memory_layout: &MemoryLayout,
    random: &mut Random,
) -> (Array, Vec<i32>, Option<Vec<i32>>) {
    let spare_seqs = memory_layout.spare_seqs;
    let mut unused_rows = || if memory_layout.seqused_q { random.below(4) } else { 0 };
    let own: Vec<usize> = batch.sequences.iter().map(|s| s.len_q + unused_rows()).collect();
    let spare: Vec<usize> = (0..spare_seqs).map(|_| unused_rows()).collect();
    let (before, after) = memory_layout.rows_around;
    let rows = before + own.iter().chain(&spare).sum::<usize>() + after;
    let row = batch.config.q_heads * batch.config.head_dim;
    let dims = [rows, batch.config.q_heads, batch.config.head_dim].map(|x| x as i64);
    let mut q = poisoned(random, batch.config.dtypes.q, &dims);
    let mut starts = vec![before as i32];
    let mut used = Vec::new();
    let backwards = !memory_layout.seqused_q && random.below(4) == 0;
    let mut at = before;
    for (sequence, slot) in batch.sequences.iter().zip(own) {
        put(&mut q, at * row, &sequence.q);
        at += slot;
        starts.push(at as i32);
        used.push(sequence.len_q as i32);
    }
    for slot in spare {
        at += slot;
        starts.push(match target {
            // The operator does not read the starts after those of the last sequence.
            Op::PagedAttention | Op::MlaPagedAttention => random.hostile_i32(),
            // A start below an earlier one gives the slot no rows.
            _ if backwards => starts.last().unwrap().min(&random.one_of(&[0, -5, i32::MIN])).to_owned(),
            // The slot has no rows, or `seqused_q` uses none of them.
            _ => at as i32,
        });
        used.push(random.one_of(&[0, -1, i32::MIN]));
    }
    (q, starts, memory_layout.seqused_q.then_some(used))
}

/// `k_start` and `k_end`; rows of no sequence have hostile numbers.
fn store_key_ranges(
    batch: &Batch,
    starts: &[i32],
    rows: usize,
    random: &mut Random,
) -> (Option<Vec<i32>>, Option<Vec<i32>>) {
    let mut store = |is_given: bool, of: fn(&(i32, i32)) -> i32| {
        is_given.then(|| {
            let mut bounds: Vec<i32> = (0..rows).map(|_| random.hostile_i32()).collect();
            for (sequence, start) in batch.sequences.iter().zip(starts) {
                let own = &mut bounds[*start as usize..][..sequence.len_q];
                own.iter_mut().zip(&sequence.key_ranges).for_each(|(to, range)| *to = of(range));
            }
            bounds
        })
    };
    (store(batch.key_bounds.has_start(), |range| range.0), store(batch.key_bounds.has_end(), |range| range.1))
}
