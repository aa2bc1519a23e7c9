//! `xla_gpu_simple_add` on the CPU, through its XLA FFI handlers.

#![allow(clippy::float_cmp, reason = "sums are exact or rounded as said")]

use crate::support::array::{Array, BF16, Dtype, F16, F32, F64, I8, I32, I64, U8, count};
use crate::support::guard::{Side, for_both_sides};
use crate::support::invocation::Invocation;
use crate::support::machine::runs_on_cpu;
use crate::support::pools::{HostPool, Inline, Late, NoPool, Threads};
use crate::support::random::Random;
use crate::support::sums::{assert_same, sum};

const FLOATS: [Dtype; 4] = [F16, BF16, F32, F64];
const INTEGERS: [Dtype; 4] = [I8, U8, I32, I64];

/// Every element any bit pattern, so that integers overflow and floats are NaN, infinite and subnormal now and then.
fn any_bits(dtype: Dtype, dims: &[i64], seed: u64) -> Array {
    let mut random = Random::new(seed);
    let bytes = (0..count(dims) * dtype.size()).map(|_| random.next() as u8).collect();
    Array { dtype, dims: dims.to_vec(), bytes }
}

fn call(a: &Array, b: &Array) -> Invocation {
    let mut call = Invocation::new("xla_gpu_simple_add")
        .operand("a", a.clone())
        .operand("b", b.clone())
        .result("out", a.dtype, &a.dims);
    call.what = format!("{:?} {:?}", a.dtype, a.dims);
    call
}

fn adds(a: &Array, b: &Array, pool: &dyn HostPool) {
    for_both_sides(|side| assert_same("out", &call(a, b).run(side, pool).unwrap()[0], &sum(a, b)));
}

#[test]
fn every_dtype_is_added_element_by_element() {
    for dtype in FLOATS.into_iter().chain(INTEGERS) {
        for dims in [vec![1], vec![7], vec![3, 5], vec![4099]] {
            adds(&any_bits(dtype, &dims, 1), &any_bits(dtype, &dims, 2), &Inline(4));
        }
    }
}

#[test]
fn integers_wrap_and_floats_round_to_nearest_even() {
    let one = |dtype: Dtype, value: f64| Array::new(dtype, &[1], &[value]);
    let add = |dtype, a, b| call(&one(dtype, a), &one(dtype, b)).results(Side::EndsAtGuard)[0].values()[0];
    assert_eq!(add(I8, 127.0, 1.0), -128.0);
    assert_eq!(add(U8, 255.0, 2.0), 1.0);
    assert_eq!(add(I32, 2_147_483_647.0, 1.0), -2_147_483_648.0);
    // 2^11 and 2^8 are the first integers after which odd ones are lost; ties go to the even mantissa.
    assert_eq!(add(F16, 2048.0, 1.0), 2048.0);
    assert_eq!(add(F16, 2048.0, 3.0), 2052.0);
    assert_eq!(add(BF16, 256.0, 1.0), 256.0);
    assert_eq!(add(BF16, 256.0, 3.0), 260.0);
    assert!(add(F16, 65504.0, 65504.0).is_infinite());
}

#[test]
fn every_rank_and_empty_arrays_are_fine() {
    let shapes: [&[i64]; 11] = [
        &[],
        &[1],
        &[2],
        &[2, 3],
        &[2, 1, 3],
        &[2, 1, 3, 2],
        &[2, 1, 3, 2, 2],
        &[0],
        &[0, 3],
        &[3, 0],
        &[2, 0, 3, 1, 4],
    ];
    for dtype in [F32, F16, I64] {
        for dims in shapes {
            adds(&any_bits(dtype, dims, 3), &any_bits(dtype, dims, 4), &Inline(4));
        }
    }
}

#[test]
fn a_large_array_is_added_the_same_by_every_pool() {
    let (a, b) = (any_bits(F32, &[3, 70_001], 5), any_bits(F32, &[3, 70_001], 6));
    let late = Late::default();
    let pools: [&dyn HostPool; 5] = [&Inline(1), &Inline(16), &Threads::new(3), &late, &NoPool];
    for pool in pools {
        adds(&a, &b, pool);
    }
    // The tasks that arrive after the operands are gone find nothing left to do. A GPU uses no pool.
    assert!(late.run_all() > 0 || !runs_on_cpu(), "the pool was not used");
}

#[test]
fn the_result_may_be_the_memory_of_an_operand() {
    for dtype in [F32, BF16, I8] {
        let (a, b) = (any_bits(dtype, &[1003], 7), any_bits(dtype, &[1003], 8));
        for operand in [0, 1] {
            let in_place = Invocation::new("xla_gpu_simple_add")
                .operand("a", a.clone())
                .operand("b", b.clone())
                .result_in_place("out", operand);
            for_both_sides(|side| assert_same("out", &in_place.results(side)[0], &sum(&a, &b)));
        }
    }
}

#[test]
fn an_array_can_be_added_to_itself_in_one_buffer() {
    use crate::support::frame::{Buffer, CPU, Frame};
    let a = any_bits(I32, &[77], 9);
    let buffer = Buffer::place("a, b and out", Side::EndsAtGuard, &a);
    Frame::new("xla_gpu_simple_add", CPU).operand(&buffer).operand(&buffer).result(&buffer).run().unwrap();
    assert_eq!(buffer.memory.bytes(), sum(&a, &a).bytes);
}

#[test]
fn the_alias_is_the_same_operator() {
    let (a, b) = (any_bits(F64, &[2, 9], 10), any_bits(F64, &[2, 9], 11));
    let alias = Invocation { target: "XlaGpuSimpleAdd", ..call(&a, &b) };
    assert_same("out", &alias.results(Side::BeginsAtGuard)[0], &sum(&a, &b));
    let (a, b) = (any_bits(F32, &[2], 0), any_bits(F32, &[3], 0));
    let alias = Invocation { target: "XlaGpuSimpleAdd", ..call(&a, &b) };
    assert_eq!(alias.refusal().text, "xla_gpu_simple_add: b has shape [3], expected the shape of a, [2]");
}
