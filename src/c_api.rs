//! The C interface, which is all that the shared library exports: the tables of handlers for XLA, and `xa_call` for all
//! other callers.
//!
//! It is plain C without a Python ABI: `ctypes`, eager torch and PJRT programs in any language use it. A panic in one of
//! the functions becomes its error, or its failure value if it returns no error.

use crate::debug_check;
use crate::dispatch::{Action, Call, call};
use crate::error::{Error, Result, ensure, with_room};
use crate::failpoint::{self, Failpoint};
use crate::handlers::{self, Targets};
use crate::layouts::{self, XaLayouts};
use crate::log;
use crate::panic_boundary::catch_panic;
#[cfg(feature = "cuda")]
use crate::pjrt_proxy::{self, wrap};
use crate::pool::RayonPool;
use crate::problem::workspace::{AttentionSizes, BiasSizes};
use crate::problem::{self, Attribute, AttributeKind, Op};
use crate::stream::Stream;
use crate::tensor::{DType, Tensor};
use std::ffi::{CStr, c_char, c_void};
use std::mem::{MaybeUninit, offset_of};
use std::sync::OnceLock;

/// Runs the body of an exported function. Returns its result, or the message of its panic.
fn entered<T>(work: impl FnOnce() -> T) -> std::result::Result<T, String> {
    catch_panic(|| {
        failpoint::trigger(Failpoint::CApi);
        work()
    })
}

/// Returns what `work` returns, or `failure` if it panics.
fn or_failure<T>(failure: T, work: impl FnOnce() -> T) -> T {
    entered(work).unwrap_or(failure)
}

/// Returns what `work` returns, or an error of the exported function `name` if it panics.
fn or_error(name: &str, work: impl FnOnce() -> Result) -> Result {
    entered(work).unwrap_or_else(|text| Err(Error::internal(format!("{name}: panic: {text}"))))
}

/// The table of targets with handlers of the oldest API, valid for the life of the process; null if it cannot be made.
#[unsafe(no_mangle)]
pub extern "C" fn xa_targets() -> *const Targets {
    xa_handler_set(0)
}

/// The same targets with handlers of another version of the API: 0 is the oldest, higher numbers are newer. Null past the
/// last, or if it cannot be made.
///
/// Register one set with a runtime: the newest one with the runtime's major version and no later minor version. A handler
/// of a later version answers a metadata query with a struct that is longer than the runtime's.
#[unsafe(no_mangle)]
pub extern "C" fn xa_handler_set(number: usize) -> *const Targets {
    or_failure(std::ptr::null(), || {
        log::init();
        // The environment variable is read here, before XLA can call a handler.
        debug_check::is_enabled();
        handlers::sets().get(number).map_or(std::ptr::null(), std::ptr::from_ref)
    })
}

/// A tensor in the C interface.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct XaTensor {
    /// First element. In a call with [`XaCall::addresses`], its index among these, as a number.
    pub data: *mut c_void,
    /// `rank` sizes.
    pub dims: *const i64,
    /// `rank` distances in elements, or null for a dense tensor.
    pub strides: *const i64,
    /// Number of dimensions.
    pub rank: i32,
    /// XLA's number of the element type; 0 for a tensor that is left out.
    pub dtype: i32,
}

/// An attribute in the C interface.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct XaAttribute {
    /// 0 is i1, 1 is i64, 2 is f32.
    pub kind: i32,
    /// The value of an f32.
    pub real: f32,
    /// The value of the others.
    pub integer: i64,
}

/// A call in the C interface. A program sets all of it to 0 first, since later versions have more fields.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct XaCall {
    /// `sizeof` of this struct, which only grows at its end.
    pub struct_size: usize,
    /// The operator's number, from [`xa_op`].
    pub op: i32,
    /// 0: validate only; 1: run on the CPU; 2: load CUDA modules; 3: launch on `stream`.
    pub action: i32,
    /// In the order of the operator's declaration.
    pub operands: *const XaTensor,
    /// Their number.
    pub num_operands: usize,
    /// In the order of the operator's declaration, the workspace included.
    pub results: *const XaTensor,
    /// Their number.
    pub num_results: usize,
    /// In alphabetical order of their names.
    pub attributes: *const XaAttribute,
    /// Their number.
    pub num_attributes: usize,
    /// A `CUstream` of the current context.
    pub stream: *mut c_void,
    /// Null, or addresses, to which [`XaTensor::data`] is then an index, so that a program that repeats a call changes nothing
    /// else. The first version of this struct ends before this field.
    pub addresses: *const *mut c_void,
    /// Their number.
    pub num_addresses: usize,
}

