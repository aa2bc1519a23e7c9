"""JAX's transformations of context_parallel_attention, and the collectives in its programs."""

import functools
import json
import os
import pathlib
import re

import pytest

from subprocesses import python

pytestmark = pytest.mark.slow
PROGRAM = pathlib.Path(__file__).with_name("context_parallel_transformations.py")
CHECKS = re.findall(r"^@check\ndef (\w+)", PROGRAM.read_text(), re.MULTILINE)
# One buffer holds K and V; a device has 16 rows and the window reaches 20 keys back, on the two devices before.
RING, HALO = "collective-permute f32[2,16,2,16]", "collective-permute f32[2,4,2,16]"
EXPECTED_PROGRAMS = {
    "all_gather, forward": {"all-gather f32[64,2,16]": 2, "calls": 1},
    "all_gather, backward": {"all-gather f32[64,2,16]": 2, "reduce-scatter f32[16,2,16]": 2, "calls": 1},
    # n - 1 transfers of keys, and in the backward pass n of their gradients too.
    "ring, forward": {RING: 3, "calls": 4},
    "ring, backward": {RING: 7, "calls": 4},
    "ring, contiguous, forward": {RING: 3, "calls": 4},
    "ring, contiguous, backward": {RING: 7, "calls": 4},
    "halo, forward": {RING: 1, HALO: 1, "calls": 1},
    "halo, backward": {RING: 2, HALO: 2, "calls": 1},
    "all_to_all, forward": {"all-to-all (f32[16,1,16]": 4, "calls": 1},
    "all_to_all, backward": {"all-to-all (f32[16,1,16]": 4, "calls": 1},
}


@functools.cache
def values():
    flags = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count=4"
    done = python(PROGRAM, XLA_FLAGS=flags, JAX_PLATFORMS="cpu")
    return {row["check"]: row["value"] for row in map(json.loads, done.stdout.splitlines())}


@pytest.mark.parametrize("check", [x for x in CHECKS if x not in ("programs", "barriers")])
def test_transformations_have_the_results_of_one_device(check):
    # Results of bf16 differ by one rounding.
    assert values()[check] < (2**-7 if check == "keys_of_8_bits" else 5e-6)


def test_programs_exchange_what_the_strategy_needs():
    assert values()["programs"] == EXPECTED_PROGRAMS


def test_the_backward_pass_does_not_keep_what_the_forward_pass_received():
    # One at the start of the backward pass, and one between two steps in either pass.
    assert values()["barriers"] == 1 + 3 + 3
