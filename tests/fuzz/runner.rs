//! Makes very many calls on all cores, and says which was wrong and which was slow.
//!
//! On the CPU a run is several processes, each with an instruction set of its own: one that dies of a fault names its
//! call, and the others go on. On a GPU it is several threads with a stream each.

use crate::attention;
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

/// The test below, for processes of its own.
const TEST: &str = "runner::hostile_calls_give_the_reference_results";

/// What call i is made with: those that this CPU has up to the one at i modulo their number.
const INSTRUCTION_SETS: [&str; 4] = ["portable", "avx2", "avx512", "avx512_bf16"];

/// A run ends after so many wrong calls of a shard.
const MOST_FAILURES: usize = 10;

/// Makes a call.
type Kind = fn(&mut Generator) -> FuzzCall;

/// Each kind of call, and how many of 20 are of it: in about the proportion in which their code is intricate.
const KINDS: [(usize, Kind); 9] = [
    (4, flash),
    (4, paged),
    (2, attention::update),
    (3, attention::backward),
    (2, cache::cache_update),
    (2, cache::rope),
    (1, cache::gather),
    (1, cache::merge),
    (1, cache::add),
];

fn kind(generator: &mut Generator) -> Kind {
    let mut kinds = KINDS.iter().flat_map(|&(count, kind)| std::iter::repeat_n(kind, count));
    kinds.nth(generator.below(20)).unwrap()
}

fn flash(generator: &mut Generator) -> FuzzCall {
    attention::forward(generator, Op::FlashAttnVarlen)
}

fn paged(generator: &mut Generator) -> FuzzCall {
    attention::forward(generator, Op::PagedAttention)
}

/// What has become of the calls of a shard.
#[derive(Clone, Copy, Default, Debug)]
struct Found {
    calls: usize,
    failures: usize,
    /// Seconds and index of the call that took longest.
    slowest: (f64, u64),
}

/// The call that is being made, and since when.
type Current = Mutex<Option<(u64, Instant)>>;

thread_local! {
    /// Where the last panic of this thread was, and its text.
    static PANIC: RefCell<String> = const { RefCell::new(String::new()) };
}

/// Past libtest, which would keep it until the test has failed.
fn say(line: &str) {
    let _ = writeln!(std::io::stderr(), "fuzz: {line}");
}

/// Make the calls of a shard.
fn work(settings: &Settings, shard: (u64, u64), current: &Current) -> Found {
    let (machine, started, mut found) = (FuzzDevice::chosen(), Instant::now(), Found::default());
    for index in settings.indices(shard) {
        if started.elapsed() >= settings.limit || found.failures >= MOST_FAILURES {
            break;
        }
        *current.lock().unwrap() = Some((index, Instant::now()));
        if runs_on_cpu() {
            announce(&settings.repeat(index, TEST));
        }
        let mut generator = Generator::new(settings.seed, index);
        let mut subject = None;
        let outcome = catch_unwind(AssertUnwindSafe(|| {
            subject.insert(kind(&mut generator)(&mut generator)).run(&mut generator, &machine)
        }));
        found.calls += 1;
        let time = *outcome.as_ref().unwrap_or(&0.0);
        if time > found.slowest.0 {
            found.slowest = (time, index);
        }
        if outcome.is_err() {
            found.failures += 1;
            let (text, what) = (PANIC.take(), subject.map_or_else(String::new, |subject| subject.describe()));
            let Generator { hostile, special_values, .. } = generator;
            say(&format!("WRONG: call {index} of seed {}: {text}", settings.seed));
            say(&format!("it is {what}; hostile {hostile}, wild {special_values}"));
            say(&format!("repeat: {}", settings.repeat(index, TEST)));
        }
    }
    *current.lock().unwrap() = None;
    found
}

