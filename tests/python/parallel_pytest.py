"""Runs the Python tests in two parallel pytest processes, for two cores; `make test` uses it.

    python tests/python/parallel_pytest.py -m "not slow"

Both get the arguments. One process runs the tests of torch and those that mostly wait for subprocesses; the other,
whose output comes first, runs the rest and never imports torch. With a GPU there is one process, because some tests
measure how much of its memory is free.
"""

import os
import pathlib
import subprocess
import sys
import tempfile

HERE = pathlib.Path(__file__).parent
TORCH = ("torch_*", "debugging_torch_xla", "documentation", "refusals")
SUBPROCESSES = (
    *("context_parallel_gpu_programs", "debug_check", "generate", "generate_loading", "gpu_programs", "info"),
    *("register", "sharding", "train", "troubleshooting", "two_processes"),
)


def main(arguments: list[str]) -> int:
    """The exit status of pytest, the worse of two."""
    first = {path for name in TORCH + SUBPROCESSES for path in HERE.glob(f"test_{name}.py")}
    others = set(HERE.glob("test_*.py")) - first
    pytest = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", *arguments]
    if os.path.exists("/dev/nvidia0"):
        return subprocess.run(pytest, check=False).returncode
    with tempfile.TemporaryFile("w+") as output:
        with subprocess.Popen([*pytest, *sorted(first)], stdout=output, stderr=subprocess.STDOUT) as background:
            status = subprocess.run([*pytest, *sorted(others)], check=False).returncode
        output.seek(0)
        print(output.read())
    return max(status, background.returncode, key=abs)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
