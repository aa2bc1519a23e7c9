"""What a build installs is what pyproject.toml asks for, at hashes."""

import pathlib
import tomllib

ROOT = pathlib.Path(__file__).resolve().parents[2]


def test_every_requirement_of_the_build_is_locked_at_its_version_with_hashes():
    entries = (ROOT / "build_support/requirements.txt").read_text().replace("\\\n", " ").splitlines()
    locked = {words[0]: words[1:] for words in map(str.split, entries) if words and words[0] != "#"}
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    wanted = [r for r in project["build-system"]["requires"] if not r.startswith("pip>")]
    assert set(wanted) <= set(locked), "run `make lock`"
    assert all(hashes and all(h.startswith("--hash=sha256:") for h in hashes) for hashes in locked.values())
    # A wheel for x86_64 and one for aarch64.
    assert all(len(hashes) == 2 for name, hashes in locked.items() if name.startswith("nvidia-"))
