"""Programs with context_parallel_attention, compiled by XLA:GPU for four GPUs on a machine without one."""

import functools
import json
import pathlib
import re

import pytest

from subprocesses import python
from test_gpu_programs import PLUGIN, environment

pytestmark = pytest.mark.skipif(not PLUGIN.is_dir(), reason=f"no CUDA plugin of JAX in {PLUGIN}: `make test`")

# K and V of 2048 rows in bf16, and their gradients in f32.
KEYS, GRADIENTS = "bf16[2,2048,8,128]", "f32[2,2048,8,128]"
CALL = 'custom_call_target="xla_gpu_flash_attn_varlen'


@functools.cache
def programs():
    program = pathlib.Path(__file__).with_name("context_parallel_gpu_compiler.py")
    return json.loads(python(program, **environment()).stdout)


def computations(case):
    """The instructions of each computation with our calls, in the order in which they are issued."""
    hlo = programs()[case]
    assert "is_scheduled=true" in hlo.splitlines()[0]
    return [x.splitlines() for x in hlo.split("\n\n") if CALL in x]


def transfers(lines):
    """For each call whether a transfer is under way, the transfers beside no call, and what is sent."""
    under_way, calls, exposed, sent, was_beside_a_call = set(), [], [], [], False
    for line in lines:
        if start := re.search(r"(%\S+) = (\(.*\)) collective-permute-start\(", line):
            under_way.add(start[1])
            kinds = re.findall(r"\w+\[[\d,]+\]", start[2])
            sent += kinds[: len(kinds) // 2]  # what is sent, then what is received
            was_beside_a_call = False
        elif CALL in line:
            calls.append(bool(under_way))
            was_beside_a_call = True
        elif done := re.search(r" collective-permute-done\((%[\w.-]+)\)", line):
            under_way.remove(done[1])
            if not was_beside_a_call:
                exposed.append(done[1])
    return calls, exposed, sent


# Nothing is sent during the last step of the forward pass, and nothing runs beside the last transfer of the gradients.
FORWARD, BACKWARD = [True, True, True, False], [True, True, True, True]


@pytest.mark.parametrize("case", ["ring, zigzag", "ring, contiguous"])
def test_every_transfer_of_the_ring_but_the_last_is_under_way_during_a_call(case):
    ((calls, exposed, sent),) = map(transfers, computations(case))
    assert calls == FORWARD + BACKWARD
    assert len(exposed) == 1
    # The transfers of K and V in the backward pass are not merged with those of the forward pass.
    assert sent.count(KEYS) == 3 + 3 and sent.count(GRADIENTS) == 4


def test_so_it_is_where_the_forward_pass_runs_again():
    """In a scan over layers with jax.checkpoint, whose two loops are two computations."""
    (backward, is_exposed, sent), (forward, *_) = sorted(map(transfers, computations("ring, recomputed")), reverse=True)
    assert (forward, backward) == (FORWARD, FORWARD + BACKWARD)
    assert len(is_exposed) == 1
    assert sent.count(KEYS) == 3 + 3 and sent.count(GRADIENTS) == 4


def test_own_keys_are_in_place_before_the_halo_arrives():
    """After the transfer only the halo is copied: 256 rows before the 2048 of the device."""
    (lines,) = computations("halo")
    start, done = (
        next(i for i, x in enumerate(lines) if f" collective-permute-{end}(" in x) for end in ("start", "done")
    )
    keys = [i for i, x in enumerate(lines) if re.search(r" = bf16\[2304,8,128\]\S* fusion\(.* calls=%\w*pad", x)]
    assert start < keys[0] < keys[1] < done
    assert not [x for x in lines if "bf16[2304,8,128]" in x and "concatenate" in x]


def test_keys_are_gathered_again_in_the_backward_pass():
    (lines,) = computations("all_gather, zigzag")
    calls = [i for i, line in enumerate(lines) if CALL in line]
    gathers = [i for i, line in enumerate(lines) if " all-gather-start(" in line]
    # K and V for the call of the forward pass, and again for that of the backward pass.
    assert (len(calls), len(gathers)) == (2, 4)
    assert sorted(calls + gathers) == [*gathers[:2], calls[0], *gathers[2:], calls[1]]


def test_the_zigzag_order_is_computed_without_a_loop():
    assert " while(" not in programs()["all_gather, zigzag"]
