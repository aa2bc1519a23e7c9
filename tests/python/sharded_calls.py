"""The functions of sharding_cases.py, and the shardings of their operands and results."""

import functools
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec

from batches import varlen
from packed_caches import packed_batch
from xla_attention.jax import (
    dot_product_attention,
    flash_attn_varlen,
    gather_kv_cache,
    kv_cache_update,
    merge_attention_states,
    mla_paged_attention,
    paged_attention,
    paged_attention_update,
    ragged_paged_attention_v3,
    rope_kv_cache_update,
    simple_add,
)

HEADS = (8, 4)
REPLICATED = PartitionSpec()
PACKED = PartitionSpec(None, "heads")  # [T, H, D]
BY_HEAD = PartitionSpec("heads")  # [H], or [H, T]
CACHES = {
    "interleaved": PartitionSpec(None, None, "heads"),
    "stacked": PartitionSpec(None, None, None, "heads"),
    "per_page": PartitionSpec(None, None, None, "heads"),
    "split": PartitionSpec(None, None, "heads"),
}
LAYOUTS = [layout for layout in CACHES if layout != "split"]


def numbers(seed, *shape):
    """Random numbers from NumPy, because JAX would compile a program for them."""
    return np.random.default_rng(seed).standard_normal(shape, np.float32)


class Case(NamedTuple):
    """A function, and the shardings of its operands and results."""

    attend: Callable  # from the operands to a tuple
    operands: tuple
    specs: tuple
    out_specs: tuple
    axes: int = 1  # mesh axes: heads, or batch and heads
    differentiated: bool = True
    unsharded: Callable | None = None  # the function for one device, if it is not `attend`
    donated: tuple = ()  # indices of donated operands


def packed(heads=HEADS, **options):
    """Packed sequences with sinks and slopes, sharded by heads."""
    (q, k, v, *starts), _ = varlen([(7, 9), (30, 30), (3, 1)], heads=heads, d=16, rows_after=0)
    sinks = np.float32(np.linspace(-1, 1, heads[0]))

    slopes = np.linspace(0, 0.3, heads[0], dtype=np.float32)

    def attend(q, k, v, sinks):
        more = {"sinks": sinks, "alibi_slopes": slopes, **options}
        return flash_attn_varlen(q, k, v, *starts, causal=True, return_lse=True, **more)

    return Case(attend, (q, k, v, sinks), (PACKED, PACKED, PACKED, BY_HEAD), (PACKED, BY_HEAD))


def projected(heads):
    """q, k and v are products with matrices that are sharded by columns, possibly within a head."""
    starts = np.array([0, 5, 12])
    shapes = [(12, 24), *((24, h * 16) for h in (heads[0], heads[1], heads[1]))]
    operands = tuple(np.float32(0.3) * numbers(i, *shape) for i, shape in enumerate(shapes))

    def attend(x, *matrices):
        q, k, v = ((x @ matrix).reshape(12, -1, 16) for matrix in matrices)
        return (flash_attn_varlen(q, k, v, starts, causal=True),)

    return Case(attend, operands, (REPLICATED, *(PartitionSpec(None, "heads"),) * 3), (PACKED,))


def replicated_keys(heads=HEADS):
    """Queries are sharded by heads; keys, values and sinks are computed from replicated arrays."""
    case = packed(heads)

    def attend(q, k, v, sinks):
        return case.attend(q, jnp.sin(k), jnp.cos(v), jnp.sin(sinks))

    return case._replace(attend=attend, specs=(PACKED, REPLICATED, REPLICATED, REPLICATED))


def shard_map(call, mesh, in_specs, out_specs):
    placing = {"mesh": mesh, "in_specs": in_specs, "out_specs": out_specs}
    if hasattr(jax, "shard_map"):
        return jax.shard_map(call, **placing)
    from jax.experimental.shard_map import shard_map

    return shard_map(call, **placing, check_rep=False)  # there is no replication rule for custom calls


def shard_mapped_rows(mesh):
    """shard_map over query rows: keys, values and sinks are replicated, and their gradients are summed."""
    (q, k, v, *_), _ = varlen([(32, 9)], heads=HEADS, d=16, rows_after=0)
    sinks = np.float32(np.linspace(-1, 1, HEADS[0]))

    def call(q, k, v, sinks):
        starts = (np.array([0, len(q)]), np.array([0, len(k)]))
        return flash_attn_varlen(q, jnp.sin(k), v, *starts, sinks=sinks, return_lse=True)

    specs, out_specs = (PartitionSpec("heads"), REPLICATED, REPLICATED, REPLICATED), (PartitionSpec("heads"), PACKED)
    return Case(shard_map(call, mesh, specs, out_specs), (q, k, v, sinks), specs, out_specs, unsharded=call)


