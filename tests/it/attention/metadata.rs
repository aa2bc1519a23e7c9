//! The operators rely on no length, start, padding, page or count that they read (`docs/semantics.md#metadata`).

use super::{Operator, valid_and_invalid};
use crate::support::cost::{self, CostSizes, hostile_starts_cost_no_more};
use crate::support::{
    ATTENTION_DTYPES, Alibi, AttentionCase, BF16, BatchSpec, ClampedSequence, Dtypes, F16, F32, InvalidMetadata,
    KvLayout, MemoryLayout, Random, clamped_sequences,
};

/// Replaces some of the metadata by hostile numbers.
pub(crate) fn corrupt(case: &mut AttentionCase, seed: u64) {
    let mut random = Random::new(seed);
    let share = random.one_of(&[2, 8, 30]);
    let AttentionCase { cu_seqlens_q, cu_seqlens_k, block_table, num_seqs, .. } = case;
    let lengths = [&mut case.seqused_q, &mut case.seqused_k, &mut case.leftpad_k];
    let positions = [&mut case.q_offset, &mut case.k_start, &mut case.k_end];
    let optional = lengths.into_iter().chain(positions).flatten();
    for list in [cu_seqlens_q, cu_seqlens_k, block_table].into_iter().chain(optional) {
        for value in list {
            if random.below(share) == 0 {
                *value = random.hostile_i32();
            }
        }
    }
    for word in case.tree_mask.iter_mut().flat_map(|mask| &mut mask.words) {
        if random.below(share) == 0 {
            *word = random.next() as i32;
        }
    }
    if random.below(4) == 0 {
        *num_seqs = random.hostile_i32();
    }
    case.name = format!(
        "starts {:?} and {:?}, lengths {:?} and {:?}, leftpad_k {:?}, q_offset {:?}, key ranges {:?} to {:?}, trees {:?}, table {:?} by {}, num_seqs {}: {}",
        case.cu_seqlens_q,
        case.cu_seqlens_k,
        case.seqused_q,
        case.seqused_k,
        case.leftpad_k,
        case.q_offset,
        case.k_start,
        case.k_end,
        case.tree_mask,
        case.block_table,
        case.max_pages,
        case.num_seqs,
        case.name
    );
}

pub(crate) fn random_metadata_does_not_affect_sequences_with_valid_metadata(op: Operator) {
    op.for_calls(192, |spec, memory_layout, random| {
        let mut case = AttentionCase::store(op.target(), &spec.batch(), &memory_layout);
        corrupt(&mut case, random.next());
        op.call_of(case).compare_with_reference(InvalidMetadata::Unspecified);
    });
    // The test is void unless some sequences keep valid metadata and others do not.
    for memory_layout in op.memory_layouts() {
        let (mut valid, mut invalid) = (0, 0);
        for seed in 0..64 {
            let lengths = vec![(1, 20), (5, 40), (3, 3)];
            let batch = BatchSpec { lengths, leftpad: !op.is_paged(), seed, ..BatchSpec::default() }.batch();
            let mut case = AttentionCase::store(op.target(), &batch, &memory_layout);
            corrupt(&mut case, seed);
            let counts = valid_and_invalid(&case);
            (valid, invalid) = (valid + counts.0, invalid + counts.1);
        }
        assert!(valid > 20 && invalid > 20, "{valid} valid sequences, {invalid} invalid");
    }
}

/// Three sequences of 2, 3 and 4 queries that fill their pages and rows exactly, so that clamping to the end of the
/// memory clamps to the end of the last sequence.
fn full_case(op: Operator, dtypes: Dtypes, layout: KvLayout) -> AttentionCase {
    let gradients = op == Operator::FlashAttnVarlenBwd;
    let alibi = if op.is_paged() { Alibi::Off } else { Alibi::PerHead };
    let lengths = vec![(2, 32), (3, 32), (4, 32)];
    let spec = BatchSpec { dtypes, lengths, alibi, sinks: gradients, ..BatchSpec::default() };
    let memory_layout = MemoryLayout { seqused_k: op.is_paged(), ..MemoryLayout::paged(layout, 16).bare() };
    let mut case = AttentionCase::store(op.target(), &spec.batch(), &memory_layout);
    case.cu_seqlens_k = vec![0, 32, 64, 96];
    case
}

