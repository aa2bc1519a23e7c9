"""Programs over the devices of two processes, as over two hosts."""

import functools
import json
import pathlib
import socket
import subprocess
import sys

import jax
import pytest

from subprocesses import environment

PROGRAM = pathlib.Path(__file__).with_name("two_processes_program.py")
COLLECTIVES = {"paged_step": [], "gradients": ["all-reduce"], "ring": ["collective-permute"]}


@functools.cache
def reports():
    """The output of both processes, by program."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    variables = environment({"JAX_PLATFORMS": "cpu", "XLA_FLAGS": "--xla_force_host_platform_device_count=2"})
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    processes = [
        subprocess.Popen([sys.executable, str(PROGRAM), str(port), str(i)], env=variables, **pipes) for i in range(2)
    ]
    try:
        outputs = [process.communicate(timeout=240) for process in processes]
    finally:
        for process in processes:
            process.kill()
    for process, (_, stderr) in zip(processes, outputs, strict=True):
        assert process.returncode == 0, stderr[-3000:]
    # Gloo prints lines too.
    rows = [json.loads(line) for stdout, _ in outputs for line in stdout.splitlines() if line.startswith("{")]
    return {name: [row for row in rows if row["program"] == name] for name in COLLECTIVES}


@pytest.mark.skipif(not hasattr(jax, "shard_map"), reason="this JAX has no jax.shard_map")
@pytest.mark.parametrize("program", COLLECTIVES)
def test_two_processes_compute_what_one_device_computes(program):
    found = reports()[program]
    assert len(found) == 2
    for report in found:
        assert report["error"] < 2e-5
        assert report["processes"] == 2
        assert report["collectives"] == COLLECTIVES[program]
        assert report["in_place"]
