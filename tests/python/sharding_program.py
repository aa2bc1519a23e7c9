"""Programs on a mesh of devices, each compared with the same on one device; run by test_sharding.py as a process.

    sharding_program.py cpu|gpu shardy|gspmd|explicit [case ...]

Prints a line of JSON for each case: its name, the collectives in the compiled program, how far the results are off, how
many calls there are, whether results lie on the mesh as they should, and whether donated operands are updated in place
and how many copies of their shape there are. `explicit` is Shardy on meshes with explicit axes.
"""

import json
import sys

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding

from sharding_cases import AUTOMATIC, CASES, numbers

COLLECTIVES = ("all-gather", "all-reduce", "all-to-all", "collective-permute", "reduce-scatter")


def results_and_gradients(attend, case, cotangents):
    """A program with everything that the case computes."""

    def total(operands):
        found = attend(*operands)
        return sum(jnp.sum(x * y) for x, y in zip(found, cotangents, strict=True)), found

    if not case.differentiated:
        return lambda *operands: (attend(*operands), ())
    return lambda *operands: jax.grad(total, has_aux=True)(operands)[::-1]


def addresses(arrays):
    return {shard.data.unsafe_buffer_pointer() for x in arrays for shard in x.addressable_shards}


def difference(found, wanted):
    with np.errstate(invalid="ignore"):  # of infinities, which may be equal
        return np.where(found == wanted, 0, np.abs(found - wanted)).max()


def run(name, meshes):
    """The case on the mesh against the same on one device."""
    case = CASES[name](meshes[0])
    mesh = meshes[case.axes - 1]
    plain = case.plain or case.attend
    cotangents = [numbers(9, *x.shape) for x in jax.eval_shape(plain, *case.operands)]
    wanted = jax.jit(results_and_gradients(plain, case, cotangents))(*case.operands)

    def placed(specs):
        return tuple(NamedSharding(mesh, spec) for spec in specs)

    # Where results lie is left to XLA, gradients are asked for where their operands are.
    shardings = (None, placed(case.specs) if case.differentiated else ())
    attend = results_and_gradients(case.attend, case, cotangents)
    program = jax.jit(attend, out_shardings=shardings, donate_argnums=case.donated)
    # Of each its own memory, for it may be given away.
    operands = [jax.device_put(jnp.array(x), place) for x, place in zip(case.operands, placed(case.specs), strict=True)]
    compiled = program.lower(*operands).compile()
    text = compiled.as_text()
    donated = [operands[i] for i in case.donated]
    given = addresses(donated)
    parts = {",".join(map(str, x.sharding.shard_shape(x.shape))) for x in donated}
    found = jax.block_until_ready(compiled(*operands))
    lies = zip(found[0], placed(case.out_specs), strict=True)
    pairs = zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True)
    return {
        "case": name,
        "collectives": [c for c in COLLECTIVES if f" {c}(" in text or f" {c}-start(" in text],
        "off": max(float(difference(*map(np.asarray, pair))) for pair in pairs),
        "calls": text.count('custom_call_target="xla_gpu_'),
        "kept": all(x.sharding.is_equivalent_to(place, x.ndim) for x, place in lies),
        "in_place": all(x.is_deleted() for x in donated) and given <= addresses(jax.tree.leaves(found)),
        "copies": sum(f"[{part}]" in line for line in text.splitlines() if " copy(" in line for part in parts),
    }


def mesh_of(devices, names, axes):
    if axes == "automatic":
        return Mesh(devices, names)
    return Mesh(devices, names, axis_types=(jax.sharding.AxisType.Explicit,) * len(names))


if __name__ == "__main__":
    platform, form = sys.argv[1:3]
    if form == "gspmd":
        jax.config.update("jax_use_shardy_partitioner", False)
    jax.config.update("jax_default_matmul_precision", "highest")  # of the cases' own products, on GPUs
    axes = "explicit" if form == "explicit" else "automatic"
    devices = np.array(jax.devices(platform))
    devices = devices[: 4 if len(devices) >= 4 else 2]
    meshes = [
        mesh_of(devices, ("heads",), axes),
        mesh_of(devices.reshape(2, -1), ("batch", "heads"), axes),
    ]
    with jax.default_device(devices[0]):
        for name in sys.argv[3:] or [x for x in CASES if axes == "automatic" or x not in AUTOMATIC]:
            print(json.dumps(run(name, meshes)), flush=True)
