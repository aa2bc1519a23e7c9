"""torch.ops.xla.flash_attn_varlen_op on every device that torch has here, against the oracle."""

import numpy as np
import pytest

import xla_attention.torch as xt
from batches import varlen
from oracle import assert_flash_attn_varlen
from torch_side import array, tensor, torch

MIXED = [(33, 33), (1, 100), (5, 70), (0, 9), (3, 0), (9, 4)]


def test_8_bit_queries_have_the_output_that_is_asked_for(torch_device):
    operands, options = varlen(MIXED, dtype="float8_e4m3fn", pages=16)
    arguments = [tensor(x, torch_device) for x in operands]
    given = {name: tensor(x, torch_device) for name, x in options.items()}
    for dtype in (None, torch.bfloat16, torch.float16):
        out = xt.flash_attn_varlen(*arguments, **given, causal=True, out_dtype=dtype)
        assert out.dtype == (dtype or torch.bfloat16)
        numbers = (None if x is None else np.asarray(x) for x in operands)
        meant = {name: np.asarray(x) for name, x in options.items()}
        assert_flash_attn_varlen(array(out), None, *numbers, **meant, causal=True)


def test_the_call_of_seed_003_over_pages(torch_device):
    """vLLM's way: `seqused_k`, `block_table`, and starts of keys that nobody reads."""
    (q, k, v, starts, _), options = varlen(MIXED, dtype="float16", pages=16)
    arguments = [tensor(x, torch_device) for x in (q, k, v, starts)]
    lens, table = (tensor(options[name], torch_device) for name in ("seqused_k", "block_table"))
    dummy = torch.zeros(1, dtype=torch.int32, device=torch_device)
    out, softmax_lse = torch.ops.xla.flash_attn_varlen_op(
        *arguments, dummy, 33, 100, 0.125, is_causal=True, window_left=-1, window_right=-1, softcap=0.0,
        seqused_k=lens, block_table=table,
    )  # fmt: skip
    numbers = (*(np.asarray(x) for x in (q, k, v, starts)), None)
    meant = {name: np.asarray(x) for name, x in options.items()}
    assert_flash_attn_varlen(array(out), array(softmax_lse), *numbers, **meant, causal=True, softmax_scale=0.125)


def test_halves_of_one_buffer_are_read_where_they_lie():
    (q, kv, _, starts, _), options = varlen(MIXED, pages=16, kv_layout="stacked")
    del options["kv_layout"]
    q, kv, starts = tensor(q), tensor(kv), tensor(starts)
    wide = torch.stack([kv, kv], dim=-2).flatten(-2)  # rows twice as long, of which the first half is meant
    options = {name: tensor(x) for name, x in options.items()}
    wanted = xt.flash_attn_varlen(q, kv[0], kv[1], starts, **options, causal=True)
    k, v = wide[0, ..., : q.shape[-1]], wide[1, ..., : q.shape[-1]]
    assert not k.is_contiguous()
    assert torch.equal(xt.flash_attn_varlen(q, k, v, starts, **options, causal=True), wanted)


@pytest.mark.parametrize("backend", ["inductor", "openxla"])
def test_it_compiles_in_one_graph(backend, request):
    device = request.getfixturevalue("xla_device") if backend == "openxla" else "cpu"
    (q, k, v, starts, _), _ = varlen([(n, n) for n in (9, 30)], rows_after=0)
    operands = [tensor(x, device) for x in (q, k, v, starts)]

    def forward(q, k, v, cu_seqlens):
        out, lse = torch.ops.xla.flash_attn_varlen_op(
            q, k, v, cu_seqlens, cu_seqlens, 30, 30, q.shape[-1] ** -0.5, True, -1, -1, 0.0
        )
        return torch.sin(out), lse

    for found, wanted in zip(
        torch.compile(forward, backend=backend, fullgraph=True)(*operands), forward(*operands), strict=True
    ):
        torch.testing.assert_close(found.cpu(), wanted.cpu(), atol=1e-6, rtol=1e-6)


def test_torch_checks_the_operator():
    (q, k, v, starts, starts_k), _ = varlen([(3, 5), (4, 9)], rows_after=0)
    arguments = tuple(tensor(x) for x in (q, k, v, starts, starts_k))
    torch.library.opcheck(torch.ops.xla.flash_attn_varlen_op.default, (*arguments, 4, 9, 0.125, True, -1, -1, 0.0))


@pytest.mark.parametrize(
    ("changes", "error", "text"),
    [
        ({"kv_layout": "tiled"}, ValueError, "v is a tensor, expected None"),
        ({"v": None}, ValueError, "v is None, expected a tensor"),
        ({"v": None, "kv_layout": "tiled"}, ValueError, "kv_layout is 'tiled', expected 'interleaved'"),
        ({"window": (-2, 0)}, ValueError, "window_left is -2"),
        ({"window": 4}, ValueError, r"window is 4, expected \(left, right\)"),
        ({"window": (1, 2, 3)}, ValueError, r"window is \(1, 2, 3\), expected"),
        ({"window": (1.5, 2)}, ValueError, r"window is \(1.5, 2\), expected \(left, right\), two integers"),
        ({"dropout_p": 0.1}, NotImplementedError, "dropout_p is 0.1, and no kernel drops weights; pass 0.0"),
        ({"max_seqlen_q": -1}, ValueError, "max_seqlen_q is -1"),
        ({"block_table": torch.zeros(2, 1, dtype=torch.int32)}, ValueError, "a block_table needs seqused_k"),
    ],
    ids=lambda value: "+".join(value) if isinstance(value, dict) else "",
)
def test_mistakes_are_refused_before_anything_runs(changes, error, text):
    (q, k, v, starts, _), _ = varlen([(3, 3), (4, 4)])
    arguments = {"q": tensor(q), "k": tensor(k), "v": tensor(v), "cu_seqlens_q": tensor(starts), **changes}
    with pytest.raises(error, match=text):
        xt.flash_attn_varlen(**arguments)


def test_no_dropout_is_taken():
    (q, k, v, starts, _), _ = varlen([(3, 3), (4, 4)])
    operands = [tensor(x) for x in (q, k, v, starts)]
    assert torch.equal(xt.flash_attn_varlen(*operands, dropout_p=0.0), xt.flash_attn_varlen(*operands))
