"""What Flax asks of an attention function: stand-ins that call as flax.linen (0.8 to 0.12) and flax.nnx do."""

import inspect

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from test_dot_product_attention import tensors
from xla_attention.jax import dot_product_attention

RNG = jax.random.key(0)
QUIET = {
    "mask": None,
    "dropout_rng": None,
    "dropout_rate": 0.0,
    "broadcast_dropout": True,
    "deterministic": True,
    "dtype": None,
    "precision": None,
}
LINEN = QUIET | {"force_fp32_for_softmax": False, "qk_attn_weights_einsum": None, "attn_weights_value_einsum": None}


def linen(attention_fn, operands, module=None, **options):
    """``flax.linen.MultiHeadDotProductAttention``, which leaves out what the signature does not name."""
    given = LINEN | options
    named = {name: x for name, x in given.items() if name in inspect.signature(attention_fn).parameters}
    return attention_fn(*operands, **named, **({} if module is None else {"module": module}))


def nnx(attention_fn, operands, module=None, **options):
    """``flax.nnx.MultiHeadAttention``, which gives all that it has."""
    return attention_fn(*operands, **{"is_causal": False, **QUIET, **options}, module=module)


each_flax = pytest.mark.parametrize("flax", [linen, nnx])


@each_flax
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"dropout_rate": 0.5, "dropout_rng": RNG},  # deterministic: nothing is dropped
        {"deterministic": False, "dropout_rng": RNG},
        {"deterministic": False, "broadcast_dropout": False},
        {"dtype": jnp.float32, "precision": jax.lax.Precision.HIGHEST},
    ],
    ids=str,
)
def test_what_does_not_act_changes_nothing(flax, options):
    operands = tensors()
    np.testing.assert_array_equal(flax(dot_product_attention, operands, **options), dot_product_attention(*operands))


def test_nnx_says_causal_by_name_and_linen_asks_for_a_softmax_in_f32():
    operands = tensors("bfloat16")
    wanted = dot_product_attention(*operands, is_causal=True)
    np.testing.assert_array_equal(nnx(dot_product_attention, operands, is_causal=True, dtype="bfloat16"), wanted)
    found = linen(dot_product_attention, operands, force_fp32_for_softmax=True)
    np.testing.assert_array_equal(found, dot_product_attention(*operands))


ACTING = {
    "dropout": ({"dropout_rate": 0.5, "deterministic": False}, "there is no dropout; dropout_rate is 0.5, expected 0"),
    "a mask": ({"mask": jnp.ones((3, 1, 17, 29), bool)}, "mask is not supported; is_causal"),
    "another dtype": ({"dtype": jnp.bfloat16}, "dtype is bfloat16 and query is float32; cast query, key and value"),
    "sown weights": ({"module": object()}, "module is not supported; no matrix of weights"),
}


@each_flax
@pytest.mark.parametrize(("options", "text"), ACTING.values(), ids=ACTING)
def test_what_acts_is_refused(flax, options, text):
    with pytest.raises(NotImplementedError, match=f"^dot_product_attention: {text}"):
        flax(dot_product_attention, tensors(), **options)


@pytest.mark.parametrize("name", ["qk_attn_weights_einsum", "attn_weights_value_einsum"])
def test_products_of_ones_own_are_refused(name):
    with pytest.raises(NotImplementedError, match=f"^dot_product_attention: {name} is not supported"):
        linen(dot_product_attention, tensors(), **{name: jnp.einsum})


@each_flax
@pytest.mark.parametrize("name", ["dropout_rate", "deterministic"])
def test_dropout_that_may_act_is_refused_while_tracing(flax, name):
    def call(value):
        return flax(dot_product_attention, tensors(), **{"dropout_rate": 0.5, "deterministic": False, name: value})

    with pytest.raises(NotImplementedError, match="^dot_product_attention: there is no dropout"):
        jax.jit(call)(0)


def test_jaxs_own_implementation_drops_nothing_silently_either():
    with pytest.raises(NotImplementedError, match="there is no dropout"):
        dot_product_attention(*tensors(), dropout_rate=0.5, implementation="xla")
