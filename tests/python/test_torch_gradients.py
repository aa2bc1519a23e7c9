"""torch's autograd through flash_attn_varlen, on every available device."""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

import xla_attention.torch as xt
from batches import varlen
from gradient_cases import CASES, gradient_case
from torch_adapter import array, tensor

pytestmark = pytest.mark.usefixtures("all_torch_devices")


@pytest.mark.parametrize("name", CASES)
def test_gradients_are_those_of_the_c_interface(torch_device, name):
    case = gradient_case(name)
    q, k, v, *starts = (tensor(x, torch_device) for x in case.operands)
    options = {name: tensor(value, torch_device) for name, value in case.options.items()}
    leaves = [x.requires_grad_() for x in (q, k, v, *(options[name] for name in ("sinks", "bias") if name in options))]
    results = xt.flash_attn_varlen(q, k, v, *starts, return_lse=True, **options)
    cotangents = [tensor(x, torch_device) for x in (case.dout, case.dlse) if x is not None]
    actual = torch.autograd.grad(results[: len(cotangents)], leaves, cotangents)
    assert all(x.device.type == torch_device for x in actual)
    case.check([array(x) for x in actual])


def test_softmax_lse_alone_has_a_gradient(torch_device):
    (q, k, v, starts, _), _ = varlen([(3, 3), (4, 4)], rows_after=0)
    q, k, v, starts = (tensor(x, torch_device) for x in (q, k, v, starts))
    lse = xt.flash_attn_varlen(q.requires_grad_(), k, v, starts, return_lse=True)[1]
    (actual,) = torch.autograd.grad(lse.sum(), q)
    out = xt.flash_attn_varlen(q.detach(), k, k, starts)  # dlse/dq is the mean of the keys, times the scale
    torch.testing.assert_close(actual.cpu(), out.cpu() / 8, atol=1e-5, rtol=1e-5)


def test_strided_operands_and_expanded_cotangents(torch_device):
    (q, k, v, starts, _), _ = varlen([(3, 3), (4, 4)], rows_after=0)
    wide = torch.cat([tensor(k), tensor(v)], 1).to(torch_device)
    q, starts = tensor(q, torch_device).requires_grad_(), tensor(starts, torch_device)
    k, v = wide[:, :2], wide[:, 2:]
    (actual,) = torch.autograd.grad(xt.flash_attn_varlen(q, k, v, starts).sum(), q)
    (expected,) = torch.autograd.grad(xt.flash_attn_varlen(q, k.contiguous(), v.contiguous(), starts).sum(), q)
    assert torch.equal(actual.cpu(), expected.cpu())


class _Observer(TorchDispatchMode):
    """A mode that changes nothing, but has to see every operator call."""

    def __init__(self):
        super().__init__()
        self.seen = set()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.seen.add(function)
        return function(*args, **(kwargs or {}))


def test_modes_see_the_operator_and_have_the_same_gradients(torch_device):
    (q, k, v, starts, _), _ = varlen([(3, 3), (40, 40)], rows_after=0)
    q, k, v, starts = (tensor(x, torch_device) for x in (q, k, v, starts))
    sinks = torch.ones(q.shape[1], device=torch_device, requires_grad=True)
    leaves = [*(x.requires_grad_() for x in (q, k, v)), sinks]

    def gradients():
        out = xt.flash_attn_varlen(q, k, v, starts, causal=True, sinks=sinks)
        return out, torch.autograd.grad(out.sin().sum(), leaves)

    direct, expected = gradients()
    for _ in range(2):  # the second one by plans
        with _Observer() as observer:
            observed, actual = gradients()
        ops = torch.ops
        assert {ops.xla.flash_attn_varlen_op.default, ops.xla_gpu.flash_attn_varlen_bwd.default} <= observer.seen
        assert torch.equal(direct, observed)
        assert all(map(torch.equal, actual, expected))
        direct, expected = gradients()


def test_an_operand_that_changed_since_is_refused(torch_device):
    (q, k, v, starts, _), _ = varlen([(3, 3)], rows_after=0)
    q, k, v, starts = (tensor(x, torch_device) for x in (q, k, v, starts))
    out = xt.flash_attn_varlen(q.requires_grad_(), k, v, starts)
    k.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()


def test_gradients_have_no_gradient(torch_device):
    (q, k, v, starts, _), _ = varlen([(3, 3)], rows_after=0)
    q, k, v, starts = (tensor(x, torch_device) for x in (q, k, v, starts))
    out = xt.flash_attn_varlen(q.requires_grad_(), k, v, starts)
    (dq,) = torch.autograd.grad(out.sin().sum(), q, create_graph=True)
    with pytest.raises(NotImplementedError, match="flash_attn_varlen_bwd"):
        dq.sum().backward()


