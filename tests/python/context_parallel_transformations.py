"""JAX's transformations of context_parallel_attention, and its compiled programs, on four CPU devices.

test_context_parallel_transformations.py starts it and reads a line of JSON per check: its name and its value.
"""

import collections
import functools
import itertools
import json
import re
import sys

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, PartitionSpec

from xla_attention.jax import (
    context_parallel_attention,
    export_disabled_checks,
    flash_attn_varlen,
    inverse_zigzag_order,
    zigzag_order,
)

DEVICES = np.array(jax.devices())
MESH = Mesh(DEVICES, ("cp",))
STARTS = np.array([0, 8, 40, 64])
TOTAL, HEADS, KV_HEADS, DIM = 64, 4, 2, 16
ROWS = PartitionSpec("cp")
CHECKS = {}


def check(function):
    """Have the program run the function; it returns the check's value, a small number or what JSON holds."""
    CHECKS[function.__name__] = function
    return function


def operands(dtype=jnp.float32, heads=(HEADS, KV_HEADS)):
    rng = np.random.default_rng(3)
    return [jnp.asarray(rng.standard_normal((TOTAL, h, DIM)), dtype) for h in (heads[0], heads[1], heads[1])]


def one_device(q, k, v, **options):
    return flash_attn_varlen(q, k, v, STARTS, causal=True, **options)


def parallel(
    strategy, layout="contiguous", *, starts=STARTS, mesh=MESH, in_specs=(ROWS,) * 3, out_specs=ROWS, **options
):
    """The function of q, k and v in the order of the devices."""
    options = {"axis_name": "cp", "strategy": strategy, "layout": layout, **options}

    def attend(q, k, v):
        return context_parallel_attention(q, k, v, starts, **options)

    return jax.shard_map(attend, mesh=mesh, in_specs=in_specs, out_specs=out_specs)


def zigzag(function, n=4):
    """The function of rows in the order of the stream."""
    order, back = zigzag_order(STARTS, n), inverse_zigzag_order(STARTS, n)
    return lambda q, k, v: function(q[order], k[order], v[order])[back]


def square(function):
    return lambda *arguments: jnp.sum(function(*arguments) ** 2)


def gradients(function):
    return jax.jit(jax.grad(square(function), (0, 1, 2)))


def difference(actual, expected):
    """The largest difference of two trees of arrays, as a part of the largest number of each array."""
    pairs = zip(jax.tree.leaves(jax.block_until_ready(actual)), jax.tree.leaves(expected), strict=True)
    return max(float(np.abs(np.float64(x) - np.float64(y)).max() / np.abs(y).max()) for x, y in pairs)


# ---------- transformations: the largest difference


@check
def checkpoint():
    function = parallel("ring")
    return difference(gradients(jax.checkpoint(function))(*operands()), gradients(one_device)(*operands()))


@check
def scan_over_layers():
    weights = 0.5 + np.arange(3, dtype=np.float32) / 3

    def layers(attend, q, k, v):
        def layer(x, weight):
            return jax.checkpoint(lambda y: y + weight * attend(y, k, v))(x), None

        return jax.lax.scan(layer, q, weights)[0]

    on_mesh = functools.partial(context_parallel_attention, axis_name="cp", strategy="ring", layout="zigzag")

    def on_device(q, k, v):
        return layers(lambda *x: on_mesh(*x, STARTS), q, k, v)

    function = zigzag(jax.shard_map(on_device, mesh=MESH, in_specs=(ROWS,) * 3, out_specs=ROWS))
    return difference(gradients(function)(*operands()), gradients(functools.partial(layers, one_device))(*operands()))


@check
def export():
    function = gradients(parallel("ring"))
    arrays = operands()
    exported = jax.export.export(function, disabled_checks=export_disabled_checks())(*arrays)
    restored = jax.export.deserialize(exported.serialize())
    on_mesh = [jax.device_put(x, jax.sharding.NamedSharding(MESH, PartitionSpec())) for x in arrays]
    return difference(jax.jit(restored.call)(*on_mesh), gradients(one_device)(*arrays))


@check
def vmap():
    """Over a mapped axis within shard_map."""
    largest = 0.0
    for strategy in ("all_gather", "ring", "all_to_all"):
        heads = (4, 4) if strategy == "all_to_all" else (4, 2)
        batch = [jnp.stack([x, 2 * x, -x]) for x in operands(heads=heads)]
        expected = [
            jnp.stack(x) for x in zip(*(gradients(one_device)(*x) for x in zip(*batch, strict=True)), strict=True)
        ]
        attend = functools.partial(context_parallel_attention, axis_name="cp", strategy=strategy)
        mapped = jax.vmap(lambda q, k, v, attend=attend: attend(q, k, v, STARTS))
        rows = PartitionSpec(None, "cp")
        function = jax.shard_map(mapped, mesh=MESH, in_specs=(rows,) * 3, out_specs=rows)
        largest = max(largest, difference(gradients(function)(*batch), expected))
    return largest


