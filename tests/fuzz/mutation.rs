//! A call as the tables know it, and the ways in which it can be damaged.

use crate::support::array::{BF16, Dtype, F8E4M3FN, F16, F32, F64, I32, I64, PRED, U8};
use crate::support::invocation::Attr;
use crate::table::{Case, Typed};
use proptest::prelude::*;
use proptest::sample::{Index, select};

/// A buffer without memory.
#[derive(Clone, Debug)]
pub(crate) struct Sizes {
    pub(crate) name: &'static str,
    pub(crate) dtype: Dtype,
    pub(crate) dims: Vec<i64>,
}

impl Sizes {
    fn new((name, typed): &(&'static str, Typed)) -> Self {
        Self { name, dtype: typed.dtype, dims: typed.dims.clone() }
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

/// One way to damage a call; without anything to damage it does nothing.
#[derive(Clone, Debug)]
pub(crate) enum Mutation {
    /// One size of one buffer.
    Size(Side, Index, Index, i64),
    /// A size wherever it occurs, which often leaves the call a right one.
    Resize(Index, Index, i64),
    /// One dimension more.
    Insert(Side, Index, Index, i64),
    /// One dimension less.
    Remove(Side, Index, Index),
    /// The element type of one buffer.
    Dtype(Side, Index, Dtype),
    /// An element type wherever it occurs.
    Retype(Index, Dtype),
    /// An optional buffer left out, or a required one.
    LeaveOut(Side, Index),
    /// The list ends early.
    Truncate(Side, Index),
    /// The list goes on.
    Append(Side, Index),
    /// Two buffers in each other's place.
    Swap(Side, Index, Index),
    /// Another value, often of another type.
    Attribute(Index, Attr),
    /// An attribute less.
    Forget(Index),
    /// An attribute under another name.
    Rename(Index, &'static str),
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
            Self::Insert(side, buffer, axis, size) => {
                if let Some(dims) = pick(plan.list(side), buffer).map(|b| &mut b.dims) {
                    dims.insert(axis.index(dims.len() + 1), size);
                }
            }
            Self::Remove(side, buffer, axis) => {
                if let Some(dims) = pick(plan.list(side), buffer).map(|b| &mut b.dims).filter(|d| !d.is_empty()) {
                    dims.remove(axis.index(dims.len()));
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
                list.truncate(at.index(list.len() + 1));
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
                    list.swap(a.index(count), b.index(count));
                }
            }
            Self::Attribute(at, value) => {
                if let Some(attribute) = pick(&mut plan.attributes, at) {
                    attribute.1 = value;
                }
            }
            Self::Forget(at) => {
                if !plan.attributes.is_empty() {
                    plan.attributes.remove(at.index(plan.attributes.len()));
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

fn pick<T>(list: &mut [T], at: Index) -> Option<&mut T> {
    if list.is_empty() { None } else { Some(&mut list[at.index(list.len())]) }
}

/// What kernels, pages and heads come in, what lies beside it, and what overflows.
fn sizes() -> impl Strategy<Value = i64> {
    prop_oneof![
        6 => 0..10i64,
        3 => select(&[15i64, 16, 17, 31, 32, 33, 64, 127, 128, 129, 192, 255, 256, 257]),
        1 => select(&[-1, i64::MIN, i64::MAX, 1 << 31, 1 << 32, (1 << 32) + 1, 1 << 40, i64::MAX / 2, i64::MAX / 4 + 1]),
    ]
}

fn dtypes() -> impl Strategy<Value = Dtype> {
    let known = select(&[PRED, U8, I32, I64, F16, BF16, F32, F64, F8E4M3FN]);
    prop_oneof![8 => known, 1 => any::<u8>().prop_map(|code| Dtype(code.into()))]
}

fn attributes() -> impl Strategy<Value = Attr> {
    let integers = prop_oneof![Just(-1), 0..10i64, select(&[i64::MIN, i64::MAX, 1 << 31, 1 << 32])];
    let floats = prop_oneof![
        select(&[0.0, -0.0, 1.0, f32::NAN, f32::INFINITY, f32::NEG_INFINITY, f32::MAX, f32::MIN_POSITIVE, 1e-45]),
        any::<f32>(),
    ];
    prop_oneof![
        4 => integers.prop_map(Attr::I64),
        4 => floats.prop_map(Attr::F32),
        2 => any::<bool>().prop_map(Attr::Bool),
        1 => any::<i32>().prop_map(Attr::I32),
        1 => any::<f64>().prop_map(Attr::F64),
        1 => Just(Attr::I64s(vec![1, 2])),
        1 => Just(Attr::Text("a".to_owned())),
    ]
}

pub(crate) fn mutations() -> impl Strategy<Value = Mutation> {
    let side = || select(&[Side::Operands, Side::Results]);
    let index = any::<Index>;
    prop_oneof![
        3 => (side(), index(), index(), sizes()).prop_map(|(s, b, a, d)| Mutation::Size(s, b, a, d)),
        16 => (index(), index(), sizes()).prop_map(|(b, a, d)| Mutation::Resize(b, a, d)),
        1 => (side(), index(), index(), sizes()).prop_map(|(s, b, a, d)| Mutation::Insert(s, b, a, d)),
        1 => (side(), index(), index()).prop_map(|(s, b, a)| Mutation::Remove(s, b, a)),
        1 => (side(), index(), dtypes()).prop_map(|(s, b, d)| Mutation::Dtype(s, b, d)),
        3 => (index(), dtypes()).prop_map(|(b, d)| Mutation::Retype(b, d)),
        2 => (side(), index()).prop_map(|(s, b)| Mutation::LeaveOut(s, b)),
        1 => (side(), index()).prop_map(|(s, b)| Mutation::Truncate(s, b)),
        1 => (side(), index()).prop_map(|(s, b)| Mutation::Append(s, b)),
        1 => (side(), index(), index()).prop_map(|(s, a, b)| Mutation::Swap(s, a, b)),
        4 => (index(), attributes()).prop_map(|(a, v)| Mutation::Attribute(a, v)),
        1 => index().prop_map(Mutation::Forget),
        1 => (index(), select(&["aardvark", "scale", "softmax_scale", "zebra"])).prop_map(|(a, n)| Mutation::Rename(a, n)),
    ]
}
