//! A call of a target, independent of the device: operands, results, attributes, and which results share memory with an
//! operand.

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
    /// The operand whose memory the result shares. Otherwise the result has its own memory, filled with NaN.
    pub alias: Option<usize>,
}

/// The operands, results and attributes of a call.
#[derive(Clone, Debug)]
pub struct Invocation {
    pub target: &'static str,
    /// Describes the call in messages.
    pub description: String,
    pub operands: Vec<(&'static str, Array)>,
    pub results: Vec<ResultSpec>,
    pub attributes: Vec<(&'static str, Attr)>,
}

/// The byte in results before the call: NaN in every float dtype, -1 in integers.
pub const POISON: u8 = 0xff;

/// The operator of a target. `simple_add` has two targets.
pub fn operator_of(target: &str) -> Op {
    let target = if target == "XlaGpuSimpleAdd" { "xla_gpu_simple_add" } else { target };
    Op::ALL.into_iter().find(|op| op.signature().target == target).unwrap()
}

impl Invocation {
    pub fn new(target: &'static str) -> Self {
        Self { target, description: String::new(), operands: vec![], results: vec![], attributes: vec![] }
    }

    /// A call of `op` with all attributes and all operands up to the last one that `operand` gives. Operands before it
    /// that are not given have shape `[0]`.
    pub fn of(op: Op, operand: impl Fn(&str) -> Option<Array>, attribute: impl Fn(&str) -> Attr) -> Self {
        let signature = op.signature();
        let operands: Vec<_> = signature.operands.iter().map(|name| (*name, operand(name))).collect();
        let given = operands.iter().rposition(|(_, array)| array.is_some()).map_or(0, |last| last + 1);
        let left_out = |name: &str| {
            const METADATA: [&str; 8] =
                ["seqused_k", "block_table", "seqused_q", "leftpad_k", "q_offset", "k_start", "k_end", "tree_mask"];
            let is_metadata = METADATA.contains(&name);
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

    /// Adds a result with dtype, shape and memory of an operand.
    pub fn result_in_place(mut self, name: &'static str, operand: usize) -> Self {
        let (dtype, dims) = (self.operands[operand].1.dtype, self.operands[operand].1.dims.clone());
        self.results.push(ResultSpec { name, dtype, dims, alias: Some(operand) });
        self
    }

    /// Adds a result with dtype and shape of an operand, and with its memory if `in_place`.
    pub fn updated(self, name: &'static str, operand: usize, in_place: bool) -> Self {
        let mut call = self.result_in_place(name, operand);
        call.results.last_mut().unwrap().alias = in_place.then_some(operand);
        call
    }

    /// Adds a result with dtype and shape of the operand of its name, and with its memory if `in_place`.
    pub fn updated_by_name(self, name: &'static str, in_place: bool) -> Self {
        let operand = self.operands.iter().position(|(of, _)| *of == name).unwrap();
        self.updated(name, operand, in_place)
    }

    /// Replaces the operand of this name.
    pub fn with_operand(mut self, name: &'static str, array: Array) -> Self {
        self.operands.iter_mut().find(|(n, _)| *n == name).unwrap().1 = array;
        self
    }

    /// The operator of the target.
    pub fn op(&self) -> Op {
        operator_of(self.target)
    }

    /// The attributes in alphabetical order, as `xla_attention::call` takes them.
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

    /// Adds an attribute or replaces its value.
    pub fn attribute(mut self, name: &'static str, value: Attr) -> Self {
        self.attributes.retain(|(n, _)| *n != name);
        self.attributes.push((name, value));
        self
    }
}
