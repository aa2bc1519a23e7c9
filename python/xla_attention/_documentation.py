"""Docstrings whose parameter descriptions come from ``ffi/operators.toml``, which all front-ends share."""

import inspect
import re
import textwrap
from collections.abc import Callable
from typing import TypeVar

from ._operators import Attribute, Tensor, operator

_Function = TypeVar("_Function", bound=Callable)

# Abbreviations in `ffi/operators.toml`.
_DTYPES = {
    "Q ": "f16, bf16, f32 or f8e4m3fn ",
    "KV ": "of the query's dtype, or f8e4m3fn or f8e5m2 under f16 or bf16 queries, ",
}
_PARAMETERS = re.compile(r"(?<=\nParameters\n----------\n).*?(?=\n\n\w+\n---|\Z)", re.DOTALL)
_ENTRY = re.compile(r"^(\w+)( : .*)((?:\n    .*)*)", re.MULTILINE)
_PLACEHOLDER = "..."
_INDENT, _WIDTH = 4 * " ", 116


def documented(target: str) -> Callable[[_Function], _Function]:
    """Complete the docstring of a function that calls a target.

    A parameter without a description gets that of the operand or attribute with its name; in a description that begins
    with ``...`` it replaces these.
    """
    declared = operator(target)
    descriptions = {x.name: _description(x) for x in (*declared.attributes, *declared.operands)}

    def completed(entry: re.Match) -> str:
        name, kind, written = entry[1], entry[2], " ".join(entry[3].split())
        if written and not written.startswith(_PLACEHOLDER):
            return entry[0]
        prose = f"{descriptions[name]} {written.removeprefix(_PLACEHOLDER).strip()}".strip()
        lines = textwrap.wrap(prose, _WIDTH, initial_indent=_INDENT, subsequent_indent=_INDENT, break_on_hyphens=False)
        return "\n".join([name + kind, *lines])

    def decorate(function: _Function) -> _Function:
        # Newer versions of Python strip the indentation, older ones do not.
        text = inspect.cleandoc(function.__doc__ or "")
        function.__doc__ = _PARAMETERS.sub(lambda section: _ENTRY.sub(completed, section[0]), text)
        return function

    return decorate


def _description(declared: Tensor | Attribute) -> str:
    """The declaration as a sentence, with the type of a tensor before it."""
    doc = declared.doc.replace("`", "``")
    if isinstance(declared, Attribute):
        return f"{doc[0].upper()}{doc[1:]}."
    kind = declared.type.replace("`", "``")
    for letter, dtypes in _DTYPES.items():
        kind = dtypes + kind.removeprefix(letter) if kind.startswith(letter) else kind
    return f"{kind}: {doc}."
