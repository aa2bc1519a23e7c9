//! The operator trusts no length, start or padding that it reads (SPEC 2.1).

use super::calls::gradient_calls;
use crate::support::answers::{IfWrong, members};
use crate::support::array::ATTENTION_DTYPES;
use crate::support::batch::{Alibi, Dtypes, Shape};
use crate::support::case::Case;
use crate::support::cost::{self, Sizes, hostile_starts_cost_no_more};
use crate::support::gradient_case::{GradientCase, Wanted, check_gradients_against, gradient_answers};
use crate::support::oracle::Mask;
use crate::support::random::Random;
use crate::support::storage::Storage;
use crate::support::strategies::for_all;
use proptest::prelude::*;

/// Replace a share of the metadata by numbers that a broken program would leave there.
fn corrupt(case: &mut Case, seed: u64) {
    let mut random = Random::new(seed);
    let share = random.one_of(&[2, 8, 30]);
    let Case { cu_seqlens_q, cu_seqlens_k, seqused_q, seqused_k, leftpad_k, .. } = case;
    let optional = [seqused_q, seqused_k, leftpad_k].into_iter().flatten();
    for list in [cu_seqlens_q, cu_seqlens_k].into_iter().chain(optional) {
        for value in list {
            if random.below(share) == 0 {
                *value = random.hostile_i32();
            }
        }
    }
    case.name = format!(
        "cu_seqlens_q {:?}, cu_seqlens_k {:?}, seqused_q {:?}, seqused_k {:?}, leftpad_k {:?}: {}",
        case.cu_seqlens_q, case.cu_seqlens_k, case.seqused_q, case.seqused_k, case.leftpad_k, case.name
    );
}

#[test]
fn random_metadata_does_no_harm_to_the_sequences_whose_own_is_right() {
    for_all(192, (gradient_calls(), any::<u64>()), |((shape, storage, wanted), seed)| {
        let mut case = Case::flash(&shape.batch(), &storage);
        corrupt(&mut case, seed);
        check_gradients_against(&GradientCase::of(case, wanted), IfWrong::Unspecified);
    });
    // The test means something only if gradients are looked at while some sequences are wrong.
    let mut checked = [0usize; 3];
    for seed in 0..64 {
        let shape = Shape { lengths: vec![(1, 20), (5, 40), (3, 3)], leftpad: true, seed, ..Shape::default() };
        let storage = Storage { seqused_q: true, seqused_k: true, ..Storage::contiguous() };
        let mut case = Case::flash(&shape.batch(), &storage);
        corrupt(&mut case, seed);
        let wrong = members(&case).iter().any(|m| m.len_q > 0 && !m.specified);
        let answers = gradient_answers(&GradientCase::of(case, Wanted::ALL), IfWrong::Unspecified);
        for (checked, answers) in checked.iter_mut().zip(&answers).filter(|_| wrong) {
            *checked += answers.numbers();
        }
    }
    assert!(checked.iter().all(|&rows| rows > 20), "{checked:?} rows of dq, dk, dv");
}

/// Three sequences whose lengths fill their rows exactly, so that a value past the end means the end.
fn brimful(dtypes: Dtypes) -> Case {
    let shape = Shape {
        dtypes,
        lengths: vec![(2, 32), (3, 32), (4, 32)],
        alibi: Alibi::PerHead,
        sinks: true,
        ..Shape::default()
    };
    let mut case = Case::flash(&shape.batch(), &Storage::contiguous().bare());
    case.cu_seqlens_k = vec![0, 32, 64, 96];
    case
}

fn check_clamped(mut case: Case, what: &str) {
    case.name = format!("{what}: {}", case.name);
    check_gradients_against(&GradientCase::of(case, Wanted::ALL), IfWrong::Clamped);
}

