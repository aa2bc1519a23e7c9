"""The custom calls of flash_attn_varlen and dot_product_attention, forward and backward.

`forward` and `backward` take the same `Options` and `Operands`. An axis of ``jax.vmap`` becomes more sequences
(`_batching`), and XLA may partition a call by heads, and a dense one also by its batch (`_sharding`).
"""

from collections.abc import Sequence

import jax
import jax.numpy as jnp

from .. import _library
from .._operators import operator
from .._options import kv_layout_number
from ._attention import with_workspace
from ._batching import (
    append_empty_sequence,
    can_concat,
    concat_cotangents,
    concat_cu_seqlens,
    concat_operands,
    split_lse,
    split_rows,
    with_batching,
)
from ._call import Array, custom_call
from ._sharding import ShardingRule, drop_absent, partitioned
from ._sharding_dims import CACHE_DIMS, score_dims
from ._varlen_types import Cotangents, Gradients, Operands, Options


def packed(operands: Operands) -> Operands:
    """A dense batch as packed sequences: one per entry of the batch, or its segments."""
    (batch, rows), keys = operands.q.shape[:2], operands.k.shape[1]
    q, k, v = (x.reshape(-1, *x.shape[2:]) for x in operands[:3])
    ranges = {name: x.reshape(-1) for name in ("k_start", "k_end") if (x := getattr(operands, name)) is not None}
    operands = operands._replace(**ranges)
    if operands.cu_seqlens_q is None:
        starts = jnp.arange(batch + 1, dtype=jnp.int32)
        return operands._replace(q=q, k=k, v=v, cu_seqlens_q=starts * rows, cu_seqlens_k=starts * keys)
    starts_q = concat_cu_seqlens(operands.cu_seqlens_q, rows)
    starts_k = concat_cu_seqlens(operands.cu_seqlens_k, keys)
    per_sequence = {
        name: append_empty_sequence(x)
        for name in ("seqused_q", "seqused_k", "leftpad_k", "q_offset")
        if (x := getattr(operands, name)) is not None
    }
    return operands._replace(q=q, k=k, v=v, cu_seqlens_q=starts_q, cu_seqlens_k=starts_k, **per_sequence)


def _bias_sizes(options: Options, operands: Operands) -> _library.BiasSizes | None:
    mask = options.causal, (options.window_left, options.window_right)
    static = options.softcap, operands.alibi_slopes, *mask, options.bias_gradient
    return _library.bias_sizes(operands.bias, operands.q.dtype, *static)


def _forward_ffi_call(options: Options, operands: Operands) -> tuple[Array, Array]:
    if options.dense:
        out, lse = _forward_ffi_call(options._replace(dense=False), packed(operands))
        shape = operands.q.shape[:2]
        return out.reshape(*shape, *out.shape[1:]), lse.reshape(lse.shape[0], *shape)
    q, k, v = operands[:3]
    value_dim = v.shape[-1] if v.ndim > 1 else k.shape[-1]
    heads = k.shape[-2] if k.ndim > 1 else 0
    starts = operands.cu_seqlens_q
    return tuple(
        with_workspace(
            "xla_gpu_flash_attn_varlen",
            operands,
            [
                jax.ShapeDtypeStruct((*q.shape[:-1], value_dim), options.out_dtype),
                jax.ShapeDtypeStruct((*q.shape[1:2], *q.shape[:1]), jnp.float32),
            ],
            operator("xla_gpu_flash_attn_varlen").attributes_of(options),
            kv_heads=heads // 2 if options.kv_layout == kv_layout_number("interleaved") else heads,
            num_seqs=starts.shape[0] - 1 if starts.ndim == 1 else 0,
            bias=_bias_sizes(options, operands),
        )
    )


def _backward_ffi_call(options: Options, operands: Operands, cotangents: Cotangents) -> Gradients:
    if options.dense:
        dout, out = (x.reshape(-1, *x.shape[2:]) for x in (cotangents.dout, cotangents.out))
        lse, dlse = (None if x is None else x.reshape(x.shape[0], -1) for x in (cotangents.lse, cotangents.dlse))
        grads = _backward_ffi_call(options._replace(dense=False), packed(operands), Cotangents(dout, out, lse, dlse))
        dense = (x.reshape(like.shape) for x, like in zip(grads[:3], operands[:3], strict=True))
        return Gradients(*dense, *grads[3:])
    q, k, v = operands[:3]
    dout, out, lse, dlse = cotangents
    starts = operands.cu_seqlens_q
    sequences = [starts, operands.cu_seqlens_k, operands.seqused_k, operands.seqused_q, operands.leftpad_k]
    sinks = operands.sinks
    results = [jax.ShapeDtypeStruct(x.shape, jnp.float32 if options.f32_gradients else x.dtype) for x in (q, k, v)]
    results.append(None if sinks is None else jax.ShapeDtypeStruct(sinks.shape, jnp.float32))
    target = "xla_gpu_flash_attn_varlen_bwd"
    heads, dims = (q.shape[1], k.shape[1]), (q.shape[2], v.shape[2])
    size = _library.workspace(
        target, *heads, *dims, q.dtype, False, q.shape[0], starts.shape[0] - 1, _bias_sizes(options, operands)
    )
    results.append(jax.ShapeDtypeStruct((size,), jnp.uint8))
    if options.bias_gradient:
        bias = operands.bias
        results.append(jax.ShapeDtypeStruct(bias.shape, jnp.float32 if options.f32_gradients else bias.dtype))
    grads = custom_call(
        target,
        [dout, q, k, v, out, lse, *sequences, operands.alibi_slopes, sinks, dlse, *operands[14:]],
        results,
        operator(target).attributes_of(options),
    )
    dbias = grads[-1] if options.bias_gradient else None
    return Gradients(*grads[:3], None if sinks is None else grads[3], dbias)


