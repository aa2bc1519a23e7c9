"""Calls that XLA partitions over devices: no collectives, and the results of one device.

With two or more GPUs the tests marked `gpu` run too.
"""

import functools
import json
import os
import pathlib

import jax
import pytest

from sharding_cases import AUTOMATIC_AXES_ONLY, CASES, EXPECTED_COLLECTIVES
from subprocesses import python

HERE = pathlib.Path(__file__).parent
JAX_VERSION = tuple(map(int, jax.__version__.split(".")[:2]))
# Cases whose results are not sharded as their operands, because the mesh does not divide the heads.
UNEVEN = {
    "packed, one KV head",
    "packed, projected, two KV heads",
    "paged, cache split between K and V",
    "paged, cache split between K and V by one axis",
}
# The number of custom calls in a program, where it is not 1.
CALLS = {"decode step": 4, "cache in words, not causal": 2} | {
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
def programs(platform, partitioning):
    """The output of sharding_program.py by case, from a subprocess with four CPU devices."""
    flags = os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=4"
    if platform == "cpu":
        flags += " --xla_backend_optimization_level=0"  # compiled three times as fast
    done = python(HERE / "sharding_program.py", platform, partitioning, XLA_FLAGS=flags)
    return {row["case"]: row for row in map(json.loads, done.stdout.splitlines())}


@pytest.mark.parametrize("case", CASES)
# The partitioner, or Shardy with explicit mesh axes.
@pytest.mark.parametrize("partitioning", ["shardy", "gspmd", "explicit"])
@pytest.mark.parametrize("on", ["cpu", pytest.param("gpu", marks=pytest.mark.gpu)])
def test_sharded_calls_need_no_collectives_beyond_the_expected(on, partitioning, case):
    if partitioning != "gspmd" and JAX_VERSION < (0, 7):
        pytest.skip("this JAX partitions by GSPMD")
    if partitioning == "explicit" and case in AUTOMATIC_AXES_ONLY:
        pytest.skip("JAX refuses the program on a mesh with explicit axes")
    if not has_several_devices(on):
        pytest.skip("there is only one GPU")
    result = programs(on, partitioning)[case]
    assert result["error"] < 2e-5
    assert result["calls"] == CALLS.get(case, 1)
    assert set(result["collectives"]) <= EXPECTED_COLLECTIVES.get(case, set())
    # XLA:CPU copies a donated cache that is reshaped. XLA:GPU does not, see `test_gpu_programs`.
    assert result["in_place"] and result["copies"] == (case.startswith("cache in words") and on == "cpu")
    assert result["shardings_match"] or case in UNEVEN
