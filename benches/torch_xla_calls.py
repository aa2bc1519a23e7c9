"""torch_xla on a GPU through JAX's plugin: `make bench ARGS=torch_xla_calls.py` times calls and cache updates.

Needs torch 2.9, torch_xla 2.9 and a CUDA plugin of JAX; `tools/pack_torch_xla.py` packs the first two for a machine
without a network.
"""

import statistics
import time

import torch
import torch_xla
import torch_xla.core.xla_model as xm

import xla_attention.torch as xt


def microseconds(step, calls=100):
    """The median time of a step that ends with a sync, in the steady state."""
    for _ in range(5):
        step()
    xm.wait_device_ops()
    times = []
    for _ in range(5):
        start = time.perf_counter()
        for _ in range(calls):
            step()
        xm.wait_device_ops()
        times.append((time.perf_counter() - start) / calls * 1e6)
    return statistics.median(times)


def attention_operands():
    """Operands of a decode step of eight sequences of 512 keys."""
    torch.manual_seed(0)
    query, cache = torch.randn(8, 32, 128).bfloat16(), torch.randn(300, 16, 16, 128).bfloat16()
    tables = torch.randperm(300)[:256].reshape(8, 32)
    indices = (torch.full((8,), 512), tables, torch.arange(9), torch.tensor([8]))
    return [x.to("xla") for x in (query, cache, *(i.to(torch.int32) for i in indices))]


def times():
    """The time of calls, and of an addition by XLA."""
    a = torch.ones(1024, device="xla")
    operands = attention_operands()
    for name, call in (
        ("XLA add", lambda: a + a),
        ("simple_add", lambda: xt.simple_add(a, a)),
        ("paged_attention 8 x 512", lambda: xt.paged_attention(*operands, 0.1)),
    ):

        def lazy(call=call):
            kept = call()
            torch_xla.sync()
            return kept

        compiled = torch.compile(call, backend="openxla")
        print(f"{name}: {microseconds(lazy):.0f} us lazy, {microseconds(compiled):.0f} us compiled")


def in_place():
    """An update of 4 KiB in a cache of 1 GiB: time and peak memory show whether it is copied."""
    cache = torch.zeros(2**16, 16, 2, 256, dtype=torch.bfloat16, device="xla")
    rows, slots = torch.ones(4, 1, 256, dtype=torch.bfloat16, device="xla"), torch.arange(4).to("xla")
    torch_xla.sync()
    size = cache.numel() * cache.element_size()

    def lazily():
        xt.update_cache_(cache, rows, rows, slots)
        torch_xla.sync()

    compiled = torch.compile(
        lambda cache: xt.update_cache_(cache, rows, rows, slots), backend="openxla", fullgraph=True
    )

    def functional():
        kept = xt.kv_cache_update(cache, rows, rows, slots)
        torch_xla.sync()
        return kept

    for name, step in (("update_cache_, lazily", lazily), ("update_cache_, compiled", lambda: compiled(cache))):
        time_us = microseconds(step)
        memory = xm.get_memory_info("xla:0")
        print(
            f"{name}: {time_us:.0f} us, peak {memory.get('peak_bytes_used', 0) / size:.2f} caches of {size >> 20} MiB"
        )
    print(f"kv_cache_update, which copies: {microseconds(functional, calls=10):.0f} us")


def main():
    """Print versions and times."""
    xt.use_cuda_plugin()
    print("torch", torch.__version__, "torch_xla", torch_xla.__version__, xm.xla_device_hw("xla:0"))
    times()
    in_place()
