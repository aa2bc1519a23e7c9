"""Put the pinned XLA FFI headers into ``xla_headers/include`` (ignored by git).

They come from an installed jaxlib if its bytes match ``pin.toml``, otherwise out of the smallest wheel of the pinned
version, fetched with ``pip download``. Exit code 1 and one line on standard error say what went wrong.
"""

import hashlib
import importlib.util
import os
import pathlib
import subprocess
import sys
import tempfile
import tomllib
import zipfile
from collections.abc import Callable

HERE = pathlib.Path(__file__).resolve().parent
PIN = tomllib.loads((HERE / "pin.toml").read_text())
VERSION: str = PIN["jaxlib"]
OUT = HERE / "include/xla/ffi/api"
# Any platform's wheel holds the same headers; this one is the smallest (54 MB).
WHEEL = ["--python-version=3.12", "--implementation=cp", "--platform=macosx_11_0_arm64"]


def differing(headers: dict[str, bytes]) -> list[str]:
    """Names of the headers whose sha256 is not the pinned one."""
    return [n for n, wanted in PIN["sha256"].items() if hashlib.sha256(headers[n]).hexdigest() != wanted]


def read_all(read: Callable[[str], bytes]) -> dict[str, bytes] | None:
    """Every pinned header through ``read``, or None where one is missing."""
    try:
        return {name: read(name) for name in PIN["sha256"]}
    except (OSError, KeyError):
        return None


def installed() -> dict[str, bytes] | None:
    """The headers of an installed jaxlib, if they are the pinned ones."""
    spec = importlib.util.find_spec("jaxlib")
    if spec is None or not spec.submodule_search_locations:
        return None
    base = pathlib.Path(spec.submodule_search_locations[0]) / "include/xla/ffi/api"
    headers = read_all(lambda name: (base / name).read_bytes())
    return headers if headers and not differing(headers) else None


def downloaded() -> dict[str, bytes]:
    """The headers out of the pinned jaxlib wheel."""
    with tempfile.TemporaryDirectory() as tmp:
        pip = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-deps"]
        result = subprocess.run(
            [*pip, "--only-binary=:all:", *WHEEL, "--dest", tmp, f"jaxlib=={VERSION}"], stdout=subprocess.DEVNULL
        )
        wheels = list(pathlib.Path(tmp).glob("*.whl"))
        if result.returncode or len(wheels) != 1:
            sys.exit(
                f"xla_headers: `pip download jaxlib=={VERSION}` failed; give pip a registry that has it, or point "
                "XLA_FFI_INCLUDE_DIR at a folder that holds xla/ffi/api/{c_api,api,ffi}.h"
            )
        with zipfile.ZipFile(wheels[0]) as wheel:
            headers = read_all(lambda name: wheel.read(f"jaxlib/include/xla/ffi/api/{name}"))
    if headers is None:
        sys.exit(f"xla_headers: {wheels[0].name} does not hold {', '.join(PIN['sha256'])}")
    return headers


def main() -> None:
    """Materialise the headers unless the pinned bytes are there already."""
    present = read_all(lambda name: (OUT / name).read_bytes())
    if present and not differing(present):
        return
    headers = installed() or downloaded()
    if wrong := differing(headers):
        sys.exit(f"xla_headers: {', '.join(wrong)} of jaxlib {VERSION}: sha256 differs from the pin in {HERE}/pin.toml")
    OUT.mkdir(parents=True, exist_ok=True)
    for name, data in headers.items():
        # Two cargo processes may be here at once: write aside, then rename.
        aside = OUT / f".{name}.{os.getpid()}"
        aside.write_bytes(data)
        aside.replace(OUT / name)


if __name__ == "__main__":
    main()
