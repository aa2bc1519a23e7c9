//! Running programs, with errors that show what they said.

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
