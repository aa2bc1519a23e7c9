"""Cases of xla_attention.torch without torch_xla, which has some of them too: eager, in place, compiled, gradients."""

import functools

import torch

import calls
import torch_adapter
import xla_attention.torch as xt
from case import Case, Skip, raises, run_at_once

GROUP = "functions"


def runtime():
    """The runtime's name and version; eager calls use no FFI of XLA."""
    return f"torch {torch.__version__.split('+')[0]}", "-"


def cases():
    """All cases."""
    for group in ("registration", "StableHLO"):
        yield Skip(group, "torch without torch_xla calls the library itself")
    for name, call in calls.every_call().items():
        yield Case(GROUP, f"{name}, eagerly", functools.partial(run, call, "cpu"))
        if call.updates:
            yield Case(GROUP, f"{name}, in place", functools.partial(_run_in_place, call))
    for name, call in calls.plain_calls().items():
        yield Case(GROUP, f"{name}, compiled", functools.partial(run, call, "cpu", _compiled))
    yield Case(GROUP, "gradients, compiled", _gradients)
    yield Case("refusals", "a shape", functools.partial(rejected, "cpu"))
    yield Case("threads", "two calls", functools.partial(two_calls_from_two_threads, "cpu"))


def run(call, device, wrap=lambda function: function):
    """Compare the results of a call with the expected ones."""
    actual = wrap(getattr(xt, call.function))(**torch_adapter.tensor_arguments(call, device))
    call.check(*map(torch_adapter.array, calls.flatten(actual)))


def paged(device):
    """The arguments of a call of paged_attention."""
    return torch_adapter.tensor_arguments(calls.plain_calls()["paged_attention: plain"], device)


def rejected(device):
    """The error before anything runs."""
    arguments = paged(device)
    text = "xla_gpu_paged_attention: block_tables has shape [2, 4], expected [num_seqs=6, max_pages]"
    with raises(ValueError, text):
        xt.paged_attention(**{**arguments, "block_tables": arguments["block_tables"][:2]})


def two_calls_from_two_threads(device):
    """Both have the expected results."""
    at_once = (
        calls.plain_calls()[name]
        for name in ("paged_attention: plain", "rope_kv_cache_update: float32 interleaved False")
    )
    run_at_once(*(functools.partial(run, call, device) for call in at_once))


def _compiled(function):
    torch._dynamo.reset()  # otherwise each call counts as a recompilation
    return torch.compile(function, backend="aot_eager", fullgraph=True)


def _run_in_place(call):
    arguments = torch_adapter.tensor_arguments(call)
    others = calls.flatten(torch_adapter.IN_PLACE[call.function](**arguments))
    call.check(*map(torch_adapter.array, (*others, *call.updated(arguments))))


def _gradients():
    """Those of a compiled function are the eager ones."""
    q, k, v = (torch.randn(7, 4, 16, generator=torch.Generator().manual_seed(i)).requires_grad_() for i in range(3))
    starts = torch.tensor([0, 3, 7], dtype=torch.int32)

    def loss(q, k, v):
        return xt.flash_attn_varlen(q, k, v, starts, causal=True).square().sum()

    eager, compiled = (torch.autograd.grad(function(q, k, v), (q, k, v)) for function in (loss, _compiled(loss)))
    assert all(map(torch.equal, eager, compiled)) and all(x.abs().sum() > 0 for x in eager)
