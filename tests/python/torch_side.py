"""torch's tensors for arrays."""

import ml_dtypes
import numpy as np
import torch

from calls import mapped

# numpy has no such types of its own; the bits travel as integers.
_BY_BITS = {
    np.dtype(ml_dtypes.bfloat16): (np.int16, torch.bfloat16),
    np.dtype(ml_dtypes.float8_e4m3fn): (np.uint8, torch.float8_e4m3fn),
    np.dtype(ml_dtypes.float8_e5m2): (np.uint8, torch.float8_e5m2),
}
_DTYPES = {dtype: (bits, numpy) for numpy, (bits, dtype) in _BY_BITS.items()}


def tensor(array, device="cpu"):
    """A copy of an array on a device; None and Python values stay."""
    if not hasattr(array, "dtype"):
        return array
    array = np.array(array)
    bits, dtype = _BY_BITS.get(array.dtype, (array.dtype, None))
    copied = torch.from_numpy(array.view(bits))
    return (copied if dtype is None else copied.view(dtype)).to(device)


def array(tensor):
    """The numbers of a tensor."""
    tensor = tensor.detach().cpu()
    if tensor.dtype not in _DTYPES:
        return tensor.numpy()
    bits, numpy = _DTYPES[tensor.dtype]
    return tensor.contiguous().view(torch.from_numpy(np.zeros(0, bits)).dtype).numpy().view(numpy)


def given(call, device="cpu"):
    """What a call of `calls.py` is given, in tensors and torch's dtypes."""
    dtypes = {name: getattr(torch, x.name) for name, x in call.given.items() if isinstance(x, np.dtype)}
    return mapped(lambda x: tensor(x, device), call.given) | dtypes
