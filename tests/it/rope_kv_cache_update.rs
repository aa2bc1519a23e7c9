//! `xla_gpu_rope_kv_cache_update` through its XLA FFI handlers.

use crate::support::array::{ATTENTION_DTYPES, Array, BF16, F8E4M3FN, F8E5M2, F32, FP8_DTYPES};
use crate::support::cache_updates::Update;
use crate::support::guard::{Side, for_both_sides};
use crate::support::pools::{HostPool, Inline, Late, NoPool, Threads};
use crate::support::random::Random;
use crate::support::rotations::Rope;
use crate::support::strategies::for_all;
use proptest::prelude::*;
use proptest::sample::select;

#[test]
fn keys_and_queries_turn_in_every_layout_and_dtype() {
    for layout in [1, 2, 3] {
        for dtype in ATTENTION_DTYPES {
            for interleaved in [false, true] {
                for fp8 in [None, Some(F8E4M3FN), Some(F8E5M2)] {
                    let update = Update { layout, dtype, fp8, ..Update::default() };
                    Rope { update, interleaved, ..Rope::default() }.check();
                }
            }
        }
    }
}

#[test]
fn any_even_number_of_elements_turns_and_the_others_pass() {
    for dtype in ATTENTION_DTYPES {
        for interleaved in [false, true] {
            for (head_dim, rotations) in [(8, vec![0, 2, 4, 6, 8]), (40, vec![8, 16, 20, 32, 38, 40]), (256, vec![64])]
            {
                for rotated in rotations {
                    let update = Update { dtype, head_dim, value_dim: head_dim, ..Update::default() };
                    Rope { update, rotated, interleaved, ..Rope::default() }.check();
                }
            }
        }
    }
}

#[test]
fn rows_are_divided_by_their_scale_after_they_have_turned() {
    let scales = [None, Some(vec![0.37]), Some(vec![3.0, 0.011])];
    for dtype in ATTENTION_DTYPES {
        for fp8 in [None, Some(F8E4M3FN), Some(F8E5M2)] {
            for (k_scale, v_scale) in scales.iter().zip(scales.iter().cycle().skip(1)) {
                for rotated in [8, 16] {
                    let (k_scale, v_scale) = (k_scale.clone(), v_scale.clone());
                    let update = Update { dtype, fp8, k_scale, v_scale, ..Update::default() };
                    Rope { update, rotated, ..Rope::default() }.check();
                }
            }
        }
    }
}

#[test]
fn positions_outside_the_table_are_clamped() {
    for interleaved in [false, true] {
        for positions in [[-1, 9, i32::MIN, i32::MAX], [0, 8, -1000, 10]] {
            Rope { positions: positions.to_vec(), interleaved, ..Rope::default() }.check();
        }
        Rope { max_pos: 1, interleaved, ..Rope::default() }.check();
    }
}

#[test]
fn without_a_table_rows_pass_as_they_are() {
    for layout in [1, 2, 3] {
        for fp8 in [None, Some(F8E4M3FN)] {
            for positions in [vec![0, 1, 2, 3], vec![-1, i32::MAX, i32::MIN, 5]] {
                let update = Update { layout, fp8, dtype: BF16, ..Update::default() };
                Rope { update, max_pos: 0, positions, ..Rope::default() }.check();
            }
        }
    }
}

#[test]
fn queries_turn_where_their_keys_go_nowhere() {
    let slots = [vec![-1, 11, 12, i64::from(i32::MIN)], vec![-1; 4], vec![i64::from(i32::MAX), 3, -4, 2]];
    for layout in [1, 2, 3] {
        for slots in &slots {
            for wide_slots in [false, true] {
                let update = Update { layout, slots: slots.clone(), wide_slots, ..Update::default() };
                Rope { update, ..Rope::default() }.check();
            }
        }
        let slots = vec![i64::MIN, (1 << 32) + 5, 3, i64::MAX];
        let update = Update { layout, slots, wide_slots: true, ..Update::default() };
        Rope { update, ..Rope::default() }.check();
        Rope { update: Update { layout, num_pages: 0, ..Update::default() }, ..Rope::default() }.check();
        Rope { update: Update { layout, page_size: 0, ..Update::default() }, ..Rope::default() }.check();
    }
}

#[test]
fn no_tokens_leave_the_cache_as_it_was() {
    for max_pos in [0, 3] {
        let update = Update { slots: vec![], ..Update::default() };
        Rope { update, positions: vec![], max_pos, ..Rope::default() }.check();
    }
}

