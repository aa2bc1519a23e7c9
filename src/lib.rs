//! Attention operators for XLA programs: paged attention and what surrounds it, as custom calls of XLA's typed FFI on
//! CUDA and the CPU. The feature `cuda`, which is on by default, compiles the CUDA kernels and needs nvcc 13.0;
//! `default-features = false` builds the CPU operators without it, and `XLA_ATTENTION_CUDA_ARCHS=native` compiles the
//! kernels of this machine's GPUs alone. The first build downloads XLA's FFI headers with Python's pip, unless
//! `XLA_FFI_INCLUDE_DIR` names a folder that has them.
//!
//! From Rust, every operator is a safe function over host slices or device addresses. In this example one sequence has
//! two keys, which lie in page 1 of a cache, and the query is its last token:
//!
//! ```
//! use xla_attention::{On, PagedAttentionInputs, PagedAttentionOptions, TensorMut, TensorRef, paged_attention};
//!
//! let mut cache = [0.0f32; 2 * 4 * 2 * 8]; // [P, page_size, 2*Hkv, D]: K of head h at 2h, V at 2h+1
//! cache[4 * 16 + 8..][..8].fill(10.0); // V of page 1, token 0
//! cache[5 * 16 + 8..][..8].fill(30.0);
//! let inputs = PagedAttentionInputs {
//!     query: TensorRef::new(&[1.0f32; 8], &[1, 1, 8]), // [T, Hq, D]
//!     kv_cache: TensorRef::new(&cache, &[2, 4, 2, 8]),
//!     context_lens: TensorRef::new(&[2], &[1]),
//!     block_tables: TensorRef::new(&[1], &[1, 1]),
//!     query_start_loc: TensorRef::new(&[0, 1], &[2]),
//!     num_seqs: TensorRef::new(&[1], &[1]),
//! };
//! let options = PagedAttentionOptions { sliding_window: Some(128), ..Default::default() };
//! let mut out = [0.0f32; 8];
//! paged_attention(&inputs, &options, TensorMut::new(&mut out, &[1, 1, 8]), On::cpu())?;
//! assert!(out.iter().all(|x| (x - 20.0).abs() < 1e-5)); // both keys score the same
//! # Ok::<(), xla_attention::Error>(())
//! ```
//!
//! A call passes through these layers: a front-end (Python, an XLA runtime, or the functions of this crate), the bridge
//! or the C interface, [`call()`], which dispatches every operator, [`ops`], which validates its arguments, and a backend,
//! which computes. `docs/dev/architecture.md` has a drawing. `docs/semantics.md` defines what the operators compute.

// Unit tests leave out the bridge and the C interface, from which the compiler would reach, and compile, every kernel.
#![cfg_attr(test, allow(dead_code, unused_imports, reason = "what only these two use"))]

mod api;
#[cfg(not(test))]
mod bridge;
#[cfg(not(test))]
mod c_api;
mod cpu;
#[cfg(feature = "cuda")]
mod cuda;
mod debug_check;
mod dispatch;
mod environment;
mod error;
mod failpoint;
mod handlers;
mod layouts;
mod log;
mod panic_boundary;
#[cfg(feature = "cuda")]
mod pjrt_proxy;
mod pool;
#[doc(hidden)]
pub mod problem;
mod stream;
mod tensor;

#[cfg(doctest)]
#[doc = include_str!("../docs/quickstart_rust.md")]
mod quick_start {}

pub use api::*;
#[cfg(all(feature = "cuda", not(test)))]
pub use c_api::GetPjrtApi;
#[cfg(not(test))]
pub use c_api::{
    XaAttribute, XaCall, XaTensor, xa_bias_workspace, xa_call, xa_handler_set, xa_info, xa_layouts, xa_op,
    xa_stand_before_pjrt_plugin, xa_targets, xa_workspace,
};
pub use dispatch::{Action, Call, call};
pub use error::{Code, Error, Result};
#[cfg(feature = "failpoints")]
pub use failpoint::{Failpoint, arm};
/// The 16-bit floats of an [`Element`].
pub use half::{bf16, f16};
pub use handlers::{Handler, Target, Targets, targets};
pub use layouts::{XaLayouts, XaView};
pub use pool::{Pool, RayonPool, SingleThread, parallel_for};
#[doc(inline)]
pub use problem as ops;
pub use problem::{Attribute, Op};
pub use stream::Stream;
pub use tensor::{DType, Dim, Tensor};
