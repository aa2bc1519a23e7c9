"""The targets from raw StableHLO text: what holds on every jaxlib, whether or not our JAX front-end takes its jax."""

import functools

import numpy as np

import calls
from case import Case, from_two_threads, raises
from jaxlib_runtime import Program, registered_targets
from stablehlo_text import module, without_trailing_none
from xla_attention import _library


def cases(register):
    """All of them; `register` registers the targets."""
    group = "registration"
    yield Case(group, "all targets", functools.partial(_register, register))
    yield Case(group, "again", register)
    group = "StableHLO"
    for call in calls.every_call():
        yield Case(group, call.name, functools.partial(_run, call))
    yield Case(group, "simple_add by its other name", lambda: _run(calls.simple_add(target="XlaGpuSimpleAdd")))
    for call in calls.every_call():
        if call.aliases:
            yield Case(group, f"{call.name}, donated", functools.partial(_run_donated, call))
    for name, results in _optional_results().items():
        yield Case(group, f"paged_attention, {name}", functools.partial(_run_with_results, results))
    group = "refusals"
    for name, (change, text) in _REFUSALS.items():
        yield Case(group, name, functools.partial(_refuse, change, text))
    group = "threads"
    yield Case(group, "one program", _one_program_from_two_threads)
    yield Case(group, "two programs, compiled at once", _two_programs_from_two_threads)


def _register(register):
    register()
    missing = {t.name.decode() for t in _library.targets() if t.platform == b"cpu"} - registered_targets()
    assert len(_library.targets()) > 5 and not missing, f"not in the registry: {missing}"


def _program(call, **changes):
    operands = without_trailing_none(call.operands)
    given = {"target": call.target, "operands": operands, "results": call.results, "attributes": call.attributes}
    return Program(module(**{**given, **changes}))


def _run(call):
    call.check(*_program(call, aliases=call.aliases)(*without_trailing_none(call.operands)))


def _run_donated(call):
    """In place: the result lies where the operand lay; without donation the operand keeps its contents."""
    operands = without_trailing_none(call.operands)
    program = _program(call, aliases=call.aliases)
    buffers = [program.on_device(x) for x in operands]
    call.check(*map(np.asarray, program.run(buffers)))
    for i in call.aliases:
        assert (np.asarray(buffers[i]).view(np.uint8) == operands[i].view(np.uint8)).all(), (
            f"operand {i} was written to"
        )
    program = _program(call, aliases=call.aliases, donated=call.aliases)
    buffers = [program.on_device(x) for x in operands]
    addresses = [buffers[i].unsafe_buffer_pointer() for i in call.aliases]
    results = program.run(buffers)
    assert all(buffers[i].is_deleted() for i in call.aliases), "the operand was not donated"
    assert [results[i].unsafe_buffer_pointer() for i in call.aliases] == addresses, "the result is another buffer"
    call.check(*map(np.asarray, results))


def _optional_results():
    """Forms of the results of paged_attention: lse and workspace may be left out, at the end or by `[0]`."""
    out, lse = calls.paged_attention().results
    nothing = ((0,), np.dtype(np.uint8))
    return {
        "only out": (out,),
        "lse [0]": (out, nothing),
        "workspace [0]": (out, lse, nothing),
        "lse and workspace [0]": (out, nothing, nothing),
    }


def _run_with_results(results):
    call = calls.paged_attention()
    out, *rest = _program(call, results=results)(*without_trailing_none(call.operands))
    (wanted, wanted_lse) = _program(call)(*without_trailing_none(call.operands))
    np.testing.assert_array_equal(out, wanted)
    for found in rest:
        assert found.size == 0 or np.array_equal(found, wanted_lse)


def _wrong_shape(operands):
    operands[3] = np.zeros((2, 7), np.int32)  # block_tables of 2 sequences, not 3
    return {"operands": operands}


def _wrong_type(operands):
    operands[2] = operands[2].astype(np.float32)
    return {"operands": operands}


def _too_few(operands):
    return {"operands": operands[:5]}


def _wrong_attribute(operands):
    return {"operands": operands, "attributes": calls.paged_attention().attributes.replace("e-1 : f32", "e-1 : f64")}


def _other_attribute(operands):
    return {"operands": operands, "attributes": calls.paged_attention().attributes.replace("scale", "scales", 1)}


# Ours verbatim; the others are of the headers that the handlers are built with, so the same in every runtime.
_REFUSALS = {
    "a shape": (
        _wrong_shape,
        "xla_gpu_paged_attention: block_tables has shape [2, 7], expected [num_seqs=3, max_pages]",
    ),
    "a dtype": (_wrong_type, "xla_gpu_paged_attention: context_lens has dtype f32, expected i32"),
    "too few operands": (_too_few, "Wrong number of arguments: expected at least"),
    "the type of an attribute": (_wrong_attribute, "Wrong scalar data type: expected F32 but got F64"),
    "the name of an attribute": (_other_attribute, "Attribute name mismatch: scales vs scale"),
}


def _refuse(change, text):
    """The text arrives, with its code, and the next call is as good as ever."""
    call = calls.paged_attention()
    changes = change(without_trailing_none(call.operands))
    with raises(Exception, "INVALID_ARGUMENT", text):
        _program(call, **changes)(*changes["operands"])
    _run(call)


def _one_program_from_two_threads():
    call = calls.paged_attention()
    program, operands = _program(call), without_trailing_none(call.operands)
    other = [-operands[0], *operands[1:]]
    results = [program(*x) for x in (operands, other)]

    def run(operands, wanted):
        for found, right in zip(program(*operands), wanted, strict=True):
            np.testing.assert_array_equal(found, right)

    assert not np.array_equal(*(out for out, _ in results))
    from_two_threads(lambda: run(operands, results[0]), lambda: run(other, results[1]))


def _two_programs_from_two_threads():
    from_two_threads(lambda: _run(calls.flash_attn_varlen_packed()), lambda: _run(calls.kv_cache_update()))