/// The number of the operator with this target name, or -1.
///
/// # Safety
/// `target` is a terminated string.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn xa_op(target: *const c_char) -> i32 {
    or_failure(-1, || {
        // SAFETY: the caller guarantees a terminated string.
        let name = unsafe { CStr::from_ptr(target) }.to_bytes();
        Op::ALL.into_iter().find(|op| op.signature().target.as_bytes() == name).map_or(-1, |op| op as i32)
    })
}

/// Validate, run or launch an operator. Returns 0 or XLA's error code, with the text in `message` (terminated, truncated to
/// `capacity` bytes).
///
/// A request of an earlier version may be shorter than [`XaCall`], but not shorter than that of the first version, which
/// ended with `stream`; the fields that it lacks count as 0. A request of a later version may be longer. Its additional
/// fields must be 0, otherwise the request is refused, because this version does not support them.
///
/// # Safety
/// The struct, all of its `struct_size` bytes, and everything it points to is valid; memory as [`call()`] asks;
/// `message` has room for `capacity` bytes.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn xa_call(request: *const XaCall, message: *mut c_char, capacity: usize) -> i32 {
    let result = or_error("xa_call", || {
        log::init();
        // SAFETY: the caller guarantees a valid struct and everything that it points to.
        unsafe { enter(&validated_request(request)?) }
    });
    // SAFETY: the caller guarantees that `message` has room for `capacity` bytes.
    unsafe { report(result, message, capacity) }
}

/// A copy of the request with all fields of this version, if this version supports all that it asks for.
///
/// # Safety
/// As [`xa_call`].
unsafe fn validated_request(request: *const XaCall) -> Result<XaCall> {
    const FIRST_SIZE: usize = offset_of!(XaCall, addresses);
    const KNOWN_SIZE: usize = size_of::<XaCall>();
    // A larger number is not the size of any version's struct, but an uninitialized field.
    const MAX_SIZE: usize = 1 << 12;
    // SAFETY: the caller guarantees that a request that is not null begins with its size.
    let size = if request.is_null() { 0 } else { unsafe { (&raw const (*request).struct_size).read() } };
    ensure((FIRST_SIZE..=MAX_SIZE).contains(&size), || {
        format!(
            "xa_call: the request is a struct of {size} bytes, expected {KNOWN_SIZE} or, of another version, from {FIRST_SIZE} on"
        )
    })?;
    // SAFETY: the caller guarantees that `size` bytes are readable.
    let bytes = unsafe { std::slice::from_raw_parts(request.cast::<u8>(), size) };
    let (known, tail) = bytes.split_at(size.min(KNOWN_SIZE));
    ensure(tail.iter().all(|byte| *byte == 0), || {
        format!("xa_call: the request asks for something that this version does not know, past its {KNOWN_SIZE} bytes")
    })?;
    let mut copy = MaybeUninit::<XaCall>::zeroed();
    // SAFETY: `known` fits into the copy; all fields are numbers and addresses, for which every pattern of bits is valid.
    Ok(unsafe {
        copy.as_mut_ptr().cast::<u8>().copy_from_nonoverlapping(known.as_ptr(), known.len());
        copy.assume_init()
    })
}

/// Returns the code of a result and writes the error's text to `message`.
///
/// # Safety
/// `message` has room for `capacity` bytes.
unsafe fn report(result: Result, message: *mut c_char, capacity: usize) -> i32 {
    let Err(Error { code, message: text }) = result else { return 0 };
    if capacity > 0 {
        let cut = text.floor_char_boundary(capacity - 1);
        // SAFETY: `cut` bytes and the zero fit into `capacity`.
        unsafe {
            std::ptr::copy_nonoverlapping(text.as_ptr(), message.cast(), cut);
            message.add(cut).write(0);
        }
    }
    code as i32
}

