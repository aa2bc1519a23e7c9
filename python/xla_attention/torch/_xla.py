"""Calls on XLA tensors: a computation that consists of the custom call is added to torch_xla's graph."""

import torch

from .. import torch_xla as runtime
from ._call import Call, put_workspace
from ._hlo import mlir_dictionary, module

# Computations, keyed by all that they depend on.
_COMPUTATIONS: dict[tuple, object] = {}
_CACHE_SIZE = 4096


def run(call: Call) -> list[torch.Tensor | None]:
    """Add the call to the graph; returns one lazy tensor per result."""
    import _XLAC

    call.device()
    declared = list(call.results)
    if call.workspace:
        declared = put_workspace(call.target, declared, call.workspace.result(call.target))
    while declared[-1] is None:
        declared.pop()
    operands = list(call.operands.values())
    while operands[-1] is None:
        operands.pop()
    types = tuple(None if tensor is None else (tensor.shape, tensor.dtype) for tensor in operands)
    results = tuple(((0,), torch.uint8) if result is None else (result.shape, result.dtype) for result in declared)
    key = (call.target, types, results, *call.attributes.values())
    computation = _COMPUTATIONS.get(key)
    if computation is None:
        call.validate()
        runtime.register_targets()
        encoded = module(call.target, types, results, mlir_dictionary(call.attributes), call.aliases)
        if len(_COMPUTATIONS) >= _CACHE_SIZE:
            _COMPUTATIONS.clear()
        computation = _COMPUTATIONS[key] = _XLAC._xla_op_computation_from_module_proto("xla_attention", encoded)
    # In reverse order, see `module`.
    parameters = [tensor for tensor in reversed(operands) if tensor is not None]
    outputs = _XLAC._xla_user_computation("xla_attention::call", parameters, computation)
    return [None if result is None else tensor for result, tensor in zip(call.results, outputs, strict=False)]
