//! The single entry point of all front-ends: validates a call and passes it to the CPU or CUDA backend.

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

/// What [`call()`] shall do.
#[derive(Clone, Copy)]
pub enum Action<'a> {
    /// Validate dtypes, shapes and attributes only. No memory is accessed, and data pointers may be null.
    Check,
    /// Compute on the CPU with this pool, and return when the results are written.
    RunOnCpu(&'a dyn Pool),
    /// Load the kernels that [`Action::LaunchCuda`] with the same arguments needs into the current CUDA context.
    PrepareCuda,
    /// Enqueue on a CUDA stream. This neither synchronizes nor allocates.
    LaunchCuda(Stream),
}

/// The arguments of [`call()`], borrowed for its duration.
#[derive(Clone, Copy)]
pub struct Call<'a> {
    /// The operator.
    pub op: Op,
    /// Whether to validate, compute, load kernels or launch.
    pub action: Action<'a>,
    /// The operands in the order of the signature. Trailing optional operands may be missing; any optional operand may
    /// be [`Tensor::ABSENT`].
    pub operands: &'a [Tensor<'a>],
    /// The results, by the same rules.
    pub results: &'a [Tensor<'a>],
    /// All attributes of the signature, in alphabetical order of their names.
    pub attributes: &'a [Attribute],
}

/// Validate a call and execute its action. Every front-end calls this function.
///
/// # Errors
/// [`crate::error::Code`] lists the codes. The message begins with the target's name. A panic becomes `INTERNAL`.
///
/// # Safety
/// Unless the action is [`Action::Check`], the views must describe memory that stays valid for the call (on CUDA:
/// until the enqueued work has run, on the device of the current context), readable for operands, writable and not
/// otherwise accessed for results. An operand and a result may be the same memory only where the operator says so.
pub unsafe fn call(call: &Call) -> Result {
    // SAFETY: the caller guarantees what `execute` requires.
    in_panic_boundary(call.op.signature().target, || unsafe { execute(call) })
}

/// Run `work`, turn a panic into an `INTERNAL` error, and put the target's name in front of any error's message.
pub(crate) fn in_panic_boundary(target: &str, work: impl FnOnce() -> Result) -> Result {
    let outcome = panic_boundary::catch_panic(work);
    outcome.unwrap_or_else(|text| Err(Error::internal(format!("panic: {text}")))).map_err(|e| e.of(target))
}

/// [`call()`] without a panic boundary, for callers that have their own.
///
/// # Safety
/// As [`call()`].
pub(crate) unsafe fn execute(call: &Call) -> Result {
    let in_memory = !matches!(call.action, Action::Check);
    let args = CallArguments::new(call.op.signature(), call.operands, call.results, call.attributes, in_memory)?;
    // SAFETY: the caller guarantees what both functions require.
    unsafe {
        if debug_check::is_enabled() { checked::checked(&args, call) } else { run_backend(&args, call.op, call.action) }
    }
}

/// Log the place, dtypes and shapes of a call, once per combination.
fn log_call(args: &CallArguments, op: Op, action: Action) {
    let place = match action {
        Action::RunOnCpu(_) => "the CPU",
        Action::LaunchCuda(_) => "CUDA",
        Action::Check | Action::PrepareCuda => return,
    };
    log::call(op.signature().target, (place, args), || format!("on {place}: {args}"));
}

/// Build the operator's problem, which validates the arguments, and pass it to the backend.
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
                // SAFETY: the caller guarantees that the memory is valid, and `problem` that it has these shapes.
                Action::RunOnCpu(pool) => unsafe { cpu::$operator::run(&problem, pool) },
                #[cfg(feature = "cuda")]
                Action::PrepareCuda => cuda::$operator::prepare(&problem),
                #[cfg(feature = "cuda")]
                // SAFETY: as on the CPU, and the caller guarantees that the stream belongs to the current context.
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
