"""What the Rust tests measured, as a table: the file that XLA_ATTENTION_TEST_SUMMARY named.

`python tests/gpu/summary.py FILE` prints it in Markdown. The file has a line for each test and element types
(`tests/support/summary.rs`); the table joins the tests of a topic.
"""

import dataclasses
import pathlib
import sys


@dataclasses.dataclass
class Row:
    """The cases of one topic on one device in one combination of element types."""

    cases: int = 0
    units: float | None = None
    share: float = 0.0

    def add(self, cases: str, units: str, share: str) -> None:
        """Take in a line of the file; `units` is `-` where the naive error was too small to be a measure."""
        self.cases += int(cases)
        if units != "-":
            self.units = max(float(units), self.units or 0.0)
        self.share = max(float(share), self.share)


def table(path: pathlib.Path) -> str:
    """The table in Markdown; empty if nothing was measured."""
    if not path.is_file():
        return ""
    rows: dict[tuple[str, str, str], Row] = {}
    total = Row()
    for line in path.read_text().splitlines():
        topic, _test, device, dtypes, *numbers = line.split("\t")
        for row in (rows.setdefault((device, topic, dtypes), Row()), total):
            row.add(*numbers)
    lines = [
        "| device | test | q over K, V to out | cases | largest error / naive error | largest error / allowed |",
        "|---|---|---|---:|---:|---:|",
    ]
    for (device, topic, dtypes), row in [*sorted(rows.items()), (("", "all", ""), total)]:
        units = "-" if row.units is None else f"{row.units:.2f}"
        lines.append(f"| {device} | {topic} | {dtypes} | {row.cases} | {units} | {row.share:.2f} |")
    return "\n".join(lines)


if __name__ == "__main__":
    print(table(pathlib.Path(sys.argv[1])))
