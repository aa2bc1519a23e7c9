"""A serialised HLO module whose entry is one typed custom call.

It replaces torch_xla's `_xla_custom_call`, which has two faults. Its graph hash omits attributes and results, so that a
call with other attributes runs the program of the first; and it sets no layouts, so that on GPUs a transposed operand
arrives transposed. torch_xla hashes a computation as a whole, and this one has row-major layouts, as JAX's calls have.

Field numbers are those of xla/service/hlo.proto and xla/xla_data.proto.
"""

import struct
from collections.abc import Mapping, Sequence

import numpy as np
import torch

from ._call import DTYPES

Type = tuple[tuple[int, ...], torch.dtype]
_EMPTY: Type = ((0,), torch.float32)


def mlir_dictionary(attributes: Mapping[str, np.generic]) -> str:
    """Attributes as the text of an MLIR dictionary; f32 in hexadecimal, which is exact and parses for every value."""
    return "{" + ", ".join(f"{name} = {_value(value)}" for name, value in sorted(attributes.items())) + "}"


def _value(value: np.generic) -> str:
    if isinstance(value, np.bool_):
        return "true" if value else "false"
    if isinstance(value, np.int64):
        return f"{value} : i64"
    return f"0x{struct.unpack('<I', struct.pack('<f', value))[0]:08X} : f32"


def module(
    target: str,
    operands: Sequence[Type | None],
    results: Sequence[Type],
    config: str,
    aliases: Mapping[int, int],
) -> bytes:
    """An HloModuleProto whose entry calls the target; its parameters are the operands that are not None, **reversed**.

    torch_xla numbers a graph's parameters from the last operand, and XLA pairs donated buffers with results of equal
    size in order. With reversed parameters, a cache is paired with its own result.

    Parameters
    ----------
    target
        The custom call's target name.
    operands
        Shape and dtype of each; one that is None becomes a constant without elements.
    results
        Shape and dtype of each.
    config
        The attributes, see `mlir_dictionary`.
    aliases
        The index of the operand that a result updates, by the index of the result.
    """
    shapes = [_array(*(operand or _EMPTY)) for operand in operands]
    parameters = [index for index, operand in enumerate(operands) if operand is not None]
    outputs = [_array(*result) for result in results]
    root_shape = outputs[0] if len(outputs) == 1 else _number(2, _TUPLE) + b"".join(_bytes(4, s) for s in outputs)
    instructions = []
    for index, shape in enumerate(shapes):
        # XlaBuilder needs names that end in the instruction's id.
        head = _bytes(1, f"operand.{index + 1}") + _bytes(3, shape) + _number(35, index + 1)
        if operands[index] is None:
            instructions.append(head + _bytes(2, "constant") + _bytes(8, _bytes(1, shape)))
        else:
            instructions.append(
                head + _bytes(2, "parameter") + _number(9, len(parameters) - 1 - parameters.index(index))
            )
    root = len(shapes) + 1
    call = _bytes(1, f"call.{root}") + _bytes(2, "custom-call") + _bytes(3, root_shape) + _bytes(28, target)
    call += _number(35, root) + _packed(36, range(1, root)) + _bytes(43, config)
    call += _number(56, 1) + b"".join(_bytes(57, shape) for shape in shapes)
    for result, operand in aliases.items():
        call += _bytes(74, (_packed(1, [result]) if len(outputs) > 1 else b"") + _number(2, operand))
    instructions.append(call + _number(77, _TYPED_FFI))
    program = b"".join(_bytes(1, shapes[index]) for index in reversed(parameters)) + _bytes(2, root_shape)
    program += b"".join(_bytes(3, f"p{index}") for index in range(len(parameters)))
    name = f"xla_attention.{root + 1}"
    body = b"".join(_bytes(2, instruction) for instruction in instructions)
    computation = _bytes(1, name) + body + _bytes(4, program) + _number(5, root + 1) + _number(6, root)
    return (
        _bytes(1, "xla_attention")
        + _bytes(2, name)
        + _bytes(3, computation)
        + _bytes(4, program)
        + _number(6, root + 1)
    )


# PrimitiveType.TUPLE; CustomCallApiVersion.API_VERSION_TYPED_FFI
_TUPLE, _TYPED_FFI = 13, 4


def _array(shape: Sequence[int], dtype: torch.dtype) -> bytes:
    """A ShapeProto with a row-major layout."""
    layout = _packed(1, range(len(shape) - 1, -1, -1))
    return _number(2, DTYPES[dtype]) + _packed(3, shape) + _bytes(5, layout) + _packed(6, [0] * len(shape))


def _varint(value: int) -> bytes:
    encoded = bytearray()
    while value > 127:
        encoded.append(value & 127 | 128)
        value >>= 7
    return bytes([*encoded, value])


def _number(field: int, value: int) -> bytes:
    return _varint(field << 3) + _varint(value)


def _bytes(field: int, value: bytes | str) -> bytes:
    value = value.encode() if isinstance(value, str) else value
    return _varint(field << 3 | 2) + _varint(len(value)) + value


def _packed(field: int, values: Sequence[int]) -> bytes:
    return _bytes(field, b"".join(map(_varint, values)))
