"""Docstrings whose parameters ``ffi/operators.toml`` describes: what the front-ends share is written there once."""

import inspect
import re
import textwrap
from collections.abc import Callable
from typing import TypeVar

from ._operators import Attribute, Tensor, operator

_Function = TypeVar("_Function", bound=Callable)

# What `ffi/operators.toml` abbreviates.
_DTYPES = {
    "Q ": "f16, bf16, f32 or f8e4m3fn ",
    "KV ": "of the query's dtype, or f8e4m3fn or f8e5m2 under f16 or bf16 queries, ",
}
_PARAMETERS = re.compile(r"(?<=\nParameters\n----------\n).*?(?=\n\n\w+\n---|\Z)", re.DOTALL)
_ENTRY = re.compile(r"^(\w+)( : .*)((?:\n    .*)*)", re.MULTILINE)
_DECLARED = "..."
_INDENT, _WIDTH = 4 * " ", 116


def documented(target: str) -> Callable[[_Function], _Function]:
    """Complete the docstring of a function that calls a target.

    A parameter without a description gets that of the operand or attribute of its name, and one whose description
    begins with ``...`` gets it in that place.
    """
    described = operator(target)
    known = {one.name: _description(one) for one in (*described.attributes, *described.operands)}

    def completed(entry: re.Match) -> str:
        name, kind, own = entry[1], entry[2], " ".join(entry[3].split())
        if own and not own.startswith(_DECLARED):
            return entry[0]
        prose = f"{known[name]} {own.removeprefix(_DECLARED).strip()}".strip()
        lines = textwrap.wrap(prose, _WIDTH, initial_indent=_INDENT, subsequent_indent=_INDENT, break_on_hyphens=False)
        return "\n".join([name + kind, *lines])

    def decorate(function: _Function) -> _Function:
        # As every version of Python has it: some strip the indentation, others do not.
        text = inspect.cleandoc(function.__doc__ or "")
        function.__doc__ = _PARAMETERS.sub(lambda section: _ENTRY.sub(completed, section[0]), text)
        return function

    return decorate


def _description(of: Tensor | Attribute) -> str:
    """A sentence."""
    doc = of.doc.replace("`", "``")
    if isinstance(of, Attribute):
        return f"{doc[0].upper()}{doc[1:]}."
    kind = of.type.replace("`", "``")
    for letter, meaning in _DTYPES.items():
        kind = meaning + kind.removeprefix(letter) if kind.startswith(letter) else kind
    return f"{kind}: {doc}."
