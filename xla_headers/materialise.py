"""Put the pinned XLA FFI headers into the folders ``oldest`` and ``newest`` of the folder that is the only argument.

Headers come from the installed jaxlib if their hashes match ``pin.toml``, otherwise from the smallest wheel of the
pinned version, which ``pip download`` fetches. On failure the exit code is 1 and one line on standard error says why.
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
from typing import NamedTuple

HERE = pathlib.Path(__file__).resolve().parent
# The wheels of all platforms hold the same headers; this one is the smallest (54 to 58 MB).
WHEEL = ["--python-version=3.12", "--implementation=cp", "--platform=macosx_11_0_arm64"]


class Pin(NamedTuple):
    """A table of ``pin.toml``: the version of jaxlib, and the sha256 of each header."""

    jaxlib: str
    sha256: dict[str, str]

    def differing(self, headers: dict[str, bytes]) -> list[str]:
        """Names of the headers whose sha256 is not the pinned one."""
        return [n for n, wanted in self.sha256.items() if hashlib.sha256(headers[n]).hexdigest() != wanted]

    def read_all(self, read: Callable[[str], bytes]) -> dict[str, bytes] | None:
        """Read every pinned header with ``read``; None if one is missing."""
        try:
            return {name: read(name) for name in self.sha256}
        except (OSError, KeyError):
            return None

    def installed(self) -> dict[str, bytes] | None:
        """The headers of an installed jaxlib, if they are the pinned ones."""
        spec = importlib.util.find_spec("jaxlib")
        if spec is None or not spec.submodule_search_locations:
            return None
        base = pathlib.Path(spec.submodule_search_locations[0]) / "include/xla/ffi/api"
        headers = self.read_all(lambda name: (base / name).read_bytes())
        return headers if headers and not self.differing(headers) else None

    def downloaded(self) -> dict[str, bytes]:
        """The headers of the pinned jaxlib wheel."""
        requirement = f"jaxlib=={self.jaxlib}"
        with tempfile.TemporaryDirectory() as tmp:
            pip = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-deps"]
            result = subprocess.run(
                [*pip, "--only-binary=:all:", *WHEEL, "--dest", tmp, requirement], stdout=subprocess.DEVNULL
            )
            wheels = list(pathlib.Path(tmp).glob("*.whl"))
            if result.returncode or len(wheels) != 1:
                sys.exit(
                    f"xla_headers: `pip download {requirement}` failed; give pip a registry that has it, or point "
                    "XLA_FFI_INCLUDE_DIR at a folder that holds xla/ffi/api/{c_api,api,ffi}.h"
                )
            with zipfile.ZipFile(wheels[0]) as wheel:
                headers = self.read_all(lambda name: wheel.read(f"jaxlib/include/xla/ffi/api/{name}"))
        if headers is None:
            sys.exit(f"xla_headers: {wheels[0].name} does not hold {', '.join(self.sha256)}")
        return headers

    def materialise(self, folder: pathlib.Path) -> None:
        """Write the headers to ``folder`` unless it holds the pinned ones already."""
        present = self.read_all(lambda name: (folder / name).read_bytes())
        if present and not self.differing(present):
            return
        headers = self.installed() or self.downloaded()
        if wrong := self.differing(headers):
            sys.exit(
                f"xla_headers: {', '.join(wrong)} of jaxlib {self.jaxlib}: sha256 differs from the pin in "
                f"{HERE}/pin.toml"
            )
        folder.mkdir(parents=True, exist_ok=True)
        for name, data in headers.items():
            # Written under another name and renamed, because two cargo processes may do this at the same time.
            aside = folder / f".{name}.{os.getpid()}"
            aside.write_bytes(data)
            aside.replace(folder / name)


def main(folder: pathlib.Path) -> None:
    """Write the headers of each pin."""
    for name, pin in tomllib.loads((HERE / "pin.toml").read_text()).items():
        Pin(**pin).materialise(folder / name / "xla/ffi/api")


if __name__ == "__main__":
    main(pathlib.Path(sys.argv[1]))
