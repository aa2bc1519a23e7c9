"""Every option, type and layout of every function, through JAX and torch: each argument arrives (small_calls.py)."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import xla_attention.jax
from small_calls import every_call

CALLS = {f"{call.function}: {call.name}": call for call in every_call()}


def test_no_two_calls_have_one_name():
    assert len(CALLS) == len(every_call())


def moved(value, to_device):
    """Every array in a tuple or dictionary."""
    if isinstance(value, tuple):
        return tuple(moved(x, to_device) for x in value)
    if isinstance(value, dict):
        return {name: moved(x, to_device) for name, x in value.items()}
    return to_device(value) if isinstance(value, (np.ndarray, np.generic)) else value


def flat(results):
    """The results of a function one after the other."""
    return [
        x
        for r in (results if isinstance(results, tuple) else (results,))
        for x in (r if isinstance(r, tuple) else (r,))
    ]


@pytest.mark.parametrize("name", CALLS)
def test_through_jax(platform, name):
    call = CALLS[name]
    found = getattr(xla_attention.jax, call.function)(
        *moved(call.arguments, jnp.asarray), **moved(call.options, jnp.asarray)
    )
    call.check(*map(np.asarray, flat(found)))


@pytest.mark.parametrize("name", CALLS)
def test_through_torch(torch_device, name):
    torch_side = pytest.importorskip("torch_side")
    import xla_attention.torch as xt

    call = CALLS[name]

    def given():
        return moved(call.arguments, lambda x: torch_side.tensor(x, torch_device))

    options = moved(call.options, lambda x: torch_side.tensor(x, torch_device))
    arguments = given()
    found = flat(getattr(xt, call.function)(*arguments, **options))
    assert {x.device.type for x in found} == {torch_device}
    call.check(*map(torch_side.array, found))
    for index in call.updates:  # the function leaves its arguments alone
        for one, before in zip(flat(arguments[index]), flat(call.arguments[index]), strict=True):
            np.testing.assert_array_equal(torch_side.array(one).view(np.uint8), before.view(np.uint8))
    in_place = {"kv_cache_update": "update_cache_", "paged_attention_update": "paged_attention_update_"}.get(
        call.function
    )
    if in_place is None:
        return
    changed = given()
    results = getattr(xt, in_place)(*changed, **options)
    updated = [x for index in call.updates for x in flat(changed[index])]
    others = [] if results is None else flat(results)
    call.check(*map(torch_side.array, (*others, *updated)))


# What no number shows: (function, options, attribute in the program).
SILENT = [
    ("paged_attention", {"scale": 1.0, "batch_invariant": True}, "batch_invariant = true"),
    ("flash_attn_varlen", {"max_seqlen_q": 8}, "max_seqlen_q = 8 : i64"),
    ("flash_attn_varlen", {"max_seqlen_k": 64}, "max_seqlen_k = 64 : i64"),
    ("flash_attn_varlen", {"batch_invariant": True}, "batch_invariant = true"),
    ("paged_attention_update", {"scale": 1.0, "batch_invariant": True}, "batch_invariant = true"),
]


@pytest.mark.parametrize(("function", "options", "attribute"), SILENT, ids=lambda x: x if isinstance(x, str) else "")
def test_what_changes_no_number_is_in_the_program(function, options, attribute):
    call = next(call for call in CALLS.values() if call.function == function)
    given = {name: x for name, x in call.options.items() if name.startswith("seqused")}
    lowered = jax.jit(lambda *x: getattr(xla_attention.jax, function)(*x, **given, **options)).lower(
        *call.arguments[:9]
    )
    assert attribute in lowered.as_text()
