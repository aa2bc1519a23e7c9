//! Checks of the SASS of the sm_90a kernels, which nvdisasm disassembles: they use wgmma and asynchronous copies, and nothing
//! that makes them slow without making them wrong.

use super::variants::VARIANTS;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::{env, fs};

/// Counts of the instructions that the checks are about.
#[derive(Default)]
struct SassCounts {
    /// wgmma: `HGMMA` and `QGMMA`.
    wgmmas: usize,
    /// TMA loads of tensors: `UTMALDG`.
    tma_loads: usize,
    /// cp.async: `LDGSTS`.
    cp_asyncs: usize,
    /// Local loads and stores. ptxas reports spilled registers, but not arrays that are indexed at run time.
    local: usize,
    /// `R2UR` between two wgmma of a group, which should be issued back to back.
    r2urs: usize,
    /// `griddepcontrol.wait`: `ACQBULK`.
    waits: usize,
}

impl SassCounts {
    fn of(sass: &str) -> Self {
        let mut counts = Self::default();
        let mut in_chain = false;
        for (opcode, line) in sass.lines().filter_map(|line| Some((opcode(line)?, line))) {
            match opcode {
                "HGMMA" | "QGMMA" => {
                    counts.wgmmas += 1;
                    // The last wgmma of a group has `gsb0`.
                    in_chain = !line.contains("gsb0");
                }
                "UTMALDG" => counts.tma_loads += 1,
                "LDGSTS" => counts.cp_asyncs += 1,
                "LDL" | "STL" => counts.local += 1,
                "ACQBULK" => counts.waits += 1,
                "R2UR" if in_chain => counts.r2urs += 1,
                _ => {}
            }
        }
        counts
    }

    /// `kernel` is the name of a variant. f32 and latent rows are loaded by cp.async.
    fn problems(&self, kernel: &str) -> Vec<String> {
        let Self { wgmmas, tma_loads, cp_asyncs, local, r2urs, waits } = *self;
        let copies = ["hopper_prefill_f32", "hopper_mla"].iter().any(|name| kernel.starts_with(name));
        let early = ["hopper_bias", "hopper_bwd", "hopper_fused", "hopper_key_ranges", "hopper_prefill"];
        let starts_early = early.iter().any(|name| kernel.starts_with(name));
        let checks = [
            (wgmmas == 0, "no wgmma".into()),
            (!copies && tma_loads == 0, "no TMA load".into()),
            (copies && cp_asyncs == 0, "no cp.async".into()),
            (local > 0, format!("{local} accesses to local memory")),
            (starts_early && waits == 0, "no wait for the kernel before it".into()),
            // A descriptor is two registers; a quarter of those registers may come from non-uniform ones.
            (2 * r2urs > wgmmas, format!("{r2urs} R2UR between {wgmmas} wgmma")),
        ];
        checks.into_iter().filter(|(is_problem, _)| *is_problem).map(|(_, problem)| problem).collect()
    }
}

/// `/*0a10*/  @!P0 R2UR UR4, R2 ;` has the opcode `R2UR`.
fn opcode(line: &str) -> Option<&str> {
    let instruction = line.trim_start().strip_prefix("/*")?.split_once("*/")?.1.trim_start();
    let unguarded = match instruction.strip_prefix('@') {
        Some(guarded) => guarded.split_once(' ')?.1.trim_start(),
        None => instruction,
    };
    unguarded.split(|c: char| !c.is_ascii_alphanumeric()).next()
}

/// nvdisasm from the Python packages of the build, from PATH, or from CUDA's default folder.
fn nvdisasm() -> Option<PathBuf> {
    let python = env::var("PYTHON").unwrap_or_else(|_| "python3".into());
    let probe = "import glob, sys\nfor p in sys.path: print(*glob.glob(p + '/nvidia/cu1*/bin/nvdisasm'), sep='\\n')";
    let packaged = Command::new(python).args(["-c", probe]).output().ok().map_or(vec![], |output| output.stdout);
    let mut candidates: Vec<PathBuf> =
        String::from_utf8_lossy(&packaged).lines().filter(|line| !line.is_empty()).map(PathBuf::from).collect();
    candidates.extend(env::split_paths(&env::var_os("PATH").unwrap_or_default()).map(|folder| folder.join("nvdisasm")));
    candidates.push("/usr/local/cuda/bin/nvdisasm".into());
    candidates.into_iter().find(|path| path.is_file())
}

