//! Compiles every variant of `kernels/variants.toml` to PTX with nvcc and to cubins with ptxas.
//!
//! Results are cached in `<target>/kernels` under a hash of everything that they depend on. All cargo profiles, clippy and pip
//! share them, and only changed variants are compiled. They are cached under a hash of the PTX, too: after a change of a header, ptxas,
//! which takes most of the time, assembles those variants whose PTX is another.

use crate::process::{self, python, run, target_folder};
use crate::variants::Variant;
use anyhow::{Context, Result, bail, ensure};
use serde::{Deserialize, Serialize};
use sha2::{Digest, Sha256};
use std::fmt::Write as _;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};
use std::{env, fs};

const NVCC_FLAGS: &[&str] = &["-ptx", "-std=c++17", "-O3", "-Xcompiler", "-Wall,-Wextra", "-Werror", "all-warnings"];

/// `XLA_ATTENTION_LINE_INFO=1` adds line information for profilers and compute-sanitizer. It is twice as large as the SASS.
fn line_info() -> Option<&'static str> {
    env::var_os("XLA_ATTENTION_LINE_INFO").is_some_and(|value| value == "1").then_some("-lineinfo")
}

/// The folder of the kernels' headers. They, and generated headers, are included in double quotes.
const INCLUDE: &str = "kernels/include";

/// PTX versions to try, oldest first: older drivers accept older versions.
const PTX_VERSIONS: &[&str] =
    &["7.0", "7.4", "7.8", "8.0", "8.1", "8.2", "8.3", "8.4", "8.5", "8.6", "8.7", "8.8", "9.0"];

/// The release of ptxas that makes cubins for every driver that XLA's plugins take: drivers of CUDA 12 refuse those of CUDA 13, and
/// drivers of CUDA 13 load both. The kernels take as long with either (H200, 2026-12-01).
const PORTABLE_PTXAS: &str = "release 12.9,";

/// Values of ptxas' --register-usage-level (0 to 10) to try, in this order, if its default spills.
const REGISTER_USAGE_LEVELS: &[&str] = &["0", "3", "7", "10"];

/// glibc's settings for ptxas, which then takes a tenth less time: huge pages, and memory is kept that it frees.
const MALLOC: &str = "glibc.malloc.hugetlb=1:glibc.malloc.top_pad=33554432:glibc.malloc.mmap_threshold=1073741824:\
                      glibc.malloc.trim_threshold=1073741824";

/// A compiled variant. The cache has it as JSON.
#[derive(Serialize, Deserialize)]
pub(crate) struct Compiled {
    /// The lowest PTX version that ptxas accepts for it.
    pub(crate) ptx_version: String,
    /// The text with a terminating zero. A kernel for one architecture alone needs none beside a cubin that every driver loads.
    pub(crate) ptx: Option<Image>,
    /// Those of the kernel's architectures, in order.
    pub(crate) cubins: Vec<Cubin>,
}

/// A module image: a file in the cache. Its name contains the hash of what it was compiled from.
#[derive(Serialize, Deserialize)]
pub(crate) struct Image {
    pub(crate) file: String,
    pub(crate) len: usize,
}

/// A cubin, and the resources that ptxas reports.
#[derive(Serialize, Deserialize)]
pub(crate) struct Cubin {
    pub(crate) image: Image,
    pub(crate) registers: u32,
    pub(crate) spill_bytes: u32,
    pub(crate) smem_bytes: u32,
}

/// Compiles those of `variants` that are not cached. Returns all of them, in order, and the cache.
pub(crate) fn compile(variants: &[&Variant], headers: &Path, out: &Path) -> Result<(Vec<Compiled>, PathBuf)> {
    let compiler = Compiler::find(headers, out)?;
    let (mut compiled, mut errors, mut times) = (vec![], vec![], vec![]);
    for (variant, result) in variants.iter().zip(in_parallel(variants, |variant| compiler.cached(variant))) {
        match result {
            Ok((result, time)) => {
                compiled.push(result);
                times.extend(time.map(|t| (t, variant.name())));
            }
            Err(error) => errors.push(format!("{}: {error:#}", variant.name())),
        }
    }
    ensure!(errors.is_empty(), "kernels that did not compile:\n{}", errors.join("\n"));
    report(times, variants.len());
    Ok((compiled, compiler.cache))
}

