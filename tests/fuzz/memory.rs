//! A call in memory: its buffers against pages that fault, or between redzones on a GPU, dense or with rows apart.

use crate::draw::Draw;
use crate::support::{
    Array, CPU, Frame, Guarded, I32, Inline, Invocation, Side, Spacing, View, keep_mappings, may_be_strided,
};
use std::fmt::Write;
use xla_attention::{Action, Pool};

/// Results are full of it before a call: a number in every type of attention, so that NaN is something that was written.
const UNWRITTEN: u8 = 0xa5;

/// What is to be held against the results.
type Check = Box<dyn Fn(&[Array])>;
type CheckBoth = Box<dyn Fn(&[Array], &[Array])>;

/// A call that has to be accepted, and what its results have to be.
pub(crate) struct Subject {
    call: Invocation,
    check: Check,
    /// A second call in the same memory, and what its results have to be beside the first's.
    again: Option<(Invocation, CheckBoth)>,
}

impl Subject {
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
    pub(crate) fn run(&self, draw: &mut Draw, machine: &Machine) -> f64 {
        let placing = Placing::draw(draw, &self.call, machine);
        let begun = machine.seconds();
        let found = placing.run(&self.call, machine);
        let time = machine.seconds() - begun;
        (self.check)(&found);
        if let Some((call, check)) = &self.again {
            check(&found, &placing.run(call, machine));
        }
        time
    }
}

/// Where calls run.
pub(crate) enum Machine {
    Cpu,
    /// In one allocation, which is fast.
    #[cfg(feature = "cuda")]
    Gpu(crate::support::device::Arena),
    /// Each buffer in an allocation of its own, beyond which the emulator faults.
    #[cfg(feature = "cuda")]
    Emulator(crate::support::device::Gpu),
}

impl Machine {
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

    /// The bytes of each buffer after `work` with their addresses, or what the operator says of it. Nothing around them
    /// has changed.
    fn run(
        &self,
        buffers: &[Buffer],
        work: impl FnOnce(Action, &[*mut u8]) -> Result<(), String>,
    ) -> Result<Vec<Vec<u8>>, String> {
        match self {
            Self::Cpu => {
                let place = |b: &Buffer| Guarded::new(b.name, b.side, &b.bytes);
                let memory: Vec<Guarded> = buffers.iter().map(place).collect();
                let addresses: Vec<*mut u8> = memory.iter().map(Guarded::data).collect();
                work(Action::RunOnCpu(&InlinePool(4)), &addresses)?;
                memory.iter().for_each(Guarded::assert_slack_untouched);
                Ok(memory.iter().map(Guarded::bytes).collect())
            }
            #[cfg(feature = "cuda")]
            Self::Gpu(arena) => {
                let places: Vec<(&[u8], usize)> = buffers.iter().map(|b| (&b.bytes[..], b.askew)).collect();
                arena.run(&places, |stream, addresses| work(Action::LaunchCuda(stream), addresses))
            }
            #[cfg(feature = "cuda")]
            Self::Emulator(gpu) => {
                use crate::support::device::{Around, Memory};
                use crate::support::{PlacedMemory as _, U8};
                let place = |b: &Buffer| {
                    let array = Array { dtype: U8, dims: vec![b.bytes.len() as i64], bytes: b.bytes.clone() };
                    Memory::place(gpu, &array, Around::Nothing)
                };
                let memory: Vec<Memory> = buffers.iter().map(place).collect();
                let addresses: Vec<*mut u8> = memory.iter().map(Memory::data).collect();
                work(Action::LaunchCuda(xla_attention::Stream(gpu.stream as usize)), &addresses)?;
                gpu.finish();
                Ok(memory.iter().zip(buffers).map(|(m, b)| m.read(b.name)).collect())
            }
        }
    }
}

/// Runs each task at once on the thread that schedules it.
struct InlinePool(usize);

// SAFETY: once, and a task does not unwind.
unsafe impl Pool for InlinePool {
    fn num_threads(&self) -> usize {
        self.0
    }
    fn schedule(&self, task: fn(usize), argument: usize) {
        task(argument);
    }
}

/// Bytes, and which end of them is to touch a page that faults, or how far from an alignment they are to lie.
struct Buffer {
    name: &'static str,
    bytes: Vec<u8>,
    side: Side,
    #[cfg_attr(not(feature = "cuda"), expect(dead_code, reason = "memory of the host ends at a page instead"))]
    askew: usize,
}

/// How a call lies in memory.
struct Placing {
    /// Of operands whose rows are apart.
    spacings: Vec<Option<Spacing>>,
    /// For each operand, then each result.
    sides: Vec<Side>,
    askew: bool,
    /// Through the handler that XLA calls; otherwise through `xla_attention::call`, which takes strides.
    through_handler: bool,
}

