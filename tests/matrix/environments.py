"""Creates the environments of an environments.toml under target/matrix, and recreates those whose pins change."""

import hashlib
import os
import pathlib
import platform
import shutil
import subprocess
import sys
import tomllib
import zipfile

HERE = pathlib.Path(__file__).resolve().parent
ROOT = HERE.parents[1]
FOLDER = ROOT / "target/matrix"
# Older ones do not know the wheels for Python without a global interpreter lock.
PIP = "pip==26.2"


class CannotMakeError(Exception):
    """An environment that cannot be created here; the reason goes into the table."""


def environments(folder=HERE):
    """The rows of a folder's environments.toml."""
    return tomllib.loads((folder / "environments.toml").read_text())["environment"]


def chosen(rows, arguments):
    """The rows that the command line names: all, with ``--ci`` those of .ci/run, or those with these names."""
    if arguments == ["--ci"]:
        return [row for row in rows if row.get("ci")]
    unknown = set(arguments) - {row["name"] for row in rows}
    if unknown:
        sys.exit(f"not in environments.toml: {', '.join(sorted(unknown))}")
    return [row for row in rows if not arguments or row["name"] in arguments]


def wheel():
    """The path of the newest wheel in dist/ for this machine, and the hash of its library."""
    wheels = sorted(ROOT.glob(f"dist/*_{platform.machine()}.whl"), key=os.path.getmtime)
    if not wheels:
        sys.exit("no wheel in dist/: run `make wheel`")
    with zipfile.ZipFile(wheels[-1]) as archive:
        (library,) = (name for name in archive.namelist() if name.endswith("libxla_attention.so"))
        return wheels[-1], hashlib.sha256(archive.read(library)).hexdigest()


def make(environment, wheel):
    """Create an environment and install the wheel in it.

    Returns
    -------
    python : str
        Its interpreter.
    variables : dict
        Its environment variables.
    """
    folder = FOLDER / environment["name"]
    variables = {k: v for k, v in os.environ.items() if not k.startswith(("PYTHON", "JAX_", "XLA_", "PJRT_"))}
    variables |= {"JAX_PLATFORMS": "cpu", "PJRT_DEVICE": "CPU"}
    if "uses" in environment:
        python = ROOT / environment["uses"] / "bin/python3"
        if not python.exists():
            raise CannotMakeError(f"{environment['uses']} is not there")
        own, packages = folder / "wheel", folder / "packages"
        if not _is_made(folder, pins := "\n".join(environment.get("packages", []))):
            shutil.rmtree(folder, ignore_errors=True)
            if pins:
                _pip("install", "--target", str(packages), "--no-deps", "--no-compile", *environment["packages"])
            _finish(folder, pins)
        shutil.rmtree(own, ignore_errors=True)
        _pip("install", "--target", str(own), "--no-deps", str(wheel))
        return str(python), {**variables, "PYTHONPATH": f"{own}{os.pathsep}{packages}"}
    python = folder / "bin/python3"
    base = _base_python(environment.get("python"))
    if not _is_made(folder, pins := "\n".join([base, *environment["packages"]])):
        shutil.rmtree(folder, ignore_errors=True)
        subprocess.run([base, "-m", "venv", "--without-pip", str(folder)], check=True)
        _pip("--python", str(python), "install", "--no-deps", "--no-compile", *environment["packages"])
        _finish(folder, pins)
    _pip("--python", str(python), "install", "--force-reinstall", "--no-deps", "--no-compile", str(wheel))
    return str(python), variables


def _is_made(folder, pins):
    stamp = folder / "pins.txt"
    return stamp.exists() and stamp.read_text() == pins


def _finish(folder, pins):
    """Write the stamp of a complete environment."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "pins.txt").write_text(pins)


def _base_python(version):
    """An interpreter of a version, from PATH or pyenv; by default the one of this process."""
    own = f"{sys.version_info.major}.{sys.version_info.minor}{sys.abiflags}"
    if version in (None, own):
        return str(pathlib.Path(sys.base_prefix, "bin/python3"))
    pyenv = pathlib.Path(os.environ.get("PYENV_ROOT", pathlib.Path.home() / ".pyenv"))
    installed = sorted(pyenv.glob(f"versions/{version.rstrip('t')}.*/bin/python{version}"))
    # pyenv has shims even for versions that are not selected: they fail. The command python3.14 may be python3.14t.
    print_version = "import sys; print(*sys.version_info[:2], sep='.', end=sys.abiflags)"
    for candidate in filter(None, [shutil.which(f"python{version}"), *installed]):
        done = subprocess.run([candidate, "-c", print_version], capture_output=True, text=True, check=False)
        if done.stdout == version:
            return str(candidate)
    raise CannotMakeError(f"no Python {version} on this machine")


def _pip(*arguments):
    folder = FOLDER / PIP
    if not (folder / "pip").exists():
        command = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check", "install", "--no-compile"]
        subprocess.run([*command, f"--target={folder}", PIP], check=True)
    command = [sys.executable, str(folder / "pip"), "--quiet", "--disable-pip-version-check", *arguments]
    status = subprocess.run(command, check=False).returncode
    if status:
        raise CannotMakeError(f"pip could not install its packages, exit status {status}")
