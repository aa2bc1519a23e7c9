//! Where a call runs.

use super::views::{Device, Host};
use crate::dispatch::Action;
use crate::pool::{Pool, RayonPool};
use crate::stream::Stream;
use std::marker::PhantomData;

/// Where a call runs, and therefore where its tensors must be: `M` is [`Host`] or [`Device`].
///
/// A call on the device with tensors of the host does not compile:
///
/// ```compile_fail,E0308
/// use xla_attention::{Device, On, TensorMut, TensorRef, simple_add};
///
/// fn add_on(gpu: On<Device>, a: &[f32], out: &mut [f32]) -> xla_attention::Result {
///     let a = TensorRef::new(a, &[a.len()]);
///     simple_add(a, a, TensorMut::new(out, &[4]), gpu)
/// }
/// ```
#[derive(Clone, Copy)]
pub struct On<'a, M> {
    pub(super) action: Action<'a>,
    memory: PhantomData<M>,
}

impl On<'static, Host> {
    /// The CPU with rayon's global thread pool. The call returns when the results are written.
    #[must_use]
    pub fn cpu() -> Self {
        On::pool(&RayonPool)
    }
}

impl<'a> On<'a, Host> {
    /// The CPU with the threads of `pool` and the calling thread.
    ///
    /// ```
    /// use xla_attention::{On, SingleThread};
    ///
    /// let here = On::pool(&SingleThread);
    /// ```
    #[must_use]
    pub fn pool(pool: &'a dyn Pool) -> Self {
        Self { action: Action::RunOnCpu(pool), memory: PhantomData }
    }
}

impl On<'static, Device> {
    /// A CUDA stream. The call enqueues its work and returns. It neither synchronizes nor allocates, so it can be
    /// captured into a CUDA graph. The first call of an operator loads its kernels.
    ///
    /// ```no_run
    /// use xla_attention::{DType, Error, On, Stream, TensorMut, TensorRef, simple_add};
    ///
    /// /// `out = a + a` for `n` f32 in device memory, on a stream that another library owns.
    /// ///
    /// /// # Safety
    /// /// The stream's context is current. Until the stream has finished this work, nothing else writes `a` or uses `out`.
    /// unsafe fn double(a: u64, out: u64, n: usize, stream: usize) -> Result<(), Error> {
    ///     // SAFETY: this function's contract.
    ///     let (a, out, on) = unsafe {
    ///         (
    ///             TensorRef::from_device(a as usize, 4 * n, DType::F32, &[n]),
    ///             TensorMut::from_device(out as usize, 4 * n, DType::F32, &[n]),
    ///             On::stream(Stream(stream)),
    ///         )
    ///     };
    ///     simple_add(a, a, out, on)
    /// }
    /// ```
    ///
    /// # Safety
    /// During each call the stream exists, and its context is current on the calling thread.
    #[must_use]
    pub unsafe fn stream(stream: Stream) -> Self {
        Self { action: Action::LaunchCuda(stream), memory: PhantomData }
    }
}