# ---------- sharding rules


def _operand_dims(options: Options, operands: Operands) -> tuple[str, ...]:
    """The dims of those operands that are not None."""
    if options.dense:
        k, v = "bshd", "bshe"
    elif options.kv_layout in CACHE_DIMS:
        k, v = CACHE_DIMS[options.kv_layout], "."
    else:
        k, v = ("Pshd", "Pshe") if operands.block_table is not None else ("shd", "she")
    per_sequence = "b" if options.dense else "."
    starts = "."
    if options.dense and operands.cu_seqlens_q is not None:
        starts = per_sequence = "b."
    dims = Operands("btHd" if options.dense else "tHd", k, v, starts, starts, *[per_sequence] * 5)
    dims = dims._replace(block_table=f"{per_sequence}.")
    rows = "bt" if options.dense else "t"
    bias = _bias_dims(options, operands.bias)
    return drop_absent((*dims[:9], *score_dims(*operands[9:14]), per_sequence, rows, rows, bias), operands)


def _bias_dims(options: Options, bias: Array | None) -> str:
    """The letters of a bias; a dimension of 1, which all sequences or heads share, is replicated."""
    batch, heads = (1, 1) if bias is None or bias.ndim != 4 else bias.shape[:2]
    return f"{'b' if options.dense and batch != 1 else '.'}{'H' if heads != 1 else '.'}.."


def _result_dims(options: Options) -> tuple[str, str]:
    return ("btHe", "Hbt") if options.dense else ("tHe", "Ht")


def _free_dims(options: Options) -> str:
    return "b" if options.dense else ""


def _forward_sharding_rule(options: Options, operands: Operands) -> ShardingRule:
    return ShardingRule(_operand_dims(options, operands), _result_dims(options), _free_dims(options))


def _backward_sharding_rule(options: Options, operands: Operands, cotangents: Cotangents) -> ShardingRule:
    dims, (out, lse) = _operand_dims(options, operands), _result_dims(options)
    cotangent_dims = drop_absent((out, out, lse, lse), cotangents)
    grad_dims = dims[:3] if operands.sinks is None else (*dims[:3], "H")
    if options.bias_gradient:
        grad_dims += (_bias_dims(options, operands.bias),)
    return ShardingRule(dims + cotangent_dims, grad_dims, _free_dims(options), summed=(3, 4))


# ---------- batching rules


def _forward_batching_rule(
    options: Options, axis_size: int, in_batched: Sequence[Operands], operands: tuple[Operands]
) -> tuple | None:
    if not can_concat(options, *in_batched, *operands):
        return None
    concat = concat_operands(options, axis_size, *in_batched, *operands)
    return options, (concat,), lambda out, lse: (split_rows(out, axis_size), split_lse(lse, axis_size))


def _backward_batching_rule(
    options: Options,
    axis_size: int,
    in_batched: tuple[Operands, Cotangents],
    arguments: tuple[Operands, Cotangents],
) -> tuple | None:
    (operands_batched, cotangents_batched), (operands, cotangents) = in_batched, arguments
    # One call would sum the gradients of the sinks, and of a bias, over the sequences of all calls.
    if operands.sinks is not None or options.bias_gradient or not can_concat(options, operands_batched, operands):
        return None
    concat = concat_operands(options, axis_size, operands_batched, operands)
    concat = concat, concat_cotangents(axis_size, cotangents_batched, cotangents)
    return options, concat, lambda *grads: tuple(split_rows(x, axis_size) for x in grads)


_forward = with_batching(
    partitioned("xla_gpu_flash_attn_varlen", _forward_ffi_call, _forward_sharding_rule), _forward_batching_rule
)
_backward = with_batching(
    partitioned(
        "xla_gpu_flash_attn_varlen_bwd",
        lambda *x: tuple(jax.tree.leaves(_backward_ffi_call(*x))),
        _backward_sharding_rule,
        with_f32_gradients=lambda options: options._replace(f32_gradients=True),
    ),
    _backward_batching_rule,
)


def forward(options: Options, operands: Operands) -> tuple[Array, Array]:
    """`out` and `softmax_lse`."""
    return _forward(options, operands)


def backward(options: Options, operands: Operands, cotangents: Cotangents) -> Gradients:
    """The gradients of q, k, v, of the sinks where there are sinks, and of the bias if the options ask for it."""
    grads = _backward(options, operands, cotangents)
    dbias = grads[-1] if options.bias_gradient else None
    return Gradients(*grads[:3], None if operands.sinks is None else grads[3], dbias)
