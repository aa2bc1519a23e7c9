"""`make integrations`: runs the test of each project of environments.toml with the built wheel.

python tests/integrations/run.py                 all; writes docs/integrations.md
python tests/integrations/run.py --ci            those of .ci/run
python tests/integrations/run.py transformers    the named ones
"""

import datetime
import os
import pathlib
import subprocess
import sys
import tempfile
import time
import xml.etree.ElementTree as ElementTree
from typing import NamedTuple

HERE = pathlib.Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent / "matrix"))

from environments import ROOT, CannotMakeError, chosen, environments, make, wheel  # noqa: E402
from report import markdown, write  # noqa: E402

DOCUMENT = ROOT / "docs/integrations.md"
TIMEOUT = 1200  # seconds per project
HAS_GPU = os.path.exists("/dev/nvidia0")


class Row(NamedTuple):
    """The result of one project."""

    project: str  # with its version
    passed: int
    skipped: int
    result: str


def run(environment, path):
    """The row of an environment; prints the output of failures."""
    project, began = pinned(environment), time.monotonic()
    try:
        # The environments of `make matrix` are in the same folder.
        python, variables = make({**environment, "name": f"with-{environment['name']}"}, path)
    except CannotMakeError as error:
        return Row(project, 0, 0, str(error))
    if HAS_GPU:
        variables.pop("JAX_PLATFORMS")
    made = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        results = pathlib.Path(folder, "results.xml")
        command = [python, "-m", "pytest", "-q", "-p", "no:cacheprovider", f"--junitxml={results}"]
        command.append(str(HERE / f"test_{environment['name']}.py"))
        try:
            done = subprocess.run(
                command, env=variables, cwd="/", stdout=subprocess.PIPE, stderr=subprocess.STDOUT, timeout=TIMEOUT
            )
            status, output = done.returncode, done.stdout
        except subprocess.TimeoutExpired as expired:
            status, output = f"none after {TIMEOUT} s", expired.stdout or b""
        row = _row(project, results.read_text() if results.exists() else "", status)
    if row.result != "passed":
        print(output.decode(errors="replace")[-20_000:])
    ended = time.monotonic()
    print(
        f"{project}: {row.passed} tests passed, {row.skipped} skipped, {row.result} "
        f"({made - began:.0f} s to make, {ended - made:.0f} s to run)",
        flush=True,
    )
    return row


def pinned(environment):
    """The project and its version."""
    (version,) = (
        version
        for name, _, version in (package.partition("==") for package in environment["packages"])
        if name == environment["name"]
    )
    return f"{environment['name']} {version}"


def _row(project, results, status):
    """The row of a run: anything but an exit status of 0 with passed tests is a problem.

    Parameters
    ----------
    results : str
        pytest's file of results (JUnit's XML); empty if there is none.
    status : int or str
        The exit status.
    """
    suites = ElementTree.fromstring(results).iter("testsuite") if results else ()
    counts = dict.fromkeys(("tests", "failures", "errors", "skipped"), 0)
    for suite in suites:
        for name in counts:
            counts[name] += int(suite.get(name))
    failed = counts["failures"] + counts["errors"]
    passed = counts["tests"] - counts["skipped"] - failed
    result = "passed" if passed and status == 0 and not failed else f"exit status {status}"
    if failed:
        result = f"{failed} failed"
    return Row(project, passed, counts["skipped"], result)


def table(rows):
    """The rows as a Markdown table."""
    lines = [["project", "tests passed", "skipped", "result"], ["---", "---:", "---:", "---"]]
    return markdown(lines + [[row.project, str(row.passed), str(row.skipped), row.result] for row in rows])


def main(arguments):
    """The number of projects that failed."""
    path, library = wheel()
    rows = [run(environment, path) for environment in chosen(environments(HERE), arguments)]
    device = "CPU and GPU" if HAS_GPU else "CPU"
    text = f"{datetime.date.today()}, {device}, `{path.name}`, library {library[:16]}.\n\n{table(rows)}\n"
    if arguments:
        print(text)
    else:
        write(DOCUMENT, "make integrations", text)
    return sum(row.result != "passed" for row in rows)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
