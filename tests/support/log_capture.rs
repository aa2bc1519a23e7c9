//! Captures what the library logs while a test runs.

use std::io;
use std::sync::{Arc, LazyLock, Mutex};

/// The captured text.
#[derive(Clone, Default)]
pub struct Log(Arc<Mutex<Vec<u8>>>);

impl io::Write for Log {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.0.lock().unwrap().extend_from_slice(bytes);
        Ok(bytes.len())
    }
    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// The log of this process since the first call of this function.
pub fn log() -> &'static Log {
    static LOG: LazyLock<Log> = LazyLock::new(|| {
        let log = Log::default();
        let writer = log.clone();
        tracing_subscriber::fmt().with_max_level(tracing::Level::DEBUG).with_writer(move || writer.clone()).init();
        log
    });
    &LOG
}

/// Asserts that the log contains `expected`.
pub fn assert_logged(log: &Log, expected: &str) {
    let logged = String::from_utf8(log.0.lock().unwrap().clone()).unwrap();
    assert!(logged.contains(expected), "{expected}, but: {logged}");
}
