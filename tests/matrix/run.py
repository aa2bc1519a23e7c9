"""`make matrix`: runs the suite with the built wheel in the runtimes of environments.toml.

python tests/matrix/run.py               all; writes docs/compatibility.md
python tests/matrix/run.py --ci          those of .ci/run
python tests/matrix/run.py jax-0.7.2     the named ones
"""

import datetime
import json
import subprocess
import sys
import tempfile
import time

from environments import HERE, ROOT, CannotMakeError, chosen, environments, make, wheel
from report import Row, row, table, write

DOCUMENT = ROOT / "docs/compatibility.md"
TIMEOUT = 300  # seconds per suite


def run(environment, path, library):
    """The row of an environment; prints failures."""
    name, began = environment["name"], time.monotonic()
    try:
        python, variables = make(environment, path)
    except CannotMakeError as error:
        return Row(name, {}, {}, [str(error)], [])
    made = time.monotonic()
    command = [python, str(HERE / "suite.py"), environment["runtime"]]
    with tempfile.TemporaryFile("w+") as stdout, tempfile.TemporaryFile("w+") as stderr:
        try:
            status = subprocess.run(
                command, env=variables, cwd="/", stdout=stdout, stderr=stderr, timeout=TIMEOUT
            ).returncode
        except subprocess.TimeoutExpired:
            status = f"none after {TIMEOUT} s"
        stdout.seek(0)
        output = stdout.read()
        result = row(name, output, status, library)
        if result.problems:
            stderr.seek(0)
            print(_tracebacks(output), stderr.read()[-3000:], sep="\n")
    ended = time.monotonic()
    print(
        f"{name}: {sum(result.passed.values())} cases, {'; '.join(result.problems) or 'passed'} "
        f"({made - began:.0f} s to make, {ended - made:.0f} s to run)",
        flush=True,
    )
    return result


def _tracebacks(output):
    lines = [json.loads(line) for line in output.splitlines() if line.startswith('{"kind": "case"')]
    return "\n".join(f"{line['name']}\n{line['error']}" for line in lines if line["error"])


def main(arguments):
    """The number of environments that failed."""
    path, library = wheel()
    rows = [run(environment, path, library) for environment in chosen(environments(), arguments)]
    text = f"{datetime.date.today()}, `{path.name}`, library {library[:16]}.\n\n{table(rows)}"
    if arguments:
        print(text)
    else:
        write(DOCUMENT, "make matrix", text)
    return sum(bool(row.problems) for row in rows)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
