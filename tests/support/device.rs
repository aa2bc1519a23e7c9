//! Runs invocations in memory of a GPU, one allocation an operand, without XLA.

use super::{Array, BufferMemory, CallBuffers, Invocation, POISON, Refusal, Side};
use cudarc::driver::sys::{self, CUdevice_attribute as Attribute, CUresult};
use std::cell::RefCell;
use std::ops::Range;
use xla_attention::{Action, Error, Stream};

/// The driver call succeeds.
macro_rules! cuda {
    ($function:ident($($argument:expr),* $(,)?)) => {{
        // SAFETY: arguments are live handles, or addresses of locals that the call writes.
        let result = unsafe { sys::$function($($argument),*) };
        assert_eq!(result, CUresult::CUDA_SUCCESS, stringify!($function));
    }};
}

/// What lies around a buffer in its allocation.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum BufferPadding {
    /// Nothing: compute-sanitizer sees every byte outside.
    None,
    /// Bytes of NaN before and after, which must not change and whose values must not matter.
    Redzones,
    /// The same, and every buffer is aligned to its element and to nothing more.
    Misaligned,
}

const REDZONE: usize = 512;

/// What `work` gives on the GPU, if the environment chooses it.
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

/// The outcome on the GPU, if the environment chooses it: launched directly with nothing around the buffers, then out of a
/// captured graph with redzones.
pub fn run_if_chosen(call: &Invocation, side: Side) -> Option<Result<Vec<Array>, Refusal>> {
    let outcome = on_chosen_gpu(|gpu| match side {
        Side::EndsAtGuard => call.run_on_gpu(gpu, BufferPadding::None, 0),
        // A second replay would start from what the first has written over an operand.
        Side::BeginsAtGuard if call.results.iter().any(|r| r.alias.is_some()) => {
            call.run_on_gpu(gpu, BufferPadding::Redzones, 1)
        }
        Side::BeginsAtGuard => call.run_on_gpu(gpu, BufferPadding::Redzones, 2),
    });
    outcome.map(|outcome| outcome.map_err(|e| Refusal { code: e.code as i32, text: e.message }))
}

/// Of device 0.
fn attribute(which: Attribute) -> i32 {
    let mut value = 0;
    cuda!(cuDeviceGetAttribute(&raw mut value, which, 0));
    value
}

/// A context and a stream on device 0; never given back, as in a program that ends.
pub struct Gpu {
    pub stream: sys::CUstream,
}

