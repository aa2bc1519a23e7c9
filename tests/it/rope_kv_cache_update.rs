//! `xla_gpu_rope_kv_cache_update` through its XLA FFI handlers.

use crate::support::{
    ATTENTION_DTYPES, Array, BF16, CacheUpdateCase, F8E4M3FN, F32, KvLayout, Random, RopeCase, Side, for_each_pool,
};

/// The layouts with one buffer.
const LAYOUTS: [KvLayout; 3] = [KvLayout::Interleaved, KvLayout::Stacked, KvLayout::PerPage];

#[test]
fn keys_and_queries_are_rotated_in_every_layout_and_dtype_with_and_without_scales() {
    for update in CacheUpdateCase::each_type(&LAYOUTS) {
        for (rotated, interleaved) in [(16, false), (16, true), (8, false)] {
            RopeCase { update: update.clone(), rotated, interleaved, ..RopeCase::default() }.assert_matches_reference();
        }
    }
}

#[test]
fn any_even_number_of_elements_is_rotated_and_the_others_are_copied() {
    for (dtype, interleaved) in ATTENTION_DTYPES.into_iter().flat_map(|dtype| [(dtype, false), (dtype, true)]) {
        for (d, rotations) in [(8, vec![0, 2, 4, 6, 8]), (40, vec![8, 16, 20, 32, 38, 40]), (512, vec![64, 512])] {
            for rotated in rotations {
                let update = CacheUpdateCase { dtype, dims: [d; 2], ..CacheUpdateCase::default() };
                RopeCase { update, rotated, interleaved, ..RopeCase::default() }.assert_matches_reference();
            }
        }
    }
}

#[test]
fn positions_outside_the_table_are_clamped() {
    for interleaved in [false, true] {
        for positions in [[-1, 9, i32::MIN, i32::MAX], [0, 8, -1000, 10]] {
            RopeCase { positions: positions.to_vec(), interleaved, ..RopeCase::default() }.assert_matches_reference();
        }
        RopeCase { max_pos: 1, interleaved, ..RopeCase::default() }.assert_matches_reference();
    }
}

#[test]
fn without_a_table_rows_are_copied() {
    for layout in LAYOUTS {
        for fp8 in [None, Some(F8E4M3FN)] {
            for positions in [vec![0, 1, 2, 3], vec![-1, i32::MAX, i32::MIN, 5]] {
                let update = CacheUpdateCase { layout, fp8, dtype: BF16, ..CacheUpdateCase::default() };
                RopeCase { update, max_pos: 0, positions, ..RopeCase::default() }.assert_matches_reference();
            }
        }
    }
}

#[test]
fn queries_are_rotated_even_if_their_keys_have_no_slot() {
    let slots = [vec![-1, 11, 12, i64::from(i32::MIN)], vec![-1; 4], vec![i64::from(i32::MAX), 3, -4, 2]];
    for layout in LAYOUTS {
        for slots in &slots {
            for wide_slots in [false, true] {
                let update = CacheUpdateCase { layout, slots: slots.clone(), wide_slots, ..CacheUpdateCase::default() };
                RopeCase { update, ..RopeCase::default() }.assert_matches_reference();
            }
        }
        let slots = vec![i64::MIN, (1 << 32) + 5, 3, i64::MAX];
        let update = CacheUpdateCase { layout, slots, wide_slots: true, ..CacheUpdateCase::default() };
        RopeCase { update, ..RopeCase::default() }.assert_matches_reference();
        RopeCase {
            update: CacheUpdateCase { layout, num_pages: 0, ..CacheUpdateCase::default() },
            ..RopeCase::default()
        }
        .assert_matches_reference();
        RopeCase {
            update: CacheUpdateCase { layout, page_size: 0, ..CacheUpdateCase::default() },
            ..RopeCase::default()
        }
        .assert_matches_reference();
    }
}

#[test]
fn scores_depend_on_the_distance_of_the_positions_only() {
    let (d, length) = (32, 40);
    let table: Vec<f64> = (0..length)
        .flat_map(|position| {
            let angle = move |i: i32| f64::from(position) * 100f64.powf(-f64::from(i) / 16.0);
            (0..16).map(move |i| angle(i).cos()).chain((0..16).map(move |i| angle(i).sin()))
        })
        .collect();
    let cos_sin = Array::new(F32, &[i64::from(length), d as i64], &table);
    for interleaved in [false, true] {
        // The same query and key at consecutive positions.
        let tokens = 20;
        let update = CacheUpdateCase {
            layout: KvLayout::Stacked,
            num_pages: 1,
            page_size: tokens,
            heads: 1,
            dims: [d; 2],
            slots: (0..tokens as i64).collect(),
            ..CacheUpdateCase::default()
        };
        let rope = RopeCase { update, q_heads: 1, rotated: d, interleaved, ..RopeCase::default() };
        let row = Array::new(F32, &[1, 1, d as i64], &rope.query().values()[..d]);
        let rows = Array { dims: vec![tokens as i64, 1, d as i64], bytes: row.bytes.repeat(tokens), ..row };
        let scores = |distance: i32| -> Vec<f64> {
            let at = |first: i32| Array::i32s(&[tokens as i64], &(first..first + tokens as i32).collect::<Vec<_>>());
            let call = rope.invocation(true).with_operand("query", rows.clone()).with_operand("key", rows.clone());
            let call = call.with_operand("cos_sin", cos_sin.clone());
            let keys = call.clone().with_operand("positions", at(0)).results(Side::EndsAtGuard)[0].values();
            let queries = call.with_operand("positions", at(distance)).results(Side::EndsAtGuard)[1].values();
            let pairs = keys.chunks_exact(d).zip(queries.chunks_exact(d));
            pairs.map(|(k, q)| k.iter().zip(q).map(|(a, b)| a * b).sum()).collect()
        };
        let size: f64 = rows.values()[..d].iter().map(|x| x * x).sum();
        for distance in [0, 1, 7, 19] {
            let scores = scores(distance);
            assert!(scores.iter().all(|s| (s - scores[0]).abs() < 1e-5 * size), "{distance}: {scores:?}");
            assert!(distance > 0 || (scores[0] - size).abs() < 1e-5 * size, "{} is not {size}", scores[0]);
        }
    }
}

#[test]
fn every_pool_gives_the_same_rotation() {
    let mut slots: Vec<i64> = (0..64 * 16).collect();
    Random::new(3).shuffle(&mut slots);
    slots.truncate(300);
    let sizes = CacheUpdateCase { num_pages: 64, page_size: 16, heads: 4, dims: [64; 2], ..CacheUpdateCase::default() };
    let update = CacheUpdateCase { dtype: BF16, slots, ..sizes };
    let positions = (0..300).map(|i| i * 7 % 50).collect();
    let rope = RopeCase { update, q_heads: 8, rotated: 64, max_pos: 50, positions, interleaved: false };
    let expected = rope.expected();
    for_each_pool(|pool| {
        for in_place in [true, false] {
            assert!(rope.invocation(in_place).run(Side::BeginsAtGuard, pool).unwrap() == expected);
        }
    });
}