/// Panics of calls are kept for [`work`] to tell.
fn keep_panics() {
    std::panic::set_hook(Box::new(|info| {
        let text = info.payload_as_str().unwrap_or("a panic without a text");
        let at = info.location().map_or_else(String::new, |at| format!(" ({}:{})", at.file(), at.line()));
        PANIC.set(format!("{text}{at}"));
    }));
}

/// Ends the process when a call hangs.
fn end_if_one_hangs(settings: &Settings, current: &Current) {
    let current = *current.lock().unwrap();
    if let Some((index, _)) = current.filter(|(_, since)| since.elapsed() > settings.hangs_after) {
        say(&format!("HANGS: call {index} of seed {}; repeat: {}", settings.seed, settings.repeat(index, TEST)));
        std::process::exit(3);
    }
}

/// Make the calls of some shards, each on a thread, and say what has become of them; none is wrong.
fn work_on_threads(settings: &Settings, shards: &[(u64, u64)]) {
    keep_panics();
    let started = Instant::now();
    let current: Vec<Current> = shards.iter().map(|_| Current::default()).collect();
    let found: Vec<Found> = thread::scope(|scope| {
        let start = |(&shard, current)| scope.spawn(move || work(settings, shard, current));
        let workers: Vec<_> = shards.iter().zip(&current).map(start).collect();
        while workers.iter().any(|worker| !worker.is_finished()) {
            thread::sleep(Duration::from_millis(20));
            for current in &current {
                end_if_one_hangs(settings, current);
            }
        }
        workers.into_iter().map(|worker| worker.join().unwrap()).collect()
    });
    drop(std::panic::take_hook());
    let [calls, failures] = [|f: &Found| f.calls, |f: &Found| f.failures].map(|of| found.iter().map(of).sum::<usize>());
    let (time, index) = found.iter().map(|f| f.slowest).max_by(|a, b| a.0.total_cmp(&b.0)).unwrap_or_default();
    say(&format!(
        "{calls} calls of seed {} in {:.0} s, {failures} wrong; call {index} took longest, {:.1} ms",
        settings.seed,
        started.elapsed().as_secs_f64(),
        1e3 * time
    ));
    assert_eq!(failures, 0, "wrong calls, named above");
    let all: usize = shards.iter().map(|&shard| settings.indices(shard).count()).sum();
    assert!(calls == all || started.elapsed() > settings.limit, "not all calls were made");
}

/// A process for a shard, with the instruction set of its calls.
fn start(settings: &Settings, (k, n): (u64, u64)) -> Child {
    let mut command = Command::new(std::env::current_exe().unwrap());
    command.args(["--exact", TEST, "--nocapture"]).env("XLA_ATTENTION_FUZZ_SHARD", format!("{k}/{n}"));
    if std::env::var_os("XLA_ATTENTION_CPU_ISA").is_none() {
        let isa = INSTRUCTION_SETS[((settings.first + k) % INSTRUCTION_SETS.len() as u64) as usize];
        command.env("XLA_ATTENTION_CPU_ISA", isa);
    }
    command.stdout(Stdio::null()).spawn().unwrap()
}

/// `CALLS` calls from `FIRST` on of `SEED`, all of them accepted.
#[test]
fn hostile_calls_give_the_reference_results() {
    let settings = Settings::read();
    if let Some(shard) = settings.shard {
        return work_on_threads(&settings, &[shard]);
    }
    // Each process has one instruction set.
    let cpu = runs_on_cpu();
    let step = if cpu { settings.threads.next_multiple_of(INSTRUCTION_SETS.len()) } else { settings.threads } as u64;
    let shards: Vec<(u64, u64)> = (0..step.min(settings.calls)).map(|k| (k, step)).collect();
    if !cpu {
        return work_on_threads(&settings, &shards);
    }
    let processes: Vec<Child> = shards.iter().map(|&shard| start(&settings, shard)).collect();
    let ended: Vec<_> = processes.into_iter().map(|mut process| process.wait().unwrap()).collect();
    assert!(ended.iter().all(ExitStatus::success), "{ended:?}: what was wrong is said above");
}
