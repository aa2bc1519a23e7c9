"""Automatic partitioning: how XLA may cut up a call over the devices of a mesh.

A dimension of an operand or result has a letter. What has the same letter is cut alike, and every device makes the call
on its parts:

    H   query heads; neighbouring ones share a KV head
    h   KV heads, each read by g = H / h query heads; cut as H
    c   KV heads and what else lies between them: 2 for K and V side by side; cut as H

and the call's own free letters, such as a batch or the dimensions of an elementwise operator. A dimension with another
letter, such as the tokens of a packed batch, is whole on every device.
"""

import functools
import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.experimental.custom_partitioning import custom_partitioning
from jax.sharding import Mesh, NamedSharding, PartitionSpec, Sharding

from ._call import Array, manual_axes

# A letter for each dimension; where a string has not enough of them, numbers.
Word = str | tuple[int, ...]
# The mesh axes by which each dimension of an array is cut.
Axes = tuple[tuple[str, ...], ...]


class Letters(NamedTuple):
    """Of every operand and every result that is there."""

    operands: tuple[Word, ...]
    results: tuple[Word, ...]
    free: Word = ""


class _Call(NamedTuple):
    """What a call consists of beside its arrays."""

    static: Any
    places: jax.tree_util.PyTreeDef  # of the arrays among the operands
    letters: Letters


def partitioned(function: Callable, letters: Callable[..., Letters]) -> Callable:
    """`function(static, *operands)`, which returns a tuple of arrays, as something that XLA may cut up.

    Parameters
    ----------
    function
        Every device calls it with the same hashable `static` and its parts of the arrays. The operands are arrays,
        None, and trees of them.
    letters
        Of the same arguments.
    """

    def on_parts(call: _Call, *parts: Array) -> tuple[Array, ...]:
        return function(call.static, *call.places.unflatten(parts))

    def shardings(call: _Call, mesh: Mesh, arguments: Sequence[jax.ShapeDtypeStruct]) -> list[tuple]:
        axes = [_axes_of(x.sharding, len(x.shape), mesh) for x in arguments]
        cut = _cut(mesh.shape, axes, [x.shape for x in arguments], call.letters)
        return [tuple(NamedSharding(mesh, _spec(cut, word)) for word in words) for words in call.letters[:2]]

    def partition(call: _Call, mesh: Mesh, arguments: Any, _results: Any) -> tuple:  # noqa: ANN401
        of_arguments, of_results = shardings(call, mesh, arguments)
        return mesh, functools.partial(on_parts, call), of_results, of_arguments

    def infer(call: _Call, mesh: Mesh, arguments: Any, _results: Any) -> tuple:  # noqa: ANN401
        return shardings(call, mesh, arguments)[1]

    def rule(call: _Call, _mesh: Mesh, operands: Sequence[Any], _results: Sequence[Any]) -> Any:  # noqa: ANN401
        return _shardy_rule(call.letters, operands)

    whole = custom_partitioning(on_parts, static_argnums=(0,))
    # Shardings come as XLA has them: JAX fails to decode those that cut by a part of a mesh axis, as Shardy's may where
    # an axis is larger than the number of KV heads.
    options = {"sharding_rule": rule} if _has_shardy() else {}
    whole.def_partition(partition, infer, decode_shardings=False, **options)

    @functools.wraps(function)
    def call(static: Any, *operands: Any) -> tuple[Array, ...]:  # noqa: ANN401
        arrays, places = jax.tree.flatten(operands)
        if manual_axes(arrays):
            # Within shard_map the arrays are parts already.
            return function(static, *operands)
        described = _Call(static, places, letters(static, *operands))
        return _automatic(functools.partial(whole, described), arrays, described.letters)(*arrays)

    return call


def present(words: Sequence[Word], operands: Sequence[Array | None]) -> tuple[Word, ...]:
    """The words of those operands that are there."""
    return tuple(word for word, operand in zip(words, operands, strict=True) if operand is not None)


def placed_as(array: Array, like: Array) -> Array:
    """The array on the devices where `like` is, if its type says so: gradients on a mesh with explicit axes."""
    return jax.sharding.reshard(array, jax.typeof(like).sharding) if _explicit_mesh([like]) is not None else array


def _has_shardy() -> bool:
    """Whether this JAX asks for rules in Shardy's form, as it does where Shardy is what it partitions with."""
    return tuple(map(int, jax.__version__.split(".")[:2])) >= (0, 7)


