//! Makes a large number of calls on all cores, and reports failures and the slowest call.
//!
//! On the CPU a run consists of several processes with different instruction sets. A process that crashes names its
//! call, and the others continue. On a GPU it consists of several threads with a stream each.

use crate::attention;
use crate::attention_update;
use crate::cache;
use crate::fuzz_call::{FuzzCall, FuzzDevice};
use crate::generator::Generator;
use crate::settings::Settings;
use crate::support::{announce, runs_on_cpu};
use std::cell::RefCell;
use std::io::Write;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::Mutex;
use std::thread;
use std::time::{Duration, Instant};
use xla_attention::Op;

/// The test below, which runs in child processes.
const TEST: &str = "runner::hostile_calls_give_the_reference_results";

/// The instruction sets of calls i modulo 4. A CPU that lacks one uses the best that it has.
const INSTRUCTION_SETS: [&str; 4] = ["portable", "avx2", "avx512", "avx512_bf16"];

/// A shard ends after this many failures.
const MAX_FAILURES: usize = 10;

/// Generates a call.
type GenerateCall = fn(&mut Generator) -> FuzzCall;

/// The kinds of calls, and their frequencies out of 20, which follow the complexity of their code.
const KINDS: [(usize, GenerateCall); 11] = [
    (4, flash),
    (3, paged),
    (2, attention_update::update),
    (2, attention::backward),
    (1, latent),
    (1, attention_update::latent_update),
    (2, cache::cache_update),
    (2, cache::rope),
    (1, cache::gather),
    (1, cache::merge),
    (1, cache::add),
];

fn kind(generator: &mut Generator) -> GenerateCall {
    let mut kinds = KINDS.iter().flat_map(|&(count, kind)| std::iter::repeat_n(kind, count));
    kinds.nth(generator.below(20)).unwrap()
}

fn flash(generator: &mut Generator) -> FuzzCall {
    attention::forward(generator, Op::FlashAttnVarlen)
}

fn paged(generator: &mut Generator) -> FuzzCall {
    attention::forward(generator, Op::PagedAttention)
}

fn latent(generator: &mut Generator) -> FuzzCall {
    attention::forward(generator, Op::MlaPagedAttention)
}

/// The outcome of a shard.
#[derive(Clone, Copy, Default, Debug)]
struct ShardOutcome {
    calls: usize,
    failures: usize,
    /// Seconds and index of the slowest call.
    slowest: (f64, u64),
}

/// The running call, and when it began.
type Current = Mutex<Option<(u64, Instant)>>;

thread_local! {
    /// Text and location of the last panic of this thread.
    static PANIC: RefCell<String> = const { RefCell::new(String::new()) };
}

/// Prints a line to stderr at once. libtest would capture it until the test fails.
fn print_line(line: &str) {
    let _ = writeln!(std::io::stderr(), "fuzz: {line}");
}

/// Makes the calls of a shard.
fn run_shard(settings: &Settings, shard: (u64, u64), current: &Current) -> ShardOutcome {
    let (device, started, mut outcome) = (FuzzDevice::chosen(), Instant::now(), ShardOutcome::default());
    for index in settings.indices(shard) {
        if started.elapsed() >= settings.limit || outcome.failures >= MAX_FAILURES {
            break;
        }
        *current.lock().unwrap() = Some((index, Instant::now()));
        if runs_on_cpu() {
            announce(&settings.repeat(index, TEST));
        }
        let mut generator = Generator::new(settings.seed, index);
        let mut call = None;
        let result = catch_unwind(AssertUnwindSafe(|| {
            call.insert(kind(&mut generator)(&mut generator)).run(&mut generator, &device)
        }));
        outcome.calls += 1;
        let time = *result.as_ref().unwrap_or(&0.0);
        if time > outcome.slowest.0 {
            outcome.slowest = (time, index);
        }
        if result.is_err() {
            outcome.failures += 1;
            let (text, description) = (PANIC.take(), call.map_or_else(String::new, |call| call.describe()));
            let Generator { hostile, special_values, .. } = generator;
            print_line(&format!("WRONG: call {index} of seed {}: {text}", settings.seed));
            print_line(&format!("it is {description}; hostile metadata {hostile}, special values {special_values}"));
            print_line(&format!("repeat: {}", settings.repeat(index, TEST)));
        }
    }
    *current.lock().unwrap() = None;
    outcome
}