impl Gpu {
    /// `None` where there is no driver or no device.
    pub fn first() -> Option<Self> {
        // SAFETY: loads libcuda by name; initialises it; counts devices.
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

    /// As [`Gpu::first`]; that there is none is said.
    pub fn or_skip() -> Option<Self> {
        Self::first().or_else(Self::skipped)
    }

    /// Likewise of one for which kernels are tuned.
    pub fn with_tuned_kernels_or_skip() -> Option<Self> {
        Self::first().filter(|_| Self::runs_sm_90a()).or_else(Self::skipped)
    }

    #[allow(clippy::print_stdout, reason = "a skipped test says so")]
    fn skipped() -> Option<Self> {
        println!("skipped: this machine has no such GPU");
        None
    }

    /// Kernels for sm_90a run on device 0: it is a Hopper, and the driver makes tensor maps.
    pub fn runs_sm_90a() -> bool {
        let mut version = 0;
        cuda!(cuDriverGetVersion(&raw mut version));
        let major = attribute(Attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR);
        let minor = attribute(Attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR);
        (major, minor) == (9, 0) && version >= 12000
    }

    pub fn sms() -> usize {
        attribute(Attribute::CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT) as usize
    }

    pub fn finish(&self) {
        cuda!(cuStreamSynchronize(self.stream));
    }

    /// Record `work` on the stream, replay it `times` times and wait.
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

/// Device memory of a buffer.
pub struct Memory {
    allocation: sys::CUdeviceptr,
    around: usize,
    len: usize,
}

impl Memory {
    /// On the stream and waited for: a plain copy returns while the last step of a large one is still under way.
    pub fn place(gpu: &Gpu, array: &Array, around: BufferPadding) -> Self {
        let (len, around) = match around {
            BufferPadding::None => (array.bytes.len(), 0),
            BufferPadding::Redzones => (array.bytes.len(), REDZONE),
            BufferPadding::Misaligned => (array.bytes.len(), REDZONE + array.dtype.size()),
        };
        let mut bytes = vec![POISON; len + 2 * around];
        bytes[around..around + len].copy_from_slice(&array.bytes);
        let mut allocation = 0;
        cuda!(cuMemAlloc_v2(&raw mut allocation, bytes.len().max(1)));
        if !bytes.is_empty() {
            cuda!(cuMemcpyHtoDAsync_v2(allocation, bytes.as_ptr().cast(), bytes.len(), gpu.stream));
            gpu.finish();
        }
        Self { allocation, around, len }
    }

    /// As if nothing had been written to it, in the stream's order.
    fn poison(&self, gpu: &Gpu) {
        if self.len != 0 {
            cuda!(cuMemsetD8Async(self.data() as sys::CUdeviceptr, POISON, self.len, gpu.stream));
        }
    }
}

impl BufferMemory for Memory {
    /// On the device.
    fn data(&self) -> *mut u8 {
        (self.allocation as usize + self.around) as *mut u8
    }

    /// The redzones are as they were.
    fn read(&self, what: &str) -> Vec<u8> {
        let mut bytes = vec![0; self.len + 2 * self.around];
        if !bytes.is_empty() {
            cuda!(cuMemcpyDtoH_v2(bytes.as_mut_ptr().cast(), self.allocation, bytes.len()));
        }
        let after = bytes.split_off(self.around + self.len);
        let inside = bytes.split_off(self.around);
        assert!(bytes.iter().chain(&after).all(|&b| b == POISON), "{what}: written outside");
        inside
    }
}

impl Drop for Memory {
    fn drop(&mut self) {
        cuda!(cuMemFree_v2(self.allocation));
    }
}

/// One allocation for all buffers of a call and its image on the host, so that a call allocates nothing and copies twice.
pub struct Arena {
    gpu: Gpu,
    device: sys::CUdeviceptr,
    image: *mut u8,
    size: usize,
    /// Where the buffers of the call lie.
    ranges: RefCell<Vec<Range<usize>>>,
}

impl Arena {
    /// Of `size` bytes; never given back, as its [`Gpu`].
    pub fn new(gpu: Gpu, size: usize) -> Self {
        let (mut device, mut image) = (0, std::ptr::null_mut());
        cuda!(cuMemAlloc_v2(&raw mut device, size));
        cuda!(cuMemAllocHost_v2(&raw mut image, size));
        Self { gpu, device, image: image.cast(), size, ranges: RefCell::default() }
    }

    /// Where a part of the image begins, which is readable and writable. The device has done with it: each run waits.
    fn image(&self, range: &Range<usize>) -> *mut u8 {
        assert!(range.start <= range.end && range.end <= self.size, "a call of {} bytes", range.end);
        self.image.wrapping_add(range.start)
    }

    fn poison(&self, range: &Range<usize>) {
        // SAFETY: bytes of the image, to which there is no reference.
        unsafe { self.image(range).write_bytes(POISON, range.len()) };
    }

    fn read(&self, range: &Range<usize>) -> Vec<u8> {
        // SAFETY: bytes of the image, which nothing writes before they are copied.
        unsafe { std::slice::from_raw_parts(self.image(range), range.len()) }.to_vec()
    }

    /// Before the first buffer of a call.
    pub fn clear(&self) {
        self.ranges.take();
    }

    /// A buffer after those of the call so far, with a redzone before it.
    pub fn place(&self, array: &Array, misaligned: bool) -> ArenaBuffer<'_> {
        let mut ranges = self.ranges.borrow_mut();
        let end = ranges.last().map_or(0, |last| last.end);
        let start = (end + REDZONE).next_multiple_of(256) + if misaligned { array.dtype.size() } else { 0 };
        let range = start..start + array.bytes.len();
        self.poison(&(end..start));
        // SAFETY: as many bytes of the image.
        unsafe { self.image(&range).copy_from_nonoverlapping(array.bytes.as_ptr(), array.bytes.len()) };
        ranges.push(range.clone());
        ArenaBuffer { arena: self, range }
    }

    /// What becomes of `work` with the buffers on the device; they are read afterwards. The redzones have not changed.
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

/// A buffer of an [`Arena`].
pub struct ArenaBuffer<'a> {
    arena: &'a Arena,
    range: Range<usize>,
}

impl BufferMemory for ArenaBuffer<'_> {
    /// On the device.
    fn data(&self) -> *mut u8 {
        (self.arena.device as usize + self.range.start) as *mut u8
    }

