"""The runners of `make matrix` and `make integrations` detect failures, and their documents have all environments."""

import importlib.util
import json
import pathlib
import re

import pytest

ROOT = pathlib.Path(__file__).resolve().parents[2]


def load(name, folder="matrix"):
    spec = importlib.util.spec_from_file_location(f"{folder}_{name}", ROOT / f"tests/{folder}/{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


report, environments, integrations = load("report"), load("environments"), load("run", "integrations")
START = {"kind": "start", "python": "3.11.7", "numpy": "2.0", "runtime": "jax 9.9.9", "ffi": "0.1", "library": "abc"}


def row(*lines, returncode=0, library="abc"):
    return report.row("jax-9", "\n".join(json.dumps(line) for line in lines), returncode, library)


def cases(*, without=(), error=None):
    """Output lines with one case per group; `error` is the error of the last one."""
    groups = [group for group in report.GROUPS if group not in without]
    for group in groups:
        yield {"kind": "try", "group": group, "name": "this"}
        yield {"kind": "case", "group": group, "name": "this", "error": error if group == groups[-1] else None}


END = {"kind": "end"}
SKIP = {"kind": "skip", "group": "functions", "reason": "there are none"}


def test_a_complete_run_has_no_problem_and_reports_skipped_groups():
    assert row(START, *cases(), END).problems == []
    skipping = row(START, *cases(without=["functions"]), SKIP, END)
    assert skipping.problems == []
    text = report.table([skipping])
    assert "| jax 9.9.9 | 3.11.7 | 2.0 | 0.1 | 1 | 1 | 1 | 1 | (1) | 4 | passed |" in text
    assert "(1) there are none." in text


@pytest.mark.parametrize(
    ("result", "problem"),
    [
        (row(START, *cases(error="no"), END, returncode=1), "functions: this failed"),
        (row(START, *cases(), {"kind": "try", "group": "functions", "name": "next"}, returncode=-11),
         "ended in functions: next, exit status -11"),
        (row(START, *cases()), "ended outside of a case, exit status 0"),
        (row(returncode=1), "ended outside of a case, exit status 1"),
        (row(START, *cases(), END, returncode=1), "exit status 1"),
        (row(START, *cases(), END, library="def"), "another library than the wheel's was loaded"),
        (row(START, *cases(without=["threads"]), END), "no case of threads"),
    ],
    ids=["a failure", "a crash", "an early end", "no output", "a crash at the end", "another library", "no cases"],
)  # fmt: skip
def test_an_incomplete_run_is_a_problem(result, problem):
    assert problem in result.problems
    assert problem in report.table([result])


def test_the_table_has_every_environment_and_all_passed():
    text = (ROOT / "docs/compatibility.md").read_text()
    rows = re.findall(r"^\| ((?:jax|torch_xla|torch) \S+) \|.*\| (.*) \|$", text, re.MULTILINE)
    pins = {
        tuple(pin for pin in environment.get("packages", []) if pin.startswith("jax==")) or environment["name"]
        for environment in environments.environments()
    }
    names = {pin if isinstance(pin, str) else pin[0].replace("jax==", "jax-") for pin in pins}
    assert {name.replace(" ", "-") for name, _ in rows} == names
    assert len(rows) == len(environments.environments())
    assert {result for _, result in rows} == {"passed"}


def test_every_package_is_pinned_and_ci_runs_the_headers_version():
    pin = re.search(r'jaxlib = "(.*)"', (ROOT / "xla_headers/pin.toml").read_text())[1]
    in_ci = []
    for environment in environments.environments():
        assert all("==" in package for package in environment.get("packages", []))
        in_ci += environment.get("packages", []) if environment.get("ci") else []
    assert f"jaxlib=={pin}" in in_ci


RESULTS = '<testsuites><testsuite tests="{}" failures="{}" errors="{}" skipped="{}" /></testsuites>'


@pytest.mark.parametrize(
    ("results", "status", "result"),
    [
        (RESULTS.format(5, 0, 0, 2), 0, "passed"),
        (RESULTS.format(5, 1, 1, 2), 1, "2 failed"),
        (RESULTS.format(5, 0, 0, 2), -11, "exit status -11"),
        (RESULTS.format(2, 0, 0, 2), 0, "exit status 0"),
        ("", "none after 9 s", "exit status none after 9 s"),
    ],
    ids=["all passed", "failures", "a crash at the end", "all skipped", "too long"],
)
def test_a_project_passes_only_with_passed_tests_and_without_a_failure(results, status, result):
    row = integrations._row("other 1.0", results, status)
    assert row.result == result
    assert f"| {result} |" in integrations.table([row])


def test_the_table_of_projects_has_every_environment_and_all_passed():
    text = (ROOT / "docs/integrations.md").read_text()
    rows = re.findall(r"^\| (\S+ \d\S*) \| \d+ \| \d+ \| (.*) \|$", text, re.MULTILINE)
    rows_of = environments.environments(ROOT / "tests/integrations")
    assert [name for name, _ in rows] == [integrations.pinned(row) for row in rows_of]
    assert {result for _, result in rows} == {"passed"}
    assert all("==" in package for row in rows_of for package in row["packages"])
