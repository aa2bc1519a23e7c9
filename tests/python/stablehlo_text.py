"""StableHLO text of a call, as any PJRT program would have it."""

import numpy as np

_TYPES = {
    "float32": "f32",
    "bfloat16": "bf16",
    "float8_e4m3fn": "f8E4M3FN",
    "int32": "i32",
    "uint8": "ui8",
}


def without_trailing_none(operands):
    """Operands as buffers: left out at the end, a buffer without an element in between."""
    operands = list(operands)
    while operands and operands[-1] is None:
        operands.pop()
    return [np.zeros(0, np.float32) if x is None else x for x in operands]


def module(target, operands, results, attributes, *, aliases=(), donated=()):
    """A program of one typed custom call.

    Parameters
    ----------
    operands : list of arrays
    results : list of (shape, dtype)
    attributes : str
        The inside of the dictionary ``backend_config``.
    aliases : tuple of int
        Results that share the memory of the operand of the same number.
    donated : tuple of int
        Operands that the program may write to, for the result of the same number.
    """
    inputs = [_tensor(x.shape, x.dtype) for x in operands]
    outputs = [_tensor(*result) for result in results]
    names = [f"%arg{i}" for i in range(len(inputs))]
    results_of_call = [f"%0#{i}" for i in range(len(outputs))] if len(outputs) > 1 else ["%0"]
    main = ", ".join(
        f"{name}: {kind}" + (f" {{tf.aliasing_output = {i} : i32}}" if i in donated else "")
        for i, (name, kind) in enumerate(zip(names, inputs, strict=True))
    )
    config = ["api_version = 4 : i32", f"backend_config = {{{attributes}}}"]
    if aliases:
        config.append(f"output_operand_aliases = [{', '.join(_alias(i, len(outputs)) for i in aliases)}]")
    call = f"%0{f':{len(outputs)}' if len(outputs) > 1 else ''} = stablehlo.custom_call @{target}({', '.join(names)})"
    return f"""module @m {{ func.func public @main({main}) -> ({", ".join(outputs)}) {{
  {call} {{{", ".join(config)}}} : ({", ".join(inputs)}) -> ({", ".join(outputs)})
  return {", ".join(results_of_call)} : {", ".join(outputs)} }} }}"""


def _tensor(shape, dtype):
    return "tensor<" + "".join(f"{size}x" for size in shape) + _TYPES[np.dtype(dtype).name] + ">"


def _alias(index, count):
    of_tuple = index if count > 1 else ""
    return (
        f"#stablehlo.output_operand_alias<output_tuple_indices = [{of_tuple}], operand_index = {index}, "
        "operand_tuple_indices = []>"
    )
