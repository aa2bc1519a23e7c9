"""`make matrix`: the built wheel in every runtime of environments.toml, and the table of what ran.

python tests/matrix/run.py               all, and docs/compatibility.md is written
python tests/matrix/run.py --ci          those that .ci/run runs
python tests/matrix/run.py jax-0.7.2     some, by name
"""

import datetime
import json
import re
import subprocess
import sys
import tempfile
import time

from environments import HERE, ROOT, CannotMakeError, environments, make, wheel
from report import Row, row, table

DOCUMENT = ROOT / "docs/compatibility.md"
LIMIT = 300  # seconds that a suite may take


def run(environment, path, library):
    """One environment's row; what failed is printed."""
    name, began = environment["name"], time.monotonic()
    try:
        python, variables = make(environment, path)
    except CannotMakeError as error:
        return Row(name, {}, {}, [str(error)], [])
    made = time.monotonic()
    command = [python, str(HERE / "suite.py"), environment["runtime"]]
    with tempfile.TemporaryFile("w+") as said, tempfile.TemporaryFile("w+") as errors:
        try:
            status = subprocess.run(
                command, env=variables, cwd="/", stdout=said, stderr=errors, timeout=LIMIT
            ).returncode
        except subprocess.TimeoutExpired:
            status = f"none after {LIMIT} s"
        said.seek(0)
        output = said.read()
        result = row(name, output, status, library)
        if result.problems:
            errors.seek(0)
            print(_tracebacks(output), errors.read()[-3000:], sep="\n")
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
    """How many environments failed."""
    chosen = environments()
    if arguments == ["--ci"]:
        chosen = [one for one in chosen if one.get("ci")]
    elif arguments:
        unknown = set(arguments) - {one["name"] for one in chosen}
        if unknown:
            sys.exit(f"not in environments.toml: {', '.join(sorted(unknown))}")
        chosen = [one for one in chosen if one["name"] in arguments]
    path, library = wheel()
    rows = [run(environment, path, library) for environment in chosen]
    text = f"{datetime.date.today()}, `{path.name}`, library {library[:16]}.\n\n{table(rows)}"
    if arguments:
        print(text)
    else:
        # Everything between the two marks is the table.
        begin, end = "<!-- make matrix -->\n", "<!-- end -->"
        pattern = re.compile(re.escape(begin) + ".*" + re.escape(end), re.DOTALL)
        document = DOCUMENT.read_text()
        assert pattern.search(document), f"{DOCUMENT} has no marks"
        DOCUMENT.write_text(pattern.sub(lambda _: begin + text + end, document))
        print(f"{DOCUMENT} written")
    return sum(bool(one.problems) for one in rows)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
