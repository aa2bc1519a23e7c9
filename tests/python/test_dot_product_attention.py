"""dot_product_attention against jax.nn.dot_product_attention."""

import functools
import inspect

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from xla_attention.jax import _dot_product_call, dot_product_attention

TOLERANCE = {"float32": 2e-5, "bfloat16": 3e-2, "float16": 4e-3}


def tensors(dtype="float32", *, batch=3, rows=17, keys=29, heads=(6, 2), d=32):
    shapes = [(batch, rows, heads[0], d), (batch, keys, heads[1], d), (batch, keys, heads[1], d)]
    return [jnp.asarray(np.random.default_rng(i).standard_normal(x, np.float32), dtype) for i, x in enumerate(shapes)]


def check(operands, *, return_residual=True, **options):
    """Assert that the output, with and without the residual, and the residual are those of jax.nn."""
    # By default, JAX computes f32 products in TF32 on GPUs.
    with jax.default_matmul_precision("highest"):
        theirs = functools.partial(jax.nn.dot_product_attention, return_residual=return_residual, **options)
        expected = jax.jit(theirs)(*(x.astype(jnp.float32) for x in operands))
    out = dot_product_attention(*operands, **options)
    actual = dot_product_attention(*operands, return_residual=return_residual, **options)
    actual, expected = (x if return_residual else (x,) for x in (actual, expected))
    tolerance = TOLERANCE[out.dtype.name]
    for result, expected_result in zip(actual, expected, strict=True):
        assert (result.dtype, result.shape) == (operands[0].dtype, expected_result.shape)
        np.testing.assert_allclose(np.float32(result), expected_result, atol=tolerance, rtol=tolerance)
    np.testing.assert_array_equal(np.float32(out), np.float32(actual[0]))


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"is_causal": True},
        {"scale": 0.3},
        {"local_window_size": 4, "is_causal": True},
        {"local_window_size": (20, 15)},
        {"local_window_size": (20, 0)},
        {"local_window_size": (np.int64(9), np.int32(15)), "is_causal": True},
        {"local_window_size": [9, 15], "is_causal": True},
    ],
    ids=str,
)
def test_results_equal_those_of_jax_nn(platform, options):
    check(tensors(), **options)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_results_equal_those_of_jax_nn_in_16_bits_and_without_a_batch(platform, dtype):
    check(tensors(dtype), is_causal=True)
    check([x[0] for x in tensors(dtype)], local_window_size=(20, 15))


