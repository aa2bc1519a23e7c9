"""Calls that XLA cuts up over devices: nothing is gathered, and the results are those of one device.

On two GPUs or more the tests named `gpu` run as well.
"""

import functools
import json
import os
import pathlib

import jax
import pytest

from alone import python
from sharding_cases import AUTOMATIC, CASES, EXCHANGE

HERE = pathlib.Path(__file__).parent
JAX_VERSION = tuple(map(int, jax.__version__.split(".")[:2]))
UNEVEN = {
    "packed, one KV head",
    "packed, projected, two KV heads",
    "paged, cache cut between K and V",
    "paged, cache cut between K and V by an axis",
}
# Custom calls of a program, where they are not one.
CALLS = {"decode step": 4} | {name: 2 for name in CASES if name.startswith(("packed", "dense"))}


def several(platform):
    """Whether the platform has devices to share a program; those of the CPU can be had."""
    if platform == "cpu":
        return True
    try:
        return len(jax.devices(platform)) >= 2
    except RuntimeError:
        return False


@functools.cache
def programs(platform, form):
    """What sharding_program.py says of each case, in a process of its own, which has four CPU devices."""
    flags = os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=4"
    if platform == "cpu":
        flags += " --xla_backend_optimization_level=0"  # compiled three times as fast
    done = python(HERE / "sharding_program.py", platform, form, XLA_FLAGS=flags)
    return {row["case"]: row for row in map(json.loads, done.stdout.splitlines())}


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("form", ["shardy", "gspmd", "explicit"])  # what partitions, or that the mesh has explicit axes
@pytest.mark.parametrize("on", ["cpu", pytest.param("gpu", marks=pytest.mark.gpu)])
def test_devices_make_calls_of_their_own_and_exchange_nothing(on, form, case):
    if form != "gspmd" and JAX_VERSION < (0, 7):
        pytest.skip("this JAX partitions by GSPMD")
    if form == "explicit" and case in AUTOMATIC:
        pytest.skip("JAX refuses the program on a mesh with explicit axes")
    if not several(on):
        pytest.skip("one GPU alone shares nothing")
    found = programs(on, form)[case]
    assert found["off"] < 2e-5
    assert found["calls"] == CALLS.get(case, 1)
    assert set(found["collectives"]) <= EXCHANGE.get(case, set())
    assert found["in_place"] and found["copies"] == 0
    assert found["kept"] or case in UNEVEN
