//! `xla_gpu_paged_attention_update`: the updated cache and the attention over it.

use crate::attention::tests_of;
use crate::support::{
    ATTENTION_DTYPES, Alibi, Array, BF16, BatchSpec, Dtypes, F8E4M3FN, F16, F32, FP8_DTYPES, Mask, MemoryLayout,
    PagedUpdateCase, ReferenceCase, ScaleKind, Side, for_each_side, put,
};

// Each comparison with the reference also compares, bit by bit, with the update followed by attention.
tests_of! { PagedAttentionUpdate:
    agreement { named_cases_agree_with_the_reference }
    interface { every_workspace_size_gives_the_right_result }
}

/// A first chunk, decode, a later chunk, and a sequence without queries.
fn mixed(dtypes: impl Into<Dtypes>) -> BatchSpec {
    BatchSpec { dtypes: dtypes.into(), lengths: vec![(9, 9), (1, 90), (21, 64), (0, 4)], ..BatchSpec::default() }
}

/// Sequences that the decode kernel takes, on CUDA in the same launch as the update: of one query, of a few queries,
/// and of more queries than keys.
fn short(dtypes: impl Into<Dtypes>) -> BatchSpec {
    let lengths = vec![(1, 1), (1, 17), (1, 700), (2, 2), (1, 64), (3, 90), (1, 33), (4, 650), (5, 3), (0, 4), (1, 48)];
    BatchSpec { dtypes: dtypes.into(), heads: (8, 2), head_dim: 32, lengths, ..BatchSpec::default() }
}

#[test]
fn decode_is_the_update_and_then_attention_under_each_option() {
    let with_room = MemoryLayout { workspace: Some(300_000), ..MemoryLayout::default() };
    let plain = short(BF16);
    let one_each = plain.lengths.iter().map(|&(_, len_k)| (1, len_k.max(1))).collect();
    for spec in [
        BatchSpec { lengths: one_each, ..plain.clone() },
        BatchSpec { batch_invariant: true, ..plain.clone() },
        BatchSpec { mask: Mask::sliding(1), ..plain.clone() },
        BatchSpec { mask: Mask::sliding(3), ..plain.clone() },
        BatchSpec { mask: Mask::sliding(100), batch_invariant: true, ..plain.clone() },
        BatchSpec { softcap: 2.0, alibi: Alibi::PerHead, sinks: true, ..plain.clone() },
        BatchSpec { scales: [ScaleKind::PerHead, ScaleKind::None, ScaleKind::None], ..plain.clone() },
        BatchSpec { scales: [ScaleKind::None, ScaleKind::PerTensor, ScaleKind::None], ..plain.clone() },
        BatchSpec { scales: [ScaleKind::None, ScaleKind::None, ScaleKind::PerHead], ..plain.clone() },
        plain,
    ] {
        for wide_slots in [false, true] {
            PagedUpdateCase { wide_slots, ..PagedUpdateCase::new(&spec.batch(), &with_room) }
                .assert_matches_reference();
        }
    }
}

#[test]
fn decode_is_the_update_and_then_attention_in_every_type_and_width() {
    let memory_layout = MemoryLayout { workspace: Some(300_000), ..MemoryLayout::default() };
    for dtypes in Dtypes::ALL {
        PagedUpdateCase::new(&short(dtypes).batch(), &memory_layout).assert_matches_reference();
    }
    for (dtype, head_dims) in [(BF16, [8, 64, 96, 128, 192, 256, 512]), (F32, [24, 64, 72, 128, 136, 256, 320])] {
        for head_dim in head_dims {
            let lengths = vec![(1, 700), (3, 40), (1, 16), (1, 1)];
            PagedUpdateCase::new(&BatchSpec { head_dim, lengths, ..short(dtype) }.batch(), &memory_layout)
                .assert_matches_reference();
        }
    }
}

#[test]
fn decode_stores_rows_of_no_sequence_for_every_workspace() {
    let spec = BatchSpec { head_dim: 64, ..short(F16) };
    for page_size in [1, 2, 7, 16, 24, 64] {
        for (workspace, rows_around) in
            [(None, (3, 0)), (Some(0), (0, 70)), (Some(5000), (40, 40)), (Some(300_000), (1, 9))]
        {
            let spare_pages = 90_usize.div_ceil(page_size);
            let memory_layout = MemoryLayout {
                page_size,
                workspace,
                rows_around,
                spare_pages,
                spare_seqs: 15,
                ..MemoryLayout::default()
            };
            PagedUpdateCase::new(&spec.batch(), &memory_layout).assert_matches_reference();
        }
    }
}

