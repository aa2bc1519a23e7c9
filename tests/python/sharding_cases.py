"""Cases for sharding_program.py: what is computed, and how its operands and results lie on a mesh of devices."""

import functools
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec

from batches import varlen
from xla_attention.jax import (
    dot_product_attention,
    flash_attn_varlen,
    gather_kv_cache,
    kv_cache_update,
    merge_attention_states,
    paged_attention,
    paged_attention_update,
    rope_kv_cache_update,
    simple_add,
)

HEADS = (8, 4)
WHOLE = PartitionSpec()
PACKED = PartitionSpec(None, "heads")  # [T, H, D]
OF_HEADS = PartitionSpec("heads")  # [H], or [H, T]
CACHES = {
    "interleaved": PartitionSpec(None, None, "heads"),
    "stacked": PartitionSpec(None, None, None, "heads"),
    "per_page": PartitionSpec(None, None, None, "heads"),
    "apart": PartitionSpec(None, None, "heads"),
}


def numbers(seed, *shape):
    """Of NumPy, for which nothing is compiled."""
    return np.random.default_rng(seed).standard_normal(shape, np.float32)


class Case(NamedTuple):
    """A function, and how its operands and results lie on the mesh."""

    attend: Callable  # of the operands, to a tuple
    operands: tuple
    specs: tuple
    out_specs: tuple
    axes: int = 1  # of the mesh: heads, or batch and heads
    differentiated: bool = True
    plain: Callable | None = None  # what runs on one device, if it is not `attend`
    donated: tuple = ()  # operands that results take the memory of


def packed(heads=HEADS, **options):
    """Packed sequences, heads over all devices; with them sinks and slopes."""
    (q, k, v, *starts), _ = varlen([(7, 9), (30, 30), (3, 1)], heads=heads, d=16, rows_after=0)
    sinks = np.float32(np.linspace(-1, 1, heads[0]))

    slopes = np.linspace(0, 0.3, heads[0], dtype=np.float32)

    def attend(q, k, v, sinks):
        more = {"sinks": sinks, "alibi_slopes": slopes, **options}
        return flash_attn_varlen(q, k, v, *starts, causal=True, return_lse=True, **more)

    return Case(attend, (q, k, v, sinks), (PACKED, PACKED, PACKED, OF_HEADS), (PACKED, OF_HEADS))


def projected(heads):
    """q, k and v are made in the program, by matrices that are cut by columns, which may be parts of a head."""
    starts = np.array([0, 5, 12])
    shapes = [(12, 24), *((24, h * 16) for h in (heads[0], heads[1], heads[1]))]
    operands = tuple(np.float32(0.3) * numbers(i, *shape) for i, shape in enumerate(shapes))

    def attend(x, *matrices):
        q, k, v = ((x @ matrix).reshape(12, -1, 16) for matrix in matrices)
        return (flash_attn_varlen(q, k, v, starts, causal=True),)

    return Case(attend, operands, (WHOLE, *(PartitionSpec(None, "heads"),) * 3), (PACKED,))


def of_whole_keys(heads=HEADS):
    """Queries are cut by heads; keys, values and sinks are not, nor are what they are made of."""
    case = packed(heads)

    def attend(q, k, v, sinks):
        return case.attend(q, jnp.sin(k), jnp.cos(v), jnp.sin(sinks))

    return case._replace(attend=attend, specs=(PACKED, WHOLE, WHOLE, WHOLE))


def shard_map(call, mesh, in_specs, out_specs):
    placing = {"mesh": mesh, "in_specs": in_specs, "out_specs": out_specs}
    if hasattr(jax, "shard_map"):
        return jax.shard_map(call, **placing)
    from jax.experimental.shard_map import shard_map

    return shard_map(call, **placing, check_rep=False)  # which knows no custom call