/// # Safety
/// As [`xa_call`].
unsafe fn enter(request: &XaCall) -> Result {
    let op = Op::from_number(request.op).ok_or_else(|| Error::invalid(format!("no operator {}", request.op)))?;
    let action = match request.action {
        0 => Action::Check,
        1 => Action::RunOnCpu(&RayonPool),
        2 => Action::PrepareCuda,
        3 => Action::LaunchCuda(Stream(request.stream as usize)),
        n => return Err(Error::invalid(format!("action is {n}, expected 0 to 3"))),
    };
    let signature = op.signature();
    // SAFETY: the caller guarantees that addresses which are not null are as many as it says.
    let addresses = (!request.addresses.is_null()).then(|| unsafe { slice(request.addresses, request.num_addresses) });
    let decoded = || -> Result<_> {
        // SAFETY: the caller guarantees that each pointer is valid for its count.
        unsafe {
            Ok((
                tensors(slice(request.operands, request.num_operands), addresses, "operand", signature.operands)?,
                tensors(slice(request.results, request.num_results), addresses, "result", signature.results)?,
                attributes(slice(request.attributes, request.num_attributes), signature.attributes)?,
            ))
        }
    };
    let (operands, results, attributes) = decoded().map_err(|e| e.of(signature.target))?;
    // SAFETY: the caller guarantees what `call` requires of memory and stream.
    unsafe { call(&Call { op, action, operands: &operands, results: &results, attributes: &attributes }) }
}

/// # Safety
/// `first` points to `count` values, or `count` is 0.
unsafe fn slice<'a, T>(first: *const T, count: usize) -> &'a [T] {
    // SAFETY: the caller guarantees that `first` points to `count` values.
    if count == 0 { &[] } else { unsafe { std::slice::from_raw_parts(first, count) } }
}

/// # Safety
/// Sizes and strides of each point to `rank` values.
unsafe fn tensors<'a>(
    raw: &'a [XaTensor],
    addresses: Option<&[*mut c_void]>,
    kind: &str,
    names: &[&str],
) -> Result<Vec<Tensor<'a>>> {
    // Collecting into a `Result` would allocate several times.
    let mut tensors = with_room(raw.len())?;
    for (index, raw) in raw.iter().enumerate() {
        let name = || names.get(index).map_or_else(|| format!("{kind} {index}"), ToString::to_string);
        let rank =
            usize::try_from(raw.rank).map_err(|_| Error::invalid(format!("{} has rank {}", name(), raw.rank)))?;
        let data = match addresses {
            Some(addresses) if raw.dtype != DType::ABSENT.0 => *addresses.get(raw.data as usize).ok_or_else(|| {
                Error::invalid(format!("{} has address {}, of {}", name(), raw.data as usize, addresses.len()))
            })?,
            _ => raw.data,
        };
        // SAFETY: the caller guarantees `rank` sizes.
        let dims = unsafe { slice(raw.dims, rank) };
        // SAFETY: the caller guarantees that strides which are not null are `rank` values.
        let strides = (!raw.strides.is_null()).then(|| unsafe { slice(raw.strides, rank) });
        // The strides of an empty tensor have no meaning, so they need not be validated.
        let strides = strides.filter(|_| !dims.contains(&0));
        tensors.push(Tensor { dtype: DType(raw.dtype), data: data.cast(), dims, strides });
    }
    Ok(tensors)
}

fn attributes(raw: &[XaAttribute], names: &[(&str, AttributeKind)]) -> Result<Vec<Attribute>> {
    let mut attributes = with_room(raw.len())?;
    for (index, raw) in raw.iter().enumerate() {
        attributes.push(match raw.kind {
            0 => Attribute::Bool(raw.integer != 0),
            1 => Attribute::I64(raw.integer),
            2 => Attribute::F32(raw.real),
            n => {
                let name = names.get(index).map_or_else(|| index.to_string(), |(name, _)| (*name).to_owned());
                return Err(Error::invalid(format!("attribute {name} has kind {n}, expected 0 to 2")));
            }
        });
    }
    Ok(attributes)
}

