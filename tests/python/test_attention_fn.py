"""dot_product_attention and flax.attention_fn, called as flax.linen (0.8 to 0.12) and flax.nnx call an `attention_fn`.

``tests/integrations/test_flax.py`` has the modules themselves.
"""

import functools
import inspect

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dense_attention import dense_attention
from test_dot_product_attention import tensors
from xla_attention.flax import attention_fn
from xla_attention.jax import dot_product_attention

RNG = jax.random.key(0)
DEFAULTS = {
    "mask": None,
    "dropout_rng": None,
    "dropout_rate": 0.0,
    "broadcast_dropout": True,
    "deterministic": True,
    "dtype": None,
    "precision": None,
}
LINEN = DEFAULTS | {"force_fp32_for_softmax": False, "qk_attn_weights_einsum": None, "attn_weights_value_einsum": None}


def linen(attention_fn, operands, module=None, **options):
    """The call of ``flax.linen.MultiHeadDotProductAttention``, which omits arguments that the signature lacks."""
    arguments = LINEN | options
    named = {name: x for name, x in arguments.items() if name in inspect.signature(attention_fn).parameters}
    return attention_fn(*operands, **named, **({} if module is None else {"module": module}))


def nnx(attention_fn, operands, module=None, **options):
    """The call of ``flax.nnx.MultiHeadAttention``, which passes all arguments."""
    return attention_fn(*operands, **{"is_causal": False, **DEFAULTS, **options}, module=module)


each_flax = pytest.mark.parametrize("flax", [linen, nnx])
each_function = pytest.mark.parametrize("function", [dot_product_attention, attention_fn])


@each_flax
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"dropout_rate": 0.5, "dropout_rng": RNG},  # ignored, because deterministic is True
        {"deterministic": False, "dropout_rng": RNG},
        {"deterministic": False, "broadcast_dropout": False},
        {"dtype": jnp.float32, "precision": jax.lax.Precision.HIGHEST},
    ],
    ids=str,
)
@each_function
def test_arguments_without_effect_are_accepted(flax, options, function):
    operands = tensors()
    np.testing.assert_array_equal(flax(function, operands, **options), dot_product_attention(*operands))


@each_function
def test_nnx_passes_is_causal_and_linen_asks_for_an_f32_softmax(function):
    operands = tensors("bfloat16")
    expected = dot_product_attention(*operands, is_causal=True)
    np.testing.assert_array_equal(nnx(function, operands, is_causal=True, dtype="bfloat16"), expected)
    actual = linen(function, operands, force_fp32_for_softmax=True)
    np.testing.assert_array_equal(actual, dot_product_attention(*operands))


@each_function
def test_a_bias_and_any_mask_are_passed_on(function):
    operands, mask = tensors(), np.eye(17, 29, 1, bool)[None, None] | (np.arange(29) == 28)
    bias = jnp.linspace(-1, 1, 6 * 17 * 29).reshape(1, 6, 17, 29)
    expected = jax.nn.dot_product_attention(*operands, bias, mask)
    np.testing.assert_allclose(function(*operands, bias, mask=mask), expected, atol=3e-5)


def test_a_bias_has_the_batch_dimensions_of_the_queries():
    operands, bias = tensors(), np.random.default_rng(0).standard_normal((3, 6, 17, 29)).astype(np.float32)
    expected = dot_product_attention(*operands, bias)
    actual = attention_fn(*(x[None] for x in operands), bias[None])[0]
    np.testing.assert_array_equal(actual, expected)


UNSUPPORTED = {
    "dropout": ({"dropout_rate": 0.5, "deterministic": False}, "there is no dropout; dropout_rate is 0.5, expected 0"),
    "sown weights": ({"module": object()}, "module is not supported; no matrix of weights"),
}


@each_flax
@each_function
@pytest.mark.parametrize(("options", "text"), UNSUPPORTED.values(), ids=UNSUPPORTED)
def test_unsupported_arguments_are_an_error(flax, options, text, function):
    with pytest.raises(NotImplementedError, match=f"^dot_product_attention: {text}"):
        flax(function, tensors(), **options)


