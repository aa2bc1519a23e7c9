//! Calls of `paged_attention_update`: a case of paged attention whose sequences end with tokens that are not in the
//! cache yet.

use super::{
    Array, AttentionCase, Attr, BF16, Batch, Comparison, Dtype, F32, InvalidMetadata, Invocation, MemoryLayout, Random,
    ReferenceCase, U8, assert_matches_expected, dequantized, expected_rows, for_each_side, kv_cache_update, poisoned,
    put, put_scale, quantized_cache_update, slot_mapping,
};
use xla_attention::Op;

/// A call of `paged_attention_update` in numbers.
#[derive(Clone, Debug)]
pub struct PagedUpdateCase {
    /// The attention, over the cache after the update.
    pub attention: AttentionCase,
    /// The cache before the update, with NaN in the slots of new tokens.
    pub before: Array,
    /// Its scales before the update, likewise.
    pub scales_before: Option<Array>,
    /// `[T, Hkv, D]`, as `value`.
    pub key: Array,
    pub value: Array,
    /// `[T]`: the slot that the block table gives the row's key. A row of no sequence has no slot or one of no
    /// sequence.
    pub slots: Vec<i64>,
    /// Whether `slot_mapping` is i64.
    pub wide_slots: bool,
}

impl PagedUpdateCase {
    /// Stores `batch` as `memory_layout` says, with the last `len_q` keys of each sequence as new tokens.
    pub fn new(batch: &Batch, memory_layout: &MemoryLayout) -> Self {
        let kv = batch.config.dtypes.kv;
        // A quantized cache takes rows in the dtype of the queries, or in bf16 if those are fp8 too.
        let like = if batch.config.dtypes.q.size() > 1 { batch.config.dtypes.q } else { BF16 };
        Self::of_rows(batch, memory_layout, if kv.size() == 1 { like } else { kv })
    }

    /// The same with keys and values in this dtype.
    pub fn of_rows(batch: &Batch, memory_layout: &MemoryLayout, dtype: Dtype) -> Self {
        let case = AttentionCase::paged(batch, memory_layout);
        let mut random = Random::new(memory_layout.seed.wrapping_add(99));
        let slots = slots_of_rows(&case, batch, &mut random);
        let [key, value] = [&case.config.k_scale, &case.config.v_scale]
            .map(|scale| new_rows(&case, &slots, dtype, scale.as_deref(), &mut random));
        let (mut before, mut scales_before) = (case.kv[0].clone(), case.scale_cache.clone());
        for slot in slots.iter().filter_map(|&slot| case.kv_geometry.valid_slot(slot)) {
            for (value, head) in (0..2).flat_map(|value| (0..case.config.kv_heads).map(move |head| (value, head))) {
                put(
                    &mut before,
                    case.kv_geometry.slot_element(value, slot, head).1,
                    &vec![f64::NAN; case.config.head_dim],
                );
                if let Some(scales) = &mut scales_before {
                    let (page, token) = (slot / case.kv_geometry.page_size, slot % case.kv_geometry.page_size);
                    put_scale(scales, case.kv_geometry.scale_at(value, page, token, head), f32::NAN);
                }
            }
        }
        let wide_slots = random.below(2) == 0;
        let mut update = Self { attention: case, before, scales_before, key, value, slots, wide_slots };
        update.recompute_cache();
        update
    }

    /// Recomputes the cache after the update, when a test has changed `slots`, `key` or `value`.
    pub fn recompute_cache(&mut self) {
        let rows = [self.key.clone(), self.value.clone()];
        if let Some(scales) = &self.scales_before {
            let geometry = &self.attention.kv_geometry;
            let [cache, scales] = quantized_cache_update((&self.before, scales), geometry, &rows, &self.slots);
            self.attention.kv_values = vec![dequantized(&cache, &scales)];
            (self.attention.kv, self.attention.scale_cache) = (vec![cache], Some(scales));
            return;
        }
        let before = std::slice::from_ref(&self.before);
        self.attention.kv = kv_cache_update(before, &self.attention.kv_geometry, &rows, &self.slots, &self.scales());
        self.attention.kv_values = vec![self.cache().values()];
    }

    fn scales(&self) -> [Option<Vec<f32>>; 2] {
        [self.attention.config.k_scale.clone(), self.attention.config.v_scale.clone()]
    }

    /// The cache after the update.
    pub fn cache(&self) -> &Array {
        &self.attention.kv[0]
    }

    /// The call. The cache result shares its operand's memory if `in_place`.
    pub fn invocation(&self, in_place: bool) -> Invocation {
        let operand = |name: &str| self.operand(name);
        let call = Invocation::of(Op::PagedAttentionUpdate, operand, |name| self.attention.attribute(name));
        with_updated_cache(call, &self.attention, &self.slots, in_place)
    }

    fn operand(&self, name: &str) -> Option<Array> {
        match name {
            "kv_cache" => Some(self.before.clone()),
            "kv_scale_cache" => self.scales_before.clone(),
            "key" => Some(self.key.clone()),
            "value" => Some(self.value.clone()),
            "slot_mapping" => Some(slot_mapping(&self.slots, self.wide_slots)),
            _ => self.attention.operand(name),
        }
    }

