//! Makes very many calls on all cores, and says which was wrong and which was slow.
//!
//! On the CPU a run is several processes, each with an instruction set of its own: one that dies of a fault names its
//! call, and the others go on. On a GPU it is several threads with a stream each.

use crate::attention;
use crate::cache;
use crate::draw::Draw;
use crate::memory::{Machine, Subject};
use crate::settings::Settings;
use crate::support::case::Target;
use crate::support::guard::announce;
use crate::support::machine::runs_on_cpu;
use std::cell::RefCell;
use std::io::{BufRead, BufReader, Write};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::process::{Child, Command, Stdio};
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::sync::{Arc, Mutex};
use std::thread;
use std::time::{Duration, Instant};

/// The test below, for processes of its own.
const TEST: &str = "runner::hostile_calls_give_what_the_definition_says";

/// What call i is made with: those that this CPU has up to the one at i modulo their number.
const INSTRUCTION_SETS: [&str; 4] = ["portable", "avx2", "avx512", "avx512_bf16"];

/// A run ends after so many wrong calls of a shard.
const MOST_FAILURES: usize = 10;

/// One call of each kind, in about the proportion in which their code is intricate.
const KINDS: [fn(&mut Draw) -> Subject; 20] = [
    flash,
    flash,
    flash,
    flash,
    paged,
    paged,
    paged,
    paged,
    attention::update,
    attention::update,
    attention::backward,
    attention::backward,
    attention::backward,
    cache::cache_update,
    cache::cache_update,
    cache::rope,
    cache::rope,
    cache::gather,
    cache::merge,
    cache::add,
];

fn flash(draw: &mut Draw) -> Subject {
    attention::forward(draw, Target::FlashAttnVarlen)
}

fn paged(draw: &mut Draw) -> Subject {
    attention::forward(draw, Target::PagedAttention)
}

/// How far a shard has come.
#[derive(Clone, Default, Debug)]
struct Progress {
    calls: u64,
    failures: usize,
    /// Seconds and index of the call that took longest.
    slowest: (f64, u64),
    /// The call that is being made, and since when.
    current: Option<(u64, Instant)>,
}

type Shared = Arc<Mutex<Progress>>;

thread_local! {
    /// Where the last panic of this thread was, and its text.
    static PANIC: RefCell<String> = const { RefCell::new(String::new()) };
}

/// Past libtest, which would keep it until the test has failed.
fn say(line: &str) {
    let _ = writeln!(std::io::stderr(), "fuzz: {line}");
}

