"""dot_product_attention against JAX's own."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from xla_attention.jax import dot_product_attention

TOLERANCE = {"float32": 2e-5, "bfloat16": 3e-2, "float16": 4e-3}


def tensors(dtype="float32", *, batch=3, rows=17, keys=29, heads=(6, 2), d=32):
    shapes = [(batch, rows, heads[0], d), (batch, keys, heads[1], d), (batch, keys, heads[1], d)]
    return [jax.random.normal(jax.random.key(i), shape, dtype) for i, shape in enumerate(shapes)]


def check(operands, **options):
    out = dot_product_attention(*operands, **options)
    # On a GPU, JAX's products of f32 are those of TF32 otherwise.
    with jax.default_matmul_precision("highest"):
        wanted = jax.nn.dot_product_attention(*operands, **options)
    assert out.dtype == wanted.dtype
    tolerance = TOLERANCE[out.dtype.name]
    np.testing.assert_allclose(np.float32(out), np.float32(wanted), atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"is_causal": True},
        {"scale": 0.3},
        {"local_window_size": 4, "is_causal": True},
        {"local_window_size": (20, 15)},
        {"local_window_size": (20, 0)},
    ],
    ids=str,
)
def test_it_equals_jaxs(platform, dtype, options):
    check(tensors(dtype), **options)


@pytest.mark.parametrize("is_causal", [False, True])
def test_padding_is_left_out(platform, is_causal):
    lengths = {"query_seq_lengths": jnp.array([17, 3, 9]), "key_value_seq_lengths": jnp.array([29, 12, 1])}
    check(tensors(), is_causal=is_causal, **lengths)


def test_a_single_sequence_needs_no_batch(platform):
    check([x[0] for x in tensors()], is_causal=True)


def test_a_query_that_sees_no_key_gives_zero(platform):
    out = dot_product_attention(*tensors(), key_value_seq_lengths=jnp.array([0, 5, 29]))
    assert (out[0] == 0).all() and (out[1] != 0).any()


def test_jaxs_own_implementation_is_one_word_away():
    operands = tensors(rows=4, keys=4)
    mask = jnp.tril(jnp.ones((4, 4), bool))[None, None]
    wanted = jax.nn.dot_product_attention(*operands, mask=mask)
    np.testing.assert_array_equal(dot_product_attention(*operands, mask=mask, implementation="xla"), wanted)


@pytest.mark.parametrize("name", ["bias", "mask"])
def test_what_is_not_supported_is_said(name):
    with pytest.raises(NotImplementedError, match=f"{name} is not supported"):
        dot_product_attention(*tensors(), **{name: jnp.ones((1, 1, 17, 29), bool)})


def test_shapes_that_do_not_fit_are_refused():
    q, k, v = tensors()
    with pytest.raises(ValueError, match="value has shape"):
        dot_product_attention(q, k, v[:, :3])
    with pytest.raises(ValueError, match="key has a batch of 2, expected 3"):
        dot_product_attention(q, k[:2], v[:2])
    with pytest.raises(ValueError, match="expected .B, T, N, H. or"):
        dot_product_attention(q[0], k, v)
