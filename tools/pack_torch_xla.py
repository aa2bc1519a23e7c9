"""Packs torch_xla and torch into a small folder, for a GPU machine without a network.

    python tools/pack_torch_xla.py TREE            # about 600 MB
    tar -C TREE -c . | xz -T2 --x86 --lzma2=preset=9,lc=4,pb=0 > torch_xla.tar.xz    # 115 MiB

XLA computes, so that torch does not need CUDA: in the tree, `torch.cuda.is_available()` is False, and the CUDA
libraries that torch's Python bindings link to are stubs. There is no stub of cuDNN, because XLA's plugin opens
libcudnn.so.9 by name and would get the stub.

The other machine needs Python of the given version with its shared library, the packages that torch imports (numpy,
sympy, networkx, jinja2, fsspec, filelock, typing_extensions), and in its environment

    PYTHONPATH=TREE:$PYTHONPATH                        # hides a torch that is installed there
    LD_LIBRARY_PATH=.../site-packages/nvidia/cudnn/lib

It runs the tests of torch with

    JAX_PLATFORMS=cpu XLA_ATTENTION_TEST_XLA=cuda python3 -m pytest tests/python/test_torch_*.py -k xla

`--cudnn-stub` makes a folder with a stub of cuDNN, to try a tree with PJRT_DEVICE=CPU on a machine without cuDNN.
Packing needs pip, gcc and GNU binutils, 3 GB of disk and five minutes.
"""

import argparse
import collections
import os
import pathlib
import re
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from typing import NamedTuple

# At the versions of the tests: torch, torch_xla, and the dependencies of torch_xla that torch does not have.
PACKAGES = ["torch", "torch-xla", "absl-py", "PyYAML", "requests", "certifi", "charset-normalizer", "idna", "urllib3"]
LOCKED = pathlib.Path(__file__).resolve().parents[1] / "build_support/test_requirements.txt"
PLATFORMS = ("manylinux_2_28_x86_64", "manylinux_2_17_x86_64", "manylinux2014_x86_64")

# Not in the tree. RECORD lists hashes, which do not compress; torchax is another package in torch_xla's wheel.
UNWANTED = re.compile(
    r"torch/(include|bin|test|share)/"
    r"|torch/lib/libtorch_cuda_linalg\.so|torch/lib/libcaffe2_nvrtc\.so"
    r"|torchax/|torchgen/packaged/"
    r"|.*\.(a|h|pyi)$|.*\.dist-info/RECORD$"
)
# Replaced by stubs, which need the names of their symbols; torch's libraries link to the second through the first.
CUDA = ("libtorch_cuda.so", "libtorch_nvshmem.so")

# The other CUDA libraries with stubs, and prefixes of their symbols. XLA's plugin for CUDA 13 uses none of these names;
# a stub of a library that it uses would be loaded instead of that library.
STUBS = {
    "libcudart.so.12": "cuda|__cuda",
    "libcupti.so.12": "cupti",
    "libcufile.so.0": "cuFile",
    "libcusparseLt.so.0": "cusparseLt",
}
CUDNN = "libcudnn.so.9"
# Libraries that every machine has, and those of them that define symbols which torch uses.
SYSTEM = re.compile(r"lib(c|m|dl|rt|pthread|stdc\+\+|gcc_s|python3\.\d+)\.so|ld-linux")
SYSTEM_DEFINES = ("libc.so.6", "libm.so.6", "libstdc++.so.6", "libgcc_s.so.1")
# A local symbol that `xla_attention.torch_xla` looks up in _XLAC's table of symbols.
KEPT_SYMBOL = "_ZN3xla3ffi12GetXlaFfiApiEv"

# The size and alignment of the zeros: the low bits of their address are zero, so that it is false as a bool.
ZEROS = 1 << 16


class Symbol(NamedTuple):
    """A dynamic symbol of a library."""

    name: str
    version: str
    kind: str  # nm's letter
    size: int


def output(*command: str | pathlib.Path) -> str:
    """The standard output of a command."""
    return subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout


def download(python: str, folder: pathlib.Path) -> None:
    """Download wheels for a version of Python, except those that are in the folder."""
    requirements = [line.split()[0] for line in LOCKED.read_text().splitlines() if line.split("==")[0] in PACKAGES]
    pip = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-cache-dir"]
    target = ["--python-version", python, "--implementation", "cp", "--abi", "cp" + python.replace(".", "")]
    target += [f"--platform={platform}" for platform in PLATFORMS]
    where = ["--find-links", folder, "--dest", folder]
    subprocess.run([*pip, "--no-deps", "--only-binary=:all:", *target, *where, *requirements], check=True)


def unpack(wheel: pathlib.Path, tree: pathlib.Path, aside: pathlib.Path) -> None:
    """Unpack the wanted files into the tree, and torch's CUDA libraries into the folder `aside`."""
    with zipfile.ZipFile(wheel) as archive:
        for member in archive.infolist():
            if pathlib.PurePath(member.filename).name in CUDA:
                archive.extract(member, aside)
            elif not UNWANTED.match(member.filename):
                archive.extract(member, tree)


def libraries(tree: pathlib.Path) -> list[pathlib.Path]:
    """The shared libraries and extension modules of a tree."""
    return sorted(path for path in tree.rglob("*.so*") if path.is_file())


def symbols(library: pathlib.Path, which: str) -> Iterator[Symbol]:
    """The "defined" or "undefined" dynamic symbols of a library."""
    for line in output("nm", "-D", "-S", f"--{which}-only", "--with-symbol-versions", library).splitlines():
        *numbers, kind, name = line.split()
        name, _, version = name.partition("@")
        # The numbers of a defined symbol are its address and usually its size.
        yield Symbol(name, version.lstrip("@"), kind, int(numbers[1], 16) if len(numbers) == 2 else 0)


def link(library: pathlib.Path, assembly: str, *options: str) -> None:
    """Assemble a shared library without initialisers."""
    note = '.section .note.GNU-stack,"",@progbits\n'  # a stack that is not executable
    command = ["gcc", "-shared", "-nostartfiles", f"-Wl,-soname,{library.name}", "-o", library, "-x", "assembler", "-"]
    subprocess.run([*command, "-x", "none", *options], input=assembly + note, text=True, check=True)


def head(name: str, kind: str) -> list[str]:
    """Assembler directives for a global symbol."""
    return [".balign 16", f".globl {name}", f".type {name}, @{kind}", f"{name}:"]