#[test]
fn a_nan_in_a_new_token_has_the_effect_that_it_has_in_two_calls() {
    // With this many slots CUDA decodes sequences of any length. The last case has tiles of one query that attends to one
    // key.
    let memory_layout = MemoryLayout { spare_seqs: 15, ..MemoryLayout::default() };
    for (mask, heads) in [(Mask::CAUSAL, (8, 2)), (Mask::sliding(2), (8, 2)), (Mask::sliding(1), (16, 1))] {
        let spec = BatchSpec { mask, heads, lengths: vec![(7, 30), (1, 20), (5, 5)], ..short(BF16) };
        for row in 0..13 {
            let mut update = PagedUpdateCase::new(&spec.batch(), &memory_layout);
            let width = heads.1 * spec.head_dim;
            put(&mut update.value, row * width, &vec![f64::NAN; width]);
            update.recompute_cache();
            let [_, attention] = update.in_two_calls();
            for_each_side(|side| {
                let (actual, expected) = (update.invocation(true).results(side), attention.results(side));
                assert!(actual[0] == expected[0], "row {row}: out is not that of two calls");
            });
        }
    }
}

/// More rows than the warps of a KV head's CTAs, so that warps read rows that others store.
#[test]
fn decode_of_many_sequences_is_the_update_and_then_attention() {
    for (heads, head_dim) in [((2, 1), 32), ((8, 8), 128)] {
        let lengths: Vec<_> = (0..300).map(|i| (1 + usize::from(i % 50 == 7), 1 + i * 37 % 40)).collect();
        let spec = BatchSpec { heads, head_dim, lengths, ..short(BF16) };
        for seed in 0..2 {
            PagedUpdateCase::new(
                &spec.batch(),
                &MemoryLayout { workspace: Some(300_000), seed, ..MemoryLayout::default() },
            )
            .assert_matches_reference();
        }
    }
}

#[test]
fn an_8_bit_cache_takes_rows_of_every_wider_type() {
    for (q, kv) in [F16, BF16].into_iter().flat_map(|q| FP8_DTYPES.map(|kv| (q, kv))) {
        for rows in ATTENTION_DTYPES {
            let spec = BatchSpec {
                scales: [ScaleKind::None, ScaleKind::PerHead, ScaleKind::PerTensor],
                ..mixed(Dtypes::over(q, kv))
            };
            PagedUpdateCase::of_rows(&spec.batch(), &MemoryLayout::default(), rows).assert_matches_reference();
        }
    }
}

/// The bytes of a sequence's rows of `out`.
fn rows_of(update: &PagedUpdateCase, out: &Array, index: usize) -> Vec<u8> {
    let row = update.attention.config.q_heads * update.attention.config.value_dim * out.dtype.size();
    let [first, end] = [index, index + 1].map(|b| update.attention.cu_seqlens_q[b] as usize * row);
    out.bytes[first..end].to_vec()
}

/// Asserts that the cache is the expected one, and that all sequences but those in `affected` have the same bits as in
/// `reference`.
fn assert_only_affects(update: &PagedUpdateCase, reference: &PagedUpdateCase, affected: &[usize]) {
    let expected = reference.invocation(true).results(Side::EndsAtGuard);
    for_each_side(|side| {
        for in_place in [true, false] {
            let results = update.invocation(in_place).results(side);
            assert!(results[1] == *update.cache(), "{}: the cache differs", update.attention.name);
            for index in (0..reference.attention.num_seqs as usize).filter(|index| !affected.contains(index)) {
                let [actual, expected] = [&results[0], &expected[0]].map(|out| rows_of(reference, out, index));
                assert!(actual == expected, "{}: sequence {index} has other bits", update.attention.name);
            }
        }
    });
}

/// A batch-invariant call.
fn invariant(dtypes: Dtypes) -> PagedUpdateCase {
    PagedUpdateCase::new(&BatchSpec { batch_invariant: true, ..mixed(dtypes) }.batch(), &MemoryLayout::default())
}

/// A batch-invariant call with one query per sequence, which only the decode kernel handles.
fn invariant_decode(dtypes: Dtypes) -> PagedUpdateCase {
    let lengths = vec![(1, 40), (1, 700), (1, 1), (1, 64)];
    PagedUpdateCase::new(
        &BatchSpec { batch_invariant: true, lengths, ..mixed(dtypes) }.batch(),
        &MemoryLayout::default(),
    )
}

#[test]
fn a_row_without_a_slot_affects_only_its_own_sequence() {
    for dtypes in [Dtypes::same(F32), Dtypes::same(BF16), Dtypes::over(F16, F8E4M3FN)] {
        for reference in [invariant(dtypes), invariant_decode(dtypes)] {
            for (affected, nowhere) in
                (0..3).flat_map(|affected| [-1, i64::from(i32::MIN), i64::from(i32::MAX)].map(|s| (affected, s)))
            {
                let mut update = reference.clone();
                let last = update.attention.cu_seqlens_q[affected + 1] as usize - 1;
                update.slots[last] = nowhere;
                update.recompute_cache();
                assert_only_affects(&update, &reference, &[affected]);
            }
        }
    }
}

#[test]
fn i64_slots_are_not_truncated_to_i32() {
    for reference in [invariant(F32.into()), invariant_decode(F32.into())] {
        let mut update = PagedUpdateCase { wide_slots: true, ..reference.clone() };
        // The low half is the slot of the first sequence's last key.
        let last = update.attention.cu_seqlens_q[1] as usize - 1;
        update.slots[last] |= 1 << 32;
        update.recompute_cache();
        assert_only_affects(&update, &reference, &[0]);
    }
}
