"""`make gpu-binaries`: copies the Rust test binaries for GPU machines, stripped, to dist/gpu.

Reads cargo's JSON messages from standard input. The binaries need neither Rust nor Python.
"""

import json
import shutil
import subprocess
import sys

from package import GPU_TESTS, ROOT


def main() -> None:
    """Copy the executables."""
    folder = ROOT / "dist/gpu"
    folder.mkdir(parents=True, exist_ok=True)
    copied = set()
    for message in map(json.loads, sys.stdin):
        name = message.get("target", {}).get("name")
        if message.get("reason") == "compiler-artifact" and name in GPU_TESTS and message.get("executable"):
            shutil.copy(message["executable"], folder / name)
            subprocess.run(["strip", folder / name], check=True)
            copied.add(name)
    if missing := set(GPU_TESTS) - copied:
        sys.exit(f"cargo built no {', '.join(sorted(missing))}")


if __name__ == "__main__":
    main()
