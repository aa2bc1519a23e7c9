"""attention_fn in the attention modules of Flax: the results and gradients of Flax's own function."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

pytest.importorskip("flax")

import flax.linen as nn
from flax import nnx

from xla_attention.flax import attention_fn
from xla_attention.jax import dot_product_attention

BATCH, LENGTH, FEATURES, HEADS = 2, 12, 32, 4
PADDED = np.array([[1] * 12, [1] * 7 + [0] * 5])
X = jnp.asarray(np.random.default_rng(0).standard_normal((BATCH, LENGTH, FEATURES)), jnp.float32)
CAUSAL = functools.partial(attention_fn, causal=True)
PROMISED = functools.partial(attention_fn, mask_form="causal")


@pytest.fixture(autouse=True)
def exact_products():
    # By default, JAX computes f32 products in TF32 on GPUs.
    with jax.default_matmul_precision("highest"):
        yield


def linen(**options):
    return nn.MultiHeadDotProductAttention(num_heads=HEADS, qkv_features=FEATURES, **options)


def linen_results(function, mask=None, wrap=jax.jit, rows=None, **options):
    """The output of a module with `function` and the gradients of its parameters; other functions have the same."""
    module = linen(attention_fn=function, **options)
    variables = linen(**options).init(jax.random.key(0), X, mask=mask)

    def loss(variables, mask):
        out = module.apply(variables, X, mask=mask)
        # Rows without a key differ by definition.
        out = out if rows is None else jnp.where(rows[..., None], out, 0)
        return jnp.sum(jnp.sin(out)), out

    gradient = wrap(jax.value_and_grad(loss, has_aux=True))
    return gradient(variables, mask)


def assert_close(actual, expected):
    for a, b in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(a, b, atol=3e-5, rtol=3e-5)


def test_linen_without_a_mask():
    assert_close(linen_results(attention_fn), linen_results(nn.dot_product_attention))


LINEN_MASKS = {
    "causal": (nn.make_causal_mask(PADDED), {"mask_form": "causal"}),
    "padding of keys": (jnp.asarray(PADDED > 0, jnp.float32)[:, None, None], {}),
    "padding": (nn.make_attention_mask(PADDED > 0, PADDED > 0), {"mask_form": "padding"}),
    "causal padding": (
        nn.combine_masks(nn.make_causal_mask(PADDED), nn.make_attention_mask(PADDED > 0, PADDED > 0)),
        {"mask_form": "causal"},
    ),
}


@pytest.mark.parametrize(("mask", "options"), LINEN_MASKS.values(), ids=LINEN_MASKS)
def test_linen_masks(mask, options):
    expected = linen_results(nn.dot_product_attention, mask, rows=PADDED > 0)
    # Traced, with a promise where one is needed, and known.
    assert_close(linen_results(functools.partial(attention_fn, **options), mask, rows=PADDED > 0), expected)
    assert_close(linen_results(attention_fn, mask, wrap=lambda f: f, rows=PADDED > 0), expected)


def test_linen_with_a_mask_made_within_jit():
    module, variables = linen(attention_fn=PROMISED), linen().init(jax.random.key(0), X)
    apply = jax.jit(lambda x: module.apply(variables, x, mask=nn.make_causal_mask(x[..., 0])))
    expected = linen().apply(variables, X, mask=nn.make_causal_mask(X[..., 0]))
    assert_close(apply(X), expected)
    plain = linen(attention_fn=CAUSAL)
    assert_close(jax.jit(lambda x: plain.apply(variables, x))(X), expected)
    unknown = linen(attention_fn=attention_fn)
    assert_close(jax.jit(lambda x: unknown.apply(variables, x, mask=nn.make_causal_mask(x[..., 0])))(X), expected)


def test_linen_with_a_wrong_promise_is_nan():
    mask = np.array(LINEN_MASKS["causal"][0])
    mask[1, 0, 3, 9] = 1
    (_, out), _ = linen_results(PROMISED, jnp.asarray(mask))
    assert np.isnan(out[1]).all() and np.isfinite(out[0]).all()


@pytest.mark.parametrize("function", [attention_fn, dot_product_attention, CAUSAL, PROMISED])
def test_linen_dropout_is_refused_where_it_acts(function):
    module = linen(attention_fn=function, dropout_rate=0.5)
    variables = module.init(jax.random.key(0), X, deterministic=True)
    module.apply(variables, X, deterministic=True)
    with pytest.raises(NotImplementedError, match="there is no dropout; dropout_rate is 0.5, expected 0"):
        module.apply(variables, X, deterministic=False, rngs={"dropout": jax.random.key(1)})


def test_linen_sown_weights_are_refused():
    module = linen(attention_fn=attention_fn)
    with pytest.raises(NotImplementedError, match="module is not supported"):
        module.init(jax.random.key(0), X, sow_weights=True)


def test_linen_in_16_bits_and_with_batch_dimensions():
    x = X.reshape(1, BATCH, LENGTH, FEATURES).repeat(3, 0)
    mask = nn.make_causal_mask(x[..., 0])
    module = linen(dtype=jnp.bfloat16)
    variables = module.init(jax.random.key(0), x)
    expected = module.apply(variables, x, mask=mask)
    actual = linen(dtype=jnp.bfloat16, attention_fn=attention_fn).apply(variables, x, mask=mask)
    assert (actual.dtype, actual.shape) == (expected.dtype, expected.shape)
    np.testing.assert_allclose(np.float32(actual), np.float32(expected), atol=3e-2)


def linen_decoded(function, wrap):
    """The outputs of one token after the other, with the module's cache."""
    module = linen(attention_fn=function, decode=True)
    variables = module.init(jax.random.key(0), X)
    cache, outputs = variables["cache"], []

    @wrap
    def step(cache, x):
        return module.apply({"params": variables["params"], "cache": cache}, x, mutable=["cache"])

    for i in range(LENGTH):
        out, updated = step(cache, X[:, i : i + 1])
        cache = updated["cache"]
        outputs.append(out)
    return jnp.concatenate(outputs, 1)


