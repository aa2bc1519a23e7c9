"""Calls on torch_xla's tensors: a computation with the custom call becomes part of the graph."""

import torch

from .. import torch_xla as runtime
from ._call import Call
from ._hlo import dictionary, module

# Computations by all that they depend on.
_KNOWN: dict[tuple, object] = {}
_MOST_KNOWN = 4096


def run(call: Call) -> list[torch.Tensor | None]:
    """Add the call to the graph; the results, as ``call.results``, are computed with it."""
    import _XLAC

    call.device()
    asked = [*call.results, *([call.workspace.result(call.target)] if call.workspace else [])]
    while asked[-1] is None:
        asked.pop()
    operands = list(call.operands.values())
    while operands[-1] is None:
        operands.pop()
    types = tuple(None if tensor is None else (tensor.shape, tensor.dtype) for tensor in operands)
    results = tuple(((0,), torch.uint8) if one is None else (one.shape, one.dtype) for one in asked)
    key = (call.target, types, results, *call.attributes.values())
    computation = _KNOWN.get(key)
    if computation is None:
        call.check()
        runtime.register_targets()
        encoded = module(call.target, types, results, dictionary(call.attributes), call.aliases)
        if len(_KNOWN) >= _MOST_KNOWN:
            _KNOWN.clear()
        computation = _KNOWN[key] = _XLAC._xla_op_computation_from_module_proto("xla_attention", encoded)
    # Last one first, see `module`.
    given = [tensor for tensor in reversed(operands) if tensor is not None]
    found = _XLAC._xla_user_computation("xla_attention::call", given, computation)
    return [None if result is None else tensor for result, tensor in zip(call.results, found, strict=False)]
