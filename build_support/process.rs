//! Running programs with errors that contain their output, and the folder and files that concurrent builds share.

use anyhow::{Context, Result, ensure};
use std::env;
use std::path::Path;
use std::process::{Command, Output};

/// The interpreter of the build environment.
pub(crate) fn python() -> String {
    env::var("PYTHON").unwrap_or_else(|_| "python3".into())
}

/// Runs a command. If it fails, the error contains the command, its standard output and its standard error.
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

/// Cargo's target folder, or `out` if it is not below one. Below it, `--target` makes a folder that is marked in the same way.
pub(crate) fn target_folder(out: &Path) -> &Path {
    out.ancestors().filter(|folder| folder.join("CACHEDIR.TAG").exists()).last().unwrap_or(out)
}

/// Writes a file unless it has these contents already. The file is replaced atomically, because another build may read it.
#[cfg(feature = "cuda")]
pub(crate) fn write(path: &Path, contents: impl AsRef<[u8]>) -> Result<()> {
    use std::fs;
    if fs::read(path).is_ok_and(|there| there == contents.as_ref()) {
        return Ok(());
    }
    fs::create_dir_all(path.parent().unwrap_or(path))?;
    let temporary = path.with_added_extension(std::process::id().to_string());
    fs::write(&temporary, contents)?;
    fs::rename(&temporary, path).with_context(|| path.display().to_string())
}