/// The results of `work` for all items, in order, with as many threads as cargo allows.
pub(crate) fn in_parallel<T: Sync, R: Send>(items: &[T], work: impl Fn(&T) -> R + Sync) -> Vec<R> {
    let threads = env::var("NUM_JOBS").ok().and_then(|n| n.parse().ok()).unwrap_or(1usize).min(items.len());
    let next = AtomicUsize::new(0);
    let run = || {
        let mut done = vec![];
        loop {
            let index = next.fetch_add(1, Ordering::Relaxed);
            let Some(item) = items.get(index) else { return done };
            done.push((index, work(item)));
        }
    };
    let mut all: Vec<(usize, R)> = std::thread::scope(|scope| {
        let workers: Vec<_> = (0..threads).map(|_| scope.spawn(run)).collect();
        workers.into_iter().flat_map(|w| w.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))).collect()
    });
    all.sort_by_key(|(index, _)| *index);
    all.into_iter().map(|(_, result)| result).collect()
}

/// Prints the slowest kernels of this build.
fn report(mut times: Vec<(Duration, String)>, of: usize) {
    times.sort_by(|a, b| b.cmp(a));
    if !times.is_empty() {
        let slowest: Vec<String> =
            times.iter().take(5).map(|(time, name)| format!("{name} {:.1} s", time.as_secs_f32())).collect();
        println!("cargo:warning={} of {of} kernels compiled, slowest: {}", times.len(), slowest.join(", "));
    }
}

/// The compilers and the cache folder.
struct Compiler<'a> {
    /// The folder of the generated headers.
    headers: &'a Path,
    nvcc: PathBuf,
    ptxas: PathBuf,
    /// Whether ptxas is [`PORTABLE_PTXAS`].
    is_portable: bool,
    cache: PathBuf,
    /// Hash of what all variants depend on.
    common: Sha256,
}

impl<'a> Compiler<'a> {
    fn find(headers: &'a Path, out: &Path) -> Result<Self> {
        let nvcc = find_nvcc()?;
        let ptxas = find_ptxas(&nvcc)?;
        let mut common = Sha256::new();
        for compiler in [&nvcc, &ptxas] {
            common.update(version(compiler)?);
        }
        let is_portable = version(&ptxas)?.contains(PORTABLE_PTXAS);
        common.update(NVCC_FLAGS.join(" "));
        common.update(line_info().unwrap_or_default());
        // This file, so that the cache forgets what another version of it compiled.
        update_with_code(&mut common, include_str!("kernels.rs"));
        let cache = target_folder(out).join("kernels");
        fs::create_dir_all(&cache)?;
        Ok(Self { headers, nvcc, ptxas, is_portable, cache, common })
    }

    /// The compiled variant, and the time that this took unless it was cached.
    fn cached(&self, variant: &Variant) -> Result<(Compiled, Option<Duration>)> {
        let mut key = self.common.clone();
        let source = Path::new("kernels").join(&variant.kernel.source);
        for file in with_headers(&source, self.headers)? {
            update_with_code(&mut key, &fs::read_to_string(file)?);
        }
        key.update(format!("{} {} {:?}", variant.name(), variant.kernel.target, variant.kernel.sass));
        let key = format!("{:x}", key.finalize());
        let stem = format!("{}.{}", variant.name(), &key[..16]);
        let record = self.cache.join(format!("{stem}.json"));
        if let Ok(text) = fs::read(&record) {
            return Ok((serde_json::from_slice(&text)?, None));
        }
        let start = Instant::now();
        let ptx_file = self.cache.join(format!("{stem}.{}.ptx", std::process::id()));
        let ptx = self.ptx(variant, &source, &ptx_file)?;
        let mut key = self.common.clone();
        key.update(format!("{} {:?}", variant.kernel.target, variant.kernel.sass));
        key.update(&ptx);
        let stem = format!("{}.{:.16}", variant.name(), format!("{:x}", key.finalize()));
        let of_ptx = self.cache.join(format!("{stem}.json"));
        let compiled = match fs::read(&of_ptx) {
            Ok(text) => serde_json::from_slice(&text)?,
            Err(_) => self.assemble_all(variant, &ptx, &ptx_file, &stem)?,
        };
        fs::remove_file(&ptx_file)?;
        // The records are written last: if they exist, their images are complete.
        for record in [&of_ptx, &record] {
            process::write(record, &serde_json::to_string(&compiled)?)?;
        }
        Ok((compiled, Some(start.elapsed())))
    }

