"""Programs on a mesh of devices, each compared with the same on one device; run by test_sharding.py as a process.

Prints a line of JSON for each case: its name, the collectives in the compiled program, how far the results are off, and
how many calls there are.
"""

import functools
import json
import sys
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from batches import varlen
from xla_attention.jax import dot_product_attention, flash_attn_varlen

COLLECTIVES = ("all-gather", "all-reduce", "all-to-all", "collective-permute", "reduce-scatter")
HEADS = (8, 4)
PACKED = PartitionSpec(None, "heads")  # [T, H, D]
OF_HEADS = PartitionSpec("heads")  # [H], or [H, T]


class Case(NamedTuple):
    """A function, and how its operands and results lie on the mesh."""

    attend: Callable  # of the operands, to a tuple
    operands: tuple
    specs: tuple
    out_specs: tuple
    axes: int = 1  # of the mesh: heads, or batch and heads
    differentiated: bool = True
    plain: Callable | None = None  # what runs on one device, if it is not `attend`


def packed(heads=HEADS, **options):
    """Packed sequences, heads over all devices; with them sinks and slopes."""
    (q, k, v, *starts), _ = varlen([(7, 9), (30, 30), (3, 1)], heads=heads, d=16, rows_after=0)
    sinks = jnp.linspace(-1, 1, heads[0])

    slopes = np.linspace(0, 0.3, heads[0], dtype=np.float32)

    def attend(q, k, v, sinks):
        more = {"sinks": sinks, "alibi_slopes": slopes, **options}
        return flash_attn_varlen(q, k, v, *starts, causal=True, return_lse=True, **more)

    return Case(attend, (q, k, v, sinks), (PACKED, PACKED, PACKED, OF_HEADS), (PACKED, OF_HEADS))


def mapped(mesh):
    """shard_map over heads: every device makes its own call."""
    (q, k, v, *starts), _ = varlen([(7, 9), (30, 30), (3, 1)], heads=HEADS, d=16, rows_after=0)
    call = functools.partial(flash_attn_varlen, causal=True, return_lse=True)
    specs = (PACKED, PACKED, PACKED, PartitionSpec(), PartitionSpec())
    placing = {"mesh": mesh, "in_specs": specs, "out_specs": (PACKED, OF_HEADS)}
    if hasattr(jax, "shard_map"):
        on_each = jax.shard_map(call, **placing)
    else:
        from jax.experimental.shard_map import shard_map

        on_each = shard_map(call, **placing, check_rep=False)  # which knows no custom call
    return Case(
        lambda *x: on_each(*x, *starts),
        (q, k, v),
        specs[:3],
        (PACKED, OF_HEADS),
        plain=lambda *x: call(*x, *starts),
    )


def pages(kv_layout, spec):
    """Pages in one buffer, KV heads over all devices; there is no gradient."""
    form = {"heads": HEADS, "d": 16, "pages": 4, "kv_layout": kv_layout, "rows_after": 0}
    (q, k, _, *starts), options = varlen([(7, 9), (30, 30)], **form)

    def attend(q, k):
        return flash_attn_varlen(q, k, None, starts[0], causal=True, return_lse=True, **options)

    return Case(attend, (q, k), (PACKED, PartitionSpec(*spec)), (PACKED, OF_HEADS), differentiated=False)


def dense(*spec):
    """A dense batch [B, T, H, D], cut as `spec` says."""
    shapes = [(4, 17, HEADS[0], 16), (4, 29, HEADS[1], 16), (4, 29, HEADS[1], 16)]
    operands = tuple(jax.random.normal(jax.random.key(i), shape) for i, shape in enumerate(shapes))
    lengths = jnp.array([29, 1, 12, 20])

    def attend(q, k, v):
        return (dot_product_attention(q, k, v, is_causal=True, key_value_seq_lengths=lengths),)

    return Case(
        attend, operands, (PartitionSpec(*spec),) * 3, (PartitionSpec(*spec),), axes=2 if "batch" in spec else 1
    )


CASES = {
    "packed, by heads": lambda _: packed(),
    "packed, deterministic, by heads": lambda _: packed(deterministic=True),
    "packed, one KV head": lambda _: packed((8, 1))._replace(
        specs=(PACKED, PartitionSpec(), PartitionSpec(), OF_HEADS)
    ),
    "packed, shard_map": mapped,
    "interleaved pages, by heads": lambda _: pages("interleaved", (None, None, "heads")),
    "stacked pages, by heads": lambda _: pages("stacked", (None, None, None, "heads")),
    "dense, by batch": lambda _: dense("batch"),
    "dense, by heads": lambda _: dense(None, None, "heads"),
    "dense, by batch and heads": lambda _: dense("batch", None, "heads"),
}


def results_and_gradients(attend, case, cotangents):
    """A program with everything that the case computes."""

    def total(operands):
        found = attend(*operands)
        return sum(jnp.sum(x * y) for x, y in zip(found, cotangents, strict=True)), found

    if not case.differentiated:
        return lambda *operands: (attend(*operands), ())
    return lambda *operands: jax.grad(total, has_aux=True)(operands)[::-1]


def run(name, meshes):
    """The case on the mesh against the same on one device."""
    case = CASES[name](meshes[0])
    mesh = meshes[case.axes - 1]
    plain = case.plain or case.attend
    cotangents = [jax.random.normal(jax.random.key(9), x.shape, x.dtype) for x in jax.eval_shape(plain, *case.operands)]
    wanted = jax.jit(results_and_gradients(plain, case, cotangents))(*case.operands)

    def placed(specs):
        return tuple(NamedSharding(mesh, spec) for spec in specs)

    shardings = (placed(case.out_specs), placed(case.specs) if case.differentiated else ())
    program = jax.jit(results_and_gradients(case.attend, case, cotangents), out_shardings=shardings)
    operands = [jax.device_put(x, place) for x, place in zip(case.operands, placed(case.specs), strict=True)]
    compiled = program.lower(*operands).compile()
    text = compiled.as_text()
    pairs = zip(jax.tree.leaves(compiled(*operands)), jax.tree.leaves(wanted), strict=True)
    return {
        "case": name,
        "collectives": [c for c in COLLECTIVES if f" {c}(" in text or f" {c}-start(" in text],
        "off": max(float(np.where(a == b, 0, np.abs(a - b)).max()) for a, b in (map(np.asarray, p) for p in pairs)),
        "calls": text.count('custom_call_target="xla_gpu_flash_attn_varlen'),
    }


if __name__ == "__main__":
    platform, partitioner = sys.argv[1:3]
    if partitioner == "gspmd":
        jax.config.update("jax_use_shardy_partitioner", False)
    devices = np.array(jax.devices(platform))
    devices = devices[: 4 if len(devices) >= 4 else 2]
    meshes = [Mesh(devices, ("heads",)), Mesh(devices.reshape(2, -1), ("batch", "heads"))]
    with jax.default_device(devices[0]):
        for name in sys.argv[3:] or CASES:
            print(json.dumps(run(name, meshes)), flush=True)