def test_gradients_of_head_dimensions_past_256_equal_those_of_jax_nn(platform):
    operands = tensors(d=320)
    check(operands, is_causal=True)

    def gradients(function):
        return jax.grad(lambda *x: jnp.sum(jnp.sin(function(*x, is_causal=True))), (0, 1, 2))(*operands)

    with jax.default_matmul_precision("highest"):
        expected = gradients(jax.nn.dot_product_attention)
    for x, y in zip(gradients(dot_product_attention), expected, strict=True):
        np.testing.assert_allclose(x, y, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("size", [0, 4])
def test_local_window_size_may_be_a_numpy_number_or_array(platform, size):
    expected = dot_product_attention(*tensors(), local_window_size=size)
    for same in (np.int64(size), (np.int32(size), np.int64(size)), np.array([size, size]), jnp.array([size, size])):
        np.testing.assert_array_equal(dot_product_attention(*tensors(), local_window_size=same), expected)


@pytest.mark.parametrize("is_causal", [False, True])
def test_padding_is_masked(platform, is_causal):
    lengths = {"query_seq_lengths": jnp.array([17, 3, 9]), "key_value_seq_lengths": jnp.array([29, 12, 1])}
    check(tensors(), is_causal=is_causal, **lengths, return_residual=False)


def test_a_query_that_attends_to_no_key_gives_zero(platform):
    out = dot_product_attention(*tensors(), key_value_seq_lengths=jnp.array([0, 5, 29]))
    assert (out[0] == 0).all() and (out[1] != 0).any()


def test_implementation_xla_passes_the_call_to_jax():
    operands = tensors(rows=4, keys=4)
    mask = jnp.tril(jnp.ones((4, 4), bool))[None, None]
    expected = jax.nn.dot_product_attention(*operands, mask=mask)
    np.testing.assert_array_equal(dot_product_attention(*operands, mask=mask, implementation="xla"), expected)


def test_the_signature_has_every_argument_of_jax_nn_with_its_default():
    ours = inspect.signature(dot_product_attention).parameters
    theirs = inspect.signature(jax.nn.dot_product_attention).parameters
    assert {name: (x.kind, x.default) for name, x in theirs.items()} == {
        name: (x.kind, x.default) for name, x in ours.items() if name in theirs
    }
    positional = [name for name, x in theirs.items() if x.kind is not inspect.Parameter.KEYWORD_ONLY]
    assert list(ours)[: len(positional)] == positional


def test_the_residual_of_a_row_without_keys_is_minus_infinity_and_has_no_gradient(platform):
    q, k, v = tensors()
    lengths = {"query_seq_lengths": jnp.array([17, 3, 9]), "key_value_seq_lengths": jnp.array([0, 12, 29])}
    _, residual = dot_product_attention(q, k, v, return_residual=True, **lengths)
    has_keys = np.arange(17) < np.array([0, 3, 9])[:, None]
    assert (np.isfinite(residual).all(-1) == has_keys).all() and np.isneginf(np.asarray(residual)[~has_keys]).all()
    gradient = jax.grad(lambda q: dot_product_attention(q, k, v, return_residual=True)[1].sum())(q)
    assert (gradient == 0).all()


def test_an_implementation_of_jax_returns_its_residual():
    operands = tensors(rows=4, keys=4)
    actual = dot_product_attention(*operands, return_residual=True, implementation="xla")
    expected = jax.nn.dot_product_attention(*operands, return_residual=True)
    for ours, theirs in zip(actual, expected, strict=True):
        np.testing.assert_array_equal(ours, theirs)


def test_return_residual_is_an_error_for_a_jax_without_it(monkeypatch):
    operands = tensors(rows=4, keys=4)
    expected = jax.nn.dot_product_attention(*operands)

    def of_jax_0_8_0(query, key, value, bias=None, mask=None, **options):
        assert "return_residual" not in options
        return expected

    of_jax_0_8_0.__signature__ = inspect.Signature()
    monkeypatch.setattr(_dot_product_call, "_of_jax", of_jax_0_8_0)
    assert dot_product_attention(*operands, implementation="xla") is expected
    with pytest.raises(NotImplementedError, match="return_residual with jax.nn.dot_product_attention needs"):
        dot_product_attention(*operands, implementation="xla", return_residual=True)


# Invalid calls: a change of the operands or options, the error, and its text after the function's name.
REJECTED = {
    "lengths": (lambda q, k, v: (q, k, v[:, :3]), ValueError, "value has shape"),
    "batch": (lambda q, k, v: (q, k[:2], v[:2]), ValueError, "key has a batch of 2, expected 3"),
    "ranks": (lambda q, k, v: (q[0], k, v), ValueError, "query [17, 6, 32], key [3, 29, 2, 32]"),
    "dimension": (lambda q, k, v: (q[..., :16], k, v), ValueError, "key has head dimension 32, expected 16"),
    "heads": (lambda q, k, v: (q[:, :, :5], k, v), ValueError, "key has 2 heads, expected a divisor of 5"),
    "no KV heads": (lambda q, k, v: (q, k[:, :, :0], v[:, :, :0]), ValueError, "key has 0 heads"),
    "integers": (lambda *x: [y.astype(int) for y in x], NotImplementedError, "query is i32, key is i32"),
    "two dtypes": (lambda q, k, v: (q, k, v.astype("bfloat16")), NotImplementedError, "key is f32 and value is"),
    "odd dimension": (
        lambda *x: [y[..., :20] for y in x],
        NotImplementedError,
        "query has head dimension 20; every multiple of 8 up to 512 works",
    ),
    "query lengths": (
        {"query_seq_lengths": jnp.ones(2, int)},
        ValueError,
        "query_seq_lengths has shape [2], expected [B=3]",
    ),
    "key lengths": (
        {"key_value_seq_lengths": jnp.ones((3, 1), int)},
        ValueError,
        "key_value_seq_lengths has shape [3, 1], expected [B=3]",
    ),
    "float lengths": (
        {"key_value_seq_lengths": jnp.ones(3)},
        TypeError,
        "key_value_seq_lengths has dtype float32, expected integers",
    ),
    "infinite scale": ({"scale": np.inf}, NotImplementedError, "scale is inf, expected a finite number; fallback="),
    "scales": ({"scale": jnp.ones(2)}, TypeError, "scale has shape [2], expected a number"),
    "is_causal": ({"is_causal": "yes"}, TypeError, "is_causal is 'yes', expected True or False"),
    "window below 0": (
        {"local_window_size": -1},
        NotImplementedError,
        "local_window_size is (-1, -1), expected >= 0, or None for no window; fallback=",
    ),
    "side below 0": (
        {"local_window_size": (4, -1)},
        NotImplementedError,
        "local_window_size is (4, -1), expected >= 0",
    ),
    "one side": ({"local_window_size": (3,)}, ValueError, "local_window_size is (3,), expected a number or"),
    "half a window": ({"local_window_size": 1.5}, TypeError, "local_window_size[0] is 1.5, expected an integer"),
    "fallback": ({"fallback": "cudnn"}, ValueError, "fallback is 'cudnn', expected one of 'error', 'xla'"),
    "mask_form": ({"mask_form": "window"}, ValueError, "mask_form is 'window', expected one of None, 'causal', 'padd"),
    "no mask": ({"mask_form": "causal"}, ValueError, "mask_form is 'causal', and there is no mask"),
    "mask of numbers": (
        {"mask": np.ones((17, 29), np.float32)},
        ValueError,
        "mask has dtype float32, expected bool; a bias is added to scores",
    ),
    "shape of the mask": (
        {"mask": np.ones((2, 1, 17, 29), bool)},
        ValueError,
        "mask has shape [2, 1, 17, 29], expected [B, N, T, S] = [3, 6, 17, 29], or 1 for any of them",
    ),
    "rank of the bias": ({"bias": np.ones((1,) * 5)}, ValueError, "bias has shape [1, 1, 1, 1, 1], expected up to 4"),
    "sinks": ({"sinks": jnp.ones(5)}, ValueError, "sinks has shape [5], expected"),
    "softcap below 0": ({"softcap": -1.0}, ValueError, "softcap is -1"),
    "return_residual": ({"return_residual": 1}, TypeError, "return_residual is 1, expected True or False"),
}


@pytest.mark.parametrize(("change", "error", "text"), REJECTED.values(), ids=REJECTED)
@pytest.mark.parametrize("wrap", [lambda f: f, jax.jit], ids=["eager", "jit"])
def test_errors_name_this_function_and_its_arguments(change, error, text, wrap):
    operands, options = (change(*tensors()), {}) if callable(change) else (tensors(), change)
    with pytest.raises(error) as caught:
        wrap(lambda *operands: dot_product_attention(*operands, **options))(*operands)
    assert str(caught.value).startswith(f"dot_product_attention: {text}")


def test_a_traced_scale_is_refused():
    with pytest.raises(TypeError, match="^dot_product_attention: scale is traced, expected a number"):
        jax.jit(lambda scale: dot_product_attention(*tensors(), scale=scale))(0.5)