def mapped_rows(mesh):
    """shard_map over rows of the queries: keys, values and sinks are the same on every device, gradients are summed."""
    (q, k, v, *_), _ = varlen([(32, 9)], heads=HEADS, d=16, rows_after=0)
    sinks = np.float32(np.linspace(-1, 1, HEADS[0]))

    def call(q, k, v, sinks):
        starts = (np.array([0, len(q)]), np.array([0, len(k)]))
        return flash_attn_varlen(q, jnp.sin(k), v, *starts, sinks=sinks, return_lse=True)

    specs, out_specs = (PartitionSpec("heads"), WHOLE, WHOLE, WHOLE), (PartitionSpec("heads"), PACKED)
    return Case(shard_map(call, mesh, specs, out_specs), (q, k, v, sinks), specs, out_specs, plain=call)


def mapped(mesh):
    """shard_map over heads: every device makes its own call."""
    (q, k, v, *starts), _ = varlen([(7, 9), (30, 30), (3, 1)], heads=HEADS, d=16, rows_after=0)
    call = functools.partial(flash_attn_varlen, causal=True, return_lse=True)
    specs = (PACKED, PACKED, PACKED, WHOLE, WHOLE)
    on_each = shard_map(call, mesh, specs, (PACKED, OF_HEADS))
    return Case(
        lambda *x: on_each(*x, *starts),
        (q, k, v),
        specs[:3],
        (PACKED, OF_HEADS),
        plain=lambda *x: call(*x, *starts),
    )


def pages(kv_layout):
    """Pages in one buffer, KV heads over all devices; there is no gradient."""
    form = {"heads": HEADS, "d": 16, "pages": 4, "kv_layout": kv_layout, "rows_after": 0}
    (q, k, _, *starts), options = varlen([(7, 9), (30, 30)], **form)

    def attend(q, k):
        return flash_attn_varlen(q, k, None, starts[0], causal=True, return_lse=True, **options)

    return Case(attend, (q, k), (PACKED, CACHES[kv_layout]), (PACKED, OF_HEADS), differentiated=False)


def dense(*spec):
    """A dense batch [B, T, H, D], cut as `spec` says."""
    shapes = [(4, 17, HEADS[0], 16), (4, 29, HEADS[1], 16), (4, 29, HEADS[1], 16)]
    operands = tuple(numbers(i, *shape) for i, shape in enumerate(shapes))
    lengths = np.array([29, 1, 12, 20])

    def attend(q, k, v):
        return (dot_product_attention(q, k, v, is_causal=True, key_value_seq_lengths=lengths),)

    return Case(
        attend, operands, (PartitionSpec(*spec),) * 3, (PartitionSpec(*spec),), axes=2 if "batch" in spec else 1
    )


def step(heads, kv_layout):
    """One new token of each of three sequences and a cache of 6 pages, by the names that the functions give them."""
    query_heads, kv_heads = heads
    shapes = {
        "interleaved": (6, 4, 2 * kv_heads, 16),
        "stacked": (2, 6, 4, kv_heads, 16),
        "per_page": (6, 2, 4, kv_heads, 16),
        "apart": (6, 4, kv_heads, 16),
    }
    cache, lens = numbers(1, *shapes[kv_layout]), np.array([5, 8, 3])
    return {
        "kv_cache": (cache, -cache) if kv_layout == "apart" else cache,
        "query": numbers(2, 3, query_heads, 16),
        "key": numbers(3, 3, kv_heads, 16),
        "value": numbers(4, 3, kv_heads, 16),
        "slot_mapping": np.array([4, 23, 10]),
        "positions": lens - 1,
        "cos_sin": numbers(5, 8, 16),
        "context_lens": lens,
        "block_tables": np.array([[4, 1], [0, 5], [2, 2]]),
        "query_start_loc": np.arange(4),
        "num_seqs": np.array([3]),
        "k_scale": np.float32(np.linspace(0.5, 2, kv_heads)),
        "v_scale": np.float32(np.linspace(2, 0.5, kv_heads)),
        "sinks": np.float32(np.linspace(-1, 1, query_heads)),
        "alibi_slopes": numbers(6, 3, query_heads) ** 2,
        "kv_layout": None if kv_layout == "apart" else kv_layout,
        "capacity": 12,
        "scale": 0.25,
        "return_lse": True,
    }


