"""The environments of environments.toml: virtual environments under target/matrix, made when their pins change."""

import hashlib
import os
import pathlib
import shutil
import subprocess
import sys
import tomllib
import zipfile

HERE = pathlib.Path(__file__).resolve().parent
ROOT = HERE.parents[1]
FOLDER = ROOT / "target/matrix"


class CannotMakeError(Exception):
    """An environment that cannot be made here; the table says why."""


def environments():
    """The rows of environments.toml."""
    return tomllib.loads((HERE / "environments.toml").read_text())["environment"]


def wheel():
    """The built wheel, and the hash of the library in it."""
    found = sorted(ROOT.glob("dist/*.whl"), key=os.path.getmtime)
    if not found:
        sys.exit("no wheel in dist/: run `make wheel`")
    with zipfile.ZipFile(found[-1]) as archive:
        (library,) = (name for name in archive.namelist() if name.endswith("libxla_attention.so"))
        return found[-1], hashlib.sha256(archive.read(library)).hexdigest()


def make(environment, wheel):
    """Make an environment and install the wheel in it.

    Returns
    -------
    python : str
        What runs there.
    variables : dict
        The environment variables that it runs with.
    """
    folder = FOLDER / environment["name"]
    variables = {k: v for k, v in os.environ.items() if not k.startswith(("PYTHON", "JAX_", "XLA_", "PJRT_"))}
    variables |= {"JAX_PLATFORMS": "cpu", "PJRT_DEVICE": "CPU"}
    if "uses" in environment:
        python = ROOT / environment["uses"] / "bin/python3"
        if not python.exists():
            raise CannotMakeError(f"{environment['uses']} is not there")
        shutil.rmtree(folder, ignore_errors=True)
        _pip("install", "--target", str(folder), "--no-deps", str(wheel))
        return str(python), {**variables, "PYTHONPATH": str(folder)}
    python = folder / "bin/python3"
    base = _base_python(environment.get("python"))
    pins, stamp = "\n".join([base, *environment["packages"]]), folder / "pins.txt"
    if not stamp.exists() or stamp.read_text() != pins:
        shutil.rmtree(folder, ignore_errors=True)
        subprocess.run([base, "-m", "venv", "--without-pip", str(folder)], check=True)
        _pip("--python", str(python), "install", "--no-deps", "--no-compile", *environment["packages"])
        stamp.write_text(pins)
    _pip("--python", str(python), "install", "--force-reinstall", "--no-deps", "--no-compile", str(wheel))
    return str(python), variables


def _base_python(version):
    """An interpreter: this one, or the one of a version, out of PATH or of pyenv."""
    if version is None or version == f"{sys.version_info.major}.{sys.version_info.minor}":
        return str(pathlib.Path(sys.base_prefix, "bin/python3"))
    pyenv = pathlib.Path(os.environ.get("PYENV_ROOT", pathlib.Path.home() / ".pyenv"))
    candidates = [shutil.which(f"python{version}"), *sorted(pyenv.glob(f"versions/{version}.*/bin/python3"))]
    for candidate in filter(None, candidates):
        # A shim of pyenv is there for versions that are not chosen, too.
        if subprocess.run([candidate, "-c", ""], capture_output=True, check=False).returncode == 0:
            return str(candidate)
    raise CannotMakeError(f"no Python {version} on this machine")


def _pip(*arguments):
    command = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check", *arguments]
    status = subprocess.run(command, check=False).returncode
    if status:
        raise CannotMakeError(f"pip could not install its packages, exit status {status}")