def _automatic(function: Callable, arrays: Sequence[Array], letters: Letters) -> Callable:
    """The function, where types of arrays have mesh axes with those axes left to XLA, and typed results."""
    mesh = _explicit_mesh(arrays)
    if mesh is None:
        return function
    specs = [tuple(jax.typeof(x).sharding.spec) for x in arrays]
    axes = [tuple(() if part is None else (part,) if isinstance(part, str) else part for part in s) for s in specs]
    cut = _cut(mesh.shape, axes, [x.shape for x in arrays], letters)
    typed = tuple(_spec(cut, word) for word in letters.results)
    call = jax.sharding.auto_axes(function, axes=mesh.explicit_axes, out_sharding=typed)

    def within_mesh(*arrays: Array) -> tuple[Array, ...]:
        with jax.sharding.use_abstract_mesh(mesh):  # the program may have set none
            return call(*arrays)

    return within_mesh


def _explicit_mesh(arrays: Sequence[Array]) -> Any:  # noqa: ANN401
    """The mesh of the arrays' types, if it has explicit axes; JAX had others before it had `auto_axes`."""
    if not hasattr(jax.sharding, "auto_axes"):
        return None
    meshes = (jax.typeof(x).sharding.mesh for x in arrays)
    return next((mesh for mesh in meshes if mesh.explicit_axes), None)


def _axes_of(sharding: Sharding | None, rank: int, mesh: Mesh) -> Axes:
    """The mesh axes that cut each dimension, without those of which only a part does."""
    if sharding is None:  # not known yet
        return ((),) * rank
    # A shape that every sharding cuts evenly: each device's part begins where its place among the parts says.
    parts = sharding.devices_indices_map((mesh.size,) * rank)

    def axes(dimension: int) -> tuple[str, ...]:
        begins = np.array([parts[device][dimension].start or 0 for device in mesh.devices.flat])
        begins = begins.reshape(mesh.devices.shape)
        strides = {
            name: steps.flat[0]
            for at, name in enumerate(mesh.axis_names)
            if (steps := np.diff(begins, axis=at)).size and (steps > 0).all()
        }
        return tuple(sorted(strides, key=lambda name: -strides[name]))

    return tuple(map(axes, range(rank)))


def _cut(sizes: Mapping[str, int], axes: Sequence[Axes], shapes: Sequence[Sequence[int]], letters: Letters) -> dict:
    """The mesh axes that each letter is cut by.

    Those of the first operand that is cut there, as far as everything comes out even; of heads those of K and V, which
    are a cache, before those of the queries.
    """
    cut, used = {}, set()
    for alike in ("chH", *((letter,) for letter in letters.free)):
        found = [
            (letter, size, by)
            for letter in alike
            for word, shape, of_array in zip(letters.operands, shapes, axes, strict=True)
            for own, size, by in itertools.zip_longest(word, shape, of_array, fillvalue=())
            if own == letter
        ]
        even = [size // (2 if letter == "c" else 1) for letter, size, _ in found]
        chosen = ()
        for _, _, by in found:
            chosen = tuple(itertools.takewhile(lambda name: name not in used, by))
            while any(size % int(np.prod([sizes[name] for name in chosen])) for size in even):
                chosen = chosen[:-1]
            if chosen:
                break
        used.update(chosen)
        cut.update(dict.fromkeys(alike, chosen))
    return cut


def _spec(cut: dict, word: Word) -> PartitionSpec:
    """An axis by itself, not in a tuple: before 0.8, JAX tells the two apart."""
    by = (cut.get(letter, ()) for letter in word)
    return PartitionSpec(*(axes[0] if len(axes) == 1 else axes or None for axes in by))


def _shardy_rule(letters: Letters, operands: Sequence[Any]) -> Any:  # noqa: ANN401
    from jax.experimental.custom_partitioning import ArrayMapping, CompoundFactor, SdyShardingRule

    sizes = {
        letter: value.shape[at]
        for word, value in zip(letters.operands, operands, strict=True)
        for at, letter in enumerate(word)
    }
    heads = sizes.get("h") or sizes.get("c", 0) // 2 or sizes.get("H", 1)
    group = sizes.get("H", heads) // heads
    factors = {letter: f"free{letter}" for letter in letters.free}
    if heads > 1:
        query_heads = CompoundFactor("h", "g") if group > 1 else "h"
        factors |= {"h": "h", "c": CompoundFactor("h", "pair"), "H": query_heads}
    # A dimension that is to be whole is a factor of its own, along which nothing is propagated.
    others = itertools.count()

    def mapping(word: Word) -> ArrayMapping:
        return ArrayMapping(*(factors.get(letter) or f"whole{next(others)}" for letter in word))

    mappings = [tuple(map(mapping, words)) for words in letters[:2]]
    # The sizes of factors that are nowhere a dimension of their own.
    every = {
        factor
        for side in mappings
        for mapping in side
        for factors in mapping
        for factor in ((factors,) if isinstance(factors, str) else factors)
    }
    alone = {factor for side in mappings for mapping in side for factor in mapping if isinstance(factor, str)}
    known = {"h": heads, "g": group, "pair": 2}
    return SdyShardingRule(*mappings, **{name: known[name] for name in every - alone})
