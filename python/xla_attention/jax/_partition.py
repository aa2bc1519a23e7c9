"""Automatic partitioning: how XLA may cut up a call over the devices of a mesh.

A dimension of an operand or result has a letter. Those of `CUT` are cut alike in everything that has them, and every
device makes the call on its parts:

    H   query heads; neighbouring ones share a KV head
    h   KV heads, each read by g = H / h query heads
    c   KV heads and what else lies between them: 2 for K and V side by side
    b   the batch

A dimension with another letter, such as the tokens of a packed batch, is whole on every device.
"""

import functools
import itertools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from jax.experimental.custom_partitioning import custom_partitioning
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from ._call import manual_axes

# Letters of every operand and every result.
Letters = tuple[Sequence[str], Sequence[str]]


def partitioned(function: Callable, letters: Callable[..., Letters]) -> Callable:
    """`function(static, *arrays)`, which returns a tuple of arrays, as something that XLA may cut up.

    Parameters
    ----------
    function
        Every device calls it with the same hashable `static` and its parts of the arrays.
    letters
        Of the arrays and the results, for the same `static`: a word for each, with a letter for each dimension. ``b``
        is cut only where the first array has it, ``H``, ``h`` and ``c`` as the first array's ``H``.
    """

    def shardings(static: Any, mesh: Mesh, arguments: Sequence[jax.ShapeDtypeStruct]) -> list[tuple]:  # noqa: ANN401
        cut = _cut(mesh, arguments, letters(static)[0])
        spec = {word: PartitionSpec(*map(cut.get, word)) for words in letters(static) for word in words}
        return [tuple(NamedSharding(mesh, spec[word]) for word in words) for words in letters(static)]

    def partition(static: Any, mesh: Mesh, arguments: Any, _results: Any) -> tuple:  # noqa: ANN401
        of_arguments, of_results = shardings(static, mesh, arguments)
        return mesh, lambda *parts: function(static, *parts), of_results, of_arguments

    def infer(static: Any, mesh: Mesh, arguments: Any, _results: Any) -> tuple:  # noqa: ANN401
        return shardings(static, mesh, arguments)[1]

    def rule(static: Any, _mesh: Mesh, operands: Sequence[Any], results: Sequence[Any]) -> Any:  # noqa: ANN401
        return _shardy_rule(letters(static), operands, results)

    whole = custom_partitioning(function, static_argnums=(0,))
    whole.def_partition(partition, infer, **({"sharding_rule": rule} if _has_shardy() else {}))

    @functools.wraps(function)
    def call(static: Any, *arrays: jax.Array) -> tuple[jax.Array, ...]:  # noqa: ANN401
        # Within shard_map the arrays are parts already.
        return (function if manual_axes(arrays) else whole)(static, *arrays)

    return call


def _has_shardy() -> bool:
    """Whether this JAX asks for rules in Shardy's form, as it does where Shardy is what it partitions with."""
    return tuple(map(int, jax.__version__.split(".")[:2])) >= (0, 7)


def _cut(mesh: Mesh, arguments: Sequence[jax.ShapeDtypeStruct], words: Sequence[str]) -> dict[str, Any]:
    """The mesh axes that each letter is cut by: those of the first operand, as far as heads come out even."""
    first = arguments[0].sharding
    spec = tuple(getattr(first, "spec", ()))
    axes = dict(zip(words[0], spec + (None,) * (len(words[0]) - len(spec)), strict=True))
    cut = {"b": axes.get("b")}
    heads = axes.get("H")
    parts = int(np.prod([mesh.shape[axis] for axis in _axes(heads)]))
    sizes = [
        argument.shape[word.index(letter)] // (2 if letter == "c" else 1)
        for argument, word in zip(arguments, words, strict=True)
        for letter in "hc"
        if letter in word
    ]
    if all(size % parts == 0 for size in sizes):
        cut.update(H=heads, h=heads, c=heads)
    return cut


def _axes(entry: str | tuple[str, ...] | None) -> tuple[str, ...]:
    return () if entry is None else (entry,) if isinstance(entry, str) else tuple(entry)


def _shardy_rule(letters: Letters, operands: Sequence[Any], results: Sequence[Any]) -> Any:  # noqa: ANN401
    from jax.experimental.custom_partitioning import ArrayMapping, CompoundFactor, SdyShardingRule

    sizes = {
        letter: value.shape[at]
        for word, value in zip(letters[0], operands, strict=True)
        for at, letter in enumerate(word)
    }
    heads = sizes["h"] if "h" in sizes else sizes["c"] // 2
    group = sizes["H"] // heads
    factors = {"b": "b"}
    if heads > 1:
        query_heads = CompoundFactor("h", "g") if group > 1 else "h"
        factors |= {"h": "h", "c": CompoundFactor("h", "pair"), "H": query_heads}
    # A dimension that is to be whole is a factor of its own, along which nothing is propagated.
    others = itertools.count()

    def mapping(word: str) -> ArrayMapping:
        return ArrayMapping(*(factors.get(letter) or f"whole{next(others)}" for letter in word))

    mappings = [tuple(map(mapping, words)) for words in letters]
    # The sizes of factors that are nowhere a dimension of their own.
    every = {factor for side in mappings for mapping in side for factors in mapping for factor in _axes(factors)}
    alone = {factor for side in mappings for mapping in side for factor in mapping if isinstance(factor, str)}
    known = {"h": heads, "g": group, "pair": 2}
    return SdyShardingRule(*mappings, **{name: known[name] for name in every - alone})
