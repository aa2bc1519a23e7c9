//! The operator trusts no length, start, page or count that it reads (SPEC 2.1).

use crate::support::answers::{IfWrong, members};
use crate::support::array::{BF16, F32};
use crate::support::batch::{Dtypes, Shape};
use crate::support::case::Case;
use crate::support::check::check_against;
use crate::support::cost::{self, Sizes, hostile_starts_cost_no_more};
use crate::support::random::Random;
use crate::support::storage::Storage;
use crate::support::strategies::{for_all, paged_shapes, paged_storages};
use proptest::prelude::*;

/// Replace a share of the metadata by numbers that a broken program would leave there.
fn corrupt(case: &mut Case, seed: u64) {
    let mut random = Random::new(seed);
    let Case { seqused_k, block_table, cu_seqlens_q, num_seqs, .. } = case;
    let share = random.one_of(&[2, 8, 30]);
    for list in [seqused_k.as_mut().unwrap(), block_table, cu_seqlens_q] {
        for value in list {
            if random.below(share) == 0 {
                *value = random.hostile_i32();
            }
        }
    }
    if random.below(4) == 0 {
        *num_seqs = random.hostile_i32();
    }
    case.name = format!(
        "context_lens {:?}, block_tables {:?} by {}, query_start_loc {:?}, num_seqs {}: {}",
        case.seqused_k, case.block_table, case.max_pages, case.cu_seqlens_q, case.num_seqs, case.name
    );
}

#[test]
fn random_metadata_does_no_harm_to_the_sequences_whose_own_is_right() {
    for_all(192, (paged_shapes(), paged_storages(), any::<u64>()), |(shape, storage, seed)| {
        let mut case = Case::paged(&shape.batch(), &storage);
        corrupt(&mut case, seed);
        check_against(&case, IfWrong::Unspecified);
    });
    // The test means something only if some sequences stay right and some do not.
    let mut checked = [0usize; 2];
    for seed in 0..64 {
        let shape = Shape { lengths: vec![(1, 20), (5, 40), (3, 3)], seed, ..Shape::default() };
        let mut case = Case::paged(&shape.batch(), &Storage::default());
        corrupt(&mut case, seed);
        for member in members(&case).iter().filter(|m| m.len_q > 0) {
            checked[usize::from(member.specified)] += 1;
        }
    }
    assert!(checked[0] > 20 && checked[1] > 20, "{checked:?} sequences wrong, right");
}

/// Beneath Hopper's prefill, which decodes with boxes.
#[test]
fn random_metadata_does_no_harm_beneath_prefill() {
    let lengths = vec![(150, 300), (1, 700), (2, 90), (1, 1300), (1, 17), (90, 150)];
    for seed in 0..12 {
        let heads = (8, 2);
        let shape =
            Shape { dtypes: BF16.into(), heads, head_dim: 128, lengths: lengths.clone(), seed, ..Shape::default() };
        let storage = Storage { workspace: Some(9_000_001), seed, ..Storage::default() };
        let mut case = Case::paged(&shape.batch(), &storage);
        corrupt(&mut case, seed);
        check_against(&case, IfWrong::Unspecified);
    }
}

/// Three sequences whose lengths fill their pages and rows exactly, so that a value past the end means the end.
fn brimful(dtypes: Dtypes) -> Case {
    let shape = Shape { dtypes, lengths: vec![(2, 32), (3, 32), (4, 32)], ..Shape::default() };
    Case::paged(&shape.batch(), &Storage::default().bare())
}

