//! Running programs, with errors that show what they said, and writing files that others read.

use anyhow::{Context, Result, ensure};
use std::env;
use std::process::{Command, Output};

/// The interpreter of the build environment.
pub(crate) fn python() -> String {
    env::var("PYTHON").unwrap_or_else(|_| "python3".into())
}

/// Run to success; the error holds the command and both its streams.
pub(crate) fn run(command: &mut Command) -> Result<Output> {
    let output = command.output().with_context(|| format!("cannot start {command:?}"))?;
    ensure!(
        output.status.success(),
        "{command:?} failed ({}):\n{}{}",
        output.status,
        String::from_utf8_lossy(&output.stdout),
        String::from_utf8_lossy(&output.stderr)
    );
    Ok(output)
}

/// Write a file where it is not there with this text, at once: another build may read it.
#[cfg(feature = "cuda")]
pub(crate) fn write(path: &std::path::Path, text: &str) -> Result<()> {
    use std::fs;
    if fs::read_to_string(path).is_ok_and(|there| there == text) {
        return Ok(());
    }
    fs::create_dir_all(path.parent().unwrap_or(path))?;
    let aside = path.with_added_extension(std::process::id().to_string());
    fs::write(&aside, text)?;
    fs::rename(&aside, path).with_context(|| path.display().to_string())
}
