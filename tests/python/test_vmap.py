"""jax.vmap of the operators: one call for all indices where there is one, and each index as if it were alone."""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from batches import batch, step, varlen
from xla_attention.jax import (
    flash_attn_varlen,
    kv_cache_update,
    merge_attention_states,
    paged_attention,
    paged_attention_update,
    rope_kv_cache_update,
    simple_add,
)

SIZE = 3
SEQUENCES = [(2, 5), (0, 7), (3, 3), (1, 18)]
HEADS = (4, 2)
LAYOUTS = {"interleaved": (5, 4, 4, 16), "stacked": (2, 5, 4, 2, 16), "per_page": (5, 2, 4, 2, 16)}


class Case(NamedTuple):
    """A function of operands, of which those that `axes` names have an axis of SIZE first."""

    function: object
    operands: tuple
    axes: tuple
    calls: int = 1  # 0: one after the other, as the documentation says


def numbers(seed, *shape):
    return jnp.asarray(np.random.default_rng(seed).standard_normal(shape), jnp.float32)


def stacked(makers):
    """The operands of SIZE calls, side by side."""
    return tuple(jnp.stack(same) for same in zip(*makers, strict=True))


def ragged(make, seed=0):
    """Operands of calls with pages of nonsense, and slots that are not in use."""
    return stacked(make(SEQUENCES, heads=HEADS, d=16, page_size=4, spare_slots=2, seed=seed + i) for i in range(SIZE))


def first(operands):
    return tuple(x[0] for x in operands)


def chosen(operands, axes):
    """Those of `axes` for every index, the others as index 0 has them."""
    return tuple(x if axis is not None else x[0] for x, axis in zip(operands, axes, strict=True))


def over_pages(axes, calls=1, **options):
    """`options` that are arrays with an axis of SIZE are operands too."""
    names = tuple(options)
    operands = (*ragged(batch), *options.values())
    attend = lambda *x: paged_attention(*x[:6], scale=0.2, return_lse=True, **dict(zip(names, x[6:], strict=True)))  # noqa: E731
    return Case(attend, chosen(operands, axes), axes, calls)


def update_over_pages(axes):
    operands = ragged(step)
    return Case(functools.partial(paged_attention_update, scale=0.2, return_lse=True), chosen(operands, axes), axes)


SLOTS = jnp.array([[3, -1, 19, 20], [0, 25, 7, 2], [19, 2**31 - 1, -(2**31), 4]])


def updated(kv_layout, axes, calls=1, dtype="float32", **options):
    names = tuple(options)
    cache = numbers(0, SIZE, *LAYOUTS[kv_layout]).astype(dtype)
    operands = (cache, numbers(1, SIZE, 4, 2, 16), numbers(2, SIZE, 4, 2, 16), SLOTS, *options.values())
    update = lambda *x: kv_cache_update(*x[:4], kv_layout=kv_layout, **dict(zip(names, x[4:], strict=True)))  # noqa: E731
    return Case(update, chosen(operands, axes), axes, calls)


def updated_pair():
    caches = tuple(numbers(seed, SIZE, 5, 4, 2, d) for seed, d in ((0, 16), (1, 24)))
    rows = tuple(numbers(seed, SIZE, 4, 2, d) for seed, d in ((2, 16), (3, 24)))
    return Case(lambda k, v, *rows: kv_cache_update((k, v), *rows), (*caches, *rows, SLOTS), (0,) * 5)


def rotated(kv_layout, axes=(0, 0, 0, 0, 0, 0, None), calls=1):
    rows = (numbers(seed, SIZE, 4, heads, 16) for seed, heads in ((1, 4), (2, 2), (3, 2)))
    positions = jnp.array([[0, 9, 3, 2], [1, 1, -5, 8], [7, 2**31 - 1, 0, 4]])
    operands = (numbers(0, SIZE, *LAYOUTS[kv_layout]), *rows, SLOTS, positions, numbers(4, SIZE, 10, 8))
    return Case(functools.partial(rope_kv_cache_update, kv_layout=kv_layout), chosen(operands, axes), axes, calls)


