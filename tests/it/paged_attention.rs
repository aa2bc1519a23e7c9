//! `xla_gpu_paged_attention` through its XLA FFI handler and under guard pages, or on a GPU: against the f64 reference,
//! against hostile metadata, and against itself.

use crate::attention::tests_of;
use crate::support::{
    AttentionCase, BF16, BatchSpec, Dtypes, F8E4M3FN, F16, FP8_DTYPES, MemoryLayout, Numbers, ReferenceCase,
};

tests_of! { PagedAttention:
    agreement {
        named_cases_agree_with_the_reference,
        every_group_size_agrees_with_the_reference,
        long_sequences_agree_with_the_reference,
    }
    interface { any_workspace_serves }
    nan_isolation { a_sequence_full_of_nan_changes_no_bit_of_another }
    batch_invariance {
        rows_have_the_bits_of_their_sequence_alone_wherever_it_lies,
        rows_do_not_depend_on_their_place_or_their_neighbours_number,
    }
    // Those that know nothing of pages hold because it is `flash_attn_varlen`.
    metamorphic {
        it_is_causal_flash_attn_varlen,
        however_keys_are_stored_the_answer_is_the_same,
        a_ragged_batch_is_its_sequences_one_by_one,
        a_prefill_in_chunks_is_the_whole_prefill,
        slopes_repeated_for_each_sequence_are_the_slopes,
    }
    metadata {
        random_metadata_does_no_harm_to_the_sequences_whose_own_is_right,
        random_metadata_does_no_harm_beneath_prefill,
        a_value_out_of_range_acts_as_the_nearest_one_in_range,
        a_start_counts_as_the_largest_up_to_it,
        sequences_may_share_keys,
        only_as_many_sequences_as_num_seqs_says_are_there,
    }
}

#[test]
fn a_row_without_keys_may_have_any_number_of_heads() {
    // K and V of a token are longer than the CPU takes at a time: 2^19 elements.
    let spec =
        BatchSpec { heads: (1025, 1025), head_dim: 256, lengths: vec![(1, 0), (1, 2), (0, 0)], ..BatchSpec::default() };
    ReferenceCase::assert_matches_reference(&AttentionCase::paged(
        &spec.batch(),
        &MemoryLayout { page_size: 1, ..MemoryLayout::default() },
    ));
}

#[test]
fn every_number_of_8_bits_counts_as_what_it_is() {
    for (q, kv) in [F16, BF16].into_iter().flat_map(|q| FP8_DTYPES.map(|kv| (q, kv))) {
        let numbers: Vec<f64> =
            (0..=u8::MAX).map(|code| kv.decode(&[code])).map(|x| if x.is_finite() { x } else { 0.0 }).collect();
        // Query i picks out column i of K.
        let (dtypes, lengths) = (Dtypes::over(q, kv), vec![(1, 1); numbers.len()]);
        let mut batch = BatchSpec { dtypes, lengths, heads: (1, 1), head_dim: 256, ..BatchSpec::default() }.batch();
        for (i, sequence) in batch.sequences.iter_mut().enumerate() {
            sequence.q = (0..numbers.len()).map(|column| f64::from(u8::from(column == i))).collect();
            (sequence.k, sequence.v) = (numbers.clone(), numbers.clone());
        }
        // Logits of 57344 are past what lse is told apart by.
        batch.config.softmax_scale = if kv == F8E4M3FN { 1.0 } else { 1.0 / 128.0 };
        let results = ReferenceCase::assert_matches_reference(&AttentionCase::paged(&batch, &MemoryLayout::default()));
        for row in results[0].values().chunks(numbers.len()).take(numbers.len()) {
            assert!(row == numbers, "{dtypes:?}: {row:?}");
        }
    }
}
