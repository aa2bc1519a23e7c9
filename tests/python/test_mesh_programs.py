"""Whole programs on a mesh of data x model: layers, loops, training, page pools, export."""

import functools
import json
import os
import pathlib

import jax
import pytest

from mesh_program import PROGRAMS
from subprocesses import python

HERE = pathlib.Path(__file__).parent
# The sums of the output projections, or of gradients; the heads that `partial_shard_map` gathers.
COLLECTIVES = {
    "layers": ["all-reduce"],
    "scanned_layers": ["all-reduce"],
    "training": ["all-reduce"],
    "packed_training": ["all-reduce"],
    "partial_shard_map": ["all-gather"],
}

IMPOSSIBLE = {
    ("gspmd", "exported"): "JAX itself cannot call a program that was exported under GSPMD",
    ("mixed", "exported"): "JAX cannot serialize a rule that waits for the partitioner",
}
PARTITIONING = ["shardy", *(pytest.param(x, marks=pytest.mark.slow) for x in ("gspmd", "explicit", "mixed"))]


@functools.cache
def reports(partitioning):
    """The output of mesh_program.py by program, from a subprocess with four CPU devices."""
    flags = "--xla_force_host_platform_device_count=4 --xla_backend_optimization_level=0"
    flags = f"{os.environ.get('XLA_FLAGS', '')} {flags}"
    names = [name for name in PROGRAMS if (partitioning, name) not in IMPOSSIBLE]
    done = python(HERE / "mesh_program.py", partitioning, *names, XLA_FLAGS=flags, JAX_PLATFORMS="cpu")
    return {row["program"]: row for row in map(json.loads, done.stdout.splitlines())}


@pytest.mark.skipif(not hasattr(jax, "shard_map"), reason="this JAX has no jax.shard_map")
@pytest.mark.parametrize("program", PROGRAMS)
@pytest.mark.parametrize("partitioning", PARTITIONING)
def test_programs_communicate_and_copy_no_more_than_they_have_to(partitioning, program):
    if (partitioning, program) in IMPOSSIBLE:
        pytest.skip(IMPOSSIBLE[partitioning, program])
    report = reports(partitioning)[program]
    assert report["error"] < 1e-4
    assert report["collectives"] == COLLECTIVES.get(program, [])
    assert report["in_place"] and report["copies"] == 0


@pytest.mark.parametrize("partitioning", PARTITIONING)
def test_a_decode_loop_takes_no_more_memory_with_every_step(partitioning):
    assert reports(partitioning)["decode_loop"]["live_bytes_grow"] == 0


@pytest.mark.parametrize("partitioning", PARTITIONING)
def test_shard_map_over_some_axes_warns_of_the_others(partitioning):
    (text,) = reports(partitioning)["partial_shard_map"]["gathers"]
    assert "is called within jax.shard_map over 'data' alone" in text
    assert "sharded by mesh axis 'model'" in text


@pytest.mark.parametrize("partitioning", ["shardy", pytest.param("explicit", marks=pytest.mark.slow)])
def test_an_exported_program_is_for_as_many_devices(partitioning):
    assert reports(partitioning)["exported"]["devices"] == 4
