//! `xla_gpu_flash_attn_varlen` through its XLA FFI handler and under guard pages, or on a GPU: against the f64
//! reference, against hostile metadata, and against itself.

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
    interface { any_workspace_serves, hints_never_decide_which_rows_are_computed }
    nan_isolation { a_sequence_full_of_nan_changes_no_bit_of_another, a_nan_that_a_query_sees_is_not_hidden }
    batch_invariance {
        rows_have_the_bits_of_their_sequence_alone_wherever_it_lies,
        rows_do_not_depend_on_their_place_or_their_neighbours_number,
        a_long_sequence_does_not_depend_on_the_room_to_split_it,
    }
    metamorphic {
        however_keys_are_stored_the_answer_is_the_same,
        a_ragged_batch_is_its_sequences_one_by_one,
        grouped_heads_equal_repeated_heads,
        keys_may_stand_in_any_order_where_no_place_counts,
        padding_on_the_left_equals_slicing_it_off,
        masks_that_show_the_same_keys_give_the_same,
        options_that_say_nothing_change_nothing,
        slopes_repeated_for_each_sequence_are_the_slopes,
        adding_a_vector_to_every_key_moves_only_the_lse,
        adding_a_number_to_every_value_adds_it_to_every_row_that_sees_a_key,
        out_lies_between_the_smallest_and_the_largest_value,
        a_sink_takes_its_share_of_every_row,
        a_sink_is_one_more_key_of_value_0,
        a_scale_stands_for_multiplied_numbers,
        keys_that_are_split_anywhere_and_merged_by_their_lse_are_the_keys,
    }
    metadata {
        random_metadata_does_no_harm_to_the_sequences_whose_own_is_right,
        a_value_out_of_range_acts_as_the_nearest_one_in_range,
        starts_of_keys_are_clamped_to_the_rows,
        differences_of_starts_over_pages_do_not_overflow,
        a_start_counts_as_the_largest_up_to_it,
        sequences_may_share_keys,
        all_kernels_read_the_starts_of_many_sequences_alike,
        planning_hostile_starts_costs_no_more_than_planning_right_ones,
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
