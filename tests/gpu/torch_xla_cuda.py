"""torch_xla on a GPU through JAX's plugin: what it computes, and what calls and cache updates take.

    python tests/gpu/torch_xla_cuda.py

Needs torch 2.9, torch_xla 2.9 and a CUDA plugin of JAX. `tests/gpu/pack_torch_xla.py` makes the first two small enough
to be carried to a machine without a network; there, with the tree unpacked in ~/torch_xla:

    export PYTHONPATH=~/torch_xla:$PYTHONPATH  # before the machine's own torch
    export LD_LIBRARY_PATH=$(python3 -c "import nvidia.cudnn; print(nvidia.cudnn.__path__[0])")/lib
    JAX_PLATFORMS=cpu XLA_ATTENTION_TEST_XLA=cuda python3 -m pytest tests/python/test_torch_*.py -k xla
"""

import itertools
import statistics
import time

import torch
import torch_xla
import torch_xla.core.xla_model as xm

import xla_attention.torch as xt


def microseconds(step, calls=100):
    """Median time of a step that ends with a sync, in the steady state."""
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


def attention_operands(dtype=torch.bfloat16):
    """A decode step of eight sequences of 512 keys."""
    torch.manual_seed(0)
    query, cache = torch.randn(8, 32, 128, dtype=dtype), torch.randn(300, 16, 16, 128, dtype=dtype)
    tables = torch.randperm(300)[:256].reshape(8, 32)
    indices = (torch.full((8,), 512), tables, torch.arange(9), torch.tensor([8]))
    return [x.to("xla") for x in (query, cache, *(i.to(torch.int32) for i in indices))]


def numbers():
    """Lazily and compiled, transposed, in two configurations: against the CPU."""
    operands = attention_operands(torch.float32)
    host = [x.cpu() for x in operands]
    compiled = torch.compile(xt.paged_attention, backend="openxla", fullgraph=True)
    for scale in (0.05, 0.2):
        wanted = xt.paged_attention(*host, scale)
        turned = operands[0].transpose(0, 1).contiguous().transpose(0, 1)
        for name, found in (
            ("lazy", xt.paged_attention(*operands, scale)),
            ("openxla", compiled(*operands, scale)),
            ("transposed", xt.paged_attention(turned, *operands[1:], scale)),
        ):
            print(f"scale {scale}, {name}: off by {(found.cpu() - wanted).abs().max():.1e}")


def gradients():
    """Of flash_attn_varlen, lazily and compiled, in f32 and bf16: against the CPU's in f32."""
    torch.manual_seed(0)
    lengths = [700, 33, 1, 0, 290]
    starts = torch.tensor([0, *itertools.accumulate(lengths)], dtype=torch.int32)
    shapes = [(sum(lengths), heads, 128) for heads in (8, 2, 2, 8)]

    def backward(q, k, v, dout, starts):
        out = xt.flash_attn_varlen(q, k, v, starts, causal=True, softcap=30.0)
        return torch.autograd.grad(out, (q, k, v), dout)

    compiled = torch.compile(
        lambda q, k, v, starts: xt.flash_attn_varlen(q, k, v, starts, causal=True, softcap=30.0), backend="openxla"
    )
    for dtype in (torch.float32, torch.bfloat16):
        *host, dout = (torch.randn(shape).to(dtype) for shape in shapes)
        # First: torch counts its devices at the first backward of a process.
        given = [x.to("xla").requires_grad_() for x in host]
        wanted = backward(*(x.float().requires_grad_() for x in host), dout.float(), starts)
        lazily = backward(*given, dout.to("xla"), starts.to("xla"))
        for x in given:
            x.grad = None
        compiled(*given, starts.to("xla")).backward(dout.to("xla"))
        for name, found in (("lazily", lazily), ("openxla", [x.grad for x in given])):
            errors = [
                ((f.cpu().float() - w).abs().max() / w.abs().max()).item() for f, w in zip(found, wanted, strict=True)
            ]
            print(f"gradients, {dtype}, {name}: off by {', '.join(f'{e:.1e}' for e in errors)} of the largest")
            assert max(errors) < (1e-4 if dtype == torch.float32 else 3e-2)
    hlo = torch_xla._XLAC._get_xla_tensors_hlo(list(backward(*given, dout.to("xla"), starts.to("xla"))))
    assert 'custom_call_target="xla_gpu_flash_attn_varlen_bwd"' in hlo


def times():
    """A call, beside an addition of XLA's own."""
    a = torch.ones(1024, device="xla")
    operands = attention_operands()
    for name, call in (
        ("XLA's own add", lambda: a + a),
        ("simple_add", lambda: xt.simple_add(a, a)),
        ("paged_attention 8 x 512", lambda: xt.paged_attention(*operands, 0.1)),
    ):

        def lazy(call=call):
            kept = call()
            torch_xla.sync()
            return kept

        compiled = torch.compile(call, backend="openxla")
        print(f"{name}: {microseconds(lazy):.0f} us lazily, {microseconds(compiled):.0f} us compiled")


def in_place():
    """A cache of 1 GiB, of which 4 KiB change: the time and the memory show whether it is copied."""
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
        taken = microseconds(step)
        memory = xm.get_memory_info("xla:0")
        print(f"{name}: {taken:.0f} us, peak {memory.get('peak_bytes_used', 0) / size:.2f} caches of {size >> 20} MiB")
    print(f"kv_cache_update, which copies: {microseconds(functional, calls=10):.0f} us")


if __name__ == "__main__":
    xt.use_cuda_plugin()
    print("torch", torch.__version__, "torch_xla", torch_xla.__version__, xm.xla_device_hw("xla:0"))
    numbers()
    gradients()
    times()
    in_place()
