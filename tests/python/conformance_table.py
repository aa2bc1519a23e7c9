"""The tables of tests/conformance as calls, for the drivers that use XLA; see `tests/conformance/README.md`."""

import dataclasses
import functools
import pathlib
import re
import tomllib

import ml_dtypes
import numpy as np

FOLDER = pathlib.Path(__file__).resolve().parents[1] / "conformance"

# NumPy's names of XLA's element types.
NUMPY = {
    "pred": "bool",
    "i": "int",
    "u": "uint",
    "f": "float",
    "c": "complex",
    "bf16": ml_dtypes.bfloat16,
    "f8e4m3fn": ml_dtypes.float8_e4m3fn,
    "f8e5m2": ml_dtypes.float8_e5m2,
}
ERRORS = ("INVALID_ARGUMENT", "UNIMPLEMENTED")
# Defaults of a table's keys.
DEFAULTS = {"optional_operands": [], "optional_results": [], "aliases": {}, "attributes": {}}


@dataclasses.dataclass(frozen=True)
class Buffer:
    """An operand, or an expected result: "f32[2,3] 1 2" has the values 1 2 1 2 1 2."""

    element: str
    shape: tuple[int, ...]
    values: tuple[str, ...]

    @classmethod
    def read(cls, text):
        kind, *values = text.split()
        element, sizes = kind.removesuffix("]").split("[")
        return cls(element, tuple(int(size) for size in sizes.split(",") if size), tuple(values))

    @property
    def dtype(self):
        name = NUMPY.get(self.element) or NUMPY[self.element[0]] + self.element[1:]
        return np.dtype(name)

    def array(self):
        """The values, repeated to fill the shape; zeros if there are none."""
        values = np.array([number(v) for v in self.values or ["0"]], object).astype(self.dtype)
        return np.resize(values, self.shape)

    def matches(self, actual):
        assert actual.dtype == self.dtype
        assert actual.shape == self.shape
        if self.values == ("any",):
            return True
        expected, actual = (x.astype(np.float64) for x in (self.array(), actual))
        tolerance = np.where(np.isfinite(expected), 1e-4 * np.maximum(1, np.abs(expected)), 0)
        with np.errstate(invalid="ignore"):
            return bool(np.all((expected == actual) | (np.abs(expected - actual) <= tolerance)))


def number(text):
    try:
        return int(text)
    except ValueError:
        return float(text)


@dataclasses.dataclass(frozen=True)
class Case:
    """One call: operands, results and attributes in order, and the code and text of its error, None if it is valid."""

    target: str
    name: str
    operands: tuple[Buffer, ...]
    results: tuple[Buffer, ...]
    attributes: dict[str, str]
    aliases: dict[int, int]
    terms: frozenset[str]
    code: str | None
    text: str | None

    def __str__(self):
        return f"{self.target}: {self.name}"


@functools.cache
def cases():
    """Every case, for every name of its target; the valid calls of a table come first."""
    tables = [tomllib.loads(path.read_text()) for path in sorted(FOLDER.glob("tables/*.toml"))]
    by_name = {table["names"][0]: table for table in tables}
    return [case for table in tables for case in _read(_with_inherited(table, by_name))]


def ffi_header_errors():
    """Calls of paged_attention that XLA's FFI header rejects before our code runs: one for each of its texts."""
    valid = next(case for case in cases() if case.target == "xla_gpu_paged_attention")

    def rejected(name, text, operands=valid.operands, **attributes):
        changed = {k: v for k, v in sorted({**valid.attributes, **attributes}.items()) if v != "absent"}
        return dataclasses.replace(
            valid, name=name, operands=operands, attributes=changed, code="INVALID_ARGUMENT", text=text
        )

    def undecoded(index, diagnostic):
        # Before the attributes come the thread pool, 15 operands, 3 results and the remaining ones of both kinds.
        failed = f"Failed to decode all FFI handler operands (bad operands at: {21 + index})"
        return f"[execute] {failed}\nDiagnostics:\n{diagnostic}"

    names = "batch_invariant", "scale", "sliding_window", "soft_cap"
    wrong_number = "Wrong number of attributes: expected 4 but got {} with name(s): {}".format
    return [
        rejected("too few operands", "Wrong number of arguments: expected at least -4 but got 5", valid.operands[:5]),
        rejected("too many attributes", wrong_number(5, ", ".join([*names, "zeal"])), zeal="i64 1"),
        rejected("a missing attribute", wrong_number(3, ", ".join(names[:3])), soft_cap="absent"),
        rejected(
            "a scalar of another type", undecoded(1, "Wrong scalar data type: expected F32 but got F64"), scale="f64 1"
        ),
        rejected(
            "not a scalar",
            undecoded(2, "Wrong attribute type: expected scalar but got string"),
            sliding_window="text 1",
        ),
        rejected(
            "another attribute name",
            undecoded(3, "Attribute name mismatch: soft_capz vs soft_cap"),
            soft_cap="absent",
            soft_capz="f32 0",
        ),
    ]


