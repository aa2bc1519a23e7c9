"""XLA:GPU's compiler without a GPU: programs go in, optimised HLO comes out.

    python gpu_compiler.py RESULT.json [NAME=STABLEHLO_FILE ...]

Needs JAX's CUDA plugin, whose compiler takes the description of a GPU for the GPU, and the environment that
`test_gpu_programs` makes. RESULT.json holds the optimised HLO of each program of `CASES` and of each file, by name.
"""

import functools
import json
import pathlib
import sys

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import topologies
from jax.sharding import NamedSharding, PartitionSpec

import xla_attention.jax as xj

# One H100, as XLA's own target configurations describe it.
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

T, HQ, HKV, D, PAGES, PAGE = 6, 8, 4, 64, 32, 16
STARTS, SLOTS = ((3,), jnp.int32), ((T,), jnp.int32)
SEQUENCES = (((2,), jnp.int32), ((2, 4), jnp.int32), STARTS, ((1,), jnp.int32))
# Heads first, as a projection may leave them: each call sees them transposed.
QUERY, KEY = ((HQ, T, D), jnp.bfloat16), ((HKV, T, D), jnp.bfloat16)
CACHE, HALF = ((PAGES, PAGE, 2 * HKV, D), jnp.bfloat16), ((PAGES, PAGE, HKV, D), jnp.bfloat16)


def rows(x):
    return x.transpose(1, 0, 2)


def simple_add(a, b):
    return xj.simple_add(rows(a), rows(b))


def paged_attention(query, cache, *sequences):
    return xj.paged_attention(rows(query), cache, *sequences, scale=0.125)


def flash_attn_varlen(q, k, v, starts):
    return xj.flash_attn_varlen(rows(q), rows(k), rows(v), starts, causal=True)


def gradients(*operands):
    return jax.grad(lambda *x: flash_attn_varlen(*x).astype(jnp.float32).sum(), argnums=(0, 1, 2))(*operands)


def kv_cache_update(cache, key, value, slots):
    return xj.kv_cache_update(cache, rows(key), rows(value), slots)


def kv_cache_update_split(k_cache, v_cache, key, value, slots):
    return xj.kv_cache_update((k_cache, v_cache), rows(key), rows(value), slots)


def rope_kv_cache_update(cache, query, key, value, slots, positions, cos_sin):
    return xj.rope_kv_cache_update(cache, rows(query), rows(key), rows(value), slots, positions, cos_sin)


def paged_attention_update(cache, query, lens, tables, starts, count, key, value, slots):
    sequences = (lens, tables, starts, count)
    return xj.paged_attention_update(rows(query), cache, *sequences, rows(key), rows(value), slots, scale=0.125)


def merge_attention_states(out_a, lse_a, out_b, lse_b):
    return xj.merge_attention_states(rows(out_a), lse_a.T, rows(out_b), lse_b.T)


LSE = ((T, HQ), jnp.float32)
UPDATE = (CACHE, QUERY, *SEQUENCES, KEY, KEY, SLOTS)
ROPE = (CACHE, QUERY, KEY, KEY, SLOTS, SLOTS, ((128, D), jnp.float32))
# The function, its operands, and how many of them, from the first one on, are caches.
CASES = {
    "simple_add": (simple_add, (QUERY, QUERY), 0),
    "paged_attention": (paged_attention, (QUERY, CACHE, *SEQUENCES), 0),
    "flash_attn_varlen": (flash_attn_varlen, (QUERY, KEY, KEY, STARTS), 0),
    "gradients": (gradients, (QUERY, KEY, KEY, STARTS), 0),
    "kv_cache_update": (kv_cache_update, (CACHE, KEY, KEY, SLOTS), 1),
    "kv_cache_update_split": (kv_cache_update_split, (HALF, HALF, KEY, KEY, SLOTS), 2),
    "rope_kv_cache_update": (rope_kv_cache_update, ROPE, 1),
    "paged_attention_update": (paged_attention_update, UPDATE, 1),
    "merge_attention_states": (merge_attention_states, (QUERY, LSE, QUERY, LSE), 0),
}


def heads(shape):
    """How an operand lies on a mesh: its heads on all devices, whatever has none on each."""
    if shape[-1] == D and len(shape) == 3:
        return PartitionSpec("heads")
    return PartitionSpec(None, None, "heads") if len(shape) == 4 else PartitionSpec()


def main(result, *files):
    jax.devices()  # loads the plugin
    topology = functools.partial(topologies.get_topology_desc, "h100", "cuda", target_config=TARGET)
    one, two = (topology(topology=f"1x1x{count}").devices for count in (1, 2))
    found = {}
    for name, (function, operands, caches) in CASES.items():
        for way, devices, donated in (("donated", one, caches), ("kept", one, 0), ("two devices", two, caches)):
            if way == "kept" and not caches:
                continue
            mesh = jax.sharding.Mesh(np.array(devices), ("heads",))
            given = [jax.ShapeDtypeStruct(s, t, sharding=NamedSharding(mesh, heads(s))) for s, t in operands]
            compiled = jax.jit(function, donate_argnums=range(donated)).lower(*given).compile()
            found[f"{name}, {way}"] = compiled.as_text()
    for name, file in (x.split("=", 1) for x in files):
        found[name] = compile_text(pathlib.Path(file).read_text(), one)
    pathlib.Path(result).write_text(json.dumps(found))


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
