//! What the tuned kernels' machine code is made of, read with nvdisasm: what makes them fast, and nothing that undoes it.

use super::variants::VARIANTS;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::{env, fs};

/// Instructions by which a kernel falls behind without being wrong.
#[derive(Default)]
struct Found {
    /// Products of a warpgroup.
    products: usize,
    /// Loads of boxes by TMA.
    boxes: usize,
    /// Loads and stores of local memory; ptxas reports spilled registers, but not arrays that are indexed at run time.
    local: usize,
    /// Registers moved to the uniform ones between two products that should follow each other at once.
    moved: usize,
}

impl Found {
    fn of(sass: &str) -> Self {
        let mut found = Self::default();
        let mut in_chain = false;
        for (opcode, line) in sass.lines().filter_map(|line| Some((opcode(line)?, line))) {
            match opcode {
                "HGMMA" | "QGMMA" => {
                    found.products += 1;
                    // The last product of a group counts it.
                    in_chain = !line.contains("gsb0");
                }
                "UTMALDG" => found.boxes += 1,
                "LDL" | "STL" => found.local += 1,
                "R2UR" if in_chain => found.moved += 1,
                _ => {}
            }
        }
        found
    }

    fn faults(&self) -> Vec<String> {
        let Self { products, boxes, local, moved } = *self;
        let checks = [
            (products == 0, "no wgmma".into()),
            (boxes == 0, "no bulk load of a tensor's box".into()),
            (local > 0, format!("{local} accesses to local memory")),
            // A descriptor is two registers: a quarter of them may come from where it is not the same in all lanes.
            (2 * moved > products, format!("{moved} moves to uniform registers between {products} products")),
        ];
        checks.into_iter().filter(|(is_fault, _)| *is_fault).map(|(_, what)| what).collect()
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

/// In the packages of the Python that builds, on PATH, or in the usual folder.
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
    let output = Command::new(nvdisasm).arg("-c").arg(&file).output().unwrap();
    fs::remove_file(&file).unwrap();
    assert!(output.status.success(), "{name}: {}", String::from_utf8_lossy(&output.stderr));
    String::from_utf8(output.stdout).unwrap()
}

#[test]
#[cfg_attr(not(every_architecture), ignore = "XLA_ATTENTION_CUDA_ARCHS leaves kernels out")]
fn tuned_kernels_are_made_of_what_makes_them_fast() {
    let Some(nvdisasm) = nvdisasm() else {
        assert!(env::var_os("CI").is_none(), "CI has nvdisasm (the test dependencies in pyproject.toml)");
        println!("skipped: no nvdisasm in python3's packages, on PATH or in /usr/local/cuda");
        return;
    };
    let tuned = VARIANTS.iter().filter(|variant| variant.target == "90a");
    let mut seen = 0;
    for variant in tuned {
        for (arch, image) in variant.cubins {
            let bytes: Vec<u8> = image.unpack().unwrap().iter().flat_map(|word| word.to_le_bytes()).collect();
            let faults = Found::of(&disassembled(&nvdisasm, variant.name, &bytes[..image.len])).faults();
            assert!(faults.is_empty(), "{} sm_{arch}: {}", variant.name, faults.join(", "));
            seen += 1;
        }
    }
    assert!(seen > 0);
}

#[test]
fn each_fault_is_found() {
    let product = "        /*0010*/                   HGMMA.64x128x16.F32.BF16 R24, gdesc[UR4], R24 ;\n";
    let last = "        /*0020*/                   HGMMA.64x128x16.F32.BF16 R24, gdesc[UR4], R24, gsb0 ;\n";
    let load = "        /*0030*/              @!P1 UTMALDG.3D [UR8], [UR4] ;\n";
    let moved = "        /*0040*/               @P0 R2UR UR4, R2 ;\n";
    let faults = |sass: &[&str]| Found::of(&sass.concat()).faults();
    assert!(faults(&[moved, product, last, moved, moved, load]).is_empty());
    assert_eq!(faults(&[product, moved, moved, last, load]), ["2 moves to uniform registers between 2 products"]);
    let of_fp8 = "        /*0060*/                   QGMMA.64x128x32.F32.E4M3.E4M3 R24, R8, gdesc[UR4], R24, gsb0 ;\n";
    assert!(faults(&[of_fp8, load]).is_empty());
    assert_eq!(faults(&[product, last]), ["no bulk load of a tensor's box"]);
    assert_eq!(faults(&[load]), ["no wgmma"]);
    let spill = "        /*0050*/                   STL.64 [R1+0x8], R2 ;\n";
    assert_eq!(faults(&[product, last, load, spill]), ["1 accesses to local memory"]);
}
