"""A table of the errors that the Rust tests measured, from the file that XLA_ATTENTION_TEST_SUMMARY names.

`python tests/gpu/summary.py FILE` prints it in Markdown. The file has a line per test and combination of dtypes
(`tests/support/summary.rs`); the table merges the tests of a topic.
"""

import dataclasses
import pathlib
import sys


@dataclasses.dataclass
class Row:
    """The cases of a topic on a device in one combination of dtypes."""

    cases: int = 0
    error_ratio: float | None = None  # largest error / naive error
    bound_fraction: float = 0.0  # largest error / allowed error

    def add(self, cases: str, error_ratio: str, bound_fraction: str) -> None:
        """Merge a line of the file; `error_ratio` is `-` where the naive error is too small to divide by."""
        self.cases += int(cases)
        if error_ratio != "-":
            self.error_ratio = max(float(error_ratio), self.error_ratio or 0.0)
        self.bound_fraction = max(float(bound_fraction), self.bound_fraction)


def table(path: pathlib.Path) -> str:
    """The table in Markdown; empty without a file."""
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
        ratio = "-" if row.error_ratio is None else f"{row.error_ratio:.2f}"
        lines.append(f"| {device} | {topic} | {dtypes} | {row.cases} | {ratio} | {row.bound_fraction:.2f} |")
    return "\n".join(lines)


if __name__ == "__main__":
    print(table(pathlib.Path(sys.argv[1])))
