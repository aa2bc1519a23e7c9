//! Every option of SPEC 2.1, alone and with the others.

use super::batch::Batch;
use super::numbers::Random;
use super::shape::{Shape, Storage};
use super::{MIXED, check};
use crate::cpu::simd::Isa;
use crate::pool::SingleThread;
use crate::tensor::DType;

const STORAGES: [Storage; 6] = [
    Storage::Contiguous,
    Storage::Paged(16, 0),
    Storage::Paged(7, 1),
    Storage::Paged(1, 2),
    Storage::Paged(40, 3),
    Storage::Paged(3, 0),
];

/// (q, K and V, out) of SPEC 2.1.
const DTYPES: [(DType, DType, DType); 9] = [
    (DType::F32, DType::F32, DType::F32),
    (DType::F16, DType::F16, DType::F16),
    (DType::BF16, DType::BF16, DType::BF16),
    (DType::F16, DType::F8E4M3FN, DType::F16),
    (DType::F16, DType::F8E5M2, DType::F16),
    (DType::BF16, DType::F8E4M3FN, DType::BF16),
    (DType::BF16, DType::F8E5M2, DType::BF16),
    (DType::F8E4M3FN, DType::F8E4M3FN, DType::BF16),
    (DType::F8E4M3FN, DType::F8E4M3FN, DType::F16),
];

fn varlen() -> Shape {
    Shape { lengths: MIXED.into(), ..Shape::varlen() }.head_dims(24, 24)
}

#[test]
fn keys_may_lie_anywhere_and_be_counted_either_way() {
    for storage in STORAGES {
        for seqused_k in [false, true] {
            check(Shape { storage, seqused_k, rows_around: (2, 3), ..varlen() });
        }
    }
}

#[test]
fn every_pair_of_dtypes_agrees_with_the_definition() {
    for (q_dtype, kv_dtype, out_dtype) in DTYPES {
        for (d, storage) in [(64, Storage::Contiguous), (72, Storage::Paged(16, 1)), (8, Storage::Paged(3, 2))] {
            let shape = Shape { q_dtype, kv_dtype, out_dtype, storage, scales: Some(true), ..varlen() };
            check(shape.head_dims(d, d));
        }
    }
}

#[test]
fn pairs_of_bf16_agree_with_the_definition_on_any_cpu() {
    for (q_dtype, kv_dtype, out_dtype) in DTYPES {
        let shape = Shape { q_dtype, kv_dtype, out_dtype, lengths: vec![(1, 45), (40, 53)], ..varlen() };
        Batch::new(shape).check(Isa::portable_pairs(), &SingleThread);
    }
}

#[test]
fn values_may_have_a_head_dim_of_their_own() {
    for (d, dv) in [(64, 128), (192, 128), (8, 256), (72, 24), (16, 8)] {
        for storage in [Storage::Contiguous, Storage::Paged(5, 0)] {
            check(Shape { storage, ..varlen() }.head_dims(d, dv));
            check(Shape { storage, ..varlen() }.of(DType::BF16).head_dims(d, dv));
        }
    }
}

#[test]
fn windows_on_both_sides_agree_with_the_definition() {
    let lengths = vec![(1, 200), (150, 150), (70, 200), (100, 30), (9, 3), (30, 0)];
    for window in [(-1, 0), (-1, 5), (5, -1), (0, 0), (20, 3), (0, 40), (130, 130), (i64::MAX, i64::MAX)] {
        for top_left in [false, true] {
            check(Shape { window, top_left, lengths: lengths.clone(), ..varlen() });
            check(Shape { window, top_left, lengths: lengths.clone(), leftpad: true, ..varlen() });
        }
    }
}

#[test]
fn biases_caps_sinks_and_scales_agree_with_the_definition() {
    for alibi in [None, Some(false), Some(true)] {
        for (softcap, sinks, scales) in
            [(0.0, false, None), (2.0, true, Some(true)), (0.0, true, Some(false)), (1.5, false, None)]
        {
            for top_left in [false, true] {
                check(Shape { top_left, softcap, alibi, sinks, scales, ..varlen() });
                check(Shape { top_left, softcap, alibi, sinks, scales, window: (40, 0), ..varlen() });
            }
        }
    }
}

#[test]
fn slots_may_be_longer_than_what_is_used_of_them() {
    for storage in [Storage::Contiguous, Storage::Paged(4, 3)] {
        for sinks in [false, true] {
            check(Shape { storage, seqused_q: true, sinks, leftpad: true, rows_around: (5, 70), ..varlen() });
        }
    }
}

#[test]
fn any_combination_of_options_agrees_with_the_definition() {
    let mut random = Random(7);
    for seed in 0..80 {
        let (q_dtype, kv_dtype, out_dtype) = random.one_of(&DTYPES);
        let kv_heads = 1 + random.below(3);
        let storage = random.one_of(&STORAGES);
        let some_window = |random: &mut Random| [-1, 0, random.below(60) as i64][random.below(3)];
        let flag = |random: &mut Random| random.below(2) == 1;
        let maybe = |random: &mut Random| [None, Some(false), Some(true)][random.below(3)];
        let lengths = (0..=random.below(4))
            .map(|_| match random.below(3) {
                0 => (1, random.below(500)),
                1 => (random.below(12), random.below(200)),
                _ => (random.below(150), random.below(200)),
            })
            .collect();
        let shape = Shape {
            q_dtype,
            kv_dtype,
            out_dtype,
            q_heads: kv_heads * (1 + random.below(6)),
            kv_heads,
            storage,
            window: (some_window(&mut random), some_window(&mut random)),
            top_left: flag(&mut random),
            softcap: random.one_of(&[0.0, 2.5]),
            alibi: maybe(&mut random),
            sinks: flag(&mut random),
            scales: maybe(&mut random),
            leftpad: flag(&mut random),
            seqused_q: flag(&mut random),
            seqused_k: flag(&mut random),
            lengths,
            rows_around: (random.below(5), random.below(70)),
            seed,
            ..Shape::varlen()
        };
        let d = 8 * (1 + random.below(10));
        let own_dv = matches!(storage, Storage::Contiguous | Storage::Paged(_, 0));
        check(shape.head_dims(d, if own_dv { 8 * (1 + random.below(10)) } else { d }));
    }
}
