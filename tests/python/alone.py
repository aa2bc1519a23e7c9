"""Programs of their own."""

import os
import pathlib
import subprocess
import sys


def python(*arguments, check=True, **variables):
    """Run Python, which finds the modules of this folder; a variable that is None is not set.

    Returns
    -------
    subprocess.CompletedProcess
        With ``stdout`` and ``stderr`` as text.
    """
    paths = os.pathsep.join(filter(None, [str(pathlib.Path(__file__).parent), os.environ.get("PYTHONPATH")]))
    environment = {**os.environ, "PYTHONPATH": paths, **variables}
    environment = {name: value for name, value in environment.items() if value is not None}
    command = [sys.executable, *map(str, arguments)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0 or not check, done.stderr[-3000:]
    return done
