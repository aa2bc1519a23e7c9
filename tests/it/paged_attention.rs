//! `xla_gpu_paged_attention` through its XLA FFI handlers and with guard pages, or on a GPU: agreement with the f64
//! reference, hostile metadata, metamorphic properties.

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
    interface { every_workspace_size_gives_the_right_result }
    nan_isolation { a_sequence_full_of_nan_changes_no_bit_of_another }
    batch_invariance {
        rows_have_the_bits_of_their_sequence_alone_in_any_memory_layout,
        rows_do_not_depend_on_their_position_or_on_the_batch_size,
    }
    // Properties that do not involve pages are tested for `flash_attn_varlen`, which is the same computation.
    metamorphic {
        paged_attention_equals_causal_flash_attn_varlen,
        every_layout_and_page_size_gives_the_same_result,
        a_ragged_batch_gives_the_results_of_its_sequences_alone,
        chunked_prefill_equals_whole_prefill,
        slopes_per_sequence_equal_slopes_per_head,
    }
    metadata {
        random_metadata_does_not_affect_sequences_with_valid_metadata,
        random_metadata_is_harmless_in_fused_prefill_and_decode,
        a_value_out_of_range_acts_as_the_nearest_one_in_range,
        a_start_counts_as_the_largest_up_to_it,
        sequences_may_share_keys,
        sequences_beyond_num_seqs_are_not_computed,
    }
}

#[test]
fn a_row_without_keys_may_have_any_number_of_heads() {
    // K and V of one token have more elements than the CPU processes at once, 2^19.
    let spec =
        BatchSpec { heads: (1025, 1025), head_dim: 256, lengths: vec![(1, 0), (1, 2), (0, 0)], ..BatchSpec::default() };
    ReferenceCase::assert_matches_reference(&AttentionCase::paged(
        &spec.batch(),
        &MemoryLayout { page_size: 1, ..MemoryLayout::default() },
    ));
}

#[test]
fn every_fp8_number_in_the_cache_has_its_value() {
    for (q, kv) in [F16, BF16].into_iter().flat_map(|q| FP8_DTYPES.map(|kv| (q, kv))) {
        let numbers: Vec<f64> =
            (0..=u8::MAX).map(|code| kv.decode(&[code])).map(|x| if x.is_finite() { x } else { 0.0 }).collect();
        // Query i selects column i of K.
        let (dtypes, lengths) = (Dtypes::over(q, kv), vec![(1, 1); numbers.len()]);
        let mut batch = BatchSpec { dtypes, lengths, heads: (1, 1), head_dim: 256, ..BatchSpec::default() }.batch();
        for (i, sequence) in batch.sequences.iter_mut().enumerate() {
            sequence.q = (0..numbers.len()).map(|column| f64::from(u8::from(column == i))).collect();
            (sequence.k, sequence.v) = (numbers.clone(), numbers.clone());
        }
        // Logits of 57344 would exceed the precision of the lse.
        batch.config.softmax_scale = if kv == F8E4M3FN { 1.0 } else { 1.0 / 128.0 };
        let results = ReferenceCase::assert_matches_reference(&AttentionCase::paged(&batch, &MemoryLayout::default()));
        for row in results[0].values().chunks(numbers.len()).take(numbers.len()) {
            assert!(row == numbers, "{dtypes:?}: {row:?}");
        }
    }
}
