"""`make gpu-binaries`: the Rust tests that run on a GPU, stripped, into dist/gpu.

Reads cargo's JSON messages on standard input. The binaries need neither Rust nor Python where they run.
"""

import json
import shutil
import subprocess
import sys

from package import GPU_TESTS, ROOT


def main() -> None:
    """Copy each test's executable."""
    folder = ROOT / "dist/gpu"
    folder.mkdir(parents=True, exist_ok=True)
    found = set()
    for message in map(json.loads, sys.stdin):
        name = message.get("target", {}).get("name")
        if message.get("reason") == "compiler-artifact" and name in GPU_TESTS and message.get("executable"):
            shutil.copy(message["executable"], folder / name)
            subprocess.run(["strip", folder / name], check=True)
            found.add(name)
    if missing := set(GPU_TESTS) - found:
        sys.exit(f"cargo built no {', '.join(sorted(missing))}")


if __name__ == "__main__":
    main()