def shard_mapped(mesh):
    """shard_map over heads."""
    (q, k, v, *starts), _ = varlen([(7, 9), (30, 30), (3, 1)], heads=HEADS, d=16, rows_after=0)
    call = functools.partial(flash_attn_varlen, causal=True, return_lse=True)
    specs = (PACKED, PACKED, PACKED, REPLICATED, REPLICATED)
    sharded = shard_map(call, mesh, specs, (PACKED, BY_HEAD))
    return Case(
        lambda *x: sharded(*x, *starts),
        (q, k, v),
        specs[:3],
        (PACKED, BY_HEAD),
        unsharded=lambda *x: call(*x, *starts),
    )


def pages(kv_layout, *, heads=HEADS):
    """Pages in one buffer, sharded by KV heads; there is no gradient."""
    shape = {"heads": heads, "d": 16, "pages": 4, "kv_layout": kv_layout, "rows_after": 0}
    (q, k, _, *starts), options = varlen([(7, 9), (30, 30)], **shape)

    def attend(q, k):
        return flash_attn_varlen(q, k, None, starts[0], causal=True, return_lse=True, **options)

    return Case(attend, (q, k), (PACKED, CACHES[kv_layout]), (PACKED, BY_HEAD), differentiated=False)


# Options for a dense batch, from zeros ``[B]`` that are traced and sharded as the batch is.
DENSE = {
    "lengths": lambda _: {"is_causal": True, "key_value_seq_lengths": np.array([29, 1, 12, 20])},
    "segments": lambda zeros: {"segment_ids": tuple(zeros[:, None] + jnp.arange(n) // 6 for n in (17, 29))},
    "promise": lambda zeros: {
        "mask": (zeros[:, None, None, None] + jnp.arange(29) <= jnp.arange(17)[:, None]),
        "mask_form": "causal",
    },
    "mask": lambda zeros: {"mask": ((zeros[:, None] + jnp.arange(4 * 29).reshape(4, 29)) % 3 > 0)[:, None, None]},
}


def dense(*spec, metadata="lengths", heads=HEADS):
    """A dense batch [B, T, H, D], sharded by `spec`; one KV head is not sharded."""
    shapes = [(4, 17, heads[0], 16), (4, 29, heads[1], 16), (4, 29, heads[1], 16)]
    operands = tuple(numbers(i, *shape) for i, shape in enumerate(shapes))

    zeros = np.zeros(4, np.float32)

    @jax.jit
    def attend(q, k, v, zeros):
        return (dot_product_attention(q, k, v, **DENSE[metadata](zeros.astype(jnp.int32))),)

    kv_spec = PartitionSpec(*(spec if heads[1] > 1 else spec[:1]))
    specs = (PartitionSpec(*spec), kv_spec, kv_spec, PartitionSpec(*spec[:1]))
    return Case(attend, (*operands, zeros), specs, specs[:1], axes=2 if "batch" in spec else 1)


def step(heads, kv_layout):
    """One new token per sequence, for three sequences and a cache of 6 pages, by parameter name."""
    query_heads, kv_heads = heads
    shapes = {
        "interleaved": (6, 4, 2 * kv_heads, 16),
        "stacked": (2, 6, 4, kv_heads, 16),
        "per_page": (6, 2, 4, kv_heads, 16),
        "split": (6, 4, kv_heads, 16),
    }
    cache, lens = numbers(1, *shapes[kv_layout]), np.array([5, 8, 3])
    return {
        "kv_cache": (cache, -cache) if kv_layout == "split" else cache,
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
        "kv_layout": None if kv_layout == "split" else kv_layout,
        "capacity": 12,
        "scale": 0.25,
        "return_lse": True,
    }


SEQUENCES = "context_lens block_tables query_start_loc num_seqs"
TREES = np.arange(6, dtype=np.int32).reshape(3, 2, 1)
SCORES = "sinks alibi_slopes k_scale v_scale scale return_lse"
# For each function: its sharded operands, its other arguments, and the specs of its results, where "cache" stands for
# the spec of the cache. Caches come first; updated ones are donated.
FUNCTIONS = {
    kv_cache_update: ("kv_cache key value", "slot_mapping kv_layout k_scale v_scale", ("cache",)),
    rope_kv_cache_update: ("kv_cache query key value", "slot_mapping positions cos_sin kv_layout", (PACKED, "cache")),
    gather_kv_cache: ("kv_cache k_scale", "block_tables context_lens capacity kv_layout", (PACKED, PACKED, REPLICATED)),
    paged_attention: ("kv_cache query", f"{SEQUENCES} {SCORES}", (PACKED, BY_HEAD)),
    paged_attention_update: (
        "kv_cache query key value",
        f"{SEQUENCES} slot_mapping {SCORES}",
        (PACKED, BY_HEAD, "cache"),
    ),
}


def paged_step(function, kv_layout="interleaved", *, heads=HEADS, replicated=(), **options):
    """A paged function; operands that `replicated` names are not sharded, so that the cache determines the sharding."""
    names, others, results = FUNCTIONS[function]
    names, new = names.split(), step(heads, kv_layout)
    constant = {name: new[name] for name in others.split()} | options
    caches = 2 if kv_layout == "split" else 1

    def call(*operands):
        cache = operands[0] if caches == 1 else operands[:2]
        arguments = dict(zip(names, (cache, *operands[caches:]), strict=True))
        results = function(**arguments, **constant)
        return results if isinstance(results, tuple) else (results,)

    cache_specs = (CACHES[kv_layout],) * caches
    specs = (
        {"k_scale": BY_HEAD} | dict.fromkeys(("query", "key", "value"), PACKED) | dict.fromkeys(replicated, REPLICATED)
    )
    operands = (*(new["kv_cache"] if caches == 2 else (new["kv_cache"],)), *(new[name] for name in names[1:]))
    out_specs = [spec for result in results for spec in (cache_specs if result == "cache" else (result,))]
    donated = tuple(range(caches)) if "cache" in results else ()
    specs = (*cache_specs, *(specs[name] for name in names[1:]))
    return Case(call, operands, specs, tuple(out_specs), differentiated=False, donated=donated)


def scaled_step(function, kv_layout="interleaved", *, heads=HEADS, **options):
    """`paged_step` over a cache of int8 with a scale per row, which is sharded as the cache is."""
    plain = paged_step(function, kv_layout, heads=heads, k_scale=None, v_scale=None, **options)
    names = FUNCTIONS[function][0].replace("k_scale", "").split()
    new = step(heads, kv_layout)
    cache = np.clip(np.round(40 * new["kv_cache"]), -127, 127).astype(np.int8)
    is_attention = "query" in names
    rows = [jnp.asarray(new[name], jnp.bfloat16 if name == "query" else None) for name in names[1:]]
    constant = (
        {name: new[name] for name in FUNCTIONS[function][1].split()} | {"k_scale": None, "v_scale": None} | options
    )
    constant |= {"out_dtype": jnp.float32} if is_attention else {}
    constant |= {"dtype": jnp.float32} if function is gather_kv_cache else {}

    def call(cache, scales, *rows):
        arguments = dict(zip(names, (cache, *rows), strict=True))
        results = function(**arguments, kv_scale_cache=scales, **constant)
        return results if isinstance(results, tuple) else (results,)

    spec = CACHES[kv_layout]
    specs = (spec, spec, *plain.specs[1 : 1 + len(rows)])
    updates = "cache" in FUNCTIONS[function][2]
    operands = (cache, np.abs(numbers(9, *cache.shape[:-1])) / 127, *rows)
    out_specs = (*plain.out_specs, spec) if updates else plain.out_specs
    donated = (0, 1) if updates else ()
    return Case(call, operands, specs, out_specs, differentiated=False, donated=donated)


def latent_step_of(function, spec=PACKED):
    """A step over latent rows: query heads are sharded, and every device has the whole cache."""
    new, lens = numbers(3, 3, 24), np.array([5, 8, 3])
    sequences = (np.arange(4), lens, np.array([[4, 1], [0, 5], [2, 2]]))
    sinks = np.float32(np.linspace(-1, 1, HEADS[0]))
    options = {"softmax_scale": 0.25, "causal": True, "return_lse": True}

    def attend(cache, q, sinks, *rows):
        if function is mla_paged_attention:
            return function(q, cache, *sequences, sinks=sinks, head_dim_v=16, **options)
        return function(q, cache, *sequences, *rows, np.array([4, 23, 10]), sinks=sinks, **options)

    rows = () if function is mla_paged_attention else (new[:, :16], new[:, 16:])
    operands = (numbers(1, 6, 4, 24), numbers(2, 3, HEADS[0], 24), sinks, *rows)
    specs = (REPLICATED, spec, REPLICATED, *(REPLICATED,) * len(rows))
    by_head = PartitionSpec(spec[1]) if len(spec) > 1 else REPLICATED
    out_specs = (spec, by_head, *(REPLICATED,) * bool(rows))
    return Case(attend, operands, specs, out_specs, differentiated=False, donated=(0,) if rows else ())


def over_both_axes(case):
    """The case with heads sharded by both mesh axes."""

    def by_both(specs):
        both = ("batch", "heads")
        return tuple(PartitionSpec(*(both if axis == "heads" else axis for axis in spec)) for spec in specs)

    return case._replace(specs=by_both(case.specs), out_specs=by_both(case.out_specs), axes=2)


def by_two_axes(case):
    """The case, of two KV heads, with K, V and caches sharded by heads over one mesh axis, and all else over both."""

    def specs_of(arrays, specs):
        are_kv = (x.ndim >= 4 or x.shape[1:2] == (2,) for x in arrays)
        axes = ("batch" if is_kv else ("batch", "heads") for is_kv in are_kv)
        return tuple(
            PartitionSpec(*(axes_of_heads if axis == "heads" else axis for axis in spec))
            for axes_of_heads, spec in zip(axes, specs, strict=True)
        )

    results = jax.eval_shape(case.attend, *case.operands)
    specs, out_specs = specs_of(case.operands, case.specs), specs_of(results, case.out_specs)
    return case._replace(specs=specs, out_specs=out_specs, axes=2)


def by_pages(case):
    """A step with the stacked cache sharded by pages."""
    return case._replace(specs=(PartitionSpec(None, "heads"), *(REPLICATED,) * 2), axes=2, donated=())


def dense_with_sinks(spec, sinks_spec):
    """A dense batch with sinks, whose gradient is a sum over the batch."""
    case = dense(*spec)
    sinks = np.float32(np.linspace(-1, 1, HEADS[0]))

    def attend(q, k, v, sinks):
        return (dot_product_attention(q, k, v, sinks=sinks),)

    specs = (*case.specs[:3], PartitionSpec(sinks_spec))
    return case._replace(attend=attend, operands=(*case.operands[:3], sinks), specs=specs)


def decoded(heads=HEADS):
    """A decode step of a layer, which calls four operators."""
    new = step(heads, "interleaved")
    rotation = tuple(new[name] for name in ("slot_mapping", "positions", "cos_sin"))
    sequences = tuple(new[name] for name in SEQUENCES.split())

    def attend(cache, query, key, value):
        query, cache = rope_kv_cache_update(cache, query, key, value, *rotation)
        out, lse = paged_attention(query, cache, *sequences, scale=0.25, return_lse=True)
        out, lse = merge_attention_states(out, lse, 2 * out, lse)
        return simple_add(out, query), lse, cache

    case = paged_step(rope_kv_cache_update, heads=heads)
    return case._replace(attend=attend, out_specs=(PACKED, BY_HEAD, CACHES["interleaved"]))


def packed_cache(layout, *, heads=None, **options):
    """ragged_paged_attention_v3 over a packed cache, sharded by its rows, which have both K and V of a head."""
    default_heads = (16, 8) if layout == "concatenated" else HEADS
    shape = {"heads": heads or default_heads, "d": 64, "layout": layout}
    operands = packed_batch([(3, 9), (1, 5)], dtype="bfloat16", spare_rows=0, **shape)
    # f32, because roundings to bf16 hide errors, with the shape that bf16 has.
    operands = {name: np.nan_to_num(np.float32(x)) if x.ndim > 2 else x for name, x in operands.items()}
    names = ("kv_cache", "queries", "keys", "values")
    others = {name: x for name, x in operands.items() if name not in names}
    arrays = tuple(operands[name] for name in names)
    sinks = np.linspace(-1, 1, shape["heads"][0], dtype=np.float32)

    def attend(*arrays):
        scores = {"attention_sink": sinks, "sm_scale": 0.1, "kv_layout": layout, **options}
        return ragged_paged_attention_v3(**dict(zip(names, arrays, strict=True)), **others, **scores)

    specs = (CACHES["interleaved"], *(PACKED,) * 3)
    return Case(attend, arrays, specs, (PACKED, specs[0]), differentiated=False, donated=(0,))


def merged(spec, lse_spec):
    """Two states, of which one is sharded."""
    operands = (numbers(7, 12, 8, 16), numbers(8, 8, 12), numbers(9, 12, 8, 16), numbers(10, 8, 12))
    spec, lse_spec = PartitionSpec(*spec), PartitionSpec(*lse_spec)
    merge = merge_attention_states
    return Case(
        merge, operands, (spec, lse_spec, REPLICATED, REPLICATED), (spec, lse_spec), axes=2, differentiated=False
    )


def added():
    spec = PartitionSpec("batch", None, "heads")
    operands = (numbers(11, 4, 3, 8, 2), numbers(12, 4, 3, 8, 2))
    return Case(lambda *x: (simple_add(*x),), operands, (spec, spec), (spec,), axes=2, differentiated=False)


def biased(*spec, bias_shape=(4, 8, 17, 29), bias_spec=()):
    """A dense batch with a bias, which has a gradient."""
    case = dense(*spec)

    def attend(q, k, v, bias):
        return (dot_product_attention(q, k, v, bias, is_causal=True),)

    operands = (*case.operands[:3], numbers(9, *bias_shape))
    return case._replace(attend=attend, operands=operands, specs=(*case.specs[:3], PartitionSpec(*bias_spec)))
