"""Calls that XLA cuts up over devices: nothing is gathered, and the results are those of one device."""

import json
import os
import pathlib
import subprocess
import sys

import jax
import pytest

HERE = pathlib.Path(__file__).parent


def several(platform):
    """Whether the platform has devices to share a program; those of the CPU can be had."""
    if platform == "cpu":
        return True
    try:
        return len(jax.devices(platform)) >= 2
    except RuntimeError:
        return False


@pytest.fixture(scope="module", params=["shardy", "gspmd"])
def partitioner(request):
    if request.param == "shardy" and tuple(map(int, jax.__version__.split(".")[:2])) < (0, 7):
        pytest.skip("this JAX partitions by GSPMD")
    return request.param


@pytest.fixture(scope="module", params=["cpu", pytest.param("gpu", marks=pytest.mark.gpu)])
def programs(request, partitioner):
    """What sharding_program.py says of each case, in a process of its own, which has four CPU devices."""
    if not several(request.param):
        pytest.skip("one GPU alone shares nothing")
    flags = os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=4"
    command = [sys.executable, HERE / "sharding_program.py", request.param, partitioner]
    done = subprocess.run(command, env={**os.environ, "XLA_FLAGS": flags}, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    return {row["case"]: row for row in map(json.loads, done.stdout.splitlines())}


@pytest.mark.parametrize(
    ("case", "calls"),
    [
        ("packed, by heads", 2),
        ("packed, deterministic, by heads", 2),
        ("packed, shard_map", 2),
        ("interleaved pages, by heads", 1),
        ("stacked pages, by heads", 1),
        ("dense, by batch", 2),
        ("dense, by heads", 2),
        ("dense, by batch and heads", 2),
    ],
)
def test_devices_make_calls_of_their_own_and_exchange_nothing(programs, case, calls):
    found = programs[case]
    assert found["collectives"] == []
    assert found["calls"] == calls
    assert found["off"] < 2e-5


def test_heads_that_cannot_be_cut_are_computed_all_the_same(programs):
    assert programs["packed, one KV head"]["off"] < 2e-5