def torch_cuda(library: pathlib.Path, tree: pathlib.Path, originals: list[pathlib.Path]) -> int:
    """Write a stub of libtorch_cuda.so; returns the number of its symbols.

    Static initialisers of torch's Python bindings call it and use returned references. Each function therefore returns
    the address of writable zeros.
    """
    used, defined = set(), set()
    for user in libraries(tree):
        used |= {symbol.name for symbol in symbols(user, "undefined")}
        defined |= {symbol.name for symbol in symbols(user, "defined")}
    exported = {symbol.name: symbol for original in originals for symbol in symbols(original, "defined")}
    text, data = [".text", "zeros_of: lea zeros(%rip), %rax", "ret"], [f".local zeros\n.comm zeros, {ZEROS}, {ZEROS}"]
    data += ['.section .data.rel.ro, "aw"']
    names = sorted((used & exported.keys()) - defined)
    for name in names:
        if name.startswith("_ZTI"):  # type info without a base class, which suffices for typeid
            words = f".quad _ZTVN10__cxxabiv117__class_type_infoE + 16, name_of_{name}"
            data += [*head(name, "object"), words, f'name_of_{name}: .string "{name[4:]}"']
        elif name.startswith("_ZTV"):  # a vtable: offset, type info, functions
            functions = max(0, exported[name].size // 8 - 2)
            data += [*head(name, "object"), ".quad 0, 0", *[".quad zeros_of"] * functions]
        elif exported[name].kind in "TWi":
            text += [*head(name, "function"), "jmp zeros_of"]
        else:
            sys.exit(f"{name} of libtorch_cuda.so is a variable, which a stub cannot have")
    link(library, "\n".join([*text, *data, ""]), "-lstdc++")
    return len(names)


def write_stub(library: pathlib.Path, wanted: set[Symbol]) -> None:
    """Write a library whose functions all return 100, cudaErrorNoDevice in CUDA's runtime.

    torch then counts no devices and does not warn.
    """
    versions = collections.defaultdict(list)
    for symbol in sorted(wanted):
        versions[symbol.version].append(symbol.name)
    text = [".text"]
    for name in sorted({symbol.name for symbol in wanted}):
        text += [*head(name, "function"), "mov $100, %eax", "ret"]
    script = library.with_suffix(".map")
    script.write_text("".join(f"{v} {{ global: {'; '.join(names)}; }};\n" for v, names in versions.items() if v))
    options = [f"-Wl,--version-script={script}"] if script.stat().st_size else []
    link(library, "\n".join([*text, ""]), "-nostdlib", *options)
    script.unlink()


def missing(tree: pathlib.Path) -> tuple[dict[str, set[Symbol]], set[str]]:
    """The symbols that a tree's libraries use from each of STUBS and CUDNN, and all others that are undefined."""
    present = libraries(tree)
    needed = {name for path in present for name in re.findall(r"NEEDED.*\[(.*)\]", output("readelf", "-dW", path))}
    owners = {**STUBS, CUDNN: "cudnn"}
    unknown = {name for name in needed - owners.keys() - {path.name for path in present} if not SYSTEM.match(name)}
    system = [output("gcc", f"-print-file-name={name}").strip() for name in SYSTEM_DEFINES]
    defined = {symbol.name for path in [*present, *system] for symbol in symbols(path, "defined")}
    taken = {owner: set() for owner in owners}
    for symbol in {symbol for path in present for symbol in symbols(path, "undefined")}:
        if symbol.name in defined or symbol.kind != "U":  # the others are weak: they may be missing
            continue
        owner = next((owner for owner, prefix in owners.items() if re.match(prefix, symbol.name)), None)
        if owner:
            taken[owner].add(symbol)
        elif not re.match("_?Py|__tls_get_addr$", symbol.name):
            unknown.add(symbol.name)
    return taken, unknown


def strip(path: pathlib.Path) -> None:
    """Remove symbols that only debuggers and linkers use."""
    subprocess.run(["strip", "--strip-all", f"--keep-symbol={KEPT_SYMBOL}", path], check=True)


def trim(wheels: list[pathlib.Path], tree: pathlib.Path, aside: pathlib.Path) -> dict[str, set[Symbol]]:
    """Make the tree from wheels; returns the symbols that it uses from each of STUBS and CUDNN."""
    for folder in (tree, aside):
        shutil.rmtree(folder, ignore_errors=True)
    for wheel in wheels:
        unpack(wheel, tree, aside)
    lib = tree / "torch/lib"
    print(f"libtorch_cuda.so: {torch_cuda(lib / 'libtorch_cuda.so', tree, libraries(aside))} symbols")
    taken, unknown = missing(tree)
    if unknown:
        sys.exit(f"no stub defines {', '.join(sorted(unknown))}")
    for name in STUBS:
        write_stub(lib / name, taken[name])
        print(f"{name}: {len(taken[name])} symbols")
    for path in libraries(tree):
        strip(path)
    # `import torch` needs this program to exist; only tensors that processes share run it.
    (tree / "torch/bin").mkdir()
    (tree / "torch/bin/torch_shm_manager").touch()
    return taken


def main() -> None:
    """Download and trim."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("tree", type=pathlib.Path, help="the folder to create; an existing one is deleted")
    parser.add_argument("--python", default="3.12", help="version on the other machine (default: %(default)s)")
    parser.add_argument("--work", type=pathlib.Path, help="folder for wheels (default: TREE.work)")
    parser.add_argument("--cudnn-stub", type=pathlib.Path, metavar="FOLDER", help="write a stub of cuDNN here")
    options = parser.parse_args()
    work = (options.work or options.tree.with_name(options.tree.name + ".work")).absolute()
    wheels, temporary = work / f"wheels-{options.python}", work / "tmp"
    for folder in (wheels, temporary):
        folder.mkdir(parents=True, exist_ok=True)
    os.environ["TMPDIR"] = str(temporary)  # pip downloads a wheel of 900 MB there
    download(options.python, wheels)
    taken = trim(sorted(wheels.glob("*.whl")), options.tree, work / "aside")
    print(f"{sum(p.stat().st_size for p in options.tree.rglob('*') if p.is_file()) / 1e6:.0f} MB in {options.tree}")
    if options.cudnn_stub:
        options.cudnn_stub.mkdir(parents=True, exist_ok=True)
        write_stub(options.cudnn_stub / CUDNN, taken[CUDNN])


if __name__ == "__main__":
    main()
