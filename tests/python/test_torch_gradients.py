"""torch's autograd through flash_attn_varlen, on every device that torch has here, against the oracle."""

import numpy as np
import pytest
import torch

import xla_attention.torch as xt
from batches import varlen
from oracle_gradients import assert_gradients
from torch_side import array, tensor

MIXED = [(33, 33), (1, 50), (5, 70), (0, 9), (3, 0), (9, 4)]
pytestmark = pytest.mark.usefixtures("all_torch_devices")


def gradients(device, operands, options, *, with_lse=False):
    """(dq, dk, dv), and dsinks if there are sinks; and the cotangents that they are for."""
    q, k, v, *starts = (tensor(x, device) for x in operands)
    given = {name: tensor(value, device) for name, value in options.items()}
    leaves = [x.requires_grad_() for x in (q, k, v)]
    if "sinks" in given:
        leaves.append(given["sinks"].requires_grad_())
    out, lse = xt.flash_attn_varlen(q, k, v, *starts, return_lse=True, **given)
    owned = np.isfinite(np.float32(operands[0])).all(axis=(1, 2))
    rng = np.random.default_rng(3)
    dout = np.where(owned[:, None, None], rng.standard_normal(out.shape), 0).astype(operands[0].dtype)
    dlse = np.where(owned[None], rng.standard_normal(lse.shape), 0).astype(np.float32)
    results, cotangents = [out, lse][: 1 + with_lse], [dout, dlse][: 1 + with_lse]
    found = torch.autograd.grad(results, leaves, [tensor(x, device) for x in cotangents])
    assert all(x.device.type == device for x in found)
    return [array(x) for x in found], {"dout": dout, "dlse": dlse if with_lse else None}


def check(device, operands, options, **more):
    found, cotangents = gradients(device, operands, options, **more)
    numbers = (None if x is None else np.asarray(x) for x in operands)
    meant = {name: x if isinstance(x, (str, tuple)) else np.asarray(x) for name, x in options.items()}
    meant.pop("deterministic", None)
    assert_gradients(found, *numbers, **meant, **cotangents)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("unused", [(0, 0), (2, 3)], ids=["", "unused rows"])
def test_gradients_equal_the_oracle(torch_device, dtype, causal, unused):
    operands, options = varlen(MIXED, dtype=dtype, unused=unused)
    check(torch_device, operands, {**options, "causal": causal})


@pytest.mark.parametrize(
    "options",
    [
        {"window": (5, 3)},
        {"softcap": 3.0, "top_left": True, "causal": True},
        {"alibi_slopes": np.linspace(0.0, 0.5, 6 * 8, dtype=np.float32).reshape(6, 8)},
        {"sinks": np.linspace(-2.0, 3.0, 8, dtype=np.float32), "softmax_scale": 0.3},
        {"leftpad_k": np.int32([0, 30, 70, 3, 0, 4]), "deterministic": True},
    ],
    ids=lambda options: "+".join(options),
)
@pytest.mark.parametrize("with_lse", [False, True], ids=["", "of the lse too"])
def test_options_equal_the_oracle(torch_device, options, with_lse):
    operands, lengths = varlen(MIXED, dtype="bfloat16", dv=40)
    check(torch_device, operands, {**options, **lengths}, with_lse=with_lse)


def test_the_log_sum_exp_alone_has_a_gradient(torch_device):
    (q, k, v, starts, _), _ = varlen([(3, 3), (4, 4)], rows_after=0)
    q, k, v, starts = (tensor(x, torch_device) for x in (q, k, v, starts))
    lse = xt.flash_attn_varlen(q.requires_grad_(), k, v, starts, return_lse=True)[1]
    (found,) = torch.autograd.grad(lse.sum(), q)
    out = xt.flash_attn_varlen(q.detach(), k, k, starts)  # dlse/dq is the mean of the keys, times the scale
    torch.testing.assert_close(found.cpu(), out.cpu() / 8, atol=1e-5, rtol=1e-5)


