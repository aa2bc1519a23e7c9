//! `xla_gpu_kv_cache_update` and `xla_gpu_kv_cache_update_split` on the CPU, through their XLA FFI handlers.

#![allow(clippy::unwrap_used, reason = "a failed step is a failed test")]

mod support;

use proptest::prelude::*;
use proptest::sample::select;
use support::array::{ATTENTION_DTYPES, Array, BF16, Dtype, F16, F32, count};
use support::guard::{Side, for_both_sides};
use support::invocation::{Attr, Invocation};
use support::oracle::kv_cache_update;
use support::pools::{HostPool, Inline, Late, NoPool, Threads};
use support::random::Random;
use support::strategies::for_all;

const SPLIT: i64 = 0;

/// A call in numbers; `layout` is the attribute `kv_layout`, or [`SPLIT`].
#[derive(Clone, Debug)]
struct Update {
    layout: i64,
    dtype: Dtype,
    num_pages: usize,
    page_size: usize,
    heads: usize,
    head_dim: usize,
    /// D of the values; differs from the keys' only in a split cache.
    value_dim: usize,
    slots: Vec<i64>,
    wide_slots: bool,
    k_scale: Option<Vec<f64>>,
    v_scale: Option<Vec<f64>>,
    seed: u64,
}

impl Default for Update {
    fn default() -> Self {
        Self {
            layout: 1,
            dtype: F32,
            num_pages: 3,
            page_size: 4,
            heads: 2,
            head_dim: 16,
            value_dim: 16,
            slots: vec![7, 0, 11, 4],
            wide_slots: false,
            k_scale: None,
            v_scale: None,
            seed: 1,
        }
    }
}

/// Any bit pattern: copying keeps even the payload of a NaN.
fn any_bits(dtype: Dtype, dims: &[usize], seed: u64) -> Array {
    let mut random = Random::new(seed);
    let dims: Vec<i64> = dims.iter().map(|&d| d as i64).collect();
    let bytes = (0..count(&dims) * dtype.size()).map(|_| random.next() as u8).collect();
    Array { dtype, dims, bytes }
}

fn numbers(dtype: Dtype, dims: &[usize], seed: u64) -> Array {
    let mut random = Random::new(seed);
    let values: Vec<f64> = (0..dims.iter().product::<usize>()).map(|_| 10.0 * random.normal()).collect();
    Array::new(dtype, &dims.iter().map(|&d| d as i64).collect::<Vec<_>>(), &values)
}

impl Update {
    fn caches(&self) -> Vec<Array> {
        let (p, s, h, d) = (self.num_pages, self.page_size, self.heads, self.head_dim);
        let cache = |dims: &[usize], seed| any_bits(self.dtype, dims, self.seed + seed);
        match self.layout {
            SPLIT => vec![cache(&[p, s, h, d], 100), cache(&[p, s, h, self.value_dim], 200)],
            1 => vec![cache(&[p, s, 2 * h, d], 100)],
            2 => vec![cache(&[2, p, s, h, d], 100)],
            _ => vec![cache(&[p, 2, s, h, d], 100)],
        }
    }

    fn rows(&self) -> [Array; 2] {
        let scaled = self.k_scale.is_some() || self.v_scale.is_some();
        let make = if scaled { numbers } else { any_bits };
        let dims = |d| [self.slots.len(), self.heads, d];
        [
            make(self.dtype, &dims(self.head_dim), self.seed + 300),
            make(self.dtype, &dims(self.value_dim), self.seed + 400),
        ]
    }

    /// The element of the cache at which the row of a slot begins; `kv` is 0 for K, 1 for V.
    fn row_of(&self, kv: usize) -> impl Fn(usize, usize) -> usize + use<> {
        let Self { layout, num_pages, page_size, heads, head_dim, value_dim, .. } = *self;
        move |slot, head| {
            let (page, token) = (slot / page_size, slot % page_size);
            match layout {
                SPLIT => (slot * heads + head) * if kv == 0 { head_dim } else { value_dim },
                1 => (slot * 2 * heads + 2 * head + kv) * head_dim,
                2 => (((kv * num_pages + page) * page_size + token) * heads + head) * head_dim,
                _ => (((page * 2 + kv) * page_size + token) * heads + head) * head_dim,
            }
        }
    }

