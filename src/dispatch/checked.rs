//! A call in debug check mode (`XLA_ATTENTION_CHECK=1`): validate its metadata, execute it, compute the results a second
//! time and compare.
//!
//! The CPU backend recomputes what ran on CUDA. It works on copies of the operands that are made before the launch,
//! because a cache is updated in place. What ran on the CPU cannot be compared with the CPU backend: attention is
//! recomputed by its definition, and of the other operators only the metadata is validated.

use super::{Action, Call, run_backend};
#[cfg(all(feature = "cuda", feature = "failpoints"))]
use crate::cuda::enqueue;
#[cfg(feature = "cuda")]
use crate::cuda::host_copy;
use crate::debug_check::accuracy;
use crate::debug_check::compare::{Tolerance, compare, nonfinite_rows};
use crate::debug_check::definition::{self, fp8_excess};
use crate::debug_check::gradients::compare_gradients;
use crate::debug_check::host::HostTensor;
use crate::debug_check::metadata::{self, FLASH_ATTN_VARLEN, MLA_PAGED_ATTENTION, PAGED_ATTENTION, Sequence};
use crate::error::{Error, Result};
use crate::pool::Pool;
#[cfg(feature = "cuda")]
use crate::pool::RayonPool;
use crate::problem::attention::Attention;
use crate::problem::{self, CallArguments, Op, Operand};
#[cfg(feature = "cuda")]
use crate::stream::Stream;
use crate::tensor::{DType, Tensor};
use std::cell::RefCell;

/// Execute a call, with checks if its action computes something.
///
/// # Errors
/// `INVALID_ARGUMENT` for metadata that would be clamped, `INTERNAL` for a wrong result, and the errors of the call.
///
/// # Safety
/// As [`super::call()`].
pub(super) unsafe fn checked(args: &CallArguments, call: &Call) -> Result {
    // SAFETY: the caller guarantees what each of these functions requires.
    unsafe {
        match call.action {
            Action::RunOnCpu(pool) => checked_on_cpu(args, call, pool),
            #[cfg(feature = "cuda")]
            Action::LaunchCuda(stream) => checked_on_cuda(args, call, stream),
            _ => run_backend(args, call.op, call.action),
        }
    }
}

/// Marks an error that occurs only in debug check mode.
fn in_check_mode(Error { code, message }: Error) -> Error {
    Error { code, message: format!("XLA_ATTENTION_CHECK: {message}") }
}

/// The problem of an attention operator, `None` for the other operators.
fn attention<'a>(op: Op, args: &CallArguments<'a>) -> Result<Option<Attention<'a>>> {
    match op {
        Op::PagedAttention => problem::paged_attention::problem(args).map(Some),
        Op::FlashAttnVarlen => problem::flash_attn_varlen::problem(args).map(Some),
        Op::PagedAttentionUpdate => {
            problem::paged_attention_update::problem(args).map(|problem| Some(problem.attention))
        }
        Op::MlaPagedAttention => problem::mla_paged_attention::problem(args).map(Some),
        Op::MlaPagedAttentionUpdate => {
            problem::mla_paged_attention_update::problem(args).map(|problem| Some(problem.attention))
        }
        _ => Ok(None),
    }
}

/// Refuse metadata that would be clamped. Returns the sequences of an attention operator.
///
/// # Safety
/// The operands are readable host memory.
unsafe fn validate_metadata(op: Op, args: &CallArguments) -> Result<Vec<Sequence>> {
    // SAFETY: the caller guarantees that the operands are readable host memory, and `problem` validates their shapes.
    unsafe {
        if op == Op::PagedAttentionUpdate {
            let problem = problem::paged_attention_update::problem(args)?;
            return metadata::new_tokens(&problem.update, &problem.attention, &PAGED_ATTENTION).map_err(in_check_mode);
        }
        if op == Op::MlaPagedAttentionUpdate {
            let problem = problem::mla_paged_attention_update::problem(args)?;
            let sequences = problem
                .with_cache_update(|update| metadata::new_tokens(update, &problem.attention, &MLA_PAGED_ATTENTION));
            return sequences.map_err(in_check_mode);
        }
        if let Some(problem) = attention(op, args)? {
            let names = match op {
                Op::PagedAttention => &PAGED_ATTENTION,
                Op::MlaPagedAttention => &MLA_PAGED_ATTENTION,
                _ => &FLASH_ATTN_VARLEN,
            };
            return metadata::attention(&problem, names).map_err(in_check_mode);
        }
        if op == Op::FlashAttnVarlenBwd {
            let problem = problem::flash_attn_varlen_bwd::problem(args)?;
            return metadata::attention(&problem.forward, &FLASH_ATTN_VARLEN).map_err(in_check_mode);
        }
        match op {
            Op::KvCacheUpdate => metadata::slots(&problem::kv_cache_update::problem(args)?),
            Op::KvCacheUpdateSplit => metadata::slots(&problem::kv_cache_update_split::problem(args)?),
            Op::GatherKvCache => metadata::gathered(&problem::gather_kv_cache::problem(args)?),
            Op::RopeKvCacheUpdate => metadata::positions(&problem::rope_kv_cache_update::problem(args)?),
            _ => Ok(()),
        }
    }
    .map_err(in_check_mode)?;
    Ok(Vec::new())
}