impl Placing {
    fn draw(draw: &mut Draw, call: &Invocation, machine: &Machine) -> Self {
        let attends = call.target.contains("attention") || call.target.contains("flash");
        let attends = attends && !call.target.contains("merge");
        let apart = draw.chance(40);
        let spacings = call.operands.iter().enumerate().map(|(index, (name, array))| {
            // A cache that is copied is dense; one that is read alone, or updated where it is, need not be.
            let copied = call.results.iter().any(|r| r.name == *name && r.alias != Some(index));
            let may = may_be_strided(call.op()).contains(name) && !copied;
            let may = may && array.dims.len() > 1 && !array.dims.contains(&0);
            // What a chunk of a GPU's loads is.
            let chunk = (16 / array.dtype.size()) as i64;
            let gaps: Vec<i64> = array.dims.iter().map(|_| draw.one_of(&[0, 0, 1, 3, 5, 8])).collect();
            let many = |gap: &i64| if attends && !machine.is_cpu() { gap * chunk } else { *gap };
            let gaps: Vec<i64> = gaps.iter().map(many).collect();
            (draw.chance(60) && apart && may).then(|| Spacing::new(array, &gaps))
        });
        let spacings = spacings.collect();
        let buffers = call.operands.len() + call.results.len();
        let sides = (0..buffers).map(|_| draw.one_of(&[Side::BeginsAtGuard, Side::EndsAtGuard])).collect();
        let (through_handler, askew) = (draw.chance(60), draw.chance(25) && !attends);
        Self { spacings, sides, askew, through_handler: through_handler && !apart && machine.is_cpu() }
    }

    /// The results of a call, which is accepted, changes no operand and writes all of its results.
    fn run(&self, call: &Invocation, machine: &Machine) -> Vec<Array> {
        let buffer = |index: usize, name, array: &Array, bytes| {
            let askew = if self.askew { array.dtype.size() } else { 0 };
            Buffer { name, bytes, side: self.sides[index], askew }
        };
        let operands = call.operands.iter().enumerate().map(|(index, (name, array))| {
            let bytes = self.spacings[index].as_ref().map_or_else(|| array.bytes.clone(), |s| s.spread(array));
            buffer(index, *name, array, bytes)
        });
        let mut buffers: Vec<Buffer> = operands.collect();
        let mut place = Vec::new();
        for (index, result) in call.results.iter().enumerate() {
            place.push(result.alias.unwrap_or(buffers.len()));
            if result.alias.is_none() {
                let array = Array::filled(result.dtype, &result.dims, UNWRITTEN);
                buffers.push(buffer(call.operands.len() + index, result.name, &array, array.bytes.clone()));
            }
        }
        let outcome = machine.run(&buffers, |action, addresses| {
            if self.through_handler {
                handle(call, &place, addresses)
            } else {
                self.enter(call, action, &place, addresses)
            }
        });
        let after = outcome.unwrap_or_else(|error| panic!("the call was refused: {error}"));
        for (index, (name, _)) in call.operands.iter().enumerate() {
            let unchanged = place.contains(&index) || after[index] == buffers[index].bytes;
            assert!(unchanged, "operand {name} has changed");
        }
        let found = call.results.iter().zip(&place).map(|(result, &at)| {
            let spacing = self.spacings.get(at).and_then(Option::as_ref);
            let bytes = spacing.map_or_else(|| after[at].clone(), |spacing| spacing.pack(&after[at]));
            let found = Array { dtype: result.dtype, dims: result.dims.clone(), bytes };
            let written = result.alias.is_some() || result.name == "workspace" || is_written(&found);
            assert!(written, "{} has elements that were not written", result.name);
            found
        });
        found.collect()
    }

    /// Through the entry below all front-ends.
    fn enter(&self, call: &Invocation, action: Action, place: &[usize], addresses: &[*mut u8]) -> Result<(), String> {
        let view = |at: usize| {
            let spacing = self.spacings.get(at).and_then(Option::as_ref);
            View { data: addresses[at], strides: spacing.map(|spacing| &spacing.strides[..]) }
        };
        let operands: Vec<View> = (0..call.operands.len()).map(view).collect();
        let results: Vec<View> = place.iter().map(|&at| view(at)).collect();
        // SAFETY: the views are the buffers of `Placing::run`, which live until the call's work is done.
        unsafe { call.enter(action, &operands, &results) }.map_err(|error| error.to_string())
    }
}

/// Through the handler that XLA calls.
fn handle(call: &Invocation, place: &[usize], addresses: &[*mut u8]) -> Result<(), String> {
    let pool = Inline(3);
    let frame = Frame::new(call.target, CPU).attributes(&call.attributes).pool(&pool);
    // SAFETY: the claims are true of the buffers of `Placing::run`.
    let frame = call
        .operands
        .iter()
        .zip(addresses)
        .fold(frame, |frame, ((_, array), &data)| unsafe { frame.operand(array.dtype, &array.dims, data) });
    // SAFETY: as above.
    let frame = call
        .results
        .iter()
        .zip(place)
        .fold(frame, |frame, (result, &at)| unsafe { frame.result(result.dtype, &result.dims, addresses[at]) });
    frame.run().map_err(|refusal| refusal.text)
}

/// No eight bytes on a border of eight are as they were; fewer may be so by chance.
fn is_written(result: &Array) -> bool {
    result.bytes.chunks_exact(8).all(|bytes| bytes.iter().any(|&b| b != UNWRITTEN))
}
