"""Differentiating an operator without gradients is an error, and other gradients are not affected."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import xla_attention.jax
from calls import flatten, plain_calls, tree_map
from xla_attention.jax import dot_product_attention, flash_attn_varlen, kv_cache_update, ragged_paged_attention

ALTERNATIVES = {
    "paged_attention": "flash_attn_varlen over packed keys",
    "paged_attention_update": "flash_attn_varlen over packed keys",
    "mla_paged_attention": "flash_attn_varlen over up-projected keys",
    "mla_paged_attention_update": "flash_attn_varlen over up-projected keys",
    "kv_cache_update": "kv_cache.at[page, offset].set(rows)",
    "rope_kv_cache_update": "rotate the queries and keys by jax.numpy",
    "merge_attention_states": "its formula in jax.numpy",
    "gather_kv_cache": "kv_cache[page, offset]",
}


def call_of(name):
    """A call as a function of its f32 operands, and these."""
    call = plain_calls()[name]
    numbers = {name: np.nan_to_num(x) for name, x in call.arguments.items() if getattr(x, "dtype", None) == np.float32}
    if isinstance(call.arguments.get("kv_cache"), tuple):
        numbers["kv_cache"] = call.arguments["kv_cache"]
    function = getattr(xla_attention.jax, call.function)
    return lambda numbers: flatten(function(**call.arguments | numbers)), tree_map(jnp.asarray, numbers)


def ragged():
    _, numbers = call_of("paged_attention: plain")
    indices = [
        x for x in plain_calls()["paged_attention: plain"].arguments.values() if getattr(x, "dtype", 0) == np.int32
    ]
    return lambda numbers: [ragged_paged_attention(numbers["query"], numbers["kv_cache"], *indices)], numbers


CALLS = {
    name: functools.partial(call_of, name) for name, call in plain_calls().items() if call.function in ALTERNATIVES
}
CALLS["paged_attention: ragged"] = ragged
each_call = pytest.mark.parametrize("name", CALLS)


def total(results):
    return sum(jnp.sum(x) for x in results if x.dtype == jnp.float32)


def assert_no_gradient(name, differentiate):
    function, _, _ = name.partition(":")
    with pytest.raises(NotImplementedError, match=f"^{function}: there is no gradient; ") as caught:
        differentiate()
    assert ALTERNATIVES[function] in str(caught.value) and "jax.lax.stop_gradient" in str(caught.value)


@each_call
def test_an_unsupported_gradient_is_an_error_that_names_the_alternative(name):
    call, numbers = CALLS[name]()
    for wrap in (lambda f: f, jax.jit, jax.checkpoint):
        assert_no_gradient(name, lambda wrap=wrap: wrap(jax.grad(lambda x: total(call(x))))(numbers))
    for index, result in enumerate(jax.eval_shape(call, numbers)):  # each result alone
        if result.dtype == jnp.float32:
            assert_no_gradient(name, lambda index=index: jax.grad(lambda x: call(x)[index].sum())(numbers))


@each_call
def test_results_that_the_loss_does_not_use_do_not_prevent_its_gradient(name):
    """An updated cache beside a loss, whose rows depend on the differentiated value; and constants."""
    call, numbers = CALLS[name]()

    def loss(x):
        constants = call(jax.lax.stop_gradient(x))
        squares = sum(jnp.sum(x * x) for x in jax.tree.leaves(x))
        return squares * jnp.isfinite(total(constants)), call(x)

    actual, results = jax.jit(jax.grad(loss, has_aux=True))(numbers)
    factor = 2 * jnp.isfinite(total(results))
    jax.tree.map(lambda one, x: np.testing.assert_allclose(one, factor * x, rtol=1e-6), actual, numbers)
    for result, expected in zip(results, call(numbers), strict=True):
        np.testing.assert_array_equal(result, expected)


def test_a_scan_may_return_caches_beside_a_loss():
    rows, slots, caches = jnp.ones((3, 1, 8)), jnp.array([0, 5, -1]), jnp.ones((3, 2, 4, 2, 8))

    def layers(x):
        def layer(x, cache):
            return 2 * x, kv_cache_update(cache, x, x, slots)

        x, updated = jax.lax.scan(layer, x, caches)
        return x.sum(), updated

    actual, updated = jax.grad(layers, has_aux=True)(rows)
    assert (actual == 8).all() and [cache[0, 0, 0, 0] for cache in updated] == [1, 2, 4]


@pytest.mark.parametrize("attend", [flash_attn_varlen, dot_product_attention])
def test_a_second_derivative_is_refused(attend):
    rows = jnp.ones((3, 1, 8))
    operands = (jnp.array([0, 3]),) if attend is flash_attn_varlen else ()
    sum_of = functools.partial(lambda q, k, v: attend(q, k, v, *operands).sum(), k=rows, v=rows)
    assert jax.grad(sum_of)(rows).shape == rows.shape
    with pytest.raises(NotImplementedError, match="^the gradients of flash_attn_varlen, dot_prod"):
        jax.grad(lambda q: jax.grad(sum_of)(q).sum())(rows)


def test_simple_add_can_be_differentiated_in_either_direction_and_again():
    a, b, add = jnp.linspace(-1, 1, 5), jnp.linspace(2, 3, 5), xla_attention.jax.simple_add

    def cube(add, a, b):
        return (add(a, add(a * a, b)) ** 3).sum()

    for transform in (jax.grad, jax.jacfwd, jax.hessian):
        actual, expected = (jax.jit(transform(lambda a, f=f: cube(f, a, b)))(a) for f in (add, jnp.add))
        np.testing.assert_allclose(actual, expected, rtol=1e-5)
    actual = jax.jit(jax.vmap(jax.grad(lambda a, b: cube(add, a, b))))(a[:, None], b[:, None])
    np.testing.assert_allclose(actual[:, 0], jax.jit(jax.grad(lambda a: cube(jnp.add, a, b)))(a), rtol=1e-5)
    integers = jnp.arange(3)  # beside a gradient
    assert jax.grad(lambda x: (x * add(integers, integers)).sum())(jnp.ones(3)).tolist() == [0, 2, 4]
    out, tangent = jax.jvp(add, (integers, integers), (np.zeros(3, jax.dtypes.float0),) * 2)
    assert out.tolist() == [0, 2, 4] and tangent.dtype == jax.dtypes.float0
