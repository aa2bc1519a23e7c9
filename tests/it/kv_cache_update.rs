//! `xla_gpu_kv_cache_update` and `xla_gpu_kv_cache_update_split` on the CPU, through their XLA FFI handlers.

use crate::support::array::{ATTENTION_DTYPES, Array, BF16, F8E4M3FN, F8E5M2, F32};
use crate::support::cache_updates::{SPLIT, Update};
use crate::support::cost::{Sizes, hostile_slots_cost_no_more};
use crate::support::guard::{Side, for_both_sides};
use crate::support::pools::{HostPool, Inline, Late, NoPool, Threads};
use crate::support::random::Random;
use crate::support::strategies::for_all;
use proptest::prelude::*;
use proptest::sample::select;

#[test]
fn rows_go_to_their_slots_in_every_layout_and_dtype() {
    for layout in [SPLIT, 1, 2, 3] {
        for dtype in ATTENTION_DTYPES {
            for wide_slots in [false, true] {
                Update { layout, dtype, wide_slots, ..Update::default() }.check();
            }
        }
    }
}

#[test]
fn slots_outside_the_cache_are_skipped() {
    let last = 3 * 4 - 1;
    let narrow = vec![-1, last, last + 1, i64::from(i32::MIN), 3, i64::from(i32::MAX), -4, 2];
    // 2^32 + 5 is slot 5 to whoever keeps only the low half.
    let wide = vec![-1, last, last + 1, i64::MIN, 3, i64::MAX, (1 << 32) + 5, 2, -(1 << 32), i64::MAX / 2];
    for layout in [SPLIT, 1, 2, 3] {
        Update { layout, slots: narrow.clone(), ..Update::default() }.check();
        Update { layout, slots: narrow.clone(), wide_slots: true, ..Update::default() }.check();
        Update { layout, slots: wide.clone(), wide_slots: true, ..Update::default() }.check();
    }
}

#[test]
fn nothing_to_write_leaves_the_cache_as_it_was() {
    for layout in [SPLIT, 1, 2, 3] {
        Update { layout, slots: vec![], ..Update::default() }.check();
        Update { layout, slots: vec![-1; 5], ..Update::default() }.check();
        Update { layout, num_pages: 0, ..Update::default() }.check();
        Update { layout, num_pages: 0, slots: vec![], ..Update::default() }.check();
        Update { layout, page_size: 0, ..Update::default() }.check();
    }
}

#[test]
fn a_split_cache_may_have_values_of_another_width() {
    for (head_dim, value_dim) in [(192, 128), (8, 256), (24, 64)] {
        for dtype in ATTENTION_DTYPES {
            Update { layout: SPLIT, dtype, head_dim, value_dim, ..Update::default() }.check();
        }
    }
}

#[test]
fn any_shape_is_updated() {
    let updates = (
        select(&[SPLIT, 1, 2, 3]),
        (select(&ATTENTION_DTYPES), select(&[None, None, Some(F8E4M3FN), Some(F8E5M2)])),
        (0..5usize, 1..9usize, 1..5usize, 1..=9usize),
        0..40usize,
        any::<bool>(),
        0..1000u64,
    );
    for_all(
        128,
        updates,
        |(layout, (dtype, fp8), (num_pages, page_size, heads, eighths), tokens, wide_slots, seed)| {
            let mut random = Random::new(seed);
            let mut free: Vec<i64> = (0..(num_pages * page_size) as i64).collect();
            random.shuffle(&mut free);
            let mut slot = || match random.below(3) {
                0 => Some(i64::from(random.hostile_i32())).filter(|s| !(0..(num_pages * page_size) as i64).contains(s)),
                _ => free.pop(),
            };
            let slots = (0..tokens).map(|_| slot().unwrap_or(-1)).collect();
            let d = 8 * eighths;
            Update {
                layout,
                dtype,
                fp8,
                num_pages,
                page_size,
                heads,
                head_dim: d,
                value_dim: d,
                slots,
                wide_slots,
                seed,
                ..Update::default()
            }
            .check();
        },
    );
}

