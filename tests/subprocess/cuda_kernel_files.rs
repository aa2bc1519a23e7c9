//! `XLA_ATTENTION_KERNEL_DIR`: files that replace built-in kernels, and the errors for files that the driver refuses.
//!
//! The tests use a fake libcuda, or with `XLA_ATTENTION_TEST_DEVICE=cuda` a GPU. The library reads the environment
//! once, so each folder needs a child process.

use crate::support::fake_libcuda;
use crate::support::{Array, BufferView, F32, I32, InlinePool, POISON, Side, addition, runs_on_cpu};
use std::path::PathBuf;
use xla_attention::{Action, Error, Stream};

/// A kernel with the parameter of `simple_add` that does nothing.
const IDLE: &str = ".version 7.0\n.target sm_80\n.address_size 64\n\
                    .visible .entry xa_simple_add_f32(.param .align 8 .b8 parameter[32]) { ret; }\n";

/// Creates a folder that contains this file.
fn folder(name: &str, file: &str, contents: &[u8]) -> PathBuf {
    let folder = PathBuf::from(env!("CARGO_TARGET_TMPDIR"));
    // A test binary that was copied to another machine has no target folder.
    let folder = if folder.exists() { folder } else { std::env::temp_dir() };
    let folder = folder.join(format!("kernels_{}_{name}", std::process::id()));
    std::fs::create_dir_all(&folder).unwrap();
    std::fs::write(folder.join(file), contents).unwrap();
    folder
}

/// The path of `file`, and what the child's additions in f32, in i32 and again in f32 return if `file` has these
/// contents.
fn outcomes(name: &str, file: &str, contents: &[u8]) -> (PathBuf, [String; 3]) {
    let folder = folder(name, file, contents);
    let mut child = fake_libcuda::child("cuda_kernel_files::child_that_adds");
    child.env("XLA_ATTENTION_KERNEL_DIR", &folder);
    if runs_on_cpu() {
        fake_libcuda::preload(&mut child);
    }
    let printed = fake_libcuda::printed_outcomes(&mut child);
    std::fs::remove_dir_all(&folder).unwrap();
    (folder.join(file), printed.try_into().unwrap())
}

#[test]
#[ignore = "runs in a separate process"]
fn child_that_adds() {
    for dtype in [F32, I32, F32] {
        let numbers = if dtype == F32 { Array::f32s(&[3], &[1.0, 2.0, 3.0]) } else { Array::i32s(&[3], &[1, 2, 3]) };
        let outcome = if runs_on_cpu() { on_the_fake_libcuda(&numbers) } else { on_the_gpu(&numbers) };
        println!("outcome: {}", outcome.unwrap_or_else(|error| format!("{}: {}", error.code as i32, error.message)));
    }
}

/// The fake libcuda computes nothing.
fn on_the_fake_libcuda(numbers: &Array) -> Result<String, Error> {
    let views = [BufferView::dense(numbers.bytes.as_ptr().cast_mut()); 2];
    // SAFETY: the fake libcuda reads no memory, and the array outlives the call.
    unsafe { addition(numbers.clone(), numbers.clone()).run_action(Action::LaunchCuda(Stream(0)), &views, &views) }?;
    Ok("done".into())
}

/// "done" if the sums are right, "untouched" if the results were not written.
fn on_the_gpu(numbers: &Array) -> Result<String, Error> {
    let code = |code| if code == 9 { xla_attention::Code::FailedPrecondition } else { xla_attention::Code::Internal };
    let results = addition(numbers.clone(), numbers.clone())
        .run(Side::EndsAtGuard, &InlinePool(1))
        .map_err(|refusal| Error { code: code(refusal.code), message: refusal.text })?;
    let sums: Vec<f64> = numbers.values().iter().map(|x| x + x).collect();
    Ok(if results[0].values() == sums {
        "done".into()
    } else if results[0].bytes.iter().all(|&b| b == POISON) {
        "untouched".into()
    } else {
        format!("{:?}", results[0].values())
    })
}

