//! Makes invocations through `xla_attention::call`, the function below all front-ends, which accepts any memory and
//! strides.

use super::{Array, CallBuffers, Dtype, GuardedBuffer, Invocation, Side, Strided, StridedLayout};
use xla_attention::{Action, Call, Error, Op, Pool, Tensor, call};

/// The address of a buffer, and its strides unless it is dense.
#[derive(Clone, Copy)]
pub struct BufferView<'a> {
    pub data: *mut u8,
    pub strides: Option<&'a [i64]>,
}

/// Operands that may be strided. All other operands must be dense; a result in an operand's memory has its strides.
pub fn may_be_strided(op: Op) -> &'static [&'static str] {
    match op {
        Op::PagedAttention => &["query", "kv_cache", "block_tables", "kv_scale_cache"],
        Op::PagedAttentionUpdate => &["query", "kv_cache", "block_tables", "key", "value", "kv_scale_cache"],
        Op::FlashAttnVarlen => &["q", "k", "v", "block_table"],
        Op::FlashAttnVarlenBwd => &["dout", "q", "k", "v", "out"],
        Op::KvCacheUpdate => &["kv_cache", "key", "value", "kv_scale_cache"],
        Op::KvCacheUpdateSplit => &["k_cache", "v_cache", "key", "value"],
        Op::RopeKvCacheUpdate => &["kv_cache", "query", "key", "value", "cos_sin"],
        Op::MergeAttentionStates => &["out_a", "out_b"],
        Op::GatherKvCache => &["k_cache", "v_cache", "block_tables", "kv_scale_cache"],
        Op::MlaPagedAttention => &["q", "kv_cache", "block_table"],
        Op::MlaPagedAttentionUpdate => &["q", "kv_cache", "block_table", "c_kv", "k_pe"],
        Op::SimpleAdd => &[],
    }
}

fn tensor<'a>(dtype: Dtype, dims: &'a [i64], BufferView { data, strides }: BufferView<'a>) -> Tensor<'a> {
    Tensor { dtype, data, dims, strides }
}

impl BufferView<'_> {
    /// No memory, for calls that are only validated.
    pub const NOWHERE: Self = Self { data: std::ptr::null_mut(), strides: None };

    pub fn dense(data: *mut u8) -> Self {
        Self { data, strides: None }
    }
}

impl Invocation {
    /// Makes the call. A result that shares an operand's memory uses the operand's view instead of its own.
    ///
    /// # Safety
    ///
    /// The views are of memory with the call's dtypes and shapes, or the action accesses no memory.
    pub unsafe fn run_action(
        &self,
        action: Action,
        operands: &[BufferView],
        results: &[BufferView],
    ) -> Result<(), Error> {
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
        // SAFETY: the caller passes valid views.
        unsafe { call(&request) }
    }

    /// Validates dtypes, shapes and attributes without a call ([`Action::Check`]).
    pub fn validate(&self) -> Result<(), Error> {
        let nowhere = vec![BufferView::NOWHERE; self.operands.len().max(self.results.len())];
        // SAFETY: this action accesses no memory.
        unsafe { self.run_action(Action::Check, &nowhere, &nowhere) }
    }

    /// Runs the call on the CPU with strided operands: `gap(name)` elements lie between the rows of each operand.
    pub fn run_strided(&self, side: Side, pool: &dyn Pool, gap: impl Fn(&str) -> i64) -> Result<Vec<Array>, Error> {
        let buffers = CallBuffers::new(self, |name, array| {
            let strided_layout = StridedLayout::new(array, &vec![gap(name); array.dims.len()]);
            Strided::new(array, Some(strided_layout), |array| GuardedBuffer::new(name, side, &array.bytes))
        });
        let [inputs, outputs] = buffers.views();
        // SAFETY: the views are of `buffers`, which outlive the call.
        unsafe { self.run_action(Action::RunOnCpu(pool), &inputs, &outputs) }?;
        Ok(buffers.results())
    }
}
