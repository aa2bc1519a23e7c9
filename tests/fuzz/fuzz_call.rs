//! A call in memory: its buffers against pages that fault, or between redzones on a GPU, dense or with rows apart.

use crate::generator::Generator;
use crate::support::{
    Array, BufferMemory, CPU, CallBuffers, Frame, GuardedBuffer, I32, InlinePool, Invocation, Random, Side, Strided,
    StridedLayout, keep_mappings, may_be_strided,
};
use std::fmt::Write;
use xla_attention::Action;

/// Results are full of it before a call: a number in every type of attention, so that NaN is something that was written.
const UNWRITTEN: u8 = 0xa5;

/// What is to be held against the results.
type Check = Box<dyn Fn(&[Array])>;
type CheckBoth = Box<dyn Fn(&[Array], &[Array])>;

/// A call that has to be accepted, and what its results have to be.
pub(crate) struct FuzzCall {
    call: Invocation,
    check: Check,
    /// A second call in the same memory, and what its results have to be beside the first's.
    again: Option<(Invocation, CheckBoth)>,
}

impl FuzzCall {
    pub(crate) fn new(call: Invocation, check: impl Fn(&[Array]) + 'static) -> Self {
        Self { call, check: Box::new(check), again: None }
    }

    pub(crate) fn and(self, call: Invocation, check: impl Fn(&[Array], &[Array]) + 'static) -> Self {
        Self { again: Some((call, Box::new(check))), ..self }
    }

    /// The call without its numbers, to be told of a wrong one.
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

    /// Make the call and give the seconds that it took; panics where something is wrong.
    pub(crate) fn run(&self, generator: &mut Generator, machine: &FuzzDevice) -> f64 {
        let placing = BufferPlacement::generator(generator, &self.call, machine);
        let begun = machine.seconds();
        let actual = machine.run(&self.call, &placing);
        let time = machine.seconds() - begun;
        (self.check)(&actual);
        if let Some((call, check)) = &self.again {
            check(&actual, &machine.run(call, &placing));
        }
        time
    }
}

/// Where calls run.
pub(crate) enum FuzzDevice {
    Cpu,
    /// In one allocation, which is fast.
    #[cfg(feature = "cuda")]
    Gpu(crate::support::device::Arena),
    /// Each buffer in an allocation of its own, beyond which the emulator faults.
    #[cfg(feature = "cuda")]
    Emulator(crate::support::device::Gpu),
}

impl FuzzDevice {
    /// That of the environment, for the calling thread.
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

    /// A clock: on the CPU, of the calling thread, which does all of the work, so that others do not count.
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

    /// The results of a call, which is accepted, changes nothing else and writes all of them.
    fn run(&self, call: &Invocation, how: &BufferPlacement) -> Vec<Array> {
        match self {
            Self::Cpu => {
                let buffers = how.place(call, |name, array, side| GuardedBuffer::new(name, side, &array.bytes));
                results(call, &buffers, how.make(call, &buffers, Action::RunOnCpu(&InlinePool(4))))
            }
            #[cfg(feature = "cuda")]
            Self::Gpu(arena) => {
                arena.clear();
                let buffers = how.place(call, |_, array, _| arena.add(array, how.misaligned));
                let outcome = arena.run(|stream| how.make(call, &buffers, Action::LaunchCuda(stream)));
                results(call, &buffers, outcome)
            }
            #[cfg(feature = "cuda")]
            Self::Emulator(gpu) => {
                use crate::support::device::{BufferPadding, DeviceBuffer};
                let buffers = how.place(call, |_, array, _| DeviceBuffer::upload(gpu, array, BufferPadding::None));
                let stream = xla_attention::Stream(gpu.stream as usize);
                let outcome = how.make(call, &buffers, Action::LaunchCuda(stream));
                gpu.finish();
                results(call, &buffers, outcome)
            }
        }
    }
}

/// How a call lies in memory.
struct BufferPlacement {
    /// Rows of operands are apart.
    apart: bool,
    /// By multiples of so many bytes, those of a chunk of a GPU's loads; 0 for any number of elements.
    chunk: usize,
    /// No buffer is aligned to more than its element, where it does not end at a page instead.
    #[cfg_attr(not(feature = "cuda"), expect(dead_code, reason = "memory of the host ends at a page instead"))]
    misaligned: bool,
    /// Through the handler that XLA calls; otherwise through `xla_attention::call`, which takes strides.
    through_handler: bool,
    /// Decides which rows are how far apart, and which end of a buffer touches a page that faults.
    seed: u64,
}

impl BufferPlacement {
    fn generator(generator: &mut Generator, call: &Invocation, machine: &FuzzDevice) -> Self {
        let attends = call.target.contains("attention") || call.target.contains("flash");
        let attends = attends && !call.target.contains("merge");
        let apart = generator.chance(40);
        Self {
            apart,
            chunk: if attends && !machine.is_cpu() { 16 } else { 0 },
            misaligned: generator.chance(25) && !attends,
            through_handler: generator.chance(60) && !apart && machine.is_cpu(),
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
        // A cache that is copied is dense; one that is read alone, or updated where it is, need not be.
        let copied = call.results.iter().any(|r| r.name == name && r.alias.is_none());
        let may = may_be_strided(call.op()).contains(&name) && !copied;
        let may = may && array.dims.len() > 1 && !array.dims.contains(&0);
        let chunk = (self.chunk / array.dtype.size()).max(1) as i64;
        let gaps: Vec<i64> = array.dims.iter().map(|_| chunk * random.one_of(&[0, 0, 1, 3, 5, 8])).collect();
        (random.chance(60) && self.apart && may).then(|| StridedLayout::new(array, &gaps))
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

    /// Make the call; what is said of it if it is refused.
    fn make<M: BufferMemory>(&self, call: &Invocation, buffers: &CallBuffers<M>, action: Action) -> Result<(), String> {
        if self.through_handler {
            let frame = Frame::new(call.target, CPU).pool(&InlinePool(3));
            return buffers.frame(frame).run().map_err(|refusal| refusal.text);
        }
        let [operands, results] = buffers.views();
        // SAFETY: the views are the buffers of `placed`, which live until the call's work is done.
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

/// No eight bytes on a border of eight are as they were; fewer may be so by chance.
fn is_written(result: &Array) -> bool {
    result.bytes.chunks_exact(8).all(|bytes| bytes.iter().any(|&b| b != UNWRITTEN))
}
