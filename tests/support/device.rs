//! Runs invocations on a GPU without XLA, with one allocation per buffer.

use super::log_capture::{assert_logged, log};
use super::{Array, BufferMemory, CallBuffers, Invocation, POISON, Refusal, Side, Strided, StridedLayout, on_emulator};
use cudarc::driver::sys::{self, CUdevice_attribute as Attribute, CUresult};
use std::cell::RefCell;
use std::ops::Range;
use xla_attention::{Action, Error, Stream};

/// Calls the driver and asserts success.
macro_rules! cuda {
    ($function:ident($($argument:expr),* $(,)?)) => {{
        // SAFETY: the arguments are valid handles or addresses of locals that the call writes.
        let result = unsafe { sys::$function($($argument),*) };
        assert_eq!(result, CUresult::CUDA_SUCCESS, stringify!($function));
    }};
}

/// What surrounds a buffer in its allocation.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum BufferPadding {
    /// The allocation is the buffer, so that compute-sanitizer sees every access outside.
    None,
    /// Redzones of NaN before and after. They must not change, and their contents must not affect the result.
    Redzones,
    /// Redzones, and an address that is aligned to the element size only.
    Misaligned,
}

const REDZONE: usize = 512;

/// Calls `work` with the GPU if `XLA_ATTENTION_TEST_DEVICE=cuda`.
pub fn on_chosen_gpu<T>(work: impl FnOnce(&Gpu) -> T) -> Option<T> {
    thread_local! {
        static GPU: Option<Gpu> = match std::env::var("XLA_ATTENTION_TEST_DEVICE").as_deref() {
            Ok("cuda") => Some(Gpu::first().expect("XLA_ATTENTION_TEST_DEVICE=cuda needs a driver and a GPU")),
            Ok("cpu") | Err(_) => None,
            Ok(other) => panic!("XLA_ATTENTION_TEST_DEVICE={other}, expected cpu or cuda"),
        };
    }
    GPU.with(|gpu| gpu.as_ref().map(work))
}

/// Runs the call on the GPU if `XLA_ATTENTION_TEST_DEVICE=cuda`: launched directly in exact allocations for one side, and
/// from a captured graph between redzones for the other, twice on a GPU.
pub fn run_if_chosen(call: &Invocation, side: Side) -> Option<Result<Vec<Array>, Refusal>> {
    let outcome = on_chosen_gpu(|gpu| match side {
        Side::EndsAtGuard => call.run_on_gpu(gpu, BufferPadding::None, 0),
        // The second replay would read an operand that the first one has overwritten.
        Side::BeginsAtGuard if call.results.iter().any(|r| r.alias.is_some()) => {
            call.run_on_gpu(gpu, BufferPadding::Redzones, 1)
        }
        Side::BeginsAtGuard => call.run_on_gpu(gpu, BufferPadding::Redzones, if on_emulator() { 1 } else { 2 }),
    });
    outcome.map(|outcome| outcome.map_err(|e| Refusal { code: e.code as i32, text: e.message }))
}

/// An attribute of device 0.
fn attribute(which: Attribute) -> i32 {
    let mut value = 0;
    cuda!(cuInit(0)); // A test may ask before its thread has a `Gpu`.
    cuda!(cuDeviceGetAttribute(&raw mut value, which, 0));
    value
}

/// A context and a stream on device 0. They live until the process ends.
pub struct Gpu {
    pub stream: sys::CUstream,
}

impl Gpu {
    /// `None` without a driver or a device.
    pub fn first() -> Option<Self> {
        // SAFETY: loads libcuda by name, initialises it and counts devices.
        unsafe {
            let mut count = 0;
            let there = sys::is_culib_present()
                && sys::cuInit(0) == CUresult::CUDA_SUCCESS
                && sys::cuDeviceGetCount(&raw mut count) == CUresult::CUDA_SUCCESS;
            if !there || count == 0 {
                return None;
            }
        }
        let (mut device, mut context, mut stream) = (0, std::ptr::null_mut(), std::ptr::null_mut());
        cuda!(cuDeviceGet(&raw mut device, 0));
        cuda!(cuDevicePrimaryCtxRetain(&raw mut context, device));
        cuda!(cuCtxSetCurrent(context));
        cuda!(cuStreamCreate(&raw mut stream, 1));
        Some(Self { stream })
    }

