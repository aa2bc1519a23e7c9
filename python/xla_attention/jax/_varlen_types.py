"""What a call of flash_attn_varlen or dot_product_attention consists of."""

from typing import NamedTuple

import numpy as np

from .._options import kv_layout_number
from ._call import Array


class Options(NamedTuple):
    """What is known when a program is compiled; the names of the targets' attributes, and more."""

    batch_invariant: np.bool_
    causal: np.bool_
    deterministic: np.bool_
    kv_layout: np.int64
    max_seqlen_k: np.int64
    max_seqlen_q: np.int64
    softcap: np.float32
    softmax_scale: np.float32
    top_left: np.bool_
    window_left: np.int64
    window_right: np.int64
    out_dtype: np.dtype
    dense: bool  # q, k and v have a batch of sequences of one length each, and there are no cu_seqlens


class Operands(NamedTuple):
    """Of the forward call, in its order; None is left out."""

    q: Array  # [Tq, Hq, D]; dense: [B, Tq, Hq, D]
    k: Array  # [Tk, Hkv, D], or pages; dense: [B, Tk, Hkv, D]
    v: Array
    cu_seqlens_q: Array | None = None
    cu_seqlens_k: Array | None = None
    seqused_k: Array | None = None
    block_table: Array | None = None
    seqused_q: Array | None = None
    leftpad_k: Array | None = None
    alibi_slopes: Array | None = None
    sinks: Array | None = None
    q_scale: Array | None = None
    k_scale: Array | None = None
    v_scale: Array | None = None


def keys_are_in_pages(options: Options, operands: Operands) -> bool:
    """In one buffer or in two."""
    return operands.block_table is not None or options.kv_layout != kv_layout_number(None)


class Cotangents(NamedTuple):
    """What `backward` needs beside the operands: the results of `forward`, and their gradients."""

    dout: Array  # as out
    out: Array  # [Tq, Hq, Dv]; dense: [B, Tq, Hq, Dv]
    lse: Array  # [Hq, Tq]; dense: [Hq, B, Tq]
    dlse: Array | None  # as lse


class Gradients(NamedTuple):
    """Of q, k, v and the sinks, if there are sinks."""

    dq: Array
    dk: Array
    dv: Array
    dsinks: Array | None
