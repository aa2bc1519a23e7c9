//! Packs the module images of the kernels into the library.
//!
//! The images of a kernel's variants resemble each other: compressed together, they take less than half as much space as each
//! alone. An image is read by unpacking its group up to the image's end, so groups are small enough for that to take
//! milliseconds.

use crate::kernels::{Compiled, Image, in_parallel};
use crate::process;
use crate::variants::Variant;
use anyhow::Result;
use sha2::{Digest, Sha256};
use std::collections::HashMap;
use std::fmt::Write as _;
use std::path::Path;
use std::{env, fs};

/// Largest size of a group of cubins before compression, in bytes.
const MAX_CUBIN_BYTES: usize = 8 << 20;

/// The same for PTX, which is larger, and which drivers load that compile it for longer than it takes to unpack.
const MAX_PTX_BYTES: usize = 32 << 20;

/// zstd's compression level: in a library for users the highest one but for those that it calls ultra, which takes three minutes
/// for all images; else one that takes a sixteenth of the time, for a quarter more bytes.
fn level() -> i32 {
    if env::var("PROFILE").is_ok_and(|profile| profile == "release") { 19 } else { 12 }
}

/// The groups, and where in them each image is.
#[derive(Default)]
pub(crate) struct Packed {
    /// Names of the compressed groups in the cache.
    files: Vec<String>,
    /// Of each image by its file: the index of its group, and its first byte in it.
    places: HashMap<String, (usize, usize)>,
}

/// Compresses the images of `variants` into files in the cache, unless they are there.
pub(crate) fn pack(variants: &[(&Variant, &Compiled)], cache: &Path) -> Result<Packed> {
    let mut packed = Packed::default();
    let groups = groups(variants);
    for file in in_parallel(&groups, |group| compress(group, cache)) {
        packed.files.push(file?);
    }
    for (index, group) in groups.iter().enumerate() {
        let mut offset = 0;
        for image in &group.images {
            packed.places.insert(image.file.clone(), (index, offset));
            offset += image.len;
        }
    }
    Ok(packed)
}

/// Images that are compressed together.
struct Group<'a> {
    /// The kernel of the first one.
    kernel: &'a str,
    /// The architecture of the cubins, or `ptx`.
    kind: &'a str,
    images: Vec<&'a Image>,
}

/// The images of each architecture, kernel by kernel, those that differ in the dtype alone next to each other. Kernels share a group:
/// several have few variants, and those of a source resemble those of the next one.
fn groups<'a>(variants: &[(&'a Variant, &'a Compiled)]) -> Vec<Group<'a>> {
    let mut images = vec![];
    for (variant, compiled) in variants {
        let archs =
            variant.kernel.sass.iter().map(String::as_str).zip(compiled.cubins.iter().map(|cubin| &cubin.image));
        for (kind, image) in archs.chain(compiled.ptx.iter().map(|ptx| ("ptx", ptx))) {
            images.push(((kind, variant.kernel.name.as_str(), variant.values_with_dtype_last()), image));
        }
    }
    images.sort_by(|(a, _), (b, _)| a.cmp(b));
    let mut groups: Vec<Group> = vec![];
    for ((kind, kernel, _), image) in images {
        let largest = if kind == "ptx" { MAX_PTX_BYTES } else { MAX_CUBIN_BYTES };
        let fits = |group: &&mut Group| {
            let bytes: usize = group.images.iter().map(|image| image.len).sum();
            group.kind == kind && bytes + image.len <= largest
        };
        match groups.last_mut().filter(fits) {
            Some(group) => group.images.push(image),
            None => groups.push(Group { kernel, kind, images: vec![image] }),
        }
    }
    groups
}

/// Writes a group's file, whose name it returns.
fn compress(group: &Group, cache: &Path) -> Result<String> {
    let level = level();
    let mut key = Sha256::new_with_prefix(level.to_le_bytes());
    for image in &group.images {
        key.update(&image.file);
    }
    let file = format!("{}.{}.{:.16}.zst", group.kernel, group.kind, format!("{:x}", key.finalize()));
    let path = cache.join(&file);
    if !path.exists() {
        let mut bytes = vec![];
        for image in &group.images {
            bytes.extend(fs::read(cache.join(&image.file))?);
        }
        process::write(&path, zstd::bulk::compress(&bytes, level)?)?;
    }
    Ok(file)
}

impl Packed {
    /// The Rust source of the array of groups, if there are any. It names the cache by an environment variable, so that the
    /// cache may move.
    pub(crate) fn groups(&self) -> String {
        if self.files.is_empty() {
            return String::new();
        }
        let mut text = format!("static IMAGE_GROUPS: [&[u8]; {}] = [\n", self.files.len());
        for file in &self.files {
            let _ = writeln!(text, "    include_bytes!(concat!(env!(\"XLA_ATTENTION_KERNELS\"), \"/{file}\")),");
        }
        text + "];\n"
    }

    /// The Rust expression of an image.
    pub(crate) fn expression(&self, image: &Image) -> String {
        let (group, offset) = self.places[&image.file];
        format!("CompressedImage {{ group: IMAGE_GROUPS[{group}], offset: {offset}, len: {} }}", image.len)
    }
}
