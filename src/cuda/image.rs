//! Which image of a kernel is loaded: machine code or PTX out of the library, or a file that takes its place.

use super::architecture::newest_of;
use super::device::Device;
use super::kernel_file::{fault_of_cubin, fault_of_ptx};
use super::variants::{ARCHITECTURES, Image, Variant};
use crate::environment;
use crate::error::{Error, Result};
use std::io::Read;
use std::path::PathBuf;
use std::sync::OnceLock;

/// Names the folder of files that take a kernel's place.
pub(super) const FOLDER: &str = "XLA_ATTENTION_KERNEL_DIR";

/// A module's bytes and where they are from.
pub(super) struct Chosen {
    /// At the alignment that machine code wants; zeros follow, which end a PTX text.
    pub(super) words: Vec<u64>,
    /// As errors and the log tell it.
    pub(super) origin: String,
    /// It is not the library's own.
    pub(super) is_file: bool,
}

/// What to load on `device`.
///
/// # Errors
/// `FAILED_PRECONDITION` where a file that is to be taken cannot be read or is not a whole module, and where the library
/// was built without kernels; `INTERNAL` where an image does not unpack.
pub(super) fn choose(variant: &Variant, device: &Device) -> Result<Chosen> {
    if let Some((path, fault_of)) = replacement(variant) {
        let origin = path.display().to_string();
        let refused = |why: String| Error::precondition(format!("the kernel {origin} {why}"));
        let bytes = std::fs::read(&path).map_err(|error| refused(format!("cannot be read: {error}")))?;
        if let Some(fault) = fault_of(&bytes) {
            return Err(refused(format!("{fault}; without {FOLDER} it is the built-in one")));
        }
        // One more word, so that a text ends in a zero.
        let mut words = vec![0u64; bytes.len() / 8 + 1];
        for (word, bytes) in words.iter_mut().zip(bytes.chunks(8)) {
            let mut whole = [0; 8];
            whole[..bytes.len()].copy_from_slice(bytes);
            *word = u64::from_ne_bytes(whole);
        }
        return Ok(Chosen { words, origin, is_file: true });
    }
    if !variant.is_built() {
        return Err(Error::precondition(format!(
            "the kernel {} is not in this library, which was built with XLA_ATTENTION_CUDA_ARCHS={ARCHITECTURES}: build it \
             for sm_{}, or with `make wheel` for every GPU",
            variant.name, device.capability,
        )));
    }
    let cubin = if ptx_only() { None } else { machine_code(variant, device.capability) };
    let words = cubin.map_or(&variant.ptx, |(_, image)| image).unpack()?;
    let ptx = || format!("PTX {}", variant.ptx_version);
    Ok(Chosen {
        words,
        origin: cubin.map_or_else(ptx, |(arch, _)| format!("machine code of sm_{arch}")),
        is_file: false,
    })
}

/// What is wrong with a file's bytes.
type FaultOf = fn(&[u8]) -> Option<String>;

/// `XLA_ATTENTION_KERNEL_DIR`: `<kernel>.cubin`, or else `<kernel>.ptx`, of that folder instead of the built-in image.
fn replacement(variant: &Variant) -> Option<(PathBuf, FaultOf)> {
    static GIVEN: OnceLock<Option<PathBuf>> = OnceLock::new();
    let folder = GIVEN.get_or_init(|| std::env::var_os(FOLDER).map(PathBuf::from)).as_ref()?;
    let kinds: [(&str, FaultOf); 2] = [("cubin", fault_of_cubin), ("ptx", fault_of_ptx)];
    let paths = kinds.map(|(kind, fault_of)| (folder.join(format!("{}.{kind}", variant.name)), fault_of));
    paths.into_iter().skip(usize::from(ptx_only())).find(|(path, _)| path.exists())
}

/// `XLA_ATTENTION_PTX_ONLY=1`: the driver compiles the PTX even where machine code is at hand.
fn ptx_only() -> bool {
    static PTX_ONLY: OnceLock<bool> = OnceLock::new();
    *PTX_ONLY.get_or_init(|| environment::switch("XLA_ATTENTION_PTX_ONLY"))
}

/// The variant's machine code for a GPU of this capability, with its architecture.
fn machine_code(variant: &Variant, capability: u32) -> Option<&'static (&'static str, Image)> {
    let newest = newest_of(variant.cubins.iter().map(|(arch, _)| *arch), capability)?;
    variant.cubins.iter().find(|(arch, _)| *arch == newest)
}

impl Image {
    /// The module's bytes, at the alignment that machine code wants.
    pub(super) fn unpack(&self) -> Result<Vec<u64>> {
        let mut words = vec![0u64; self.len.div_ceil(8)];
        // SAFETY: `words` holds at least `len` bytes, and any bytes are a valid u64.
        let bytes = unsafe { std::slice::from_raw_parts_mut(words.as_mut_ptr().cast::<u8>(), self.len) };
        ruzstd::decoding::StreamingDecoder::new(self.zst)
            .map_err(|error| error.to_string())
            .and_then(|mut decoder| decoder.read_exact(bytes).map_err(|error| error.to_string()))
            .map_err(|error| Error::internal(format!("a kernel image does not unpack: {error}")))?;
        Ok(words)
    }
}

#[cfg(test)]
mod tests {
    use super::super::variants::VARIANTS;
    use super::*;

    #[test]
    #[cfg_attr(not(every_architecture), ignore = "XLA_ATTENTION_CUDA_ARCHS leaves kernels out")]
    fn every_image_unpacks_to_a_module() {
        for variant in &VARIANTS {
            let bytes =
                |image: &Image| image.unpack().unwrap().iter().flat_map(|w| w.to_le_bytes()).collect::<Vec<u8>>();
            assert!(bytes(&variant.ptx)[..variant.ptx.len].ends_with(b"\0"), "{}", variant.name);
            for (_, cubin) in variant.cubins {
                assert!(bytes(cubin).starts_with(b"\x7fELF"), "{}", variant.name);
            }
        }
    }

    #[test]
    fn a_kernel_that_was_left_out_is_refused_with_what_to_do() {
        let image = Image { len: 0, zst: &[] };
        let (name, target) = ("attention_x", "80");
        let variant = Variant { name, entry: c"x", target, ptx_version: "", ptx: image, cubins: &[], resources: &[] };
        let error = choose(&variant, &crate::cuda::attention::tests::device(false)).map(|chosen| chosen.origin);
        let message = error.expect_err("there is nothing to load").message;
        for part in ["attention_x", "XLA_ATTENTION_CUDA_ARCHS", "sm_90", "make wheel"] {
            assert!(message.contains(part), "{message}");
        }
    }

    #[test]
    #[cfg_attr(not(every_architecture), ignore = "XLA_ATTENTION_CUDA_ARCHS leaves kernels out")]
    fn every_kernel_has_machine_code_for_each_gpu_that_chooses_it() {
        for capability in [80, 86, 87, 89, 90, 100, 103, 120, 121] {
            let is_chosen = |variant: &&Variant| match variant.target {
                "90" | "90a" => capability == 90,
                "89" => capability >= 89,
                _ => capability < 89 || !variant.name.contains("_sm80_"),
            };
            let chosen: Vec<&Variant> = VARIANTS.iter().filter(is_chosen).collect();
            // Every kernel has a form for every GPU.
            assert!(chosen.len() > 100, "{} for sm_{capability}", chosen.len());
            for variant in chosen {
                assert!(machine_code(variant, capability).is_some(), "{} for sm_{capability}", variant.name);
            }
        }
    }
}