@pytest.mark.parametrize("function", [attention_fn, PROMISED], ids=["any mask", "promise"])
@pytest.mark.parametrize("wrap", [jax.jit, lambda f: f], ids=["jit", "eager"])
def test_linen_decoding(function, wrap):
    variables = linen().init(jax.random.key(0), X)
    expected = linen().apply(variables, X, mask=nn.make_causal_mask(X[..., 0]))
    assert_close(linen_decoded(nn.dot_product_attention, jax.jit), expected)
    assert_close(linen_decoded(function, wrap), expected)


def nnx_module(function, **options):
    options = {"decode": False, "rngs": nnx.Rngs(0)} | options
    return nnx.MultiHeadAttention(HEADS, FEATURES, FEATURES, attention_fn=function, **options)


@pytest.mark.parametrize(
    ("function", "call"),
    [
        (attention_fn, {}),
        (attention_fn, {"is_causal": True}),
        (CAUSAL, {}),
        (attention_fn, {"mask": LINEN_MASKS["padding of keys"][0]}),
        (PROMISED, {"mask": LINEN_MASKS["causal"][0]}),
    ],
    ids=["plain", "is_causal", "causal", "padding of keys", "promise"],
)
def test_nnx(function, call):
    expected_call = {"is_causal": True} if function is CAUSAL else call

    def results(function, call):
        module = nnx_module(function)

        @nnx.jit
        def gradient(module, call):
            return nnx.value_and_grad(lambda m: jnp.sum(jnp.sin(m(X, **call))))(module)

        if "is_causal" in call:  # which is static
            return nnx.value_and_grad(lambda m: jnp.sum(jnp.sin(m(X, **call))))(module)
        return gradient(module, call)

    assert_close(results(function, call), results(nnx.dot_product_attention, expected_call))


@pytest.mark.parametrize("function", [attention_fn, PROMISED], ids=["any mask", "promise"])
def test_nnx_decoding(function):
    def decoded(function):
        module = nnx_module(function, decode=True)
        module.init_cache(X.shape)
        step = nnx.jit(lambda module, x: module(x))
        return jnp.concatenate([step(module, X[:, i : i + 1]) for i in range(LENGTH)], 1)

    expected = nnx_module(nnx.dot_product_attention)(X, is_causal=True)
    assert_close(decoded(nnx.dot_product_attention), expected)
    assert_close(decoded(function), expected)


@pytest.mark.parametrize("function", [attention_fn, dot_product_attention, CAUSAL])
def test_nnx_dropout_is_refused_where_it_acts(function):
    module = nnx_module(function, dropout_rate=0.5)
    module(X, deterministic=True)
    with pytest.raises(NotImplementedError, match="there is no dropout; dropout_rate is 0.5, expected 0"):
        module(X, deterministic=False)
