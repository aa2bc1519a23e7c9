"""Compiles context_parallel_attention for four GPUs on a machine without one, and prints the optimised HLO as JSON.

Needs the environment of `test_gpu_programs`, as gpu_compiler.py does.
"""

import functools
import json

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import topologies
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from gpu_compiler import TARGET
from xla_attention.jax import context_parallel_attention

ROWS = PartitionSpec("cp")


def compiled(mesh, strategy, layout, recomputed=False, **options):
    """The HLO of a program with both passes over 8192 rows; `recomputed` in a scan over layers with jax.checkpoint."""
    options |= {"axis_name": "cp", "strategy": strategy, "layout": layout}
    attend = functools.partial(context_parallel_attention, cu_seqlens=np.array([0, 8192]), **options)
    attend = jax.shard_map(attend, mesh=mesh, in_specs=(ROWS,) * 3, out_specs=ROWS)

    def layer(x, weight):
        q, k, v = jnp.split(x * weight, [32, 40], axis=1)
        return x + jnp.concatenate([attend(q, k, v), k, v], axis=1), None

    def loss(q, k, v):
        if recomputed:
            x = jnp.concatenate([q, k, v], axis=1)
            out, _ = jax.lax.scan(jax.checkpoint(layer), x, jnp.ones(3, x.dtype))
        else:
            out = attend(q, k, v)
        return jnp.sum(out.astype(jnp.float32) ** 2)

    sharding = NamedSharding(mesh, ROWS)
    arrays = [jax.ShapeDtypeStruct((8192, heads, 128), jnp.bfloat16, sharding=sharding) for heads in (32, 8, 8)]
    return jax.jit(jax.grad(loss, (0, 1, 2))).lower(*arrays).compile().as_text()


if __name__ == "__main__":
    jax.devices()  # loads the plugin
    topology = topologies.get_topology_desc("h100", "cuda", target_config=TARGET, topology="1x1x4")
    mesh = Mesh(np.array(topology.devices), ("cp",))
    cases = [("ring", "zigzag"), ("ring", "contiguous"), ("all_gather", "zigzag")]
    programs = {", ".join(case): compiled(mesh, *case) for case in cases}
    programs["halo"] = compiled(mesh, "ring", "contiguous", window=(256, 0))
    programs["ring, recomputed"] = compiled(mesh, "ring", "zigzag", recomputed=True)
    print(json.dumps(programs))