SEQUENCES = "context_lens block_tables query_start_loc num_seqs"
SCORES = "sinks alibi_slopes k_scale v_scale scale return_lse"
# Of each function: the operands that are cut, everything else that it is given, and how its results lie; "cache" is as
# the cache lies. Caches come first, and those that are updated are donated.
FUNCTIONS = {
    kv_cache_update: ("kv_cache key value", "slot_mapping kv_layout k_scale v_scale", ("cache",)),
    rope_kv_cache_update: ("kv_cache query key value", "slot_mapping positions cos_sin kv_layout", (PACKED, "cache")),
    gather_kv_cache: ("kv_cache k_scale", "block_tables context_lens capacity kv_layout", (PACKED, PACKED, WHOLE)),
    paged_attention: ("kv_cache query", f"{SEQUENCES} {SCORES}", (PACKED, OF_HEADS)),
    paged_attention_update: (
        "kv_cache query key value",
        f"{SEQUENCES} slot_mapping {SCORES}",
        (PACKED, OF_HEADS, "cache"),
    ),
}


def of_step(function, kv_layout="interleaved", *, heads=HEADS, whole=()):
    """A function of pages, of which the operands that `whole` names are left to XLA: a cache that is cut suffices."""
    names, others, results = FUNCTIONS[function]
    names, new = names.split(), step(heads, kv_layout)
    constant = {name: new[name] for name in others.split()}
    caches = 2 if kv_layout == "apart" else 1

    def call(*operands):
        cache = operands[0] if caches == 1 else operands[:2]
        given = dict(zip(names, (cache, *operands[caches:]), strict=True))
        found = function(**given, **constant)
        return found if isinstance(found, tuple) else (found,)

    of_cache = (CACHES[kv_layout],) * caches
    specs = {"k_scale": OF_HEADS} | dict.fromkeys(("query", "key", "value"), PACKED) | dict.fromkeys(whole, WHOLE)
    operands = (*(new["kv_cache"] if caches == 2 else (new["kv_cache"],)), *(new[name] for name in names[1:]))
    out_specs = [spec for one in results for spec in (of_cache if one == "cache" else (one,))]
    donated = tuple(range(caches)) if "cache" in results else ()
    specs = (*of_cache, *(specs[name] for name in names[1:]))
    return Case(call, operands, specs, tuple(out_specs), differentiated=False, donated=donated)


def over_both_axes(case):
    """What is cut by heads is cut by both axes of the mesh."""

    def by_both(specs):
        both = ("batch", "heads")
        return tuple(PartitionSpec(*(both if axis == "heads" else axis for axis in spec)) for spec in specs)

    return case._replace(specs=by_both(case.specs), out_specs=by_both(case.out_specs), axes=2)


def decoded(heads=HEADS):
    """A layer's step: the operators one after the other."""
    new = step(heads, "interleaved")
    where, sequences = (new[name] for name in ("slot_mapping", "positions", "cos_sin")), SEQUENCES.split()
    where, sequences = tuple(where), tuple(new[name] for name in sequences)

    def attend(cache, query, key, value):
        query, cache = rope_kv_cache_update(cache, query, key, value, *where)
        out, lse = paged_attention(query, cache, *sequences, scale=0.25, return_lse=True)
        out, lse = merge_attention_states(out, lse, 2 * out, lse)
        return simple_add(out, query), lse, cache

    case = of_step(rope_kv_cache_update, heads=heads)
    return case._replace(attend=attend, out_specs=(PACKED, OF_HEADS, CACHES["interleaved"]))