@check
def heads_on_another_axis():
    mesh = Mesh(DEVICES.reshape(2, 2), ("cp", "tp"))
    rows, sinks = PartitionSpec("cp", "tp"), jnp.linspace(-1, 1, HEADS)

    def attend(q, k, v, sinks):
        how = {"axis_name": "cp", "strategy": "ring", "layout": "zigzag"}
        return context_parallel_attention(q, k, v, STARTS, sinks=sinks, **how)

    specs = (rows, rows, rows, PartitionSpec("tp"))
    function = jax.shard_map(attend, mesh=mesh, in_specs=specs, out_specs=rows)
    order, back = zigzag_order(STARTS, 2), inverse_zigzag_order(STARTS, 2)
    grads = [
        jax.jit(jax.grad(lambda q, k, v, s, f=f: jnp.sum(f(q, k, v, s) ** 2), (0, 1, 2, 3)))(*operands(), sinks)
        for f in (
            lambda q, k, v, s: function(q[order], k[order], v[order], s)[back],
            lambda q, k, v, s: one_device(q, k, v, sinks=s),
        )
    ]
    return difference(*grads)


@check
def streams_of_data_parallel_groups():
    """Every group of devices has a stream and starts of its own."""
    mesh = Mesh(DEVICES.reshape(2, 2), ("data", "cp"))
    starts = np.array([STARTS, [0, 20, 44, 64]])
    rows = PartitionSpec(("data", "cp"))

    def attend(q, k, v, starts):
        return context_parallel_attention(q, k, v, starts[0], axis_name="cp", strategy="ring")

    specs = (rows, rows, rows, PartitionSpec("data"))
    function = jax.shard_map(attend, mesh=mesh, in_specs=specs, out_specs=rows)

    def single(q, k, v):
        streams = [x.reshape(2, TOTAL, *x.shape[1:]) for x in (q, k, v)]
        parts = [flash_attn_varlen(*(x[i] for x in streams), starts[i], causal=True) for i in range(2)]
        return jnp.concatenate(parts)

    arrays = [jnp.concatenate([x, -x]) for x in operands()]
    return difference(gradients(lambda *x: function(*x, starts))(*arrays), gradients(single)(*arrays))


@check
def two_axes_as_one():
    mesh = Mesh(DEVICES.reshape(2, 2), ("host", "gpu"))
    rows, axes = PartitionSpec(("host", "gpu")), ("host", "gpu")
    largest = 0.0
    for strategy, layout in (("ring", "zigzag"), ("all_gather", "zigzag"), ("all_to_all", "contiguous")):
        heads = (4, 4)
        function = parallel(strategy, layout, mesh=mesh, in_specs=(rows,) * 3, out_specs=rows, axis_name=axes)
        function = zigzag(function) if layout == "zigzag" else function
        arrays = operands(heads=heads)
        largest = max(largest, difference(gradients(function)(*arrays), gradients(one_device)(*arrays)))
    return largest


@check
def all_to_all_within_ring():
    """USP, as docs/context_parallel.md composes it."""
    mesh = Mesh(DEVICES.reshape(2, 2), ("outer", "inner"))
    rows = PartitionSpec(("outer", "inner"))
    largest = 0.0
    for layout in ("contiguous", "zigzag"):

        def attend(q, k, v, layout=layout):
            q, k, v = (jax.lax.all_to_all(x, "inner", 1, 0, tiled=True) for x in (q, k, v))
            out = context_parallel_attention(q, k, v, STARTS, axis_name="outer", strategy="ring", layout=layout)
            return jax.lax.all_to_all(out, "inner", 0, 1, tiled=True)

        function = jax.shard_map(attend, mesh=mesh, in_specs=(rows,) * 3, out_specs=rows)
        function = zigzag(function, 2) if layout == "zigzag" else function
        largest = max(largest, difference(gradients(function)(*operands()), gradients(one_device)(*operands())))
    return largest


@check
def gradients_within_shard_map():
    """Of a loss that is summed over the devices, with sinks that are the same on all of them."""
    sinks = jnp.linspace(-1, 1, HEADS)

    def loss(attend, q, k, v, sinks):
        return jnp.sum(attend(q, k, v, sinks) ** 2)

    def on_device(q, k, v, sinks):
        def attend(q, k, v, sinks):
            return context_parallel_attention(q, k, v, STARTS, axis_name="cp", sinks=sinks)

        return jax.grad(lambda *x: jax.lax.psum(loss(attend, *x), "cp"), (0, 1, 2, 3))(q, k, v, sinks)

    specs = (ROWS,) * 3 + (PartitionSpec(),)
    function = jax.jit(jax.shard_map(on_device, mesh=MESH, in_specs=specs, out_specs=specs))
    single = jax.grad(lambda *x: loss(lambda q, k, v, s: one_device(q, k, v, sinks=s), *x), (0, 1, 2, 3))
    return difference(function(*operands(), sinks), single(*operands(), sinks))


