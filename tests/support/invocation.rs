//! One call of a target, described without a machine: what goes in, what comes out, what shares memory.

use super::{Array, Dtype, F32, I32};
use xla_attention::{Attribute, Op};

/// The value of an attribute.
#[derive(Clone, PartialEq, Debug)]
pub enum Attr {
    Bool(bool),
    I32(i32),
    I64(i64),
    F32(f32),
    F64(f64),
    I64s(Vec<i64>),
    Text(String),
}

/// A result before the call.
#[derive(Clone, Debug)]
pub struct ResultSpec {
    pub name: &'static str,
    pub dtype: Dtype,
    pub dims: Vec<i64>,
    /// The operand whose memory it shares; otherwise its memory is full of NaN.
    pub alias: Option<usize>,
}

/// Operands by name, results, attributes.
#[derive(Clone, Debug)]
pub struct Invocation {
    pub target: &'static str,
    /// Tells the case apart in reports.
    pub what: String,
    pub operands: Vec<(&'static str, Array)>,
    pub results: Vec<ResultSpec>,
    pub attributes: Vec<(&'static str, Attr)>,
}

/// Uninitialised results hold this byte: NaN in every float type, -1 in integers.
pub const POISON: u8 = 0xff;

/// XLA knows one by a second name.
pub fn operator_of(target: &str) -> Op {
    let target = if target == "XlaGpuSimpleAdd" { "xla_gpu_simple_add" } else { target };
    Op::ALL.into_iter().find(|op| op.signature().target == target).unwrap()
}

impl Invocation {
    pub fn new(target: &'static str) -> Self {
        Self { target, what: String::new(), operands: vec![], results: vec![], attributes: vec![] }
    }

    /// A call of an operator with all operands up to the last one that is there, `[0]` for one before it that is not, and all
    /// attributes.
    pub fn of(op: Op, operand: impl Fn(&str) -> Option<Array>, attribute: impl Fn(&str) -> Attr) -> Self {
        let signature = op.signature();
        let operands: Vec<_> = signature.operands.iter().map(|name| (*name, operand(name))).collect();
        let given = operands.iter().rposition(|(_, array)| array.is_some()).map_or(0, |last| last + 1);
        let left_out = |name: &str| {
            let is_metadata = ["seqused_k", "block_table", "seqused_q", "leftpad_k"].contains(&name);
            Array::left_out(if is_metadata { I32 } else { F32 })
        };
        let or_left_out = |(name, array): (_, Option<Array>)| (name, array.unwrap_or_else(|| left_out(name)));
        Self {
            operands: operands.into_iter().take(given).map(or_left_out).collect(),
            attributes: signature.attributes.iter().map(|(name, _)| (*name, attribute(name))).collect(),
            ..Self::new(signature.target)
        }
    }

    pub fn operand(mut self, name: &'static str, array: Array) -> Self {
        self.operands.push((name, array));
        self
    }

    pub fn result(mut self, name: &'static str, dtype: Dtype, dims: &[i64]) -> Self {
        self.results.push(ResultSpec { name, dtype, dims: dims.to_vec(), alias: None });
        self
    }

    /// A result of the type and shape of an operand, in its memory.
    pub fn result_in_place(mut self, name: &'static str, operand: usize) -> Self {
        let (dtype, dims) = (self.operands[operand].1.dtype, self.operands[operand].1.dims.clone());
        self.results.push(ResultSpec { name, dtype, dims, alias: Some(operand) });
        self
    }

    /// A result of the type and shape of an operand, in its memory or in its own.
    pub fn updated(self, name: &'static str, operand: usize, in_place: bool) -> Self {
        let mut call = self.result_in_place(name, operand);
        call.results.last_mut().unwrap().alias = in_place.then_some(operand);
        call
    }

    /// The call with another operand of this name.
    pub fn with_operand(mut self, name: &'static str, array: Array) -> Self {
        self.operands.iter_mut().find(|(n, _)| *n == name).unwrap().1 = array;
        self
    }

    /// The operator that the target is.
    pub fn op(&self) -> Op {
        operator_of(self.target)
    }

    /// The attributes as `xla_attention::call` takes them.
    pub fn sorted_attributes(&self) -> Vec<Attribute> {
        let mut named = self.attributes.clone();
        named.sort_by_key(|(name, _)| *name);
        let value = |attr: &Attr| match attr {
            Attr::Bool(value) => Attribute::Bool(*value),
            Attr::I64(value) => Attribute::I64(*value),
            Attr::F32(value) => Attribute::F32(*value),
            other => panic!("{other:?} is no attribute of an operator"),
        };
        named.iter().map(|(_, attr)| value(attr)).collect()
    }

    /// Adds an attribute or gives it another value.
    pub fn attribute(mut self, name: &'static str, value: Attr) -> Self {
        self.attributes.retain(|(n, _)| *n != name);
        self.attributes.push((name, value));
        self
    }
}
