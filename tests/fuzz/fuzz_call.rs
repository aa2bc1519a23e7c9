//! Runs a call with buffers that touch guard pages, or lie between redzones on a GPU, dense or strided.

use crate::generator::Generator;
use crate::support::{
    Array, BufferMemory, CPU, CallBuffers, Frame, GuardedBuffer, I32, InlinePool, Invocation, Random, Side, Strided,
    StridedLayout, keep_mappings, may_be_strided,
};
use std::fmt::Write;
use xla_attention::Action;

/// The byte in results before a call. It is a finite number in every attention dtype, so that a NaN was written by the
/// call.
const UNWRITTEN: u8 = 0xa5;

/// Compares results with the expected ones.
type Compare = Box<dyn Fn(&[Array])>;
type CompareBoth = Box<dyn Fn(&[Array], &[Array])>;

/// A valid call and the comparison of its results.
pub(crate) struct FuzzCall {
    call: Invocation,
    compare: Compare,
    /// A second call with the same buffers, and the comparison of both calls' results.
    second: Option<(Invocation, CompareBoth)>,
}

impl FuzzCall {
    pub(crate) fn new(call: Invocation, compare: impl Fn(&[Array]) + 'static) -> Self {
        Self { call, compare: Box::new(compare), second: None }
    }

    pub(crate) fn with_second_call(self, call: Invocation, compare: impl Fn(&[Array], &[Array]) + 'static) -> Self {
        Self { second: Some((call, Box::new(compare))), ..self }
    }

    /// The call without its numbers, for messages.
    pub(crate) fn describe(&self) -> String {
        let Invocation { target, operands, results, attributes, .. } = &self.call;
        let mut text = (*target).to_owned();
        for (name, array) in operands {
            let _ = write!(text, ", {name} {:?}{:?}", array.dtype, array.dims);
            if array.dtype == I32 && array.bytes.len() <= 64 {
                let _ = write!(text, " {:?}", array.values());
            }
        }
        for result in results {
            let in_place = if result.alias.is_some() { " in place" } else { "" };
            let _ = write!(text, ", to {} {:?}{:?}{in_place}", result.name, result.dtype, result.dims);
        }
        let _ = write!(text, ", {attributes:?}");
        text
    }

    /// Makes the call and returns the seconds that it took. Panics if something is wrong.
    pub(crate) fn run(&self, generator: &mut Generator, device: &FuzzDevice) -> f64 {
        let placement = BufferPlacement::generate(generator, &self.call, device);
        let begun = device.seconds();
        let actual = device.run(&self.call, &placement);
        let time = device.seconds() - begun;
        (self.compare)(&actual);
        if let Some((call, compare)) = &self.second {
            compare(&actual, &device.run(call, &placement));
        }
        time
    }
}

/// The device of the calls.
pub(crate) enum FuzzDevice {
    Cpu,
    /// All buffers in one allocation, which is fast.
    #[cfg(feature = "cuda")]
    Gpu(crate::support::device::Arena),
    /// Each buffer in its own allocation, outside of which the emulator faults.
    #[cfg(feature = "cuda")]
    Emulator(crate::support::device::Gpu),
}

impl FuzzDevice {
    /// The device that the environment chooses, for the calling thread.
    pub(crate) fn chosen() -> Self {
        #[cfg(feature = "cuda")]
        if !crate::support::runs_on_cpu() {
            use crate::support::device::{Arena, Gpu};
            let gpu = Gpu::first().expect("XLA_ATTENTION_TEST_DEVICE=cuda needs a driver and a GPU");
            let emulated = std::env::var_os("XLA_ATTENTION_EMULATOR").is_some();
            return if emulated { Self::Emulator(gpu) } else { Self::Gpu(Arena::new(gpu, 64 << 20)) };
        }
        keep_mappings();
        Self::Cpu
    }

    /// A clock. On the CPU it counts the time of the calling thread, which does all the work.
    fn seconds(&self) -> f64 {
        let clock = if self.is_cpu() { libc::CLOCK_THREAD_CPUTIME_ID } else { libc::CLOCK_MONOTONIC };
        let mut now = libc::timespec { tv_sec: 0, tv_nsec: 0 };
        // SAFETY: writes one timespec.
        unsafe { libc::clock_gettime(clock, &raw mut now) };
        now.tv_sec as f64 + 1e-9 * now.tv_nsec as f64
    }

    fn is_cpu(&self) -> bool {
        matches!(self, Self::Cpu)
    }

