"""Build hook: adds the shared library that cargo builds to the wheel, tagged ``py3-none-<platform>``."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import sysconfig
import tomllib
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

# Minor glibc versions of the manylinux tags. A library gets the first one that covers its newest glibc symbol.
MANYLINUX = (17, 24, 26, 27, 28, 31, 34, 35, 38, 39)
# The number of an ELF file's machine (e_machine), which a cross compiler may have built for.
MACHINES = {62: "x86_64", 183: "aarch64"}


class CargoBuildHook(BuildHookInterface):
    """Builds the cdylib and puts it beside the Python files."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Run before the wheel is assembled."""
        if self.target_name != "wheel":
            return
        library = build_library(self.root)
        build_data["pure_python"] = False
        build_data["tag"] = f"py3-none-{platform_tag(library)}"
        build_data["force_include"][library] = "xla_attention/" + os.path.basename(library)
        if bill_of_materials := os.environ.get("XLA_ATTENTION_SBOM"):  # from `make release`
            build_data["sbom_files"].append(bill_of_materials)


def build_library(root: str) -> str:
    """Run cargo and return the path of the library.

    ``XLA_ATTENTION_CARGO`` replaces the sub-command ``build``, for example by ``zigbuild --target TRIPLE``;
    ``XLA_ATTENTION_CARGO_PROFILE`` replaces the profile ``release``.
    """
    subcommand = os.environ.get("XLA_ATTENTION_CARGO", "build").split()
    profile = os.environ.get("XLA_ATTENTION_CARGO_PROFILE", "release")
    options = ["--profile", profile, "--lib", "--locked", "--message-format=json-render-diagnostics"]
    for message in map(json.loads, output_of(["cargo", *subcommand, *options], root).splitlines()):
        if message.get("reason") == "compiler-artifact" and "cdylib" in message["target"]["kind"]:
            return next(f for f in message["filenames"] if f.endswith((".so", ".dylib", ".dll")))
    raise RuntimeError("cargo built no cdylib")


def output_of(command: list[str], folder: str) -> str:
    """Standard output of a command, which ends with all its processes when this process or its parent, pip, ends."""
    parent = os.getppid()
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, lambda number, _: sys.exit(128 + number))
    try:
        process = subprocess.Popen(command, cwd=folder, stdout=subprocess.PIPE, text=True, process_group=0)
    except FileNotFoundError:
        with open(os.path.join(folder, "Cargo.toml"), "rb") as file:
            oldest = tomllib.load(file)["package"]["rust-version"]
        sys.exit(f"{command[0]} is missing: install Rust {oldest} or newer (https://rustup.rs)")
    while True:
        try:
            output, _ = process.communicate(timeout=1)
            break
        except subprocess.TimeoutExpired:
            if os.getppid() != parent:
                os.killpg(process.pid, signal.SIGTERM)
                sys.exit("pip has ended")
        except BaseException:
            os.killpg(process.pid, signal.SIGTERM)
            raise
    if process.returncode:
        full = shutil.disk_usage(folder).free < 1 << 26
        sys.exit(f"{' '.join(command[:2])} failed: {'the disk is full' if full else 'its error is above'}")
    return output


def platform_tag(library: str) -> str:
    """The wheel's platform tag: manylinux of the library's newest glibc symbol; outside of Linux Python's platform."""
    platform = sysconfig.get_platform().replace("-", "_").replace(".", "_")
    if not platform.startswith("linux_"):
        return platform
    with open(library, "rb") as file:
        image = file.read()
    newest = max(int(minor) for minor in re.findall(rb"GLIBC_2\.(\d+)", image))
    machine = MACHINES[int.from_bytes(image[18:20], "little")]
    return f"manylinux_2_{next((m for m in MANYLINUX if m >= newest), newest)}_{machine}"


if __name__ == "__main__":
    build_library(os.path.dirname(os.path.abspath(__file__)))