    /// The two calls that must give the same results: the update, and attention over the updated cache.
    pub fn in_two_calls(&self) -> [Invocation; 2] {
        let update = Invocation::of(Op::KvCacheUpdate, |name| self.operand(name), |_| Attr::I64(1));
        let update = update.updated("kv_cache", 0, false);
        let update =
            if self.scales_before.is_some() { update.updated_by_name("kv_scale_cache", false) } else { update };
        [update, self.attention.invocation()]
    }
}

/// Describes `call`, an update of the cache and `attention` over it, and gives it the results: those of `attention`, and the
/// cache after the first one, which shares its operand's memory if `in_place`.
pub fn with_updated_cache(
    mut call: Invocation,
    attention: &AttentionCase,
    slots: &[i64],
    in_place: bool,
) -> Invocation {
    call.description = format!("{}, slots {slots:?}, in place: {in_place}", attention.name);
    let mut results = attention.invocation().results.into_iter();
    call.results.extend(results.by_ref().take(1));
    call = call.updated("kv_cache", 1, in_place);
    call.results.extend(results);
    if attention.scale_cache.is_some() {
        // The optional results before the scales.
        let left_out = [("softmax_lse", F32), ("workspace", U8)];
        for (name, dtype) in left_out.into_iter().skip(call.results.len() - 2) {
            call = call.result(name, dtype, &[0]);
        }
        call = call.updated_by_name("kv_scale_cache", in_place);
    }
    call
}

/// Whether the bits are the same, but for those of a NaN, which a scale may change: rows to which no query attends hold some.
fn same_numbers(a: &Array, b: &Array) -> bool {
    let same = |(a, b): (f64, f64)| a.to_bits() == b.to_bits() || (a.is_nan() && b.is_nan());
    a == b || ((a.dtype, &a.dims) == (b.dtype, &b.dims) && a.values().into_iter().zip(b.values()).all(same))
}

impl ReferenceCase for PagedUpdateCase {
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
            assert!(same_numbers(&results[1], self.cache()), "{}: the cache differs", self.attention.name);
            if let Some(scales) = &self.attention.scale_cache {
                assert!(results[4] == *scales, "{}: the scales differ", self.attention.name);
            }
            assert_matches_expected(
                &self.attention,
                &expected_rows,
                &results[0],
                self.attention.lse.then(|| &results[2]),
            );
        })
    }

    /// Asserts that the call, in place and with a separate cache, has the expected results, and bit by bit those of the
    /// two separate calls. Returns the results.
    fn assert_matches_reference(&self) -> Vec<Array> {
        let (comparison, name, mut actual) =
            (self.comparison(InvalidMetadata::Unspecified), &self.attention.name, vec![]);
        for_each_side(|side| {
            let [update, attention] = self.in_two_calls();
            let updated = update.results(side);
            assert!(same_numbers(&updated[0], self.cache()), "{name}: the update alone differs");
            assert!(
                self.attention.scale_cache.as_ref() == updated.get(1),
                "{name}: the scales of the update alone differ"
            );
            let separate = attention.results(side);
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

/// The slot of each row's key. Rows of no sequence, and those before the first key of a sequence, have no slot or an
/// unused one.
pub(super) fn slots_of_rows(case: &AttentionCase, batch: &Batch, random: &mut Random) -> Vec<i64> {
    let page_size = case.kv_geometry.page_size;
    let table = |b: usize, j: usize| case.block_table[b * case.max_pages + j / page_size];
    let slot = |b: usize, j: usize| i64::from(table(b, j)) * page_size as i64 + (j % page_size) as i64;
    let lengths = || batch.sequences.iter().enumerate();
    let mut taken = vec![false; case.kv_geometry.num_pages * page_size];
    for slot in lengths().flat_map(|(b, s)| (0..s.len_k).map(move |j| slot(b, j))) {
        taken[slot as usize] = true;
    }
    let mut free: Vec<i64> = (0..taken.len()).filter(|&slot| !taken[slot]).map(|slot| slot as i64).collect();
    random.shuffle(&mut free);
    let outside = [-1, -1, -1, taken.len() as i64, i64::from(i32::MAX), i64::from(i32::MIN)];
    let mut slot_of_padding = || match random.below(3) {
        0 => free.pop().unwrap_or(-1),
        _ => random.one_of(&outside),
    };
    let mut slots: Vec<i64> = (0..case.rows()).map(|_| slot_of_padding()).collect();
    for (b, sequence) in lengths() {
        let first = case.cu_seqlens_q[b] as usize;
        for i in 0..sequence.len_q {
            if let Some(j) = (i + sequence.len_k).checked_sub(sequence.len_q) {
                slots[first + i] = slot(b, j);
            }
        }
    }
    slots
}

/// `[T, Hkv, D]`: numbers of about 1 after the division by the scale; NaN in rows without a slot.
fn new_rows(case: &AttentionCase, slots: &[i64], dtype: Dtype, scale: Option<&[f32]>, random: &mut Random) -> Array {
    let (heads, d) = (case.config.kv_heads, case.config.head_dim);
    let mut rows = poisoned(random, dtype, &[slots.len() as i64, heads as i64, d as i64]);
    for (t, _) in slots.iter().enumerate().filter(|(_, slot)| case.kv_geometry.valid_slot(**slot).is_some()) {
        for head in 0..heads {
            let size = scale.map_or(1.0, |scale| f64::from(scale[head % scale.len()]));
            let row: Vec<f64> = (0..d).map(|_| size * random.normal()).collect();
            put(&mut rows, (t * heads + head) * d, &row);
        }
    }
    rows
}
