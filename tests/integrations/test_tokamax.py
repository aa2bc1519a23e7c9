"""tokamax' attention with our function as an implementation."""

import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

pytest.importorskip("tokamax")

import tokamax
from recipes import recipe

from xla_attention.jax import _dot_product_attention


def operands(keys=29):
    shapes = [(3, 17, 6, 32), (3, keys, 2, 32), (3, keys, 2, 32)]
    return [jnp.asarray(np.random.default_rng(i).standard_normal(x, np.float32)) for i, x in enumerate(shapes)]


@pytest.fixture
def calls(monkeypatch):
    """How many calls our kernels have computed."""
    calls, compute = [], _dot_product_attention.by_kernels

    def counted(arguments):
        results = compute(arguments)
        calls.append(arguments)
        return results

    monkeypatch.setattr(_dot_product_attention, "by_kernels", counted)
    return calls


COMPUTED = {
    "plain": {},
    "causal": {"is_causal": True},
    "window": {"local_window_size": (4, 3)},
    "number": {"local_window_size": 5},
    "causal window": {"is_causal": True, "local_window_size": (4, 3)},
    "lengths": {"query_seq_lengths": jnp.array([17, 3, 9]), "key_value_seq_lengths": jnp.array([29, 12, 1])},
    "scores": {"scale": 0.3, "logits_soft_cap": 1.5, "is_causal": True},
    "known mask": {"mask": np.tril(np.ones((1, 1, 17, 29), bool))},
}


@pytest.mark.parametrize("options", COMPUTED.values(), ids=COMPUTED)
def test_our_kernels_compute_the_call(calls, options):
    function = recipe("tokamax")["attention_of_tokamax"]

    def total(implementation):
        def loss(*operands):
            out = tokamax.dot_product_attention(*operands, **options, implementation=implementation)
            if "query_seq_lengths" in options:  # the rows of padding differ by definition
                rows = jnp.arange(17) < options["query_seq_lengths"][:, None]
                out = jnp.where(rows[..., None, None], out, 0)
            return jnp.sum(jnp.sin(out)), out

        with jax.default_matmul_precision("highest"):
            return jax.value_and_grad(loss, (0, 1, 2), has_aux=True)(*operands())

    actual = total((function,))
    assert len(calls) == 1
    for a, b in zip(jax.tree.leaves(actual), jax.tree.leaves(total("xla")), strict=True):
        np.testing.assert_allclose(a, b, atol=1e-4, rtol=1e-4)


BIASED = {
    "bias": {"bias": jnp.linspace(-1, 1, 17 * 29).reshape(1, 1, 17, 29)},
    "mask": {"mask": np.eye(17, 29, 3, bool)[None, None] | (np.arange(29) > 20)},
}


@pytest.mark.parametrize("options", BIASED.values(), ids=BIASED)
def test_a_bias_and_any_mask_are_computed(calls, options):
    function = recipe("tokamax")["attention_of_tokamax"]
    expected = tokamax.dot_product_attention(*operands(), **options, implementation="xla")
    actual = tokamax.dot_product_attention(*operands(), **options, implementation=(function, "xla"))
    np.testing.assert_allclose(actual, expected, atol=3e-5)
    assert len(calls) == 1


def test_the_next_implementation_computes_the_others(calls):
    function = recipe("tokamax")["attention_of_tokamax"]
    # For operands that the recipe refuses by itself.
    five = [x[None] for x in operands()]
    actual = tokamax.dot_product_attention(*five, implementation=(function, "xla"))
    np.testing.assert_allclose(actual[0], tokamax.dot_product_attention(*operands(), implementation="xla"), atol=1e-5)
    assert not calls


def test_bounds_of_each_query_are_passed_on(calls):
    function = recipe("tokamax")["attention_of_tokamax"]
    q, k, v = operands()
    starts = np.random.default_rng(3).integers(-4, 25, (3, 1, 17))
    options = {"bias": None, "logits_scale": None, "precision": None, "logits_soft_cap": None, "q_sharding": None}
    nothing = {"bool_mask": None, "q_start": None, "q_end": None, "k_start": None, "k_end": None, "causal_mask": None}
    shown = (starts[..., None] <= np.arange(29)) & (np.arange(29) < starts[..., None] + 9)
    for heads in (1, 2):
        bounds = jnp.repeat(jnp.asarray(starts), heads, 1)
        mask = types.SimpleNamespace(**nothing | {"k_start": bounds, "k_end": bounds + 9})
        if heads == 2:
            with pytest.raises(NotImplementedError, match="differ between heads"):
                function(q, k, v, mask=mask, **options)
            continue
        expected = jax.nn.dot_product_attention(q, k, v, mask=shown)
        np.testing.assert_allclose(
            function(q, k, v, mask=mask, **options),
            jnp.where(shown.any(-1)[:, 0, :, None, None], expected, 0),
            atol=1e-5,
        )
    assert len(calls) == 1