/// Wrap the PJRT plugin at `path`: from now on `GetPjrtApi` returns that plugin's function table, changed so that
/// `torch_xla` 2.9 can use it. Returns 0 or XLA's error code, with the text in `message` as [`xa_call`] does.
///
/// # Safety
/// `path` is a terminated string, `message` has room for `capacity` bytes.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn xa_stand_before_pjrt_plugin(
    path: *const c_char,
    message: *mut c_char,
    capacity: usize,
) -> i32 {
    let result = or_error("xa_stand_before_pjrt_plugin", || {
        // SAFETY: the caller guarantees a terminated string.
        unsafe { CStr::from_ptr(path) }
            .to_str()
            .map_err(|_| Error::invalid("the plugin's path is not UTF-8"))
            .and_then(wrap)
    });
    // SAFETY: the caller guarantees that `message` has room for `capacity` bytes.
    unsafe { report(result, message, capacity) }
}

#[cfg(not(feature = "cuda"))]
fn wrap(_: &str) -> Result {
    Err(Error::unimplemented("this build has no CUDA backend; build with the feature `cuda`"))
}

/// The entry point of a PJRT plugin, see [`xa_stand_before_pjrt_plugin`]; null until a plugin is wrapped.
#[cfg(feature = "cuda")]
#[unsafe(no_mangle)]
#[allow(non_snake_case, reason = "the name that PJRT asks for")]
pub extern "C" fn GetPjrtApi() -> *const c_void {
    or_failure(std::ptr::null(), pjrt_proxy::table)
}

/// Write the addresses of a framework's tensors, and a key: two lists of tensors have equal keys exactly if they have equal
/// dtypes, devices, sizes and strides, and if the same of their tensors begin at one address.
///
/// Returns the number of bytes of the key; -1 if `describe` fails, which may have set an error of its own, or if this version
/// does not know the request (see [`xa_call`]); -2 if there is no room for the key.
///
/// # Safety
/// The struct, all of its `struct_size` bytes, and everything that it points to is valid; `addresses` has room for `count`
/// addresses, `key` for `capacity` bytes. The caller has what both functions ask for, such as Python's lock.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn xa_layouts(request: *const XaLayouts) -> i32 {
    // SAFETY: the caller guarantees it.
    or_failure(layouts::FAILED, || unsafe { layouts::write(request) })
}

/// The recommended size of an operator's workspace in bytes, `c[0] + c[1] * T + c[2] * B` for T query rows and B sequences,
/// which is the same on every machine. All three are 0 for an operator without a workspace and for sizes that no call can
/// have. A call accepts a workspace of any size, and none.
///
/// `dtype` is XLA's number of q's element type; `batch_invariant` has no meaning for the gradients.
///
/// # Safety
/// `c` has room for three numbers.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn xa_workspace(
    op: i32,
    num_q_heads: i64,
    num_kv_heads: i64,
    head_dim: i64,
    value_dim: i64,
    dtype: i32,
    batch_invariant: bool,
    c: *mut [i64; 3],
) {
    let coefficients = or_failure([0; 3], || {
        let dtype = DType(dtype);
        let sizes = AttentionSizes { num_q_heads, num_kv_heads, head_dim, value_dim, dtype, batch_invariant };
        let size = Op::from_number(op).and_then(|op| sizes.workspace_of(op));
        size.map_or([0; 3], |size| [size.fixed, size.per_row, size.per_sequence])
    });
    // SAFETY: the caller guarantees that `c` has room for three numbers.
    unsafe { c.write(coefficients) };
}

