//! Panics end here: nothing unwinds into XLA, into C or into a thread pool of somebody else.

use std::panic::{AssertUnwindSafe, catch_unwind};

/// What `work` gives, or the text of its panic.
///
/// The caller goes on as if `work` had failed, and trusts nothing that it may have left half done.
pub(crate) fn catch_panic<T>(work: impl FnOnce() -> T) -> Result<T, String> {
    catch_unwind(AssertUnwindSafe(work)).map_err(|payload| {
        let text = payload.downcast_ref::<&str>().map(ToString::to_string);
        let text = text.or_else(|| payload.downcast_ref::<String>().cloned()).unwrap_or_default();
        // Dropping a foreign value could panic again.
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
