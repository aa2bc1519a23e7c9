//! One entry for every front-end: an operator, what to do, operands, results, attributes.

mod checked;

use crate::cpu;
#[cfg(feature = "cuda")]
use crate::cuda;
use crate::debug_check;
use crate::error::{Error, Result};
use crate::log;
use crate::panic_boundary;
use crate::pool::Pool;
use crate::problem::{self, Attribute, CallArguments, Op, for_each_operator};
use crate::stream::Stream;
use crate::tensor::Tensor;

/// What a call is to do.
#[derive(Clone, Copy)]
pub enum Action<'a> {
    /// Only find mistakes; no memory is touched, data pointers may be null.
    Check,
    /// Compute on the CPU, now.
    RunOnCpu(&'a dyn Pool),
    /// Load on the current CUDA context whatever [`Action::LaunchCuda`] with the same arguments could need.
    PrepareCuda,
    /// Enqueue on a CUDA stream; never waits, never allocates.
    LaunchCuda(Stream),
}

/// One call, borrowed from the caller for its duration.
#[derive(Clone, Copy)]
pub struct Call<'a> {
    /// Which operator.
    pub op: Op,
    /// What to do.
    pub action: Action<'a>,
    /// In the order of the signature; trailing optional ones may be missing, or any be [`Tensor::ABSENT`].
    pub operands: &'a [Tensor<'a>],
    /// Likewise.
    pub results: &'a [Tensor<'a>],
    /// Alphabetical by name; all are required.
    pub attributes: &'a [Attribute],
}

/// Validate a call and do what its action says. Every front-end ends here.
///
/// # Errors
/// As [`crate::error::Code`] describes; the text begins with the target's name. A panic below comes back as
/// `INTERNAL`.
///
/// # Safety
/// Unless the action is [`Action::Check`], the views must describe memory that stays valid for the call (on CUDA:
/// until the enqueued work has run, on the device of the current context), readable for operands, writable and not
/// otherwise accessed for results. An operand and a result may be the same memory only where the operator says so.
pub unsafe fn call(call: &Call) -> Result {
    // SAFETY: passed on from this function's caller.
    in_panic_boundary(call.op.signature().target, || unsafe { execute(call) })
}

/// What a door does for a call: errors get the name of who was called in front, and a panic is one of them.
pub(crate) fn in_panic_boundary(target: &str, work: impl FnOnce() -> Result) -> Result {
    let outcome = panic_boundary::catch_panic(work);
    outcome.unwrap_or_else(|text| Err(Error::internal(format!("panic: {text}")))).map_err(|e| e.of(target))
}

/// [`call()`] within the guard of a door.
///
/// # Safety
/// As [`call()`].
pub(crate) unsafe fn execute(call: &Call) -> Result {
    let in_memory = !matches!(call.action, Action::Check);
    let args = CallArguments::new(call.op.signature(), call.operands, call.results, call.attributes, in_memory)?;
    // SAFETY: passed on from this function's caller.
    unsafe {
        if debug_check::is_enabled() { checked::checked(&args, call) } else { run_backend(&args, call.op, call.action) }
    }
}

/// Log where a call runs and with what, once for each of its shapes.
fn log_call(args: &CallArguments, op: Op, action: Action) {
    let place = match action {
        Action::RunOnCpu(_) => "the CPU",
        Action::LaunchCuda(_) => "CUDA",
        Action::Check | Action::PrepareCuda => return,
    };
    log::call(op.signature().target, (place, args), || format!("on {place}: {args}"));
}

/// Make the operator's problem, which validates it, and hand it to the backend.
///
/// # Safety
/// As [`call()`].
unsafe fn run_backend(args: &CallArguments, op: Op, action: Action) -> Result {
    macro_rules! on_backend {
        ($problem:expr, $operator:ident) => {{
            let problem = $problem?;
            log_call(args, op, action);
            match action {
                Action::Check => Ok(()),
                _ if args.has_empty_results() => Ok(()),
                // SAFETY: the caller vouches for the memory, `problem` for the shapes.
                Action::RunOnCpu(pool) => unsafe { cpu::$operator::run(&problem, pool) },
                #[cfg(feature = "cuda")]
                Action::PrepareCuda => cuda::$operator::prepare(&problem),
                #[cfg(feature = "cuda")]
                // SAFETY: as on the CPU.
                Action::LaunchCuda(stream) => unsafe { cuda::$operator::launch(&problem, stream) },
                #[cfg(not(feature = "cuda"))]
                Action::PrepareCuda | Action::LaunchCuda(_) => {
                    Err(Error::unimplemented("this build has no CUDA backend; build with the feature `cuda`"))
                }
            }
        }};
    }
    macro_rules! of_its_name {
        ($($op:ident $name:ident,)*) => {
            match op {
                $(Op::$op => on_backend!(problem::$name::problem(args), $name),)*
            }
        };
    }
    for_each_operator!(of_its_name)
}