def test_rows_that_are_apart_and_gradients_that_repeat(torch_device):
    (q, k, v, starts, _), _ = varlen([(3, 3), (4, 4)], rows_after=0)
    wide = torch.cat([tensor(k), tensor(v)], 1).to(torch_device)
    q, starts = tensor(q, torch_device).requires_grad_(), tensor(starts, torch_device)
    k, v = wide[:, :2], wide[:, 2:]
    (found,) = torch.autograd.grad(xt.flash_attn_varlen(q, k, v, starts).sum(), q)
    (wanted,) = torch.autograd.grad(xt.flash_attn_varlen(q, k.contiguous(), v.contiguous(), starts).sum(), q)
    assert torch.equal(found.cpu(), wanted.cpu())


@pytest.mark.parametrize("backend", ["inductor", "openxla"])
def test_a_training_step_compiles(backend, request):
    device = request.getfixturevalue("xla_device") if backend == "openxla" else "cpu"
    (q, k, v, starts, _), _ = varlen([(n, n) for n in (9, 30)], rows_after=0)
    q, k, v, starts = (tensor(x, device) for x in (q, k, v, starts))

    def loss(q, k, v, starts):
        return torch.sin(xt.flash_attn_varlen(q, k, v, starts, causal=True)).sum()

    def step(call):
        leaves = [x.detach().clone().requires_grad_() for x in (q, k, v)]
        call(*leaves, starts).backward()
        return [x.grad.cpu() for x in leaves]

    for found, wanted in zip(step(torch.compile(loss, backend=backend)), step(loss), strict=True):
        torch.testing.assert_close(found, wanted, atol=1e-5, rtol=1e-5)


def test_the_call_is_part_of_torch_xlas_graph(xla_device):
    import torch_xla

    (q, k, v, starts, _), _ = varlen([(3, 3), (4, 4)], rows_after=0)
    q, k, v, starts = (tensor(x, xla_device) for x in (q, k, v, starts))
    (found,) = torch.autograd.grad(xt.flash_attn_varlen(q.requires_grad_(), k, v, starts).sum(), q)
    text = torch_xla._XLAC._get_xla_tensors_hlo([found])
    assert 'custom_call_target="xla_gpu_flash_attn_varlen_bwd"' in text


def test_torch_checks_the_operator():
    (q, k, v, starts, starts_k), _ = varlen([(3, 5), (4, 9)], rows_after=0)
    q, k, v, starts, starts_k = (tensor(x) for x in (q, k, v, starts, starts_k))
    out, lse = xt.flash_attn_varlen(q, k, v, starts, starts_k, return_lse=True)
    arguments = (torch.ones_like(out), q, k, v, out, lse, starts, starts_k, 4, 9, 0.125, True, -1, -1, 0.0)
    torch.library.opcheck(torch.ops.xla_gpu.flash_attn_varlen_bwd.default, arguments)


@pytest.mark.parametrize(
    ("form", "options", "text"),
    [
        ({"pages": 4}, {}, "there is no gradient through keys in pages; pass packed keys"),
        ({}, {"k_scale": 2.0}, "of a call with q_scale, k_scale or v_scale"),
        ({"kv_dtype": "float8_e4m3fn", "dtype": "bfloat16"}, {}, "of 8-bit floats; there are gradients of f32"),
        ({}, {"alibi_slopes": torch.ones(8, requires_grad=True)}, "of alibi_slopes; detach them"),
    ],
    ids=["pages", "scales", "8 bits", "slopes"],
)
def test_what_has_no_gradient_is_refused(form, options, text):
    (q, *rest), lengths = varlen([(3, 3), (4, 4)], rows_after=0, **form)
    lengths = {name: tensor(x) for name, x in lengths.items()}
    out = xt.flash_attn_varlen(tensor(q).requires_grad_(), *map(tensor, rest), **lengths, **options)
    with pytest.raises(NotImplementedError, match=f"^flash_attn_varlen: .*{text}"):
        out.sum().backward()


def test_gradients_have_no_gradients():
    (q, k, v, starts, _), _ = varlen([(3, 3)], rows_after=0)
    q, k, v, starts = (tensor(x) for x in (q, k, v, starts))
    out = xt.flash_attn_varlen(q.requires_grad_(), k, v, starts)
    (dq,) = torch.autograd.grad((out**2).sum(), q, create_graph=True)
    with pytest.raises(NotImplementedError, match="flash_attn_varlen_bwd: its gradient is not built yet"):
        dq.sum().backward()