    /// The PTX of a variant; `ptx_file` is its text as nvcc writes it.
    fn ptx(&self, variant: &Variant, source: &Path, ptx_file: &Path) -> Result<String> {
        let entry = format!("xa_{}", variant.name());
        let mut nvcc = Command::new(&self.nvcc);
        nvcc.args(NVCC_FLAGS)
            .args(line_info())
            .arg(format!("-arch=compute_{}", variant.kernel.target))
            .arg(format!("-I{INCLUDE}"))
            .arg(format!("-I{}", self.headers.display()));
        nvcc.arg(format!("-DXA_ENTRY={entry}")).args(variant.defines()).arg(source).arg("-o").arg(ptx_file);
        run(&mut nvcc).context("nvcc needs a host gcc on PATH as well")?;
        Ok(cleaned(&fs::read_to_string(ptx_file)?))
    }

    /// Writes the PTX and the cubins of a variant to the cache, as files whose names begin with `stem`. It overwrites `ptx_file`.
    fn assemble_all(&self, variant: &Variant, ptx: &str, ptx_file: &Path, stem: &str) -> Result<Compiled> {
        let mut cubins = vec![];
        let mut candidates = versions_with(&variant.kernel.target);
        for sass in &variant.kernel.sass {
            let image = format!("{stem}.sm_{sass}.cubin");
            let cubin = self.cache.join(&image);
            // The first architecture determines the lowest accepted PTX version.
            let (accepted, report) = self.assemble(ptx, candidates, sass, ptx_file, &cubin)?;
            candidates = std::slice::from_ref(accepted);
            let registers = number_before(&report, " registers");
            cubins.push(Cubin {
                image: Image { file: image, len: fs::metadata(&cubin)?.len() as usize },
                registers: registers.with_context(|| format!("no register count in: {report}"))?,
                spill_bytes: spill_bytes(&report),
                smem_bytes: number_before(&report, " bytes smem").unwrap_or(0),
            });
        }
        let ptx_version = candidates[0].to_owned();
        let mut compiled = Compiled { ptx_version, ptx: None, cubins };
        if !(self.is_portable && variant.kernel.target.ends_with('a')) {
            let mut text = with_version(ptx, &compiled.ptx_version)?.into_bytes();
            text.push(0); // the driver takes a zero-terminated string
            let image = Image { file: format!("{stem}.ptx"), len: text.len() };
            fs::write(self.cache.join(&image.file), text)?;
            compiled.ptx = Some(image);
        }
        Ok(compiled)
    }

