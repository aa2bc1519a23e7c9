"""The operators as ``ffi/operators.toml`` declares them, read from the shared library (`xa_info`)."""

import functools
from collections.abc import Collection, Mapping
from typing import Any, NamedTuple

import numpy as np

from . import _library

_TYPES = {"bool": np.bool_, "i64": np.int64, "f32": np.float32}


class Tensor(NamedTuple):
    """An operand or a result."""

    name: str
    type: str  # dtypes and shape, in words
    doc: str
    optional: bool


class Attribute(NamedTuple):
    """An attribute; ``none`` is its value where the option is off, None if it has to be given."""

    name: str
    kind: str  # bool, i64 or f32
    doc: str
    none: bool | int | float | None


class Operator(NamedTuple):
    """One target: its operands, results and attributes, in order."""

    target: str
    operands: tuple[Tensor, ...]
    results: tuple[Tensor, ...]
    attributes: tuple[Attribute, ...]
    aliases: Mapping[int, int]  # the index of the operand that a result updates, by the index of the result

    def typed(self, values: Mapping[str, Any]) -> dict[str, np.generic]:
        """Attributes by name as numpy scalars of the declared types; None switches an option off."""
        typed = {}
        for name, kind, _, none in self.attributes:
            value = values[name]
            typed[name] = _TYPES[kind](none if value is None else value)
        return typed

    def attributes_of(self, options: object) -> dict[str, Any]:
        """The attributes by name, from an object that has a field for each."""
        return {attribute.name: getattr(options, attribute.name) for attribute in self.attributes}

    def result_index(self, name: str) -> int:
        """The index of the result with this name."""
        return [result.name for result in self.results].index(name)

    def required_tensors(self, *, in_place: bool = False) -> str:
        """The required operands as the parameters of a torch schema; `in_place` marks those that are mutated."""
        alias_sets = dict(zip(self.aliases.values(), "ab", strict=False)) if in_place else {}
        types = {i: f"Tensor({letter}!)" for i, letter in alias_sets.items()}
        required = [operand.name for operand in self.operands if not operand.optional]
        return ", ".join(f"{types.get(i, 'Tensor')} {name}" for i, name in enumerate(required))

    def optional_tensors(self, *, without: Collection[str] = ()) -> str:
        """The optional operands as the parameters of a torch schema, except those `without`."""
        names = [operand.name for operand in self.operands if operand.optional and operand.name not in without]
        return ", ".join(f"Tensor? {name}=None" for name in names)


@functools.cache
def operators() -> dict[str, Operator]:
    """Every operator, by its target name."""
    return {declared["target"]: _operator(declared) for declared in _library.build_info()["operators"]}


def operator(target: str) -> Operator:
    """The operator with this target name."""
    return operators()[target]


def _operator(declared: Mapping[str, Any]) -> Operator:
    tensors = [
        tuple(Tensor(t["name"], t["type"], t["doc"], t["optional"]) for t in declared[side])
        for side in ("operands", "results")
    ]
    attributes = (Attribute(a["name"], a["kind"], a["doc"], a.get("none")) for a in declared["attributes"])
    names = [operand.name for operand in tensors[0]]
    aliases = {i: names.index(r["aliases"]) for i, r in enumerate(declared["results"]) if "aliases" in r}
    return Operator(declared["target"], *tensors, tuple(attributes), aliases)
