//! The settings of a run, from the environment.

use std::fmt::Debug;
use std::str::FromStr;
use std::time::Duration;

/// Which calls a run makes, and how.
#[derive(Clone, Debug)]
pub(crate) struct Settings {
    /// A seed and an index determine a call.
    pub(crate) seed: u64,
    pub(crate) first: u64,
    pub(crate) calls: u64,
    /// Number of processes on the CPU, of threads on a GPU.
    pub(crate) threads: usize,
    /// The run ends after this time.
    pub(crate) limit: Duration,
    /// A call that takes longer counts as hanging.
    pub(crate) hangs_after: Duration,
    /// (k, n): this child process makes every n-th call, beginning with the k-th.
    pub(crate) shard: Option<(u64, u64)>,
}

const PREFIX: &str = "XLA_ATTENTION_FUZZ_";

/// A number from the environment.
fn number<T: FromStr<Err: Debug>>(name: &str) -> Option<T> {
    let text = std::env::var(format!("{PREFIX}{name}")).ok()?;
    Some(text.parse().unwrap_or_else(|e| panic!("{PREFIX}{name}={text}: {e:?}")))
}

impl Settings {
    pub(crate) fn read() -> Self {
        let cores = std::thread::available_parallelism().map_or(1, usize::from);
        let emulated = std::env::var_os("XLA_ATTENTION_EMULATOR").is_some();
        let shard = std::env::var(format!("{PREFIX}SHARD")).ok().map(|text| {
            let (k, n) = text.split_once('/').expect("SHARD is k/n");
            (k.parse().unwrap(), n.parse().unwrap())
        });
        Self {
            seed: number("SEED").unwrap_or(1),
            first: number("FIRST").unwrap_or(0),
            calls: number("CALLS").unwrap_or(20_000),
            threads: number("THREADS").unwrap_or(if emulated { 1 } else { cores }),
            limit: Duration::from_secs(number("SECONDS").unwrap_or(u64::MAX)),
            // The emulator compiles a kernel at its first call.
            hangs_after: Duration::from_secs(if emulated { 1800 } else { 60 }),
            shard,
        }
    }

    /// The indices of a shard's calls.
    pub(crate) fn indices(&self, (k, n): (u64, u64)) -> impl Iterator<Item = u64> {
        let first = self.first;
        (k..self.calls).step_by(n as usize).map(move |offset| first + offset)
    }

    /// The command that repeats one call.
    pub(crate) fn repeat(&self, index: u64, test: &str) -> String {
        let device = std::env::var("XLA_ATTENTION_TEST_DEVICE")
            .map_or(String::new(), |device| format!("XLA_ATTENTION_TEST_DEVICE={device} "));
        let program = std::env::current_exe().unwrap();
        let (seed, program) = (self.seed, program.display());
        format!("{device}{PREFIX}SEED={seed} {PREFIX}FIRST={index} {PREFIX}CALLS=1 {program} --nocapture {test}")
    }
}