#[test]
fn rows_are_divided_by_their_scale() {
    let scales = [None, Some(vec![0.37]), Some(vec![3.0, 0.011])];
    for layout in [SPLIT, 1, 2, 3] {
        for dtype in ATTENTION_DTYPES {
            for k_scale in &scales {
                for v_scale in &scales {
                    Update { layout, dtype, k_scale: k_scale.clone(), v_scale: v_scale.clone(), ..Update::default() }
                        .check();
                }
            }
        }
    }
}

#[test]
fn a_scale_of_one_stores_the_numbers_themselves() {
    for dtype in ATTENTION_DTYPES {
        Update { dtype, k_scale: Some(vec![1.0]), v_scale: Some(vec![1.0, 1.0]), ..Update::default() }.check();
    }
}

#[test]
fn scales_without_an_element_count_as_left_out() {
    let update = Update::default();
    let call = update.invocation(true).operand("k_scale", Array::left_out(F32));
    assert!(call.results(Side::EndsAtGuard) == update.expected());
    let call = call.operand("v_scale", Array::left_out(F32));
    assert!(call.results(Side::EndsAtGuard) == update.expected());
}

#[test]
fn rows_for_one_slot_leave_one_of_them() {
    for (layout, count) in [SPLIT, 1, 2, 3].into_iter().flat_map(|layout| [(layout, 2), (layout, 40)]) {
        let update = Update { layout, slots: vec![5; count], ..Update::default() };
        let alone = |row: usize| (0..count).map(|r| if r == row { 5 } else { -1 }).collect();
        let of_each: Vec<_> = (0..count).map(|row| Update { slots: alone(row), ..update.clone() }.expected()).collect();
        let row_bytes = update.head_dim * update.dtype.size();
        for (index, found) in update.invocation(true).results(Side::EndsAtGuard).iter().enumerate() {
            for (at, row) in found.bytes.chunks_exact(row_bytes).enumerate() {
                let is_row_of = |one: &Vec<Array>| row == &one[index].bytes[at * row_bytes..][..row_bytes];
                assert!(of_each.iter().any(is_row_of), "layout {layout}: row {at} is none of {count}");
            }
        }
    }
}

#[test]
fn hostile_slots_cost_no_more_than_right_ones() {
    hostile_slots_cost_no_more(Sizes::small(), 10.0);
}

/// At a size at which time can be told from noise: `--ignored --nocapture` prints a table.
#[test]
#[ignore = "a measurement: wants a machine for itself"]
fn hostile_slots_cost_at_most_twice_as_much() {
    hostile_slots_cost_no_more(Sizes { rows: 1 << 16, ..Sizes::large()[0] }, 2.0);
}

#[test]
fn each_cache_of_a_split_pair_may_be_updated_in_place_on_its_own() {
    let update = Update { layout: SPLIT, value_dim: 24, ..Update::default() };
    for in_place in [0, 1] {
        let mut call = update.invocation(false);
        call.results[in_place].alias = Some(in_place);
        for_both_sides(|side| assert!(call.results(side) == update.expected()));
    }
}

#[test]
fn every_pool_updates_the_same() {
    let late = Late::default();
    let mut slots: Vec<i64> = (0..64 * 16).collect();
    Random::new(3).shuffle(&mut slots);
    slots.truncate(600);
    let update = Update {
        dtype: BF16,
        num_pages: 64,
        page_size: 16,
        heads: 8,
        head_dim: 64,
        value_dim: 64,
        slots,
        ..Update::default()
    };
    let pools: [&dyn HostPool; 5] = [&Inline(1), &Inline(9), &Threads::new(3), &late, &NoPool];
    for pool in pools {
        for in_place in [true, false] {
            let found = update.invocation(in_place).run(Side::BeginsAtGuard, pool).unwrap();
            assert!(found == update.expected());
        }
    }
    late.run_all();
}