def varlen_over_pages(kv_layout, axes, calls=1):
    """Pages that hold NaN where no key is, tables with nonsense."""
    made = [varlen([(2, 5), (0, 7), (3, 3)], heads=HEADS, d=16, pages=4, kv_layout=kv_layout, seed=i) for i in range(3)]
    operands = stacked((q, k, starts, more["block_table"], more["seqused_k"]) for (q, k, _, starts, _), more in made)

    def attend(q, k, starts, table, used):
        options = {"block_table": table, "seqused_k": used, "kv_layout": kv_layout}
        return flash_attn_varlen(q, k, None, starts, causal=True, return_lse=True, **options)

    return Case(attend, chosen(operands, axes), axes, calls)


STATES = (numbers(0, SIZE, 5, 4, 8), numbers(1, SIZE, 4, 5), numbers(2, SIZE, 5, 4, 8), numbers(3, SIZE, 4, 5))
SHARED = None
CASES = {
    "simple_add": lambda: Case(simple_add, STATES[:3:2], (0, 0)),
    "simple_add, one shared": lambda: Case(simple_add, (STATES[0], STATES[2][0]), (0, SHARED)),
    "merge": lambda: Case(merge_attention_states, STATES, (0, 0, 0, 0)),
    "merge, one shared": lambda: Case(merge_attention_states, (*STATES[:2], *first(STATES[2:])), (0, 0, None, None)),
    "paged, queries": lambda: over_pages((0, *[SHARED] * 5)),
    "paged, shared cache": lambda: over_pages((0, SHARED, 0, 0, 0, 0)),
    "paged, caches": lambda: over_pages((0,) * 6),
    "paged, caches alone": lambda: over_pages((SHARED, 0, *[SHARED] * 4)),
    "paged, how many": lambda: Case(
        lambda count, *x: paged_attention(*x, count, scale=0.2, return_lse=True),
        (jnp.array([0, 9, 2]), *batch(SEQUENCES, heads=HEADS, d=16, page_size=4, spare_slots=0)[:5]),
        (0, *[SHARED] * 5),
    ),
    "paged, slopes of heads": lambda: over_pages((0,) * 7, alibi_slopes=numbers(5, SIZE, 4) ** 2),
    "paged, slopes of sequences": lambda: over_pages((0,) * 6 + (SHARED,), alibi_slopes=numbers(5, SIZE, 6, 4) ** 2),
    "paged, shared sinks": lambda: over_pages((0,) * 6 + (SHARED,), sinks=numbers(5, SIZE, 4)),
    "paged, sinks of each": lambda: over_pages((0,) * 7, 0, sinks=numbers(5, SIZE, 4)),
    "paged update": lambda: update_over_pages((0,) * 9),
    "paged update, shared cache": lambda: update_over_pages((0, SHARED, *[0] * 7)),
    "paged update, shared sequences": lambda: update_over_pages((0, 0, *[SHARED] * 4, 0, 0, SHARED)),
    **{f"update, {layout}": functools.partial(updated, layout, (0,) * 4) for layout in LAYOUTS},
    "update, shared cache": lambda: updated("stacked", (SHARED, 0, 0, 0)),
    "update, shared slots": lambda: updated("interleaved", (0, 0, 0, SHARED)),
    "update, shared scales": lambda: updated("per_page", (0, 0, 0, 0, SHARED), k_scale=numbers(6, SIZE, 2)),
    "update, scales of each": lambda: updated("per_page", (0,) * 5, 0, k_scale=numbers(6, SIZE, 2)),
    "update, two buffers": updated_pair,
    **{f"rope, {layout}": functools.partial(rotated, layout) for layout in LAYOUTS},
    "rope, angles of each": lambda: rotated("interleaved", (0,) * 7, 0),
    "varlen, shared pages": lambda: varlen_over_pages("stacked", (0, SHARED, 0, 0, 0)),
    "varlen, pages": lambda: varlen_over_pages("interleaved", (0,) * 5),
    "varlen, pages per_page": lambda: varlen_over_pages("per_page", (0, 0, SHARED, 0, 0)),
    "varlen, stacked pages": lambda: varlen_over_pages("stacked", (0,) * 5, 0),
}


