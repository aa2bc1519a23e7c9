//! Catches panics, so that none unwinds into XLA, into C or into a foreign thread pool.

use std::panic::{AssertUnwindSafe, catch_unwind};

/// Returns what `work` returns, or the message of its panic.
///
/// After a panic the caller must not rely on state that `work` may have left half written.
pub(crate) fn catch_panic<T>(work: impl FnOnce() -> T) -> Result<T, String> {
    catch_unwind(AssertUnwindSafe(work)).map_err(|payload| {
        let text = payload.downcast_ref::<&str>().map(ToString::to_string);
        let text = text.or_else(|| payload.downcast_ref::<String>().cloned()).unwrap_or_default();
        // The destructor of an arbitrary payload could panic again.
        std::mem::forget(payload);
        text
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_panic_is_its_text_and_a_foreign_payload_is_none() {
        assert_eq!(catch_panic(|| 1), Ok(1));
        assert_eq!(catch_panic(|| panic!("failed on purpose")), Err::<(), _>("failed on purpose".into()));
        assert_eq!(catch_panic(|| panic!("failed on purpose {}", 2)), Err::<(), _>("failed on purpose 2".into()));
        assert_eq!(catch_panic(|| std::panic::panic_any(1.5f64)), Err::<(), _>(String::new()));
    }
}
