//! `xla_gpu_flash_attn_varlen_bwd` through its XLA FFI handlers and with guard pages, or on a GPU: agreement with the
//! f64 reference, hostile metadata, metamorphic properties.

use crate::attention::{Operator, tests_of};
use crate::support::{
    ATTENTION_DTYPES, Array, BF16, BatchSpec, F32, GradientCase, GradientOptions, Mask, MemoryLayout, PairwiseOptions,
    ReferenceCase, Side, assert_calls_match_reference, assert_named_matches_reference,
};
use xla_attention::ops::workspace::AttentionSizes;

tests_of! { FlashAttnVarlenBwd:
    agreement {
        every_group_size_agrees_with_the_reference,
        huge_scores_neither_overflow_nor_lose_the_softmax,
        a_sink_may_outweigh_everything_or_nothing,
        long_sequences_agree_with_the_reference,
    }
    nan_isolation { a_sequence_full_of_nan_changes_no_bit_of_another, a_visible_nan_propagates }
    metamorphic {
        a_ragged_batch_gives_the_results_of_its_sequences_alone,
        grouped_heads_equal_repeated_heads,
        permuting_keys_changes_nothing_without_mask_and_bias,
        left_padding_equals_removing_the_keys,
        equivalent_masks_give_the_same_result,
        neutral_option_values_change_nothing,
        adding_a_number_to_every_value_adds_it_to_every_row_that_attends_to_a_key,
        dk_and_dv_sum_to_the_cotangents_of_the_rows,
        q_times_dq_equals_k_times_dk,
        gradients_are_linear_in_the_cotangents,
    }
    metadata {
        random_metadata_does_not_affect_sequences_with_valid_metadata,
        a_value_out_of_range_acts_as_the_nearest_one_in_range,
        starts_of_keys_are_clamped_to_the_rows,
        a_start_counts_as_the_largest_up_to_it,
        all_kernels_clamp_the_starts_of_many_sequences_alike,
    }
}

#[test]
fn every_pair_of_options_agrees_with_the_reference() {
    let calls = PairwiseOptions::GRADIENTS.calls();
    assert_calls_match_reference("pairwise", calls, |(_, spec, memory_layout, options)| {
        GradientCase::store(&spec.batch(), &memory_layout, options)
    });
}

#[test]
fn lengths_around_every_size_of_a_block_agree_with_the_reference() {
    for (index, &length) in [15, 16, 17, 31, 33, 63, 64, 65, 127, 129].iter().enumerate() {
        let dtypes = ATTENTION_DTYPES[index % 3].into();
        let lengths = vec![(length, length), (length, 2 * length + 1), (2 * length, 7)];
        for mask in [Mask::CAUSAL, Mask::FULL, Mask::window(length as i64, 3)] {
            let lengths = lengths.clone();
            let spec = BatchSpec { dtypes, heads: (2, 1), head_dim: 32, lengths, mask, ..BatchSpec::default() };
            ReferenceCase::assert_matches_reference(&GradientCase::store(
                &spec.batch(),
                &MemoryLayout::contiguous(),
                GradientOptions::ALL,
            ));
        }
    }
}

/// An accumulator of bf16 would lose up to 2^-9 of itself with each micro-panel of rows or block of keys. The cotangents
/// are so large that the absolute part of the bound does not hide this, and each call has one sequence, as the largest
/// gradient of a call widens its bound. V is K, so that the terms of dQ agree in sign and their own roundings do not
/// outweigh those of the sum; small scores round little, too.
#[test]
fn sums_over_many_rows_and_keys_agree_with_the_reference() {
    for (lengths, dtype) in [((6001, 16), None), ((33, 9001), None), ((6001, 16), Some(F32)), ((33, 9001), Some(F32))] {
        let spec = BatchSpec { dtypes: BF16.into(), heads: (1, 1), head_dim: 32, ..BatchSpec::default() };
        let spec = BatchSpec { lengths: vec![lengths], mask: Mask::FULL, ..spec };
        let options = GradientOptions { dtype, ..GradientOptions::MINIMAL };
        let mut batch = spec.batch();
        let sequence = &mut batch.sequences[0];
        sequence.q.iter_mut().for_each(|x| *x *= 0.125);
        sequence.v.clone_from(&sequence.k);
        let mut case = GradientCase::store(&batch, &MemoryLayout::contiguous(), options);
        let dout: Vec<f64> = case.dout.values().iter().map(|x| 16384.0 * x).collect();
        case.dout = Array::new(case.dout.dtype, &case.dout.dims, &dout);
        assert_named_matches_reference(&format!("{lengths:?}, gradients {dtype:?}"), &mut case);
    }
}

/// The workspace that the front-ends give a call.
fn recommended_workspace(case: &GradientCase) -> usize {
    let config = &case.forward.config;
    let [num_q_heads, num_kv_heads, head_dim, value_dim] =
        [config.q_heads, config.kv_heads, config.head_dim, config.value_dim].map(|x| x as i64);
    let dtype = config.dtypes.q;
    let sizes = AttentionSizes { num_q_heads, num_kv_heads, head_dim, value_dim, dtype, batch_invariant: false };
    let options = sizes.gradients_workspace();
    let (rows, sequences) = (case.forward.rows() as i64, case.forward.slots() as i64);
    (options.fixed + rows * options.per_row + sequences * options.per_sequence) as usize
}

#[test]
fn every_workspace_size_gives_the_right_result() {
    for dtype in ATTENTION_DTYPES {
        for deterministic in [false, true] {
            let lengths = vec![(1, 90), (9, 9), (0, 4), (21, 64)];
            let batch = BatchSpec { dtypes: dtype.into(), lengths, ..BatchSpec::default() }.batch();
            let mut case = GradientCase::store(
                &batch,
                &MemoryLayout::contiguous(),
                GradientOptions { deterministic, ..GradientOptions::ALL },
            );
            let recommended = recommended_workspace(&case);
            let sizes =
                [0, 1, 4096, recommended / 2, recommended.saturating_sub(1), recommended, recommended + 1, 3_000_000];
            for workspace in [None].into_iter().chain(sizes.map(Some)) {
                case.forward.workspace = workspace;
                ReferenceCase::assert_matches_reference(&case);
            }
        }
    }
}

#[test]
fn a_dlse_of_0_equals_no_dlse_and_dsinks_without_sinks_is_0() {
    Operator::FlashAttnVarlenBwd.for_calls(16, |spec, memory_layout, _| {
        let mut case =
            GradientCase::store(&BatchSpec { sinks: false, ..spec }.batch(), &memory_layout, GradientOptions::ALL);
        let none = GradientCase { dlse: None, ..case.clone() };
        case.dlse = case.dlse.map(|dlse| Array::filled(F32, &dlse.dims, 0));
        let [zeros, none] = [case, none].map(|case| case.invocation().results(Side::EndsAtGuard)[..4].to_vec());
        assert!(zeros == none);
        assert!(zeros[3].values().iter().all(|&x| x == 0.0));
    });
}

#[test]
fn two_runs_of_a_deterministic_call_have_the_same_bits() {
    Operator::FlashAttnVarlenBwd.for_calls(32, |spec, memory_layout, _| {
        let case = GradientCase::store(&spec.batch(), &memory_layout, GradientOptions::ALL);
        let run = || case.invocation().results(Side::BeginsAtGuard)[..4].to_vec();
        assert!(run() == run());
    });
}
