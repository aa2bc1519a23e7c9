//! `XLA_ATTENTION_LOG=debug` logs the chosen kernels to standard error, once per call shape.

use std::collections::HashSet;
use std::hash::{DefaultHasher, Hash, Hasher};
use std::str::FromStr;
use std::sync::{Mutex, OnceLock, PoisonError};
use tracing::Level;
use tracing::level_filters::LevelFilter;

/// Send this crate's events to standard error at the level of `XLA_ATTENTION_LOG`, if it is set.
///
/// A program that has installed a `tracing` subscriber keeps its own.
pub(crate) fn init() {
    static INIT: OnceLock<()> = OnceLock::new();
    INIT.get_or_init(|| {
        let Ok(text) = std::env::var("XLA_ATTENTION_LOG") else { return };
        match LevelFilter::from_str(&text) {
            Ok(level) => {
                let to = tracing_subscriber::fmt().with_max_level(level).with_writer(std::io::stderr).without_time();
                // An error means that the program has installed a subscriber, which receives the events instead.
                let _ = to.with_ansi(false).try_init();
            }
            Err(_) => eprintln!("XLA_ATTENTION_LOG={text}: expected off, error, warn, info, debug or trace"),
        }
    });
}

/// Log `text` the first time that `shape` is seen for `operator`.
pub(crate) fn call(operator: &str, shape: impl Hash, text: impl FnOnce() -> String) {
    static SEEN: Mutex<Option<HashSet<u64>>> = Mutex::new(None);
    if !tracing::enabled!(Level::DEBUG) {
        return;
    }
    let mut hasher = DefaultHasher::new();
    (operator, shape).hash(&mut hasher);
    let mut seen = SEEN.lock().unwrap_or_else(PoisonError::into_inner);
    if seen.get_or_insert_default().insert(hasher.finish()) {
        tracing::debug!("{operator}: {}", text());
    }
}
