"""Runs the cases of one runtime in this Python and prints a line of JSON for each; `run.py` starts it.

Needs NumPy, ml_dtypes, the runtime (jax, or torch and torch_xla) and the installed wheel. The first line has the
installed versions; the last line marks a complete run.

    python tests/matrix/suite.py jax
"""

import hashlib
import importlib
import json
import pathlib
import platform
import sys
import traceback

import numpy as np

HERE = pathlib.Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent / "python")]  # the latter has calls.py and conformance_table.py


def report(**line):
    """Print a line of JSON."""
    print(json.dumps(line), flush=True)


def main(runtime):
    """The number of failed cases."""
    from case import Skip
    from xla_attention import _library

    part = importlib.import_module(f"{runtime}_cases")
    library = hashlib.sha256(_library.library_path().read_bytes()).hexdigest()
    name, ffi = part.runtime()
    python = platform.python_version() + sys.abiflags
    versions = {"python": python, "numpy": np.__version__, "runtime": name, "ffi": ffi}
    report(kind="start", **versions, library=library)
    failed = 0
    for case in part.cases():
        if isinstance(case, Skip):
            report(kind="skip", group=case.group, reason=case.reason)
            continue
        report(kind="try", group=case.group, name=case.name)  # names the case if it crashes
        error = None
        try:
            case.run()
        except Exception:
            error = traceback.format_exc(limit=-3)
            failed += 1
        report(kind="case", group=case.group, name=case.name, error=error)
    report(kind="end")
    return failed


if __name__ == "__main__":
    sys.exit(1 if main(sys.argv[1]) else 0)
