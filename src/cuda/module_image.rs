//! Selects the module image of a kernel: a cubin or PTX from the library, or a file that replaces both.

use super::architecture::newest_of;
use super::device::Device;
use super::image_validation::{cubin_error, ptx_error};
use super::variants::{ARCHITECTURES, CompressedImage, Variant};
use crate::environment;
use crate::error::{Error, Result};
use std::io::{self, Read as _};
use std::path::PathBuf;
use std::sync::OnceLock;

/// The environment variable that names the folder of replacement files.
pub(super) const FOLDER: &str = "XLA_ATTENTION_KERNEL_DIR";

/// What `cuModuleLoadDataEx` loads: a cubin or PTX, and where it is from.
pub(super) struct ModuleImage {
    /// The image's bytes in units of 8, the alignment that cubins need. Zeros follow, which terminate PTX.
    pub(super) storage: Vec<u64>,
    /// The image's source in errors and the log.
    pub(super) origin: String,
    pub(super) kind: ImageKind,
}

#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum ImageKind {
    Cubin,
    Ptx,
    /// A replacement file, which is either.
    File,
}

/// The image of `variant` to load on `device`.
///
/// # Errors
/// `FAILED_PRECONDITION` if a replacement file cannot be read or is not a complete image, or if the library was built
/// without the kernel; `INTERNAL` if an image does not decompress.
pub(super) fn select(variant: &Variant, device: &Device) -> Result<ModuleImage> {
    if let Some((path, error_of)) = replacement(variant) {
        let origin = path.display().to_string();
        let refused = |why: String| Error::precondition(format!("the kernel {origin} {why}"));
        let bytes = std::fs::read(&path).map_err(|error| refused(format!("cannot be read: {error}")))?;
        if let Some(problem) = error_of(&bytes) {
            return Err(refused(format!("{problem}; without {FOLDER} it is the built-in one")));
        }
        // At least one byte more than the file, so that PTX is terminated.
        let mut storage = vec![0u64; bytes.len() / 8 + 1];
        for (to, bytes) in storage.iter_mut().zip(bytes.chunks(8)) {
            let mut whole = [0; 8];
            whole[..bytes.len()].copy_from_slice(bytes);
            *to = u64::from_ne_bytes(whole);
        }
        return Ok(ModuleImage { storage, origin, kind: ImageKind::File });
    }
    if !variant.is_built() {
        return Err(Error::precondition(format!(
            "the kernel {} is not in this library, which was built with XLA_ATTENTION_CUDA_ARCHS={ARCHITECTURES}: build it \
             for sm_{}, or with `make wheel` for every GPU",
            variant.name, device.capability,
        )));
    }
    let cubin = cubin_for(variant, device.capability);
    match (cubin, &variant.ptx) {
        (Some((arch, image)), ptx) if !(ptx_only() && ptx.is_some()) => {
            Ok(ModuleImage { storage: image.unpack()?, origin: format!("cubin for sm_{arch}"), kind: ImageKind::Cubin })
        }
        (_, Some(ptx)) => unpack_ptx(variant, ptx),
        (_, None) => Err(Error::precondition(format!(
            "the kernel {} is for sm_{} alone, not for sm_{}",
            variant.name, variant.target, device.capability,
        ))),
    }
}

/// The built-in PTX of `variant`, which also drivers take that are older than the compiler of the cubins.
pub(super) fn unpack_ptx(variant: &Variant, ptx: &CompressedImage) -> Result<ModuleImage> {
    Ok(ModuleImage { storage: ptx.unpack()?, origin: format!("PTX {}", variant.ptx_version), kind: ImageKind::Ptx })
}

/// Returns what is wrong with a file's bytes.
type Validation = fn(&[u8]) -> Option<String>;

/// The file that replaces the built-in image: `<kernel>.cubin`, otherwise `<kernel>.ptx`, in `XLA_ATTENTION_KERNEL_DIR`.
fn replacement(variant: &Variant) -> Option<(PathBuf, Validation)> {
    static GIVEN: OnceLock<Option<PathBuf>> = OnceLock::new();
    let folder = GIVEN.get_or_init(|| std::env::var_os(FOLDER).map(PathBuf::from)).as_ref()?;
    let kinds: [(&str, Validation); 2] = [("cubin", cubin_error), ("ptx", ptx_error)];
    let paths = kinds.map(|(kind, error_of)| (folder.join(format!("{}.{kind}", variant.name)), error_of));
    paths.into_iter().skip(usize::from(ptx_only())).find(|(path, _)| path.exists())
}

