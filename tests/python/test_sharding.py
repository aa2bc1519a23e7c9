"""Calls that XLA partitions over devices: no collectives, and the results of one device.

With two or more GPUs the tests marked `gpu` run too.
"""

import functools
import json
import os
import pathlib

import jax
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from sharding_cases import AUTOMATIC_AXES_ONLY, CASES, EXPECTED_COLLECTIVES, GATHERED, SLOW
from subprocesses import python
from xla_attention.jax import flash_attn_varlen

HERE = pathlib.Path(__file__).parent
JAX_VERSION = tuple(map(int, jax.__version__.split(".")[:2]))
# Cases whose results are not sharded as their operands, because these are gathered.
UNEVEN = {
    "packed, by rows",
    "update, stacked, by pages",
    "paged, two KV heads per device",
    "paged, cache split between K and V",
}
# The number of custom calls in a program, where it is not 1.
CALLS = {"decode step": 4, "decode step, KV heads by one axis": 4, "cache in words, not causal": 2} | {
    name: 2 for name in CASES if name.startswith(("packed", "dense"))
}


def has_several_devices(platform):
    """Whether the platform has several devices; the CPU can have any number."""
    if platform == "cpu":
        return True
    try:
        return len(jax.devices(platform)) >= 2
    except RuntimeError:
        return False


@functools.cache
def programs(platform, partitioning, is_slow):
    """The output of sharding_program.py by case, from a subprocess with four CPU devices.

    `is_slow` selects the cases in SLOW or the others; None is all.
    """
    flags = os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=4"
    if platform == "cpu":
        flags += " --xla_backend_optimization_level=0"  # compiled three times as fast
    names = [] if is_slow is None else [name for name in CASES if (name in SLOW) == is_slow]
    done = python(HERE / "sharding_program.py", platform, partitioning, *names, XLA_FLAGS=flags)
    return {row["case"]: row for row in map(json.loads, done.stdout.splitlines())}


@pytest.mark.parametrize("case", [pytest.param(x, marks=[pytest.mark.slow] * (x in SLOW)) for x in CASES])
# The partitioner, or Shardy with explicit mesh axes.
@pytest.mark.parametrize(
    "partitioning", ["shardy", *(pytest.param(x, marks=pytest.mark.slow) for x in ("gspmd", "explicit"))]
)
@pytest.mark.parametrize("on", ["cpu", pytest.param("gpu", marks=pytest.mark.gpu)])
def test_sharded_calls_need_no_collectives_beyond_the_expected(on, partitioning, case):
    if partitioning != "gspmd" and JAX_VERSION < (0, 7):
        pytest.skip("this JAX partitions by GSPMD")
    if partitioning == "explicit" and case in AUTOMATIC_AXES_ONLY:
        pytest.skip("JAX refuses the program on a mesh with explicit axes")
    if not has_several_devices(on):
        pytest.skip("there is only one GPU")
    result = programs(on, partitioning, case in SLOW if partitioning == "shardy" else None)[case]
    assert result["error"] < 2e-5
    assert result["calls"] == CALLS.get(case, 1)
    expected = EXPECTED_COLLECTIVES.get(case, set())
    if result["devices"] < 4 and case == "packed, two KV heads":
        expected = {"all-gather"}  # of the gradients, because two devices divide the heads
    if "all-reduce" in expected and on == "gpu":
        expected = expected | {"reduce-scatter"}  # an all-reduce of which each device needs a part
    assert set(result["collectives"]) <= expected
    assert bool(result["gathers"]) == (case in GATHERED) or result["devices"] < 4
    assert all(text.startswith("xla_attention: XLA gathers operands of xla_gpu_") for text in result["gathers"])
    assert not result["gathers"] or GATHERED[case] in result["gathers"][0]
    # XLA:CPU copies a donated cache that is reshaped. XLA:GPU does not, see `test_gpu_programs`.
    assert result["in_place"] and result["copies"] == (case.startswith("cache in words") and on == "cpu")
    assert result["shardings_match"] or case in UNEVEN


# Compiles a call whose tokens are sharded, and prints what that raises.
_GATHERING = """
import jax, numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from xla_attention.jax import flash_attn_varlen
q = np.ones((8, 4, 16), np.float32)
sharding = NamedSharding(Mesh(np.array(jax.devices()), ("data",)), PartitionSpec("data"))
try:
    jax.block_until_ready(jax.jit(lambda q: flash_attn_varlen(q, q, q, np.array([0, 8])))(jax.device_put(q, sharding)))
except jax.errors.JaxRuntimeError as error:
    print(error)
"""
_TWO_DEVICES = {"XLA_FLAGS": "--xla_force_host_platform_device_count=2", "JAX_PLATFORMS": "cpu"}


