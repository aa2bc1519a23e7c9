//! Many calls with changing shapes: what the library keeps does not grow.

#![cfg(target_os = "linux")]
#![allow(clippy::unwrap_used, reason = "a failed step is a failed test")]

use std::fs;
use xla_attention::{Action, Attribute, Call, DType, Op, RayonPool, Tensor, call};

const CALLS: usize = 100_000;
const MOST_ROWS: usize = 12;
const MOST_SEQS: usize = 4;
const PAGES: usize = 16;
const PAGE_SIZE: usize = 8;

/// Bytes of this process that are in memory.
fn resident() -> usize {
    let pages = fs::read_to_string("/proc/self/statm").unwrap();
    pages.split_whitespace().nth(1).unwrap().parse::<usize>().unwrap() * 4096
}

/// Numbers that look random, the same in every run.
struct Numbers(u64);

impl Numbers {
    fn below(&mut self, end: usize) -> usize {
        self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (self.0 >> 33) as usize % end
    }
}

/// The memory of all calls; each uses the beginnings.
struct Memory {
    query: Vec<f32>,
    cache: Vec<f32>,
    out: Vec<f32>,
}

impl Memory {
    /// A call of `paged_attention` with shapes of its own, and some that are wrong.
    fn call(&mut self, numbers: &mut Numbers) -> bool {
        let (kv_heads, group, d) = (1 + numbers.below(2), 1 + numbers.below(3), 8 * (1 + numbers.below(8)));
        let (rows, seqs) = (1 + numbers.below(MOST_ROWS), 1 + numbers.below(MOST_SEQS));
        let num_seqs = [seqs as i32];
        let heads = kv_heads * group;
        let lens: Vec<i32> = (0..seqs).map(|_| numbers.below(4 * PAGE_SIZE) as i32).collect();
        let table: Vec<i32> = (0..4 * seqs).map(|_| numbers.below(PAGES) as i32).collect();
        let starts: Vec<i32> = (0..=seqs).map(|i| (i * rows / seqs) as i32).collect();
        let wrong = numbers.below(10) == 0;
        let [r, s, h, k, dim] = [rows, seqs, heads, kv_heads, d].map(|n| n as i64);
        let q_dims = [r, h, if wrong { dim + 8 } else { dim }];
        let (cache_dims, out_dims) = ([PAGES as i64, PAGE_SIZE as i64, 2 * k, dim], [r, h, dim]);
        let (lens_dims, table_dims, starts_dims) = ([s], [s, 4], [s + 1]);
        let view = |dtype, data: *mut u8, dims| Tensor::dense(dtype, data, dims);
        let operands = [
            view(DType::F32, self.query.as_mut_ptr().cast(), &q_dims),
            view(DType::F32, self.cache.as_mut_ptr().cast(), &cache_dims),
            view(DType::I32, lens.as_ptr().cast_mut().cast(), &lens_dims),
            view(DType::I32, table.as_ptr().cast_mut().cast(), &table_dims),
            view(DType::I32, starts.as_ptr().cast_mut().cast(), &starts_dims),
            view(DType::I32, num_seqs.as_ptr().cast_mut().cast(), &[1]),
        ];
        let results = [view(DType::F32, self.out.as_mut_ptr().cast(), &out_dims)];
        let attributes = [Attribute::Bool(false), Attribute::F32(0.1), Attribute::I64(-1), Attribute::F32(0.0)];
        let (operands, results, attributes) = (&operands, &results, &attributes);
        let action = Action::RunOnCpu(&RayonPool);
        // SAFETY: the memory is as large as the largest shapes, and only this thread uses it.
        let outcome = unsafe { call(&Call { op: Op::PagedAttention, action, operands, results, attributes }) };
        assert_eq!(outcome.is_err(), wrong, "{outcome:?}");
        wrong
    }
}

#[test]
fn memory_stays_flat_over_100_000_calls_on_the_cpu() {
    let most_heads = 6;
    let mut memory = Memory {
        query: vec![0.5; MOST_ROWS * most_heads * 80],
        cache: vec![0.25; PAGES * PAGE_SIZE * 4 * 64],
        out: vec![0.0; MOST_ROWS * most_heads * 64],
    };
    let mut numbers = Numbers(1);
    for _ in 0..CALLS / 10 {
        memory.call(&mut numbers);
    }
    let before = resident();
    let refused = (0..CALLS).filter(|_| memory.call(&mut numbers)).count();
    let grown = resident().saturating_sub(before);
    assert!(refused > CALLS / 20, "{refused} calls were wrong");
    // One byte a call would be 100 KB; the allocator itself moves by some pages.
    assert!(grown < 2 << 20, "{CALLS} calls left {grown} bytes behind");
}
