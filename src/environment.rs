//! Boolean environment variables such as `XLA_ATTENTION_CHECK`, with one rule for their values.

/// Whether the variable is set to a true value. Any other value is false; an unknown one warns on standard error.
pub(crate) fn switch(variable: &str) -> bool {
    let Some(value) = std::env::var_os(variable) else { return false };
    value.to_str().and_then(parse).unwrap_or_else(|| {
        eprintln!(
            "{variable}={}: expected 1, true, on or yes, or 0, false, off or no; taken for off",
            value.to_string_lossy()
        );
        false
    })
}

/// The value as a boolean; an empty value is false, an unknown one `None`.
fn parse(value: &str) -> Option<bool> {
    match value.to_ascii_lowercase().as_str() {
        "1" | "true" | "on" | "yes" => Some(true),
        "" | "0" | "false" | "off" | "no" => Some(false),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::parse;

    #[test]
    fn a_switch_is_a_number_or_a_word_in_any_case() {
        for on in ["1", "true", "True", "TRUE", "on", "ON", "yes", "Yes"] {
            assert_eq!(parse(on), Some(true), "{on}");
        }
        for off in ["", "0", "false", "False", "off", "OFF", "no", "No"] {
            assert_eq!(parse(off), Some(false), "{off}");
        }
        for neither in ["2", "y", "enable", "1 ", "on,off"] {
            assert_eq!(parse(neither), None, "{neither}");
        }
    }
}