    /// Runs ptxas with the first PTX version that it accepts, and with other register usage levels if the result spills.
    /// Returns that version and ptxas' report.
    fn assemble(
        &self,
        ptx: &str,
        versions: &'static [&'static str],
        sass: &str,
        ptx_file: &Path,
        cubin: &Path,
    ) -> Result<(&'static &'static str, String)> {
        let mut report = String::new();
        for version in versions {
            fs::write(ptx_file, with_version(ptx, version)?)?;
            let output = self.ptxas(sass, &[], ptx_file, cubin)?;
            report = String::from_utf8_lossy(&output.stderr).into_owned();
            if !output.status.success() {
                continue;
            }
            let mut levels = REGISTER_USAGE_LEVELS.iter();
            while spill_bytes(&report) > 0
                && let Some(level) = levels.next()
            {
                let output = self.ptxas(sass, &["--register-usage-level", level], ptx_file, cubin)?;
                report = String::from_utf8_lossy(&output.stderr).into_owned();
                ensure!(output.status.success(), "ptxas for sm_{sass} at register usage level {level}: {report}");
            }
            // C7508 to C7519: setmaxnreg is ignored, or wgmma is serialized.
            ensure!(!report.contains("(C75"), "ptxas for sm_{sass} gives up what makes the kernel fast: {report}");
            return Ok((version, report));
        }
        bail!("ptxas for sm_{sass} refuses every PTX version of {versions:?}: {report}")
    }

    fn ptxas(&self, sass: &str, options: &[&str], ptx_file: &Path, cubin: &Path) -> Result<Output> {
        let mut ptxas = Command::new(&self.ptxas);
        ptxas.arg(format!("-arch=sm_{sass}")).args(["-v", "-O3"]).args(options).arg(ptx_file).arg("-o").arg(cubin);
        ptxas.env("GLIBC_TUNABLES", MALLOC);
        ptxas.output().with_context(|| format!("cannot start {ptxas:?}"))
    }
}

/// Adds the lines of a file that are neither empty nor comments: a comment compiles nothing. With line information it
/// changes the numbers of lines.
fn update_with_code(hash: &mut Sha256, text: &str) {
    let keeps_all = line_info().is_some();
    let is_code = |line: &&str| keeps_all || !(line.trim().is_empty() || line.trim_start().starts_with("//"));
    for line in text.lines().filter(is_code) {
        hash.update(line);
        hash.update("\n");
    }
}

/// The PTX versions from the one on that introduced a target: ptxas takes up to 0.1 s to refuse an older one.
fn versions_with(target: &str) -> &'static [&'static str] {
    let first = match target {
        "80" => "7.0",
        "89" | "90" => "7.8",
        _ => "8.0",
    };
    let before = PTX_VERSIONS.iter().take_while(|version| **version != first).count();
    &PTX_VERSIONS[before..]
}

/// nvcc from `XLA_ATTENTION_NVCC`, the wheels on python3's path (such as a build environment), PATH, or the default folder.
fn find_nvcc() -> Result<PathBuf> {
    let mut candidates: Vec<PathBuf> = given("XLA_ATTENTION_NVCC")?.into_iter().collect();
    candidates.extend(in_python_packages("nvidia/cu1*/bin/nvcc"));
    candidates.extend(env::split_paths(&env::var_os("PATH").unwrap_or_default()).map(|folder| folder.join("nvcc")));
    candidates.push("/usr/local/cuda/bin/nvcc".into());
    candidates.into_iter().find(|path| path.is_file()).with_context(|| {
        "no nvcc in XLA_ATTENTION_NVCC, python3's packages, PATH or /usr/local/cuda. Two ways out: `pip install \
         nvidia-cuda-nvcc nvidia-nvvm nvidia-cuda-crt nvidia-cuda-runtime nvidia-cuda-cccl nvidia-cuda-nvcc-cu12` (versions in \
         pyproject.toml; `make build` does it), or build the CPU part alone with --no-default-features"
    })
}

/// ptxas from `XLA_ATTENTION_PTXAS`, that of [`PORTABLE_PTXAS`] from the wheels on python3's path, or the one beside nvcc.
fn find_ptxas(nvcc: &Path) -> Result<PathBuf> {
    if let Some(given) = given("XLA_ATTENTION_PTXAS")? {
        return Ok(given);
    }
    let is_portable = |ptxas: &PathBuf| version(ptxas).is_ok_and(|version| version.contains(PORTABLE_PTXAS));
    let of_wheel = in_python_packages("nvidia/cuda_nvcc/bin/ptxas").into_iter().find(is_portable);
    Ok(of_wheel.unwrap_or_else(|| {
        println!(
            "cargo:warning=drivers of CUDA 12 will compile these kernels at their first use: there is no ptxas 12.9 \
             (`pip install nvidia-cuda-nvcc-cu12`, its version in pyproject.toml)"
        );
        nvcc.with_file_name("ptxas")
    }))
}

