//! Attention operators for XLA programs: paged attention and what surrounds it, as custom calls of XLA's typed FFI on
//! CUDA and the CPU.
//!
//! A call walks down this list: a front-end (Python, an XLA runtime, [`call()`] from Rust), the bridge or the C
//! interface, [`ops`] which validates, and a backend which computes. `docs/architecture.md` draws it.
//!
//! From Rust:
//!
//! ```
//! use xla_attention::{Action, Call, DType, Op, RayonPool, Tensor, call};
//!
//! let (a, b, mut out) = ([1.0f32, 2.0, 3.0], [10.0f32, 20.0, 30.0], [0.0f32; 3]);
//! let view = |data: *const f32| Tensor::dense(DType::F32, data.cast_mut().cast(), &[3]);
//! let (operands, results) = ([view(a.as_ptr()), view(b.as_ptr())], [view(out.as_mut_ptr())]);
//! let action = Action::RunOnCpu(&RayonPool);
//! // SAFETY: the views describe the arrays above; nothing else uses them during the call.
//! unsafe { call(&Call { op: Op::SimpleAdd, action, operands: &operands, results: &results, attributes: &[] }) }?;
//! assert_eq!(out, [11.0, 22.0, 33.0]);
//! # Ok::<(), xla_attention::Error>(())
//! ```

mod bridge;
mod c_api;
mod call;
mod cpu;
#[cfg(feature = "cuda")]
mod cuda;
mod error;
mod log;
pub mod ops;
#[cfg(feature = "cuda")]
mod pjrt_plugin;
mod pool;
mod stream;
mod tensor;

#[cfg(feature = "cuda")]
pub use c_api::GetPjrtApi;
pub use c_api::{
    Handler, Target, Targets, XaAttribute, XaCall, XaTensor, targets, xa_attention_workspace, xa_call, xa_info, xa_op,
    xa_stand_before_pjrt_plugin, xa_targets,
};
pub use call::{Action, Call, Op, call};
pub use error::{Code, Error, Result};
pub use ops::Attribute;
pub use pool::{Pool, RayonPool, SingleThread, parallel_for};
pub use stream::Stream;
pub use tensor::{DType, Dim, Tensor};
