"""Many calls of changing shapes from JAX, with and without command buffers: device memory does not grow."""

import pytest

from subprocesses import python

SOAK = """
import ctypes, sys
import jax, numpy as np
import xla_attention.jax as xa
from batches import batch
calls = int(sys.argv[1])
# Three calls in one program, enough for a command buffer.
step = jax.jit(lambda *x: xa.paged_attention(xa.paged_attention(xa.paged_attention(*x, scale=0.1), *x[1:], scale=0.1),
                                             *x[1:], scale=0.1))
shapes = [([(1, n)] * (1 + n % 3) + [(n % 5, n)], d) for n in (3, 40, 300) for d in (64, 128)]
batches = [jax.device_put(list(batch(sequences, d=d, dtype="bfloat16")), jax.devices("gpu")[0])
           for sequences, d in shapes]

def free():
    # The driver's count, which includes memory outside XLA's pool.
    cuda, context = ctypes.CDLL("libcuda.so.1"), ctypes.c_void_p()
    assert cuda.cuDevicePrimaryCtxRetain(ctypes.byref(context), 0) == 0
    assert cuda.cuCtxPushCurrent_v2(context) == 0
    amounts = ctypes.c_size_t(), ctypes.c_size_t()
    assert cuda.cuMemGetInfo_v2(*map(ctypes.byref, amounts)) == 0
    assert cuda.cuCtxPopCurrent_v2(ctypes.byref(context)) == 0
    return amounts[0].value

expected = [np.asarray(step(*operands)) for operands in batches]
def run(times):
    for _ in range(times):
        results = [step(*operands) for operands in batches]
    jax.block_until_ready(results)
    assert all(np.array_equal(e, r) for e, r in zip(expected, results, strict=True))
run(calls // 100)
before = free()
run(calls // 3 // len(batches))
print("lost", before - free())
"""
COMMAND_BUFFERS = {
    "off": "--xla_gpu_enable_command_buffer=",
    "on": "--xla_gpu_enable_command_buffer=FUSION,CUBLAS,CUSTOM_CALL --xla_gpu_graph_min_graph_size=1",
}


@pytest.mark.gpu
@pytest.mark.parametrize("command_buffers", COMMAND_BUFFERS)
def test_device_memory_stays_flat_over_10_000_calls(command_buffers):
    done = python("-c", SOAK, "10000", XLA_FLAGS=COMMAND_BUFFERS[command_buffers])
    assert done.stdout == "lost 0\n", done.stderr