/// A change to the metadata of `brimful`, and how it is called.
type Change = (&'static str, fn(&mut Case));

#[test]
fn a_value_out_of_range_acts_as_the_nearest_one_in_range() {
    let changes: [Change; 14] = [
        ("more sequences than slots", |c| c.num_seqs = 4),
        ("i32::MAX sequences", |c| c.num_seqs = i32::MAX),
        ("-1 sequences", |c| c.num_seqs = -1),
        ("i32::MIN sequences", |c| c.num_seqs = i32::MIN),
        ("one key more than the table holds", |c| context_lens(c)[1] = 33),
        ("i32::MAX keys", |c| context_lens(c)[2] = i32::MAX),
        ("-1 keys", |c| context_lens(c)[0] = -1),
        ("i32::MIN keys", |c| context_lens(c)[1] = i32::MIN),
        ("an end past the last row", |c| c.cu_seqlens_q[3] = 10),
        ("an end of i32::MAX", |c| c.cu_seqlens_q[3] = i32::MAX),
        ("a start before the first row", |c| c.cu_seqlens_q[0] = -1),
        ("a start of i32::MIN", |c| c.cu_seqlens_q[0] = i32::MIN),
        ("page ids past the pool", |c| replace_page(c, c.place.num_pages as i32 - 1, i32::MAX)),
        ("negative page ids", |c| replace_page(c, 0, i32::MIN)),
    ];
    for dtypes in Dtypes::ALL {
        for (what, change) in changes {
            let mut case = brimful(dtypes);
            change(&mut case);
            case.name = format!("{what}: {}", case.name);
            check_against(&case, IfWrong::Clamped);
        }
    }
}

fn context_lens(case: &mut Case) -> &mut [i32] {
    case.seqused_k.as_mut().unwrap()
}

fn replace_page(case: &mut Case, from: i32, to: i32) {
    // Every page of the pool is in a table.
    *case.block_table.iter_mut().find(|id| **id == from).unwrap() = to;
}

/// `query_start_loc`, and the first row and the number of queries of each sequence.
type Starts = ([i32; 4], [(usize, usize); 3]);

#[test]
fn a_start_counts_as_the_largest_up_to_it() {
    let changes: [Starts; 5] = [
        ([0, 5, 3, 9], [(0, 5), (5, 0), (5, 4)]),
        ([0, 9, 0, 9], [(0, 9), (9, 0), (9, 0)]),
        ([4, 2, 7, 1], [(4, 0), (4, 3), (7, 0)]),
        ([0, i32::MAX, i32::MIN, 9], [(0, 9), (9, 0), (9, 0)]),
        ([9, 0, 4, 9], [(9, 0), (9, 0), (9, 0)]),
    ];
    for dtypes in Dtypes::ALL {
        for (starts, expected) in changes {
            let mut case = brimful(dtypes);
            case.cu_seqlens_q.copy_from_slice(&starts);
            let found: Vec<_> = members(&case).iter().map(|m| (m.first_row, m.len_q)).collect();
            assert_eq!(found, expected, "{starts:?}");
            case.name = format!("{starts:?}: {}", case.name);
            check_against(&case, IfWrong::Clamped);
        }
    }
}

#[test]
fn starts_past_the_sequences_in_use_are_not_read() {
    let mut case = brimful(F32.into());
    case.num_seqs = 2;
    case.cu_seqlens_q.copy_from_slice(&[0, 2, 5, i32::MAX]);
    assert_eq!(members(&case).iter().map(|m| (m.first_row, m.len_q)).collect::<Vec<_>>(), [(0, 2), (2, 3)]);
    check_against(&case, IfWrong::Clamped);
}

#[test]
fn sequences_may_share_pages() {
    // Two requests with a common prefix, as a prefix cache lays them out.
    let shape = Shape { lengths: vec![(1, 40), (1, 40)], ..Shape::default() };
    let mut case = Case::paged(&shape.batch(), &Storage { page_size: 16, ..Storage::default() });
    let max_pages = case.max_pages;
    let (first, second) = case.block_table.split_at_mut(max_pages);
    second[..2].copy_from_slice(&first[..2]);
    check_against(&case, IfWrong::Unspecified);
}

#[test]
fn only_as_many_sequences_as_num_seqs_says_are_there() {
    let shape = Shape { lengths: vec![(2, 20), (3, 30), (4, 4)], ..Shape::default() };
    for num_seqs in 0..=3 {
        let mut case = Case::paged(&shape.batch(), &Storage::default());
        case.num_seqs = num_seqs;
        check_against(&case, IfWrong::Unspecified);
    }
}

#[test]
fn hostile_starts_cost_no_more_than_right_ones() {
    hostile_starts_cost_no_more("paged_attention", cost::paged_attention, Sizes::small(), 10.0);
}

/// At sizes at which time can be told from noise: `--ignored --nocapture` prints a table.
#[test]
#[ignore = "a measurement: wants a machine for itself"]
fn hostile_starts_cost_at_most_twice_as_much() {
    for sizes in [Sizes::large(), Sizes::large_fp8()].concat() {
        hostile_starts_cost_no_more("paged_attention", cost::paged_attention, sizes, 2.0);
    }
}