#[test]
#[cfg_attr(not(every_architecture), ignore = "XLA_ATTENTION_CUDA_ARCHS leaves kernels out")]
fn a_corrupt_file_is_reported_with_the_drivers_text_and_other_kernels_work() {
    // The driver passes an image to ptxas only if it begins like PTX.
    let ptx = ".version 7.0\n.target sm_80\n.address_size 64\ncorrupt\n";
    let (path, reported) = outcomes("corrupt", "simple_add_f32.ptx", ptx.as_bytes());
    assert_eq!(reported[1], "done");
    for refusal in [&reported[0], &reported[2]] {
        assert!(refusal.starts_with("9: xla_gpu_simple_add: the driver (CUDA "), "{refusal}");
        assert!(refusal.contains(&format!("refuses the kernel simple_add_f32, {},", path.display())), "{refusal}");
        assert!(refusal.contains("cuModuleLoadDataEx: CUDA_ERROR_INVALID_"), "{refusal}");
        assert!(refusal.ends_with("; without XLA_ATTENTION_KERNEL_DIR it is the built-in one"), "{refusal}");
    }
    let log = if runs_on_cpu() { "the log of the driver" } else { "ptxas" };
    assert!(reported[0].contains(log), "{}", reported[0]);
}

/// An ELF header of a cubin whose section headers are at byte `sections`.
fn elf(sections: u64) -> Vec<u8> {
    let mut head = b"\x7fELF\x02\x01\x01\x41".to_vec();
    head.resize(64, 0);
    head[18..20].copy_from_slice(&190u16.to_le_bytes());
    head[40..48].copy_from_slice(&sections.to_le_bytes());
    head[58..62].copy_from_slice(&[64, 0, 1, 0]);
    head
}

/// The driver trusts the sizes in the headers of a file, so none of these files may reach it.
#[test]
#[cfg_attr(not(every_architecture), ignore = "XLA_ATTENTION_CUDA_ARCHS leaves kernels out")]
fn an_incomplete_module_is_reported_and_does_not_reach_the_driver() {
    for (name, contents, why) in [
        ("simple_add_f32.cubin", elf(64), "is cut short: its 64 bytes do not hold what its headers name"),
        ("simple_add_f32.cubin", elf(u64::MAX), "is cut short"),
        ("simple_add_f32.cubin", elf(64)[..40].to_vec(), "is cut short: its 40 bytes"),
        ("simple_add_f32.cubin", b"corrupt\n".to_vec(), "is not machine code for NVIDIA GPUs (64-bit ELF)"),
        ("simple_add_f32.cubin", vec![], "is not machine code"),
        ("simple_add_f32.ptx", elf(64), "is not a PTX text"),
    ] {
        let (path, reported) = outcomes("not_whole", name, &contents);
        assert_eq!(reported[1], "done");
        for refusal in [&reported[0], &reported[2]] {
            let start = format!("9: xla_gpu_simple_add: the kernel {} {why}", path.display());
            assert!(refusal.starts_with(&start), "{refusal}");
            assert!(refusal.ends_with("; without XLA_ATTENTION_KERNEL_DIR it is the built-in one"), "{refusal}");
        }
    }
}

#[test]
#[cfg_attr(not(every_architecture), ignore = "XLA_ATTENTION_CUDA_ARCHS leaves kernels out")]
fn a_file_replaces_the_kernel_of_its_name() {
    let (_, reported) = outcomes("idle", "simple_add_f32.ptx", IDLE.as_bytes());
    let idle = if runs_on_cpu() { "done" } else { "untouched" };
    assert_eq!(reported, [idle, "done", idle]);
}

#[test]
#[cfg_attr(not(every_architecture), ignore = "XLA_ATTENTION_CUDA_ARCHS leaves kernels out")]
fn a_module_without_the_kernel_is_reported() {
    let (path, reported) =
        outcomes("misnamed", "simple_add_f32.ptx", IDLE.replace("xa_simple_add_f32", "other").as_bytes());
    assert_eq!(reported[1], "done");
    let expected = format!("the kernel simple_add_f32 is not in its module, {}: cuModuleGetFunction: ", path.display());
    assert!(runs_on_cpu() || reported[0].contains(&expected), "{}", reported[0]);
}