    /// After the run of the call.
    fn read(&self, _: &str) -> Vec<u8> {
        self.arena.read(&self.range)
    }
}

impl Invocation {
    /// Load and launch on the GPU, `replays` times from a captured graph if that is not 0; the results.
    pub fn run_on_gpu(&self, gpu: &Gpu, around: BufferPadding, replays: usize) -> Result<Vec<Array>, Error> {
        self.run_prepared(gpu, around, replays, true)
    }

    /// Launch inside a capture without having loaded anything; the results after one replay.
    pub fn run_unprepared(&self, gpu: &Gpu) -> Result<Vec<Array>, Error> {
        self.run_prepared(gpu, BufferPadding::Redzones, 1, false)
    }

    fn run_prepared(
        &self,
        gpu: &Gpu,
        around: BufferPadding,
        replays: usize,
        prepare: bool,
    ) -> Result<Vec<Array>, Error> {
        let buffers = self.on_gpu(gpu, around);
        let [inputs, outputs] = buffers.views();
        // SAFETY: the views are the allocations above, which outlive `finish`.
        let run = |action| unsafe { self.run_action(action, &inputs, &outputs) };
        let launch = Action::LaunchCuda(Stream(gpu.stream as usize));
        if replays == 0 {
            // Without a preparation first: a launch loads what it finds missing.
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

    /// Launch `launches` times, each time over poisoned results; the first `compared` of them have the same bits every
    /// time. If there is a call `beside`, it is launched just before on another stream.
    pub fn assert_same_bits(&self, gpu: &Gpu, launches: usize, compared: usize, beside: Option<(&Gpu, &Self)>) {
        let own = self.on_gpu(gpu, BufferPadding::None);
        let other = beside.map(|(gpu, call)| (gpu, call, call.on_gpu(gpu, BufferPadding::None)));
        let mut first: Option<Vec<Vec<u8>>> = None;
        for launch in 0..launches {
            (0..self.results.len()).for_each(|index| own.result(index).poison(gpu));
            if let Some((gpu, call, buffers)) = &other {
                call.launch_on(gpu, buffers);
            }
            self.launch_on(gpu, &own);
            gpu.finish();
            let now: Vec<Vec<u8>> = (0..compared).map(|index| own.result(index).read("a result")).collect();
            let what = format!("{} {}: launch {launch}", self.target, self.what);
            assert!(first.get_or_insert_with(|| now.clone()) == &now, "{what} has other bits than the first one");
        }
        if let Some((gpu, ..)) = &other {
            gpu.finish();
        }
    }

    /// Over buffers that live until `finish`.
    fn launch_on(&self, gpu: &Gpu, buffers: &CallBuffers<'_, Memory>) {
        let [inputs, outputs] = buffers.views();
        // SAFETY: the views are the caller's allocations, which it gives back after `finish`.
        unsafe { self.run_action(Action::LaunchCuda(Stream(gpu.stream as usize)), &inputs, &outputs) }.unwrap();
    }

    /// The buffers of the call, an allocation each.
    pub fn on_gpu(&self, gpu: &Gpu, around: BufferPadding) -> CallBuffers<'_, Memory> {
        CallBuffers::new(self, |_, array| Memory::place(gpu, array, around))
    }
}
