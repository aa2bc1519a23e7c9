"""The calls behind flash_attn_varlen and dot_product_attention: forward and backward, batched, and cut up over devices.

`forward` and `backward` take the same `Options` and `Operands`. An axis that ``jax.vmap`` adds is folded into the batch
(`_fold`), and XLA may cut a call by heads, and where there is a batch by that (`_partition`).
"""

from collections.abc import Sequence

import jax
import jax.numpy as jnp

from .. import _library
from .._operators import operator
from .._options import kv_layout_number
from ._attention import with_workspace
from ._call import Array, custom_call
from ._fold import folded, folded_cotangents, is_foldable, unfolded, unfolded_lse, with_vmap
from ._partition import Letters, partitioned, present
from ._varlen_types import Cotangents, Gradients, Operands, Options
from ._words import PAGES, of_scores


def packed(operands: Operands) -> Operands:
    """A dense batch as a packed one."""
    (batch, rows), keys = operands.q.shape[:2], operands.k.shape[1]
    starts = jnp.arange(batch + 1, dtype=jnp.int32)
    q, k, v = (x.reshape(-1, *x.shape[2:]) for x in operands[:3])
    return operands._replace(q=q, k=k, v=v, cu_seqlens_q=starts * rows, cu_seqlens_k=starts * keys)


def _run_forward(options: Options, operands: Operands) -> tuple[Array, Array]:
    if options.dense:
        out, lse = _run_forward(options._replace(dense=False), packed(operands))
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
        )
    )


def _run_backward(options: Options, operands: Operands, cotangents: Cotangents) -> Gradients:
    if options.dense:
        dout, out = (x.reshape(-1, *x.shape[2:]) for x in (cotangents.dout, cotangents.out))
        lse, dlse = (None if x is None else x.reshape(x.shape[0], -1) for x in (cotangents.lse, cotangents.dlse))
        found = _run_backward(options._replace(dense=False), packed(operands), Cotangents(dout, out, lse, dlse))
        shaped = (x.reshape(like.shape) for x, like in zip(found[:3], operands[:3], strict=True))
        return Gradients(*shaped, found.dsinks)
    q, k, v = operands[:3]
    dout, out, lse, dlse = cotangents
    asked = [operands.cu_seqlens_q, operands.cu_seqlens_k, operands.seqused_k, operands.seqused_q, operands.leftpad_k]
    sinks = operands.sinks
    results = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in (q, k, v)]
    results.append(None if sinks is None else jax.ShapeDtypeStruct(sinks.shape, jnp.float32))
    target = "xla_gpu_flash_attn_varlen_bwd"
    heads, dims = (q.shape[1], k.shape[1]), (q.shape[2], v.shape[2])
    size = _library.workspace(target, *heads, *dims, q.dtype, False, q.shape[0], asked[0].shape[0] - 1)
    found = custom_call(
        target,
        [dout, q, k, v, out, lse, *asked, operands.alibi_slopes, sinks, dlse],
        [*results, jax.ShapeDtypeStruct((size,), jnp.uint8)],
        operator(target).attributes_of(options),
    )
    return Gradients(*found[:3], None if sinks is None else found[3])


# ---------- letters of dimensions, see _partition


def _words(options: Options, operands: Operands) -> tuple[str, ...]:
    """Of those operands that are there."""
    if options.dense:
        k, v = "bshd", "bshe"
    elif options.kv_layout in PAGES:
        k, v = PAGES[options.kv_layout], "."
    else:
        k, v = ("Pshd", "Pshe") if operands.block_table is not None else ("shd", "she")
    of_sequences = "b" if options.dense else "."
    words = Operands("btHd" if options.dense else "tHd", k, v, ".", ".", *[of_sequences] * 5)
    words = words._replace(block_table=f"{of_sequences}.")
    return present((*words[:9], *of_scores(*operands[9:])), operands)


def _result_words(options: Options) -> tuple[str, str]:
    return ("btHe", "Hbt") if options.dense else ("tHe", "Ht")


def _free(options: Options) -> str:
    return "b" if options.dense else ""


def _forward_letters(options: Options, operands: Operands) -> Letters:
    return Letters(_words(options, operands), _result_words(options), _free(options))


def _backward_letters(options: Options, operands: Operands, cotangents: Cotangents) -> Letters:
    words, (out, lse) = _words(options, operands), _result_words(options)
    of_cotangents = present((out, out, lse, lse), cotangents)
    of_results = words[:3] if operands.sinks is None else (*words[:3], "H")
    return Letters(words + of_cotangents, of_results, _free(options))


def _fold_forward(options: Options, size: int, which: Sequence[Operands], operands: tuple[Operands]) -> tuple | None:
    if not is_foldable(options, *which, *operands):
        return None
    together = folded(options, size, *which, *operands)
    return options, (together,), lambda out, lse: (unfolded(out, size), unfolded_lse(lse, size))


def _fold_backward(
    options: Options,
    size: int,
    which: tuple[Operands, Cotangents],
    arguments: tuple[Operands, Cotangents],
) -> tuple | None:
    (batched, of_cotangents), (operands, cotangents) = which, arguments
    # One call adds up the gradients of the sinks over all that it is given.
    if operands.sinks is not None or not is_foldable(options, batched, operands):
        return None
    together = folded(options, size, batched, operands), folded_cotangents(size, of_cotangents, cotangents)
    return options, together, lambda *found: tuple(unfolded(x, size) for x in found)


_forward = with_vmap(partitioned(_run_forward, _forward_letters), _fold_forward)
_backward = with_vmap(
    partitioned(lambda *x: tuple(jax.tree.leaves(_run_backward(*x))), _backward_letters), _fold_backward
)


def forward(options: Options, operands: Operands) -> tuple[Array, Array]:
    """`out` and `softmax_lse`."""
    return _forward(options, operands)


def backward(options: Options, operands: Operands, cotangents: Cotangents) -> Gradients:
    """The gradients of q, k, v, and of the sinks if there are sinks."""
    found = _backward(options, operands, cotangents)
    return Gradients(*found[:3], None if operands.sinks is None else found[3])
