"""The Python tests in two processes at once, for two cores: `make test` runs this. Arguments go to both.

    python tests/python/in_two_processes.py -m "not slow"

One has torch and most of what starts programs of its own; the other, which is shown first, has all else and imports no
torch. Where there is a GPU it is one process: some tests look at how much of its memory is free.
"""

import os
import pathlib
import subprocess
import sys
import tempfile

HERE = pathlib.Path(__file__).parent
TORCH = ("torch_*", "debugging_torch_xla", "documentation", "refusals")
PROGRAMS = ("check", "gpu_programs", "info", "register")


def main(arguments: list[str]) -> int:
    """The exit status of pytest, of two the worse one."""
    of_torch = {path for name in TORCH + PROGRAMS for path in HERE.glob(f"test_{name}.py")}
    others = set(HERE.glob("test_*.py")) - of_torch
    pytest = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", *arguments]
    if os.path.exists("/dev/nvidia0"):
        return subprocess.run(pytest, check=False).returncode
    with tempfile.TemporaryFile("w+") as said:
        with subprocess.Popen([*pytest, *sorted(of_torch)], stdout=said, stderr=subprocess.STDOUT) as beside:
            status = subprocess.run([*pytest, *sorted(others)], check=False).returncode
        said.seek(0)
        print(said.read())
    return max(status, beside.returncode, key=abs)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