/// The file that an environment variable names.
fn given(variable: &str) -> Result<Option<PathBuf>> {
    let file = env::var_os(variable).map(PathBuf::from);
    if let Some(file) = &file {
        ensure!(file.is_file(), "{variable}={} is not a file", file.display());
    }
    Ok(file)
}

/// The files in the packages on python3's path that match a pattern.
fn in_python_packages(pattern: &str) -> Vec<PathBuf> {
    let probe = "import glob, sys\nfor p in sys.path: print(*sorted(glob.glob(p + '/' + sys.argv[1])), sep='\\n')";
    let output = Command::new(python()).args(["-c", probe, pattern]).output();
    let found = output.map(|output| String::from_utf8_lossy(&output.stdout).into_owned()).unwrap_or_default();
    found.lines().filter(|line| !line.is_empty()).map(PathBuf::from).collect()
}

/// What a compiler says of its version.
fn version(compiler: &Path) -> Result<String> {
    Ok(String::from_utf8_lossy(&run(Command::new(compiler).arg("--version"))?.stdout).into_owned())
}

/// `source` and all headers of the project, generated ones too, that it includes directly or indirectly.
fn with_headers(source: &Path, generated: &Path) -> Result<Vec<PathBuf>> {
    let mut files = vec![source.to_owned()];
    let mut next = 0;
    while let Some(file) = files.get(next) {
        let text = fs::read_to_string(file).with_context(|| file.display().to_string())?;
        for line in text.lines() {
            let name = line.trim().strip_prefix("#include \"").and_then(|rest| rest.strip_suffix('"'));
            let header = name.map(|name| {
                let ours = Path::new(INCLUDE).join(name);
                if ours.exists() { ours } else { generated.join(name) }
            });
            files.extend(header.filter(|header| !files.contains(header)));
        }
        next += 1;
    }
    Ok(files)
}

/// The PTX with base names in its line table, so that every build environment produces the same bytes; without the pragma
/// `used_bytes_mask`, which assemblers before PTX 8.3 refuse; and without indentation, comments and empty lines, which are a
/// seventh of it.
fn cleaned(ptx: &str) -> String {
    let is_left_out = |line: &&str| ["//", ".pragma \"used_bytes_mask"].iter().any(|start| line.starts_with(start));
    let lines = ptx.lines().map(str::trim_start).filter(|line| !line.is_empty() && !is_left_out(line));
    lines.fold(String::with_capacity(ptx.len()), |mut text, line| {
        let file =
            line.strip_prefix(".file\t").and_then(|rest| Some((rest.split_once(" \"")?.0, rest.rsplit_once('/')?.1)));
        let _ = match file {
            Some((number, name)) => writeln!(text, ".file\t{number} \"{name}"),
            None => writeln!(text, "{line}"),
        };
        text
    })
}

/// The PTX with its `.version` line replaced.
fn with_version(ptx: &str, version: &str) -> Result<String> {
    let start = ptx.find(".version ").context("the PTX has no .version line")?;
    let end = start + ptx[start..].find('\n').context("the PTX ends in its .version line")?;
    Ok(format!("{}.version {version}{}", &ptx[..start], &ptx[end..]))
}

/// The number before `what` in the report of `ptxas -v`.
fn number_before(report: &str, what: &str) -> Option<u32> {
    report.find(what).and_then(|at| report[..at].split_whitespace().next_back()?.parse().ok())
}

/// Bytes of spill stores and loads.
fn spill_bytes(report: &str) -> u32 {
    [" bytes spill stores", " bytes spill loads"].iter().filter_map(|what| number_before(report, what)).sum()
}