#[test]
fn any_shape_turns() {
    let shapes = (
        (select(&[1, 2, 3]), select(&ATTENTION_DTYPES), select(&[None, None, Some(F8E4M3FN), Some(F8E5M2)])),
        (0..5usize, 1..9usize, 1..5usize, 1..=9usize),
        (1..7usize, 0..=100usize, 0..20usize, any::<bool>()),
        (0..40usize, any::<bool>(), 0..1000u64),
    );
    for_all(128, shapes, |((layout, dtype, fp8), (num_pages, page_size, heads, eighths), turning, tokens)| {
        let (q_heads, percent, max_pos, interleaved) = turning;
        let (tokens, wide_slots, seed) = tokens;
        let mut random = Random::new(seed);
        let mut free: Vec<i64> = (0..(num_pages * page_size) as i64).collect();
        random.shuffle(&mut free);
        let slots = (0..tokens).map(|_| if random.below(4) == 0 { -1 } else { free.pop().unwrap_or(-7) }).collect();
        let position = |_| if random.below(4) == 0 { random.hostile_i32() } else { random.below(20) as i32 };
        let positions = (0..tokens).map(position).collect();
        let d = 8 * eighths;
        let update = Update {
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
        };
        Rope { update, q_heads, rotated: d * percent / 200 * 2, max_pos, positions, interleaved }.check();
    });
}

#[test]
fn a_query_and_a_key_meet_at_the_distance_of_their_positions() {
    let (d, length) = (32, 40);
    let table: Vec<f64> = (0..length)
        .flat_map(|position| {
            let angle = move |i: i32| f64::from(position) * 100f64.powf(-f64::from(i) / 16.0);
            (0..16).map(move |i| angle(i).cos()).chain((0..16).map(move |i| angle(i).sin()))
        })
        .collect();
    let cos_sin = Array::new(F32, &[i64::from(length), d as i64], &table);
    for interleaved in [false, true] {
        // The same query and key, moved along by a token each time.
        let tokens = 20;
        let update = Update {
            layout: 2,
            num_pages: 1,
            page_size: tokens,
            heads: 1,
            head_dim: d,
            value_dim: d,
            slots: (0..tokens as i64).collect(),
            ..Update::default()
        };
        let rope = Rope { update, q_heads: 1, rotated: d, interleaved, ..Rope::default() };
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
fn angles_of_zero_turn_nothing() {
    for dtype in ATTENTION_DTYPES {
        for fp8 in [None].into_iter().chain(FP8_DTYPES.map(Some)) {
            let rope = Rope { update: Update { dtype, fp8, ..Update::default() }, ..Rope::default() };
            let (turning, still) = (rope.invocation(true), Rope { max_pos: 0, ..rope.clone() }.invocation(true));
            let table: Vec<f64> = (0..9).flat_map(|_| [[1.0; 8], [0.0; 8]].concat()).collect();
            let rows = |name| turning.operands.iter().find(|(n, _)| *n == name).unwrap().1.clone();
            let turning = turning.clone().with_operand("cos_sin", Array::new(F32, &[9, 16], &table));
            let still = ["query", "key"].into_iter().fold(still, |call, name| call.with_operand(name, rows(name)));
            for_both_sides(|side| assert!(turning.results(side) == still.results(side), "{dtype:?} into {fp8:?}"));
        }
    }
}

#[test]
fn scales_without_an_element_count_as_left_out() {
    let rope = Rope::default();
    let call = rope.invocation(true).operand("k_scale", Array::left_out(F32));
    assert!(call.results(Side::EndsAtGuard) == rope.expected());
    let call = call.operand("v_scale", Array::left_out(F32));
    assert!(call.results(Side::EndsAtGuard) == rope.expected());
}

#[test]
fn every_pool_turns_the_same() {
    let late = Late::default();
    let mut slots: Vec<i64> = (0..64 * 16).collect();
    Random::new(3).shuffle(&mut slots);
    slots.truncate(300);
    let update = Update {
        dtype: BF16,
        num_pages: 64,
        page_size: 16,
        heads: 4,
        head_dim: 64,
        value_dim: 64,
        slots,
        ..Update::default()
    };
    let positions = (0..300).map(|i| i * 7 % 50).collect();
    let rope = Rope { update, q_heads: 8, rotated: 64, max_pos: 50, positions, interleaved: false };
    let expected = rope.expected();
    let pools: [&dyn HostPool; 5] = [&Inline(1), &Inline(9), &Threads::new(3), &late, &NoPool];
    for pool in pools {
        for in_place in [true, false] {
            assert!(rope.invocation(in_place).run(Side::BeginsAtGuard, pool).unwrap() == expected);
        }
    }
    late.run_all();
}
