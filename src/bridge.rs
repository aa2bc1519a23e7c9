//! The cxx bridge through which the C++ shims call Rust: views of the call's arguments in, a status out.
#![expect(unreachable_pub, reason = "cxx makes the shared types public")]

use crate::debug_check;
use crate::dispatch::{Action, Call, execute, in_panic_boundary};
use crate::error::{Error, Result, ensure};
use crate::failpoint::{self, Failpoint};
use crate::pool::Pool;
use crate::problem::{Attribute, Op};
use crate::stream::Stream;
use crate::tensor::{DType, Tensor};

#[cxx::bridge(namespace = "xa")]
mod ffi {
    /// A dense XLA buffer; dtype 0 means that the operand was left out.
    #[derive(Clone, Copy)]
    struct BufferView<'a> {
        dtype: i32,
        data: *mut u8,
        dims: &'a [i64],
    }

    #[repr(i32)]
    #[derive(Debug)]
    enum AttributeType {
        Bool,
        I64,
        F32,
    }

    /// `real` holds an f32; `integer` holds the other two types.
    #[derive(Clone, Copy)]
    struct AttributeView {
        kind: AttributeType,
        integer: i64,
        real: f32,
    }

    /// How many more operands, results and attributes the call has than the binding.
    #[derive(Clone, Copy)]
    struct Surplus {
        operands: usize,
        results: usize,
        attributes: usize,
    }

    /// The arguments of a call as the binding decoded them.
    #[derive(Clone, Copy)]
    struct Arguments<'a> {
        operands: &'a [BufferView<'a>],
        results: &'a [BufferView<'a>],
        attributes: &'a [AttributeView],
        surplus: Surplus,
    }

    /// XLA's error code (0 for success) and the message.
    struct Status {
        code: i32,
        message: String,
    }

    unsafe extern "C++" {
        include!("pool.h");
        type XlaPool;
        fn num_threads(self: &XlaPool) -> i64;
        fn schedule(self: &XlaPool, task: fn(usize), argument: usize);
    }

    extern "Rust" {
        fn debug_check_is_enabled() -> bool;
        fn run_on_cpu(op: i32, pool: &XlaPool, arguments: Arguments) -> Status;
        fn prepare_cuda(op: i32, arguments: Arguments) -> Status;
        fn launch_cuda(op: i32, stream: usize, arguments: Arguments) -> Status;
    }
}

use ffi::{Arguments, AttributeType, AttributeView, BufferView, Status, XlaPool};

// SAFETY: XLA's thread pool is thread-safe, and the wrapper consists of two pointers that the call frame keeps alive.
unsafe impl Sync for XlaPool {}

// SAFETY: XLA runs each scheduled task exactly once. A C++ exception in `schedule` does not unwind into Rust, because cxx
// terminates the process.
unsafe impl Pool for XlaPool {
    fn num_threads(&self) -> usize {
        XlaPool::num_threads(self).max(1) as usize
    }
    fn schedule(&self, task: fn(usize), argument: usize) {
        XlaPool::schedule(self, task, argument);
    }
}

/// Capacity of the shims' arrays of operands, results and attributes; `ffi/binding.h` asserts that no binding has more.
const MAX_VALUES: usize = 24;

/// Whether debug check mode is enabled. Its calls synchronize, so their handlers are registered without the trait that
/// allows recording into a command buffer.
fn debug_check_is_enabled() -> bool {
    debug_check::is_enabled()
}

fn run_on_cpu(op: i32, pool: &XlaPool, arguments: Arguments) -> Status {
    status(enter(op, Action::RunOnCpu(pool), arguments))
}

fn prepare_cuda(op: i32, arguments: Arguments) -> Status {
    status(enter(op, Action::PrepareCuda, arguments))
}

fn launch_cuda(op: i32, stream: usize, arguments: Arguments) -> Status {
    status(enter(op, Action::LaunchCuda(Stream(stream)), arguments))
}

fn enter(op: i32, action: Action, arguments: Arguments) -> Result {
    let op = Op::from_number(op).ok_or_else(|| Error::internal(format!("no operator {op}")))?;
    // cxx would terminate the process if a panic reached it.
    in_panic_boundary(op.signature().target, || decode_and_call(op, action, arguments))
}

fn decode_and_call(op: Op, action: Action, arguments: Arguments) -> Result {
    failpoint::trigger(Failpoint::Bridge);
    let signature = op.signature();
    let surplus = |kind, count: usize, at_most: usize| {
        ensure(count == 0, || format!("{} {kind}s given, at most {at_most} expected", at_most + count))
    };
    surplus("operand", arguments.surplus.operands, signature.operands.len())?;
    surplus("result", arguments.surplus.results, signature.results.len())?;
    surplus("attribute", arguments.surplus.attributes, signature.attributes.len())?;
    let (operands, results) = (tensors(arguments.operands), tensors(arguments.results));
    let mut attributes = [Attribute::Bool(false); MAX_VALUES];
    for (to, from) in attributes.iter_mut().zip(arguments.attributes) {
        *to = attribute(from);
    }
    // SAFETY: XLA keeps the buffers of a call valid until its work has finished, and they belong to the current context.
    unsafe {
        execute(&Call {
            op,
            action,
            operands: &operands[..arguments.operands.len()],
            results: &results[..arguments.results.len()],
            attributes: &attributes[..arguments.attributes.len()],
        })
    }
}

fn tensors<'a>(views: &[BufferView<'a>]) -> [Tensor<'a>; MAX_VALUES] {
    let mut tensors = [Tensor::ABSENT; MAX_VALUES];
    for (to, from) in tensors.iter_mut().zip(views) {
        *to = Tensor::dense(DType(from.dtype), from.data, from.dims);
    }
    tensors
}

fn attribute(view: &AttributeView) -> Attribute {
    match view.kind {
        AttributeType::Bool => Attribute::Bool(view.integer != 0),
        AttributeType::I64 => Attribute::I64(view.integer),
        _ => Attribute::F32(view.real),
    }
}

fn status(result: Result) -> Status {
    match result {
        Ok(()) => Status { code: 0, message: String::new() },
        Err(Error { code, message }) => Status { code: code as i32, message },
    }
}
