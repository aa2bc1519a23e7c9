"""Python programs in subprocesses."""

import multiprocessing
import os
import pathlib
import runpy
import subprocess
import sys
import tempfile


def python(*arguments, check=True, **variables):
    """Run Python with this folder on its path; an environment variable that is None is removed.

    Returns
    -------
    subprocess.CompletedProcess
        With ``stdout`` and ``stderr`` as text.
    """
    command = [sys.executable, *map(str, arguments)]
    options = {"capture_output": True, "text": True, "timeout": 600, "check": False}
    completed = subprocess.run(command, env=environment(variables), **options)
    assert completed.returncode == 0 or not check, completed.stderr[-3000:]
    return completed


def python_with_torch(*arguments, **variables):
    """As `python`, but in a fork of a process that has imported torch and what torch_xla imports of it.

    This saves 4 of 5 s per program. With a GPU it is not a fork, because importing torch initialises CUDA, which a
    forked process cannot use.
    """
    if os.path.exists("/dev/nvidia0"):
        return python(*arguments, **variables)
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch", "functorch.compile", "torch._inductor.fx_passes.post_grad"])
    with tempfile.TemporaryDirectory() as folder:
        outputs = [pathlib.Path(folder, name) for name in ("stdout", "stderr")]
        process = context.Process(target=_run, args=(list(map(str, arguments)), environment(variables), outputs))
        process.start()
        process.join(600)
        stdout, stderr = (path.read_text() for path in outputs)
    assert process.exitcode == 0, stderr[-3000:]
    return subprocess.CompletedProcess(arguments, process.exitcode, stdout, stderr)


def environment(variables):
    """The environment of a program with this folder on its path; a variable that is None is removed."""
    paths = os.pathsep.join(filter(None, [str(pathlib.Path(__file__).parent), os.environ.get("PYTHONPATH")]))
    merged = {**os.environ, "PYTHONPATH": paths, **variables}
    return {name: value for name, value in merged.items() if value is not None}


def _run(arguments, environment, outputs):
    """Run a program in this process: "-c" and its text, "-m" and a module, or a file; then its arguments."""
    os.environ.clear()
    os.environ.update(environment)
    for number, path in enumerate(outputs, 1):
        os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT), number)
    first, *sys.argv = arguments
    if first == "-c":
        exec(compile(sys.argv[0], "<string>", "exec"), {"__name__": "__main__"})
    elif first == "-m":
        runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
    else:
        sys.argv = arguments
        runpy.run_path(first, run_name="__main__")
