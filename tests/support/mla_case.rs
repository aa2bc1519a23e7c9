//! Calls of multi-head latent attention: sizes and options of their batches, and the update of a latent cache.

use super::{
    Array, AttentionCase, AttentionConfig, Attr, Batch, BatchSpec, Comparison, Dtype, Dtypes, FP8_DTYPES,
    InvalidMetadata, Invocation, KvLayout, Mask, MemoryLayout, Numbers, Random, ReferenceCase, ScaleKind,
    assert_matches_expected, expected_rows, for_each_side, kv_cache_update, paged_call, poisoned, put, runs_on_cpu,
    slot_mapping, slots_of_rows, with_updated_cache,
};
use xla_attention::Op;

impl Dtypes {
    /// The combinations of q, a latent cache and the output.
    pub const LATENT: [Self; 11] = [
        Self::ALL[0],
        Self::ALL[1],
        Self::ALL[2],
        Self::ALL[3],
        Self::ALL[4],
        Self::ALL[5],
        Self::ALL[6],
        Self::ALL[9],
        Self::ALL[10],
        Self::ALL[11],
        Self::ALL[12],
    ];
}

impl BatchSpec {
    /// Sizes of `q_heads` heads over latent rows of D and Dv columns.
    pub fn latent(dtypes: Dtypes, q_heads: usize, dims: [usize; 2], lengths: &[(usize, usize)]) -> Self {
        Self {
            dtypes,
            heads: (q_heads, 1),
            head_dim: dims[0],
            value_dim: Some(dims[1]),
            lengths: lengths.to_vec(),
            ..Self::default()
        }
    }
}

/// Bytes with room for the partials of every CTA of an H200. The CPU has no partials, and tests fill and compare every byte.
pub fn latent_workspace() -> usize {
    if runs_on_cpu() { 4096 } else { 40_000_000 }
}

/// A random small call with any combination of options.
pub fn latent_call(random: &mut Random) -> (BatchSpec, MemoryLayout) {
    let (spec, memory_layout) = paged_call(random);
    let q_heads = random.one_of(&[1, 2, 3, 16, 5, 40]);
    // Few heads if rows are wide, because the reference is slow.
    let widest = if q_heads > 4 { 12 } else { 72 };
    let head_dim = 8 * random.between(1, widest);
    let value_dim = Some(8 * random.between(1, (head_dim / 8).min(64)));
    let window = |random: &mut Random| if random.chance(50) { -1 } else { random.below(50) as i64 };
    let mask =
        Mask { causal: random.chance(50), window_left: window(random), window_right: window(random), ..Mask::FULL };
    let scale = random.one_of(&[ScaleKind::None, ScaleKind::PerTensor]);
    let spec = BatchSpec {
        dtypes: random.one_of(&Dtypes::LATENT),
        heads: (q_heads, 1),
        head_dim,
        value_dim,
        mask: if random.chance(30) { Mask::CAUSAL } else { mask },
        alibi: super::Alibi::Off,
        key_bounds: super::KeyBounds::None,
        tree: None,
        scales: [ScaleKind::None, scale, ScaleKind::None],
        ..spec
    };
    (spec, MemoryLayout { layout: KvLayout::Latent, ..memory_layout })
}

/// A call of `mla_paged_attention_update` in numbers.
#[derive(Clone, Debug)]
pub struct MlaUpdateCase {
    /// The attention, over the cache after the update.
    pub attention: AttentionCase,
    /// The cache before the update, with NaN in the slots of new tokens.
    pub before: Array,
    /// `[Tq, Dv]`
    pub c_kv: Array,
    /// `[Tq, D - Dv]`
    pub k_pe: Array,
    /// `[Tq]`: the slot that the block table gives the row. A row of no sequence has no slot or one of no sequence.
    pub slots: Vec<i64>,
    /// Whether `slot_mapping` is i64.
    pub wide_slots: bool,
}

