"""Modules of PyTorch under torchax, whose attention our function computes."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

pytest.importorskip("torch")
pytest.importorskip("torchax")

import torch
import torchax
from recipes import counted_calls, recipe

Q, K = torch.randn(3, 6, 17, 32, generator=torch.Generator().manual_seed(0)), torch.linspace(-2, 2, 3 * 6 * 29 * 32)
K = torch.sin(1e3 * K).reshape(3, 6, 29, 32)


@pytest.fixture(scope="module")
def definitions():
    return recipe("torchax")


@pytest.fixture
def calls(monkeypatch, definitions):
    """Who computes each call."""
    calls = counted_calls(monkeypatch)
    with jax.default_matmul_precision("highest"):
        yield calls


def on_jax(function, *tensors):
    """The results of a function of torch's tensors, under torchax."""
    with torchax.default_env():
        result = function(*(x.to("jax") for x in tensors))
    return np.asarray(result.jax())


CALLS = {
    "plain": ({}, "by_kernels"),
    "causal": ({"is_causal": True}, "by_kernels"),
    "scale": ({"scale": 0.3}, "by_kernels"),
    "mask of keys": ({"attn_mask": torch.arange(29).expand(3, 1, 1, 29) < 11}, "by_kernels"),
    "bias": ({"attn_mask": torch.linspace(-1, 1, 17 * 29).reshape(17, 29)}, "by_kernels"),
}


@pytest.mark.parametrize(("options", "computed"), CALLS.values(), ids=CALLS)
def test_the_operator(calls, options, computed):
    def call(q, k, *mask):
        given = options | ({"attn_mask": mask[0]} if mask else {})
        return torch.nn.functional.scaled_dot_product_attention(q, k, k, **given)

    tensors = [Q, K, *([options["attn_mask"]] if "attn_mask" in options else [])]
    actual = on_jax(call, *tensors)
    assert calls == [computed]
    np.testing.assert_allclose(actual, call(*tensors), atol=3e-5)


class Attention(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.qkv, self.out = torch.nn.Linear(32, 96), torch.nn.Linear(32, 32)

    def forward(self, x):
        q, k, v = (part.unflatten(-1, (4, 8)).transpose(1, 2) for part in self.qkv(x).chunk(3, -1))
        attended = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(attended.transpose(1, 2).flatten(2))


def test_a_module_and_its_gradients(calls):
    module, x = Attention(), torch.randn(2, 12, 32, generator=torch.Generator().manual_seed(1))
    module(x).sin().sum().backward()
    expected = module(x).detach(), module.qkv.weight.grad
    with torchax.default_env():
        module.to("jax")
        out = module(x.to("jax"))
        weights = {name: weight.jax() for name, weight in module.named_parameters()}

    def loss(weights):
        with torchax.default_env():
            out = torch.func.functional_call(module, torchax.interop.torch_view(weights), x.to("jax"))
        return jnp.sum(jnp.sin(torchax.interop.jax_view(out)))

    actual = out.jax(), jax.grad(loss)(weights)["qkv.weight"]
    assert calls == ["by_kernels", "by_kernels"]
    for a, b in zip(actual, expected, strict=True):
        np.testing.assert_allclose(a, b, atol=1e-4, rtol=1e-4)


def test_dropout_is_refused(calls):
    with pytest.raises(NotImplementedError, match="there is no dropout; dropout_rate is 0.5"):
        on_jax(lambda q, k: torch.nn.functional.scaled_dot_product_attention(q, k, k, dropout_p=0.5), Q, K)
    assert not calls