@each_flax
def test_another_dtype_is_an_error_or_a_conversion(flax):
    operands = tensors()
    with pytest.raises(NotImplementedError, match="dtype is bfloat16 and query is float32; cast query, key and value"):
        flax(dot_product_attention, operands, dtype=jnp.bfloat16)
    actual = flax(attention_fn, [operands[0].astype("bfloat16"), *operands[1:]], dtype=jnp.bfloat16)
    expected = dot_product_attention(*(x.astype("bfloat16") for x in operands))
    np.testing.assert_array_equal(np.float32(actual), np.float32(expected))
    assert flax(attention_fn, [operands[0].astype("bfloat16"), *operands[1:]]).dtype == jnp.float32


@pytest.mark.parametrize("name", ["qk_attn_weights_einsum", "attn_weights_value_einsum"])
@each_function
def test_custom_einsums_are_an_error(name, function):
    with pytest.raises(NotImplementedError, match=f"^dot_product_attention: {name} is not supported"):
        linen(function, tensors(), **{name: jnp.einsum})


@each_flax
@each_function
@pytest.mark.parametrize("name", ["dropout_rate", "deterministic"])
def test_traced_dropout_is_an_error(flax, name, function):
    def call(value):
        return flax(function, tensors(), **{"dropout_rate": 0.5, "deterministic": False, name: value})

    with pytest.raises(NotImplementedError, match="^dot_product_attention: there is no dropout"):
        jax.jit(call)(0)


def test_dropout_is_an_error_also_with_an_implementation_of_jax():
    with pytest.raises(NotImplementedError, match="there is no dropout"):
        dot_product_attention(*tensors(), dropout_rate=0.5, implementation="xla")


LEADING = (2, 3)
CAUSAL = np.tril(np.ones((17, 29), np.float32))
PADDING = np.float32(np.arange(29) < np.array([29, 4, 12])[:, None])[:, None, None]
# Masks of a batch with two dimensions, as numbers, and what they say.
MASKS = {
    "two dimensions": CAUSAL,
    "one batch": CAUSAL[None, None, None],
    "half a batch": np.broadcast_to(CAUSAL, (2, 1, 1, 17, 29)),
    "a batch": np.broadcast_to(PADDING, (2, 3, 1, 17, 29)) * CAUSAL,
    "keys": PADDING[None],
}


@pytest.mark.parametrize("mask", MASKS.values(), ids=MASKS)
@pytest.mark.parametrize("traced", [False, True])
def test_several_batch_dimensions(platform, mask, traced):
    operands = [jnp.stack([x, 2 * x]) for x in tensors()]
    options = {"mask_form": "causal"} if traced and mask.shape[-2] > 1 else {}

    def call(mask, *operands):
        return attention_fn(*operands, mask=mask, **options)

    out = jax.jit(call)(jnp.asarray(mask), *operands) if traced else call(mask, *operands)
    assert out.shape == operands[0].shape
    full = np.broadcast_to(mask, (2, 3, 6, 17, 29)) != 0
    for i in range(2):
        expected, _ = dense_attention(*(x[i] for x in operands), full[i])
        np.testing.assert_allclose(out[i], expected, atol=3e-5, rtol=3e-5)


def test_causal_holds_where_nnx_passes_is_causal():
    operands = tensors()
    expected = dot_product_attention(*operands, is_causal=True)
    function = functools.partial(attention_fn, causal=True)
    for flax in (linen, nnx):
        np.testing.assert_array_equal(flax(function, operands), expected)
    np.testing.assert_array_equal(nnx(function, operands, is_causal=True), expected)


REJECTED = {
    "ranks": (lambda q, k, v: (q[0], k, v), {}, "query .17, 6, 32., key .* expected .batch..., T, N, H. for all three"),
    "batches": (lambda q, k, v: (q[None], k[None, :2], v[None, :2]), {}, "has another batch than query"),
    "mask": (lambda *x: [y[None] for y in x], {"mask": np.ones((1,) * 6)}, r"mask has shape \[1, 1, 1, 1, 1, 1\], exp"),
}


@pytest.mark.parametrize(("change", "options", "text"), REJECTED.values(), ids=REJECTED)
def test_shapes_that_do_not_fit_are_an_error(change, options, text):
    with pytest.raises(ValueError, match=f"^attention_fn: .*{text}"):
        attention_fn(*change(*tensors()), **options)


@pytest.mark.parametrize("name", ["causal", "is_causal"])
def test_causal_is_a_bool(name):
    with pytest.raises(TypeError, match=f"^attention_fn: {name} is 1, expected True or False"):
        attention_fn(*tensors(), **{name: 1})
