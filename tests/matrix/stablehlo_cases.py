"""Cases of the targets in StableHLO text, for every jaxlib, also where xla_attention.jax does not support its JAX.

The calls and their expected results are those of tests/conformance.
"""

import functools

import numpy as np

from case import Case, raises, run_at_once
from conformance_calls import stablehlo_text, x64
from conformance_table import cases as conformance_cases
from conformance_table import ffi_header_errors
from jaxlib_runtime import registered_targets
from stablehlo import Program
from xla_attention import _library


def cases(register):
    """All cases; `register` registers the targets."""
    group = "registration"
    yield Case(group, "all targets", functools.partial(_register, register))
    yield Case(group, "again", register)
    group = "StableHLO"
    working = [case for case in conformance_cases() if case.code is None and "memory" not in case.terms]
    for case in working:
        yield Case(group, str(case), functools.partial(_run, case))
    for case in working:
        if case.aliases:
            yield Case(group, f"{case}, donated", functools.partial(_run_donated, case))
    group = "refusals"
    ours = [case for case in conformance_cases() if case.name in _REJECTED]
    assert {case.name for case in ours} == set(_REJECTED)
    for case in (*ours, *ffi_header_errors()):
        yield Case(group, str(case), functools.partial(_refuse, case))
    group = "threads"
    yield Case(group, "one program", _one_program_from_two_threads)
    yield Case(group, "two programs, compiled at once", _two_programs_from_two_threads)


# Calls that our code rejects; the FFI headers reject others. The texts are the same in every runtime.
_REJECTED = (
    "context_lens i32[4]",
    "value f32[6,2,16]",
    "query bf16[6,4,12]; kv_cache bf16[5,8,4,12]; out bf16[6,4,12]",
)


def _named(target):
    return next(case for case in conformance_cases() if case.target == target)


def _register(register):
    register()
    missing = {t.name.decode() for t in _library.targets() if t.platform == b"cpu"} - registered_targets()
    assert len(_library.targets()) > 5 and not missing, f"not in the registry: {missing}"


def _program(case, **options):
    return Program(stablehlo_text(case, **options))


def _check(case, actual):
    assert all(expected.matches(np.asarray(x)) for expected, x in zip(case.results, actual, strict=True)), actual


def _with_64_bits(function):
    """Run a function with 64-bit types, which some buffers of the tables have."""

    @functools.wraps(function)
    def run(*arguments):
        with x64():
            return function(*arguments)

    return run


@_with_64_bits
def _run(case):
    _check(case, _program(case, in_place=bool(case.aliases))(*[b.array() for b in case.operands]))


@_with_64_bits
def _run_donated(case):
    """With donation the update is in place; without it the operand keeps its contents."""
    operands = [b.array() for b in case.operands]
    program = _program(case, in_place=True)
    buffers = [program.on_device(x) for x in operands]
    _check(case, program.run(buffers))
    for i in case.aliases:
        assert np.asarray(buffers[i]).tobytes() == operands[i].tobytes(), f"operand {i} was written to"
    program = _program(case, in_place=True, donated=True)
    buffers = [program.on_device(x) for x in operands]
    addresses = {result: buffers[i].unsafe_buffer_pointer() for i, result in case.aliases.items() if operands[i].size}
    results = program.run(buffers)
    assert all(buffers[i].is_deleted() for i in case.aliases), "the operand was not donated"
    assert {i: results[i].unsafe_buffer_pointer() for i in addresses} == addresses, "the result is another buffer"
    _check(case, results)


def _refuse(case):
    """The error has its code and text, and the next call succeeds."""
    with raises(Exception, case.code, case.text):
        _program(case)(*[b.array() for b in case.operands])
    _run(_named(case.target))


def _one_program_from_two_threads():
    case = _named("xla_gpu_paged_attention")
    program, operands = _program(case), [b.array() for b in case.operands]
    negated = [operands[0], -operands[1], *operands[2:]]
    results = [program(*x) for x in (operands, negated)]

    def run(operands, expected):
        for actual, expected_result in zip(program(*operands), expected, strict=True):
            np.testing.assert_array_equal(actual, expected_result)

    assert not np.array_equal(*(out for (out,) in results))
    run_at_once(lambda: run(operands, results[0]), lambda: run(negated, results[1]))


def _two_programs_from_two_threads():
    targets = "xla_gpu_flash_attn_varlen", "xla_gpu_kv_cache_update"
    run_at_once(*(functools.partial(_run, _named(target)) for target in targets))
