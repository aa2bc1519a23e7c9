"""What `make` installs is what pyproject.toml asks for, at hashes."""

import pathlib
import tomllib

ROOT = pathlib.Path(__file__).resolve().parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())


def locked(file):
    """The hashes of each requirement of a file."""
    entries = (ROOT / "build_support" / file).read_text().replace("\\\n", " ").splitlines()
    found = {words[0].replace("_", "-"): words[1:] for words in map(str.split, entries) if words and words[0] != "#"}
    assert all(hashes and all(h.startswith("--hash=sha256:") for h in hashes) for hashes in found.values())
    return found


def test_every_requirement_of_the_build_is_locked_at_its_version_with_hashes():
    wanted = [r for r in PROJECT["build-system"]["requires"] if not r.startswith("pip>")]
    found = locked("requirements.txt")
    assert set(wanted) <= set(found), "run `make lock`"
    # A wheel for x86_64 and one for aarch64.
    assert all(len(hashes) == 2 for name, hashes in found.items() if name.startswith("nvidia-"))


def test_every_requirement_of_the_tests_the_demo_and_its_model_is_locked():
    groups = PROJECT["dependency-groups"]
    demo = set(groups["demo"])
    assert demo <= set(locked("demo_requirements.txt")), "run `make lock`"
    wanted = demo | {requirement.replace("_", "-") for requirement in groups["test"]}
    # What the demo has installed, the tests leave as it is.
    assert wanted | set(locked("demo_requirements.txt")) <= set(locked("test_requirements.txt")), "run `make lock`"
    for group in ("model", "xla_gpu"):
        assert set(groups[group]) == set(locked(f"{group}_requirements.txt")), "run `make lock`"


def test_make_installs_them_by_their_hashes():
    rules = (ROOT / "Makefile").read_text()
    for file in ("requirements.txt", "$(1)_requirements.txt", "model_requirements.txt"):
        assert f"--require-hashes -r build_support/{file}" in rules
    for file in ("demo", "test", "xla_gpu"):
        assert f"$(call install,{file}," in rules
