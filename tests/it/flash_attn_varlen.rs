//! `xla_gpu_flash_attn_varlen` through its XLA FFI handlers and with guard pages, or on a GPU: agreement with the f64
//! reference, hostile metadata, metamorphic properties.

use crate::attention::tests_of;
use crate::support::{AttentionCase, BatchSpec, KvLayout, MemoryLayout, ReferenceCase};

tests_of! { FlashAttnVarlen:
    agreement {
        named_cases_agree_with_the_reference,
        every_group_size_agrees_with_the_reference,
        huge_scores_neither_overflow_nor_lose_the_softmax,
        a_sink_may_outweigh_everything_or_nothing,
        scales_and_slopes_may_be_0_or_negative,
    }
    interface { every_workspace_size_gives_the_right_result, max_seqlen_hints_do_not_change_results }
    nan_isolation { a_sequence_full_of_nan_changes_no_bit_of_another, a_visible_nan_propagates }
    batch_invariance {
        rows_have_the_bits_of_their_sequence_alone_in_any_memory_layout,
        rows_do_not_depend_on_their_position_or_on_the_batch_size,
        a_long_sequence_does_not_depend_on_the_workspace_size,
    }
    metamorphic {
        every_layout_and_page_size_gives_the_same_result,
        a_ragged_batch_gives_the_results_of_its_sequences_alone,
        grouped_heads_equal_repeated_heads,
        permuting_keys_changes_nothing_without_mask_and_bias,
        left_padding_equals_removing_the_keys,
        equivalent_masks_give_the_same_result,
        neutral_option_values_change_nothing,
        slopes_per_sequence_equal_slopes_per_head,
        adding_a_vector_to_every_key_changes_only_the_lse,
        adding_a_number_to_every_value_adds_it_to_every_row_that_attends_to_a_key,
        out_lies_between_the_smallest_and_the_largest_value,
        a_sink_scales_every_row,
        a_sink_equals_a_key_with_value_0,
        a_scale_equals_multiplied_operands,
        merging_the_states_of_two_splits_gives_the_whole,
    }
    metadata {
        random_metadata_does_not_affect_sequences_with_valid_metadata,
        a_value_out_of_range_acts_as_the_nearest_one_in_range,
        starts_of_keys_are_clamped_to_the_rows,
        differences_of_starts_over_pages_do_not_overflow,
        a_start_counts_as_the_largest_up_to_it,
        sequences_may_share_keys,
        all_kernels_clamp_the_starts_of_many_sequences_alike,
        planning_hostile_starts_costs_no_more_than_planning_valid_ones,
    }
}

#[test]
fn every_page_size_agrees_with_the_reference() {
    for page_size in [1, 2, 3, 5, 8, 13, 16, 24, 31, 32, 33, 48, 64, 100, 128, 256, 1000] {
        for layout in KvLayout::PAGED {
            let spec = BatchSpec { head_dim: 24, lengths: vec![(1, 130), (21, 64)], ..BatchSpec::default() };
            ReferenceCase::assert_matches_reference(&AttentionCase::flash(
                &spec.batch(),
                &MemoryLayout::paged(layout, page_size),
            ));
        }
    }
}
