"""merge_attention_states through JAX."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from oracle import merge_attention_states_reference as reference
from xla_attention.jax import merge_attention_states

# Half the distance of neighbouring numbers, relatively, and what rounding in f32 adds.
TOLERANCE = {"float16": 6e-4, "bfloat16": 5e-3, "float32": 2e-6}


def states(n, h, d, dtype="float32", seed=0, empty=0.0):
    """Two states of normal numbers; a share of `empty` of their rows saw no key and holds NaN."""
    rng = np.random.default_rng(seed)
    for _ in range(2):
        lse = rng.normal(0, 5, (h, n)).astype(np.float32)
        gone = rng.random((h, n)) < empty
        lse[gone] = rng.choice([-np.inf, np.inf, np.nan], gone.sum())
        out = rng.standard_normal((n, h, d))
        out[gone.T] = np.nan
        yield jnp.asarray(out, dtype)
        yield jnp.asarray(lse)


def assert_merged(found, operands):
    out, lse = reference(*operands)
    assert found[0].dtype == operands[0].dtype
    np.testing.assert_allclose(np.asarray(found[0], np.float64), out, rtol=0, atol=TOLERANCE[str(found[0].dtype)] * 4)
    np.testing.assert_allclose(found[1], lse, rtol=1e-6, atol=1e-6)


def test_it_works_under_the_transformations(platform):
    operands = [jnp.stack(x) for x in zip(states(3, 2, 16, seed=1), states(3, 2, 16, seed=2), strict=True)]
    out, lse = jax.vmap(jax.jit(merge_attention_states))(*operands)
    for i in range(2):
        assert_merged((out[i], lse[i]), [x[i] for x in operands])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"out_b": jnp.zeros((3, 2, 16))}, "out_b has shape [3, 2, 16], expected [n=3, h=2, d=8]"),
        ({"lse_a": jnp.zeros((3, 2))}, "lse_a has shape [3, 2], expected [h=2, n=3]"),
        ({"lse_b": jnp.zeros((2, 3), jnp.bfloat16)}, "lse_b has dtype bf16, expected f32"),
        ({"out_b": jnp.zeros((3, 2, 8), jnp.bfloat16)}, "out_b has dtype bf16, expected f32"),
        ({"out_a": jnp.zeros((3, 2, 8), jnp.int8)}, "out_a has dtype i8, expected f16 or bf16 or f32"),
    ],
    ids=["sizes", "transposed", "lse in 16 bits", "dtypes", "integers"],
)
def test_what_does_not_fit_is_a_value_error(change, message):
    out, lse = jnp.zeros((3, 2, 8)), jnp.zeros((2, 3))
    operands = {"out_a": out, "lse_a": lse, "out_b": out, "lse_b": lse, **change}
    with pytest.raises(ValueError, match="^xla_gpu_merge_attention_states: ") as caught:
        merge_attention_states(**operands)
    assert message in str(caught.value)