    /// Runs a call and returns its results. The call must succeed, write all results and change nothing else.
    fn run(&self, call: &Invocation, placement: &BufferPlacement) -> Vec<Array> {
        match self {
            Self::Cpu => {
                let buffers = placement.place(call, |name, array, side| GuardedBuffer::new(name, side, &array.bytes));
                results(call, &buffers, placement.call(call, &buffers, Action::RunOnCpu(&InlinePool(4))))
            }
            #[cfg(feature = "cuda")]
            Self::Gpu(arena) => {
                arena.clear();
                let buffers = placement.place(call, |_, array, _| arena.add(array, placement.misaligned));
                let outcome = arena.run(|stream| placement.call(call, &buffers, Action::LaunchCuda(stream)));
                results(call, &buffers, outcome)
            }
            #[cfg(feature = "cuda")]
            Self::Emulator(gpu) => {
                use crate::support::device::{BufferPadding, DeviceBuffer};
                let buffers =
                    placement.place(call, |_, array, _| DeviceBuffer::upload(gpu, array, BufferPadding::None));
                let stream = xla_attention::Stream(gpu.stream as usize);
                let outcome = placement.call(call, &buffers, Action::LaunchCuda(stream));
                gpu.finish();
                results(call, &buffers, outcome)
            }
        }
    }
}

/// How the buffers of a call are placed.
struct BufferPlacement {
    /// Whether operands are strided.
    strided: bool,
    /// The gaps between rows are multiples of this many bytes, the size of a vector load on a GPU; 0 for any number of
    /// elements.
    chunk: usize,
    /// Whether buffers are aligned to their element size only.
    #[cfg_attr(not(feature = "cuda"), expect(dead_code, reason = "memory of the host ends at a page instead"))]
    misaligned: bool,
    /// Whether the call goes through the XLA handler. Otherwise it goes through `xla_attention::call`, which accepts
    /// strides.
    through_handler: bool,
    /// Determines the gaps, and which end of each buffer touches a guard page.
    seed: u64,
}

impl BufferPlacement {
    fn generate(generator: &mut Generator, call: &Invocation, device: &FuzzDevice) -> Self {
        let attends = call.target.contains("attention") || call.target.contains("flash");
        let attends = attends && !call.target.contains("merge");
        let strided = generator.chance(40);
        Self {
            strided,
            chunk: if attends && !device.is_cpu() { 16 } else { 0 },
            misaligned: generator.chance(25) && !attends,
            through_handler: generator.chance(60) && !strided && device.is_cpu(),
            seed: generator.next(),
        }
    }

    fn strided_layout(
        &self,
        call: &Invocation,
        name: &str,
        array: &Array,
        random: &mut Random,
    ) -> Option<StridedLayout> {
        // A cache that is copied must be dense. One that is only read, or updated in place, may be strided.
        let copied = call.results.iter().any(|r| r.name == name && r.alias.is_none());
        let may = may_be_strided(call.op()).contains(&name) && !copied;
        let may = may && array.dims.len() > 1 && !array.dims.contains(&0);
        let chunk = (self.chunk / array.dtype.size()).max(1) as i64;
        let gaps: Vec<i64> = array.dims.iter().map(|_| chunk * random.one_of(&[0, 0, 1, 3, 5, 8])).collect();
        (random.chance(60) && self.strided && may).then(|| StridedLayout::new(array, &gaps))
    }

    fn place<'a, M: BufferMemory>(
        &self,
        call: &'a Invocation,
        memory: impl Fn(&str, &Array, Side) -> M,
    ) -> CallBuffers<'a, Strided<M>> {
        let mut random = Random::new(self.seed);
        CallBuffers::filled(call, UNWRITTEN, |name, array| {
            let side = random.one_of(&[Side::BeginsAtGuard, Side::EndsAtGuard]);
            let strided_layout = self.strided_layout(call, name, array, &mut random);
            Strided::new(array, strided_layout, |array| memory(name, array, side))
        })
    }

    /// Makes the call; the error is its text if it is refused.
    fn call<M: BufferMemory>(&self, call: &Invocation, buffers: &CallBuffers<M>, action: Action) -> Result<(), String> {
        if self.through_handler {
            let frame = Frame::new(call.target, CPU).pool(&InlinePool(3));
            return buffers.frame(frame).run().map_err(|refusal| refusal.text);
        }
        let [operands, results] = buffers.views();
        // SAFETY: the views are of `buffers`, which live until the call's work is done.
        unsafe { call.run_action(action, &operands, &results) }.map_err(|error| error.to_string())
    }
}

fn results<M: BufferMemory>(call: &Invocation, buffers: &CallBuffers<M>, outcome: Result<(), String>) -> Vec<Array> {
    outcome.unwrap_or_else(|error| panic!("the call was refused: {error}"));
    let actual = buffers.results();
    for (result, actual) in call.results.iter().zip(&actual) {
        let written = result.alias.is_some() || result.name == "workspace" || is_written(actual);
        assert!(written, "{} has elements that were not written", result.name);
    }
    actual
}

/// Whether each aligned group of eight bytes has changed. A smaller group may by chance be as before.
fn is_written(result: &Array) -> bool {
    result.bytes.chunks_exact(8).all(|bytes| bytes.iter().any(|&b| b != UNWRITTEN))
}