def assert_each(found, case):
    """Every index is what a call of its own gives."""
    for index in range(SIZE):
        alone = (x if axis is None else x[index] for x, axis in zip(case.operands, case.axes, strict=True))
        for one, wanted in zip(jax.tree.leaves(found), jax.tree.leaves(case.function(*alone)), strict=True):
            np.testing.assert_allclose(one[index], wanted, atol=1e-5)


@pytest.mark.parametrize("name", CASES)
def test_each_index_is_as_if_it_were_alone(platform, name):
    case = CASES[name]()
    mapped = jax.vmap(case.function, in_axes=case.axes)
    assert_each(mapped(*case.operands), case)
    text = jax.jit(mapped).lower(*case.operands).as_text()
    assert text.count("custom_call @xla_gpu_") == 1
    assert ("stablehlo.while" in text) == (case.calls == 0)


@pytest.mark.parametrize("name", ["paged, caches", "update, stacked", "rope, interleaved", "merge", "simple_add"])
def test_two_axes_are_one_call_too(platform, name):
    case = CASES[name]()
    doubled = [x if axis is None else jnp.stack([x, x[::-1]]) for x, axis in zip(case.operands, case.axes, strict=True)]
    mapped = jax.vmap(jax.vmap(case.function, in_axes=case.axes), in_axes=case.axes)
    found = jax.tree.leaves(mapped(*doubled))
    assert_each([x[0] for x in found], case)
    assert_each([x[1, ::-1] for x in found], case)
    assert jax.jit(mapped).lower(*doubled).as_text().count("custom_call @xla_gpu_") == 1


def test_metadata_of_one_index_cannot_reach_another(platform):
    """Starts that go down, lengths, pages and counts of nonsense: of each index alone."""
    rng = np.random.default_rng(0)

    def nonsense(*shape, below):
        far = rng.choice([-(2**31), 2**31 - 1], shape)
        return jnp.asarray(np.where(rng.random(shape) < 0.15, far, rng.integers(-3, below, shape)), jnp.int32)

    def over_pages(query, cache, lens, tables, starts, count):
        return paged_attention(query, cache, lens, tables, starts, count, scale=0.3, return_lse=True, sinks=sinks)

    def over_rows(query, rows, lens, _, starts, more):
        return flash_attn_varlen(query, rows, rows, starts, more, seqused_k=lens, causal=True, return_lse=True)

    sinks, rows = numbers(0, 4), numbers(1, 9, 2, 16)
    alone = [jax.jit(over_pages), jax.jit(over_rows)]
    mapped = [jax.jit(jax.vmap(f, in_axes=(0, axis, 0, 0, 0, 0))) for f, axis in ((over_pages, 0), (over_rows, None))]
    for seed in range(20):
        query, cache = numbers(seed, SIZE, 6, 4, 16), numbers(seed + 1, SIZE, 5, 4, 4, 16)
        lens, tables, starts = nonsense(SIZE, 3, below=10), nonsense(SIZE, 3, 2, below=6), nonsense(SIZE, 4, below=9)
        last = nonsense(SIZE, 1, below=5), nonsense(SIZE, 4, below=12)
        for one, all_of_them, keys, more in zip(alone, mapped, (cache, rows), last, strict=True):
            found = all_of_them(query, keys, lens, tables, starts, more)
            for i in range(SIZE):
                wanted = one(query[i], keys[i] if keys is cache else keys, lens[i], tables[i], starts[i], more[i])
                for part, of_one in zip(found, wanted, strict=True):
                    np.testing.assert_allclose(part[i], of_one, atol=1e-5)
