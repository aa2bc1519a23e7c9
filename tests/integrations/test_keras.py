"""Keras' attention with our function in the place of jax.nn.dot_product_attention."""

import os

import jax
import jax.numpy as jnp
import numpy as np
import pytest

os.environ["KERAS_BACKEND"] = "jax"
pytest.importorskip("keras")

import keras
from recipes import counted_calls, recipe

from xla_attention.jax import dot_product_attention

X = np.random.default_rng(0).standard_normal((3, 12, 32)).astype(np.float32)
PADDING = np.arange(12) < np.array([12, 5, 9])[:, None]


@pytest.fixture
def calls(monkeypatch):
    """Put our function in place; a list of who computes each call."""
    theirs, calls = jax.nn.dot_product_attention, counted_calls(monkeypatch)
    monkeypatch.setattr(jax.nn, "dot_product_attention", theirs)  # which is restored afterwards
    recipe("Keras")
    assert jax.nn.dot_product_attention is not theirs
    with jax.default_matmul_precision("highest"):
        yield calls


def heads(x, count):
    return jnp.asarray(np.random.default_rng(count).standard_normal((3, 12, count, 16)), jnp.float32)


@pytest.mark.parametrize("options", [{}, {"is_causal": True}, {"scale": 0.3}], ids=str)
def test_the_operation(calls, options):
    q, k, v = heads(X, 4), heads(X, 2), heads(X, 2)
    actual = keras.ops.dot_product_attention(q, k, v, **options)
    assert calls == ["by_kernels"]
    np.testing.assert_allclose(actual, expected_operation(q, k, v, **options), atol=2e-5)


def expected_operation(*operands, **options):
    return dot_product_attention(*operands, **options, implementation="xla")


def test_a_bias_and_any_mask_are_computed(calls):
    q, k, v = heads(X, 4), heads(X, 2), heads(X, 2)
    bias, mask = jnp.ones((1, 4, 12, 12)) * jnp.arange(12), jnp.eye(12, dtype=bool)[None, None] | (jnp.arange(12) > 7)
    for options in ({"bias": bias}, {"mask": mask}):
        actual = keras.ops.dot_product_attention(q, k, v, **options)
        assert calls.pop() == "by_kernels"
        np.testing.assert_allclose(actual, expected_operation(q, k, v, **options), atol=2e-5)


# The masks of the layer, and whether it is causal besides.
LAYER_CALLS = {
    "plain": ((), False),
    "causal": ((), True),
    "padding": ((PADDING[:, None],), False),
    "causal and padding": ((PADDING[:, None],), True),
}


@pytest.mark.parametrize(("masks", "causal"), LAYER_CALLS.values(), ids=LAYER_CALLS)
def test_the_layer_in_a_compiled_model(calls, masks, causal):
    layer = keras.layers.MultiHeadAttention(4, 8)
    layer.build(X.shape, X.shape)
    variables = [v.value for v in layer.trainable_variables]

    @jax.jit
    def loss(variables, x, masks):
        options = ({"attention_mask": masks[0]} if masks else {}) | {"use_causal_mask": causal}
        out, _ = layer.stateless_call(variables, [], x, x, **options)
        return jnp.sum(jnp.sin(out))

    def expected_loss(variables, x):
        (wq, bq), (wk, bk), (wv, bv), (wo, bo) = zip(variables[::2], variables[1::2], strict=True)
        q, k, v = (jnp.einsum("btf,fnh->btnh", x, w) + b for w, b in ((wq, bq), (wk, bk), (wv, bv)))
        scores = jnp.einsum("btnh,bsnh->bnts", q, k) * 8**-0.5
        for mask in (*masks, *([np.tril(np.ones((1, 12, 12), bool))] if causal else [])):
            scores = jnp.where(mask[:, None], scores, -jnp.inf)
        out = jnp.einsum("bnts,bsnh->btnh", jax.nn.softmax(scores), v)
        return jnp.sum(jnp.sin(jnp.einsum("btnh,nhf->btf", out, wo) + bo))

    actual = jax.value_and_grad(loss)(variables, X, masks)
    assert calls == ["by_kernels"]
    expected = jax.value_and_grad(expected_loss)(variables, X)
    for a, b in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(a, b, atol=1e-4, rtol=1e-4)
