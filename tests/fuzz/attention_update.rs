//! Random calls of attention with a cache update.

use crate::attention::{
    ProblemSizes, StoredKeys, assert_forward_results, case, latent_sizes, paged_dtypes, sliding, with_scales,
};
use crate::fuzz_call::FuzzCall;
use crate::generator::Generator;
use crate::support::{
    ATTENTION_DTYPES, Array, AttentionCase, AttentionConfig, ClampedSequence, FP8_DTYPES, InvalidMetadata, KvLayout,
    MlaUpdateCase, PagedUpdateCase, assert_same, clamped_sequences,
};
use std::collections::HashSet;
use xla_attention::Op;

/// Calls of `paged_attention_update`.
pub(crate) fn update(generator: &mut Generator) -> FuzzCall {
    let (mask, dtypes) = (sliding(generator), paged_dtypes(generator));
    let sizes = ProblemSizes::generate(generator, dtypes, mask, false);
    let sizes = with_scales(generator, sizes);
    let stored = StoredKeys::generate(generator, &sizes, KvLayout::Interleaved);
    let mut case = case(generator, Op::PagedAttention, &sizes, stored);
    case.lse = generator.chance(50);
    let dtype = if dtypes.kv.size() == 1 { generator.one_of(&ATTENTION_DTYPES) } else { dtypes.kv };
    let rows = [sizes.rows, sizes.config.kv_heads, sizes.config.head_dim];
    let (key, value) = (generator.numbers(dtype, &rows), generator.numbers(dtype, &rows));
    let wide_slots = generator.chance(50);
    let slots = slots_of(generator, &case, wide_slots);
    let (before, scales_before) = (case.kv[0].clone(), case.scale_cache.clone());
    let mut update = PagedUpdateCase { attention: case, before, scales_before, key, value, slots, wide_slots };
    update.recompute_cache();
    let call = update.invocation(generator.chance(60));
    FuzzCall::new(call, move |results| {
        let case = &update.attention;
        assert_same("the cache", &results[1], update.cache());
        if let Some(scales) = &case.scale_cache {
            assert_same("the scales", &results[4], scales);
        }
        assert_rows_of_own_keys(case, &update.slots, results);
    })
}

/// Calls of `mla_paged_attention_update`.
pub(crate) fn latent_update(generator: &mut Generator) -> FuzzCall {
    let mut sizes = latent_sizes(generator);
    sizes.config.head_dim = sizes.config.head_dim.max(16);
    sizes.config.value_dim = sizes.config.value_dim.min(sizes.config.head_dim - 8);
    let stored = StoredKeys::generate(generator, &sizes, KvLayout::Latent);
    let mut case = case(generator, Op::MlaPagedAttention, &sizes, stored);
    case.lse = generator.chance(50);
    let (kv, AttentionConfig { head_dim, value_dim, .. }) = (sizes.config.dtypes.kv, sizes.config);
    let dtype = if FP8_DTYPES.contains(&kv) { generator.one_of(&ATTENTION_DTYPES) } else { kv };
    let c_kv = generator.numbers(dtype, &[sizes.rows, value_dim]);
    let k_pe = generator.numbers(dtype, &[sizes.rows, head_dim - value_dim]);
    let wide_slots = generator.chance(50);
    let slots = slots_of(generator, &case, wide_slots);
    let before = case.kv[0].clone();
    let mut update = MlaUpdateCase { attention: case, before, c_kv, k_pe, slots, wide_slots };
    update.recompute_cache();
    let call = update.invocation(generator.chance(60));
    FuzzCall::new(call, move |results| {
        assert_same("the cache", &results[1], update.cache());
        assert_rows_of_own_keys(&update.attention, &update.slots, results);
    })
}

/// Asserts that the results of an update are right in sequences whose rows write the slots of their keys.
fn assert_rows_of_own_keys(case: &AttentionCase, slots: &[i64], results: &[Array]) {
    let writers = writers(case, slots);
    let is_compared =
        |m: &ClampedSequence| m.is_specified(InvalidMetadata::Clamped) && writes_its_own_keys(case, m, &writers);
    assert_forward_results(case, is_compared, &results[0], case.lse.then(|| &results[2]));
}

/// The slots of the rows: usually those that the block table gives their keys, sometimes others or none, and no slot
/// twice.
fn slots_of(generator: &mut Generator, case: &AttentionCase, wide: bool) -> Vec<i64> {
    let total = case.kv_geometry.num_pages * case.kv_geometry.page_size;
    let mut slots = generator.slots(case.rows(), total, wide);
    if generator.hostile && generator.chance(30) {
        return slots;
    }
    for sequence in clamped_sequences(case) {
        for (i, row) in sequence.rows().enumerate() {
            slots[row] = key_index(&sequence, i).map_or(-1, |j| sequence.slot(case, j) as i64);
        }
    }
    let mut seen = HashSet::new();
    for slot in &mut slots {
        if (0..total as i64).contains(slot) && !seen.insert(*slot) {
            *slot = -1;
        }
    }
    slots
}

/// The key of query i of a sequence, which the update stores.
fn key_index(sequence: &ClampedSequence, i: usize) -> Option<usize> {
    (i + sequence.len_k).checked_sub(sequence.len_q)
}

/// The row that writes each slot.
fn writers(case: &AttentionCase, slots: &[i64]) -> Vec<Option<usize>> {
    let mut writers = vec![None; case.kv_geometry.num_pages * case.kv_geometry.page_size];
    for (row, &slot) in slots.iter().enumerate() {
        if let Some(writer) = usize::try_from(slot).ok().and_then(|slot| writers.get_mut(slot)) {
            *writer = Some(row);
        }
    }
    writers
}

/// Whether each row of the sequence writes the slot of its key, and no other row writes a slot of the sequence.
/// Otherwise its results are unspecified (`src/problem/paged_attention_update.rs`).
fn writes_its_own_keys(case: &AttentionCase, sequence: &ClampedSequence, writers: &[Option<usize>]) -> bool {
    let rows = || sequence.rows().enumerate();
    (0..sequence.len_k).all(|j| {
        let row = rows().find(|(i, _)| key_index(sequence, *i) == Some(j)).map(|(_, row)| row);
        writers[sequence.slot(case, j)] == row
    })
}
