"""Runs context_parallel_paged_attention on DEVICES devices; test_context_parallel_decode.py runs it as a subprocess.

    context_parallel_decode_program.py cpu|gpu (CASE|generation) ...

Prints a line of JSON per case, with the differences to one device and what the compiled program has.
"""

import json
import sys

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from context_parallel_decode_cases import CASES, DEVICES, SCALE, batch_of, in_layout, on_one_device, stored_scales
from sharding_program import COLLECTIVES, addresses, difference
from xla_attention.jax import (
    context_parallel_paged_attention,
    context_parallel_slots,
    export_disabled_checks,
    kv_cache_update,
    paged_attention,
)


def mesh_of(axes, devices):
    """A mesh, the axis name of pages and that of heads."""
    if axes == "cp tp":
        return Mesh(devices[:DEVICES].reshape(-1, 2), ("cp", "tp")), "cp", "tp"
    if axes == "a b":
        return Mesh(devices[:DEVICES].reshape(2, -1), ("a", "b")), ("a", "b"), None
    explicit = {"axis_types": (jax.sharding.AxisType.Explicit,)} if axes == "explicit cp" else {}
    return Mesh(devices[:DEVICES], ("cp",), **explicit), "cp", None


def placed(operand, specs, mesh):
    """An operand on the mesh; `specs` is one or a tree of them."""
    if not isinstance(specs, P):
        shardings = jax.tree.map(lambda spec: NamedSharding(mesh, spec), specs, is_leaf=lambda x: isinstance(x, P))
        return jax.device_put(operand, shardings)
    return None if operand is None else jax.device_put(operand, NamedSharding(mesh, specs))


def numpy(x):
    return np.asarray(x.astype(jnp.float32))


def collectives(text):
    """The number of each collective in a compiled program."""
    counts = {name: text.count(f" {name}(") + text.count(f" {name}-start(") for name in COLLECTIVES}
    return {name: count for name, count in counts.items() if count}


def run(name, devices):
    """The line of a case."""
    case = CASES[name]
    mesh, pages_axis, heads_axis = mesh_of(case.axes, devices)
    num_devices = DEVICES // (2 if heads_axis else 1)
    batch = batch_of(case, num_devices)
    expected = jax.jit(lambda: on_one_device(case, batch))()
    # The pages of all devices; free pages hold NaN.
    gather = np.where(batch.pages < 0, batch.free_page, batch.pages).reshape(-1)
    cache = in_layout(*(x[gather] for x in batch.whole), case.kv_layout)

    def step(cache, query, key, value, tables, sinks, scales):
        tables = tables[0]
        slots = context_parallel_slots(
            batch.positions,
            tables,
            batch.whole[0].shape[1],
            pages_axis,
            query_start_loc=batch.starts,
            num_seqs=batch.num_seqs,
        )
        updated = kv_cache_update(cache, key, value, slots, kv_layout=case.kv_layout, **stored_scales(scales))
        out, lse = context_parallel_paged_attention(
            query,
            cache if case.passes_rows else updated,
            batch.lens,
            tables,
            batch.starts,
            batch.num_seqs,
            *((key, value) if case.passes_rows else ()),
            axis_name=pages_axis,
            scale=SCALE,
            gather_heads=case.gather,
            scatter_heads=case.scatter,
            sinks=sinks,
            kv_layout=case.kv_layout,
            return_lse=True,
            **scales,
            **case.options,
        )
        return out, lse, updated

    kv_heads = case.heads[1]
    cache_dims = {None: (0, 2), "interleaved": (0, 2), "stacked": (1, 3), "per_page": (0, 3)}[case.kv_layout]
    cache_spec = [None] * 5
    cache_spec[cache_dims[0]], cache_spec[cache_dims[1]] = pages_axis, heads_axis
    cache_spec = P(*cache_spec[: 4 if case.kv_layout in (None, "interleaved") else 5])
    cache_specs = (cache_spec, cache_spec) if case.kv_layout is None else cache_spec
    per_head, packed = P(heads_axis), P(None, heads_axis)
    query_spec = P(None, pages_axis) if case.gather else packed
    scale_specs = {x: per_head if y.shape == (kv_heads,) else P() for x, y in batch.scales.items()}
    in_specs = (cache_specs, query_spec, packed, packed, P(pages_axis), per_head, scale_specs)
    by_heads = pages_axis if case.scatter else heads_axis
    out_specs = (P(None, by_heads), P(by_heads), cache_specs)
    operands = (cache, batch.query, batch.key, batch.value, batch.local_tables, batch.sinks, batch.scales)
    # Before 0.10, JAX's types cannot say that a gathered result is the same on every device.
    check_vma = case.check_vma and (case.scatter or jax.__version_info__ >= (0, 10))
    step = jax.shard_map(step, mesh=mesh, in_specs=in_specs, out_specs=out_specs, check_vma=check_vma)
    operands = [placed(x, specs, mesh) for x, specs in zip(operands, in_specs, strict=True)]
    compiled = jax.jit(step).lower(*operands).compile()
    text = compiled.as_text()
    out, lse, updated = jax.block_until_ready(compiled(*operands))
    expected_cache = in_layout(*(x[gather] for x in expected[2]), case.kv_layout)
    return {
        "case": name,
        "error": float(difference(numpy(out), numpy(expected[0])).max()),
        "largest": float(np.abs(numpy(expected[0])).max()),
        "lse_error": float(difference(numpy(lse), numpy(expected[1])).max()),
        "shape": [list(out.shape), str(out.dtype)] == [list(expected[0].shape), str(expected[0].dtype)],
        "same_cache": all(
            np.asarray(x).tobytes() == np.asarray(y).tobytes()
            for x, y in zip(jax.tree.leaves(updated), jax.tree.leaves(expected_cache), strict=True)
        ),
        "collectives": collectives(text),
    }


