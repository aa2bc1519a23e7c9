"""What eager calls cost the host: `make bench ARGS=eager_host.py` prints microseconds per call, beside torch.add.

The calls are small, so that the GPU keeps up with the host; medians are of rounds that end before its queue is full.
"""

import statistics
import time

import torch

import xla_attention.torch as xt
from xla_attention.torch import _layouts, _plan

ROUNDS, CALLS = 60, 200


def microseconds(call):
    """The host's median time of a call in microseconds."""
    for _ in range(3 * CALLS):
        call()
    times = []
    for _ in range(ROUNDS):
        torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(CALLS):
            call()
        times.append((time.perf_counter() - start) / CALLS * 1e6)
    torch.cuda.synchronize()
    return statistics.median(times)


def indices(*values):
    """An i32 tensor."""
    return torch.tensor(values, dtype=torch.int32, device="cuda")


def paged_operands(keys, sequences=4, page_size=16):
    """Operands of a decode step of `sequences` sequences of `keys` keys, 32/8 heads, D 128."""
    pages = -(-keys // page_size)
    query = torch.randn(sequences, 32, 128, dtype=torch.bfloat16, device="cuda")
    cache = torch.randn(sequences * pages, page_size, 16, 128, dtype=torch.bfloat16, device="cuda")
    tables = torch.arange(sequences * pages, dtype=torch.int32, device="cuda").view(sequences, pages)
    return query, cache, indices(*[keys] * sequences), tables, indices(*range(sequences + 1)), indices(sequences)


def calls():
    """The calls by name."""
    a, b = torch.ones(1024, device="cuda"), torch.ones(1024, device="cuda")
    short, long = paged_operands(128), paged_operands(2048)
    q, k, v = (torch.randn(256, 8, 64, dtype=torch.bfloat16, device="cuda") for _ in range(3))
    starts = indices(0, 128, 256)
    leaves = [x.clone().requires_grad_() for x in (q, k, v)]

    def gradients():
        out = xt.flash_attn_varlen(*leaves, starts, causal=True)
        return torch.autograd.grad(out, leaves, q)

    rows, slots = torch.randn(4, 8, 128, dtype=torch.bfloat16, device="cuda"), indices(0, 1, 2, 3)
    return {
        "simple_add": lambda: xt.simple_add(a, b),
        "paged_attention, 4 x 128": lambda: xt.paged_attention(*short, scale=0.1),
        "paged_attention, 4 x 2048 (two launches)": lambda: xt.paged_attention(*long, scale=0.1),
        "flash_attn_varlen, 2 x 128": lambda: xt.flash_attn_varlen(q, k, v, starts, causal=True),
        "flash_attn_varlen and its gradients": gradients,
        "update_cache_, 4 rows": lambda: xt.update_cache_(short[1], rows, rows, slots),
    }


def parts():
    """What a call of paged_attention consists of, by name."""
    operands = list(paged_operands(128))
    xt.paged_attention(*operands, scale=0.1)
    plan = next(plan for key, plan in _plan._STATE.plans.items() if plan and key[0].__name__ == "paged_attention")
    memory = _layouts.Memory()
    xt.paged_attention(*operands, scale=0.1)
    memory.describe(operands)
    device, stream = torch.cuda.current_device(), torch.cuda.current_stream().cuda_stream

    def allocate():
        for place, shape, strides, dtype in plan._results:
            memory.addresses[place] = plan._new(shape, strides, dtype).data_ptr()
        memory.addresses[plan._workspace_place] = workspace = _plan._allocate(plan._workspace, stream)
        _plan._free(workspace)

    # The GPU reads and writes memory that is free; nothing else runs.
    allocate()
    return {
        "whether a mode has to see the call": _plan.is_observed,
        "arguments into tensors and options": lambda: _plan.divide((*operands, 0.1), [], [], True),
        "layouts and addresses": lambda: memory.describe(operands),
        "whether the plan serves": lambda: plan.serves(operands),
        "results and workspace": allocate,
        "stream": lambda: _plan._current_stream(device),
        "the library's call": lambda: plan._request.run(plan._action, stream, memory),
    }


def main():
    """Print the times."""
    described = "Python" if _layouts._EXCHANGE is None else "C"
    print(f"torch {torch.__version__}, {torch.cuda.get_device_name()}; layouts are described in {described}")
    a, b = torch.ones(1024, device="cuda"), torch.ones(1024, device="cuda")
    for mode in (torch.enable_grad, torch.no_grad):
        with mode():
            yardstick = microseconds(lambda: torch.add(a, b))
            print(f"\n{mode.__name__}\n{'torch.add':44} {yardstick:6.2f} us")
            for name, call in calls().items():
                time_ = microseconds(call)
                print(f"{name:44} {time_:6.2f} us, {time_ / yardstick:.2f} of torch.add")
    print("\nparts of paged_attention, 4 x 128")
    for name, part in parts().items():
        print(f"{name:44} {microseconds(part):6.2f} us")
