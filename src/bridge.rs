//! The crossing from the C++ shims into Rust: plain views in, a plain status out.
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
    /// A dense buffer of XLA; dtype 0 stands for one that was left out.
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

    /// `real` holds an f32, `integer` the other two types.
    #[derive(Clone, Copy)]
    struct AttributeView {
        kind: AttributeType,
        integer: i64,
        real: f32,
    }

    /// Operands and results past the end of the binding; attributes where it has none.
    #[derive(Clone, Copy)]
    struct Surplus {
        operands: usize,
        results: usize,
        attributes: usize,
    }

    /// What a binding decoded.
    #[derive(Clone, Copy)]
    struct Arguments<'a> {
        operands: &'a [BufferView<'a>],
        results: &'a [BufferView<'a>],
        attributes: &'a [AttributeView],
        surplus: Surplus,
    }

    /// XLA's error code, 0 for success.
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
        fn checking() -> bool;
        fn run_on_cpu(op: i32, pool: &XlaPool, arguments: Arguments) -> Status;
        fn prepare_cuda(op: i32, arguments: Arguments) -> Status;
        fn launch_cuda(op: i32, stream: usize, arguments: Arguments) -> Status;
    }
}

use ffi::{Arguments, AttributeType, AttributeView, BufferView, Status, XlaPool};

// SAFETY: XLA's pool may be asked from any thread; the wrapper is two pointers that the handler's frame keeps alive.
unsafe impl Sync for XlaPool {}

// SAFETY: XLA runs a scheduled task once; what C++ throws ends the process (cxx) and does not unwind.
unsafe impl Pool for XlaPool {
    fn num_threads(&self) -> usize {
        XlaPool::num_threads(self).max(1) as usize
    }
    fn schedule(&self, task: fn(usize), argument: usize) {
        XlaPool::schedule(self, task, argument);
    }
}

/// As many operands, results or attributes as the shims' arrays hold: `ffi/binding.h` asserts that no binding has more.
const MOST: usize = 24;

/// Handlers are registered for calls that wait for their end.
fn checking() -> bool {
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
    // Without a guard cxx would end the process at a panic.
    in_panic_boundary(op.signature().target, || decode_and_call(op, action, arguments))
}

fn decode_and_call(op: Op, action: Action, arguments: Arguments) -> Result {
    failpoint::trigger(Failpoint::Bridge);
    let signature = op.signature();
    let surplus = |what, count: usize, at_most: usize| {
        ensure(count == 0, || format!("{} {what}s given, at most {at_most} expected", at_most + count))
    };
    surplus("operand", arguments.surplus.operands, signature.operands.len())?;
    surplus("result", arguments.surplus.results, signature.results.len())?;
    surplus("attribute", arguments.surplus.attributes, signature.attributes.len())?;
    let (operands, results) = (tensors(arguments.operands), tensors(arguments.results));
    let mut attributes = [Attribute::Bool(false); MOST];
    for (to, from) in attributes.iter_mut().zip(arguments.attributes) {
        *to = attribute(from);
    }
    // SAFETY: XLA keeps the buffers of a call alive until its work is done, on the device of the current context.
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

fn tensors<'a>(views: &[BufferView<'a>]) -> [Tensor<'a>; MOST] {
    let mut tensors = [Tensor::ABSENT; MOST];
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