    /// As [`Gpu::first`]; prints that the test is skipped if there is none.
    pub fn or_skip() -> Option<Self> {
        Self::first().or_else(Self::skipped)
    }

    /// As [`Gpu::or_skip`], for a GPU that the tuned kernels support.
    pub fn with_tuned_kernels_or_skip() -> Option<Self> {
        Self::first().filter(|_| Self::runs_sm_90a()).or_else(Self::skipped)
    }

    #[allow(clippy::print_stdout, reason = "a skipped test says so")]
    fn skipped() -> Option<Self> {
        println!("skipped: this machine has no such GPU");
        None
    }

    /// Whether device 0 can run kernels for sm_90a, and its driver can make tensor maps.
    pub fn runs_sm_90a() -> bool {
        let mut version = 0;
        cuda!(cuDriverGetVersion(&raw mut version));
        let major = attribute(Attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR);
        let minor = attribute(Attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR);
        (major, minor) == (9, 0) && version >= 12000
    }

    /// Bytes of shared memory that a CTA may have.
    pub fn shared_memory() -> usize {
        attribute(Attribute::CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN) as usize
    }

    pub fn sms() -> usize {
        attribute(Attribute::CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT) as usize
    }

    pub fn finish(&self) {
        cuda!(cuStreamSynchronize(self.stream));
    }

    /// Captures `work` into a graph, replays it `times` times and waits.
    pub fn replay(&self, times: usize, work: impl FnOnce() -> Result<(), Error>) -> Result<(), Error> {
        let (mut graph, mut executable) = (std::ptr::null_mut(), std::ptr::null_mut());
        let mode = sys::CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_THREAD_LOCAL;
        cuda!(cuStreamBeginCapture_v2(self.stream, mode));
        let outcome = work();
        cuda!(cuStreamEndCapture(self.stream, &raw mut graph));
        cuda!(cuGraphInstantiateWithFlags(&raw mut executable, graph, 0));
        for _ in 0..times {
            cuda!(cuGraphLaunch(executable, self.stream));
        }
        self.finish();
        cuda!(cuGraphExecDestroy(executable));
        cuda!(cuGraphDestroy(graph));
        outcome
    }
}

/// A buffer in device memory.
pub struct DeviceBuffer {
    allocation: sys::CUdeviceptr,
    padding: usize,
    len: usize,
}

impl DeviceBuffer {
    /// Uploads `array` on the stream and waits. (A synchronous copy from pageable memory may return before its last
    /// part has arrived.)
    pub fn upload(gpu: &Gpu, array: &Array, padding: BufferPadding) -> Self {
        let (len, padding) = match padding {
            BufferPadding::None => (array.bytes.len(), 0),
            BufferPadding::Redzones => (array.bytes.len(), REDZONE),
            BufferPadding::Misaligned => (array.bytes.len(), REDZONE + array.dtype.size()),
        };
        let mut bytes = vec![POISON; len + 2 * padding];
        bytes[padding..padding + len].copy_from_slice(&array.bytes);
        let mut allocation = 0;
        cuda!(cuMemAlloc_v2(&raw mut allocation, bytes.len().max(1)));
        if !bytes.is_empty() {
            cuda!(cuMemcpyHtoDAsync_v2(allocation, bytes.as_ptr().cast(), bytes.len(), gpu.stream));
            gpu.finish();
        }
        Self { allocation, padding, len }
    }

    /// Fills the buffer with [`POISON`] on the stream.
    fn poison(&self, gpu: &Gpu) {
        if self.len != 0 {
            cuda!(cuMemsetD8Async(self.data() as sys::CUdeviceptr, POISON, self.len, gpu.stream));
        }
    }
}

impl BufferMemory for DeviceBuffer {
    /// A device address.
    fn data(&self) -> *mut u8 {
        (self.allocation as usize + self.padding) as *mut u8
    }

    /// Asserts that the redzones have not changed.
    fn read(&self, name: &str) -> Vec<u8> {
        let mut bytes = vec![0; self.len + 2 * self.padding];
        if !bytes.is_empty() {
            cuda!(cuMemcpyDtoH_v2(bytes.as_mut_ptr().cast(), self.allocation, bytes.len()));
        }
        let after = bytes.split_off(self.padding + self.len);
        let inside = bytes.split_off(self.padding);
        assert!(bytes.iter().chain(&after).all(|&b| b == POISON), "{name}: written outside");
        inside
    }
}

