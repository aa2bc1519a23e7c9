//! A call of the conformance tables without memory, and its mutations.

use crate::support::conformance::{ConformanceCase, Typed};
use crate::support::{Attr, BF16, Dtype, F8E4M3FN, F16, F32, F64, I32, I64, PRED, Random, U8};

/// The dtype, shape and strides of a buffer.
#[derive(Clone, Debug)]
pub(crate) struct BufferSpec {
    pub(crate) name: &'static str,
    pub(crate) dtype: Dtype,
    pub(crate) dims: Vec<i64>,
    /// (axis modulo the rank, stride) where the stride is not that of a dense buffer.
    strides: Vec<(usize, i64)>,
}

impl BufferSpec {
    fn new((name, typed): &(&'static str, Typed)) -> Self {
        Self { name, dtype: typed.dtype, dims: typed.dims.clone(), strides: Vec::new() }
    }

    /// `None` for a dense buffer and for a scalar.
    pub(crate) fn strides(&self) -> Option<Vec<i64>> {
        let rank = self.dims.len();
        let dense = |axis: usize| self.dims[axis + 1..].iter().fold(1i64, |n, &d| n.wrapping_mul(d));
        let mut strides: Vec<i64> = (0..rank).map(dense).collect();
        for &(axis, stride) in &self.strides {
            *strides.get_mut(axis % rank.max(1))? = stride;
        }
        (!self.strides.is_empty()).then_some(strides)
    }

    /// Number of elements; `None` on overflow.
    pub(crate) fn elements(&self) -> Option<i64> {
        self.dims.iter().try_fold(1i64, |n, &d| n.checked_mul(d))
    }
}

/// A call without memory.
#[derive(Clone, Debug)]
pub(crate) struct MutatedCall {
    pub(crate) target: &'static str,
    pub(crate) operands: Vec<BufferSpec>,
    pub(crate) results: Vec<BufferSpec>,
    pub(crate) attributes: Vec<(&'static str, Attr)>,
}

impl MutatedCall {
    pub(crate) fn new(case: &ConformanceCase) -> Self {
        Self {
            target: case.target,
            operands: case.operands.iter().map(BufferSpec::new).collect(),
            results: case.results.iter().map(BufferSpec::new).collect(),
            attributes: case.attributes.clone(),
        }
    }

    fn buffers(&mut self) -> impl Iterator<Item = &mut BufferSpec> {
        self.operands.iter_mut().chain(&mut self.results)
    }

    /// Operands or results.
    fn list(&mut self, random: &mut Random) -> &mut Vec<BufferSpec> {
        if random.chance(50) { &mut self.results } else { &mut self.operands }
    }

    fn buffer(&mut self, random: &mut Random) -> Option<&mut BufferSpec> {
        any(self.list(random), random)
    }

    /// Applies one random mutation; `None` if the call has nothing to which it applies.
    pub(crate) fn mutate(&mut self, random: &mut Random) -> Option<()> {
        match random.below(37) {
            // Another size in place of all equal ones, which often gives a valid call.
            0..16 => {
                let (old, new) = (*any(&mut any(&mut self.operands, random)?.dims, random)?, size(random));
                self.buffers().flat_map(|b| &mut b.dims).filter(|d| **d == old).for_each(|d| *d = new);
            }
            // One size of one buffer.
            16..19 => *any(&mut self.buffer(random)?.dims, random)? = size(random),
            // Another dtype in place of all equal ones.
            19..22 => {
                let (old, new) = (any(&mut self.operands, random)?.dtype, dtype(random));
                self.buffers().filter(|b| b.dtype == old).for_each(|b| b.dtype = new);
            }
            // The dtype of one buffer.
            22 => self.buffer(random)?.dtype = dtype(random),
            // Another value of an attribute, often of another type.
            23..27 => any(&mut self.attributes, random)?.1 = value(random),
            // An optional or required buffer left out.
            27 | 28 => self.buffer(random)?.dims = vec![0],
            // The stride of one dimension of one buffer, which XLA cannot express.
            29 => self.buffer(random)?.strides.push((random.below(8), size(random))),
            // An additional dimension.
            30 => {
                let dims = &mut self.buffer(random)?.dims;
                dims.insert(random.below(dims.len() + 1), size(random));
            }
            // A dimension less.
            31 => drop(remove(&mut self.buffer(random)?.dims, random)),
            // A shorter list of buffers.
            32 => {
                let list = self.list(random);
                list.truncate(random.below(list.len() + 1));
            }
            // A longer list of buffers.
            33 => {
                let list = self.list(random);
                let copy = any(list, random)?.clone();
                list.push(copy);
            }
            // Two buffers exchanged.
            34 => {
                let list = self.list(random);
                let [a, b] = [(); 2].map(|()| random.below(list.len().max(1)));
                list.get(a.max(b))?;
                list.swap(a, b);
            }
            // An attribute less.
            35 => drop(remove(&mut self.attributes, random)),
            // An attribute with another name.
            _ => {
                any(&mut self.attributes, random)?.0 = random.one_of(&["aardvark", "scale", "softmax_scale", "zebra"]);
            }
        }
        Some(())
    }
}

fn any<'a, T>(list: &'a mut [T], random: &mut Random) -> Option<&'a mut T> {
    let count = list.len();
    if count == 0 { None } else { list.get_mut(random.below(count)) }
}

fn remove<T>(list: &mut Vec<T>, random: &mut Random) -> Option<T> {
    if list.is_empty() { None } else { Some(list.remove(random.below(list.len()))) }
}

/// Typical sizes of pages, heads and tiles, their neighbours, and sizes that overflow.
fn size(random: &mut Random) -> i64 {
    match random.below(10) {
        0..6 => random.below(10) as i64,
        6..9 => random.one_of(&[15, 16, 17, 31, 32, 33, 64, 127, 128, 129, 192, 255, 256, 257]),
        _ => {
            let beyond = [-1, i64::MIN, i64::MAX, 1 << 31, 1 << 32, (1 << 32) + 1, 1 << 40];
            random.one_of(&[&beyond[..], &[i64::MAX / 2, i64::MAX / 4 + 1]].concat())
        }
    }
}

fn dtype(random: &mut Random) -> Dtype {
    if random.below(9) == 8 {
        return Dtype(random.below(256) as i32);
    }
    random.one_of(&[PRED, U8, I32, I64, F16, BF16, F32, F64, F8E4M3FN])
}

fn value(random: &mut Random) -> Attr {
    let limits = [0.0, -0.0, 1.0, f32::NAN, f32::INFINITY, f32::NEG_INFINITY, f32::MAX, f32::MIN_POSITIVE, 1e-45];
    match random.below(14) {
        0..4 => {
            let choices = [-1, random.below(10) as i64, random.one_of(&[i64::MIN, i64::MAX, 1 << 31, 1 << 32])];
            Attr::I64(random.one_of(&choices))
        }
        4 | 5 => Attr::F32(random.one_of(&limits)),
        6 | 7 => Attr::F32(f32::from_bits((random.below(1 << 16) << 16 | random.below(1 << 16)) as u32)),
        8 | 9 => Attr::Bool(random.chance(50)),
        10 => Attr::I32(random.hostile_i32()),
        11 => Attr::F64(f64::from_bits(random.next())),
        12 => Attr::I64s(vec![1, 2]),
        _ => Attr::Text("a".to_owned()),
    }
}