/// # Safety
/// As [`checked`].
unsafe fn checked_on_cpu(args: &CallArguments, call: &Call, pool: &dyn Pool) -> Result {
    // SAFETY: on the CPU the caller's buffers are host memory; `host_expected` outlives the views of it.
    unsafe {
        run_backend(args, call.op, Action::Check)?;
        let sequences = validate_metadata(call.op, args)?;
        run_backend(args, call.op, call.action)?;
        #[cfg(feature = "failpoints")]
        corrupt_result(call, |to, byte, bytes| {
            to.write_bytes(byte, bytes);
            Ok(())
        })?;
        if attention(call.op, args)?.is_none() {
            return Ok(());
        }
        let host_expected: Vec<HostTensor> = call.results.iter().map(HostTensor::zeros).collect();
        // The definition reads the cache after its update.
        let updates = [Op::PagedAttentionUpdate, Op::MlaPagedAttentionUpdate].contains(&call.op);
        let updated = |name: &str| updates && ["kv_cache", "kv_scale_cache"].contains(&name);
        let expected: Vec<Tensor> = (call.op.signature().results.iter().zip(host_expected.iter().zip(call.results)))
            .map(|(name, (host, result))| if updated(name) { *result } else { host.view(result) })
            .collect();
        let second = CallArguments::new(call.op.signature(), call.operands, &expected, call.attributes, true)?;
        if let Some(problem) = attention(call.op, &second)? {
            definition::attend(&problem, &sequences, pool)?;
        }
        compare_all(call, &second, &sequences, call.results, &expected)
    }
}

/// # Safety
/// As [`checked`].
#[cfg(feature = "cuda")]
unsafe fn checked_on_cuda(args: &CallArguments, call: &Call, stream: Stream) -> Result {
    let fetch = |tensor: &Tensor| {
        HostTensor::of(tensor, |to, from, bytes| {
            // SAFETY: the caller guarantees that the tensor is valid device memory.
            unsafe { host_copy::to_host(to, from, bytes, stream) }
        })
    };
    // SAFETY: the caller guarantees valid buffers and stream; the second computation writes only to `host_operands` and
    // `host_expected`.
    unsafe {
        run_backend(args, call.op, Action::Check)?;
        host_copy::can_wait(stream)?;
        let host_operands = call.operands.iter().map(fetch).collect::<Result<Vec<_>>>()?;
        let operands: Vec<Tensor> =
            host_operands.iter().zip(call.operands).map(|(host, operand)| host.view(operand)).collect();
        let host_expected: Vec<HostTensor> = call.results.iter().map(HostTensor::zeros).collect();
        let expected: Vec<Tensor> = host_expected
            .iter()
            .zip(call.results)
            .map(|(host, result)| {
                // A result that aliases an operand must alias its host copy in the second computation too.
                let same = call.operands.iter().position(|o| o.data == result.data && !o.is_empty());
                same.map_or_else(|| host.view(result), |i| Tensor { data: operands[i].data, ..*result })
            })
            .collect();
        let second = CallArguments::new(call.op.signature(), &operands, &expected, call.attributes, true)?;
        let sequences = validate_metadata(call.op, &second)?;
        run_backend(args, call.op, call.action)?;
        #[cfg(feature = "failpoints")]
        corrupt_result(call, |to, byte, bytes| enqueue::fill(to, byte, bytes, stream))?;
        let host_results = call.results.iter().map(fetch).collect::<Result<Vec<_>>>()?;
        let results: Vec<Tensor> =
            host_results.iter().zip(call.results).map(|(host, result)| host.view(result)).collect();
        run_backend(&second, call.op, Action::RunOnCpu(&RayonPool))?;
        compare_all(call, &second, &sequences, &results, &expected)
    }
}

/// A row and head, and by how much their columns of out and their lse may exceed the usual tolerance.
type ExcessOfRow = ((usize, usize), (Vec<f64>, f64));