/// Asserts that the results are those of the clamped metadata.
fn assert_clamped(op: Operator, mut case: AttentionCase, description: &str) {
    case.name = format!("{description}: {}", case.name);
    op.call_of(case).compare_with_reference(InvalidMetadata::Clamped);
}

/// All dtypes, each with the first and the last layout of the operator.
fn settings(op: Operator) -> impl Iterator<Item = (Dtypes, KvLayout)> {
    let mut layouts = vec![*op.layouts().first().unwrap(), *op.layouts().last().unwrap()];
    layouts.dedup();
    op.dtypes().into_iter().flat_map(move |dtypes| layouts.clone().into_iter().map(move |layout| (dtypes, layout)))
}

/// The name of a change to the metadata of [`full_case`], and the change.
type Change = (&'static str, fn(&mut AttentionCase));

/// Replaces an entry of the block table. Every page of the cache is in the table.
fn replace_page(case: &mut AttentionCase, from: i32, to: i32) {
    *case.block_table.iter_mut().find(|id| **id == from).unwrap() = to;
}

const COMMON_CHANGES: [Change; 11] = [
    ("an end past the last row", |c| c.cu_seqlens_q[3] = 10),
    ("an end of i32::MAX", |c| c.cu_seqlens_q[3] = i32::MAX),
    ("a start before the first row", |c| c.cu_seqlens_q[0] = -1),
    ("a start of i32::MIN", |c| c.cu_seqlens_q[0] = i32::MIN),
    ("more keys than there are", |c| c.seqused_k = Some(vec![32, 33, i32::MAX])),
    ("fewer keys than none", |c| c.seqused_k = Some(vec![-1, 32, i32::MIN])),
    ("fewer keys than stored", |c| c.seqused_k = Some(vec![0, 1, 31])),
    ("ranges of keys past either end", |c| {
        c.k_start = Some(vec![i32::MIN, -1, -5, 31, 0, -1, 2, 0, 1]);
        c.k_end = Some(vec![i32::MAX, 33, 40, 32, 100, 5, 33, 32, i32::MAX]);
    }),
    ("ranges without a key", |c| {
        c.k_start = Some(vec![5, 32, i32::MAX, 7, 0, 3, i32::MAX, 31, 30]);
        c.k_end = Some(vec![5, 40, i32::MAX, 6, 0, i32::MIN, i32::MIN, 30, 32]);
    }),
    ("starts of ranges alone", |c| c.k_start = Some(vec![i32::MIN, 3, 31, 32, i32::MAX, 20, 16, 15, 17])),
    ("ends of ranges alone", |c| c.k_end = Some(vec![i32::MAX, 3, 31, 0, i32::MIN, 20, 16, 15, 17])),
];

const VARLEN_CHANGES: [Change; 9] = [
    ("more queries than there are", |c| c.seqused_q = Some(vec![3, i32::MAX, 4])),
    ("fewer queries than none", |c| c.seqused_q = Some(vec![-1, 3, i32::MIN])),
    ("fewer queries than rows", |c| c.seqused_q = Some(vec![1, 0, 3])),
    ("more padding than keys", |c| c.leftpad_k = Some(vec![32, 33, i32::MAX])),
    ("less padding than none", |c| c.leftpad_k = Some(vec![-1, 5, i32::MIN])),
    ("offsets of any size", |c| c.q_offset = Some(vec![i32::MIN, i32::MAX, 5])),
    ("offsets on either side of the keys", |c| c.q_offset = Some(vec![-2, 40, -40])),
    ("padding up to the last key", |c| c.leftpad_k = Some(vec![31, 30, 28])),
    ("padding beyond the keys in use", |c| {
        c.seqused_k = Some(vec![4, 20, 0]);
        c.leftpad_k = Some(vec![5, 19, 1]);
    }),
];

const PAGED_CHANGES: [Change; 5] = [
    ("more sequences than slots", |c| c.num_seqs = 4),
    ("i32::MAX sequences", |c| c.num_seqs = i32::MAX),
    ("-1 sequences", |c| c.num_seqs = -1),
    ("i32::MIN sequences", |c| c.num_seqs = i32::MIN),
    ("a start past the sequences in use, which is not read", |c| (c.num_seqs, c.cu_seqlens_q[3]) = (2, i32::MAX)),
];

const PAGE_TABLE_CHANGES: [Change; 4] = [
    ("a page past the pool", |c| replace_page(c, 5, 6)),
    ("page i32::MAX", |c| replace_page(c, 5, i32::MAX)),
    ("page -1", |c| replace_page(c, 0, -1)),
    ("page i32::MIN", |c| replace_page(c, 0, i32::MIN)),
];

pub(crate) fn a_value_out_of_range_acts_as_the_nearest_one_in_range(op: Operator) {
    let operator_changes: &[Change] = if op.is_paged() { &PAGED_CHANGES } else { &VARLEN_CHANGES };
    for (dtypes, layout) in settings(op) {
        let layout_changes: &[Change] = if layout == KvLayout::Contiguous { &[] } else { &PAGE_TABLE_CHANGES };
        for (description, change) in COMMON_CHANGES.iter().chain(operator_changes).chain(layout_changes) {
            let mut case = full_case(op, dtypes, layout);
            assert!(layout == KvLayout::Contiguous || case.kv_geometry.num_pages == 6);
            change(&mut case);
            assert_clamped(op, case, description);
        }
    }
}

/// Name of a test case, starts of queries or of keys, and the expected (first row, length) of each sequence.
type Starts = (&'static str, [i32; 4], [(usize, usize); 3]);

/// Asserts that starts are clamped to the expected rows, and that the results are those of these rows.
fn assert_starts_clamped(
    op: Operator,
    layout: KvLayout,
    starts: &[Starts],
    of: fn(&mut AttentionCase) -> &mut Vec<i32>,
    range: fn(&ClampedSequence) -> (usize, usize),
) {
    for dtypes in op.dtypes() {
        for (description, starts, expected) in starts {
            let mut case = full_case(op, dtypes, layout);
            *of(&mut case) = starts.to_vec();
            assert_eq!(clamped_sequences(&case).iter().map(range).collect::<Vec<_>>(), expected, "{description}");
            assert_clamped(op, case, description);
        }
    }
}

const MIN: i32 = i32::MIN;
const MAX: i32 = i32::MAX;

pub(crate) fn starts_of_keys_are_clamped_to_the_rows(op: Operator) {
    let starts = [
        ("an end past the last row", [0, 32, 64, 97], [(0, 32), (32, 32), (64, 32)]),
        ("an end of i32::MAX", [0, 32, 64, MAX], [(0, 32), (32, 32), (64, 32)]),
        ("a start before the first row", [-5, 32, 64, 96], [(0, 32), (32, 32), (64, 32)]),
        ("a start of i32::MIN", [MIN, 32, 64, 96], [(0, 32), (32, 32), (64, 32)]),
        ("starts that run backwards", [0, 64, 32, 96], [(0, 64), (64, 0), (64, 32)]),
        ("from one end of i32 to the other", [MIN, MAX, MIN, MAX], [(0, 96), (96, 0), (96, 0)]),
        ("everything after the last row", [96, 97, MAX, MAX], [(96, 0), (96, 0), (96, 0)]),
        ("everything before the first row", [MIN, -3, -2, -1], [(0, 0), (0, 0), (0, 0)]),
    ];
    assert_starts_clamped(op, KvLayout::Contiguous, &starts, |c| &mut c.cu_seqlens_k, |m| (m.first_key, m.len_k));
}

pub(crate) fn differences_of_starts_over_pages_do_not_overflow(op: Operator) {
    let starts = [
        ("from one end of i32 to the other", [MIN, MAX, MIN, MAX], [(0, 32), (0, 0), (0, 32)]),
        ("far from 0", [2_000_000_000, 2_000_000_032, 2_000_000_033, 2_000_000_033], [(0, 32), (0, 1), (0, 0)]),
        ("negative throughout", [MIN, MIN + 3, -100, -70], [(0, 3), (0, 32), (0, 30)]),
        ("backwards", [96, 64, 32, 0], [(0, 0), (0, 0), (0, 0)]),
        ("one more than the table holds", [0, 33, 66, 99], [(0, 32), (0, 32), (0, 32)]),
        ("from 0 to i32::MAX", [0, MAX, 0, MAX], [(0, 32), (0, 0), (0, 32)]),
    ];
    for layout in KvLayout::PAGED {
        assert_starts_clamped(op, layout, &starts, |c| &mut c.cu_seqlens_k, |m| (m.first_key, m.len_k));
    }
}

pub(crate) fn a_start_counts_as_the_largest_up_to_it(op: Operator) {
    let starts = [
        ("a step back", [0, 5, 3, 9], [(0, 5), (5, 0), (5, 4)]),
        ("back to 0", [0, 9, 0, 9], [(0, 9), (9, 0), (9, 0)]),
        ("up and down", [4, 2, 7, 1], [(4, 0), (4, 3), (7, 0)]),
        ("from one end of i32 to the other", [0, MAX, MIN, 9], [(0, 9), (9, 0), (9, 0)]),
        ("the end first", [9, 0, 4, 9], [(9, 0), (9, 0), (9, 0)]),
    ];
    for layout in [*op.layouts().first().unwrap(), *op.layouts().last().unwrap()] {
        assert_starts_clamped(op, layout, &starts, |c| &mut c.cu_seqlens_q, |m| (m.first_row, m.len_q));
    }
}

pub(crate) fn sequences_may_share_keys(op: Operator) {
    // Two requests with a common prefix in shared pages, as a prefix cache has them.
    let spec = BatchSpec { lengths: vec![(1, 40), (1, 40)], ..BatchSpec::default() };
    for layout in op.layouts().into_iter().filter(|layout| *layout != KvLayout::Contiguous) {
        let mut case = AttentionCase::store(op.target(), &spec.batch(), &MemoryLayout::paged(layout, 16));
        let max_pages = case.max_pages;
        let (first, second) = case.block_table.split_at_mut(max_pages);
        second[..2].copy_from_slice(&first[..2]);
        op.call_of(case).compare_with_reference(InvalidMetadata::Unspecified);
    }
}

pub(crate) fn sequences_beyond_num_seqs_are_not_computed(op: Operator) {
    let spec = BatchSpec { lengths: vec![(2, 20), (3, 30), (4, 4)], ..BatchSpec::default() };
    for num_seqs in 0..=3 {
        let mut case = AttentionCase::paged(&spec.batch(), &MemoryLayout::default());
        case.num_seqs = num_seqs;
        op.call_of(case).compare_with_reference(InvalidMetadata::Unspecified);
    }
}

/// Dtypes, D, number of sequences, (queries, keys) of each sequence, and the layout.
type Many = (Dtypes, usize, usize, fn(usize) -> (usize, usize), KvLayout);

/// More sequences than a warp or a CTA of any kernel processes at once.
pub(crate) fn all_kernels_clamp_the_starts_of_many_sequences_alike(op: Operator) {
    let short = |b: usize| (1, 1 + b % 3);
    let mixed = |b: usize| (if b % 10 == 3 { 20 } else { 1 + b % 4 }, 1 + b % 9);
    let forward: [Many; 6] = [
        // Decode only.
        (F32.into(), 16, 700, short, KvLayout::Contiguous),
        (F16.into(), 24, 700, short, KvLayout::PerPage),
        // The portable prefill kernel.
        (F16.into(), 40, 600, mixed, KvLayout::Contiguous),
        // The Hopper prefill kernels in 16 bits and in fp8, and fused prefill and decode.
        (BF16.into(), 64, 100, mixed, KvLayout::Contiguous),
        (Dtypes::narrow(BF16), 128, 100, mixed, KvLayout::Contiguous),
        (BF16.into(), 128, 450, mixed, KvLayout::Interleaved),
    ];
    let few = |b: usize| (1 + b % 3, 1 + b % 4);
    let backward = ATTENTION_DTYPES.map(|dtype| -> Many { (dtype.into(), 24, 600, few, KvLayout::Contiguous) });
    let gradients = op == Operator::FlashAttnVarlenBwd;
    let cases = if gradients { backward.to_vec() } else { forward.to_vec() };
    let mut seed = 0;
    for ((dtypes, head_dim, count, lengths, layout), limit_rows) in
        cases.into_iter().flat_map(|case| [(case, false), (case, true)])
    {
        seed += 1;
        let lengths = (0..count).map(lengths).collect();
        let heads = if gradients { (4, 2) } else { (16, 1) };
        let spec = BatchSpec { dtypes, heads, head_dim, lengths, sinks: gradients, seed, ..BatchSpec::default() };
        let spec = BatchSpec { batch_invariant: !gradients && seed % 3 == 0, ..spec };
        let workspace = if seed % 4 == 0 { None } else { Some(9_000_001) };
        let memory_layout =
            if layout == KvLayout::Contiguous { MemoryLayout::contiguous() } else { MemoryLayout::paged(layout, 16) };
        let mut case = AttentionCase::flash(&spec.batch(), &MemoryLayout { workspace, ..memory_layout.bare() });
        case.disorder(limit_rows, seed);
        assert!(clamped_sequences(&case).iter().filter(|m| m.len_q > 0).count() > count / 15);
        assert_clamped(op, case, "many sequences");
    }
}

fn cost_of(op: Operator) -> cost::BuildCall {
    match op {
        Operator::FlashAttnVarlen => cost::flash_attn_varlen,
        Operator::FlashAttnVarlenBwd => cost::flash_attn_varlen_bwd,
        Operator::PagedAttention => cost::paged_attention,
        Operator::PagedAttentionUpdate => cost::paged_attention_update,
    }
}

pub(crate) fn hostile_starts_cost_no_more_than_valid_ones(op: Operator) {
    hostile_starts_cost_no_more(&format!("{op:?}"), cost_of(op), CostSizes::small(), 10.0);
}

/// At sizes at which the time is well above the noise. `--ignored --nocapture` prints a table.
pub(crate) fn hostile_starts_cost_at_most_twice_as_much(op: Operator) {
    let fp8 = [Operator::FlashAttnVarlen, Operator::PagedAttention].contains(&op);
    for sizes in CostSizes::large().into_iter().chain(CostSizes::large_fp8().into_iter().filter(|_| fp8)) {
        hostile_starts_cost_no_more(&format!("{op:?}"), cost_of(op), sizes, 2.0);
    }
    if op == Operator::FlashAttnVarlen {
        let with_seqused_q = cost::flash_attn_varlen_with_seqused_q;
        hostile_starts_cost_no_more("flash_attn_varlen with seqused_q", with_seqused_q, CostSizes::many_slots(), 2.0);
    }
}

/// One query head per row of a KV head and no keys, so that planning takes most of the time.
pub(crate) fn planning_hostile_starts_costs_no_more_than_planning_valid_ones(_: Operator) {
    hostile_starts_cost_no_more("planning", cost::flash_attn_varlen_without_keys, CostSizes::planned(), 10.0);
}

/// Hopper's fused prefill and decode kernel reads pages by TMA boxes.
pub(crate) fn random_metadata_is_harmless_in_fused_prefill_and_decode(op: Operator) {
    let lengths = vec![(150, 300), (1, 700), (2, 90), (1, 1300), (1, 17), (90, 150)];
    for seed in 0..12 {
        let lengths = lengths.clone();
        let spec =
            BatchSpec { dtypes: BF16.into(), heads: (8, 2), head_dim: 128, lengths, seed, ..BatchSpec::default() };
        let memory_layout = MemoryLayout { workspace: Some(9_000_001), seed, ..MemoryLayout::default() };
        let mut case = AttentionCase::store(op.target(), &spec.batch(), &memory_layout);
        corrupt(&mut case, seed);
        op.call_of(case).compare_with_reference(InvalidMetadata::Unspecified);
    }
}