/// Make the calls of a shard.
fn work(settings: &Settings, shard: (u64, u64), progress: &Shared) {
    let (machine, started) = (Machine::chosen(), Instant::now());
    let goes_on = || started.elapsed() < settings.limit && progress.lock().unwrap().failures < MOST_FAILURES;
    for index in settings.indices(shard).take_while(|_| goes_on()) {
        progress.lock().unwrap().current = Some((index, Instant::now()));
        if runs_on_cpu() {
            announce(&settings.repeat(index, TEST));
        }
        let mut draw = Draw::new(settings.seed, index);
        let mut subject = None;
        let outcome = catch_unwind(AssertUnwindSafe(|| {
            let make = draw.one_of(&KINDS);
            subject.insert(make(&mut draw)).run(&mut draw, &machine)
        }));
        let time = *outcome.as_ref().unwrap_or(&0.0);
        let mut progress = progress.lock().unwrap();
        progress.calls += 1;
        if time > progress.slowest.0 {
            progress.slowest = (time, index);
        }
        if outcome.is_err() {
            progress.failures += 1;
            let (text, what) = (PANIC.take(), subject.map_or_else(String::new, |subject| subject.describe()));
            let Draw { hostile, wild, .. } = draw;
            say(&format!("WRONG: call {index} of seed {}: {text}", settings.seed));
            say(&format!("it is {what}; hostile {hostile}, wild {wild}"));
            say(&format!("repeat: {}", settings.repeat(index, TEST)));
        }
    }
    progress.lock().unwrap().current = None;
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
fn watch(settings: &Settings, shards: &[Shared], done: &AtomicBool) {
    while !done.load(Relaxed) {
        thread::sleep(Duration::from_millis(200));
        for shard in shards {
            let current = shard.lock().unwrap().current;
            if let Some((index, _)) = current.filter(|(_, since)| since.elapsed() > settings.hangs_after) {
                say(&format!(
                    "HANGS: call {index} of seed {}; repeat: {}",
                    settings.seed,
                    settings.repeat(index, TEST)
                ));
                std::process::exit(3);
            }
        }
    }
}

/// Make the calls of some shards, each on a thread; `tell` is called now and then.
fn work_on_threads(settings: &Settings, shards: &[(u64, u64)], tell: impl Fn(&[Shared])) -> Vec<Progress> {
    keep_panics();
    let progress: Vec<Shared> = shards.iter().map(|_| Shared::default()).collect();
    let done = AtomicBool::new(false);
    thread::scope(|scope| {
        let workers: Vec<_> = shards
            .iter()
            .zip(&progress)
            .map(|(&shard, progress)| scope.spawn(move || work(settings, shard, progress)))
            .collect();
        scope.spawn(|| watch(settings, &progress, &done));
        while workers.iter().any(|worker| !worker.is_finished()) {
            thread::sleep(Duration::from_millis(20));
            tell(&progress);
        }
        done.store(true, Relaxed);
    });
    drop(std::panic::take_hook());
    tell(&progress);
    progress.iter().map(|shard| shard.lock().unwrap().clone()).collect()
}

/// A process for a shard, with the instruction set of its calls.
fn start(settings: &Settings, (k, n): (u64, u64)) -> Child {
    let mut command = Command::new(std::env::current_exe().unwrap());
    command.args(["--exact", TEST, "--nocapture"]).env("XLA_ATTENTION_FUZZ_SHARD", format!("{k}/{n}"));
    if std::env::var_os("XLA_ATTENTION_CPU_ISA").is_none() {
        let isa = INSTRUCTION_SETS[((settings.first + k) % INSTRUCTION_SETS.len() as u64) as usize];
        command.env("XLA_ATTENTION_CPU_ISA", isa);
    }
    command.stdout(Stdio::piped()).spawn().unwrap()
}

/// A line about a shard from its process to the one that has started it.
const REPORT: &str = "fuzz-shard";

fn report(progress: &Progress) {
    let Progress { calls, failures, slowest: (time, index), .. } = progress;
    let _ = writeln!(std::io::stdout(), "\n{REPORT} {calls} {failures} {time} {index}");
}

fn read_report(line: &str) -> Option<Progress> {
    let numbers: Vec<&str> = line.strip_prefix(REPORT)?.split_whitespace().collect();
    let [calls, failures, time, index] = numbers[..] else { return None };
    let slowest = (time.parse().ok()?, index.parse().ok()?);
    Some(Progress { calls: calls.parse().ok()?, failures: failures.parse().ok()?, slowest, current: None })
}

/// Make the calls in processes; true if all of them have ended well.
fn work_in_processes(settings: &Settings, tell: impl Fn(&[Shared])) -> (Vec<Progress>, bool) {
    // Each has one instruction set.
    let processes = settings.threads.next_multiple_of(INSTRUCTION_SETS.len()) as u64;
    let shards = processes.min(settings.calls);
    let progress: Vec<Shared> = (0..shards).map(|_| Shared::default()).collect();
    let ended_well = AtomicBool::new(true);
    thread::scope(|scope| {
        let readers: Vec<_> = (0..shards)
            .zip(&progress)
            .map(|(k, progress)| {
                let ended_well = &ended_well;
                scope.spawn(move || {
                    let mut child = start(settings, (k, processes));
                    for line in BufReader::new(child.stdout.take().unwrap()).lines().map_while(Result::ok) {
                        if let Some(now) = read_report(&line) {
                            *progress.lock().unwrap() = now;
                        }
                    }
                    let status = child.wait().unwrap();
                    if !status.success() {
                        say(&format!("the process of shard {k} of {processes} ended with {status}"));
                        ended_well.store(false, Relaxed);
                    }
                })
            })
            .collect();
        while readers.iter().any(|reader| !reader.is_finished()) {
            thread::sleep(Duration::from_millis(20));
            tell(&progress);
        }
    });
    let progress = progress.iter().map(|shard| shard.lock().unwrap().clone()).collect();
    (progress, ended_well.into_inner())
}

fn sum(shards: &[Progress]) -> Progress {
    let mut all = Progress::default();
    for shard in shards {
        all.calls += shard.calls;
        all.failures += shard.failures;
        if shard.slowest.0 > all.slowest.0 {
            all.slowest = shard.slowest;
        }
    }
    all
}

/// Something to be done at most once in a while.
struct Rarely {
    every: Duration,
    last: Mutex<Instant>,
}

impl Rarely {
    fn new(every: Duration) -> Self {
        Self { every, last: Mutex::new(Instant::now()) }
    }

    fn do_it(&self, work: impl FnOnce()) {
        let mut last = self.last.lock().unwrap();
        if last.elapsed() > self.every {
            *last = Instant::now();
            work();
        }
    }
}

/// `CALLS` calls from `FIRST` on of `SEED`, all of them accepted.
#[test]
fn hostile_calls_give_what_the_definition_says() {
    let settings = Settings::read();
    let now = |shards: &[Shared]| sum(&shards.iter().map(|s| s.lock().unwrap().clone()).collect::<Vec<_>>());
    if let Some(shard) = settings.shard {
        let often = Rarely::new(Duration::from_millis(500));
        let found = work_on_threads(&settings, &[shard], |shards| often.do_it(|| report(&now(shards))));
        report(&found[0]);
        assert_eq!(found[0].failures, 0, "wrong calls");
        return;
    }
    let (started, rarely) = (Instant::now(), Rarely::new(Duration::from_secs(10)));
    let line = |all: &Progress| {
        let Progress { calls, failures, slowest: (time, index), .. } = all;
        let seconds = started.elapsed().as_secs_f64();
        let rate = *calls as f64 / seconds;
        let Settings { calls: of, seed, .. } = settings;
        say(&format!(
            "{calls} of {of} calls of seed {seed} in {seconds:.0} s ({rate:.0} a second), {failures} wrong; call {index} \
             took longest, {:.1} ms",
            1e3 * time
        ));
    };
    let tell = |shards: &[Shared]| rarely.do_it(|| line(&now(shards)));
    let (found, ended_well) = if runs_on_cpu() {
        work_in_processes(&settings, tell)
    } else {
        let threads = (settings.threads as u64).min(settings.calls);
        let shards: Vec<(u64, u64)> = (0..threads).map(|k| (k, threads)).collect();
        (work_on_threads(&settings, &shards, tell), true)
    };
    let all = sum(&found);
    line(&all);
    assert!(ended_well && all.failures == 0, "{} wrong calls, named above", all.failures);
    assert!(all.calls == settings.calls || started.elapsed() > settings.limit, "not all calls were made");
}