/// # Safety
/// All tensors are readable host memory. `second` has the results `expected`, and `sequences` are its sequences.
unsafe fn compare_all(
    call: &Call,
    second: &CallArguments,
    sequences: &[Sequence],
    results: &[Tensor],
    expected: &[Tensor],
) -> Result {
    if call.op == Op::FlashAttnVarlenBwd {
        let all = call.op.signature().results.iter().zip(results.iter().zip(expected));
        let gradients: Vec<_> = all.filter(|(name, _)| **name != "workspace").map(|(n, (r, e))| (*n, r, e)).collect();
        let dlse = second.optional_operand(Operand::Dlse);
        let cotangents: Vec<_> = [Some(second.operand(Operand::Dout)), dlse].into_iter().flatten().collect();
        let problem = problem::flash_attn_varlen_bwd::problem(second)?;
        // SAFETY: the caller guarantees that all tensors are readable host memory.
        return unsafe { compare_gradients(&problem, sequences, &cotangents, &gradients) }.map_err(in_check_mode);
    }
    let problem = attention(call.op, second)?;
    // SAFETY: the caller guarantees that all tensors are readable host memory.
    let nonfinite = problem.as_ref().map_or(Vec::new(), |problem| unsafe { nonfinite_rows(problem, sequences) });
    let softcap = problem.is_some_and(|problem| problem.score.softcap > 0.0);
    let ran_on_gpu = !matches!(call.action, Action::RunOnCpu(_));
    let last: RefCell<Option<ExcessOfRow>> = RefCell::new(None);
    let excess = |row: usize, head: usize, column: Option<usize>| -> f64 {
        let Some(problem) = problem.as_ref().filter(|problem| ran_on_gpu && may_multiply_fp8(problem)) else {
            return 0.0;
        };
        let mut last = last.borrow_mut();
        if last.as_ref().is_none_or(|(at, _)| *at != (row, head)) {
            // SAFETY: the caller guarantees that all tensors are readable host memory.
            *last = Some(((row, head), unsafe { fp8_excess(problem, sequences, row, head) }));
        }
        last.as_ref().map_or(0.0, |(_, (out, lse))| column.map_or(*lse, |column| out[column]))
    };
    let out = results.first().map_or(DType::ABSENT, |out| out.dtype);
    for (name, pair) in call.op.signature().results.iter().zip(results.iter().zip(expected)) {
        // `row_axis` is the axis of query rows, for results whose rows can be nonfinite.
        let (tolerance, row_axis) = match *name {
            "workspace" => continue,
            _ if pair.0.dtype == DType::ABSENT => continue,
            "out" if call.op != Op::SimpleAdd => (Tolerance::weighted_sum(out, softcap), Some(0)),
            "softmax_lse" | "lse" => (Tolerance::lse(out, softcap), Some(1)),
            _ => (Tolerance::rounded_once(pair.0.dtype), None),
        };
        let row = |index: &[usize]| row_axis.and_then(|axis: usize| index.get(axis)).copied();
        let skipped = |index: &[usize]| row(index).is_some_and(|row| nonfinite.get(row) == Some(&true));
        // out [Tq, Hq, Dv], lse [Hq, Tq]
        let excess = |index: &[usize]| match (row_axis, index) {
            (Some(0), &[row, head, column]) => excess(row, head, Some(column)),
            (Some(1), &[head, row]) => excess(row, head, None),
            _ => 0.0,
        };
        // SAFETY: the caller guarantees that all tensors are readable host memory.
        unsafe { compare(name, pair, tolerance, skipped, excess) }.map_err(in_check_mode)?;
    }
    Ok(())
}

/// Whether Hopper's prefill may multiply fp8 q, K and V without converting them (`src/cuda/attention/hopper.rs`).
fn may_multiply_fp8(problem: &Attention) -> bool {
    let dims = [problem.head_dim, problem.value_dim];
    problem.q.dtype == DType::F8E4M3FN && accuracy::FP8_HEAD_DIMS.iter().any(|&dim| dims == [dim; 2])
}

/// Overwrite an element in the middle of the first result if the failpoint is armed.
#[cfg(feature = "failpoints")]
fn corrupt_result(call: &Call, fill: impl FnOnce(*mut u8, u8, usize) -> Result) -> Result {
    use crate::failpoint::{Failpoint, take};

    let result = &call.results[0];
    if !result.is_empty() && take(Failpoint::WrongResult) {
        let size = result.dtype.size();
        // This byte pattern is a large finite number in every dtype, for example 1.3e36 in f32 and 57344 in f8e5m2.
        return fill(result.data.wrapping_add(result.len() / 2 * size), 0x7b, size);
    }
    Ok(())
}
