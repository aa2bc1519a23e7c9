"""Write ``build_support/requirements.txt``: what a build takes from PyPI, at exact versions and hashes.

Run it (``make lock``) after changing ``[build-system]`` in ``pyproject.toml``. Both platforms of the wheels are locked.
"""

import json
import pathlib
import subprocess
import sys
import tempfile
import tomllib

HERE = pathlib.Path(__file__).resolve().parent
ARCHITECTURES = ("x86_64", "aarch64")
HEAD = """\
# Written by build_support/lock.py (`make lock`) from [build-system] in pyproject.toml: what a build takes from PyPI,
# with the hashes of the files for x86_64 and aarch64.
"""


def resolved(requirements: list[str], architecture: str) -> list[dict]:
    """What pip would install for these requirements, and whence."""
    platforms = [f"--platform={tag}_{architecture}" for tag in ("manylinux2014", "manylinux_2_17", "manylinux_2_28")]
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--dry-run", "--report=-"]
    with tempfile.TemporaryDirectory() as target:
        options = ["--ignore-installed", "--only-binary=:all:", "--python-version=3.11", f"--target={target}"]
        report = subprocess.run([*pip, *options, *platforms, *requirements], check=True, stdout=subprocess.PIPE)
    return json.loads(report.stdout)["install"]


def main() -> None:
    """Resolve for every architecture and write the file."""
    project = tomllib.loads((HERE.parent / "pyproject.toml").read_text())
    # pip itself is whatever the environment was made with.
    requirements = [r for r in project["build-system"]["requires"] if not r.startswith("pip>")]
    hashes: dict[str, set[str]] = {}
    for architecture in ARCHITECTURES:
        for item in resolved(requirements, architecture):
            name = f"{item['metadata']['name']}=={item['metadata']['version']}"
            hashes.setdefault(name, set()).add(item["download_info"]["archive_info"]["hashes"]["sha256"])
    lines = [" \\\n    ".join([name, *(f"--hash=sha256:{h}" for h in sorted(hashes[name]))]) for name in sorted(hashes)]
    (HERE / "requirements.txt").write_text(HEAD + "\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
