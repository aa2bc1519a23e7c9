//! A call as the tables know it, and the ways in which it can be damaged.

use crate::support::array::Dtype;
use crate::support::conformance::{Case, Typed};
use crate::support::invocation::Attr;

/// A buffer without memory.
#[derive(Clone, Debug)]
pub(crate) struct Sizes {
    pub(crate) name: &'static str,
    pub(crate) dtype: Dtype,
    pub(crate) dims: Vec<i64>,
    /// Axes, modulo the rank, whose stride is not that of a dense buffer.
    strides: Vec<(usize, i64)>,
}

impl Sizes {
    fn new((name, typed): &(&'static str, Typed)) -> Self {
        Self { name, dtype: typed.dtype, dims: typed.dims.clone(), strides: Vec::new() }
    }

    /// `None` for a dense buffer, as every scalar is.
    pub(crate) fn strides(&self) -> Option<Vec<i64>> {
        let rank = self.dims.len();
        let dense = |axis: usize| self.dims[axis + 1..].iter().fold(1i64, |n, &d| n.wrapping_mul(d));
        let mut strides: Vec<i64> = (0..rank).map(dense).collect();
        for &(axis, stride) in &self.strides {
            *pick(&mut strides, axis)? = stride;
        }
        (!self.strides.is_empty()).then_some(strides)
    }

    /// At most this many elements, or `None` if there are more than can be counted.
    pub(crate) fn elements(&self) -> Option<i64> {
        self.dims.iter().try_fold(1i64, |n, &d| n.checked_mul(d))
    }
}

/// A call without memory.
#[derive(Clone, Debug)]
pub(crate) struct Plan {
    pub(crate) target: &'static str,
    pub(crate) operands: Vec<Sizes>,
    pub(crate) results: Vec<Sizes>,
    pub(crate) attributes: Vec<(&'static str, Attr)>,
}

impl Plan {
    pub(crate) fn new(case: &Case) -> Self {
        Self {
            target: case.target,
            operands: case.operands.iter().map(Sizes::new).collect(),
            results: case.results.iter().map(Sizes::new).collect(),
            attributes: case.attributes.clone(),
        }
    }

    fn buffers(&mut self) -> impl Iterator<Item = &mut Sizes> {
        self.operands.iter_mut().chain(&mut self.results)
    }

    fn list(&mut self, side: Side) -> &mut Vec<Sizes> {
        match side {
            Side::Operands => &mut self.operands,
            Side::Results => &mut self.results,
        }
    }
}

#[derive(Clone, Copy, Debug)]
pub(crate) enum Side {
    Operands,
    Results,
}

/// One way to damage a call; without anything to damage it does nothing. A number without a name is the index of a buffer, then
/// that of a dimension, modulo how many there are.
#[derive(Clone, Debug)]
pub(crate) enum Mutation {
    /// One size of one buffer.
    Size(Side, usize, usize, i64),
    /// A size wherever it occurs, which often leaves the call a right one.
    Resize(usize, usize, i64),
    /// The stride of one dimension of one buffer, which XLA has no way to pass.
    Stride(Side, usize, usize, i64),
    /// One dimension more.
    Insert(Side, usize, usize, i64),
    /// One dimension less.
    Remove(Side, usize, usize),
    /// The element type of one buffer.
    Dtype(Side, usize, Dtype),
    /// An element type wherever it occurs.
    Retype(usize, Dtype),
    /// An optional buffer left out, or a required one.
    LeaveOut(Side, usize),
    /// The list ends early.
    Truncate(Side, usize),
    /// The list goes on.
    Append(Side, usize),
    /// Two buffers in each other's place.
    Swap(Side, usize, usize),
    /// Another value, often of another type.
    Attribute(usize, Attr),
    /// An attribute less.
    Forget(usize),
    /// An attribute under another name.
    Rename(usize, &'static str),
}

impl Mutation {
    pub(crate) fn damage(self, plan: &mut Plan) {
        match self {
            Self::Size(side, buffer, axis, size) => {
                let dims = pick(plan.list(side), buffer).map(|b| &mut b.dims);
                if let Some(old) = dims.and_then(|dims| pick(dims, axis)) {
                    *old = size;
                }
            }
            Self::Resize(buffer, axis, size) => {
                let old = pick(&mut plan.operands, buffer).and_then(|b| pick(&mut b.dims, axis)).map(|d| *d);
                for dim in plan.buffers().flat_map(|b| &mut b.dims).filter(|d| Some(**d) == old) {
                    *dim = size;
                }
            }
            Self::Stride(side, buffer, axis, stride) => {
                if let Some(buffer) = pick(plan.list(side), buffer) {
                    buffer.strides.push((axis, stride));
                }
            }
            Self::Insert(side, buffer, axis, size) => {
                if let Some(dims) = pick(plan.list(side), buffer).map(|b| &mut b.dims) {
                    dims.insert(axis % (dims.len() + 1), size);
                }
            }
            Self::Remove(side, buffer, axis) => {
                if let Some(dims) = pick(plan.list(side), buffer).map(|b| &mut b.dims).filter(|d| !d.is_empty()) {
                    dims.remove(axis % dims.len());
                }
            }
            Self::Dtype(side, buffer, dtype) => {
                if let Some(buffer) = pick(plan.list(side), buffer) {
                    buffer.dtype = dtype;
                }
            }
            Self::Retype(buffer, dtype) => {
                let old = pick(&mut plan.operands, buffer).map(|b| b.dtype);
                for buffer in plan.buffers().filter(|b| Some(b.dtype) == old) {
                    buffer.dtype = dtype;
                }
            }
            Self::LeaveOut(side, buffer) => {
                if let Some(buffer) = pick(plan.list(side), buffer) {
                    buffer.dims = vec![0];
                }
            }
            Self::Truncate(side, at) => {
                let list = plan.list(side);
                list.truncate(at % (list.len() + 1));
            }
            Self::Append(side, buffer) => {
                let list = plan.list(side);
                if let Some(copy) = pick(list, buffer).cloned() {
                    list.push(copy);
                }
            }
            Self::Swap(side, a, b) => {
                let list = plan.list(side);
                let count = list.len();
                if count > 0 {
                    list.swap(a % count, b % count);
                }
            }
            Self::Attribute(at, value) => {
                if let Some(attribute) = pick(&mut plan.attributes, at) {
                    attribute.1 = value;
                }
            }
            Self::Forget(at) => {
                if !plan.attributes.is_empty() {
                    plan.attributes.remove(at % plan.attributes.len());
                }
            }
            Self::Rename(at, name) => {
                if let Some(attribute) = pick(&mut plan.attributes, at) {
                    attribute.0 = name;
                }
            }
        }
    }
}

fn pick<T>(list: &mut [T], at: usize) -> Option<&mut T> {
    if list.is_empty() { None } else { Some(&mut list[at % list.len()]) }
}