@functools.cache
def drivers():
    """For each driver: what it cannot express, by the table's term, and the least number of cases that it runs."""
    return tomllib.loads((FOLDER / "drivers.toml").read_text())


def skipped_for(case, driver):
    """Why a driver skips a case, or None."""
    reasons = drivers()[driver]["cannot_express"]
    return next((f"{term}: {reason}" for term, reason in reasons.items() if term in case.terms), None)


def _with_inherited(table, by_name):
    """The table with what it inherits from the one that its `like` names."""
    base = by_name.get(table.get("like"), {})
    both = {key: base[key] for key in base.keys() & table.keys() - {"names"}}
    own = {key: x + table[key] if isinstance(x, list) else x | table[key] for key, x in both.items()}
    return DEFAULTS | base | table | own


def _filled(part):
    """The cases of a part of a table: one per line, or one per list of words that replace {0}, {1} and so on."""
    for left, value in part.items():
        text, *each = [value, ""] if isinstance(value, str) else value
        for words in map(str.split, each):
            filled = re.sub(r"\{(\d)\}", lambda index, words=words: words[int(index[1])], f"{left}\n{text}")
            yield filled.split("\n")


def _read(table):
    table["works"] = dict(_filled(table["works"]))
    for part in ("operand", "result"):
        if optional := table[f"optional_{part}s"]:
            table["works"][f"every optional {part}"] = "; ".join(optional)
    calls = {"the valid call": {}} | {name: _changed(table, changes) for name, changes in table["works"].items()}
    for code in ERRORS:
        for changes, template in _filled(table.get(code, {})):
            text = f"{table['names'][0]}: {template.replace('{types}', table.get('types', ''))}"
            calls[changes] = {**_changed(table, changes), code: text}
    for target in table["names"]:
        for name, case in calls.items():
            code = next((code for code in ERRORS if code in case), None)
            attributes = table["attributes"] | case.get("attributes", {})
            operands, results = (_buffers(table, part, case) for part in ("operands", "results"))
            yield Case(
                target=target,
                name=name,
                operands=operands,
                results=results,
                attributes={name: value for name, value in sorted(attributes.items()) if value != "absent"},
                aliases=_aliases(table, operands, results),
                terms=frozenset(case),
                code=code,
                text=case.get(code),
            )


def _changed(table, text):
    """`stacked pages: v bf16[0]; softcap f32 1`: the valid call of this name, or the first one, with changes."""
    start, _, changes = text.rpartition(": ")
    case = _changed(table, table["works"][start]) if start else {"operands": {}, "results": {}, "attributes": {}}
    operands = {entry.split()[0] for entry in (*table["operands"], *table["optional_operands"])}
    for change in changes.split("; "):
        subject, what = change.split(" ", 1)
        if subject == "memory":
            case["memory"] = what
        elif what in ("operands", "results"):
            case[f"{what[:-1]}_count"] = int(subject)
        elif subject == "result":
            name, buffer = what.split(" ", 1)
            case["results"][name] = buffer
        else:
            part = "attributes" if "[" not in what else "operands" if subject in operands else "results"
            case[part][subject] = what
    return case


def _buffers(table, part, case):
    """The required buffers, and the optional ones up to the last that the case names; `[0]` for one that it omits."""
    required, optional = ([entry.split(" ", 1) for entry in table[key]] for key in (part, f"optional_{part}"))
    changed = dict(case.get(part, {}))
    for result, operand in table["aliases"].items() if part == "results" else ():
        if operand in case.get("operands", {}):
            changed.setdefault(result, case["operands"][operand])
    unknown = changed.keys() - {name for name, _ in required + optional}
    assert not unknown, f"{table['names'][0]} has no {part} {unknown}"
    buffers = [Buffer.read(changed.get(name, default)) for name, default in required]
    last = max((i for i, (name, _) in enumerate(optional) if name in changed), default=-1)
    left_out = [Buffer(Buffer.read(default).element, (0,), ()) for _, default in optional]
    buffers += [
        Buffer.read(changed[name]) if name in changed else left_out[i]
        for i, (name, _) in enumerate(optional[: last + 1])
    ]
    count = case.get(f"{part[:-1]}_count", len(buffers))
    spare = left_out[last + 1 :] + [Buffer("f32", (0,), ())] * count
    return tuple((buffers + spare)[:count] if count > len(buffers) else buffers[:count])


def _aliases(table, operands, results):
    """Result index by operand index, of those that a call has."""
    parts = (table[part] + table[f"optional_{part}"] for part in ("operands", "results"))
    names = [[entry.split()[0] for entry in part] for part in parts]
    places = {names[0].index(operand): names[1].index(result) for result, operand in table["aliases"].items()}

    def is_given(buffers, index):
        return index < len(buffers) and buffers[index].shape != (0,)

    return {i: j for i, j in places.items() if is_given(operands, i) and is_given(results, j)}
