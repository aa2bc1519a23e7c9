"""The targets from raw StableHLO text: what holds on every jaxlib, whether or not our JAX front-end takes its jax.

The calls are those of tests/conformance that work, with what has to come out.
"""

import functools

import numpy as np

from case import Case, from_two_threads, raises
from conformance_calls import stablehlo_text, x64
from conformance_table import cases as conformance_cases
from conformance_table import in_words_of_the_headers
from jaxlib_runtime import registered_targets
from stablehlo import Program
from xla_attention import _library


def cases(register):
    """All of them; `register` registers the targets."""
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
    ours = [case for case in conformance_cases() if case.name in _REFUSED]
    assert {case.name for case in ours} == set(_REFUSED)
    for case in (*ours, *in_words_of_the_headers()):
        yield Case(group, str(case), functools.partial(_refuse, case))
    group = "threads"
    yield Case(group, "one program", _one_program_from_two_threads)
    yield Case(group, "two programs, compiled at once", _two_programs_from_two_threads)


# Ours; the others are of the headers that the handlers are built with. The same words in every runtime.
_REFUSED = (
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


def _check(case, found):
    assert all(wanted.is_met_by(np.asarray(one)) for wanted, one in zip(case.results, found, strict=True)), found


def _with_64_bits(function):
    """Which some of the tables' buffers have."""

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
    """In place: the result lies where the operand lay; without donation the operand keeps its contents."""
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
    """The text arrives, with its code, and the next call is as good as ever."""
    with raises(Exception, case.code, case.text):
        _program(case)(*[b.array() for b in case.operands])
    _run(_named(case.target))


def _one_program_from_two_threads():
    case = _named("xla_gpu_paged_attention")
    program, operands = _program(case), [b.array() for b in case.operands]
    other = [operands[0], -operands[1], *operands[2:]]
    results = [program(*x) for x in (operands, other)]

    def run(operands, wanted):
        for found, right in zip(program(*operands), wanted, strict=True):
            np.testing.assert_array_equal(found, right)

    assert not np.array_equal(*(out for (out,) in results))
    from_two_threads(lambda: run(operands, results[0]), lambda: run(other, results[1]))


def _two_programs_from_two_threads():
    targets = "xla_gpu_flash_attn_varlen", "xla_gpu_kv_cache_update"
    from_two_threads(*(functools.partial(_run, _named(target)) for target in targets))