impl Drop for DeviceBuffer {
    fn drop(&mut self) {
        cuda!(cuMemFree_v2(self.allocation));
    }
}

/// One device allocation for all buffers of a call, and a host image of it. A call then needs no allocation and two
/// copies.
pub struct Arena {
    gpu: Gpu,
    device: sys::CUdeviceptr,
    image: *mut u8,
    size: usize,
    /// Offsets of the buffers of the current call.
    ranges: RefCell<Vec<Range<usize>>>,
}

impl Arena {
    /// An arena of `size` bytes, which live until the process ends.
    pub fn new(gpu: Gpu, size: usize) -> Self {
        let (mut device, mut image) = (0, std::ptr::null_mut());
        cuda!(cuMemAlloc_v2(&raw mut device, size));
        cuda!(cuMemAllocHost_v2(&raw mut image, size));
        Self { gpu, device, image: image.cast(), size, ranges: RefCell::default() }
    }

    /// Address of a part of the host image. No device copy accesses it, because each run waits for its copies.
    fn image(&self, range: &Range<usize>) -> *mut u8 {
        assert!(range.start <= range.end && range.end <= self.size, "a call of {} bytes", range.end);
        self.image.wrapping_add(range.start)
    }

    fn poison(&self, range: &Range<usize>) {
        // SAFETY: these bytes belong to the image, and no reference to them exists.
        unsafe { self.image(range).write_bytes(POISON, range.len()) };
    }

    fn read(&self, range: &Range<usize>) -> Vec<u8> {
        // SAFETY: these bytes belong to the image, and are not written before `to_vec` has copied them.
        unsafe { std::slice::from_raw_parts(self.image(range), range.len()) }.to_vec()
    }

    /// Removes the buffers of the previous call.
    pub fn clear(&self) {
        self.ranges.take();
    }

    /// Adds a buffer to the current call, after a redzone.
    pub fn add(&self, array: &Array, misaligned: bool) -> ArenaBuffer<'_> {
        let mut ranges = self.ranges.borrow_mut();
        let end = ranges.last().map_or(0, |last| last.end);
        let start = (end + REDZONE).next_multiple_of(256) + if misaligned { array.dtype.size() } else { 0 };
        let range = start..start + array.bytes.len();
        self.poison(&(end..start));
        // SAFETY: the image has `array.bytes.len()` bytes at `range`, and does not overlap with the array.
        unsafe { self.image(&range).copy_from_nonoverlapping(array.bytes.as_ptr(), array.bytes.len()) };
        ranges.push(range.clone());
        ArenaBuffer { arena: self, range }
    }

    /// Copies the buffers to the device, runs `work` and copies them back. Asserts that the redzones have not changed.
    pub fn run(&self, work: impl FnOnce(Stream) -> Result<(), String>) -> Result<(), String> {
        let ranges = self.ranges.take();
        let end = ranges.last().map_or(0, |last| last.end);
        let used = end + REDZONE;
        self.poison(&(end..used));
        cuda!(cuMemcpyHtoDAsync_v2(self.device, self.image.cast(), used, self.gpu.stream));
        let outcome = work(Stream(self.gpu.stream as usize));
        cuda!(cuMemcpyDtoHAsync_v2(self.image.cast(), self.device, used, self.gpu.stream));
        self.gpu.finish();
        outcome?;
        let mut before = 0;
        for range in ranges.into_iter().chain(std::iter::once(used..used)) {
            let redzone = self.read(&(before..range.start));
            assert!(redzone.iter().all(|&b| b == POISON), "written outside of the buffers");
            before = range.end;
        }
        Ok(())
    }
}

/// A buffer in an [`Arena`].
pub struct ArenaBuffer<'a> {
    arena: &'a Arena,
    range: Range<usize>,
}

impl BufferMemory for ArenaBuffer<'_> {
    /// A device address.
    fn data(&self) -> *mut u8 {
        (self.arena.device as usize + self.range.start) as *mut u8
    }

    /// The contents after [`Arena::run`].
    fn read(&self, _: &str) -> Vec<u8> {
        self.arena.read(&self.range)
    }
}

impl Invocation {
    /// Runs the call on the GPU: `replays` times from a captured graph, or launched directly if `replays` is 0.
    pub fn run_on_gpu(&self, gpu: &Gpu, padding: BufferPadding, replays: usize) -> Result<Vec<Array>, Error> {
        self.run_prepared(gpu, padding, replays, true)
    }

