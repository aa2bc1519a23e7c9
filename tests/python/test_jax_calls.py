"""Every call of calls.py through JAX: its results, donation, scan, export, and the attributes in the program."""

import contextlib
import functools

import jax
import jax.export
import jax.numpy as jnp
import numpy as np
import pytest

import xla_attention.jax
from batches import batch
from calls import ATTRIBUTE_ONLY, bits, every_call, flatten, plain_calls, tree_map
from jax_adapter import arrays_of, donatable, function_of
from xla_attention.jax import paged_attention, simple_add

PLAIN = plain_calls()
UPDATES = {name: call for name, call in PLAIN.items() if call.updates}
each_plain = pytest.mark.parametrize("name", PLAIN)


def assert_same_bits(actual, expected):
    for result, expected_result in zip(flatten(actual), flatten(expected), strict=True):
        np.testing.assert_array_equal(bits(result), bits(expected_result))


@pytest.mark.parametrize("name", every_call())
def test_results_are_those_of_the_c_interface(platform, name):
    call = every_call()[name]
    with jax.enable_x64(True) if call.has_64_bits else contextlib.nullcontext():
        actual = getattr(xla_attention.jax, call.function)(**tree_map(jnp.asarray, call.arguments))
    call.check(*map(np.asarray, flatten(actual)))


@pytest.mark.parametrize("name", UPDATES)
def test_a_donated_cache_is_updated_in_place_and_another_is_not_modified(platform, name):
    call = UPDATES[name]
    before = donatable(call.arguments[call.updates])
    kept = tuple(np.array(x) for x in flatten(before))
    function = jax.jit(function_of(call, call.updates))
    call.check(*map(np.asarray, flatten(function(before))))
    assert_same_bits(before, kept)
    caches = flatten(before)

    @functools.partial(jax.jit, donate_argnums=0)
    def twice_and_in_a_loop(cache):
        def again(_, cache):
            updated = flatten(function(cache))[-len(caches) :]
            return tuple(updated) if isinstance(cache, tuple) else updated[0]

        return function(jax.lax.fori_loop(0, 3, again, again(0, cache)))

    addresses = [x.unsafe_buffer_pointer() for x in caches]
    text = twice_and_in_a_loop.lower(before).compile().as_text()
    actual = flatten(twice_and_in_a_loop(before))
    assert all(x.is_deleted() for x in caches)
    assert [x.unsafe_buffer_pointer() for x in actual[-len(caches) :]] == addresses
    call.check(*map(np.asarray, actual))
    sizes = {",".join(map(str, x.shape)) for x in caches}
    assert not [line for line in text.splitlines() if " copy(" in line and any(f"[{size}]" in line for size in sizes)]


@each_plain
def test_each_step_of_a_scan_gives_the_results_of_a_single_call(platform, name):
    call = PLAIN[name]
    operand, values = next((name, x) for name, x in arrays_of(call).items() if not isinstance(x, tuple))
    function, steps = function_of(call, operand), jnp.stack([values, 2 * values])
    _, actual = jax.jit(lambda steps: jax.lax.scan(lambda _, x: (None, function(x)), None, steps))(steps)
    for i in range(2):
        for stacked, expected in zip(flatten(actual), flatten(function(steps[i])), strict=True):
            np.testing.assert_array_equal(stacked[i], expected)


# The dimension of each operand that a symbolic size replaces.
ROW_DIMENSIONS = dict.fromkeys(
    ("query", "q", "key", "value", "slot_mapping", "positions", "a", "b", "out_a", "out_b"), 0
)
OTHER_DIMENSIONS = {"gather_kv_cache": {"block_tables": 0, "context_lens": 0}}


@each_plain
def test_a_program_of_any_size_is_exported_for_both_platforms(name):
    call = PLAIN[name]
    (size,) = jax.export.symbolic_shape("t")
    dimensions = OTHER_DIMENSIONS.get(call.function, ROW_DIMENSIONS | {"lse_a": 1, "lse_b": 1})

    def spec(name, array):
        sizes = [size if i == dimensions.get(name) else n for i, n in enumerate(array.shape)]
        return jax.ShapeDtypeStruct(sizes, array.dtype)

    arrays = arrays_of(call)
    specs = [tree_map(functools.partial(spec, name), x) for name, x in arrays.items()]
    assert any(size in x.shape for x in flatten(tuple(specs)))
    checks = xla_attention.jax.export_disabled_checks()
    function = jax.jit(function_of(call, *arrays))
    exported = jax.export.export(function, platforms=["cpu", "cuda"], disabled_checks=checks)(*specs)
    call.check(*map(np.asarray, flatten(exported.call(*arrays.values()))))


INTEGER = ("paged_attention: plain", {"scale": 1}, "scale = 1.000000e+00 : f32")


@pytest.mark.parametrize(("name", "options", "attribute"), [*ATTRIBUTE_ONLY, INTEGER])
def test_options_that_change_no_result_are_in_the_program(name, options, attribute):
    call = PLAIN[name]
    call = call._replace(arguments={**call.arguments, **options})
    text = jax.jit(function_of(call, *arrays_of(call))).lower(*arrays_of(call).values()).as_text()
    assert attribute in text and "callback" not in text


def test_the_number_of_sequences_may_be_any_integer(platform):
    call = PLAIN["paged_attention: plain"]
    expected = function_of(call)()
    for number in (jnp.int32(5), np.int64(5), jnp.array([5], jnp.uint8), [5]):
        assert_same_bits(function_of(call, "num_seqs")(number), expected)


def test_transposed_operands_arrive_row_major(platform):
    a, b = jnp.arange(6.0).reshape(2, 3), jnp.ones((3, 2))
    assert (jax.jit(lambda a, b: simple_add(a.T, b))(a, b) == a.T + b).all()


def test_a_long_jitted_chain_of_reads_is_in_order(platform):
    """Many calls in one program, which XLA:GPU records as a command buffer."""
    query, *rest = batch([(2, 20), (1, 33)], spare_rows=0)

    def chain(attend, q):
        for _ in range(12):
            q = attend(q, *rest)
        return q

    attend = functools.partial(paged_attention, scale=0.1)
    together, expected = jax.jit(functools.partial(chain, attend)), chain(attend, query)
    for _ in range(4):
        np.testing.assert_array_equal(together(query), expected)
