//! `xla_gpu_mla_paged_attention_update`: the cache that it leaves, and attention over it, in place and with a separate cache.

use crate::support::{
    ATTENTION_DTYPES, Array, BF16, BatchSpec, Dtypes, F8E4M3FN, F16, F32, FP8_DTYPES, MemoryLayout, MlaUpdateCase,
    ReferenceCase, ScaleKind, Side, for_all, for_each_side, latent_call, latent_workspace,
};

const SCALED: [ScaleKind; 3] = [ScaleKind::None, ScaleKind::PerTensor, ScaleKind::None];

fn mixed(dtypes: Dtypes) -> BatchSpec {
    BatchSpec {
        mask: crate::support::Mask::CAUSAL,
        ..BatchSpec::latent(dtypes, 4, [48, 32], &[(7, 30), (1, 20), (5, 5)])
    }
}

#[test]
fn any_call_is_the_update_and_then_attention() {
    for_all(96, &|random| {
        let (spec, memory_layout) = latent_call(random);
        let head_dim = spec.head_dim.max(16);
        let value_dim = spec.value_dim.map(|dim| dim.min(head_dim - 8));
        let spec = BatchSpec { head_dim, value_dim, ..spec };
        MlaUpdateCase::new(&spec.batch(), &memory_layout, None).assert_matches_reference();
    });
}

#[test]
fn every_type_and_size_agrees_with_the_reference() {
    for dtypes in Dtypes::LATENT {
        for (heads, dims) in [(16, [576, 512]), (3, [64, 56]), (128, [24, 16])] {
            for scales in [[ScaleKind::None; 3], SCALED] {
                let lengths = [(1, 700), (3, 40), (1, 1), (0, 6)];
                let spec = BatchSpec { scales, ..BatchSpec::latent(dtypes, heads, dims, &lengths) };
                let memory_layout = MemoryLayout { workspace: Some(latent_workspace()), ..MemoryLayout::default() };
                MlaUpdateCase::new(&spec.batch(), &memory_layout, None).assert_matches_reference();
            }
        }
    }
}

#[test]
fn an_8_bit_cache_takes_rows_of_every_wider_type() {
    for (q, kv) in [F16, BF16].into_iter().flat_map(|q| FP8_DTYPES.map(|kv| (q, kv))) {
        for rows in ATTENTION_DTYPES {
            let spec = BatchSpec { scales: SCALED, ..mixed(Dtypes::over(q, kv)) };
            MlaUpdateCase::new(&spec.batch(), &MemoryLayout::default(), Some(rows)).assert_matches_reference();
        }
    }
}

/// The bytes of a sequence's rows of `out`.
fn rows_of(update: &MlaUpdateCase, out: &Array, index: usize) -> Vec<u8> {
    let row = update.attention.config.q_heads * update.attention.config.value_dim * out.dtype.size();
    let [first, end] = [index, index + 1].map(|b| update.attention.cu_seqlens_q[b] as usize * row);
    out.bytes[first..end].to_vec()
}

#[test]
fn a_row_without_a_slot_affects_only_its_own_sequence() {
    for dtypes in [Dtypes::same(F32), Dtypes::same(BF16), Dtypes::over(F16, F8E4M3FN)] {
        let spec = BatchSpec { batch_invariant: true, ..mixed(dtypes) };
        let reference = MlaUpdateCase::new(&spec.batch(), &MemoryLayout::default(), None);
        let expected = reference.invocation(true).results(Side::EndsAtGuard);
        let hostile = [-1, i64::from(i32::MIN), i64::from(i32::MAX), 1 << 32, i64::MIN];
        for (affected, nowhere) in (0..3).flat_map(|affected| hostile.map(|slot| (affected, slot))) {
            let wide_slots = reference.wide_slots || i32::try_from(nowhere).is_err();
            let mut update = MlaUpdateCase { wide_slots, ..reference.clone() };
            let last = update.attention.cu_seqlens_q[affected + 1] as usize - 1;
            // The low half of 2^32 + slot is a valid slot.
            update.slots[last] = if nowhere == 1 << 32 { update.slots[last] | nowhere } else { nowhere };
            update.recompute_cache();
            for_each_side(|side| {
                for in_place in [true, false] {
                    let results = update.invocation(in_place).results(side);
                    assert!(results[1] == *update.cache(), "{dtypes:?}: the cache differs");
                    for index in (0..3).filter(|index| *index != affected) {
                        let [actual, expected] = [&results[0], &expected[0]].map(|out| rows_of(&reference, out, index));
                        assert!(actual == expected, "{dtypes:?}: sequence {index} has other bits");
                    }
                }
            });
        }
    }
}