/// Keeps the texts of panics for [`run_shard`] to print.
fn record_panics() {
    std::panic::set_hook(Box::new(|info| {
        let text = info.payload_as_str().unwrap_or("a panic without a text");
        let at = info.location().map_or_else(String::new, |at| format!(" ({}:{})", at.file(), at.line()));
        PANIC.set(format!("{text}{at}"));
    }));
}

/// Ends the process if a call hangs.
fn exit_if_a_call_hangs(settings: &Settings, current: &Current) {
    let current = *current.lock().unwrap();
    if let Some((index, _)) = current.filter(|(_, since)| since.elapsed() > settings.hangs_after) {
        print_line(&format!("HANGS: call {index} of seed {}; repeat: {}", settings.seed, settings.repeat(index, TEST)));
        std::process::exit(3);
    }
}

/// Makes the calls of some shards on a thread each. Asserts that none failed.
fn run_shards_on_threads(settings: &Settings, shards: &[(u64, u64)]) {
    record_panics();
    let started = Instant::now();
    let current: Vec<Current> = shards.iter().map(|_| Current::default()).collect();
    let outcome: Vec<ShardOutcome> = thread::scope(|scope| {
        let start = |(&shard, current)| scope.spawn(move || run_shard(settings, shard, current));
        let workers: Vec<_> = shards.iter().zip(&current).map(start).collect();
        while workers.iter().any(|worker| !worker.is_finished()) {
            thread::sleep(Duration::from_millis(20));
            for current in &current {
                exit_if_a_call_hangs(settings, current);
            }
        }
        workers.into_iter().map(|worker| worker.join().unwrap()).collect()
    });
    drop(std::panic::take_hook());
    let [calls, failures] =
        [|f: &ShardOutcome| f.calls, |f: &ShardOutcome| f.failures].map(|of| outcome.iter().map(of).sum::<usize>());
    let (time, index) = outcome.iter().map(|f| f.slowest).max_by(|a, b| a.0.total_cmp(&b.0)).unwrap_or_default();
    print_line(&format!(
        "{calls} calls of seed {} in {:.0} s, {failures} wrong; call {index} took longest, {:.1} ms",
        settings.seed,
        started.elapsed().as_secs_f64(),
        1e3 * time
    ));
    assert_eq!(failures, 0, "wrong calls, named above");
    let all: usize = shards.iter().map(|&shard| settings.indices(shard).count()).sum();
    assert!(calls == all || started.elapsed() > settings.limit, "not all calls were made");
}

/// Starts a process for a shard, with the instruction set of its calls.
fn start_process(settings: &Settings, (k, n): (u64, u64)) -> Child {
    let mut command = Command::new(std::env::current_exe().unwrap());
    command.args(["--exact", TEST, "--nocapture"]).env("XLA_ATTENTION_FUZZ_SHARD", format!("{k}/{n}"));
    if std::env::var_os("XLA_ATTENTION_CPU_ISA").is_none() {
        let isa = INSTRUCTION_SETS[((settings.first + k) % INSTRUCTION_SETS.len() as u64) as usize];
        command.env("XLA_ATTENTION_CPU_ISA", isa);
    }
    command.stdout(Stdio::null()).spawn().unwrap()
}

/// Makes `CALLS` valid calls of `SEED`, beginning with `FIRST`.
#[test]
fn hostile_calls_give_the_reference_results() {
    let settings = Settings::read();
    if let Some(shard) = settings.shard {
        return run_shards_on_threads(&settings, &[shard]);
    }
    // All calls of a process use the same instruction set.
    let cpu = runs_on_cpu();
    let step = if cpu { settings.threads.next_multiple_of(INSTRUCTION_SETS.len()) } else { settings.threads } as u64;
    let shards: Vec<(u64, u64)> = (0..step.min(settings.calls)).map(|k| (k, step)).collect();
    if !cpu {
        return run_shards_on_threads(&settings, &shards);
    }
    let processes: Vec<Child> = shards.iter().map(|&shard| start_process(&settings, shard)).collect();
    let ended: Vec<_> = processes.into_iter().map(|mut process| process.wait().unwrap()).collect();
    assert!(ended.iter().all(ExitStatus::success), "{ended:?}: the failures are printed above");
}
