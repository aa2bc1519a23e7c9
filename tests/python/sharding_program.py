"""Runs programs on a mesh of devices and compares each with one device; test_sharding.py runs it as a subprocess.

    sharding_program.py cpu|gpu shardy|gspmd|explicit [case ...]

Prints a line of JSON per case: its name, the number of devices, the collectives in the compiled program, the largest
error, the number of our calls, whether results have the expected shardings, whether donated operands are updated in
place, the number of copies of their shape, and the texts of GatherWarning. `explicit` is Shardy on meshes with explicit
axes.
"""

import json
import sys
import warnings

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding

from sharded_calls import numbers
from sharding_cases import AUTOMATIC_AXES_ONLY, CASES
from xla_attention.jax import GatherWarning

# The file whose calls warn.
CALLS = "sharded_calls.py"
COLLECTIVES = ("all-gather", "all-reduce", "all-to-all", "collective-permute", "reduce-scatter")


def results_and_gradients(attend, case, cotangents):
    """A function with the results of the case and, if it is differentiable, the gradients."""

    def total(operands):
        results = attend(*operands)
        return sum(jnp.sum(x * y) for x, y in zip(results, cotangents, strict=True)), results

    if not case.differentiated:
        return lambda *operands: (attend(*operands), ())
    return lambda *operands: jax.grad(total, has_aux=True)(operands)[::-1]


def addresses(arrays):
    return {shard.data.unsafe_buffer_pointer() for x in arrays for shard in x.addressable_shards}


def difference(actual, expected):
    with np.errstate(invalid="ignore"):  # of infinities, which may be equal
        return np.where(actual == expected, 0, np.abs(actual - expected)).max()


def run(name, meshes):
    """The line of a case."""
    case = CASES[name](meshes[0])
    mesh = meshes[case.axes - 1]
    unsharded = case.unsharded or case.attend
    cotangents = [numbers(9, *x.shape) for x in jax.eval_shape(unsharded, *case.operands)]
    expected = jax.jit(results_and_gradients(unsharded, case, cotangents))(*case.operands)

    def on_mesh(specs):
        return tuple(NamedSharding(mesh, spec) for spec in specs)

    # XLA chooses the shardings of results; gradients have those of their operands.
    shardings = (None, on_mesh(case.specs) if case.differentiated else ())
    attend = results_and_gradients(case.attend, case, cotangents)
    program = jax.jit(attend, out_shardings=shardings, donate_argnums=case.donated)
    # Each in its own memory, because operands may be donated.
    operands = [
        jax.device_put(jnp.array(x), sharding) for x, sharding in zip(case.operands, on_mesh(case.specs), strict=True)
    ]
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        compiled = program.lower(*operands).compile()
    text = compiled.as_text()
    donated = [operands[i] for i in case.donated]
    donated_addresses = addresses(donated)
    shard_shapes = {",".join(map(str, x.sharding.shard_shape(x.shape))) for x in donated}
    actual = jax.block_until_ready(compiled(*operands))
    result_shardings = zip(actual[0], on_mesh(case.out_specs), strict=True)
    pairs = zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True)
    return {
        "case": name,
        "collectives": [c for c in COLLECTIVES if f" {c}(" in text or f" {c}-start(" in text],
        "error": max(float(difference(*map(np.asarray, pair))) for pair in pairs),
        "calls": text.count('custom_call_target="xla_gpu_'),
        "shardings_match": all(x.sharding.is_equivalent_to(sharding, x.ndim) for x, sharding in result_shardings),
        "in_place": all(x.is_deleted() for x in donated) and donated_addresses <= addresses(jax.tree.leaves(actual)),
        "copies": sum(f"[{shape}]" in line for line in text.splitlines() if " copy(" in line for shape in shard_shapes),
        "devices": mesh.size,
        "gathers": [str(x.message) for x in caught if x.category is GatherWarning and x.filename.endswith(CALLS)],
    }


def mesh_of(devices, names, axes):
    if axes == "automatic":
        return Mesh(devices, names)
    return Mesh(devices, names, axis_types=(jax.sharding.AxisType.Explicit,) * len(names))


if __name__ == "__main__":
    platform, partitioning = sys.argv[1:3]
    if partitioning == "gspmd":
        jax.config.update("jax_use_shardy_partitioner", False)
    jax.config.update("jax_default_matmul_precision", "highest")  # for products in the cases, on GPUs
    axes = "explicit" if partitioning == "explicit" else "automatic"
    devices = np.array(jax.devices(platform))
    devices = devices[: 4 if len(devices) >= 4 else 2]
    meshes = [
        mesh_of(devices, ("heads",), axes),
        mesh_of(devices.reshape(2, -1), ("batch", "heads"), axes),
    ]
    with jax.default_device(devices[0]):
        for name in sys.argv[3:] or [x for x in CASES if axes == "automatic" or x not in AUTOMATIC_AXES_ONLY]:
            print(json.dumps(run(name, meshes)), flush=True)