impl MlaUpdateCase {
    /// Stores `batch` as `memory_layout` says, with the last `len_q` rows of each sequence as new tokens of type `dtype`,
    /// which an 8-bit cache rounds.
    pub fn new(batch: &Batch, memory_layout: &MemoryLayout, dtype: Option<Dtype>) -> Self {
        let kv = batch.config.dtypes.kv;
        let default = if FP8_DTYPES.contains(&kv) { batch.config.dtypes.q } else { kv };
        let dtype = dtype.unwrap_or(default);
        let case = AttentionCase::latent(batch, memory_layout);
        let mut random = Random::new(memory_layout.seed.wrapping_add(99));
        let slots = slots_of_rows(&case, batch, &mut random);
        let AttentionConfig { head_dim, value_dim, .. } = case.config;
        let scale = case.config.k_scale.as_ref().map_or(1.0, |scale| f64::from(scale[0]));
        // NaN in rows without a slot.
        let mut rows = |width: usize| {
            let mut rows = poisoned(&mut random, dtype, &[slots.len() as i64, width as i64]);
            for (t, _) in slots.iter().enumerate().filter(|(_, slot)| case.kv_geometry.valid_slot(**slot).is_some()) {
                let row: Vec<f64> = (0..width).map(|_| scale * random.normal()).collect();
                put(&mut rows, t * width, &row);
            }
            rows
        };
        let (c_kv, k_pe) = (rows(value_dim), rows(head_dim - value_dim));
        let mut before = case.kv[0].clone();
        for slot in slots.iter().filter_map(|&slot| case.kv_geometry.valid_slot(slot)) {
            put(&mut before, slot * head_dim, &vec![f64::NAN; head_dim]);
        }
        let wide_slots = random.below(2) == 0;
        let mut update = Self { attention: case, before, c_kv, k_pe, slots, wide_slots };
        update.recompute_cache();
        update
    }

    /// Recomputes the cache after the update, when a test has changed `slots` or the new rows.
    pub fn recompute_cache(&mut self) {
        let AttentionConfig { head_dim, value_dim, k_scale, .. } = &self.attention.config;
        // The update of a cache with one head, whose keys are the whole latent rows.
        let size = self.c_kv.dtype.size();
        let [first, rest] = [value_dim * size, (head_dim - value_dim) * size];
        let mut rows = Array::filled(self.c_kv.dtype, &[self.slots.len() as i64, 1, *head_dim as i64], 0);
        for (t, row) in rows.bytes.chunks_exact_mut(first + rest).enumerate() {
            row[..first].copy_from_slice(&self.c_kv.bytes[t * first..][..first]);
            row[first..].copy_from_slice(&self.k_pe.bytes[t * rest..][..rest]);
        }
        let geometry = super::KvGeometry { dims: [*head_dim; 2], ..self.attention.kv_geometry };
        let scales = [k_scale.clone(), k_scale.clone()];
        let both = [rows.clone(), rows];
        let before = std::slice::from_ref(&self.before);
        self.attention.kv = kv_cache_update(before, &geometry, &both, &self.slots, &scales);
        self.attention.kv_values = vec![self.cache().values()];
    }

    /// The cache after the update.
    pub fn cache(&self) -> &Array {
        &self.attention.kv[0]
    }

    /// The call. The cache result shares its operand's memory if `in_place`.
    pub fn invocation(&self, in_place: bool) -> Invocation {
        let operand = |name: &str| match name {
            "kv_cache" => Some(self.before.clone()),
            "c_kv" => Some(self.c_kv.clone()),
            "k_pe" => Some(self.k_pe.clone()),
            "slot_mapping" => Some(slot_mapping(&self.slots, self.wide_slots)),
            _ => self.attention.operand(name),
        };
        let attribute = |name: &str| -> Attr { self.attention.attribute(name) };
        let call = Invocation::of(Op::MlaPagedAttentionUpdate, operand, attribute);
        with_updated_cache(call, &self.attention, &self.slots, in_place)
    }
}

impl ReferenceCase for MlaUpdateCase {
    fn case(&self) -> &AttentionCase {
        &self.attention
    }

    fn case_mut(&mut self) -> &mut AttentionCase {
        &mut self.attention
    }

    fn call(&self) -> Invocation {
        self.invocation(true)
    }

    fn comparison(&self, invalid_metadata: InvalidMetadata) -> Comparison<'_> {
        let expected_rows = expected_rows(&self.attention, invalid_metadata);
        Box::new(move |results| {
            assert!(results[1] == *self.cache(), "{}: the cache differs", self.attention.name);
            let lse = self.attention.lse.then(|| &results[2]);
            assert_matches_expected(&self.attention, &expected_rows, &results[0], lse);
        })
    }

    /// Asserts that the call, in place and with a separate cache, has the expected results, and the bits of attention over
    /// the updated cache. Returns the results.
    fn assert_matches_reference(&self) -> Vec<Array> {
        let (comparison, name, mut actual) =
            (self.comparison(InvalidMetadata::Unspecified), &self.attention.name, vec![]);
        for_each_side(|side| {
            let separate = self.attention.invocation().results(side);
            for in_place in [true, false] {
                let results = self.invocation(in_place).results(side);
                comparison(&results);
                assert!(results[0] == separate[0], "{name}, in place: {in_place}: out is not that of two calls");
                let same = !self.attention.lse || results[2] == separate[1];
                assert!(same, "{name}: the lse is not that of two calls");
                actual = self.computed(&results);
            }
        });
        actual
    }
}
