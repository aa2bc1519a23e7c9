"""simple_add through JAX."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from xla_attention.jax import simple_add

DTYPES = ["float16", "bfloat16", "float32", "int8", "uint8", "int32"]


def values(shape, dtype, seed):
    rng = np.random.default_rng(seed)
    return jnp.asarray(rng.integers(0, 255, shape) if dtype[0] in "ui" else rng.standard_normal(shape), dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(), (2, 0, 3), (3, 5, 2)])
def test_it_adds(platform, dtype, shape):
    a, b = values(shape, dtype, 0), values(shape, dtype, 1)
    out = simple_add(a, b)
    assert out.dtype == a.dtype
    np.testing.assert_array_equal(np.asarray(out), np.asarray(a + b))


@pytest.mark.parametrize("dtype", ["float64", "int64"])
def test_it_adds_64_bit_types(platform, dtype):
    with jax.enable_x64(True):
        a, b = values((1001,), dtype, 0), values((1001,), dtype, 1)
        assert simple_add(a, b).dtype == dtype
        np.testing.assert_array_equal(np.asarray(simple_add(a, b)), np.asarray(a + b))


def test_it_works_under_the_transformations(platform):
    a, b = values((4, 6), "float32", 4), values((4, 6), "float32", 5)
    np.testing.assert_array_equal(jax.vmap(simple_add)(a, b), a + b)
    np.testing.assert_array_equal(jax.vmap(simple_add, in_axes=(0, None))(a, b[0]), a + b[0])
    total, _ = jax.lax.scan(lambda sum, row: (simple_add(sum, row), None), jnp.zeros(6), a)
    np.testing.assert_allclose(total, a.sum(0), rtol=1e-6)


def test_it_can_be_differentiated_in_either_direction_and_again():
    a, b = values((5,), "float32", 6), values((5,), "float32", 7)

    def cube(add, a, b):
        return (add(a, add(a * a, b)) ** 3).sum()

    for transform in (jax.grad, jax.jacfwd, jax.hessian):
        found, wanted = (transform(lambda a, f=f: cube(f, a, b))(a) for f in (simple_add, jnp.add))
        np.testing.assert_allclose(found, wanted, rtol=1e-5)
    one = jax.vmap(jax.grad(lambda a, b: cube(simple_add, a, b)))(a[:, None], b[:, None])
    np.testing.assert_allclose(one[:, 0], jax.grad(lambda a: cube(jnp.add, a, b))(a), rtol=1e-5)


def test_integers_stand_beside_a_gradient():
    a = jnp.arange(3)
    found = jax.grad(lambda x: (x * simple_add(a, a)).sum())(jnp.ones(3))
    assert found.tolist() == [0, 2, 4]
    out, tangent = jax.jvp(simple_add, (a, a), (np.zeros(3, jax.dtypes.float0),) * 2)
    assert out.tolist() == [0, 2, 4] and tangent.dtype == jax.dtypes.float0


@pytest.mark.parametrize(
    ("a", "b", "message"),
    [
        (np.ones(3, "f4"), np.ones(4, "f4"), "b has shape [4], expected the shape of a, [3]"),
        (np.ones(3, "f4"), np.ones((3, 1), "f4"), "b has shape [3, 1], expected the shape of a, [3]"),
        (np.ones(3, "f4"), np.ones(3, "f2"), "b has dtype f16, expected f32"),
        (np.ones(3, "c8"), np.ones(3, "c8"), "a has dtype c64, expected f16 or bf16 or f32"),
        (np.ones(3, "?"), np.ones(3, "?"), "a has dtype pred, expected f16 or bf16 or f32"),
    ],
    ids=["sizes", "ranks", "dtypes", "complex", "bool"],
)
def test_what_does_not_fit_is_a_value_error_at_trace_time(a, b, message):
    with pytest.raises(ValueError, match="^xla_gpu_simple_add: ") as caught:
        jax.jit(simple_add).lower(a, b)
    assert message in str(caught.value)
