"""The requirements that `make` installs: those of pyproject.toml, locked with hashes."""

import importlib.util
import pathlib
import tomllib

ROOT = pathlib.Path(__file__).resolve().parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())


def locked(file):
    """The hashes of each requirement of a file."""
    entries = (ROOT / "build_support" / file).read_text().replace("\\\n", " ").splitlines()
    requirements = {
        words[0].replace("_", "-").lower(): words[1:] for words in map(str.split, entries) if words and words[0] != "#"
    }
    assert all(hashes and all(h.startswith("--hash=sha256:") for h in hashes) for hashes in requirements.values())
    return requirements


def test_every_requirement_of_the_build_is_locked_at_its_version_with_hashes():
    expected = [r for r in PROJECT["build-system"]["requires"] if not r.startswith("pip>")]
    actual = locked("requirements.txt") | locked("nvcc_requirements.txt")
    assert set(expected) <= set(actual), "run `make lock`"
    # The wheels for x86_64 and aarch64.
    assert all(len(hashes) == 2 for name, hashes in actual.items() if name.startswith("nvidia-"))


def test_every_requirement_of_the_tests_the_demo_and_its_model_is_locked():
    groups = PROJECT["dependency-groups"]
    demo = set(groups["demo"])
    assert demo <= set(locked("demo_requirements.txt")), "run `make lock`"
    expected = demo | {requirement.replace("_", "-") for requirement in groups["test"]}
    # The tests keep the versions of the demo.
    assert expected | set(locked("demo_requirements.txt")) <= set(locked("test_requirements.txt")), "run `make lock`"
    serve = demo | set(groups["serve"])
    assert serve <= set(locked("serve_requirements.txt")), "run `make lock`"
    # The server's tests have the versions of the server.
    expected = set(locked("serve_requirements.txt")) | set(groups["serve_test"])
    assert expected <= set(locked("serve_test_requirements.txt")), "run `make lock`"
    for group in ("model", "xla_gpu"):
        assert set(groups[group]) == set(locked(f"{group}_requirements.txt")), "run `make lock`"


def test_make_installs_them_by_their_hashes():
    rules = (ROOT / "Makefile").read_text()
    for file in ("requirements.txt", "nvcc_requirements.txt", "$(1)_requirements.txt", "model_requirements.txt"):
        assert f"--require-hashes -r build_support/{file}" in rules
    for file in ("demo", "test", "xla_gpu", "serve", "serve_test"):
        assert f"$(call install,{file}," in rules


def test_the_bill_of_materials_has_the_versions_of_what_is_no_crate():
    spec = importlib.util.spec_from_file_location("sbom", ROOT / "build_support/sbom.py")
    sbom = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(sbom)
    pins = tomllib.loads((ROOT / "xla_headers/pin.toml").read_text())
    found = {(component["name"], component["version"]) for component in sbom.components()}
    assert {("jaxlib", pin["jaxlib"]) for pin in pins.values()} < found
    assert {name for name, _ in found} == {*sbom.COMPILED_IN, "jaxlib"}
    assert set(locked("release_requirements.txt")) >= {f"ziglang=={dict(found)['ziglang']}"}
