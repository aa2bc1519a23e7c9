//! Makes invocations through `xla_attention::call`, the entry below all front-ends: it takes any memory, and strides.

use super::array::{Array, Dtype};
use super::guard::Side;
use super::invocation::{Invocation, Outcome, POISON};
use super::spread::Spread;
use xla_attention::{Action, Call, DType, Error, Op, Pool, Tensor, call};

/// Where a buffer lies, and what its strides are if it is not dense.
#[derive(Clone, Copy)]
pub struct View<'a> {
    pub data: *mut u8,
    pub strides: Option<&'a [i64]>,
}

/// Operands whose rows may lie apart. Everything else is dense; a result that is an operand's memory has its strides.
pub fn may_be_strided(op: Op) -> &'static [&'static str] {
    match op {
        Op::PagedAttention => &["query", "kv_cache", "block_tables"],
        Op::PagedAttentionUpdate => &["query", "kv_cache", "block_tables", "key", "value"],
        Op::FlashAttnVarlen => &["q", "k", "v", "block_table"],
        Op::FlashAttnVarlenBwd => &["dout", "q", "k", "v", "out"],
        Op::KvCacheUpdate => &["kv_cache", "key", "value"],
        Op::KvCacheUpdateSplit => &["k_cache", "v_cache", "key", "value"],
        Op::RopeKvCacheUpdate => &["kv_cache", "query", "key", "value", "cos_sin"],
        Op::MergeAttentionStates => &["out_a", "out_b"],
        Op::GatherKvCache => &["k_cache", "v_cache", "block_tables"],
        Op::SimpleAdd => &[],
    }
}

fn tensor<'a>(dtype: Dtype, dims: &'a [i64], View { data, strides }: View<'a>) -> Tensor<'a> {
    Tensor { dtype: DType(dtype.0), data, dims, strides }
}

impl View<'_> {
    /// No memory, which is enough for a check.
    pub const NOWHERE: Self = Self { data: std::ptr::null_mut(), strides: None };

    pub fn dense(data: *mut u8) -> Self {
        Self { data, strides: None }
    }
}

impl Invocation {
    /// Make the call. A result in an operand's memory lies as that does, whatever is said of it.
    ///
    /// # Safety
    /// The views are of memory of the call's types and shapes, or the action touches none.
    pub unsafe fn enter(&self, action: Action, operands: &[View], results: &[View]) -> Result<(), Error> {
        let inputs: Vec<Tensor> = self
            .operands
            .iter()
            .zip(operands)
            .map(|((_, array), view)| tensor(array.dtype, &array.dims, *view))
            .collect();
        let outputs: Vec<Tensor> = self
            .results
            .iter()
            .zip(results)
            .map(|(result, own)| tensor(result.dtype, &result.dims, result.alias.map_or(*own, |at| operands[at])))
            .collect();
        let attributes = self.sorted_attributes();
        let request = Call { op: self.op(), action, operands: &inputs, results: &outputs, attributes: &attributes };
        // SAFETY: what this function asks for.
        unsafe { call(&request) }
    }

    /// What a check says of the call.
    pub fn check(&self) -> Result<(), Error> {
        let nowhere = vec![View::NOWHERE; self.operands.len().max(self.results.len())];
        // SAFETY: a check touches no memory.
        unsafe { self.enter(Action::Check, &nowhere, &nowhere) }
    }

    /// The results on the CPU, where the rows of each operand lie `gap` elements apart.
    pub fn run_spread(&self, side: Side, pool: &dyn Pool, gap: impl Fn(&str) -> i64) -> Result<Vec<Array>, Error> {
        let operands: Vec<Spread> =
            self.operands.iter().map(|(name, array)| Spread::new(name, side, array, gap(name))).collect();
        let poison = self.results.iter().map(|r| (r.name, Array::filled(r.dtype, &r.dims, POISON)));
        let own: Vec<Spread> = poison.map(|(name, array)| Spread::new(name, side, &array, 0)).collect();
        let [inputs, outputs] = [&operands, &own].map(|list| list.iter().map(Spread::view).collect::<Vec<_>>());
        // SAFETY: the views are of the buffers above.
        unsafe { self.enter(Action::RunOnCpu(pool), &inputs, &outputs) }?;
        for ((name, given), placed) in self.operands.iter().zip(&operands) {
            let updated = self.results.iter().any(|r| r.name == *name);
            assert!(updated || placed.packed() == given.bytes, "{} {}: {name} has changed", self.target, self.what);
        }
        let of = |(result, own): (&Outcome, &Spread)| Array {
            dtype: result.dtype,
            dims: result.dims.clone(),
            bytes: result.alias.map_or(own, |at| &operands[at]).packed(),
        };
        Ok(self.results.iter().zip(&own).map(of).collect())
    }
}
