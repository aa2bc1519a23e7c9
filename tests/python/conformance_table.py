"""The table of tests/conformance as calls, for the drivers that go through XLA; `tests/conformance/README.md`."""

import dataclasses
import functools
import pathlib
import tomllib

import ml_dtypes
import numpy as np

FOLDER = pathlib.Path(__file__).resolve().parents[1] / "conformance"

# numpy's names of XLA's element types, where they differ.
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


@dataclasses.dataclass(frozen=True)
class Buffer:
    """An operand, or a result and what it has to hold: "f32[2,3] 1 2" is 1 2 1 2 1 2."""

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
        """The values, over and over; zeros without any."""
        values = np.array([number(v) for v in self.values or ["0"]], object).astype(self.dtype)
        return np.resize(values, self.shape)

    def is_met_by(self, found):
        assert found.dtype == self.dtype
        assert found.shape == self.shape
        if self.values == ("any",):
            return True
        wanted, found = (x.astype(np.float64) for x in (self.array(), found))
        tolerance = np.where(np.isfinite(wanted), 1e-4 * np.maximum(1, np.abs(wanted)), 0)
        with np.errstate(invalid="ignore"):
            return bool(np.all((wanted == found) | (np.abs(wanted - found) <= tolerance)))


def number(text):
    try:
        return int(text)
    except ValueError:
        return float(text)


@dataclasses.dataclass(frozen=True)
class Case:
    """One call: operands, results and attributes by name, in order, and what comes of it; without a code it works."""

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
    """Every case for every name of its target, the right calls first."""
    return [case for path in sorted(FOLDER.glob("tables/*.toml")) for case in _read(tomllib.loads(path.read_text()))]


@functools.cache
def drivers():
    """What each driver cannot express, by the table's term for it, and how many cases it runs at least."""
    return tomllib.loads((FOLDER / "drivers.toml").read_text())


def skipped_for(case, driver):
    """The reason for which a driver skips a case, or None."""
    reasons = drivers()[driver]["cannot_express"]
    return next((f"{term}: {reason}" for term, reason in reasons.items() if term in case.terms), None)


def _read(table):
    changes = {"the right call": {}}
    for case in (*table["case"], *_counts(table), *_attributes(table)):
        start = changes[case["from"]] if "from" in case else {}
        parts = {part: start.get(part, {}) | case.get(part, {}) for part in ("operands", "results", "attributes")}
        changes[case["name"]] = {**case, **parts}
    for target in table["names"]:
        for name, case in changes.items():
            code = next((code for code in ERRORS if code in case), None)
            attributes = table["attributes"] | case.get("attributes", {})
            operands, results = (_buffers(table, part, case) for part in ("operands", "results"))
            yield Case(
                target=target,
                name=name,
                operands=operands,
                results=results,
                attributes={name: value for name, value in attributes.items() if value != "absent"},
                aliases=_aliases(table),
                terms=frozenset(case),
                code=code,
                text=case.get(code),
            )


# What `tests/support/conformance/derived.rs` derives as well.


def _counts(table):
    """Too few operands and results, too many, and optional ones without an element."""
    for part, in_header in (("operand", "arguments"), ("result", "results")):
        required, optional = len(table[f"{part}s"]), len(table[f"optional_{part}s"])
        most = required + optional
        for n in range(required):
            text = f"Wrong number of {in_header}: expected at least {required - 1 - optional} but got {n}"
            yield {"name": f"{n} {part}s", f"{part}_count": n, "INVALID_ARGUMENT": text}
        for n in range(required + 1, most + 1):
            yield {"name": f"{n} {part}s, the optional ones without an element", f"{part}_count": n}
        for n in (1, 3):
            text = f"{table['names'][0]}: {most + n} {part}s given, at most {most} expected"
            yield {"name": f"{n} {part}s too many", f"{part}_count": most + n, "INVALID_ARGUMENT": text}


_SCALARS = {"i1": ("i32 0", "i64 1"), "i64": ("i32 1", "f32 1"), "f32": ("i64 1", "f64 0.5")}
_IN_HEADER = {"i1": "PRED", "i32": "S32", "i64": "S64", "f32": "F32", "f64": "F64", "text": "string", "i64s": "array"}


def _attributes(table):
    """Each attribute missing, and of four other types."""
    parts = ("operands", "optional_operands", "results", "optional_results")
    # What the header decodes before the attributes: the thread pool, buffers, and those that remain of both kinds.
    before = 1 + sum(len(table[part]) for part in parts) + 2
    names = sorted(table["attributes"])
    for index, name in enumerate(names):
        others = [other for other in names if other != name]
        named = f" with name(s): {', '.join(others)}" if others else ""
        text = f"Wrong number of attributes: expected {len(names)} but got {len(others)}{named}"
        yield {"name": f"{name} is missing", "attributes": {name: "absent"}, "INVALID_ARGUMENT": text}
        kind = table["attributes"][name].split()[0]
        for value in (*_SCALARS[kind], "text 1", "i64s 1 2"):
            got = value.split()[0]
            is_scalar = got not in ("text", "i64s")
            wrong = "scalar data type" if is_scalar else "attribute type"
            expected = _IN_HEADER[kind] if is_scalar else "scalar"
            text = f"[execute] Failed to decode all FFI handler operands (bad operands at: {before + index})\n"
            text += f"Diagnostics:\nWrong {wrong}: expected {expected} but got {_IN_HEADER[got]}"
            yield {"name": f"{name} is {value}", "attributes": {name: value}, "INVALID_ARGUMENT": text}


def _buffers(table, part, case):
    """Required ones, and optional ones up to the last that the case names; `[0]` for one before it."""
    required, optional = ([entry.split(" ", 1) for entry in table[key]] for key in (part, f"optional_{part}"))
    changed = case.get(part, {})
    unknown = changed.keys() - {name for name, _ in required + optional}
    assert not unknown, f"{table['names'][0]} has no {part} {unknown}"
    given = [Buffer.read(changed.get(name, right)) for name, right in required]
    last = max((i for i, (name, _) in enumerate(optional) if name in changed), default=-1)
    left_out = [Buffer(Buffer.read(right).element, (0,), ()) for _, right in optional]
    given += [
        Buffer.read(changed[name]) if name in changed else left_out[i]
        for i, (name, _) in enumerate(optional[: last + 1])
    ]
    count = case.get(f"{part[:-1]}_count", len(given))
    spare = left_out[last + 1 :] + [Buffer("f32", (0,), ())] * count
    return tuple((given + spare)[:count] if count > len(given) else given[:count])


def _aliases(table):
    """Result index by operand index."""
    names = {part: [entry.split()[0] for entry in table[part]] for part in ("operands", "results")}
    return {
        names["operands"].index(operand): names["results"].index(result) for result, operand in table["aliases"].items()
    }
