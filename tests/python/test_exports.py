"""The symbols that the shared library exports: its C interface, and nothing that could be interposed."""

import mmap
import struct

from xla_attention import _library

C_INTERFACE = {
    "GetPjrtApi",
    "xa_bias_workspace",
    "xa_call",
    "xa_handler_set",
    "xa_info",
    "xa_layouts",
    "xa_op",
    "xa_stand_before_pjrt_plugin",
    "xa_targets",
    "xa_workspace",
}
SHT_DYNAMIC, SHT_DYNSYM = 6, 11
DT_SYMBOLIC, DT_FLAGS, DF_SYMBOLIC = 16, 30, 2


def sections(elf):
    """(type, bytes, bytes of the linked section) of each section of a 64-bit ELF file."""
    assert elf[:6] == b"\x7fELF\x02\x01"
    (table,), (size, count) = struct.unpack_from("<Q", elf, 0x28), struct.unpack_from("<HH", elf, 0x3A)
    headers = [struct.unpack_from("<IIQQQQIIQQ", elf, table + i * size) for i in range(count)]
    data = [elf[offset : offset + length] if kind != 8 else b"" for _, kind, _, _, offset, length, *_ in headers]
    return [(header[1], own, data[header[6]]) for header, own in zip(headers, data, strict=True)]


def library_sections():
    with _library.library_path().open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as elf:
        return sections(elf)


def test_the_library_exports_its_c_interface_and_nothing_else():
    exported = set()
    for kind, symbols, strings in library_sections():
        if kind == SHT_DYNSYM:
            for name, _, _, section, _, _ in struct.iter_unpack("<IBBHQQ", symbols):
                if section:
                    exported.add(strings[name : strings.index(b"\0", name)].decode())
    test_only = {"xa_take_failpoint"} if _library.build_info()["failpoints"] else set()
    assert exported == C_INTERFACE | test_only


def test_symbols_of_the_library_bind_within_it():
    entries = [
        entry for kind, own, _ in library_sections() if kind == SHT_DYNAMIC for entry in struct.iter_unpack("<QQ", own)
    ]
    assert any(tag == DT_SYMBOLIC or (tag == DT_FLAGS and value & DF_SYMBOLIC) for tag, value in entries)