def merged(spec, of_lse):
    """Two parts of which one is placed, and the other is left to XLA."""
    operands = (numbers(7, 12, 8, 16), numbers(8, 8, 12), numbers(9, 12, 8, 16), numbers(10, 8, 12))
    spec, of_lse = PartitionSpec(*spec), PartitionSpec(*of_lse)
    merge = merge_attention_states
    return Case(merge, operands, (spec, of_lse, WHOLE, WHOLE), (spec, of_lse), axes=2, differentiated=False)


def added():
    spec = PartitionSpec("batch", None, "heads")
    operands = (numbers(11, 4, 3, 8, 2), numbers(12, 4, 3, 8, 2))
    return Case(lambda *x: (simple_add(*x),), operands, (spec, spec), (spec,), axes=2, differentiated=False)


CASES = {
    "packed, by heads": lambda _: packed(),
    "packed, deterministic, by heads": lambda _: packed(deterministic=True),
    "packed, one KV head": lambda _: packed((8, 1))._replace(specs=(PACKED, WHOLE, WHOLE, OF_HEADS)),
    "packed, projected": lambda _: projected(HEADS),
    "packed, projected, two KV heads": lambda _: projected((8, 2)),
    "packed, whole keys": lambda _: of_whole_keys(),
    "packed, shard_map": mapped,
    "packed, shard_map over rows": mapped_rows,
    "interleaved pages, by heads": lambda _: pages("interleaved"),
    "stacked pages, by heads": lambda _: pages("stacked"),
    "dense, by batch": lambda _: dense("batch"),
    "dense, by heads": lambda _: dense(None, None, "heads"),
    "dense, by batch and heads": lambda _: dense("batch", None, "heads"),
    **{f"update, {layout}": lambda _, x=layout: of_step(kv_cache_update, x) for layout in CACHES},
    "update, interleaved, whole rows": lambda _: of_step(kv_cache_update, whole=("key", "value")),
    **{f"gather, {layout}": lambda _, x=layout: of_step(gather_kv_cache, x) for layout in CACHES},
    **{
        f"rope, {layout}": lambda _, x=layout: of_step(rope_kv_cache_update, x)
        for layout in CACHES
        if layout != "apart"
    },
    "paged": lambda _: of_step(paged_attention),
    "paged, whole queries": lambda _: of_step(paged_attention, whole=("query",)),
    "paged, as many KV heads": lambda _: of_step(paged_attention, heads=(4, 4)),
    "paged, cache cut between K and V": lambda _: of_step(paged_attention, heads=(8, 2)),
    "paged update": lambda _: of_step(paged_attention_update, whole=("key", "value")),
    "paged update, 4 query heads a KV head": lambda _: of_step(
        paged_attention_update, heads=(16, 4), whole=("key", "value")
    ),
    "paged update, by both axes": lambda _: over_both_axes(of_step(paged_attention_update, whole=("key", "value"))),
    "paged, cache cut between K and V by an axis": lambda _: over_both_axes(of_step(paged_attention, heads=(8, 2))),
    "decode step": lambda _: decoded(),
    "merge, by heads": lambda _: merged((None, "heads"), ("heads",)),
    "merge, by rows and elements": lambda _: merged(("batch", None, "heads"), (None, "batch")),
    "add, by two dimensions": lambda _: added(),
}

# Programs in which something has to be exchanged, by what: gradients of what is the same on every device are summed,
# and heads that come out uneven are computed by every device.
EXCHANGE = {
    "packed, one KV head": {"all-gather"},
    "packed, projected": {"all-reduce"},
    "packed, projected, two KV heads": {"all-gather", "all-reduce"},
    "packed, whole keys": {"all-gather"},
    "packed, shard_map over rows": {"all-reduce"},
    "paged, cache cut between K and V": {"all-gather"},
    "paged, cache cut between K and V by an axis": {"all-gather"},
}
# Their own code asks JAX for what it refuses where axes are explicit: to reshape what is cut within a head.
AUTOMATIC = {"packed, projected, two KV heads"}
