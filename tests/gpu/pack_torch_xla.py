"""torch_xla and its torch, made small enough to be carried to a GPU machine without a network.

    python tests/gpu/pack_torch_xla.py TREE            # of some 600 MB
    tar -C TREE -c . | xz -T2 --x86 --lzma2=preset=9,lc=4,pb=0 > torch_xla.tar.xz    # of 115 MiB

torch_xla's own XLA is the one that computes, so all of CUDA is taken out of torch: `torch.cuda.is_available()` is False
in the tree. What torch's Python bindings still link to, do-nothing libraries stand in for. Not for cuDNN: XLA's plugin
opens the same libcudnn.so.9 by name and would get the stand-in.

The other machine needs a Python of the version asked for with its shared library, what torch imports (numpy, sympy,
networkx, jinja2, fsspec, filelock, typing_extensions: they come with any torch), and in its environment

    PYTHONPATH=TREE:$PYTHONPATH                        # hides a torch that is installed there
    LD_LIBRARY_PATH=.../site-packages/nvidia/cudnn/lib

There the tests of torch run with

    JAX_PLATFORMS=cpu XLA_ATTENTION_TEST_XLA=cuda python3 -m pytest tests/python/test_torch_*.py -k xla

`--cudnn-stand-in` makes a folder for that place too, to try a tree with PJRT_DEVICE=CPU where there is no cuDNN.
Here it takes pip, gcc and GNU binutils, 3 GB of disk and five minutes.
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

# At the versions of the tests: what no torch brings along is torch_xla, what it imports, and what that imports.
PACKAGES = ["torch", "torch-xla", "absl-py", "PyYAML", "requests", "certifi", "charset-normalizer", "idna", "urllib3"]
LOCKED = pathlib.Path(__file__).resolve().parents[2] / "build_support/test_requirements.txt"
PLATFORMS = ("manylinux_2_28_x86_64", "manylinux_2_17_x86_64", "manylinux2014_x86_64")

# Not in the tree. RECORD lists hashes, which do not compress; torchax is another package in torch_xla's wheel.
UNWANTED = re.compile(
    r"torch/(include|bin|test|share)/"
    r"|torch/lib/libtorch_cuda_linalg\.so|torch/lib/libcaffe2_nvrtc\.so"
    r"|torchax/|torchgen/packaged/"
    r"|.*\.(a|h|pyi)$|.*\.dist-info/RECORD$"
)
# Not in the tree either, but looked into: the first stands between torch's libraries and the second.
CUDA = ("libtorch_cuda.so", "libtorch_nvshmem.so")

# The libraries of CUDA that remain, with the names that are theirs. All of them are of CUDA 12 or are not used by XLA's
# plugin for CUDA 13; a stand-in with the name of a library of the plugin's would take that library's place.
STAND_INS = {
    "libcudart.so.12": "cuda|__cuda",
    "libcupti.so.12": "cupti",
    "libcufile.so.0": "cuFile",
    "libcusparseLt.so.0": "cusparseLt",
}
CUDNN = "libcudnn.so.9"
# What every machine has; their names that torch's libraries take are mostly of glibc and libstdc++.
SYSTEM = re.compile(r"lib(c|m|dl|rt|pthread|stdc\+\+|gcc_s|python3\.\d+)\.so|ld-linux")
SYSTEM_DEFINES = ("libc.so.6", "libm.so.6", "libstdc++.so.6", "libgcc_s.so.1")
# A local symbol that `xla_attention.torch_xla` looks up in _XLAC's table of symbols.
KEPT_SYMBOL = "_ZN3xla3ffi12GetXlaFfiApiEv"

# Aligned to its own size, so that the address's low bits, which are all that a caller of a bool looks at, are zero.
ZEROS = 1 << 16


class Symbol(NamedTuple):
    name: str
    version: str
    kind: str  # nm's letter
    size: int


def output(*command: str | pathlib.Path) -> str:
    """What a command prints."""
    return subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout


def download(python: str, folder: pathlib.Path) -> None:
    """Fetch wheels for a Python that need not be this one; those in the folder already are not fetched again."""
    requirements = [line.split()[0] for line in LOCKED.read_text().splitlines() if line.split("==")[0] in PACKAGES]
    pip = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-cache-dir"]
    target = ["--python-version", python, "--implementation", "cp", "--abi", "cp" + python.replace(".", "")]
    target += [f"--platform={platform}" for platform in PLATFORMS]
    where = ["--find-links", folder, "--dest", folder]
    subprocess.run([*pip, "--no-deps", "--only-binary=:all:", *target, *where, *requirements], check=True)


def unpack(wheel: pathlib.Path, tree: pathlib.Path, aside: pathlib.Path) -> None:
    """Unpack what is wanted into the tree, and torch's CUDA libraries into a folder aside of it."""
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
    """Dynamic symbols of a library, "defined" or "undefined"."""
    for line in output("nm", "-D", "-S", f"--{which}-only", "--with-symbol-versions", library).splitlines():
        *numbers, kind, name = line.split()
        name, _, version = name.partition("@")
        # A defined symbol's numbers are its address and, mostly, its size.
        yield Symbol(name, version.lstrip("@"), kind, int(numbers[1], 16) if len(numbers) == 2 else 0)


