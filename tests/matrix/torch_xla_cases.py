"""xla_attention.torch on torch_xla's CPU client: lazily, compiled by openxla, in place."""

import ctypes
import functools
import struct

import ml_dtypes
import numpy as np
import torch
import torch_xla

import calls
import front_end
import xla_attention.torch as xt
from case import Case, Skip, from_two_threads, raises
from xla_attention import _library
from xla_attention import torch_xla as registration

GROUP = "functions"
_XLAC = torch_xla._XLAC
# NumPy has no such types of its own; the bits travel as integers.
_BY_BITS = {
    np.dtype(ml_dtypes.bfloat16): (np.int16, torch.int16, torch.bfloat16),
    np.dtype(ml_dtypes.float8_e4m3fn): (np.uint8, torch.uint8, torch.float8_e4m3fn),
}


def runtime():
    """Name and version, and that of its FFI, out of its table."""
    version = torch_xla.__version__
    api = registration._ffi_api(version)
    major, minor = struct.unpack_from("<2i", ctypes.string_at(api, 40), 32)
    return f"torch_xla {version.split('+')[0]}", f"{major}.{minor}"


def cases():
    """All of them."""
    yield Case("registration", "all targets", _register)
    yield Case("registration", "again", registration.register_with_cpu_client.__wrapped__)
    yield Skip("StableHLO", "torch_xla runs no StableHLO text; its functions put the same custom calls into its graphs")
    for call in calls.every_call():
        yield Case(GROUP, f"{call.name}, lazily", functools.partial(_run, call))
        yield Case(GROUP, f"{call.name}, openxla", functools.partial(_run, call, _openxla))
    for call in (calls.kv_cache_update(), calls.kv_cache_update(calls.FP8), calls.kv_cache_update_split()):
        yield Case(GROUP, f"{call.name}, donated", functools.partial(_run_donated, call))
    yield Case(GROUP, "paged_attention without lse", _without_lse)
    yield Case("refusals", "a shape", _refuse)
    yield Case("refusals", "a shape, by the handler", _refuse_by_the_handler)
    yield Case("threads", "two calls", _two_calls_from_two_threads)


def _to_device(array):
    bits, of_bits, dtype = _BY_BITS.get(array.dtype, (array.dtype, None, None))
    copied = torch.from_numpy(np.array(array).view(bits))
    return (copied if dtype is None else copied.view(of_bits).view(dtype)).to("xla")


def _to_numpy(tensor):
    tensor = tensor.detach().cpu()
    for numpy, (_, of_bits, dtype) in _BY_BITS.items():
        if tensor.dtype == dtype:
            return tensor.contiguous().view(of_bits).numpy().view(numpy)
    return tensor.numpy()


def _openxla(function):
    torch._dynamo.reset()  # else each call counts as one more recompilation of front_end.run
    return torch.compile(function, backend="openxla", fullgraph=True)


def _register():
    """The runtime takes every target of the CPU, and a call of one's own finds one."""
    xt.register_targets()
    assert sum(target.platform == b"cpu" for target in _library.targets()) > 5
    a = torch.arange(8.0).to("xla")
    (out,) = _XLAC._xla_custom_call([a, a], "XlaGpuSimpleAdd", [[8]], [torch.float32], False, "", 4, {})
    assert out.cpu().tolist() == (2 * torch.arange(8.0)).tolist()


def _run(call, wrap=lambda function: function):
    front_end.run(xt, call, _to_device, _to_numpy, wrap)


def _run_donated(call):
    """`update_cache_` makes the cache the updated one and gives its buffer to the result."""
    cache, *rest = front_end.moved(call.arguments, _to_device)
    tensors = list(cache) if isinstance(cache, tuple) else [cache]
    xt.update_cache_(cache, *rest, **front_end.moved(call.options, _to_device))
    assert "output_to_operand_aliasing=" in _XLAC._get_xla_tensors_hlo(tensors)
    call.check(*map(_to_numpy, tensors))


def _without_lse():
    call = calls.paged_attention()
    both = xt.paged_attention(*map(_to_device, call.arguments), **call.options)
    out = xt.paged_attention(*map(_to_device, call.arguments), **{**call.options, "return_lse": False})
    np.testing.assert_array_equal(_to_numpy(out), _to_numpy(both[0]))


def _refuse():
    """Before anything runs."""
    query, cache, lens, tables, *rest = map(_to_device, calls.paged_attention().arguments)
    with raises(ValueError, "xla_gpu_paged_attention: block_tables has shape [2, 3], expected [num_seqs=3, max_pages]"):
        xt.paged_attention(query, cache, lens, tables[:2], *rest, scale=0.125)


def _refuse_by_the_handler():
    """A call of one's own, which nobody has checked, fails with our text.

    torch_xla 2.9 raises it once more at the next sync, whatever that computes; after that all is well.
    """
    a, b = torch.ones(8).to("xla"), torch.ones(7).to("xla")
    (out,) = _XLAC._xla_custom_call([a, b], "xla_gpu_simple_add", [[8]], [torch.float32], False, "", 4, {})
    for tensor in (out, a + 1):
        with raises(RuntimeError, "xla_gpu_simple_add: b has shape [7], expected the shape of a, [8]"):
            tensor.cpu()
    _run(calls.simple_add())


def _two_calls_from_two_threads():
    calls_at_once = (calls.paged_attention(), calls.kv_cache_update())
    from_two_threads(*(functools.partial(_run, call) for call in calls_at_once))