/// What a bias of `num_keys` keys per row (Sk) adds to that size in a call without a soft cap and ALiBi: `c[0] + c[1] * R` bytes for R
/// rows of the bias, Sq for each of its sequences and heads. Both are 0 where no kernel copies the bias or stores dS.
///
/// `bias_dtype` is XLA's number of its element type, q's or f32; `is_shared` is whether sequences or heads share it, `is_masked` whether the
/// call has a causal mask or a window, `has_gradient` whether it has the gradient of the bias, and `num_rows` are its query rows (Tq) and
/// `num_bias_rows` those R rows, each 0 if it is not known; the other parameters are those of [`xa_workspace`].
///
/// # Safety
/// `c` has room for two numbers.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn xa_bias_workspace(
    op: i32,
    num_q_heads: i64,
    head_dim: i64,
    value_dim: i64,
    dtype: i32,
    batch_invariant: bool,
    num_keys: i64,
    bias_dtype: i32,
    is_shared: bool,
    is_masked: bool,
    has_gradient: bool,
    num_rows: i64,
    num_bias_rows: i64,
    c: *mut [i64; 2],
) {
    let coefficients = or_failure([0; 2], || {
        let (num_kv_heads, dtype) = (1, DType(dtype));
        let sizes = AttentionSizes { num_q_heads, num_kv_heads, head_dim, value_dim, dtype, batch_invariant };
        let (keys, rows, bias_rows) = (num_keys, num_rows, num_bias_rows);
        let bias = BiasSizes { keys, dtype: DType(bias_dtype), is_shared, is_masked, has_gradient, rows, bias_rows };
        let size = Op::from_number(op).map(|op| sizes.bias_workspace(op, bias));
        size.map_or([0; 2], |size| [size.fixed, size.per_bias_row])
    });
    // SAFETY: the caller guarantees that `c` has room for two numbers.
    unsafe { c.write(coefficients) };
}

/// The contents of this build as JSON: `version`, `xla_ffi` (the version of `xa_targets`), `handler_sets` (all versions,
/// the oldest first), `cuda`, `cuda_archs` (the architectures of its kernels), `failpoints` (whether tests can make calls
/// fail; never in a library for users), `check` (debug check mode), `targets`, `operators` (the declarations of
/// `ffi/operators.toml`), `variants` with their resources. Valid for the life of the process; null if it cannot be made.
#[unsafe(no_mangle)]
pub extern "C" fn xa_info() -> *const c_char {
    static INFO: OnceLock<String> = OnceLock::new();
    or_failure(std::ptr::null(), || INFO.get_or_init(|| info() + "\0").as_ptr().cast())
}

fn info() -> String {
    let versions: Vec<String> =
        handlers::sets().iter().map(|set| format!("[{},{}]", set.api_major, set.api_minor)).collect();
    let mut targets: Vec<String> = Vec::new();
    for row in handlers::targets() {
        // SAFETY: each row of the table holds two terminated strings.
        let (name, platform) = unsafe { (CStr::from_ptr(row.name), CStr::from_ptr(row.platform)) };
        targets.push(format!("[{:?},{:?}]", name.to_string_lossy(), platform.to_string_lossy()));
    }
    format!(
        "{{\"version\":{:?},\"xla_ffi\":{},\"handler_sets\":[{}],\"cuda\":{},\"cuda_archs\":{:?},\"failpoints\":{},\"check\":{},\"targets\":[{}],\"operators\":{},\"variants\":[{}]}}",
        env!("CARGO_PKG_VERSION"),
        versions[0],
        versions.join(","),
        cfg!(feature = "cuda"),
        cuda_archs(),
        cfg!(feature = "failpoints"),
        debug_check::is_enabled(),
        targets.join(","),
        problem::OPERATORS_JSON,
        variants(),
    )
}

#[cfg(feature = "cuda")]
fn cuda_archs() -> &'static str {
    crate::cuda::variants::ARCHITECTURES
}

#[cfg(not(feature = "cuda"))]
fn cuda_archs() -> &'static str {
    "none"
}

#[cfg(feature = "cuda")]
fn variants() -> String {
    use std::fmt::Write as _;

    let mut text = String::new();
    for variant in crate::cuda::variants::VARIANTS.iter().filter(|variant| variant.is_built()) {
        let comma = if text.is_empty() { "" } else { "," };
        let _ = write!(text, "{comma}{{\"name\":{:?},\"ptx\":{:?},\"sass\":{{", variant.name, variant.ptx_version);
        for (i, (arch, r)) in variant.resources.iter().enumerate() {
            let comma = if i == 0 { "" } else { "," };
            let _ = write!(text, "{comma}{arch:?}:[{},{},{}]", r.registers, r.spill_bytes, r.smem_bytes);
        }
        text += "}}";
    }
    text
}

#[cfg(not(feature = "cuda"))]
fn variants() -> String {
    String::new()
}