@check
def without_jit():
    return difference(parallel("ring")(*operands()), one_device(*operands()))


@check
def explicit_axes():
    mesh = Mesh(DEVICES, ("cp",), axis_types=(jax.sharding.AxisType.Explicit,))
    on_mesh = [jax.device_put(x, jax.sharding.NamedSharding(mesh, ROWS)) for x in operands()]
    return difference(gradients(parallel("ring", mesh=mesh))(*on_mesh), gradients(one_device)(*operands()))


@check
def gradient_of_the_queries_alone():
    functions = zigzag(parallel("all_gather", "zigzag")), one_device
    return difference(*(jax.jit(jax.grad(square(f)))(*operands()) for f in functions))


@check
def queries_that_are_replicated():
    """q, k and v that are the same on every device: 4 copies of the rows in one stream."""
    spec = PartitionSpec()

    def attend(q, k, v):
        return context_parallel_attention(q, k, v, np.array([0, 16, 32, 48, 64]), axis_name="cp", strategy="ring")

    function = jax.shard_map(attend, mesh=MESH, in_specs=(spec,) * 3, out_specs=ROWS)
    arrays = [x[:16] for x in operands()]

    def single(q, k, v):
        return jnp.tile(flash_attn_varlen(q, k, v, np.array([0, 16]), causal=True), (4, 1, 1))

    return difference(gradients(function)(*arrays), gradients(single)(*arrays))


@check
def keys_of_8_bits():
    """The forward pass of bf16 queries over keys and values of 8 bits, which travel as they are."""
    q, k, v = operands(jnp.bfloat16)
    arrays = q, k.astype(jnp.float8_e4m3fn), v.astype(jnp.float8_e4m3fn)
    expected = one_device(*arrays)
    functions = zigzag(parallel("ring", "zigzag")), parallel("ring"), zigzag(parallel("all_gather", "zigzag"))
    return max(difference(jax.jit(function)(*arrays), expected) for function in functions)


@check
def no_sequences_and_no_rows():
    largest = 0.0
    cases = ("all_gather", "zigzag"), ("ring", "zigzag"), ("ring", "contiguous"), ("all_to_all", "contiguous")
    for (strategy, layout), (rows, starts) in itertools.product(cases, [(64, [8]), (0, [0]), (0, [0, 0])]):
        arrays = [jnp.full((rows, 4, DIM), jnp.nan)] * 3
        function = parallel(strategy, layout, starts=np.array(starts))
        results = jax.jit(function)(*arrays), *gradients(function)(*arrays)
        assert all(x.shape == arrays[0].shape for x in results)
        largest = max(largest, *(float(jnp.abs(x).max(initial=0)) for x in jax.block_until_ready(results)))
    return largest


# ---------- compiled programs: the collectives and calls


COLLECTIVES = "all-gather|all-reduce|all-to-all|collective-permute|reduce-scatter"


def counted(compiled):
    """How often each collective, with its result's type, and our calls occur in a program."""
    text = compiled.as_text()
    found = re.findall(rf"= (\S+).*? ({COLLECTIVES})(?:-start)?\(", text)
    counts = collections.Counter(f"{name} {kind.split('{')[0]}" for kind, name in found)
    return {**counts, "calls": text.count('custom_call_target="xla_gpu_')}


@check
def programs():
    """The collectives of the forward pass, and of the backward pass alone, of each strategy."""
    rows = {}
    cases = {
        "all_gather": parallel("all_gather", "zigzag"),
        "ring": parallel("ring", "zigzag"),
        "ring, contiguous": parallel("ring"),
        "halo": parallel("ring", window=(20, 0)),
        "all_to_all": parallel("all_to_all"),
    }
    for name, function in cases.items():
        arrays = operands(heads=(4, 4)) if name == "all_to_all" else operands()
        rows[f"{name}, forward"] = counted(jax.jit(function).lower(*arrays).compile())
        # Residuals as arguments: the program has no forward pass.
        out, vjp = jax.vjp(jax.jit(function), *arrays)
        rows[f"{name}, backward"] = counted(jax.jit(lambda vjp, dout: vjp(dout)).lower(vjp, out).compile())
    return rows


@check
def barriers():
    """Of the backward pass in one program with the forward pass."""
    return gradients(parallel("ring")).lower(*operands()).as_text().count("stablehlo.optimization_barrier")


if __name__ == "__main__":
    for name, function in CHECKS.items():
        if not sys.argv[1:] or name in sys.argv[1:]:
            print(json.dumps({"check": name, "value": function()}), flush=True)
