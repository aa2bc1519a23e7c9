"""The table of tests/conformance as calls, for the drivers that go through XLA; `tests/conformance/README.md`."""

import dataclasses
import functools
import math
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
    calls = {"the right call": {}}
    for name, changes in table["works"].items():
        calls[name] = _changed(table, changes)
    for code in ERRORS:
        for changes, told in table.get(code, {}).items():
            text = f"{table['names'][0]}: {told.replace('{types}', table.get('types', ''))}"
            calls[changes] = {**_changed(table, changes), code: text}
    for derived in (*_counts(table), *_attributes(table), *_expected(table)):
        calls.setdefault(derived["name"], derived)
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
                aliases=_aliases(table),
                terms=frozenset(case),
                code=code,
                text=case.get(code),
            )


def _changed(table, text):
    """`stacked pages: v bf16[0]; softcap f32 1`: the call that works by this name, or the right one, with changes."""
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
    """All that is wrong with the attributes' number, names and types."""
    parts = ("operands", "optional_operands", "results", "optional_results")
    # What the header decodes before the attributes: the thread pool, buffers, and those that remain of both kinds.
    before = 1 + sum(len(table[part]) for part in parts) + 2
    names = sorted(table["attributes"])

    def wrong(name, text, **attributes):
        return {"name": name, "attributes": attributes, "INVALID_ARGUMENT": text}

    def wrong_number(given):
        named = f" with name(s): {', '.join(given)}" if given else ""
        return f"Wrong number of attributes: expected {len(names)} but got {len(given)}{named}"

    def undecoded(index, why):
        decoded = f"[execute] Failed to decode all FFI handler operands (bad operands at: {before + index})"
        return f"{decoded}\nDiagnostics:\n{why}"

    if not names:
        return
    yield wrong("an attribute too many", wrong_number([*names, "zeal"]), zeal="i64 1")
    if len(names) > 1:
        yield wrong("no attribute", wrong_number([]), **dict.fromkeys(names, "absent"))
    for index, name in enumerate(names):
        missing = wrong_number([other for other in names if other != name])
        yield wrong(f"{name} is missing", missing, **{name: "absent"})
        value = table["attributes"][name]
        kind = value.split()[0]
        for other in (*_SCALARS[kind], "text 1", "i64s 1 2"):
            got = other.split()[0]
            is_scalar = got not in ("text", "i64s")
            what = "scalar data type" if is_scalar else "attribute type"
            expected = _IN_HEADER[kind] if is_scalar else "scalar"
            text = undecoded(index, f"Wrong {what}: expected {expected} but got {_IN_HEADER[got]}")
            yield wrong(f"{name} is {other}", text, **{name: other})
        if name == names[-1]:
            text = undecoded(index, f"Attribute name mismatch: {name}z vs {name}")
            yield wrong(f"{name} is called {name}z", text, **{name: "absent", f"{name}z": value})


def _expected(table):
    """Buffers of other types, ranks and sizes, and attributes with other values; the table says what they should be."""
    target = table["names"][0]
    for subject, text in table["expects"].items():
        expected, _, values = text.partition(": ")
        if values:
            kind = table["attributes"][subject].split()[0]
            for value in values.split():
                told = f"{target}: {subject} is {value}, expected {expected}"
                change = f"{kind} {value}"
                yield {"name": f"{subject} {change}", "attributes": {subject: change}, "INVALID_ARGUMENT": told}
        else:
            yield from _other_buffers(table, subject, text)


def _other_buffers(table, subject, expected):
    name = subject.removeprefix("result ")
    parts = ("operands", "optional_operands", "results", "optional_results")[2 if name != subject else 0 :]
    found = ((part, entry.split()[1]) for part in parts for entry in table[part] if entry.split()[0] == name)
    part, right = next(found)
    right = Buffer.read(right)
    dtypes, bracket, shapes = expected.partition("[")
    dtypes, shapes = dtypes.split(" or ") if dtypes else [], bracket + shapes

    def wrong(element, shape, what):
        buffer = f"{element}[{','.join(map(str, shape))}]"
        change = {part.removeprefix("optional_"): {name: buffer}}
        return {
            "name": f"{subject} {buffer}",
            **change,
            "INVALID_ARGUMENT": f"{table['names'][0]}: {subject} has {what}",
        }

    accepted = [dtype.strip() for dtype in dtypes]
    others = "bf16 f16 f64 f8e4m3fn f32" if "f" in right.element else "i64 u32 f32 i8"
    others = [dtype for dtype in others.split() if accepted and dtype not in accepted]
    for element in others[:3]:
        yield wrong(element, right.shape, f"dtype {element}, expected {' or '.join(accepted)}")
    for shape in sorted(_near(right.shape)):
        if not _fits(shape, shapes) and not (part.startswith("optional") and shape == (0,)):
            yield wrong(right.element, shape, f"shape {list(shape)}, expected {shapes}")


def _near(shape):
    """Shapes of other ranks, also of as many elements, of the sizes in reverse, and with one other size."""
    sizes = ((*shape[:i], m, *shape[i + 1 :]) for i, n in enumerate(shape) for m in (n - 1, n + 1, n + 2, 2 * n))
    ranks = ((*shape, 1), (1, *shape), (*shape[:-2], math.prod(shape[-2:])), (math.prod(shape),), shape[:-1], (), (0,))
    return {*ranks, shape[::-1], *sizes} - {shape}


def _fits(shape, shapes):
    """`[1] or [Hkv=2]`: sizes are numbers, names of sizes with their number, or names of any size."""
    if not shapes:
        return True
    for one in shapes.split(" or "):
        sizes = [size.rsplit("=", 1)[-1] for size in one.strip("[]").split(", ") if size]
        if len(sizes) == len(shape) and all(not s.isdigit() or int(s) == n for s, n in zip(sizes, shape, strict=True)):
            return True
    return False


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
