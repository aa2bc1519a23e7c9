"""dot_product_attention as Flax's `attention_fn`, called as flax.linen (0.8 to 0.12) and flax.nnx call it."""

import inspect

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from test_dot_product_attention import tensors
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
def test_arguments_without_effect_are_accepted(flax, options):
    operands = tensors()
    np.testing.assert_array_equal(flax(dot_product_attention, operands, **options), dot_product_attention(*operands))


def test_nnx_passes_is_causal_and_linen_asks_for_an_f32_softmax():
    operands = tensors("bfloat16")
    expected = dot_product_attention(*operands, is_causal=True)
    np.testing.assert_array_equal(nnx(dot_product_attention, operands, is_causal=True, dtype="bfloat16"), expected)
    actual = linen(dot_product_attention, operands, force_fp32_for_softmax=True)
    np.testing.assert_array_equal(actual, dot_product_attention(*operands))


UNSUPPORTED = {
    "dropout": ({"dropout_rate": 0.5, "deterministic": False}, "there is no dropout; dropout_rate is 0.5, expected 0"),
    "a mask": ({"mask": np.eye(17, 29, 1, bool)}, r"mask \[1, 1, 17, 29\] is not supported"),
    "another dtype": ({"dtype": jnp.bfloat16}, "dtype is bfloat16 and query is float32; cast query, key and value"),
    "sown weights": ({"module": object()}, "module is not supported; no matrix of weights"),
}


@each_flax
@pytest.mark.parametrize(("options", "text"), UNSUPPORTED.values(), ids=UNSUPPORTED)
def test_unsupported_arguments_are_an_error(flax, options, text):
    with pytest.raises(NotImplementedError, match=f"^dot_product_attention: {text}"):
        flax(dot_product_attention, tensors(), **options)


@pytest.mark.parametrize("name", ["qk_attn_weights_einsum", "attn_weights_value_einsum"])
def test_custom_einsums_are_an_error(name):
    with pytest.raises(NotImplementedError, match=f"^dot_product_attention: {name} is not supported"):
        linen(dot_product_attention, tensors(), **{name: jnp.einsum})


@each_flax
@pytest.mark.parametrize("name", ["dropout_rate", "deterministic"])
def test_traced_dropout_is_an_error(flax, name):
    def call(value):
        return flax(dot_product_attention, tensors(), **{"dropout_rate": 0.5, "deterministic": False, name: value})

    with pytest.raises(NotImplementedError, match="^dot_product_attention: there is no dropout"):
        jax.jit(call)(0)


def test_dropout_is_an_error_also_with_an_implementation_of_jax():
    with pytest.raises(NotImplementedError, match="there is no dropout"):
        dot_product_attention(*tensors(), dropout_rate=0.5, implementation="xla")
