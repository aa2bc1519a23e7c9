//! Collects the errors of all comparisons with the reference in the file that `XLA_ATTENTION_TEST_SUMMARY` names: one
//! line per test and combination of dtypes.
//!
//! Its columns are: topic (the module of `tests/it`), test, device, dtypes, number of cases, the largest error in units
//! of the naive formula's error (over cases in which that is above the floor of 1e-5; `-` if there is none), and the
//! largest ratio of an error to its bound (`docs/semantics.md#error-bounds`).

use super::{Dtypes, ErrorBound};
use std::cell::RefCell;
use std::collections::{BTreeMap, HashSet};
use std::fmt::Write as _;
use std::fs::OpenOptions;
use std::hash::{DefaultHasher, Hash, Hasher};
use std::io::Write as _;

#[derive(Default)]
struct Record {
    /// Hashes of the cases' names. A case that runs twice counts once.
    cases: HashSet<u64>,
    units: Option<f64>,
    share: f64,
}

/// The records of one test, which runs on one thread. They are written when the thread ends.
#[derive(Default)]
struct Records(BTreeMap<String, Record>);

thread_local! {
    static RECORDS: RefCell<Records> = RefCell::default();
}

/// Records that the largest error of the case `name` is `error`.
pub fn record(name: &str, dtypes: Dtypes, error: f64, error_bound: ErrorBound) {
    RECORDS.with_borrow_mut(|records| {
        let record = records.0.entry(format!("{dtypes:?}")).or_default();
        let mut hasher = DefaultHasher::new();
        name.hash(&mut hasher);
        record.cases.insert(hasher.finish());
        record.share = record.share.max(error / error_bound.limit());
        if error_bound.naive_error > error_bound.floor {
            let units = error / error_bound.naive_error;
            record.units = Some(record.units.map_or(units, |most| most.max(units)));
        }
    });
}

impl Drop for Records {
    fn drop(&mut self) {
        let Some(path) = std::env::var_os("XLA_ATTENTION_TEST_SUMMARY") else { return };
        let thread = std::thread::current();
        let test = thread.name().unwrap_or("a thread of a test");
        let device = std::env::var("XLA_ATTENTION_TEST_DEVICE").unwrap_or_else(|_| "cpu".into());
        let mut lines = String::new();
        for (dtypes, Record { cases, units, share }) in &self.0 {
            let units = units.map_or_else(|| "-".into(), |u| format!("{u:.3}"));
            let (topic, cases) = (test.split("::").next().unwrap_or(test), cases.len());
            let _ = writeln!(lines, "{topic}\t{test}\t{device}\t{dtypes}\t{cases}\t{units}\t{share:.3}");
        }
        // A single write, so that lines of concurrent processes do not mix.
        let file = OpenOptions::new().create(true).append(true).open(&path);
        let written = file.and_then(|mut file| file.write_all(lines.as_bytes()));
        if let Err(error) = written {
            eprintln!("{}: {error}", path.display());
        }
    }
}