/// A change to the metadata of `brimful`, and how it is called.
type Change = (&'static str, fn(&mut Case));

#[test]
fn a_value_out_of_range_acts_as_the_nearest_one_in_range() {
    let changes: [Change; 16] = [
        ("an end past the last row", |c| c.cu_seqlens_q[3] = 10),
        ("an end of i32::MAX", |c| c.cu_seqlens_q[3] = i32::MAX),
        ("a start before the first row", |c| c.cu_seqlens_q[0] = -1),
        ("a start of i32::MIN", |c| c.cu_seqlens_q[0] = i32::MIN),
        ("an end past the last key", |c| c.cu_seqlens_k[3] = i32::MAX),
        ("a start before the first key", |c| c.cu_seqlens_k[0] = i32::MIN),
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
    for dtype in ATTENTION_DTYPES {
        for (what, change) in changes {
            let mut case = brimful(dtype.into());
            change(&mut case);
            check_clamped(case, what);
        }
    }
}

/// What it is called, `cu_seqlens_k`, and the first key and the number of keys of each sequence.
type Starts = (&'static str, [i32; 4], [(usize, usize); 3]);

#[test]
fn starts_of_keys_are_clamped_to_the_rows() {
    let changes: [Starts; 6] = [
        ("an end past the last row", [0, 32, 64, 97], [(0, 32), (32, 32), (64, 32)]),
        ("a start before the first row", [-5, 32, 64, 96], [(0, 32), (32, 32), (64, 32)]),
        ("starts that run backwards", [0, 64, 32, 96], [(0, 64), (64, 0), (64, 32)]),
        ("from one end of i32 to the other", [i32::MIN, i32::MAX, i32::MIN, i32::MAX], [(0, 96), (96, 0), (96, 0)]),
        ("everything after the last row", [96, 97, i32::MAX, i32::MAX], [(96, 0), (96, 0), (96, 0)]),
        ("everything before the first row", [i32::MIN, -3, -2, -1], [(0, 0), (0, 0), (0, 0)]),
    ];
    for dtype in ATTENTION_DTYPES {
        for (what, starts, expected) in changes {
            let mut case = brimful(dtype.into());
            case.cu_seqlens_k = starts.to_vec();
            let found: Vec<_> = members(&case).iter().map(|m| (m.first_key, m.len_k)).collect();
            assert_eq!(found, expected, "{what}");
            check_clamped(case, what);
        }
    }
}

#[test]
fn a_start_counts_as_the_largest_up_to_it() {
    // `cu_seqlens_q`, `cu_seqlens_k`, and how many keys have a gradient: those of sequences with queries.
    let shape = Shape { lengths: vec![(4, 30), (4, 20), (2, 50)], mask: Mask::FULL, ..Shape::default() };
    for (queries, keys, seen) in [
        ([0, 8, 4, 10], [0, 100, 30, 100], 100),
        ([0, 10, 0, 10], [0, 40, 0, 100], 40),
        ([0, 0, 4, 6], [0, 30, 10, 60], 30),
        ([0, 4, 8, 8], [0, 30, 10, 60], 30),
        ([0, 4, 8, 8], [10, 5, 30, 20], 20),
        ([6, 2, 8, 7], [0, i32::MAX, i32::MIN, 10], 0),
    ] {
        let mut case = Case::flash(&shape.batch(), &Storage::contiguous().bare());
        case.cu_seqlens_q = queries.to_vec();
        case.cu_seqlens_k = keys.to_vec();
        let answers = gradient_answers(&GradientCase::of(case.clone(), Wanted::ALL), IfWrong::Clamped);
        assert_eq!(answers[1].numbers(), seen, "{queries:?}, {keys:?}");
        check_clamped(case, &format!("{queries:?}, {keys:?}"));
    }
}

/// More sequences than a CTA takes up at a time.
#[test]
fn all_kernels_read_the_starts_of_many_sequences_alike() {
    for (seed, (dtype, cuts_rows)) in
        ATTENTION_DTYPES.into_iter().flat_map(|dtype| [(dtype, false), (dtype, true)]).enumerate()
    {
        let lengths = (0..600).map(|b| (1 + b % 3, 1 + b % 4)).collect();
        let shape = Shape { dtypes: dtype.into(), head_dim: 24, lengths, sinks: true, ..Shape::default() };
        let mut case = Case::flash(&shape.batch(), &Storage::contiguous().bare());
        case.disorder(cuts_rows, seed as u64);
        assert!(members(&case).iter().filter(|m| m.len_q > 0 && m.len_k > 0).count() > 40);
        check_clamped(case, "many sequences");
    }
}

#[test]
fn hostile_starts_cost_no_more_than_right_ones() {
    hostile_starts_cost_no_more("flash_attn_varlen_bwd", cost::flash_attn_varlen_bwd, Sizes::small(), 10.0);
}

/// At sizes at which time can be told from noise: `--ignored --nocapture` prints a table.
#[test]
#[ignore = "a measurement: wants a machine for itself"]
fn hostile_starts_cost_at_most_twice_as_much() {
    for sizes in Sizes::large() {
        hostile_starts_cost_no_more("flash_attn_varlen_bwd", cost::flash_attn_varlen_bwd, sizes, 2.0);
    }
}