def link(library: pathlib.Path, assembly: str, *options: str) -> None:
    """Make a shared library out of assembler text; nothing runs when it is loaded."""
    note = '.section .note.GNU-stack,"",@progbits\n'  # the stack need not be executable
    command = ["gcc", "-shared", "-nostartfiles", f"-Wl,-soname,{library.name}", "-o", library, "-x", "assembler", "-"]
    subprocess.run([*command, "-x", "none", *options], input=assembly + note, text=True, check=True)


def head(name: str, kind: str) -> list[str]:
    """Assembler text that a global symbol begins with."""
    return [".balign 16", f".globl {name}", f".type {name}, @{kind}", f"{name}:"]


def torch_cuda(library: pathlib.Path, tree: pathlib.Path, originals: list[pathlib.Path]) -> int:
    """Put a small libtorch_cuda.so in the place of the originals; the number of symbols that it has.

    Static initialisers of torch's Python bindings call into it, through references too. So each function returns the
    address of zeros that may be written to.
    """
    asked, had = set(), set()
    for user in libraries(tree):
        asked |= {symbol.name for symbol in symbols(user, "undefined")}
        had |= {symbol.name for symbol in symbols(user, "defined")}
    offered = {symbol.name: symbol for original in originals for symbol in symbols(original, "defined")}
    text, data = [".text", "zeros_of: lea zeros(%rip), %rax", "ret"], [f".local zeros\n.comm zeros, {ZEROS}, {ZEROS}"]
    data += ['.section .data.rel.ro, "aw"']
    names = sorted((asked & offered.keys()) - had)
    for name in names:
        if name.startswith("_ZTI"):  # a type of its own, with no base: enough for typeid
            words = f".quad _ZTVN10__cxxabiv117__class_type_infoE + 16, name_of_{name}"
            data += [*head(name, "object"), words, f'name_of_{name}: .string "{name[4:]}"']
        elif name.startswith("_ZTV"):  # an offset, a typeid and the functions
            functions = max(0, offered[name].size // 8 - 2)
            data += [*head(name, "object"), ".quad 0, 0", *[".quad zeros_of"] * functions]
        elif offered[name].kind in "TWi":
            text += [*head(name, "function"), "jmp zeros_of"]
        else:
            sys.exit(f"{name} of libtorch_cuda.so is a variable: no stand-in is written for one")
    link(library, "\n".join([*text, *data, ""]), "-lstdc++")
    return len(names)


def do_nothing(library: pathlib.Path, wanted: set[Symbol]) -> None:
    """Make a library whose functions all return 100, which in CUDA's runtime is cudaErrorNoDevice.

    torch takes that as an answer: it counts no devices and does not warn.
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
    """The names that a tree's libraries take from those of STAND_INS and CUDNN, and what else they lack."""
    present = libraries(tree)
    needed = {name for path in present for name in re.findall(r"NEEDED.*\[(.*)\]", output("readelf", "-dW", path))}
    owners = {**STAND_INS, CUDNN: "cudnn"}
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
    """Remove what only debuggers and linkers read."""
    subprocess.run(["strip", "--strip-all", f"--keep-symbol={KEPT_SYMBOL}", path], check=True)


def trim(wheels: list[pathlib.Path], tree: pathlib.Path, aside: pathlib.Path) -> dict[str, set[Symbol]]:
    """Make the tree out of wheels; the symbols that it takes from each library of STAND_INS and CUDNN."""
    for folder in (tree, aside):
        shutil.rmtree(folder, ignore_errors=True)
    for wheel in wheels:
        unpack(wheel, tree, aside)
    lib = tree / "torch/lib"
    print(f"libtorch_cuda.so: {torch_cuda(lib / 'libtorch_cuda.so', tree, libraries(aside))} symbols")
    taken, unknown = missing(tree)
    if unknown:
        sys.exit(f"nothing stands in for {', '.join(sorted(unknown))}")
    for name in STAND_INS:
        do_nothing(lib / name, taken[name])
        print(f"{name}: {len(taken[name])} symbols")
    for path in libraries(tree):
        strip(path)
    # `import torch` looks whether this program is there; it is run where tensors are shared between processes.
    (tree / "torch/bin").mkdir()
    (tree / "torch/bin/torch_shm_manager").touch()
    return taken


def main() -> None:
    """Download and trim."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("tree", type=pathlib.Path, help="a folder that is made anew")
    parser.add_argument("--python", default="3.12", help="of the other machine (default: %(default)s)")
    parser.add_argument("--work", type=pathlib.Path, help="for wheels (default: TREE with .work behind)")
    parser.add_argument("--cudnn-stand-in", type=pathlib.Path, metavar="FOLDER", help="put one into this folder")
    options = parser.parse_args()
    work = (options.work or options.tree.with_name(options.tree.name + ".work")).absolute()
    wheels, temporary = work / f"wheels-{options.python}", work / "tmp"
    for folder in (wheels, temporary):
        folder.mkdir(parents=True, exist_ok=True)
    os.environ["TMPDIR"] = str(temporary)  # pip puts a wheel of 900 MB there first
    download(options.python, wheels)
    taken = trim(sorted(wheels.glob("*.whl")), options.tree, work / "aside")
    print(f"{sum(p.stat().st_size for p in options.tree.rglob('*') if p.is_file()) / 1e6:.0f} MB in {options.tree}")
    if options.cudnn_stand_in:
        options.cudnn_stand_in.mkdir(parents=True, exist_ok=True)
        do_nothing(options.cudnn_stand_in / CUDNN, taken[CUDNN])


if __name__ == "__main__":
    main()
