"""Conversion between NumPy arrays and torch tensors, and calls of `calls.py` with tensors."""

import ml_dtypes
import numpy as np
import torch

import xla_attention.torch as xt
from calls import tree_map

# The operators that write their results to operands, by the function that returns them.
IN_PLACE = {
    "kv_cache_update": xt.update_cache_,
    "paged_attention_update": xt.paged_attention_update_,
    "mla_paged_attention_update": xt.mla_paged_attention_update_,
    "rope_kv_cache_update": torch.ops.xla_gpu.rope_kv_cache_update_,
}

# torch.from_numpy does not know these dtypes: their bits are converted as integers.
_BY_BITS = {
    np.dtype(ml_dtypes.bfloat16): (np.int16, torch.bfloat16),
    np.dtype(ml_dtypes.float8_e4m3fn): (np.uint8, torch.float8_e4m3fn),
    np.dtype(ml_dtypes.float8_e5m2): (np.uint8, torch.float8_e5m2),
}
_DTYPES = {dtype: (bits, numpy) for numpy, (bits, dtype) in _BY_BITS.items()}


def tensor(array, device="cpu"):
    """A copy of an array on a device; None and Python values are returned as they are."""
    if not hasattr(array, "dtype"):
        return array
    array = np.array(array)
    bits, dtype = _BY_BITS.get(array.dtype, (array.dtype, None))
    copied = torch.from_numpy(array.view(bits))
    return (copied if dtype is None else copied.view(dtype)).to(device)


def array(tensor):
    """A tensor as a NumPy array."""
    tensor = tensor.detach().cpu()
    if tensor.dtype not in _DTYPES:
        return tensor.numpy()
    bits, numpy = _DTYPES[tensor.dtype]
    return tensor.contiguous().view(torch.from_numpy(np.zeros(0, bits)).dtype).numpy().view(numpy)


def tensor_arguments(call, device="cpu"):
    """The arguments of a call of `calls.py` as tensors and torch dtypes."""
    dtypes = {name: getattr(torch, x.name) for name, x in call.arguments.items() if isinstance(x, np.dtype)}
    return tree_map(lambda x: tensor(x, device), call.arguments) | dtypes
