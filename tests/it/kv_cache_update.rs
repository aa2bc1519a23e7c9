//! `xla_gpu_kv_cache_update` and `xla_gpu_kv_cache_update_split` on the CPU, through their XLA FFI handlers. The
//! rounding to fp8 is in `kv_cache_update_fp8`.

use crate::support::cost::{CostSizes, hostile_slots_cost_no_more};
use crate::support::{
    ATTENTION_DTYPES, Array, BF16, CacheUpdateCase, FP8_DTYPES, KvLayout, Random, Side, for_each_pool, for_each_side,
};

#[test]
fn rows_go_to_their_slots_in_every_layout_and_dtype_with_and_without_scales() {
    for (index, update) in CacheUpdateCase::each_type(&KvLayout::PAGED).into_iter().enumerate() {
        CacheUpdateCase { wide_slots: index % 2 == 0, ..update }.assert_matches_reference();
    }
}

#[test]
fn slots_outside_the_cache_are_skipped() {
    let last = 3 * 4 - 1;
    let narrow = vec![-1, last, last + 1, i64::from(i32::MIN), 3, i64::from(i32::MAX), -4, 2];
    // The low half of 2^32 + 5 is slot 5.
    let wide = vec![-1, last, last + 1, i64::MIN, 3, i64::MAX, (1 << 32) + 5, 2, -(1 << 32), i64::MAX / 2];
    for (layout, fp8) in KvLayout::PAGED.into_iter().flat_map(|layout| [None, Some(FP8_DTYPES[0])].map(|t| (layout, t)))
    {
        let update = CacheUpdateCase { layout, fp8, ..CacheUpdateCase::default() };
        for (slots, wide_slots) in [(&narrow, false), (&narrow, true), (&wide, true), (&vec![-1; 5], false)] {
            CacheUpdateCase { slots: slots.clone(), wide_slots, ..update.clone() }.assert_matches_reference();
        }
        for (num_pages, page_size, slots) in [(0, 4, &update.slots), (3, 0, &update.slots), (3, 4, &vec![])] {
            CacheUpdateCase { num_pages, page_size, slots: slots.clone(), ..update.clone() }.assert_matches_reference();
        }
    }
}

#[test]
fn rows_of_every_width_are_stored() {
    for (layout, dtype) in KvLayout::PAGED.into_iter().flat_map(|layout| ATTENTION_DTYPES.map(|dtype| (layout, dtype)))
    {
        for eighths in [1, 3, 15, 24, 31, 32] {
            let value_eighths = if layout == KvLayout::Split { 33 - eighths } else { eighths };
            for fp8 in [None, Some(FP8_DTYPES[eighths % 2])] {
                let dims = [8 * eighths, 8 * value_eighths];
                CacheUpdateCase { layout, dtype, fp8, heads: 3, dims, ..CacheUpdateCase::default() }
                    .assert_matches_reference();
            }
        }
    }
}

#[test]
fn a_scale_of_one_stores_the_rows_unchanged() {
    for dtype in ATTENTION_DTYPES {
        CacheUpdateCase { dtype, scales: [Some(vec![1.0]), Some(vec![1.0, 1.0])], ..CacheUpdateCase::default() }
            .assert_matches_reference();
    }
}

#[test]
fn rows_with_the_same_slot_store_one_of_them() {
    for (layout, count) in KvLayout::PAGED.into_iter().flat_map(|layout| [(layout, 2), (layout, 40)]) {
        let update = CacheUpdateCase { layout, slots: vec![5; count], ..CacheUpdateCase::default() };
        let alone = |row: usize| (0..count).map(|r| if r == row { 5 } else { -1 }).collect();
        let each_alone: Vec<_> =
            (0..count).map(|row| CacheUpdateCase { slots: alone(row), ..update.clone() }.expected()).collect();
        let row_bytes = update.dims[0] * update.dtype.size();
        for (index, actual) in update.invocation(true).results(Side::EndsAtGuard).iter().enumerate() {
            for (at, row) in actual.bytes.chunks_exact(row_bytes).enumerate() {
                let is_row_of = |results: &Vec<Array>| row == &results[index].bytes[at * row_bytes..][..row_bytes];
                assert!(each_alone.iter().any(is_row_of), "{layout:?}: row {at} is none of {count}");
            }
        }
    }
}

#[test]
fn hostile_slots_cost_no_more_than_valid_ones() {
    hostile_slots_cost_no_more(CostSizes::small(), 10.0);
}

/// At a size at which the time is well above the noise. `--ignored --nocapture` prints a table.
#[test]
#[ignore = "a measurement: wants a machine for itself"]
fn hostile_slots_cost_at_most_twice_as_much() {
    hostile_slots_cost_no_more(CostSizes { rows: 1 << 16, ..CostSizes::large()[0] }, 2.0);
}

#[test]
fn each_cache_of_a_split_pair_may_be_updated_in_place_on_its_own() {
    let update = CacheUpdateCase { layout: KvLayout::Split, dims: [16, 24], ..CacheUpdateCase::default() };
    for in_place in [0, 1] {
        let mut call = update.invocation(false);
        call.results[in_place].alias = Some(in_place);
        for_each_side(|side| assert!(call.results(side) == update.expected()));
    }
}

#[test]
fn every_pool_gives_the_same_cache() {
    let mut slots: Vec<i64> = (0..64 * 16).collect();
    Random::new(3).shuffle(&mut slots);
    slots.truncate(600);
    let sizes = CacheUpdateCase { num_pages: 64, page_size: 16, heads: 8, dims: [64; 2], ..CacheUpdateCase::default() };
    let update = CacheUpdateCase { dtype: BF16, slots, ..sizes };
    let expected = update.expected();
    for_each_pool(|pool| {
        for in_place in [true, false] {
            assert!(update.invocation(in_place).run(Side::BeginsAtGuard, pool).unwrap() == expected);
        }
    });
}
