"""Options, operands, cotangents and gradients of flash_attn_varlen and dot_product_attention."""

from typing import NamedTuple

import numpy as np

from .._options import kv_layout_number
from ._call import Array


class Options(NamedTuple):
    """The compile-time constants: the attributes of the forward and backward targets, by name, and three more."""

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
    dense: bool  # q, k and v have a batch dimension
    f32_gradients: bool = False  # of q, k, v and the bias; otherwise they have their dtypes
    bias_gradient: bool = False  # whether `backward` computes it


class Operands(NamedTuple):
    """The operands of the forward target, in its order; None for one that is left out.

    A dense batch has no cu_seqlens and lengths ``[B]``; with M segments in each entry it has ``cu_seqlens[B, M + 1]``,
    which count from the entry's own first row, and lengths ``[B, M]``.
    """

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
    q_offset: Array | None = None
    k_start: Array | None = None  # [Tq]; dense: [B, Tq]
    k_end: Array | None = None
    bias: Array | None = None  # [B or 1, Hq or 1, Sq, Sk]; not with segments


def keys_are_in_pages(options: Options, operands: Operands) -> bool:
    """Whether the keys are paged, in one buffer or in two."""
    return operands.block_table is not None or options.kv_layout != kv_layout_number(None)


class Cotangents(NamedTuple):
    """What `backward` needs beside the operands: the results of `forward` and their cotangents."""

    dout: Array  # shape of out
    out: Array  # [Tq, Hq, Dv]; dense: [B, Tq, Hq, Dv]
    lse: Array  # [Hq, Tq]; dense: [Hq, B, Tq]
    dlse: Array | None  # shape of lse; None for zeros


class Gradients(NamedTuple):
    """The gradients of q, k, v, of the sinks where there are sinks, and of the bias with `Options.bias_gradient`."""

    dq: Array
    dk: Array
    dv: Array
    dsinks: Array | None
    dbias: Array | None = None