    fn invocation(&self, in_place: bool) -> Invocation {
        let caches = self.caches();
        let names: &[&'static str] = if self.layout == SPLIT { &["k_cache", "v_cache"] } else { &["kv_cache"] };
        let target = if self.layout == SPLIT { "xla_gpu_kv_cache_update_split" } else { "xla_gpu_kv_cache_update" };
        let mut call = Invocation::new(target);
        call.what = format!("{self:?}, in place: {in_place}");
        for (name, cache) in names.iter().zip(&caches) {
            call = call.operand(name, cache.clone());
        }
        let [key, value] = self.rows();
        let tokens = [self.slots.len() as i64];
        let slots = if self.wide_slots {
            Array::i64s(&tokens, &self.slots)
        } else {
            Array::i32s(&tokens, &self.slots.iter().map(|&s| i32::try_from(s).unwrap()).collect::<Vec<_>>())
        };
        call = call.operand("key", key).operand("value", value).operand("slot_mapping", slots);
        let scale = |scale: &Option<Vec<f64>>| match scale {
            Some(values) => Array::new(F32, &[values.len() as i64], values),
            None => Array::left_out(F32),
        };
        if self.k_scale.is_some() || self.v_scale.is_some() {
            call = call.operand("k_scale", scale(&self.k_scale));
        }
        if self.v_scale.is_some() {
            call = call.operand("v_scale", scale(&self.v_scale));
        }
        for (index, name) in names.iter().enumerate() {
            call = if in_place {
                call.result_in_place(name, index)
            } else {
                call.result(name, self.dtype, &caches[index].dims)
            };
        }
        if self.layout == SPLIT { call } else { call.attribute("kv_layout", Attr::I64(self.layout)) }
    }

    fn expected(&self) -> Vec<Array> {
        let mut caches = self.caches();
        let slots = self.num_pages * self.page_size;
        for (kv, scale) in [&self.k_scale, &self.v_scale].into_iter().enumerate() {
            let cache = kv.min(caches.len() - 1);
            caches[cache] = kv_cache_update(
                &caches[cache],
                &self.rows()[kv],
                &self.slots,
                slots,
                scale.as_deref(),
                self.row_of(kv),
            );
        }
        caches
    }

    /// Both ways, in place and into a buffer of its own, give what is expected.
    fn check(&self) {
        for in_place in [true, false] {
            for_both_sides(|side| {
                let found = self.invocation(in_place).results(side);
                for (found, expected) in found.iter().zip(self.expected()) {
                    assert!(*found == expected, "{self:?}, in place: {in_place}: the cache differs");
                }
            });
        }
    }
}

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
        select(&ATTENTION_DTYPES),
        (0..5usize, 1..9usize, 1..5usize, 1..=9usize),
        0..40usize,
        any::<bool>(),
        0..1000u64,
    );
    for_all(128, updates, |(layout, dtype, (num_pages, page_size, heads, eighths), tokens, wide_slots, seed)| {
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
    });
}

#[test]
fn rows_are_divided_by_their_scale() {
    let scales = [None, Some(vec![0.37]), Some(vec![3.0, 0.011])];
    for layout in [SPLIT, 1, 2, 3] {
        for (dtype, ulp) in [(F32, 2f64.powi(-23)), (F16, 2f64.powi(-10)), (BF16, 2f64.powi(-7))] {
            for k_scale in &scales {
                for v_scale in &scales {
                    let (k_scale, v_scale) = (k_scale.clone(), v_scale.clone());
                    let update = Update { layout, dtype, k_scale, v_scale, ..Update::default() };
                    if update.k_scale.is_none() && update.v_scale.is_none() {
                        continue;
                    }
                    for in_place in [true, false] {
                        let found = update.invocation(in_place).results(Side::EndsAtGuard);
                        for (found, expected) in found.iter().zip(update.expected()) {
                            assert_within_one_ulp(found, &expected, ulp, &update);
                        }
                    }
                }
            }
        }
    }
}

/// Equal bits, or neighbours: `x / scale` may be rounded to f32 on the way.
fn assert_within_one_ulp(found: &Array, expected: &Array, ulp: f64, update: &Update) {
    let size = found.dtype.size();
    for (f, e) in found.bytes.chunks_exact(size).zip(expected.bytes.chunks_exact(size)) {
        if f != e {
            let (f, e) = (found.dtype.decode(f), found.dtype.decode(e));
            assert!((f - e).abs() <= ulp * e.abs(), "{f} instead of {e}: {update:?}");
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
fn two_rows_for_one_slot_leave_one_of_them() {
    for layout in [SPLIT, 1, 2, 3] {
        let update = Update { layout, slots: vec![5, 5], ..Update::default() };
        let first = Update { slots: vec![5, -1], ..update.clone() }.expected();
        let second = Update { slots: vec![-1, 5], ..update.clone() }.expected();
        let row_bytes = update.head_dim * update.dtype.size();
        for (index, found) in update.invocation(true).results(Side::EndsAtGuard).iter().enumerate() {
            for (at, row) in found.bytes.chunks_exact(row_bytes).enumerate() {
                let same = |other: &[Array]| row == &other[index].bytes[at * row_bytes..][..row_bytes];
                assert!(same(&first) || same(&second), "layout {layout}: row {at} is neither");
            }
        }
    }
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
