"""Calls of the conformance tables, as StableHLO text and through ``jax.ffi.ffi_call``."""

import re
import struct

import jax
import jax.experimental
import numpy as np

from stablehlo import Program

MLIR = {"pred": "i1", "c64": "complex<f32>", "f8e4m3fn": "f8E4M3FN", "f8e5m2": "f8E5M2"}


def tensor(buffer):
    element = MLIR.get(buffer.element, buffer.element.replace("u", "ui"))
    return f"tensor<{''.join(f'{size}x' for size in buffer.shape)}{element}>"


def mlir_attribute(text):
    kind, *values = text.split(" ")
    if kind in ("f32", "f64"):
        # In hexadecimal, because MLIR has no literal for NaN.
        code = "f" if kind == "f32" else "d"
        return f"0x{struct.pack(f'>{code}', float(values[0])).hex()} : {kind}"
    return {
        "i1": lambda: values[0],
        "i32": lambda: f"{values[0]} : i32",
        "i64": lambda: f"{values[0]} : i64",
        "text": lambda: f'"{" ".join(values)}"',
        "i64s": lambda: f"array<i64: {', '.join(values)}>",
    }[kind]()


def numpy_attribute(text):
    kind, *values = text.split(" ")
    if kind == "i64s":
        return np.array(values, np.int64)
    return {
        "i1": lambda value: np.bool_(value == "true"),
        "i32": np.int32,
        "i64": np.int64,
        "f32": np.float32,
        "f64": np.float64,
        "text": str,
    }[kind](" ".join(values))


def stablehlo_text(case, *, in_place=False, donated=False, extra=""):
    """A module with this call; `donated` aliases parameters to results, `extra` adds attributes to the operation."""
    names = [f"%a{i}" for i in range(len(case.operands))]
    operands, results = ([tensor(b) for b in buffers] for buffers in (case.operands, case.results))
    attributes = ", ".join(f"{name} = {mlir_attribute(value)}" for name, value in case.attributes.items())
    aliases = ", ".join(
        f"#stablehlo.output_operand_alias<output_tuple_indices = [{result if len(results) > 1 else ''}], "
        f"operand_index = {operand}, operand_tuple_indices = []>"
        for operand, result in case.aliases.items()
        if in_place
    )
    # XLA removes a call without side effects whose results have no elements.
    operation = f"api_version = 4 : i32, has_side_effect = true, backend_config = {{{attributes}}}{extra}"
    operation += f", output_operand_aliases = [{aliases}]" if aliases else ""
    donations = {i: f" {{tf.aliasing_output = {result} : i32}}" for i, result in case.aliases.items() if donated}
    parameters = ", ".join(
        f"{name}: {kind}{donations.get(i, '')}" for i, (name, kind) in enumerate(zip(names, operands, strict=True))
    )
    call = f"stablehlo.custom_call @{case.target}({', '.join(names)}) {{{operation}}}"
    call += f" : ({', '.join(operands)}) -> ({', '.join(results)})"
    returned = [f"%r#{i}" for i in range(len(results))] if len(results) > 1 else ["%r"] * len(results)
    end = f"return {', '.join(returned)} : {', '.join(results)}" if results else "return"
    left = f"%r:{len(results)} = " if len(results) > 1 else "%r = " if results else ""
    return (
        f"module @m {{ func.func public @main({parameters}) -> ({', '.join(results)}) {{\n {left}{call}\n {end} }} }}"
    )


def x64():
    """A context in which JAX keeps 64-bit types."""
    return jax.enable_x64(True) if hasattr(jax, "enable_x64") else jax.experimental.enable_x64()


def by_stablehlo(case, platform, *, in_place=False):
    with x64():
        return Program(stablehlo_text(case, in_place=in_place), platform)(*[b.array() for b in case.operands])


def ffi_call(case, *, in_place=False):
    """The call as a function of its operands."""
    attributes = {name: numpy_attribute(value) for name, value in case.attributes.items()}
    results = [jax.ShapeDtypeStruct(b.shape, b.dtype) for b in case.results]
    aliases = case.aliases if in_place else None
    call = jax.ffi.ffi_call(case.target, results, has_side_effect=True, input_output_aliases=aliases)
    return lambda *operands: call(*operands, **attributes)


def by_ffi_call(case, platform, *, in_place=False):
    with x64(), jax.default_device(jax.devices(platform)[0]):
        operands = [b.array() for b in case.operands]
        results = jax.jit(ffi_call(case, in_place=in_place))(*operands)
        return [np.asarray(result) for result in results]


def assert_outcome(case, platform, run):
    """Assert that the case has the results, or the error, that the table says."""
    results, error = (), None
    try:
        results = run(case, platform)
    except jax.errors.JaxRuntimeError as raised:
        if case.code is None:
            raise
        error = error_text(raised)
    assert error == (case.code and reported_error(platform, case))
    for expected, actual in zip(() if case.code else case.results, results, strict=True):
        assert expected.matches(actual), actual


def reported_error(platform, case):
    """The error that the user sees. On a GPU the initialize handler reports it, whose binding has one argument less."""
    text = case.text
    if platform == "gpu" and text.startswith("[execute]"):
        text = re.sub(r"operands at: (\d+)", lambda at: f"operands at: {int(at[1]) - 1}", text)
        text = text.replace("[execute]", "[initialize]", 1)
    return f"{case.code}: {text}"


def error_text(error):
    """The text of an error, without the program name that XLA:GPU appends."""
    return re.sub(r" \[executable_name='[^']*'\]$", "", str(error))
