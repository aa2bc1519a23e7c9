//! The operator trusts no length, start, padding or page that it reads (SPEC 2.1).

use crate::support::answers::{IfWrong, members};
use crate::support::array::{BF16, F16, F32};
use crate::support::batch::{Alibi, Dtypes, Shape};
use crate::support::case::Case;
use crate::support::check::check_against;
use crate::support::cost::{self, Sizes, hostile_starts_cost_no_more};
use crate::support::oracle::Mask;
use crate::support::random::Random;
use crate::support::storage::{Layout, Storage};
use crate::support::strategies::{flash_calls, for_all};
use proptest::prelude::*;

/// Replace a share of the metadata by numbers that a broken program would leave there.
fn corrupt(case: &mut Case, seed: u64) {
    let mut random = Random::new(seed);
    let share = random.one_of(&[2, 8, 30]);
    let Case { cu_seqlens_q, cu_seqlens_k, seqused_q, seqused_k, leftpad_k, block_table, .. } = case;
    let optional = [seqused_q, seqused_k, leftpad_k].into_iter().flatten();
    for list in [cu_seqlens_q, cu_seqlens_k, block_table].into_iter().chain(optional) {
        for value in list {
            if random.below(share) == 0 {
                *value = random.hostile_i32();
            }
        }
    }
    case.name = format!(
        "cu_seqlens_q {:?}, cu_seqlens_k {:?}, seqused_q {:?}, seqused_k {:?}, leftpad_k {:?}, \
         block_table {:?} by {}: {}",
        case.cu_seqlens_q,
        case.cu_seqlens_k,
        case.seqused_q,
        case.seqused_k,
        case.leftpad_k,
        case.block_table,
        case.max_pages,
        case.name
    );
}

#[test]
fn random_metadata_does_no_harm_to_the_sequences_whose_own_is_right() {
    for_all(256, (flash_calls(), any::<u64>()), |((shape, storage), seed)| {
        let mut case = Case::flash(&shape.batch(), &storage);
        corrupt(&mut case, seed);
        check_against(&case, IfWrong::Unspecified);
    });
    // The test means something only if some sequences stay right and some do not.
    for layout in [Layout::Contiguous, Layout::Split] {
        let mut checked = [0usize; 2];
        for seed in 0..64 {
            let shape = Shape { lengths: vec![(1, 20), (5, 40), (3, 3)], leftpad: true, seed, ..Shape::default() };
            let mut case = Case::flash(&shape.batch(), &Storage { seqused_q: true, ..Storage::paged(layout, 16) });
            corrupt(&mut case, seed);
            for member in members(&case).iter().filter(|m| m.len_q > 0) {
                checked[usize::from(member.specified)] += 1;
            }
        }
        assert!(checked[0] > 20 && checked[1] > 20, "{checked:?} sequences wrong, right");
    }
}

/// Three sequences whose lengths fill their pages and rows exactly, so that a value past the end means the end.
fn brimful(dtypes: Dtypes, layout: Layout) -> Case {
    let shape = Shape { dtypes, lengths: vec![(2, 32), (3, 32), (4, 32)], alibi: Alibi::PerHead, ..Shape::default() };
    let storage = Storage { seqused_k: false, ..Storage::paged(layout, 16).bare() };
    let mut case = Case::flash(&shape.batch(), &storage);
    case.cu_seqlens_k = vec![0, 32, 64, 96];
    case
}

fn check_clamped(case: &mut Case, what: &str) {
    case.name = format!("{what}: {}", case.name);
    check_against(case, IfWrong::Clamped);
}

