//! `xla_gpu_simple_add` on the CPU, through its XLA FFI handlers.

#![allow(clippy::float_cmp, reason = "sums are exact or rounded as expected")]

use crate::support::{
    Array, BF16, CPU, DeferredPool, Dtype, F16, F32, F64, Frame, GuardedBuffer, HostPool, I8, I32, I64, InlinePool,
    Invocation, Side, U8, addition, any_bits, assert_same, for_each_pool, for_each_side, runs_on_cpu, sum,
};

const FLOATS: [Dtype; 4] = [F16, BF16, F32, F64];
const INTEGERS: [Dtype; 4] = [I8, U8, I32, I64];

fn call(a: &Array, b: &Array) -> Invocation {
    addition(a.clone(), b.clone())
}

fn adds(a: &Array, b: &Array, pool: &dyn HostPool) {
    for_each_side(|side| assert_same("out", &call(a, b).run(side, pool).unwrap()[0], &sum(a, b)));
}

#[test]
fn every_dtype_is_added_element_by_element() {
    for dtype in FLOATS.into_iter().chain(INTEGERS) {
        for dims in [vec![], vec![1], vec![7], vec![3, 5], vec![2, 1, 3, 2, 2], vec![4099]] {
            adds(&any_bits(dtype, &dims, 1), &any_bits(dtype, &dims, 2), &InlinePool(4));
        }
    }
}

#[test]
fn integers_wrap_and_floats_round_to_nearest_even() {
    let scalar = |dtype: Dtype, value: f64| Array::new(dtype, &[1], &[value]);
    let add = |dtype, a, b| call(&scalar(dtype, a), &scalar(dtype, b)).results(Side::EndsAtGuard)[0].values()[0];
    assert_eq!(add(I8, 127.0, 1.0), -128.0);
    assert_eq!(add(U8, 255.0, 2.0), 1.0);
    assert_eq!(add(I32, 2_147_483_647.0, 1.0), -2_147_483_648.0);
    // 2^11 and 2^8 are the first integers after which odd integers are not representable. Ties round to even mantissas.
    assert_eq!(add(F16, 2048.0, 1.0), 2048.0);
    assert_eq!(add(F16, 2048.0, 3.0), 2052.0);
    assert_eq!(add(BF16, 256.0, 1.0), 256.0);
    assert_eq!(add(BF16, 256.0, 3.0), 260.0);
    assert!(add(F16, 65504.0, 65504.0).is_infinite());
}

#[test]
fn a_large_array_is_added_the_same_by_every_pool() {
    let (a, b) = (any_bits(F32, &[3, 70_001], 5), any_bits(F32, &[3, 70_001], 6));
    for_each_pool(|pool| adds(&a, &b, pool));
    let late = DeferredPool::default();
    adds(&a, &b, &late);
    // Tasks that start after the operands are freed have nothing to do. A GPU uses no pool.
    assert!(late.run_all() > 0 || !runs_on_cpu(), "the pool was not used");
}

#[test]
fn the_result_may_be_the_memory_of_an_operand() {
    for dtype in [F32, BF16, I8] {
        let (a, b) = (any_bits(dtype, &[1003], 7), any_bits(dtype, &[1003], 8));
        for operand in [0, 1] {
            let mut in_place = call(&a, &b);
            in_place.results[0].alias = Some(operand);
            for_each_side(|side| assert_same("out", &in_place.results(side)[0], &sum(&a, &b)));
        }
    }
}

#[test]
fn an_array_can_be_added_to_itself_in_one_buffer() {
    let a = any_bits(I32, &[77], 9);
    let memory = GuardedBuffer::new("a, b and out", Side::EndsAtGuard, &a.bytes);
    let frame = Frame::new("xla_gpu_simple_add", CPU);
    // SAFETY: the memory holds an array of this dtype and shape.
    let frame = unsafe { frame.operand(I32, &a.dims, memory.data()).operand(I32, &a.dims, memory.data()) };
    // SAFETY: as for the operands.
    unsafe { frame.result(I32, &a.dims, memory.data()) }.run().unwrap();
    assert_eq!(memory.bytes(), sum(&a, &a).bytes);
}
