"""What `make` says where a tool, the network or the disk is missing, and what it leaves behind when it is ended."""

import os
import pathlib
import shutil
import signal
import subprocess
import sys
import time

import pytest

ROOT = pathlib.Path(__file__).resolve().parents[2]
# What prepare.sh itself runs.
COMMANDS = ("sh", "tail", "rm")


def prepare(tmp_path, **programs):
    """Run prepare.sh with these programs, which are scripts, alone on PATH."""
    folder = tmp_path / "bin"
    folder.mkdir()
    for name in COMMANDS:
        (folder / name).symlink_to(shutil.which(name))
    for name, program in programs.items():
        file = folder / {"cxx": "c++"}.get(name, name)
        file.write_text(f"#!/bin/sh\n{program}\n")
        file.chmod(0o755)
    environment = {"PATH": str(folder)}
    command = [shutil.which("sh"), ROOT / "build_support/prepare.sh", tmp_path / "venv"]
    return subprocess.run(command, env=environment, capture_output=True, text=True)


TOOLS = {"cargo": "echo cargo 1.91.0", "cc": "", "cxx": "", "python3": f'exec {sys.executable} "$@"'}
NO_MODULE = f"""case "$2" in *ensurepip*) exit 1; esac; exec {sys.executable} "$@" """
HALF = 'case "$2" in venv) mkdir -p "$4/bin"; echo half; echo No space left on device; exit 1; esac; exit 0'


@pytest.mark.parametrize(
    ("changed", "expected"),
    [
        ({"cargo": None}, "cargo is missing: install Rust 1.91 or newer (https://rustup.rs)"),
        ({"cargo": "echo cargo 1.75.0"}, "cargo 1.75.0 is too old: install Rust 1.91 or newer (rustup update)"),
        ({"cc": None}, "cc is missing: install gcc"),
        ({"cxx": None}, "c++ is missing or cannot compile C++17: install g++"),
        ({"python3": None}, "python3 is missing: install Python 3.11 or newer"),
        ({"python3": "echo Python 3.10.4; [ $1 = --version ]"}, "Python 3.10.4 is too old"),
        ({"python3": NO_MODULE}, "python3 has no venv module: install it"),
        ({"python3": HALF}, "python3 -m venv failed: No space left on device"),
    ],
)
def test_one_line_says_what_is_missing(tmp_path, changed, expected):
    tools = {name: text for name, text in (TOOLS | changed).items() if text is not None}
    result = prepare(tmp_path, **tools)
    *others, line = result.stderr.splitlines()
    assert result.returncode == 1
    assert line.startswith(f"make: {expected}")
    assert not [other for other in others if "not found" not in other]
    assert not (tmp_path / "venv").exists()


def test_an_incomplete_environment_is_made_again(tmp_path):
    (tmp_path / "venv/bin").mkdir(parents=True)
    (tmp_path / "venv/bin/python3").symlink_to(sys.executable)
    assert prepare(tmp_path, **TOOLS).returncode == 0
    pip = subprocess.run([tmp_path / "venv/bin/python3", "-m", "pip", "--version"], capture_output=True, text=True)
    assert "pip" in pip.stdout, pip.stderr


def test_without_a_network_one_line_says_so():
    # Nothing listens on port 9.
    arguments = ["--index-url", "http://127.0.0.1:9/simple", "--retries=1", "--no-cache-dir", "no-such-package"]
    command = [sys.executable, ROOT / "build_support/pip_install.py", *arguments]
    result = subprocess.run(command, capture_output=True, text=True)
    assert result.returncode == 1
    assert result.stderr.splitlines() == [
        "make: pip failed: the package index cannot be reached: check the network, or set PIP_INDEX_URL; then run make "
        "again, which continues here"
    ]


@pytest.mark.parametrize("ended", ["hook", "parent"])
def test_the_compilers_end_with_the_build(tmp_path, ended):
    pytest.importorskip("hatchling")
    number = tmp_path / "number"
    cargo = tmp_path / "cargo"
    cargo.write_text(f"#!/bin/sh\nsleep 60 & echo $! > {number}.new; mv {number}.new {number}; wait\n")
    cargo.chmod(0o755)
    environment = os.environ | {"PATH": f"{tmp_path}:{os.environ['PATH']}"}
    hook = [sys.executable, str(ROOT / "hatch_build.py")]
    # As pip, which waits for the hook.
    parent = [sys.executable, "-c", f"import subprocess; subprocess.run({hook!r})"]
    with subprocess.Popen(hook if ended == "hook" else parent, env=environment) as process:
        wait_until(number.exists)
        process.send_signal(signal.SIGTERM if ended == "hook" else signal.SIGKILL)
    compiler = int(number.read_text())
    wait_until(lambda: not is_running(compiler))


def wait_until(condition):
    deadline = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def is_running(number):
    try:
        state = pathlib.Path(f"/proc/{number}/stat").read_text().rsplit(")", 1)[1].split()[0]
    except OSError:
        return False
    return state != "Z"
