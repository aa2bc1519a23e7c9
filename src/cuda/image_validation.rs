//! Checks that a replacement file of a kernel is a complete image: the driver would read past the end of a truncated one.

/// Sizes of a section header and of a program header in ELF64.
const SECTION_BYTES: u16 = 64;
const SEGMENT_BYTES: u16 = 56;
/// `e_machine` of a cubin.
const EM_CUDA: u16 = 190;
/// Section type without bytes in the file.
const SHT_NOBITS: u32 = 8;

/// Returns what is wrong with a cubin. A valid one is a 64-bit ELF file for NVIDIA GPUs that contains all of its headers,
/// sections and segments.
pub(super) fn cubin_error(bytes: &[u8]) -> Option<String> {
    if !bytes.starts_with(b"\x7fELF\x02\x01") || read_u16(bytes, 18) != Some(EM_CUDA) {
        return Some("is not machine code for NVIDIA GPUs (64-bit ELF)".into());
    }
    match end_of_elf(bytes) {
        Some(end) if end <= bytes.len() as u64 => None,
        _ => Some(format!("is cut short: its {} bytes do not hold what its headers name", bytes.len())),
    }
}

/// Returns what is wrong with PTX. It checks that the bytes are PTX text; the driver's compiler reports errors within it.
pub(super) fn ptx_error(bytes: &[u8]) -> Option<String> {
    let text = bytes.strip_suffix(b"\0").unwrap_or(bytes);
    let is_ptx = std::str::from_utf8(text).is_ok_and(|text| !text.contains('\0') && text.contains(".version"));
    (!is_ptx).then(|| "is not a PTX text".into())
}

/// The end of the last header, section or segment; `None` if a header is missing or is not ELF64's.
fn end_of_elf(bytes: &[u8]) -> Option<u64> {
    let (segments, sections) = (read_u64(bytes, 32)?, read_u64(bytes, 40)?);
    let (segment_bytes, segment_count) = (read_u16(bytes, 54)?, read_u16(bytes, 56)?);
    let (section_bytes, section_count) = (read_u16(bytes, 58)?, read_u16(bytes, 60)?);
    if section_bytes != SECTION_BYTES || (segment_count > 0 && segment_bytes != SEGMENT_BYTES) {
        return None;
    }
    let mut end = segments.checked_add(u64::from(segment_bytes) * u64::from(segment_count))?;
    for header in (0..u64::from(section_count)).map(|i| sections.checked_add(i * u64::from(section_bytes))) {
        let header = usize::try_from(header?).ok().filter(|&at| at < bytes.len())?;
        let (kind, offset, size) =
            (read_u32(bytes, header + 4)?, read_u64(bytes, header + 24)?, read_u64(bytes, header + 32)?);
        let size = if kind == SHT_NOBITS { 0 } else { size };
        end = end.max(header as u64 + u64::from(section_bytes)).max(offset.checked_add(size)?);
    }
    for header in (0..u64::from(segment_count)).map(|i| segments.checked_add(i * u64::from(segment_bytes))) {
        let header = usize::try_from(header?).ok().filter(|&at| at < bytes.len())?;
        end = end.max(read_u64(bytes, header + 8)?.checked_add(read_u64(bytes, header + 32)?)?);
    }
    Some(end)
}

fn read<const N: usize>(bytes: &[u8], at: usize) -> Option<[u8; N]> {
    bytes.get(at..at.checked_add(N)?)?.try_into().ok()
}
fn read_u16(bytes: &[u8], at: usize) -> Option<u16> {
    read(bytes, at).map(u16::from_le_bytes)
}
fn read_u32(bytes: &[u8], at: usize) -> Option<u32> {
    read(bytes, at).map(u32::from_le_bytes)
}
fn read_u64(bytes: &[u8], at: usize) -> Option<u64> {
    read(bytes, at).map(u64::from_le_bytes)
}

#[cfg(test)]
mod tests {
    use super::super::variants::VARIANTS;
    use super::*;

    #[test]
    #[cfg_attr(not(every_architecture), ignore = "XLA_ATTENTION_CUDA_ARCHS leaves kernels out")]
    fn only_whole_modules_pass() {
        for variant in VARIANTS.iter().filter(|v| v.name.contains("128") || v.name.starts_with("simple_add")) {
            let (_, image) = &variant.cubins[0];
            let bytes: Vec<u8> = image.unpack().unwrap().iter().flat_map(|word| word.to_le_bytes()).collect();
            let bytes = &bytes[..image.len];
            assert_eq!(cubin_error(bytes), None, "{}", variant.name);
            for missing in [1, 8, 57, bytes.len() / 2, bytes.len() - 64, bytes.len() - 17, bytes.len()] {
                let error = cubin_error(&bytes[..bytes.len() - missing]);
                assert!(error.is_some(), "{}: {missing} bytes missing", variant.name);
            }
        }
    }

    /// Headers with any content are accepted or refused without a panic, that is, without reads outside of the file.
    #[test]
    #[cfg_attr(not(every_architecture), ignore = "XLA_ATTENTION_CUDA_ARCHS leaves kernels out")]
    fn damaged_headers_do_no_harm() {
        let (_, image) = &VARIANTS[0].cubins[0];
        let bytes: Vec<u8> = image.unpack().unwrap().iter().flat_map(|word| word.to_le_bytes()).collect();
        let sections = read_u64(&bytes, 40).unwrap() as usize;
        for at in (16..64).chain(sections..bytes.len()) {
            for value in [0, 1, 0x7f, 0x80, 0xff] {
                let mut damaged = bytes.clone();
                damaged[at] = value;
                let _ = cubin_error(&damaged);
            }
        }
        // The end of the section table overflows.
        let mut damaged = bytes;
        damaged[40..48].copy_from_slice(&u64::MAX.to_le_bytes());
        assert!(cubin_error(&damaged).is_some());
    }

    #[test]
    fn texts_are_told_from_other_files() {
        assert_eq!(ptx_error(b"// a comment\n.version 7.0\n.target sm_80\n"), None);
        assert_eq!(ptx_error(b".version 7.0\n\0"), None);
        for not_ptx in [&b""[..], b"\x7fELF", b".version 7.0\n\0.target", b"corrupt", b".version \xff"] {
            assert!(ptx_error(not_ptx).is_some(), "{not_ptx:?}");
        }
    }
}
