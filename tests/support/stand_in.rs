//! A stand-in for libcuda that refuses (`faulty_libcuda.c`), in front of any driver.
//!
//! libcuda is loaded once in a process, so a test that wants the stand-in is run by a process of its own: the same test
//! binary again.

use super::View;
use super::right_calls;
use std::path::PathBuf;
use std::process::Command;
use std::sync::OnceLock;
use xla_attention::{Action, Error};

/// The folder that holds the stand-in, one for a driver that gives contexts ids and one for an older driver.
fn folder(has_ids: bool) -> &'static PathBuf {
    static FOLDERS: [OnceLock<PathBuf>; 2] = [const { OnceLock::new() }; 2];
    FOLDERS[usize::from(has_ids)].get_or_init(|| {
        let name = format!("faulty_libcuda_{}_{}", std::process::id(), u8::from(has_ids));
        let folder = PathBuf::from(env!("CARGO_TARGET_TMPDIR")).join(name);
        std::fs::create_dir_all(&folder).unwrap();
        let source = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/support/faulty_libcuda.c");
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

/// The test `name` of this binary, which is ignored otherwise, in a process of its own.
pub fn child(name: &str) -> Command {
    let mut command = Command::new(std::env::current_exe().unwrap());
    command.args(["--exact", name, "--ignored", "--nocapture"]);
    command
}

/// What the test `name` prints after "outcome: " where the driver has this fault, and gives contexts ids or is older.
pub fn outcomes(name: &str, fault: &str, has_ids: bool) -> Vec<String> {
    let mut child = child(name);
    printed(child.env("FAULT", fault).env("LD_LIBRARY_PATH", folder(has_ids)))
}

/// Put a stand-in without a fault in front of any driver that a child would load.
pub fn in_front(child: &mut Command) {
    child.env("FAULT", "none").env("LD_LIBRARY_PATH", folder(false));
}

/// An addition that is prepared or launched; the stand-in reads no memory.
pub fn add(action: Action) -> Result<(), Error> {
    let call = right_calls::of("xla_gpu_simple_add");
    let numbers = [0.0f32; 64];
    let views = [View::dense(numbers.as_ptr().cast_mut().cast()); 2];
    // SAFETY: the array outlives the call.
    unsafe { call.enter(action, &views, &views) }
}

/// What a child prints after "outcome: "; it has to succeed.
pub fn printed(child: &mut Command) -> Vec<String> {
    let output = child.output().unwrap();
    let text = String::from_utf8(output.stdout).unwrap();
    assert!(output.status.success(), "{text}\n{}", String::from_utf8_lossy(&output.stderr));
    text.lines().filter_map(|line| line.split_once("outcome: ")).map(|(_, text)| text.to_owned()).collect()
}
