//! Every instruction set of this CPU gives the same gradients, and any number of threads the same bits.

use super::run_with;
use crate::cpu::simd::Isa;
use crate::ops::Op;
use crate::ops::flash_attn_varlen_bwd::FlashAttnVarlenBwd;
use crate::ops::{Attribute, Bound};
use crate::pool::{Pool, RayonPool, SingleThread};
use crate::tensor::{DType, Tensor};
use half::bf16;

/// Rows, keys, query heads, KV heads, D, Dv.
type Sizes = [usize; 6];

/// A call whose lse is larger than any score, and whose numbers are otherwise arbitrary.
struct Operands {
    dtype: DType,
    sizes: Sizes,
    starts: [Vec<i32>; 2],
    /// dout, q, k, v, out
    rows: [Vec<f32>; 5],
    /// lse, dlse
    per_row: [Vec<f32>; 2],
    /// slopes, sinks
    per_head: [Vec<f32>; 2],
    attributes: [Attribute; 9],
}

/// Pools that claim more threads than tasks need, and fewer.
struct Claiming(usize);

// SAFETY: rayon's pool keeps the promise.
unsafe impl Pool for Claiming {
    fn num_threads(&self) -> usize {
        self.0
    }
    fn schedule(&self, task: fn(usize), argument: usize) {
        RayonPool.schedule(task, argument);
    }
}

impl Operands {
    fn new(dtype: DType, sizes: Sizes, lengths: &[(usize, usize)], softcap: f32, window: [i64; 2]) -> Self {
        let mut state = 1u64;
        let mut random = |count: usize| -> Vec<f32> {
            let mut number = || {
                state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
                bf16::from_f32((state >> 40) as f32 / (1u64 << 23) as f32 - 1.0).to_f32()
            };
            (0..count).map(|_| number()).collect()
        };
        let [rows, keys, heads, kv_heads, d, dv] = sizes;
        let ends = |of: fn(&(usize, usize)) -> usize| {
            let ends = lengths.iter().scan(0, |end, lengths| {
                *end += of(lengths) as i32;
                Some(*end)
            });
            [0].into_iter().chain(ends).collect()
        };
        let counts =
            [rows * heads * dv, rows * heads * d, keys * kv_heads * d, keys * kv_heads * dv, rows * heads * dv];
        Self {
            dtype,
            sizes,
            starts: [ends(|l| l.0), ends(|l| l.1)],
            rows: counts.map(&mut random),
            per_row: [random(rows * heads).iter().map(|x| x + 3.0).collect(), random(rows * heads)],
            per_head: [random(heads).iter().map(|x| 0.05 * x).collect(), random(heads)],
            attributes: [
                Attribute::Bool(false),
                Attribute::Bool(false),
                Attribute::I64(0),
                Attribute::I64(0),
                Attribute::F32(softcap),
                Attribute::F32(0.2),
                Attribute::Bool(false),
                Attribute::I64(window[0]),
                Attribute::I64(window[1]),
            ],
        }
    }

