//! Batches with names: those of models and servers, and corner cases.

use super::{Alibi, BatchSpec, Dtypes, KvLayout, Mask, MaxSeqlenHints, MemoryLayout, ScaleKind};

/// A name, a batch and its memory layout.
pub type Named = (&'static str, BatchSpec, MemoryLayout);

impl BatchSpec {
    /// The same with other sizes.
    fn sized(&self, heads: (usize, usize), head_dim: usize, lengths: &[(usize, usize)]) -> Self {
        Self { heads, head_dim, lengths: lengths.to_vec(), ..self.clone() }
    }
}

/// Batches for paged attention.
pub fn named_paged_batches(dtypes: Dtypes) -> Vec<Named> {
    let any = BatchSpec { dtypes, ..BatchSpec::default() };
    let of = |heads, head_dim, lengths: &[_]| any.sized(heads, head_dim, lengths);
    let masked = |mask, lengths: &[(usize, usize)]| BatchSpec { mask, ..of((4, 2), 64, lengths) };
    let page = |page_size| MemoryLayout { page_size, ..MemoryLayout::default() };
    let small = || of((4, 2), 64, &[(1, 17), (5, 5), (3, 33)]);
    let ragged = [(0, 10), (3, 9), (0, 0), (2, 2)];
    vec![
        ("one_head_decode", of((1, 1), 8, &[(1, 1)]), page(1)),
        ("smollm2_mixed", of((9, 3), 64, &[(7, 7), (1, 40), (1, 97), (12, 60)]), page(16)),
        ("llama3_8b_decode", of((32, 8), 128, &[(1, 1), (1, 65), (1, 128), (1, 33)]), page(16)),
        ("mqa_prefill_page_7", of((4, 1), 40, &[(19, 19), (13, 50)]), page(7)),
        ("head_dim_256", of((2, 2), 256, &[(9, 70), (1, 64)]), page(64)),
        ("head_dim_512", of((4, 2), 512, &[(9, 70), (1, 64), (1, 700)]), page(64)),
        ("head_dim_24_page_1", of((8, 2), 24, &[(3, 9), (1, 31)]), page(1)),
        ("long_prefill", of((2, 1), 32, &[(150, 150), (70, 201)]), page(16)),
        ("long_decode", of((4, 1), 16, &[(1, 1500)]), page(16)),
        ("long_decode_of_wide_rows", of((16, 8), 256, &[(1, 700), (2, 300), (1, 1)]), page(16)),
        ("chunk_at_the_end_of_a_long_context", of((2, 1), 256, &[(30, 2300)]), page(64)),
        ("window_1_attends_only_to_itself", masked(Mask::sliding(1), &[(1, 20), (6, 40)]), page(7)),
        ("window_slides_over_pages", masked(Mask::sliding(24), &[(1, 200), (33, 90), (40, 40)]), page(7)),
        ("window_wider_than_everything", masked(Mask::sliding(i64::MAX), &[(1, 17), (3, 33)]), page(16)),
        ("soft_cap", BatchSpec { softcap: 30.0, sharpness: 8.0, ..small() }, page(16)),
        ("soft_cap_and_window", BatchSpec { softcap: 2.5, ..masked(Mask::sliding(9), &[(12, 60), (1, 45)]) }, page(16)),
        ("one_key_wins", BatchSpec { sharpness: 60.0, ..of((4, 2), 64, &[(20, 80), (1, 300)]) }, page(16)),
        ("more_queries_than_keys", of((4, 2), 64, &[(20, 3), (9, 0), (4, 6)]), page(16)),
        ("sequences_without_queries", of((4, 2), 64, &ragged), page(7)),
        ("rows_before_the_first_start", small(), MemoryLayout { rows_around: (4, 3), ..page(16) }),
        ("nothing_to_spare", of((4, 2), 64, &[(2, 32), (1, 16)]), page(16).bare()),
        ("batch_invariant", BatchSpec { batch_invariant: true, ..small() }, page(16)),
    ]
}

/// Batches for `flash_attn_varlen`.
pub fn named_flash_batches(dtypes: Dtypes) -> Vec<Named> {
    let spec = BatchSpec { dtypes, ..BatchSpec::default() };
    [models(&spec), stored(&spec), long(&spec), corners(&spec)].concat()
}

fn models(spec: &BatchSpec) -> Vec<Named> {
    let (packed, paged) = (MemoryLayout::contiguous(), |page_size| MemoryLayout::paged(KvLayout::Split, page_size));
    let of = |heads, head_dim, lengths, mask| BatchSpec { mask, ..spec.sized(heads, head_dim, lengths) };
    let sliding = Mask { window_left: 31, ..Mask::CAUSAL };
    let gpt_oss = BatchSpec { sinks: true, ..of((16, 2), 64, &[(1, 90), (20, 20), (9, 70)], sliding) };
    let gemma2 = BatchSpec { softcap: 50.0, sharpness: 4.0, ..of((4, 2), 256, &[(1, 60), (18, 33)], sliding) };
    let mla = BatchSpec { value_dim: Some(128), ..of((4, 4), 192, &[(33, 33), (1, 40), (5, 70)], Mask::CAUSAL) };
    let bloom = BatchSpec { alibi: Alibi::PerHead, ..of((4, 4), 64, &[(40, 40), (1, 65)], Mask::CAUSAL) };
    let scaled_cache = BatchSpec {
        scales: [ScaleKind::None, ScaleKind::PerHead, ScaleKind::PerHead],
        ..of((8, 2), 128, &[(1, 100), (17, 40)], Mask::CAUSAL)
    };
    vec![
        ("bert_ragged", of((3, 3), 64, &[(1, 1), (17, 17), (64, 64), (33, 33)], Mask::FULL), packed.clone()),
        ("whisper_cross_attention", of((2, 2), 64, &[(5, 150), (30, 3), (1, 64)], Mask::FULL), packed.clone()),
        ("llama_training", of((4, 1), 128, &[(70, 70), (5, 5), (33, 33)], Mask::CAUSAL), packed.clone()),
        ("local_attention_to_both_sides", of((2, 1), 64, &[(90, 90), (20, 41)], Mask::window(16, 16)), packed.clone()),
        ("gpt_oss_sinks_and_window", gpt_oss.clone(), packed.clone()),
        ("gpt_oss_from_pages", gpt_oss, paged(16)),
        ("gemma2_softcap_and_window", gemma2, paged(32)),
        ("mla_192_128", mla.clone(), packed.clone()),
        ("mla_192_128_from_pages", mla, paged(64)),
        ("bloom_alibi", bloom.clone(), packed.clone()),
        ("alibi_to_both_sides", BatchSpec { mask: Mask::FULL, ..bloom }, packed.clone()),
        ("scaled_cache", scaled_cache.clone(), paged(16)),
        ("scaled_rows", scaled_cache, packed),
    ]
}

fn stored(spec: &BatchSpec) -> Vec<Named> {
    let packed = MemoryLayout::contiguous();
    let ragged = BatchSpec { lengths: vec![(1, 37), (20, 20), (0, 9), (13, 64)], ..spec.clone() };
    let hidden = MemoryLayout { seqused_q: true, seqused_k: true, ..packed.clone() };
    vec![
        ("rows_to_spare", ragged.clone(), hidden.clone()),
        ("left_padded", BatchSpec { leftpad: true, ..ragged.clone() }, packed.clone()),
        (
            "left_padded_pages",
            BatchSpec { leftpad: true, ..ragged.clone() },
            MemoryLayout::paged(KvLayout::Interleaved, 7),
        ),
        ("left_padded_window", BatchSpec { leftpad: true, mask: Mask::window(9, 4), ..ragged.clone() }, hidden),
        (
            "page_lengths_from_starts",
            ragged.clone(),
            MemoryLayout { seqused_k: false, ..MemoryLayout::paged(KvLayout::Split, 5) },
        ),
        ("pages_of_one_token", ragged.clone(), MemoryLayout::paged(KvLayout::PerPage, 1)),
        ("hints_far_too_small", ragged.clone(), MemoryLayout { hints: MaxSeqlenHints::TooSmall, ..packed.clone() }),
        ("hints_as_large_as_can_be", ragged.clone(), MemoryLayout { hints: MaxSeqlenHints::Huge, ..packed.clone() }),
        ("nothing_to_spare", ragged.clone(), packed.clone().bare()),
        ("rows_before_the_first_start", ragged, MemoryLayout { rows_around: (4, 3), ..packed }),
    ]
}

/// Few queries over many keys, for which the kernels use split-KV.
fn long(spec: &BatchSpec) -> Vec<Named> {
    let packed = MemoryLayout::contiguous();
    let decode = spec.sized((4, 1), 64, &[(1, 1500), (2, 900)]);
    let wide = spec.sized((8, 4), 128, &[(1, 1300), (3, 600), (1, 2)]);
    let wide_rows = spec.sized((8, 2), 256, &[(1, 700), (3, 290)]);
    let first_keys = BatchSpec { mask: Mask::window(40, 40).top_left(), ..wide.clone() };
    let with_room = |memory_layout: &MemoryLayout| MemoryLayout { workspace: Some(5_000_001), ..memory_layout.clone() };
    let roomy = || with_room(&packed);
    let few_splits = MemoryLayout { workspace: Some(300_000), ..packed.clone() };
    let padded = BatchSpec { leftpad: true, seed: 3, ..wide.clone() };
    vec![
        ("long_decode", decode.clone(), packed.clone()),
        ("long_decode_with_room", decode.clone(), roomy()),
        ("long_decode_from_stacked_pages", decode, MemoryLayout::paged(KvLayout::Stacked, 16)),
        ("long_decode_of_wide_rows", wide_rows, MemoryLayout::paged(KvLayout::PerPage, 64)),
        // The largest score lies in any split.
        ("one_key_of_many_wins", BatchSpec { sharpness: 40.0, ..wide.clone() }, roomy()),
        ("splits_with_sinks", BatchSpec { sinks: true, ..wide.clone() }, roomy()),
        ("splits_that_no_query_attends_to", first_keys, roomy()),
        ("splits_in_the_padding", padded, with_room(&MemoryLayout::paged(KvLayout::Split, 32))),
        ("splits_with_alibi", BatchSpec { alibi: Alibi::PerHead, ..wide.clone() }, roomy()),
        ("splits_with_a_soft_cap", BatchSpec { softcap: 4.0, sharpness: 9.0, ..wide }, few_splits),
    ]
}

fn corners(spec: &BatchSpec) -> Vec<Named> {
    let packed = MemoryLayout::contiguous();
    let of = |lengths: &[(usize, usize)], mask| BatchSpec { lengths: lengths.to_vec(), mask, ..spec.clone() };
    let (uneven, unseeing) = ([(5, 40), (40, 5), (17, 17), (1, 3), (3, 1)], [(20, 3), (4, 0), (2, 2)]);
    vec![
        ("one_number", BatchSpec { heads: (1, 1), head_dim: 8, ..of(&[(1, 1)], Mask::FULL) }, packed.clone().bare()),
        ("top_left_causal", of(&uneven, Mask::CAUSAL.top_left()), packed.clone()),
        ("bottom_right_causal", of(&uneven, Mask::CAUSAL), packed.clone()),
        ("only_the_diagonal", of(&uneven, Mask::window(0, 0)), packed.clone()),
        ("only_the_top_left_diagonal", of(&uneven, Mask::window(0, 0).top_left()), packed.clone()),
        ("only_what_comes_after", of(&uneven, Mask::window(0, 40)), packed.clone()),
        ("a_window_beyond_all_keys", of(&uneven, Mask::window(i64::MAX, i64::MAX)), packed.clone()),
        ("a_window_of_2_to_the_31", of(&uneven, Mask::window(1 << 31, 1 << 32)), packed.clone()),
        ("causal_beats_the_right_window", of(&uneven, Mask { window_right: 3, ..Mask::CAUSAL }), packed.clone()),
        ("one_key_wins", BatchSpec { sharpness: 60.0, ..of(&[(20, 80), (1, 300)], Mask::FULL) }, packed.clone()),
        ("sinks_where_nothing_is_seen", BatchSpec { sinks: true, ..of(&unseeing, Mask::CAUSAL) }, packed.clone()),
        ("no_key_at_all", BatchSpec { sinks: true, ..of(&[(2, 0), (5, 0)], Mask::FULL) }, packed.clone().bare()),
        ("no_query_at_all", of(&[(0, 7), (0, 0)], Mask::FULL), packed.clone()),
        ("no_sequence", of(&[], Mask::FULL), packed),
    ]
}