    /// Runs the call on the GPU and asserts that the log then contains all of `expected`: names of kernels that calls have taken.
    pub fn assert_logs(&self, gpu: &Gpu, expected: &[&str]) {
        let log = log();
        self.run_on_gpu(gpu, BufferPadding::Redzones, 0).unwrap();
        for text in expected {
            assert_logged(log, text);
        }
    }

    /// Launches the call on strided operands: `gap(name)` elements of NaN lie between the rows of each operand.
    pub fn run_strided_on_gpu(&self, gpu: &Gpu, gap: impl Fn(&str) -> i64) -> Result<Vec<Array>, Error> {
        let buffers = CallBuffers::new(self, |name, array| {
            let strided_layout = StridedLayout::new(array, &vec![gap(name); array.dims.len()]);
            Strided::new(array, Some(strided_layout), |array| DeviceBuffer::upload(gpu, array, BufferPadding::Redzones))
        });
        let [inputs, outputs] = buffers.views();
        let launch = Action::LaunchCuda(Stream(gpu.stream as usize));
        // SAFETY: the views are of `buffers`, which live until the stream has finished.
        unsafe { self.run_action(launch, &inputs, &outputs) }?;
        gpu.finish();
        Ok(buffers.results())
    }

    /// Captures the call before its kernels are loaded, and replays it once.
    pub fn run_unprepared(&self, gpu: &Gpu) -> Result<Vec<Array>, Error> {
        self.run_prepared(gpu, BufferPadding::Redzones, 1, false)
    }

    fn run_prepared(
        &self,
        gpu: &Gpu,
        padding: BufferPadding,
        replays: usize,
        prepare: bool,
    ) -> Result<Vec<Array>, Error> {
        let buffers = self.on_gpu(gpu, padding);
        let [inputs, outputs] = buffers.views();
        // SAFETY: the views are of `buffers`, which live until the stream has finished.
        let run = |action| unsafe { self.run_action(action, &inputs, &outputs) };
        let launch = Action::LaunchCuda(Stream(gpu.stream as usize));
        if replays == 0 {
            // Nothing is prepared, so that the launch loads the kernels.
            run(launch)?;
            gpu.finish();
        } else {
            if prepare {
                run(Action::PrepareCuda)?;
            }
            gpu.replay(replays, || run(launch))?;
        }
        Ok(buffers.results())
    }

    /// Launches the call `launches` times, each time with poisoned results. Asserts that the first `compared` results
    /// have the same bits each time. A call `beside` is launched on another stream just before each launch.
    pub fn assert_same_bits(&self, gpu: &Gpu, launches: usize, compared: usize, beside: Option<(&Gpu, &Self)>) {
        let buffers = self.on_gpu(gpu, BufferPadding::None);
        let beside = beside.map(|(gpu, call)| (gpu, call, call.on_gpu(gpu, BufferPadding::None)));
        let mut first: Option<Vec<Vec<u8>>> = None;
        for launch in 0..launches {
            (0..self.results.len()).for_each(|index| buffers.result(index).poison(gpu));
            if let Some((gpu, call, buffers)) = &beside {
                call.launch_on(gpu, buffers);
            }
            self.launch_on(gpu, &buffers);
            gpu.finish();
            let now: Vec<Vec<u8>> = (0..compared).map(|index| buffers.result(index).read("a result")).collect();
            let description = format!("{} {}: launch {launch}", self.target, self.description);
            assert!(
                first.get_or_insert_with(|| now.clone()) == &now,
                "{description} has other bits than the first one"
            );
        }
        if let Some((gpu, ..)) = &beside {
            gpu.finish();
        }
    }

    /// Launches on buffers that the caller keeps until the stream has finished.
    fn launch_on(&self, gpu: &Gpu, buffers: &CallBuffers<'_, DeviceBuffer>) {
        let [inputs, outputs] = buffers.views();
        // SAFETY: the views are of the caller's buffers, which live until the stream has finished.
        unsafe { self.run_action(Action::LaunchCuda(Stream(gpu.stream as usize)), &inputs, &outputs) }.unwrap();
    }

    /// Uploads the call's buffers.
    pub fn on_gpu(&self, gpu: &Gpu, padding: BufferPadding) -> CallBuffers<'_, DeviceBuffer> {
        CallBuffers::new(self, |_, array| DeviceBuffer::upload(gpu, array, padding))
    }
}