    /// dq, dk, dv and dsinks one after the other.
    fn gradients(&self, isa: Isa, pool: &dyn Pool) -> Vec<f32> {
        let [rows, keys, heads, kv_heads, d, dv] = self.sizes.map(|x| x as i64);
        let (wide, narrow) = ([rows, heads, dv], [rows, heads, d]);
        let (key_dims, value_dims, lse_dims) = ([keys, kv_heads, d], [keys, kv_heads, dv], [heads, rows]);
        let starts_dims = [self.starts[0].len() as i64];
        let size = self.dtype.size();
        let stored = |values: &Vec<f32>| -> Vec<u8> {
            let bytes = |x: &f32| match self.dtype {
                DType::BF16 => bf16::from_f32(*x).to_ne_bytes().to_vec(),
                _ => x.to_ne_bytes().to_vec(),
            };
            values.iter().flat_map(bytes).collect()
        };
        let mut data = self.rows.each_ref().map(stored);
        let dims = [&wide, &narrow, &key_dims, &value_dims, &wide];
        let mut operands = Vec::new();
        for (data, dims) in data.iter_mut().zip(dims) {
            operands.push(Tensor::dense(self.dtype, data.as_mut_ptr(), dims));
        }
        operands.push(of_f32(&self.per_row[0], &lse_dims));
        for starts in &self.starts {
            operands.push(Tensor::dense(DType::I32, starts.as_ptr().cast_mut().cast(), &starts_dims));
        }
        operands.extend([Tensor::ABSENT; 3]);
        operands.extend(self.per_head.iter().map(|values| of_f32(values, &lse_dims[..1])));
        operands.push(of_f32(&self.per_row[1], &lse_dims));
        let mut found =
            [&narrow, &key_dims, &value_dims].map(|d| vec![0xffu8; d.iter().product::<i64>() as usize * size]);
        let dsinks = vec![f32::NAN; heads as usize];
        let mut results = Vec::new();
        for (data, dims) in found.iter_mut().zip([&narrow, &key_dims, &value_dims]) {
            results.push(Tensor::dense(self.dtype, data.as_mut_ptr(), dims));
        }
        results.push(of_f32(&dsinks, &lse_dims[..1]));
        let bound =
            Bound::new(Op::FlashAttnVarlenBwd.signature(), &operands, &results, &self.attributes, true).unwrap();
        let problem = FlashAttnVarlenBwd::new(&bound).unwrap();
        // SAFETY: the vectors above.
        unsafe { run_with(isa.with_single_words(), &problem, pool) }.unwrap();
        let number = |bytes: &[u8]| match self.dtype {
            DType::BF16 => bf16::from_ne_bytes([bytes[0], bytes[1]]).to_f32(),
            _ => f32::from_ne_bytes([bytes[0], bytes[1], bytes[2], bytes[3]]),
        };
        let found = found.iter().flat_map(|data| data.chunks_exact(size).map(number));
        found.chain(dsinks.iter().copied()).collect()
    }
}

fn of_f32<'a>(values: &[f32], dims: &'a [i64]) -> Tensor<'a> {
    Tensor::dense(DType::F32, values.as_ptr().cast_mut().cast(), dims)
}

fn calls() -> Vec<Operands> {
    let lengths = [(37, 53), (1, 20), (150, 290), (9, 4)];
    let (rows, keys) = (197 + 3, 367 + 5);
    let mut calls = Vec::new();
    for dtype in [DType::F32, DType::BF16] {
        for (heads, kv_heads, d, dv) in [(4, 2, 24, 40), (3, 1, 128, 64), (1, 1, 8, 256)] {
            for (softcap, window) in [(0.0, [-1, -1]), (0.0, [-1, 0]), (1.5, [70, 9])] {
                let sizes = [rows, keys, heads, kv_heads, d, dv];
                calls.push(Operands::new(dtype, sizes, &lengths, softcap, window));
            }
        }
    }
    calls
}

#[test]
fn every_instruction_set_gives_the_same_gradients() {
    for call in calls() {
        let [expected, others] = [0, 1].map(|first| {
            let isas = Isa::available().into_iter().skip(first).take(if first == 0 { 1 } else { usize::MAX });
            isas.map(|isa| (isa, call.gradients(isa, &SingleThread))).collect::<Vec<_>>()
        });
        let expected = &expected[0].1;
        let largest = expected.iter().fold(0.0f32, |m, x| m.max(x.abs()));
        assert!(largest.is_finite() && largest > 0.01, "{:?}", call.sizes);
        // Neighbouring numbers of the results' type.
        let most = largest * if call.dtype == DType::BF16 { 1.0 / 128.0 } else { 2e-5 };
        for (isa, found) in others {
            let off = found.iter().zip(expected).map(|(a, b)| (a - b).abs());
            let off = off.fold(0.0f32, |m, x| if x.is_nan() { f32::INFINITY } else { m.max(x) });
            assert!(off <= most, "{isa:?}, {:?}: off by {off}, allowed {most}", call.sizes);
        }
    }
}

#[test]
fn items_that_are_cut_give_the_bits_of_whole_ones() {
    for (call, isa) in calls().iter().flat_map(|call| Isa::available().into_iter().map(move |isa| (call, isa))) {
        let whole = call.gradients(isa, &SingleThread);
        for threads in [0, 2, 3, 64] {
            assert!(call.gradients(isa, &Claiming(threads)) == whole, "{isa:?}, {:?}, {threads}", call.sizes);
        }
    }
}
