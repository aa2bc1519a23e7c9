//! A fake libcuda (`fake_libcuda.c`) whose calls fail as a test asks, found by the loader before any real driver.
//!
//! A process loads libcuda once. A test that needs the fake one therefore starts this test binary again, in a child process
//! with another environment.

use super::BufferView;
use super::valid_calls;
use std::path::PathBuf;
use std::process::Command;
use std::sync::OnceLock;
use xla_attention::{Action, Error};

/// The folder of the compiled fake libcuda: one for a driver with context ids (`cuCtxGetId`), one for an older driver.
fn folder(has_ids: bool) -> &'static PathBuf {
    static FOLDERS: [OnceLock<PathBuf>; 2] = [const { OnceLock::new() }; 2];
    FOLDERS[usize::from(has_ids)].get_or_init(|| {
        let name = format!("fake_libcuda_{}_{}", std::process::id(), u8::from(has_ids));
        let folder = PathBuf::from(env!("CARGO_TARGET_TMPDIR")).join(name);
        std::fs::create_dir_all(&folder).unwrap();
        let source = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/support/fake_libcuda.c");
        let mut compiler = Command::new("cc");
        compiler
            .args(["-Wall", "-Wextra", "-Werror", "-shared", "-fPIC", "-o"])
            .arg(folder.join("libcuda.so.1"))
            .args(has_ids.then_some("-DHAS_CONTEXT_IDS"))
            .arg(source);
        assert!(compiler.status().unwrap().success());
        std::fs::copy(folder.join("libcuda.so.1"), folder.join("libcuda.so")).unwrap();
        folder
    })
}

/// A command that runs the ignored test `name` of this binary in a child process.
pub fn child(name: &str) -> Command {
    let mut command = Command::new(std::env::current_exe().unwrap());
    command.args(["--exact", name, "--ignored", "--nocapture"]);
    command
}

/// The outcomes that the test `name` prints in a child process whose driver behaves as `behaviour` says, with or without
/// context ids.
pub fn outcomes(name: &str, behaviour: &str, has_ids: bool) -> Vec<String> {
    let mut child = child(name);
    printed_outcomes(child.env("FAKE_LIBCUDA", behaviour).env("LD_LIBRARY_PATH", folder(has_ids)))
}

/// Makes `child` load a fake libcuda whose calls succeed.
pub fn preload(child: &mut Command) {
    child.env("FAKE_LIBCUDA", "none").env("LD_LIBRARY_PATH", folder(false));
}

/// Prepares or launches an addition. The fake libcuda reads no memory.
pub fn add(action: Action) -> Result<(), Error> {
    let call = valid_calls::of("xla_gpu_simple_add");
    let numbers = [0.0f32; 64];
    let views = [BufferView::dense(numbers.as_ptr().cast_mut().cast()); 2];
    // SAFETY: `numbers` outlives the call.
    unsafe { call.run_action(action, &views, &views) }
}

/// Runs `child`, which must succeed, and returns the texts that it prints after "outcome: ".
pub fn printed_outcomes(child: &mut Command) -> Vec<String> {
    let output = child.output().unwrap();
    let text = String::from_utf8(output.stdout).unwrap();
    assert!(output.status.success(), "{text}\n{}", String::from_utf8_lossy(&output.stderr));
    text.lines().filter_map(|line| line.split_once("outcome: ")).map(|(_, text)| text.to_owned()).collect()
}