@pytest.mark.parametrize("torch_device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)], indirect=True)
def test_recomputed_activations_have_the_same_gradients(torch_device):
    (q, k, v, starts, _), _ = varlen([(3, 3), (40, 40)], rows_after=0)
    q, k, v, starts = (tensor(x, torch_device) for x in (q, k, v, starts))
    q.requires_grad_()

    def layer(q):
        return xt.flash_attn_varlen(q, k, v, starts).sin()

    (expected,) = torch.autograd.grad(layer(q).sum(), q)
    (actual,) = torch.autograd.grad(checkpoint(layer, q, use_reentrant=False).sum(), q)
    assert torch.equal(actual, expected)


@pytest.mark.gpu
@pytest.mark.parametrize(("group", "head_dim"), [(6, 128), (8, 96), (12, 64)])
def test_waves_in_both_directions_have_the_same_gradients(group, head_dim):
    # On an H100 or H200 each sequence is a wave of tiles, and every other wave goes through the queries in ascending
    # order. A sequence alone is a first wave. Key blocks contribute to dq in the same order either way.
    length, count, kv_heads = 512, 3, 32
    torch.manual_seed(0)
    shapes = [(kv_heads * group,), (kv_heads,), (kv_heads,), (kv_heads * group,)]
    q, k, v, dout = (torch.randn(count * length, *x, head_dim, device="cuda", dtype=torch.bfloat16) for x in shapes)

    def gradients(rows, count):
        leaves = [x[rows].detach().requires_grad_() for x in (q, k, v)]
        starts = torch.arange(count + 1, device="cuda", dtype=torch.int32) * length
        return torch.autograd.grad(xt.flash_attn_varlen(*leaves, starts, causal=True), leaves, dout[rows])

    together = gradients(slice(None), count)
    for first in range(0, count * length, length):
        rows = slice(first, first + length)
        (dq, *others), (dq_alone, *others_alone) = [x[rows] for x in together], gradients(rows, 1)
        assert torch.equal(dq, dq_alone)
        for actual, expected in zip(others, others_alone, strict=True):
            torch.testing.assert_close(actual, expected, rtol=2**-7, atol=2**-7)


@pytest.mark.parametrize(
    ("backend", "torch_device"),
    [
        pytest.param("inductor", "cpu", marks=pytest.mark.slow),
        pytest.param("inductor", "cuda", marks=pytest.mark.gpu),
        ("aot_eager", "cpu"),
        ("openxla", "xla"),
    ],
    indirect=["torch_device"],
)
def test_a_training_step_compiles_in_one_graph(backend, torch_device):
    (q, k, v, starts, _), _ = varlen([(n, n) for n in (9, 30)], rows_after=0)
    q, k, v, starts = (tensor(x, torch_device) for x in (q, k, v, starts))

    def loss(q, k, v, starts):
        return torch.sin(xt.flash_attn_varlen(q, k, v, starts, causal=True)).sum()

    def step(call):
        leaves = [x.detach().clone().requires_grad_() for x in (q, k, v)]
        call(*leaves, starts).backward()
        return [x.grad.cpu() for x in leaves]

    for actual, expected in zip(step(torch.compile(loss, backend=backend, fullgraph=True)), step(loss), strict=True):
        torch.testing.assert_close(actual, expected, atol=1e-5, rtol=1e-5)


@pytest.mark.gpu
# make_graphed_callables keeps what it ran to warm up while it captures on another stream.
@pytest.mark.filterwarnings("ignore:The AccumulateGrad node's stream")
@pytest.mark.parametrize("by", ["hand", "make_graphed_callables"])
def test_a_captured_training_step_has_the_bits_of_an_eager_one(by):
    starts = torch.tensor([0, 40, 200], device="cuda", dtype=torch.int32)
    sizes = [(200, heads, 64) for heads in (4, 2, 2)]

    def numbers():
        return [torch.randn(size, device="cuda", dtype=torch.bfloat16) for size in sizes]

    def loss(q, k, v):
        return xt.flash_attn_varlen(q, k, v, starts, causal=True).sin().sum()

    def gradients(of, operands):
        return torch.autograd.grad(of(*operands), operands)

    leaves = [x.requires_grad_() for x in numbers()]
    if by == "hand":
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(3):
                gradients(loss, leaves)
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            captured = gradients(loss, leaves)
    else:
        step = torch.cuda.make_graphed_callables(loss, tuple(leaves))
    for _ in range(2):
        operands = numbers()
        expected = gradients(loss, [x.detach().requires_grad_() for x in operands])
        if by == "hand":
            with torch.no_grad():
                torch._foreach_copy_(leaves, operands)
            graph.replay()
            actual = captured
        else:
            actual = gradients(step, [x.requires_grad_() for x in operands])
        for one, other in zip(actual, expected, strict=True):
            assert torch.equal(one, other)


def test_the_call_is_part_of_torch_xlas_graph(xla_device):
    import torch_xla

    (q, k, v, starts, _), _ = varlen([(3, 3), (4, 4)], rows_after=0)
    q, k, v, starts = (tensor(x, xla_device) for x in (q, k, v, starts))
    (actual,) = torch.autograd.grad(xt.flash_attn_varlen(q.requires_grad_(), k, v, starts).sum(), q)
    text = torch_xla._XLAC._get_xla_tensors_hlo([actual])
    assert 'custom_call_target="xla_gpu_flash_attn_varlen_bwd"' in text


def test_the_operator_passes_opcheck():
    (q, k, v, starts, starts_k), _ = varlen([(3, 5), (4, 9)], rows_after=0)
    q, k, v, starts, starts_k = (tensor(x) for x in (q, k, v, starts, starts_k))
    out, lse = xt.flash_attn_varlen(q, k, v, starts, starts_k, return_lse=True)
    arguments = (torch.ones_like(out), q, k, v, out, lse, starts, starts_k, 4, 9, 0.125, True, -1, -1, 0.0)
    torch.library.opcheck(torch.ops.xla_gpu.flash_attn_varlen_bwd.default, arguments)


@pytest.mark.parametrize("has_gradient", [True, False])
def test_the_operator_with_a_bias_passes_opcheck(has_gradient):
    (q, k, v, starts, starts_k), _ = varlen([(3, 5), (4, 9)], rows_after=0)
    q, k, v, starts, starts_k = (tensor(x) for x in (q, k, v, starts, starts_k))
    bias = torch.linspace(-1, 1, 2 * 4 * 9).reshape(2, 1, 4, 9)
    out, lse = xt.flash_attn_varlen(q, k, v, starts, starts_k, bias=bias, return_lse=True)
    arguments = (torch.ones_like(out), q, k, v, out, lse, starts, starts_k, 4, 9, 0.125, True, -1, -1, 0.0)
    options = {"bias": bias, "bias_gradient": has_gradient}
    torch.library.opcheck(torch.ops.xla_gpu.flash_attn_varlen_bias_bwd.default, arguments, options)
    *_, dbias = torch.ops.xla_gpu.flash_attn_varlen_bias_bwd(*arguments, **options)
    assert dbias.shape == (bias.shape if has_gradient else (0,))


@pytest.mark.parametrize(
    ("shape", "options", "text"),
    [
        ({"pages": 4}, {}, "there is no gradient through keys in pages; pass packed keys"),
        ({}, {"k_scale": 2.0}, "of a call with q_scale, k_scale or v_scale"),
        ({"kv_dtype": "float8_e4m3fn", "dtype": "bfloat16"}, {}, "of 8-bit floats; there are gradients of f32"),
        ({}, {"alibi_slopes": torch.ones(8, requires_grad=True)}, "of alibi_slopes; detach them"),
    ],
    ids=["pages", "scales", "8 bits", "slopes"],
)
def test_unsupported_gradients_are_an_error(shape, options, text):
    (q, *rest), lengths = varlen([(3, 3), (4, 4)], rows_after=0, **shape)
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


def test_gradients_of_f32_are_not_rounded():
    (q, k, v, starts, starts_k), _ = varlen([(3, 5), (4, 9)], dtype="bfloat16", rows_after=0)
    q, k, v, starts, starts_k = (tensor(x) for x in (q, k, v, starts, starts_k))
    out, lse = xt.flash_attn_varlen(q, k, v, starts, starts_k, return_lse=True)
    arguments = (torch.ones_like(out), q, k, v, out, lse, starts, starts_k, 4, 9, 0.125, True, -1, -1, 0.0)
    call = torch.ops.xla_gpu.flash_attn_varlen_bwd
    # The fourth result, the gradient of the sinks, is empty here and always f32.
    for rounded, exact in zip(call(*arguments)[:3], call(*arguments, grad_dtype=torch.float32)[:3], strict=True):
        assert (rounded.dtype, exact.dtype) == (torch.bfloat16, torch.float32)
        assert not torch.equal(exact, exact.bfloat16().float())
        # P and dS may be rounded to bf16, too, where the gradients are (docs/semantics.md).
        torch.testing.assert_close(rounded.float(), exact, rtol=2**-7, atol=2**-7)


def test_an_output_of_f32_is_differentiable():
    (q, k, v, starts, _), _ = varlen([(3, 3), (4, 4)], dtype="bfloat16", rows_after=0)
    q, k, v, starts = (tensor(x) for x in (q, k, v, starts))
    leaves = [x.requires_grad_() for x in (q, k, v)]
    wide, narrow = (xt.flash_attn_varlen(*leaves, starts, out_dtype=dtype) for dtype in (torch.float32, None))
    torch.testing.assert_close(wide, narrow.float(), rtol=2**-6, atol=2**-6)
    grads = (torch.autograd.grad(out, leaves, torch.ones_like(out)) for out in (wide, narrow))
    for grad, expected in zip(*grads, strict=True):
        assert grad.dtype == torch.bfloat16
        torch.testing.assert_close(grad, expected, rtol=2**-5, atol=2**-5)