/// `XLA_ATTENTION_PTX_ONLY=1`: the driver compiles the PTX even if the library has a cubin for the GPU.
fn ptx_only() -> bool {
    static PTX_ONLY: OnceLock<bool> = OnceLock::new();
    *PTX_ONLY.get_or_init(|| environment::switch("XLA_ATTENTION_PTX_ONLY"))
}

/// The variant's cubin for a GPU of this compute capability, with the cubin's architecture.
fn cubin_for(variant: &Variant, capability: u32) -> Option<&'static (&'static str, CompressedImage)> {
    let newest = newest_of(variant.cubins.iter().map(|(arch, _)| *arch), capability)?;
    variant.cubins.iter().find(|(arch, _)| *arch == newest)
}

impl CompressedImage {
    /// Decompresses the image into memory aligned to 8 bytes, as cubins need it.
    pub(super) fn unpack(&self) -> Result<Vec<u64>> {
        let mut storage = vec![0u64; self.len.div_ceil(8)];
        // SAFETY: `storage` has at least `self.len` bytes, is borrowed mutably for as long as `bytes` lives, and any eight
        // bytes are a valid u64.
        let bytes = unsafe { std::slice::from_raw_parts_mut(storage.as_mut_ptr().cast::<u8>(), self.len) };
        self.unpack_into(bytes).map_err(|error| Error::internal(format!("a kernel image does not unpack: {error}")))?;
        Ok(storage)
    }

    fn unpack_into(&self, bytes: &mut [u8]) -> io::Result<()> {
        let mut group = zstd::Decoder::with_buffer(self.group)?;
        io::copy(&mut group.by_ref().take(self.offset as u64), &mut io::sink())?;
        group.read_exact(bytes)
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
            let bytes = |image: &CompressedImage| {
                image.unpack().unwrap().iter().flat_map(|w| w.to_le_bytes()).collect::<Vec<u8>>()
            };
            assert!(variant.ptx.is_some() || variant.target.ends_with('a'), "{}", variant.name);
            if let Some(ptx) = &variant.ptx {
                assert!(bytes(ptx)[..ptx.len].ends_with(b"\0"), "{}", variant.name);
            }
            for (_, cubin) in variant.cubins {
                assert!(bytes(cubin).starts_with(b"\x7fELF"), "{}", variant.name);
            }
        }
    }

    #[test]
    fn a_kernel_that_was_left_out_is_refused_with_what_to_do() {
        let (name, target) = ("attention_x", "80");
        let variant = Variant { name, entry: c"x", target, ptx_version: "", ptx: None, cubins: &[], resources: &[] };
        let error = select(&variant, &crate::cuda::attention::tests::device(false)).map(|selected| selected.origin);
        let message = error.expect_err("there is nothing to load").message;
        for part in ["attention_x", "XLA_ATTENTION_CUDA_ARCHS", "sm_90", "make wheel"] {
            assert!(message.contains(part), "{message}");
        }
    }

    #[test]
    #[cfg_attr(not(every_architecture), ignore = "XLA_ATTENTION_CUDA_ARCHS leaves kernels out")]
    fn every_kernel_has_a_cubin_for_each_gpu_that_selects_it() {
        for capability in [80, 86, 87, 89, 90, 100, 103, 120, 121] {
            // Latent attention has a large shape for GPUs with 163 KB of shared memory per CTA, and a small one for others.
            let takes_large = !matches!(capability, 86 | 89 | 120 | 121);
            let is_selected = |variant: &&Variant| match variant.target {
                "90" | "90a" => capability == 90,
                // Hopper has kernels of its own for few rows.
                "89" => capability >= 89 && (capability != 90 || !variant.name.starts_with("mla_few_rows_")),
                _ if variant.name.starts_with("mla_small_") => !takes_large,
                _ if variant.name.starts_with("mla_") && variant.name.contains("_large_") => takes_large,
                _ => capability < 89 || !variant.name.contains("_sm80_"),
            };
            let selected: Vec<&Variant> = VARIANTS.iter().filter(is_selected).collect();
            // Every kernel has a form for every GPU.
            assert!(selected.len() > 100, "{} for sm_{capability}", selected.len());
            for variant in selected {
                assert!(cubin_for(variant, capability).is_some(), "{} for sm_{capability}", variant.name);
            }
        }
    }
}
