//! The table of kernels that `src/cuda/variants.rs` includes.

use crate::architecture::newest_of;
use crate::kernel_images::{self, Packed};
use crate::kernels::{self, Compiled, Cubin};
use crate::process::run;
use crate::variants::{Table, Variant};
use anyhow::{Context, Result};
use std::fmt::Write as _;
use std::path::Path;
use std::process::Command;
use std::{env, fs};

/// The environment variable that names the GPUs to build for: `all`, `none`, `native` (the GPUs of this machine) or compute
/// capabilities such as `80,90`. Calls that need a kernel that is left out fail.
const SETTING: &str = "XLA_ATTENTION_CUDA_ARCHS";

/// Writes `OUT_DIR/variants.rs`, for documentation without any kernel.
pub(crate) fn build(mut table: Table, is_documentation: bool, headers: &Path, out: &Path) -> Result<()> {
    println!("cargo:rerun-if-env-changed={SETTING}");
    println!("cargo:rustc-check-cfg=cfg(every_architecture)");
    let none = is_documentation.then(|| "none".into());
    let given = none.or_else(|| env::var(SETTING).ok().filter(|given| !given.is_empty()));
    let setting = given.unwrap_or_else(|| "all".into());
    if let Some(capabilities) = capabilities(&setting)? {
        for kernel in &mut table.kernel {
            let is_selected = |arch: &&str| {
                capabilities.iter().any(|capability| newest_of(archs(&kernel.sass), *capability) == Some(*arch))
            };
            kernel.sass = archs(&kernel.sass).filter(is_selected).map(str::to_owned).collect();
        }
    } else {
        println!("cargo:rustc-cfg=every_architecture");
    }
    let variants = table.variants();
    let (built, left_out): (Vec<_>, Vec<_>) = variants.iter().partition(|variant| !variant.kernel.sass.is_empty());
    if !left_out.is_empty() {
        println!("cargo:warning={SETTING}={setting}: {} of {} kernels are left out", left_out.len(), variants.len());
    }
    let (compiled, packed) = if built.is_empty() {
        (vec![], Packed::default())
    } else {
        let (compiled, cache) = kernels::compile(&built, headers, out)?;
        println!("cargo:rustc-env=XLA_ATTENTION_KERNELS={}", cache.display());
        let packed = kernel_images::pack(&built.iter().copied().zip(&compiled).collect::<Vec<_>>(), &cache)?;
        (compiled, packed)
    };
    let mut compiled = compiled.iter();
    let rows: Vec<String> = variants
        .iter()
        .map(|variant| {
            let compiled = if variant.kernel.sass.is_empty() { None } else { compiled.next() };
            row(variant, compiled, &packed)
        })
        .collect();
    let groups = packed.groups();
    let text =
        format!("pub(crate) static ARCHITECTURES: &str = {setting:?};\n\n{groups}\n{}", generated(&table, &rows));
    fs::write(out.join("variants.rs"), text)?;
    Ok(())
}

fn archs(sass: &[String]) -> impl DoubleEndedIterator<Item = &str> {
    sass.iter().map(String::as_str)
}

/// The compute capabilities that a setting stands for; `None` for all.
fn capabilities(setting: &str) -> Result<Option<Vec<u32>>> {
    let list = match setting {
        "all" => return Ok(None),
        "none" => return Ok(Some(vec![])),
        "native" => {
            let mut ask = Command::new("nvidia-smi");
            let output = run(ask.args(["--query-gpu=compute_cap", "--format=csv,noheader"]))
                .with_context(|| format!("{SETTING}=native"))?;
            String::from_utf8_lossy(&output.stdout).replace('.', "").trim().replace('\n', ",")
        }
        list => list.to_owned(),
    };
    list.split(',')
        .map(|number| number.trim().parse().ok().filter(|capability| *capability >= 80))
        .collect::<Option<_>>()
        .map(Some)
        .with_context(|| {
            format!("{SETTING}={setting}: expected all, none, native or compute capabilities from 80 on, as 80,90")
        })
}

/// The row of a variant; `None` for one that is left out.
fn row(variant: &Variant, compiled: Option<&Compiled>, packed: &Packed) -> String {
    let (mut cubins, mut resources) = (String::new(), String::new());
    for (arch, cubin) in variant.kernel.sass.iter().zip(compiled.iter().flat_map(|compiled| &compiled.cubins)) {
        let Cubin { image, registers, spill_bytes, smem_bytes } = cubin;
        let _ = write!(cubins, "(\"{arch}\", {}), ", packed.expression(image));
        let _ = write!(
            resources,
            "(\"{arch}\", Resources {{ registers: {registers}, spill_bytes: {spill_bytes}, smem_bytes: {smem_bytes} }}), "
        );
    }
    let version = compiled.map_or("", |compiled| &compiled.ptx_version);
    let ptx = compiled.and_then(|compiled| compiled.ptx.as_ref());
    let ptx = ptx.map_or_else(|| "None".into(), |image| format!("Some({})", packed.expression(image)));
    let (name, target) = (variant.name(), &variant.kernel.target);
    format!(
        "    Variant {{ name: {name:?}, entry: c\"xa_{name}\", target: {target:?}, ptx_version: {version:?}, ptx: {ptx}, \
         cubins: &[{cubins}], resources: &[{resources}] }},\n"
    )
}

/// The Rust source of the table: the kernels with their axes and combinations, and the variants with their images.
fn generated(table: &Table, rows: &[String]) -> String {
    let mut text = String::from("pub(crate) static KERNELS: &[Kernel] = &[\n");
    let mut next = 0;
    for kernel in &table.kernel {
        let axes: Vec<String> = kernel
            .axes
            .iter()
            .map(|axis| format!("Axis {{ name: {:?}, values: &{:?} }}", axis.name, axis.values))
            .collect();
        let slots: Vec<String> = kernel
            .combinations()
            .iter()
            .map(|values| match values {
                Some(_) => {
                    next += 1;
                    format!("Some({})", next - 1)
                }
                None => "None".into(),
            })
            .collect();
        let (axes, slots) = (axes.join(", "), slots.join(", "));
        let _ = writeln!(text, "    Kernel {{ name: {:?}, axes: &[{axes}], slots: &[{slots}] }},", kernel.name);
    }
    text += "];\n\npub(crate) static VARIANTS: [Variant; ";
    let _ = write!(text, "{}] = [\n{}];\n", rows.len(), rows.concat());
    text
}
