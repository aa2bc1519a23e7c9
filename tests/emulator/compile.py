"""`compile.py ENTRY CACHE`: compiles a kernel of kernels/variants.toml, or one beside this file, for the host and
prints the library's path.

The library holds one kernel and the emulator, and exports `xa_emulate` and the size of the kernel's parameter. Its name
contains a hash of all of its sources, so it is compiled only once.

`compile.py --images FOLDER` writes a fake image of each kernel, for a build without kernels: the emulator
does not look into images.
"""

import hashlib
import itertools
import os
import pathlib
import re
import shutil
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Iterator

HERE = pathlib.Path(__file__).resolve().parent
KERNELS = HERE.parents[1] / "kernels"
# Headers that build.rs generates for the kernels.
GENERATED = pathlib.Path(os.environ.get("CARGO_TARGET_DIR", HERE.parents[1] / "target")) / "include"
# The emulator's files and where they are copied to; some of them replace a header of the kernels.
EMULATOR_FILES = {
    name: name
    for name in (
        "ptx.cuh",
        "cluster_async.cuh",
        "dtype.cuh",
        "fp8_convert.cuh",
        "token_scales_ptx.cuh",
        "warp_tile_ptx.cuh",
        "device.h",
        "tensor_map.h",
    )
}
EMULATOR_FILES |= {
    f"hopper_{name}": f"hopper/{name}" for name in ("ptx.cuh", "cluster_ptx.cuh", "packed_ptx.cuh", "wgmma.cuh")
}
EMULATOR_FILES |= {"bwd_ptx_extra.cuh": "bwd/ptx_extra.cuh"}
EMULATOR_FILES |= {f"hopper_bwd_{name}": f"hopper_bwd/{name}" for name in ("ptx.cuh", "products.cuh")}
EMULATOR_FILES |= {"hopper_mla_fp8_ptx.cuh": "hopper_mla_fp8/ptx.cuh"}
# The kernel has the same name, which is not exported, in each library.
COMPILER = ["g++", "-std=c++17", "-O2", "-g1", "-w", "-fPIC", "-mfma", "-mf16c", "-ffp-contract=fast"]
COMPILER += ["-fvisibility=hidden", "-include", "device.h", "-DXA_ENTRY=xa_emulated_kernel"]


def variants() -> Iterator[tuple[str, dict, tuple[str, ...]]]:
    """The name, the kernel and the axis values of each variant."""
    for kernel in tomllib.loads((KERNELS / "variants.toml").read_text())["kernel"]:
        for values in itertools.product(*(axis["values"] for axis in kernel["axes"])):
            yield "_".join([kernel["name"], *values]), kernel, values


def source_of(entry: str) -> tuple[str | pathlib.Path, list[str]]:
    """The source file of a kernel and the macros that select its variant."""
    beside = HERE / f"{entry.removeprefix('xa_')}.cu"
    if beside.exists():
        return beside, ["-D__CUDA_ARCH__=800"]
    for name, kernel, values in variants():
        if f"xa_{name}" == entry:
            names = (axis["name"].upper() for axis in kernel["axes"])
            architecture = f"-D__CUDA_ARCH__={int(re.sub('[a-z]', '', kernel['target'])) * 10}"
            defines = [f"-DXA_{n}={v}" for n, v in zip(names, values, strict=True)]
            return kernel["source"], [architecture, *defines]
    sys.exit(f"kernels/variants.toml has no {entry}")


def write_images(folder: str) -> None:
    """Write the fake images."""
    pathlib.Path(folder).mkdir(parents=True, exist_ok=True)
    for name, _, _ in variants():
        (pathlib.Path(folder) / f"{name}.ptx").write_text(".version 8.0\n")


def host_source(text: str) -> str:
    """The kernel's source as C++: the parameter is passed by reference, and dynamic shared memory is the emulator's."""
    parameter = re.compile(r"\(\s*const __grid_constant__ ([\w:]+) (\w+)\)")
    size = f"sizeof({parameter.search(text)[1]})"
    text = re.sub(r"extern __shared__ [^;]*shared\[\];", "", parameter.sub(r"(const \1& \2)", text))
    return f'{text}\nextern "C" __attribute__((visibility("default"))) const size_t xa_parameter_bytes = {size};\n'


def digest_of(files: list[pathlib.Path]) -> str:
    """A hash of the files' contents."""
    digest = hashlib.sha256()
    for file in files:
        digest.update(file.read_bytes() if file.is_file() else b"")
    return digest.hexdigest()[:16]


def build(target: pathlib.Path, command: list[str]) -> None:
    """Run a compiler that writes `target`, which appears when it is complete."""
    target.parent.mkdir(parents=True, exist_ok=True)
    aside = f"{target}.{os.getpid()}"
    subprocess.run([*command, "-o", aside], check=True, stdout=sys.stderr)
    os.rename(aside, target)


def device_object(cache: pathlib.Path) -> pathlib.Path:
    """The compiled emulator, which is the same for all kernels."""
    files = [HERE / name for name in ("device.cc", "device.h", "compile.py")]
    target = cache / f"device.{digest_of(files)}.o"
    if not target.exists():
        build(target, [*COMPILER, "-c", "-iquote", str(HERE), f"-I{HERE}", str(files[0])])
    return target


def main(entry: str, folder: str) -> None:
    """Compile the library unless it exists."""
    cache = pathlib.Path(folder)
    source, defines = source_of(entry)
    includes = (KERNELS / "include", GENERATED)
    headers = [header for include in includes for header in sorted(include.rglob("*.cuh"))]
    library = cache / f"{entry}.{digest_of([KERNELS / source, *headers, *sorted(HERE.iterdir())])}.so"
    if not library.exists():
        with tempfile.TemporaryDirectory() as sources:
            kernel = pathlib.Path(sources) / "kernel.cc"
            kernel.write_text(host_source((KERNELS / source).read_text()))
            for include in includes:
                shutil.copytree(include, sources, dirs_exist_ok=True)
            for name, place in EMULATOR_FILES.items():
                shutil.copy(HERE / name, pathlib.Path(sources) / place)
            command = [*COMPILER, "-shared", *defines, "-iquote", sources, f"-I{sources}"]
            build(library, [*command, str(kernel), str(device_object(cache))])
    print(library)


if __name__ == "__main__":
    write_images(sys.argv[2]) if sys.argv[1] == "--images" else main(*sys.argv[1:])
