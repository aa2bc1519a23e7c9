"""One of two processes with two CPU devices each; test_two_processes.py runs both.

    two_processes_program.py port process

Prints a line of JSON per program: its name, the largest error of this process' shards against one device, the
collectives in the compiled program, and the number of processes whose devices the results are on.
"""

import functools
import json
import re
import sys

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

COLLECTIVES = ("all-gather", "all-reduce", "all-to-all", "collective-permute", "reduce-scatter")


def numbers(seed, *shape):
    return np.random.default_rng(seed).standard_normal(shape, np.float32)


def report(function, operands, specs, mesh, donated=(), expected=None):
    """Run it on this process' first device, and on the mesh of both processes' devices."""
    if expected is None:
        expected = jax.tree.map(np.asarray, jax.jit(function)(*operands))

    def place(x, spec):
        # Each process makes its own shards from its own copy of the array, as every process would from a checkpoint.
        return jax.make_array_from_callback(x.shape, NamedSharding(mesh, spec), lambda index: x[index])

    placed = [place(np.asarray(x), spec) for x, spec in zip(operands, specs, strict=True)]
    compiled = jax.jit(function, donate_argnums=donated).lower(*placed).compile()
    before = {s.data.unsafe_buffer_pointer() for i in donated for s in placed[i].addressable_shards}
    actual = jax.tree.leaves(jax.block_until_ready(compiled(*placed)))
    shards = [s for x in actual for s in x.addressable_shards]
    errors = [
        np.abs(np.asarray(s.data) - y[s.index]).max()
        for x, y in zip(actual, jax.tree.leaves(expected), strict=True)
        for s in x.addressable_shards
    ]
    text = compiled.as_text()
    return {
        "error": float(max(errors)),
        "collectives": [name for name in COLLECTIVES if re.search(rf" {name}(-start)?\(", text)],
        "in_place": before <= {s.data.unsafe_buffer_pointer() for s in shards},
        "processes": len({device.process_index for x in actual for device in x.sharding.device_set}),
    }


def paged_step(mesh):
    """A decode step over a donated cache that is sharded by heads."""
    from xla_attention.jax import paged_attention_update

    lens, tables = np.array([5, 8, 3], np.int32), np.array([[4, 1], [0, 5], [2, 3]], np.int32)
    slots = tables[np.arange(3), (lens - 1) // 4] * 4 + (lens - 1) % 4
    operands = numbers(0, 3, 8, 16), numbers(1, 6, 4, 8, 16), numbers(2, 3, 4, 16), numbers(3, 3, 4, 16)

    def step(query, cache, key, value):
        sequences = lens, tables, np.arange(4), np.array([3])
        return paged_attention_update(query, cache, *sequences, key, value, slots, scale=0.25)

    specs = P(None, "model"), P(None, None, "model"), P(None, "model"), P(None, "model")
    return report(step, operands, specs, mesh, donated=(1,))


def gradients(mesh):
    """The gradients of packed sequences, with query heads over both processes and fewer KV heads than devices."""
    from xla_attention.jax import flash_attn_varlen

    starts = np.array([0, 7, 7, 40])

    def attend(q, k, v, dout):
        return jax.vjp(functools.partial(flash_attn_varlen, cu_seqlens_q=starts, causal=True), q, k, v)[1](dout)

    operands = numbers(0, 40, 8, 16), numbers(1, 40, 2, 16), numbers(2, 40, 2, 16), numbers(3, 40, 8, 16)
    return report(attend, operands, (P(None, "model"), P(), P(), P(None, "model")), mesh)


def ring(mesh):
    """Context parallelism: results and gradients of sequences that are spread over both processes."""
    from xla_attention.jax import context_parallel_attention, flash_attn_varlen, zigzag_order

    starts = np.array([0, 8, 72, 120], np.int32)
    order = np.asarray(zigzag_order(starts, mesh.size))
    operands = [numbers(seed, 120, heads, 16)[order] for seed, heads in enumerate((4, 2, 2, 4))]
    attend = functools.partial(context_parallel_attention, axis_name="model", strategy="ring", layout="zigzag")
    rows = P("model")
    attend = jax.shard_map(attend, mesh=mesh, in_specs=(rows, rows, rows, P()), out_specs=rows)

    def with_gradients(attend, q, k, v, dout):
        out, vjp = jax.vjp(attend, q, k, v)
        return out, *vjp(dout)

    back = np.argsort(order)
    expected = with_gradients(
        functools.partial(flash_attn_varlen, cu_seqlens_q=starts, causal=True),
        *(jnp.asarray(x[back]) for x in operands),
    )
    expected = [np.asarray(x)[order] for x in expected]

    def on_mesh(q, k, v, dout):
        return with_gradients(lambda *x: attend(*x, starts), q, k, v, dout)

    return report(on_mesh, operands, (rows,) * 4, mesh, expected=expected)


if __name__ == "__main__":
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.distributed.initialize(f"127.0.0.1:{sys.argv[1]}", 2, int(sys.argv[2]), initialization_timeout=60)
    mesh = Mesh(np.array(jax.devices()), ("model",))
    assert mesh.size == 4 and len(jax.local_devices()) == 2
    for program in (paged_step, gradients, ring):
        print(json.dumps({"program": program.__name__, **program(mesh)}), flush=True)