def decoder(attend):
    """A decode step of two layers: from states ``[S, E]`` to states, with the caches updated."""
    heads, kv_heads, d = 8, 2, 16
    rng = np.random.default_rng(1)
    sizes = [heads * d, kv_heads * d, kv_heads * d]
    layers = [[rng.standard_normal((heads * d, size), np.float32) * 0.1 for size in sizes] for _ in range(2)]

    def step(caches, x, lens, tables):
        updated = []
        for i, (cache, matrices) in enumerate(zip(caches, layers, strict=True)):
            query, key, value = ((x @ matrix).reshape(len(x), -1, d) for matrix in matrices)
            out, cache = attend(i, query, cache, key, value, lens, tables)
            x = jnp.tanh(out.reshape(x.shape) + 0.5 * x)
            updated.append(cache)
        return x, updated

    return step


def generate(devices):
    """20 decode steps of five sequences, with pages of the same number on every device.

    The second layer passes new keys and values to the attention, the first does not.
    """
    page_size, kv_heads, d = 2, 2, 16
    columns = 24 // DEVICES  # for 48 tokens per sequence
    pages = 5 * columns + 2
    mesh = Mesh(devices[:DEVICES], ("cp",))

    def on_one(_, query, cache, key, value, lens, tables):
        slots = tables[jnp.arange(len(lens)), (lens - 1) // (DEVICES * page_size)] * DEVICES * page_size
        slots += (lens - 1) % (DEVICES * page_size)
        cache = kv_cache_update(cache, key, value, slots)
        return paged_attention(query, cache, lens, tables, np.arange(6), np.array([5]), scale=SCALE), cache

    def on_mesh(layer, query, cache, key, value, lens, tables):
        slots = context_parallel_slots(lens - 1, tables, page_size, "cp")
        cache = kv_cache_update(cache, key, value, slots)
        operands = query, cache, lens, tables, np.arange(6), np.array([5]), *((key, value) if layer == 1 else ())
        return context_parallel_paged_attention(*operands, axis_name="cp", scale=SCALE), cache

    rng = np.random.default_rng(2)
    start = np.array([0, 3, 7, 8, 21], np.int32)
    x = states = jnp.array(rng.standard_normal((5, 128), np.float32))
    tables = rng.permutation(pages)[: 5 * columns].reshape(5, columns).astype(np.int32)
    whole = [jnp.array(rng.standard_normal((pages, DEVICES * page_size, 2 * kv_heads, d), np.float32)) for _ in "12"]
    spread = [x.reshape(pages, DEVICES, page_size, *x.shape[2:]).swapaxes(0, 1) for x in whole]
    caches = [jax.device_put(x.reshape(-1, *x.shape[2:]), NamedSharding(mesh, P("cp"))) for x in spread]
    specs = [P("cp"), P("cp")]
    step = jax.shard_map(decoder(on_mesh), mesh=mesh, in_specs=(specs, P(), P(), P()), out_specs=(P(), specs))
    export = jax.export.export(jax.jit(step), disabled_checks=export_disabled_checks())
    exported = jax.export.deserialize(export(caches, states, start + 1, tables).serialize())
    from_file = jax.block_until_ready(jax.jit(exported.call)(caches, states, start + 1, tables)[0])
    step = jax.jit(step, donate_argnums=0).lower(caches, states, start, tables).compile()
    expected_step = jax.jit(decoder(on_one))
    before, error = addresses(caches), 0.0
    for i in range(20):
        states, caches = jax.block_until_ready(step(caches, states, start + 1 + i, tables))
        x, whole = expected_step(whole, x, start + 1 + i, tables)
        error = max(error, float(difference(numpy(states), numpy(x)).max()))
        if i == 0:
            export_error = float(difference(numpy(from_file), numpy(x)).max())
    text = step.as_text()
    spread = [x.reshape(DEVICES, pages, page_size, *x.shape[2:]).swapaxes(0, 1) for x in map(np.asarray, caches)]
    pairs = zip(spread, map(np.asarray, whole), strict=True)
    cache_error = max(float(difference(x.reshape(y.shape), y)) for x, y in pairs)
    shape = ",".join(map(str, (pages, page_size, 2 * kv_heads, d)))
    return {
        "case": "generation",
        "error": error,
        "cache_error": cache_error,
        "export_error": export_error,
        "in_place": addresses(caches) == before,
        "copies": sum(f"[{shape}]" in line for line in text.splitlines() if " copy(" in line),
        "calls": text.count('custom_call_target="xla_gpu_'),
        "collectives": collectives(text),
    }


if __name__ == "__main__":
    devices = np.array(jax.devices(sys.argv[1]))
    with jax.default_device(devices[0]):
        for name in sys.argv[2:]:
            print(json.dumps(generate(devices) if name == "generation" else run(name, devices)), flush=True)
