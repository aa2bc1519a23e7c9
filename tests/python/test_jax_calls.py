"""Every option, type and layout of every function through JAX (calls.py), and what each promises beside numbers."""

import contextlib
import functools

import jax
import jax.export
import jax.numpy as jnp
import numpy as np
import pytest

import xla_attention.jax
from batches import batch
from calls import SILENT, every_call, flat, mapped, plain_calls
from jax_side import arrays_of, computed, function_of
from xla_attention.jax import paged_attention, simple_add

PLAIN = plain_calls()
UPDATES = {name: call for name, call in PLAIN.items() if call.updates}
each_plain = pytest.mark.parametrize("name", PLAIN)


def bits(results):
    return [np.ascontiguousarray(x).view(np.uint8) for x in flat(results)]


def assert_same_bits(found, wanted):
    for one, other in zip(bits(found), bits(wanted), strict=True):
        np.testing.assert_array_equal(one, other)


@pytest.mark.parametrize("name", every_call())
def test_each_argument_arrives(platform, name):
    call = every_call()[name]
    with jax.enable_x64(True) if call.has_64_bits else contextlib.nullcontext():
        found = getattr(xla_attention.jax, call.function)(**mapped(jnp.asarray, call.given))
    call.check(*map(np.asarray, flat(found)))


@pytest.mark.parametrize("name", UPDATES)
def test_a_cache_that_is_donated_is_updated_where_it_is_and_another_keeps_its_rows(platform, name):
    call = UPDATES[name]
    before = computed(call.given[call.updates])
    kept = tuple(np.array(x) for x in flat(before))
    function = jax.jit(function_of(call, call.updates))
    call.check(*map(np.asarray, flat(function(before))))
    assert_same_bits(before, kept)
    caches = flat(before)

    @functools.partial(jax.jit, donate_argnums=0)
    def twice_and_in_a_loop(cache):
        def again(_, cache):
            updated = flat(function(cache))[-len(caches) :]
            return tuple(updated) if isinstance(cache, tuple) else updated[0]

        return function(jax.lax.fori_loop(0, 3, again, again(0, cache)))

    addresses = [x.unsafe_buffer_pointer() for x in caches]
    text = twice_and_in_a_loop.lower(before).compile().as_text()
    found = flat(twice_and_in_a_loop(before))
    assert all(x.is_deleted() for x in caches)
    assert [x.unsafe_buffer_pointer() for x in found[-len(caches) :]] == addresses
    call.check(*map(np.asarray, found))
    sizes = {",".join(map(str, x.shape)) for x in caches}
    assert not [line for line in text.splitlines() if " copy(" in line and any(f"[{size}]" in line for size in sizes)]


@each_plain
def test_a_scan_runs_each_step_as_if_it_were_alone(platform, name):
    call = PLAIN[name]
    operand, values = next((name, x) for name, x in arrays_of(call).items() if not isinstance(x, tuple))
    function, steps = function_of(call, operand), jnp.stack([values, 2 * values])
    _, found = jax.jit(lambda steps: jax.lax.scan(lambda _, x: (None, function(x)), None, steps))(steps)
    for i in range(2):
        for one, wanted in zip(flat(found), flat(function(steps[i])), strict=True):
            np.testing.assert_array_equal(one[i], wanted)


# Operands that have a size in common, and which of their dimensions it is.
OF_ROWS = dict.fromkeys(("query", "q", "key", "value", "slot_mapping", "positions", "a", "b", "out_a", "out_b"), 0)
OF_ANY_SIZE = {"gather_kv_cache": {"block_tables": 0, "context_lens": 0}}


@each_plain
def test_a_program_of_any_size_is_exported_for_both_platforms(name):
    call = PLAIN[name]
    (size,) = jax.export.symbolic_shape("t")
    dimensions = OF_ANY_SIZE.get(call.function, OF_ROWS | {"lse_a": 1, "lse_b": 1})

    def spec(name, array):
        sizes = [size if i == dimensions.get(name) else n for i, n in enumerate(array.shape)]
        return jax.ShapeDtypeStruct(sizes, array.dtype)

    arrays = arrays_of(call)
    specs = [mapped(functools.partial(spec, name), x) for name, x in arrays.items()]
    assert any(size in x.shape for x in flat(tuple(specs)))
    checks = xla_attention.jax.export_disabled_checks()
    function = jax.jit(function_of(call, *arrays))
    exported = jax.export.export(function, platforms=["cpu", "cuda"], disabled_checks=checks)(*specs)
    call.check(*map(np.asarray, flat(exported.call(*arrays.values()))))


INTEGER = ("paged_attention: plain", {"scale": 1}, "scale = 1.000000e+00 : f32")


@pytest.mark.parametrize(("name", "options", "attribute"), [*SILENT, INTEGER])
def test_what_changes_no_number_is_in_the_program(name, options, attribute):
    call = PLAIN[name]
    call = call._replace(given={**call.given, **options})
    text = jax.jit(function_of(call, *arrays_of(call))).lower(*arrays_of(call).values()).as_text()
    assert attribute in text and "callback" not in text


def test_the_number_of_sequences_may_be_any_integer(platform):
    call = PLAIN["paged_attention: plain"]
    wanted = function_of(call)()
    for number in (jnp.int32(5), np.int64(5), jnp.array([5], jnp.uint8), [5]):
        assert_same_bits(function_of(call, "num_seqs")(number), wanted)


def test_transposed_operands_arrive_row_major(platform):
    a, b = jnp.arange(6.0).reshape(2, 3), jnp.ones((3, 2))
    assert (jax.jit(lambda a, b: simple_add(a.T, b))(a, b) == a.T + b).all()


def test_a_long_jitted_chain_of_reads_is_in_order(platform):
    """Many calls in one program: on a GPU XLA records them as a command buffer."""
    query, *rest = batch([(2, 20), (1, 33)], spare_rows=0)

    def chain(attend, q):
        for _ in range(12):
            q = attend(q, *rest)
        return q

    attend = functools.partial(paged_attention, scale=0.1)
    together, wanted = jax.jit(functools.partial(chain, attend)), chain(attend, query)
    for _ in range(4):
        np.testing.assert_array_equal(together(query), wanted)
