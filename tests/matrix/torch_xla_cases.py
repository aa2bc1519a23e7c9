"""Cases of xla_attention.torch on torch_xla's CPU client: lazy, compiled by openxla, in place."""

import ctypes
import functools
import struct

import numpy as np
import torch
import torch_xla

import calls
import torch_adapter
import torch_cases
import xla_attention.torch as xt
from case import Case, Skip, raises
from xla_attention import _library
from xla_attention import torch_xla as registration

GROUP = "functions"
_XLAC = torch_xla._XLAC


def runtime():
    """The runtime's name and version, and its FFI version."""
    version = torch_xla.__version__
    api = registration._ffi_api(version)
    major, minor = struct.unpack_from("<2i", ctypes.string_at(api, 40), 32)
    return f"torch_xla {version.split('+')[0]}", f"{major}.{minor}"


def cases():
    """All cases."""
    yield Case("registration", "all targets", _register)
    yield Case("registration", "again", registration.register_with_cpu_client.__wrapped__)
    yield Skip("StableHLO", "torch_xla runs no StableHLO text; its functions put the same custom calls into its graphs")
    for name, call in calls.every_call().items():
        yield Case(GROUP, f"{name}, lazily", functools.partial(torch_cases.run, call, "xla"))
    for name, call in calls.plain_calls().items():
        yield Case(GROUP, f"{name}, openxla", functools.partial(torch_cases.run, call, "xla", _openxla))
        if call.function == "kv_cache_update":
            yield Case(GROUP, f"{name}, donated", functools.partial(_run_donated, call))
    yield Case(GROUP, "paged_attention without lse", _without_lse)
    yield Case("refusals", "a shape", functools.partial(torch_cases.rejected, "xla"))
    yield Case("refusals", "a shape, by the handler", _rejected_by_the_handler)
    yield Case("threads", "two calls", functools.partial(torch_cases.two_calls_from_two_threads, "xla"))


def _openxla(function):
    torch._dynamo.reset()  # otherwise each call counts as a recompilation
    return torch.compile(function, backend="openxla", fullgraph=True)


def _register():
    """The runtime accepts every CPU target, and torch_xla's own custom call finds one."""
    xt.register_targets()
    assert sum(target.platform == b"cpu" for target in _library.targets()) > 5
    a = torch.arange(8.0).to("xla")
    (out,) = _XLAC._xla_custom_call([a, a], "XlaGpuSimpleAdd", [[8]], [torch.float32], False, "", 4, {})
    assert out.cpu().tolist() == (2 * torch.arange(8.0)).tolist()


def _run_donated(call):
    """`update_cache_` updates the cache, whose buffer is donated to the result."""
    arguments = torch_adapter.tensor_arguments(call, "xla")
    xt.update_cache_(**arguments)
    caches = calls.flatten(arguments["kv_cache"])
    assert "output_to_operand_aliasing=" in _XLAC._get_xla_tensors_hlo(caches)
    call.check(*map(torch_adapter.array, caches))


def _without_lse():
    arguments = torch_cases.paged("xla")
    both, out = xt.paged_attention(**arguments), xt.paged_attention(**{**arguments, "return_lse": False})
    np.testing.assert_array_equal(torch_adapter.array(out), torch_adapter.array(both[0]))


def _rejected_by_the_handler():
    """torch_xla's own custom call, which is not validated beforehand, fails with the handler's text.

    torch_xla 2.9 raises the error again at the next sync, whatever that computes, and then recovers.
    """
    a, b = torch.ones(8).to("xla"), torch.ones(7).to("xla")
    (out,) = _XLAC._xla_custom_call([a, b], "xla_gpu_simple_add", [[8]], [torch.float32], False, "", 4, {})
    for tensor in (out, a + 1):
        with raises(RuntimeError, "xla_gpu_simple_add: b has shape [7], expected the shape of a, [8]"):
            tensor.cpu()
    torch_cases.run(calls.plain_calls()["simple_add: float32"], "xla")