/// A change to the metadata of `brimful`, and how it is called.
type Change = (&'static str, fn(&mut Case));

#[test]
fn a_value_out_of_range_acts_as_the_nearest_one_in_range() {
    let changes: [Change; 14] = [
        ("an end past the last row", |c| c.cu_seqlens_q[3] = 10),
        ("an end of i32::MAX", |c| c.cu_seqlens_q[3] = i32::MAX),
        ("a start before the first row", |c| c.cu_seqlens_q[0] = -1),
        ("a start of i32::MIN", |c| c.cu_seqlens_q[0] = i32::MIN),
        ("more keys than there are", |c| c.seqused_k = Some(vec![32, 33, i32::MAX])),
        ("fewer keys than none", |c| c.seqused_k = Some(vec![-1, 32, i32::MIN])),
        ("fewer keys than stored", |c| c.seqused_k = Some(vec![0, 1, 31])),
        ("more queries than there are", |c| c.seqused_q = Some(vec![3, i32::MAX, 4])),
        ("fewer queries than none", |c| c.seqused_q = Some(vec![-1, 3, i32::MIN])),
        ("fewer queries than rows", |c| c.seqused_q = Some(vec![1, 0, 3])),
        ("more padding than keys", |c| c.leftpad_k = Some(vec![32, 33, i32::MAX])),
        ("less padding than none", |c| c.leftpad_k = Some(vec![-1, 5, i32::MIN])),
        ("padding up to the last key", |c| c.leftpad_k = Some(vec![31, 30, 28])),
        ("padding beyond the keys in use", |c| {
            c.seqused_k = Some(vec![4, 20, 0]);
            c.leftpad_k = Some(vec![5, 19, 1]);
        }),
    ];
    for (dtypes, layout) in Dtypes::ALL.into_iter().flat_map(|d| [(d, Layout::Contiguous), (d, Layout::PerPage)]) {
        for (what, change) in changes {
            let mut case = brimful(dtypes, layout);
            change(&mut case);
            check_clamped(&mut case, what);
        }
    }
}

/// What it is called, `cu_seqlens_k`, and the first key and the number of keys of each sequence.
type Starts = (&'static str, [i32; 4], [(usize, usize); 3]);

#[test]
fn starts_of_contiguous_keys_are_clamped_to_the_rows() {
    let changes: [Starts; 8] = [
        ("an end past the last row", [0, 32, 64, 97], [(0, 32), (32, 32), (64, 32)]),
        ("an end of i32::MAX", [0, 32, 64, i32::MAX], [(0, 32), (32, 32), (64, 32)]),
        ("a start before the first row", [-5, 32, 64, 96], [(0, 32), (32, 32), (64, 32)]),
        ("a start of i32::MIN", [i32::MIN, 32, 64, 96], [(0, 32), (32, 32), (64, 32)]),
        ("starts that run backwards", [0, 64, 32, 96], [(0, 64), (64, 0), (64, 32)]),
        ("from one end of i32 to the other", [i32::MIN, i32::MAX, i32::MIN, i32::MAX], [(0, 96), (96, 0), (96, 0)]),
        ("everything after the last row", [96, 97, i32::MAX, i32::MAX], [(96, 0), (96, 0), (96, 0)]),
        ("everything before the first row", [i32::MIN, -3, -2, -1], [(0, 0), (0, 0), (0, 0)]),
    ];
    for dtypes in Dtypes::ALL {
        for (what, starts, expected) in changes {
            let mut case = brimful(dtypes, Layout::Contiguous);
            case.cu_seqlens_k = starts.to_vec();
            let found: Vec<_> = members(&case).iter().map(|m| (m.first_key, m.len_k)).collect();
            assert_eq!(found, expected, "{what}");
            check_clamped(&mut case, what);
        }
    }
}

#[test]
fn differences_of_starts_over_pages_do_not_overflow() {
    let changes: [(&str, [i32; 4], [usize; 3]); 6] = [
        ("from one end of i32 to the other", [i32::MIN, i32::MAX, i32::MIN, i32::MAX], [32, 0, 32]),
        ("far from 0", [2_000_000_000, 2_000_000_032, 2_000_000_033, 2_000_000_033], [32, 1, 0]),
        ("negative throughout", [i32::MIN, i32::MIN + 3, -100, -70], [3, 32, 30]),
        ("backwards", [96, 64, 32, 0], [0, 0, 0]),
        ("one more than the table holds", [0, 33, 66, 99], [32, 32, 32]),
        ("from 0 to i32::MAX", [0, i32::MAX, 0, i32::MAX], [32, 0, 32]),
    ];
    for (dtypes, layout) in Dtypes::ALL.into_iter().zip(Layout::PAGED.into_iter().cycle()) {
        for (what, starts, expected) in changes {
            let mut case = brimful(dtypes, layout);
            case.cu_seqlens_k = starts.to_vec();
            assert_eq!(members(&case).iter().map(|m| m.len_k).collect::<Vec<_>>(), expected, "{what}");
            check_clamped(&mut case, what);
        }
    }
}

#[test]
fn page_ids_are_clamped_to_the_pool() {
    for (dtypes, layout) in Dtypes::ALL.into_iter().zip(Layout::PAGED.into_iter().cycle()) {
        for (from, to) in [(0, -1), (0, i32::MIN), (5, 6), (5, i32::MAX)] {
            let mut case = brimful(dtypes, layout);
            assert_eq!(case.place.num_pages, 6);
            // Every page of the pool is in a table.
            *case.block_table.iter_mut().find(|id| **id == from).unwrap() = to;
            check_clamped(&mut case, &format!("page {to}"));
        }
    }
}

#[test]
fn sequences_may_share_keys() {
    // Two requests with a common prefix, as a prefix cache lays them out.
    let shape = Shape { lengths: vec![(1, 40), (1, 40)], ..Shape::default() };
    for layout in Layout::PAGED {
        let mut case = Case::flash(&shape.batch(), &Storage::paged(layout, 16));
        let max_pages = case.max_pages;
        let (first, second) = case.block_table.split_at_mut(max_pages);
        second[..2].copy_from_slice(&first[..2]);
        check_against(&case, IfWrong::Unspecified);
    }
}

/// What `cu_seqlens_q` is, and the first row and the number of queries of each sequence.
type QueryStarts = ([i32; 4], [(usize, usize); 3]);

#[test]
fn a_start_counts_as_the_largest_up_to_it() {
    let changes: [QueryStarts; 5] = [
        ([0, 8, 4, 10], [(0, 8), (8, 0), (8, 2)]),
        ([0, 10, 0, 10], [(0, 10), (10, 0), (10, 0)]),
        ([6, 2, 8, 7], [(6, 0), (6, 2), (8, 0)]),
        ([0, i32::MAX, i32::MIN, 10], [(0, 10), (10, 0), (10, 0)]),
        ([10, 0, 4, 10], [(10, 0), (10, 0), (10, 0)]),
    ];
    let shape = Shape { lengths: vec![(4, 30), (4, 20), (2, 50)], mask: Mask::FULL, ..Shape::default() };
    for (layout, (starts, expected)) in
        [Layout::Contiguous, Layout::PerPage].into_iter().flat_map(|l| changes.map(|c| (l, c)))
    {
        let mut case = Case::flash(&shape.batch(), &Storage { seqused_k: false, ..Storage::paged(layout, 16).bare() });
        case.cu_seqlens_q = starts.to_vec();
        if layout == Layout::Contiguous {
            case.cu_seqlens_k = vec![0, 60, 30, 100];
        }
        assert_eq!(members(&case).iter().map(|m| (m.first_row, m.len_q)).collect::<Vec<_>>(), expected[..]);
        check_clamped(&mut case, &format!("{starts:?}"));
    }
}

/// Types, D, how many sequences there are, the queries and keys of each, and where the keys lie.
type Many = (Dtypes, usize, usize, fn(usize) -> (usize, usize), Layout);

/// More sequences than a warp or a CTA of any kernel takes up at a time.
#[test]
fn all_kernels_read_the_starts_of_many_sequences_alike() {
    let short = |b: usize| (1, 1 + b % 3);
    let mixed = |b: usize| (if b % 10 == 3 { 20 } else { 1 + b % 4 }, 1 + b % 9);
    let cases: [Many; 6] = [
        // Decode alone.
        (F32.into(), 16, 700, short, Layout::Contiguous),
        (F16.into(), 24, 700, short, Layout::PerPage),
        // Portable prefill.
        (F16.into(), 40, 600, mixed, Layout::Contiguous),
        // Hopper's, of 16 bits and of fp8, and with decode beneath it.
        (BF16.into(), 64, 100, mixed, Layout::Contiguous),
        (Dtypes::narrow(BF16), 128, 100, mixed, Layout::Contiguous),
        (BF16.into(), 128, 450, mixed, Layout::Interleaved),
    ];
    let mut seed = 0;
    for ((dtypes, head_dim, count, lengths, layout), cuts_rows) in
        cases.into_iter().flat_map(|case| [(case, false), (case, true)])
    {
        seed += 1;
        let lengths = (0..count).map(lengths).collect();
        let batch_invariant = seed % 3 == 0;
        let shape = Shape { dtypes, heads: (16, 1), head_dim, lengths, batch_invariant, seed, ..Shape::default() };
        let workspace = if seed % 4 == 0 { None } else { Some(9_000_001) };
        let storage = if layout == Layout::Contiguous { Storage::contiguous() } else { Storage::paged(layout, 16) };
        let mut case = Case::flash(&shape.batch(), &Storage { workspace, ..storage.bare() });
        case.disorder(cuts_rows, seed);
        assert!(members(&case).iter().filter(|m| m.len_q > 0).count() > count / 8);
        check_against(&case, IfWrong::Clamped);
    }
}

#[test]
fn hostile_starts_cost_no_more_than_right_ones() {
    hostile_starts_cost_no_more("flash_attn_varlen", cost::flash_attn_varlen, Sizes::small(), 10.0);
}

/// A query head of its own for each row that one KV head has, and no key: what is left is planning.
#[test]
fn planning_hostile_starts_costs_no_more_than_planning_right_ones() {
    hostile_starts_cost_no_more("planning", cost::flash_attn_varlen_without_keys, Sizes::planned(), 10.0);
}

/// At sizes at which time can be told from noise: `--ignored --nocapture` prints a table.
#[test]
#[ignore = "a measurement: wants a machine for itself"]
fn hostile_starts_cost_at_most_twice_as_much() {
    for sizes in [Sizes::large(), Sizes::large_fp8()].concat() {
        hostile_starts_cost_no_more("flash_attn_varlen", cost::flash_attn_varlen, sizes, 2.0);
    }
    let with_seqused_q = cost::flash_attn_varlen_with_seqused_q;
    hostile_starts_cost_no_more("flash_attn_varlen with seqused_q", with_seqused_q, Sizes::many_slots(), 2.0);
}
