"""The table of docs/compatibility.md, from the output of the suite in each environment; tables in documents."""

import json
import re
from typing import NamedTuple

GROUPS = ("registration", "StableHLO", "refusals", "threads", "functions")


class Row(NamedTuple):
    """The result of one environment."""

    name: str
    start: dict  # the suite's first line
    passed: dict  # number of passed cases by group
    problems: list  # texts; empty if all is well
    skips: list  # (group, reason)


def row(name, output, returncode, library):
    """The row of an environment: anything but a complete run in which all cases pass is a problem.

    Parameters
    ----------
    output : str
        Lines of JSON.
    library : str
        Hash of the library in the wheel, which has to be the one that ran.
    """
    lines = [json.loads(line) for line in output.splitlines() if line.startswith('{"kind"')]
    kinds = [line["kind"] for line in lines]
    start = lines[0] if kinds[:1] == ["start"] else {}
    cases = [line for line in lines if line["kind"] == "case"]
    failed = [line for line in cases if line["error"]]
    problems = [f"{line['group']}: {line['name']} failed" for line in failed]
    if kinds[-1:] != ["end"]:
        where = f"in {lines[-1]['group']}: {lines[-1]['name']}" if kinds[-1:] == ["try"] else "outside of a case"
        problems.append(f"ended {where}, exit status {returncode}")
    elif returncode != bool(failed):
        problems.append(f"exit status {returncode}")
    if start and start["library"] != library:
        problems.append("another library than the wheel's was loaded")
    passed = {group: sum(c["group"] == group and not c["error"] for c in cases) for group in GROUPS}
    skips = [(line["group"], line["reason"]) for line in lines if line["kind"] == "skip"]
    problems += [
        f"no case of {group}" for group in GROUPS if not any(group in (x.get("group"), x.get("name")) for x in lines)
    ]
    return Row(name, start, passed, problems, skips)


def markdown(lines):
    """Lines of cells, of which the first two are the head, as a Markdown table."""
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def write(document, command, text):
    """Replace what is between ``<!-- command -->`` and ``<!-- end -->`` in a document."""
    begin, end = f"<!-- {command} -->\n", "<!-- end -->"
    pattern = re.compile(re.escape(begin) + ".*" + re.escape(end), re.DOTALL)
    before = document.read_text()
    assert pattern.search(before), f"{document} has no marks"
    document.write_text(pattern.sub(lambda _: begin + text + end, before))
    print(f"{document} written")


def table(rows):
    """The rows as a Markdown table, with notes on skipped groups."""
    head = ["runtime", "Python", "NumPy", "XLA FFI", *GROUPS, "cases", "result"]
    lines = [head, ["---", "---", "---", "---", *(["---:"] * (len(GROUPS) + 1)), "---"]]
    notes = []
    for row in rows:
        counts = []
        for group in GROUPS:
            reason = next((reason for skipped, reason in row.skips if skipped == group), None)
            if reason is not None and reason not in notes:
                notes.append(reason)
            counts.append(str(row.passed.get(group, 0)) if reason is None else f"({notes.index(reason) + 1})")
        start = [row.start.get(key, "-") for key in ("runtime", "python", "numpy", "ffi")]
        start[0] = row.name if start[0] == "-" else start[0]
        lines.append([*start, *counts, str(sum(row.passed.values())), "; ".join(row.problems) or "passed"])
    return "\n".join([markdown(lines), "", *(f"({i}) {note}.\n" for i, note in enumerate(notes, 1))])
