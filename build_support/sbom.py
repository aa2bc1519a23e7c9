"""Write the wheel's software bill of materials (CycloneDX, PEP 770): `sbom.py CARGO_CYCLONEDX TARGET OUTPUT`.

cargo-cyclonedx lists the crates for a target; it leaves files beside each Cargo.toml. Code of other origins that is
compiled into the library is added: XLA's headers, the CUDA headers and device libraries of the kernels, and the C++
library of zig. Numbers and times of a single run are left out, so that the same sources give the same bytes.
"""

import json
import pathlib
import subprocess
import sys
import tomllib

ROOT = pathlib.Path(__file__).resolve().parent.parent
# Packages of PyPI of which parts are compiled into the library, and why.
COMPILED_IN = {
    "nvidia-nvvm": "the mathematical functions of libdevice, in the kernels",
    "nvidia-cuda-runtime": "CUDA's headers, in the kernels",
    "nvidia-cuda-cccl": "the headers of CCCL, in the kernels",
    "ziglang": "libc++, linked statically",
}


def from_pypi(name: str, version: str, description: str) -> dict[str, str]:
    """A component that is part of a package of PyPI."""
    reference = f"pkg:pypi/{name}@{version}"
    fields = {"name": name, "version": version, "description": description, "purl": reference}
    return {"type": "library", "bom-ref": reference, **fields}


def components() -> list[dict[str, str]]:
    """The components that are no crates, with the versions that the build pins."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    pins = [*project["build-system"]["requires"], *project["dependency-groups"]["release"]]
    versions = dict(pin.split("==") for pin in pins if "==" in pin)
    headers = tomllib.loads((ROOT / "xla_headers/pin.toml").read_text()).values()
    return [
        *(from_pypi(name, versions[name], why) for name, why in COMPILED_IN.items()),
        *(from_pypi("jaxlib", pin["jaxlib"], "the headers of XLA's FFI, in the handlers") for pin in headers),
    ]


def main(cyclonedx: str, target: str, output: str) -> None:
    """Run cargo-cyclonedx and write its document, completed, to `output`."""
    options = ["--format", "json", "--spec-version", "1.5", "--no-build-deps", "--target", target]
    subprocess.run([cyclonedx, "cyclonedx", *options], cwd=ROOT, check=True)
    # The references contain the path of the sources.
    text = (ROOT / "xla-attention.cdx.json").read_text().replace(f"path+file://{ROOT}", "pkg:cargo/xla-attention")
    contents = json.loads(text)
    contents.pop("serialNumber", None)
    contents["metadata"].pop("timestamp", None)
    contents["components"] += components()
    pathlib.Path(output).write_text(json.dumps(contents, indent=1, sort_keys=True) + "\n")


if __name__ == "__main__":
    main(*sys.argv[1:])
