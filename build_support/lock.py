"""Write the ``requirements`` files beside this one: all packages from PyPI, with exact versions and hashes.

Run it (``make lock``) after changing ``[build-system]`` or a dependency group in ``pyproject.toml``. The build's file
has the hashes for both architectures and every Python version, the tests' file those for Python 3.11 on x86_64, as in
CI.
"""

import json
import pathlib
import subprocess
import sys
import tempfile
import tomllib

HERE = pathlib.Path(__file__).resolve().parent
TAGS = ("manylinux_2_12", "manylinux2014", "manylinux_2_17", "manylinux_2_27", "manylinux_2_28")


def resolved(requirements: list[str], architecture: str, *options: str) -> list[dict]:
    """The packages that pip would install for these requirements, with their URLs."""
    platforms = [f"--platform={tag}_{architecture}" for tag in TAGS]
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--dry-run", "--report=-"]
    with tempfile.TemporaryDirectory() as target:
        where = ["--ignore-installed", "--only-binary=:all:", "--python-version=3.11", f"--target={target}"]
        command = [*pip, *where, *platforms, *options, *requirements]
        report = subprocess.run(command, check=True, stdout=subprocess.PIPE)
    return json.loads(report.stdout)["install"]


def lock(file: str, what: str, requirements: list[str], architectures: tuple[str, ...], *options: str) -> None:
    """Resolve for every architecture and write the file."""
    hashes: dict[str, set[str]] = {}
    for architecture in architectures:
        for item in resolved(requirements, architecture, *options):
            name = f"{item['metadata']['name']}=={item['metadata']['version']}"
            hashes.setdefault(name, set()).add(item["download_info"]["archive_info"]["hashes"]["sha256"])
    entries = (
        [name, *(f"--hash=sha256:{digest}" for digest in sorted(digests))] for name, digests in sorted(hashes.items())
    )
    head = f"# Written by build_support/lock.py (`make lock`) from pyproject.toml: {what}."
    (HERE / file).write_text("\n".join([head, *(" \\\n    ".join(entry) for entry in entries)]) + "\n")


def main() -> None:
    """Write every file, or those that are named as arguments."""
    project = tomllib.loads((HERE.parent / "pyproject.toml").read_text())
    groups = project["dependency-groups"]
    # pip itself is whatever the environment was made with.
    build = [r for r in project["build-system"]["requires"] if not r.startswith("pip>")]
    nvcc = [r for r in build if r.startswith("nvidia-")]
    host = [r for r in build if r not in nvcc]
    files = {
        "requirements.txt": ("what every build needs", host, ("x86_64", "aarch64")),
        "nvcc_requirements.txt": ("what CUDA kernels need", nvcc, ("x86_64", "aarch64"), "--no-deps"),
        "demo_requirements.txt": ("what the demo needs", groups["demo"], ("x86_64",)),
        "serve_requirements.txt": ("what the server needs", groups["demo"] + groups["serve"], ("x86_64",)),
        "serve_test_requirements.txt": (
            "what the server's tests need over the tests'",
            groups["demo"] + groups["serve"] + groups["serve_test"],
            ("x86_64",),
        ),
        "test_requirements.txt": ("what the tests and the demo need", groups["test"] + groups["demo"], ("x86_64",)),
        "docs_requirements.txt": ("what the documentation needs", groups["docs"], ("x86_64",)),
        "release_requirements.txt": ("what a release needs", groups["release"], ("x86_64",)),
        "xla_gpu_requirements.txt": ("XLA's compiler for GPUs", groups["xla_gpu"], ("x86_64",), "--no-deps"),
        "model_requirements.txt": ("the demo's model", groups["model"], ("x86_64",), "--no-deps"),
    }
    for file in sys.argv[1:] or files:
        lock(file, *files[file])


if __name__ == "__main__":
    main()