def test_a_warning_names_the_line_that_makes_xla_gather(tmp_path):
    program = tmp_path / "program.py"
    program.write_text(_GATHERING)
    done = python(program, **_TWO_DEVICES)
    line = next(i for i, text in enumerate(_GATHERING.splitlines(), 1) if "flash_attn_varlen(q" in text)
    assert f"{program}:{line}: GatherWarning: xla_attention: XLA gathers operands of xla_gpu_flash_attn" in done.stderr
    assert "q float32[8, 4, 16], whose dimension 0 is sharded by mesh axis 'data'; k " in done.stderr
    assert done.stderr.count("GatherWarning") == 1
    assert not done.stdout


def test_pythons_filters_make_an_error_of_the_warning():
    done = python("-c", _GATHERING, **_TWO_DEVICES, PYTHONWARNINGS="error:xla_attention")
    assert "GatherWarning: xla_attention: XLA gathers operands of xla_gpu_flash_attn_varlen: q" in done.stdout


# Prints the dtypes that the custom call of the gradients returns on each device, and the largest relative error of dk.
_SHARED_HEAD = """
import re, jax, jax.numpy as jnp, numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from xla_attention.jax import flash_attn_varlen
random = np.random.default_rng(0)
q, k, v = (jnp.array(random.standard_normal((40, heads, 16)), "bfloat16") for heads in (8, 2, 2))
gradients = jax.grad(lambda *x: (flash_attn_varlen(*x, np.array([0, 40])).astype(jnp.float32) ** 2).sum(), (0, 1, 2))
expected = [np.float32(x) for x in gradients(*(x.astype(jnp.float32) for x in (q, k, v)))]
mesh = Mesh(np.array(jax.devices()), ("heads",))
specs = PartitionSpec(None, "heads"), PartitionSpec(), PartitionSpec()
placed = [jax.device_put(x, NamedSharding(mesh, spec)) for x, spec in zip((q, k, v), specs)]
compiled = jax.jit(gradients).lower(*placed).compile()
call = next(line for line in compiled.as_text().splitlines() if "xla_gpu_flash_attn_varlen_bwd" in line)
print(*re.findall(r"(\\w+)\\[", call.split(" = ")[1])[:3])
actual = jax.block_until_ready(compiled(*placed))
errors = [np.abs(np.float32(x) - y).max() / np.abs(y).max() for x, y in zip(actual, expected)]
print(*(x.dtype for x in actual), max(errors))
"""


@pytest.mark.skipif(not hasattr(jax, "shard_map"), reason="this JAX partitions by GSPMD")
def test_gradients_that_devices_sum_are_f32_before_the_sum():
    done = python("-c", _SHARED_HEAD, **_TWO_DEVICES | {"XLA_FLAGS": "--xla_force_host_platform_device_count=4"})
    of_call, of_program = (line.split() for line in done.stdout.splitlines())
    assert of_call == ["f32"] * 3
    assert of_program[:3] == ["bfloat16"] * 3
    assert float(of_program[3]) < 0.02


def operands_of_shard_maps(jaxpr):
    """The shapes of the operands of every shard_map in a program."""
    for equation in jaxpr.eqns:
        if equation.primitive.name == "shard_map":
            yield from (x.aval.shape for x in equation.invars)
        else:
            for program in (getattr(value, "jaxpr", value) for value in equation.params.values()):
                if hasattr(program, "eqns"):
                    yield from operands_of_shard_maps(program)


@pytest.mark.skipif(not hasattr(jax.sharding, "auto_axes"), reason="this JAX has no explicit mesh axes")
def test_no_operand_of_shard_map_is_without_elements():
    """XLA of JAX 0.11 ends the process on one. The values and the starts of keys in pages are placeholders."""
    mesh = Mesh(jax.devices("cpu")[:1], ("heads",), axis_types=(jax.sharding.AxisType.Explicit,))
    query = jax.device_put(np.ones((6, 4, 16), np.float32), NamedSharding(mesh, PartitionSpec(None, "heads")))
    cache = jax.device_put(np.ones((3, 8, 4, 16), np.float32), NamedSharding(mesh, PartitionSpec(None, None, "heads")))

    def attend(query, cache):
        pages = {"block_table": np.array([[2, 0]]), "seqused_k": np.array([9]), "kv_layout": "interleaved"}
        return flash_attn_varlen(query, cache, None, np.array([0, 6]), **pages)

    shapes = list(operands_of_shard_maps(jax.make_jaxpr(attend)(query, cache).jaxpr))
    assert (6, 4, 16) in shapes and not [shape for shape in shapes if 0 in shape]
