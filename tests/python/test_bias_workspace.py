"""The workspace of calls with a bias, which has room for a copy where kernels make one."""

import re

import jax
import jax.numpy as jnp
import pytest
import torch

from xla_attention import _library
from xla_attention.jax import dot_product_attention
from xla_attention.torch import _flash_attn_varlen, _flash_attn_varlen_bwd

HEADS, LENGTH, HEAD_DIM = 12, 197, 128
COPY = 256 + 2 * 2 * HEADS * LENGTH * 200  # of [2, HEADS, LENGTH, LENGTH] in 16 bits
SHARED_COPY = 256 + 2 * HEADS * LENGTH * 200  # of [1, HEADS, LENGTH, LENGTH]
DS = 256 + 2 * 2 * HEADS * LENGTH * 208  # of as many pairs


def workspaces(bias_shape, bias_dtype=jnp.bfloat16, **options):
    """The bytes of the workspaces of the forward call and of the gradients in StableHLO."""
    q = jax.ShapeDtypeStruct((2, LENGTH, HEADS, HEAD_DIM), jnp.bfloat16)
    bias = jax.ShapeDtypeStruct(bias_shape, bias_dtype)

    def loss(q, k, v, bias):
        return dot_product_attention(q, k, v, bias, **options).astype(jnp.float32).sum()

    text = jax.jit(jax.grad(loss, (0, 3))).lower(q, q, q, bias).as_text()
    sizes = re.findall(r"stablehlo.custom_call @xla_gpu_flash_attn_varlen(_bwd)?\(.*tensor<(\d+)xui8>", text)
    return {gradient: int(size) for gradient, size in sizes}


def test_jax_has_room_for_the_copy_of_a_bias_in_rows_of_any_length():
    plain = workspaces((2, HEADS, LENGTH, LENGTH), jnp.float32)
    own, shared = workspaces((2, HEADS, LENGTH, LENGTH)), workspaces((1, HEADS, LENGTH, LENGTH))
    assert {kind: own[kind] - plain[kind] for kind in own} == {"": 0, "_bwd": COPY}
    assert {kind: shared[kind] - plain[kind] for kind in own} == {"": SHARED_COPY, "_bwd": SHARED_COPY + DS}
    causal = workspaces((2, HEADS, LENGTH, LENGTH), is_causal=True)
    assert causal == plain


def test_there_is_room_for_ds_of_a_gradient_up_to_a_limit():
    def size(rows, shape, has_gradient=True, is_f32=False, head_dim=HEAD_DIM):
        static = ("xla_gpu_flash_attn_varlen_bwd", HEADS, HEADS, head_dim, head_dim, 16, False)
        bias = _library.BiasSizes(shape, False, has_gradient, is_f32)
        return _library.workspace(*static, rows, 4, bias) - _library.workspace(*static, rows, 4)

    room = 256 + 2 * HEADS * 4096 * 1032
    assert size(4096, (1, HEADS, 1024, 1024)) == room
    assert size(4096, (4, HEADS, 1024, 1024)) == 0  # the gradient itself is dS
    assert size(4096, (1, HEADS, 1024, 1024), has_gradient=False) == 0
    # One of f32 beside 16-bit operands is copied if each row has four uses, and dS is stored without its gradient too.
    copy = 256 + HEADS * 1021 * 1024 * 4
    for rows, copied in ((4 * 1021 - 1, 0), (4 * 1021, copy)):
        assert size(rows, (1, HEADS, 1021, 1021), is_f32=True) == 256 + 2 * HEADS * rows * 1032 + copied
    assert size(4096, (4, HEADS, 1024, 1024), has_gradient=False, is_f32=True) == room
    assert size(4096, (4, HEADS, 1024, 1024), is_f32=True) == 0
    assert size(4096, (4, HEADS, 1024, 1024), is_f32=True, head_dim=136) == room
    assert size(4 * 4096, (1, HEADS, 4096, 4096)) == 0
    (rows,) = jax.export.symbolic_shape("r")
    assert size(rows, (1, HEADS, 1024, 1024)) == 0


@pytest.mark.parametrize("softcap", [0.0, 2.0])
def test_torch_has_room_for_the_copy_of_a_bias_in_rows_of_any_length(softcap):
    q = torch.zeros((2 * LENGTH, HEADS, HEAD_DIM), dtype=torch.bfloat16)
    cu = torch.tensor([0, LENGTH, 2 * LENGTH], dtype=torch.int32)
    options = (LENGTH, LENGTH, 0.125, False, -1, -1, softcap)
    own = torch.zeros((2, HEADS, LENGTH, LENGTH), dtype=torch.bfloat16)

    def size(call):
        (size,) = call.workspace.result(call.target).shape
        return size

    def sizes(bias):
        lse = torch.zeros((HEADS, 2 * LENGTH))
        forward = _flash_attn_varlen._lower(q, q, q, cu, cu, *options, bias=bias)
        backward = _flash_attn_varlen_bwd._lower(q, q, q, q, q, lse, cu, cu, *options, bias=bias)
        return size(forward), size(backward)

    def room(bias):
        return tuple(size - plain for size, plain in zip(sizes(bias), sizes(None), strict=True))

    assert room(own) == ((0, COPY) if softcap == 0.0 else (0, 0))
    assert room(own[:1]) == ((SHARED_COPY, SHARED_COPY) if softcap == 0.0 else (0, 0))


def test_a_symbolic_number_of_rows_is_counted_and_one_of_keys_is_not():
    static = ("xla_gpu_flash_attn_varlen", HEADS, HEADS, HEAD_DIM, HEAD_DIM, "bfloat16", False)
    rows, keys = jax.export.symbolic_shape("r, k")

    def size(bias_shape):
        return _library.workspace(*static, 2 * LENGTH, 2, _library.BiasSizes(bias_shape, False))

    plain = _library.workspace(*static, 2 * LENGTH, 2)
    assert size((1, HEADS, rows, LENGTH)) == plain + 256 + 400 * (HEADS * rows)
    assert size((1, HEADS, LENGTH, keys)) == plain