fn disassembled(nvdisasm: &Path, name: &str, cubin: &[u8]) -> String {
    let file = env::temp_dir().join(format!("xla_attention_{}_{name}.cubin", std::process::id()));
    fs::write(&file, cubin).unwrap();
    // -ndf leaves out an analysis of the data flow, which takes a third of the time and changes nothing that is printed.
    let output = Command::new(nvdisasm).args(["-c", "-ndf"]).arg(&file).output().unwrap();
    fs::remove_file(&file).unwrap();
    assert!(output.status.success(), "{name}: {}", String::from_utf8_lossy(&output.stderr));
    String::from_utf8(output.stdout).unwrap()
}

#[test]
#[cfg_attr(not(every_architecture), ignore = "XLA_ATTENTION_CUDA_ARCHS leaves kernels out")]
fn sm_90a_kernels_use_wgmma_and_tma_without_slow_instructions() {
    let Some(nvdisasm) = nvdisasm() else {
        assert!(env::var_os("CI").is_none(), "CI has nvdisasm (the test dependencies in pyproject.toml)");
        println!("skipped: no nvdisasm in python3's packages, on PATH or in /usr/local/cuda");
        return;
    };
    let tuned = VARIANTS.iter().filter(|variant| variant.target == "90a");
    let mut checked = 0;
    for variant in tuned {
        for (arch, image) in variant.cubins {
            let bytes: Vec<u8> = image.unpack().unwrap().iter().flat_map(|word| word.to_le_bytes()).collect();
            let problems =
                SassCounts::of(&disassembled(&nvdisasm, variant.name, &bytes[..image.len])).problems(variant.name);
            assert!(problems.is_empty(), "{} sm_{arch}: {}", variant.name, problems.join(", "));
            checked += 1;
        }
    }
    assert!(checked > 0);
}

#[test]
fn each_slow_instruction_is_found() {
    let wgmma = "        /*0010*/                   HGMMA.64x128x16.F32.BF16 R24, gdesc[UR4], R24 ;\n";
    let last = "        /*0020*/                   HGMMA.64x128x16.F32.BF16 R24, gdesc[UR4], R24, gsb0 ;\n";
    let load = "        /*0030*/              @!P1 UTMALDG.3D [UR8], [UR4] ;\n";
    let moved = "        /*0040*/               @P0 R2UR UR4, R2 ;\n";
    let wait = "        /*0080*/                   ACQBULK ;\n";
    let problems = |sass: &[&str]| SassCounts::of(&[&[wait], sass].concat().concat()).problems("hopper_prefill_bf16");
    assert!(problems(&[moved, wgmma, last, moved, moved, load]).is_empty());
    assert_eq!(problems(&[wgmma, moved, moved, last, load]), ["2 R2UR between 2 wgmma"]);
    let fp8_wgmma =
        "        /*0060*/                   QGMMA.64x128x32.F32.E4M3.E4M3 R24, R8, gdesc[UR4], R24, gsb0 ;\n";
    assert!(problems(&[fp8_wgmma, load]).is_empty());
    assert_eq!(problems(&[wgmma, last]), ["no TMA load"]);
    assert_eq!(problems(&[load]), ["no wgmma"]);
    let copy = "        /*0070*/              @!P2 LDGSTS.E.BYPASS.128 [R43], desc[UR60][R4.64], P0 ;\n";
    let f32_problems =
        |sass: &[&str]| SassCounts::of(&[&[wait], sass].concat().concat()).problems("hopper_prefill_f32_64_none");
    assert!(f32_problems(&[wgmma, last, copy]).is_empty());
    assert_eq!(f32_problems(&[wgmma, last]), ["no cp.async"]);
    let spill = "        /*0050*/                   STL.64 [R1+0x8], R2 ;\n";
    assert_eq!(problems(&[wgmma, last, load, spill]), ["1 accesses to local memory"]);
    let early = |name| SassCounts::of(&[wgmma, last, load].concat()).problems(name);
    assert_eq!(early("hopper_bwd_bf16_128_none"), ["no wait for the kernel before it"]);
    assert!(early("hopper_split_kv_bf16_128_split_kv_paged_none").is_empty());
}
