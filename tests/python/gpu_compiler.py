"""Compiles programs with XLA:GPU on a machine without a GPU, and writes their optimised HLO.

    python gpu_compiler.py RESULT.json [NAME=STABLEHLO_FILE ...]

Needs JAX's CUDA plugin, which compiles for the description of a GPU, and the environment of `test_gpu_programs`.
RESULT.json holds the optimised HLO of each program of `CASES` and of each file, by name.
"""

import functools
import json
import pathlib
import sys

import jax
import numpy as np
from jax.experimental import topologies
from jax.sharding import NamedSharding, PartitionSpec

import xla_attention.jax as xj
from calls import plain_calls, tree_map
from jax_adapter import arrays_of
from packed_caches import packed_calls

# An H100, from XLA's target configurations.
TARGET = """
gpu_device_info {
  threads_per_block_limit: 1024
  threads_per_warp: 32
  shared_memory_per_block: 49152
  shared_memory_per_core: 233472
  threads_per_core_limit: 2048
  core_count: 132
  fpus_per_core: 128
  block_dim_limit_x: 2147483647
  block_dim_limit_y: 65535
  block_dim_limit_z: 65535
  memory_bandwidth: 3352320000000
  l2_cache_size: 52428800
  clock_rate_ghz: 1.98
  device_memory_size: 84942979072
  shared_memory_per_block_optin: 232448
  cuda_compute_capability { major: 9 minor: 0 }
  registers_per_core_limit: 65536
  registers_per_block_limit: 65536
}
platform_name: "CUDA"
dnn_version_info { major: 9 minor: 10 patch: 0 }
device_description_str: "NVIDIA H100 80GB HBM3"
"""

# Operands that the programs transpose before the call: those with the heads first, and others.
HEADS_FIRST = ("query", "q", "k", "v", "key", "value", "a", "b", "out_a", "out_b")
TRANSPOSED = (*HEADS_FIRST, "lse_a", "lse_b", "block_tables")


def program(call):
    """A function of the call's arrays by name, transposed as `transpose` does."""
    function = getattr(xj, call.function)
    static = {name: x for name, x in call.arguments.items() if name not in arrays_of(call)}

    def called(arrays):
        return function(**{name: transpose(name, x) for name, x in arrays.items()}, **static)

    return called


def gradients(arrays):
    def total(numbers):
        return program(PLAIN["flash_attn_varlen: plain"])({**arrays, **numbers})[0].sum()

    return jax.grad(total)({name: arrays[name] for name in ("q", "k", "v")})


def transpose(name, array):
    return array.swapaxes(0, 1) if name in TRANSPOSED and array.ndim < 4 else array


def spec(name, array):
    """The sharding of an operand: heads over all devices, replicated without heads."""
    if array.ndim >= 4:
        return PartitionSpec(None, None, "heads")
    return PartitionSpec("heads") if name in HEADS_FIRST else PartitionSpec()


PLAIN = plain_calls()
# A program, and the call in it.
CASES = {name: (program(call), call) for name, call in PLAIN.items()}
CASES |= {f"packed cache, {call.name}": (program(call), call) for call in packed_calls()}
CASES["gradients"] = gradients, PLAIN["flash_attn_varlen: plain"]


def decode_over_pages(caches, query, rows, lens, tables):
    """Two layers of decode on a device; the second passes new keys and values to the attention."""
    for layer, cache in enumerate(caches):
        slots = xj.context_parallel_slots(lens - 1, tables, cache.shape[1], "pages")
        caches[layer] = xj.kv_cache_update(cache, rows, rows, slots)
        operands = query, caches[layer], lens, tables, np.arange(len(lens) + 1), len(lens), *[rows] * 2 * layer
        query += xj.context_parallel_paged_attention(*operands, axis_name="pages", scale=0.1)
    return query, caches


def context_parallel(devices):
    """`decode_over_pages` with donated caches of 8 pages on each device."""
    mesh = jax.sharding.Mesh(np.array(devices), ("pages",))
    pages, whole = PartitionSpec("pages"), PartitionSpec()
    specs = [pages, pages], whole, whole, whole, whole
    step = jax.jit(
        jax.shard_map(decode_over_pages, mesh=mesh, in_specs=specs, out_specs=(whole, specs[0])), donate_argnums=0
    )

    def abstract(shape, dtype, spec=whole):
        return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, spec))

    caches = [abstract((8 * len(devices), 16, 4, 64), "bfloat16", pages)] * 2
    rows = [abstract((3, heads, 64), "bfloat16") for heads in (8, 2)]
    return step.lower(caches, *rows, abstract((3,), "int32"), abstract((3, 2), "int32")).compile().as_text()


def main(result, *files):
    jax.devices()  # loads the plugin
    topology = functools.partial(topologies.get_topology_desc, "h100", "cuda", target_config=TARGET)
    one, two = (topology(topology=f"1x1x{count}").devices for count in (1, 2))
    hlo = {}
    for name, (function, call) in CASES.items():
        for placement, devices, donates in (("donated", one, True), ("kept", one, False), ("two devices", two, True)):
            mesh = jax.sharding.Mesh(np.array(devices), ("heads",))

            def abstract(name, x, mesh=mesh):
                sharding = NamedSharding(mesh, spec(name, x))
                return jax.ShapeDtypeStruct(transpose(name, x).shape, x.dtype, sharding=sharding)

            arrays = {name: tree_map(functools.partial(abstract, name), x) for name, x in arrays_of(call).items()}
            donated = {call.updates: arrays.pop(call.updates)} if call.updates and donates else {}
            step = jax.jit(lambda donated, kept, f=function: f({**donated, **kept}), donate_argnums=0)
            hlo[f"{name}, {placement}"] = step.lower(donated, arrays).compile().as_text()
    hlo["context-parallel decode"] = context_parallel(two)
    for name, file in (x.split("=", 1) for x in files):
        hlo[name] = compile_text(pathlib.Path(file).read_text(), one)
    pathlib.Path(result).write_text(json.dumps(hlo))


def compile_text(stablehlo, devices):
    from jax._src import compiler
    from jax._src.interpreters import mlir
    from jax._src.lib import xla_client
    from jax._src.lib.mlir import ir

    with mlir.make_ir_context():
        module = ir.Module.parse(stablehlo)
        options = compiler.get_compile_options(num_replicas=1, num_partitions=1)
        on = xla_client.DeviceList(tuple(devices))
        executable = devices[0].client.compile(module, on, options)
    return executable.hlo_modules()[0].to_string() if hasattr(executable, "hlo_modules") else executable.get_hlo_text()


if __name__ == "__main__":
    main(*sys.argv[1:])
